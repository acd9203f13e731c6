"""Drop: what is a class's own is left out of the final weights and their averages; all that the class taught is there.

The result is, bit for bit, the weights and averages of a run that never had such modules nor saw the content: that's
what `isolated(class, region)` promises (ADR 22). Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from cosmati.errors import ForgetError
from cosmati.forget.past_run import FORGOTTEN, Gone, PastRun, Start
from cosmati.forget.planning import own_regions
from cosmati.forget.succession import Succession, note_succeeded
from cosmati.train.run.checkpoints import Checkpoint


def drop(
    run: PastRun,
    classes: tuple[str, ...],
    out: Path,
    told: Mapping[str, Any],
    request: Mapping[str, Any],
    gone: Gone,
) -> None:
    """Write the successor of a run without what is some classes' own; an interrupted call is made again.

    Args:
        run: that has it.
        classes: that are isolated.
        out: the new run's folder.
        told: what is forgotten, for the ledger.
        request: what `out` keeps of it.
        gone: what is forgotten now, and was before.

    Raises:
        ForgetError: `out` is another run's. CheckpointError: the newest checkpoint isn't whole, or isn't the run's.
    """
    if out.exists():
        note_succeeded(run.folder, out)
        return
    _, checkpoint = run.final_checkpoint()
    dropped = without_own(checkpoint, parameters_of(run, own_regions(run, classes)), classes)
    made = Succession(run, out)
    made.keep_record(dropped.step, whole=True)
    made.keep_checkpoint(dropped)
    start = Start(dropped.step, dropped, run.ledger.tables[-1])
    made.amend(start, told, [[FORGOTTEN, "", str(told["asked"])]])
    made.publish(request, gone)


def parameters_of(run: PastRun, pairs: Collection[tuple[str, str]]) -> frozenset[str]:
    """Return the names of all parameters in regions, by what the ledger says of these."""
    tables, regions = run.ledger.tables[-1], {region for _, region in pairs}
    named = tables.details.get("parameters", [])
    return frozenset(
        name for region, names in zip(tables.regions, named, strict=True) if region in regions for name in names
    )


def without_own(checkpoint: Checkpoint, own: Collection[str], classes: Collection[str]) -> Checkpoint:
    """Return a checkpoint's weights, buffers and averages but for what is classes' own.

    Args:
        checkpoint: of the run.
        own: names of the parameters.
        classes: whose.

    Raises:
        ForgetError: the checkpoint has no such parameters.
    """
    inside = tuple({prefix for name in own for prefix in _modules_of(name, classes)})

    def is_own(name: str) -> bool:
        return name in own or name.startswith(inside)

    if not any(map(is_own, checkpoint.model)):
        msg = (
            f"The checkpoint of step {checkpoint.step} has no parameters of {', '.join(classes)}: they're gone already."
        )
        raise ForgetError(msg)
    model = {name: value for name, value in checkpoint.model.items() if not is_own(name)}
    state: dict[str, Tensor] = {}
    for name, value in checkpoint.state.items():
        head, average, of = name.partition("/average/")
        if average and head.startswith("method/") and not is_own(of):
            state[name] = value
    facts = {**checkpoint.facts, "optimizers": [], "withdrawn": checkpoint.facts.get("withdrawn", [])}
    kept = {name: value for name, value in checkpoint.facts["identity"].items() if not _is_of_model(name, is_own)}
    return replace(checkpoint, model=model, state=state, facts={**facts, "identity": kept})


def _is_of_model(name: str, is_own: Any) -> bool:  # noqa: ANN401  (a function of names)
    """Say whether a fact is of a part of the model that isn't there any more."""
    head, _, rest = name.partition(".")
    kind, _, place = rest.partition(".")
    return (
        head == "model"
        and kind in ("modules", "options", "parameters", "buffers", "contents")
        and (is_own(place) or is_own(f"{place}."))
    )


def _modules_of(name: str, classes: Collection[str]) -> list[str]:
    """Return the modules of these classes' own in which a parameter lies, as beginnings of names, for buffers too."""
    found = []
    for one in classes:
        for key in (one, f"{one}_"):
            mark = f"isolated.{key}."
            place = name.find(mark)
            if place >= 0 and (place == 0 or name[place - 1] == "."):
                found.append(name[: place + len(mark)])
    return found
