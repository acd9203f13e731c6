"""Replay: the run from before first contact on, with tombstones in place of the content, every decision anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmati.forget.ablation import Wrap
from cosmati.forget.legs import Leg, legs_after, legs_of
from cosmati.forget.making import Make
from cosmati.forget.past_run import FORGOTTEN, Gone, PastRun, Start
from cosmati.forget.past_trainers import refuse_unlike, trainer_of
from cosmati.forget.sealing import with_sealing_of
from cosmati.forget.succession import Succession, note_succeeded
from cosmati.ledger.sealing import SEALED
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.other_source import of_another_source
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints, step_of
from cosmati.train.run.result import RunResult
from cosmati.train.trainer import Trainer

__all__ = ["Make", "Wrap", "replay"]


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

    What the run changed at a stop is changed at the same step.

    Args:
        run: that had it.
        make: its trainer, over another source.
        out: the new run's folder.
        start: where it begins; None where `out` is there already.
        told: what is forgotten, for the ledger.
        request: what `out` keeps of it.
        gone: what has tombstones in its place: what's forgotten now, and what was before.

    Raises:
        ForgetError: `out` is another run's, or the recipe isn't the run's any more.
    """
    legs = legs_of(run)
    left = legs_after(legs, _reached(out, told["from_step"]))

    def made(leg: Leg) -> Trainer:
        trainer = trainer_of(run, legs, leg, make, lambda source: gone.of(source, run.salt), out)
        if len(legs) > 1:
            refuse_unlike(legs, leg, trainer)
        return trainer

    trainer = made(left[0])
    ranks = trainer.assembly.ranks
    if ranks.rank == 0:
        if out.exists():
            note_succeeded(run.folder, out)  # A kill may have come between the folder's place and the note.
        elif start is not None:
            _prepared(run, trainer, out, start, told, left[0]).publish(request, gone)
    ranks.barrier()
    result = _taken(trainer, left[0])
    for leg in left[1:]:
        if result.clock.step < leg.first:
            return result  # Somebody has stopped it.
        result = _taken(made(leg), leg)
    return result


def _reached(out: Path, begun_at: int) -> int:
    """Return the step at which a replay stands, by its newest checkpoint."""
    newest = list_checkpoints(out / "checkpoints")[:1]
    return max([begun_at, *(step_of(path) for path in newest)])


def _taken(trainer: Trainer, leg: Leg) -> RunResult:
    """Train to the end of a leg, which is a stop's or the run's."""
    if leg.end is not None:
        trainer.observers.append(_StopsAt(leg.end))
    return trainer.fit()


class _StopsAt(Observer):
    """Stops a run after so many steps, as somebody did who then changed it."""

    def __init__(self, step: int) -> None:
        self._step, self._run = step, list[WatchedRun]()

    def on_open(self, run: WatchedRun) -> None:
        self._run = [run]

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step >= self._step:
            self._run[0].stop("")


def _prepared(run: PastRun, trainer: Trainer, out: Path, start: Start, told: Mapping[str, Any], leg: Leg) -> Succession:
    digest, last = trainer.prepared.data_digest, run.ledger.tables[-1]
    if last.withdrawn != start.tables.withdrawn:
        # What is rejected stays so in every later entry, those of steps that are taken anew too.
        start = replace(start, tables=last)
    elif coming := leg.policy_changes:
        # What the run took up on the way it takes up again, at the steps that its ledger says.
        tables = replace(start.tables, details={**start.tables.details, "policy_changes": coming})
        start = replace(start, tables=tables)
    changes = [
        ["data", dict(start.tables.entry.commitments).get("data", b"").hex(), digest],
        [FORGOTTEN, "", str(told["asked"])],
    ]
    if (sealed_now := with_sealing_of(last, start.tables)) != start.tables:
        was, now = (dict(one.entry.commitments).get(SEALED, b"").hex() for one in (start.tables, sealed_now))
        start, changes = replace(start, tables=sealed_now), [*changes, [SEALED, was, now]]
    if start.checkpoint is not None:
        checkpoint = of_another_source(start.checkpoint, trainer.prepared.identity)
        start = replace(start, checkpoint=checkpoint)
    made = Succession(run, out)
    made.keep_record(start.step)
    if start.checkpoint is not None:
        made.keep_checkpoint(start.checkpoint)
    made.amend(start, told, changes, digest)
    return made
