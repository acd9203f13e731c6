"""Ablation with repair, as a deletion does it: a run of its own, which remembers what was asked and what is gone.

It doesn't succeed the first run: that one's ledger goes on where it ends, so that a replay can still be asked of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import ForgetError, PlanError
from cosmati.forget.ablation import REPORT, Wrap, ablate
from cosmati.forget.asked import ToForget
from cosmati.forget.making import Make
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.succession import OF_ROWS, draft_folder, publish_folder
from cosmati.records.joint_classes import members_of
from cosmati.train.trainer import Trainer


def single_classes(asked: ToForget, names: Collection[str]) -> tuple[str, ...]:
    """Return the classes that are asked for, each by itself where rows belong to several."""
    return tuple(sorted({one for name in names for one in members_of(name) if asked.has_any([one])}))


def repair(
    run: PastRun,
    classes: Collection[str],
    make: Make,
    out: Path,
    num_steps: int,
    request: Mapping[str, Any],
    gone: Gone,
) -> bool:
    """Ablate what classes taught, and repair the rest; after a kill, go on with it.

    Args:
        run: that has the content.
        classes: whose regions.
        make: makes the run's trainer.
        out: the repaired run's folder.
        num_steps: of the repair.
        request: what `out` keeps of it.
        gone: what has tombstones in its place: what's forgotten now, and was before.

    Returns:
        Whether it's over; somebody may have stopped it.

    Raises:
        ForgetError: no region separates the classes, the losses can't be measured, or `out` is another run's.
    """
    if (out / REPORT).exists():
        return True

    def made(wrap: Wrap, **config: Any) -> Trainer:  # noqa: ANN401  (settings of `RunConfig`)
        folder = config.pop("run_folder")
        if folder is None:
            return make(lambda source: wrap(run.gone.of(source, run.salt)), None, **config)
        if not out.exists():
            publish_folder(draft_folder(run, out, OF_ROWS), out, request, gone, run.folder)
        # The same tombstones as `wrap` puts, under the run's salt, as whoever asks the repaired run makes them.
        return make(lambda source: gone.of(source, run.salt), folder, **config)

    try:
        return ablate(run.folder, made, tuple(classes), out, repair_steps=num_steps) is not None
    except PlanError as error:
        raise ForgetError(str(error)) from error
