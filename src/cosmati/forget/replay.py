"""Replay: the run from before first contact on, with tombstones in place of the content, every decision anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cosmati.forget.ablation import Wrap
from cosmati.forget.past_run import FORGOTTEN, Gone, PastRun, Start, policy_changes_of
from cosmati.forget.succession import Succession, note_succeeded
from cosmati.train.other_source import of_another_source
from cosmati.train.run.result import RunResult
from cosmati.train.trainer import Trainer


class Make(Protocol):
    """Makes the run's trainer anew."""

    def __call__(self, wrap: Wrap, folder: Path | None, /, **config: object) -> Trainer:
        """Return it.

        Args:
            wrap: puts another source around the run's own.
            folder: of the run; None keeps nothing.
            config: settings of `RunConfig` that differ; only an ablation has any.
        """
        ...


def replay(
    run: PastRun,
    make: Make,
    out: Path,
    start: Start | None,
    told: Mapping[str, Any],
    request: Mapping[str, Any],
    gone: Gone,
) -> RunResult:
    """Train the run that never had the content, to the end of its budget; after a kill, go on with it.

    Args:
        run: that had it.
        make: its trainer, over another source.
        out: the new run's folder.
        start: where it begins; None where `out` is there already.
        told: what is forgotten, for the ledger.
        request: what `out` keeps of it.
        gone: what has tombstones in its place: what's forgotten now, and what was before.

    Raises:
        ForgetError: `out` is another run's.
    """
    trainer = make(lambda source: gone.of(source, run.salt), out)
    ranks = trainer.assembly.ranks
    if ranks.rank == 0:
        if out.exists():
            note_succeeded(run.folder, out)  # A kill may have come between the folder's place and the note.
        elif start is not None:
            made = _prepared(run, trainer, out, start, told)
            made.publish(request, gone)
    ranks.barrier()
    return trainer.fit()


def _prepared(run: PastRun, trainer: Trainer, out: Path, start: Start, told: Mapping[str, Any]) -> Succession:
    digest, last = trainer.prepared.data_digest, run.ledger.tables[-1]
    if last.withdrawn != start.tables.withdrawn:
        # What is rejected stays so in every later entry, those of steps that are taken anew too.
        start = replace(start, tables=last)
    elif coming := policy_changes_of(last):
        # What the run took up on the way it takes up again, at the steps that its ledger says.
        tables = replace(start.tables, details={**start.tables.details, "policy_changes": coming})
        start = replace(start, tables=tables)
    if start.checkpoint is not None:
        checkpoint = of_another_source(start.checkpoint, trainer.prepared.identity)
        start = replace(start, checkpoint=checkpoint)
    made = Succession(run, out)
    made.keep_record(start.step)
    if start.checkpoint is not None:
        made.keep_checkpoint(start.checkpoint)
    was = dict(start.tables.entry.commitments).get("data", b"").hex()
    changes = [["data", was, digest], [FORGOTTEN, "", str(told["asked"])]]
    made.amend(start, told, changes, digest)
    return made
