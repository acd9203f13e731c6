"""Runs steps of a ledger again, through the ordinary loop, and compares every digest with what it says of them.

A replay takes what it needs from the ledger: the policy, the budget and the cadences that were in force, and from which
step on microbatches were cut. Model, data, loss, optimizers and methods come from the recipe; that they're those that
the ledger commits to is compared first. The run's own folder is read and never written: the steps are taken in a
scratch folder, from a copy of the nearest checkpoint that the ledger has signed.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.ledger.difference import LedgerDifference
from cosmati.ledger.replay_result import BUT_FORGOTTEN, BUT_ROWS
from cosmati.ledger.row_secrets import RowSecrets
from cosmati.ledger.standing import RecipeSpan, StandingSteps
from cosmati.train.observers.replayed import LedgerComparison, ReplayTold
from cosmati.train.replay_span import MakeTrainer, ReplayRequest, SpanAgain, furnish
from cosmati.train.replay_start import From, nearest_checkpoint

__all__ = [
    "From",
    "MakeTrainer",
    "ReplayFound",
    "ReplayRequest",
    "nearest_checkpoint",
    "plan_replays",
    "replay",
    "replay_segments",
]


@dataclass(frozen=True, kw_only=True)
class ReplayFound:
    """What a replay found.

    Attributes:
        segment: the steps that were asked for.
        start: number of the first step that was taken.
        from_entry_0: it began with the model that the recipe makes, and trusts no checkpoint.
        num_steps: compared, those before the segment included.
        num_roots: signed states of weights and optimizers that were compared.
        differences: the first ones, in words.
        num_differences: all of them.
        without_rows: steps taken whose row commitments weren't compared: it takes blinds.
        forgotten: steps taken of which some row commitments can be compared by nobody, since rows were forgotten, with
            the numbers of the certificates by which they may have been.
        skipped: names of details in the ledger that this release can't compare.
        doubts: why a difference says nothing: other surroundings, or a run that isn't promised to be replayable.
        is_interrupted: it was stopped before its end.
    """

    segment: range
    start: int
    from_entry_0: bool
    num_steps: int
    num_roots: int
    differences: tuple[LedgerDifference, ...]
    num_differences: int
    without_rows: frozenset[int]
    forgotten: Mapping[int, tuple[int, ...]]
    skipped: tuple[str, ...]
    doubts: tuple[str, ...]
    is_interrupted: bool

    @property
    def compares_rows(self) -> bool:
        """Whether the row commitments of the segment were compared, all that anybody can compare."""
        return not any(step in self.without_rows for step in self.segment)

    @property
    def forgotten_by(self) -> tuple[int, ...]:
        """Numbers of the certificates by which rows of the segment may have been forgotten."""
        return tuple(sorted({n for step, numbers in self.forgotten.items() if step in self.segment for n in numbers}))

    @property
    def outcome(self) -> str:
        """One of `equal`, `different`, `not comparable`, `interrupted`; or equal, but for rows.

        These are `equal, rows not compared`, and `equal, forgotten rows not compared` where nobody can compare more.
        """
        if self.num_differences:
            return "not comparable" if self.doubts else "different"
        if self.is_interrupted:
            return "interrupted"
        if not self.compares_rows:
            return BUT_ROWS
        return BUT_FORGOTTEN if self.forgotten_by else "equal"


def replay(
    run: StandingSteps,
    segment: range,
    make: MakeTrainer,
    *,
    ledger: Path,
    start: From | None = None,
    blinds: RowSecrets | None = None,
    keep_going: bool = False,
    anyway: bool = False,
    told: ReplayTold | None = None,
) -> ReplayFound:
    """Run steps again and compare them with the ledger's.

    Args:
        run: the steps that stand.
        segment: which are wanted; those between the nearest checkpoint and them are taken and compared, too.
        make: makes the trainer, as the run's own was made.
        ledger: the ledger's folder; read, and not written.
        start: where to begin (`nearest_checkpoint`); None is at entry 0.
        blinds: of the rows (`secrets_of_run`, `read_blinds`); without them row commitments aren't compared.
        keep_going: compare all steps, and don't stop at the first that differs.
        anyway: replay where a difference would say nothing: in other surroundings, or a run that isn't `replayable`.
        told: is called with each step and how it differs.

    Raises:
        LedgerError: it can't be replayed here: other surroundings by name, or no promise that it can.
    """
    start = start or From()
    taken = range(start.step, segment.stop)
    comparison = LedgerComparison(run, taken, blinds, keep_going=keep_going, told=told)
    comparison.differs(*start.unsigned)
    doubts = list[str]()
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="cosmati-replay-") as place, _quiet():
        scratch = Path(place) / "run"
        checkpoint = start.load(run)
        furnish(scratch, ledger, run, checkpoint)
        for span in run.spans:
            if comparison.is_over or is_interrupted or span.end <= taken.start or span.first >= taken.stop:
                continue
            again = SpanAgain(run, span, comparison, scratch, checkpoint, make)
            doubts += [one for one in again.doubts() if one not in doubts]
            if doubts and not anyway:
                raise LedgerError(_refusal(span, doubts))
            if not comparison.is_over:
                is_interrupted = again.take(min(span.end, taken.stop))
                doubts += again.broken() if comparison.num_differences else []
    return ReplayFound(
        segment=segment,
        start=start.step,
        from_entry_0=start.path is None,
        num_steps=comparison.num_steps,
        num_roots=comparison.num_roots,
        differences=tuple(comparison.differences),
        num_differences=comparison.num_differences,
        without_rows=frozenset(comparison.without_rows),
        forgotten=dict(comparison.forgotten),
        skipped=tuple(sorted({*comparison.skipped, *run.dropped})),
        doubts=tuple(dict.fromkeys(doubts)),
        is_interrupted=is_interrupted,
    )


def replay_segments(
    run: StandingSteps,
    planned: Sequence[tuple[From, Sequence[range]]],
    make: MakeTrainer,
    *,
    ledger: Path,
    blinds: RowSecrets | None = None,
    anyway: bool = False,
    told: ReplayTold | None = None,
) -> list[ReplayFound]:
    """Replay several segments, and return of each what was found in it, and before it since the start of its replay.

    Args:
        run: the steps that stand.
        planned: which are replayed together, from where (`plan_replays`).
        make: as for `replay`, and so are the others.
        ledger: likewise.
        blinds: likewise.
        anyway: likewise.
        told: likewise.

    Raises:
        LedgerError: as for `replay`.
    """
    found = list[ReplayFound]()
    is_interrupted = False
    for start, group in planned:
        if is_interrupted:
            found += [_not_reached(one, start.step) for one in group]
            continue
        whole = range(group[0].start, max(one.stop for one in group))
        one = replay(
            run, whole, make, ledger=ledger, start=start, blinds=blinds, keep_going=True, anyway=anyway, told=told
        )
        is_interrupted = one.is_interrupted
        for segment in group:
            own = tuple(d for d in one.differences if d.step is None or d.step < segment.stop)
            is_cut = one.is_interrupted and start.step + one.num_steps < segment.stop
            found.append(
                replace(one, segment=segment, differences=own, num_differences=len(own), is_interrupted=is_cut)
            )
    return found


def _not_reached(segment: range, start: int) -> ReplayFound:
    return ReplayFound(
        segment=segment,
        start=start,
        from_entry_0=False,
        num_steps=0,
        num_roots=0,
        differences=(),
        num_differences=0,
        without_rows=frozenset(),
        forgotten={},
        skipped=(),
        doubts=(),
        is_interrupted=True,
    )


def plan_replays(
    run: StandingSteps, segments: Sequence[range], checkpoints: Path | None
) -> list[tuple[From, list[range]]]:
    """Return from where which segments are replayed together, in the order of steps."""
    planned = list[tuple[From, list[range]]]()
    for segment in sorted(segments, key=lambda one: one.start):
        start = nearest_checkpoint(run, segment.start, checkpoints)
        if planned and start.step <= max(one.stop for one in planned[-1][1]):
            planned[-1][1].append(segment)
        else:
            planned.append((start, [segment]))
    return planned


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what was said when the steps were first taken."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The checkpoint of step .* keeps the state of")
        warnings.filterwarnings("ignore", message="Memory is too short for step")
        yield


def _refusal(span: RecipeSpan, doubts: Sequence[str]) -> str:
    return (
        f"Steps {span.first}:{span.end} aren't comparable here: {'; '.join(doubts)}. A difference would say nothing of "
        "the run. Replay them where they were trained, or try all the same: --anyway, in Python anyway=True."
    )
