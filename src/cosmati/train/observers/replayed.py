"""Compares a replay with the ledger, step by step: the ledger's own observer, with a comparison for its writer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from cosmati.core.clock import Budget, Clock
from cosmati.ledger.difference import UNKNOWN_ROWS, LedgerDifference, compare_step, compare_tables
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.roots import certificates_of_drops
from cosmati.ledger.row_secrets import RowsAt, RowSecrets, commit
from cosmati.ledger.rows import ROWS_VERSION, SALTED_VERSION
from cosmati.ledger.standing import StandingSteps
from cosmati.ledger.tables import Tables
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import (
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    Entry,
    ResumeEntry,
    RunEntry,
    StepEntry,
)
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.ranks import Ranks

ReplayTold = Callable[[int, Sequence[LedgerDifference]], None]
_TABLES = ("classes", "regions", "routes", "phases", "policy", "bands", "kinds", "seed", "parameters", "policy_text")
_MOST_TOLD = 100
"""Differences that are kept in words; the rest is counted."""


class LedgerComparison:
    """Takes what the ledger's observer writes, as its writer would, and compares it with what was written then.

    Args:
        run: the steps that stand.
        segment: which are compared.
        blinds: of the rows; None where nobody knows them, and row commitments aren't compared.
        keep_going: compare all, and don't stop at the first step that differs.
        told: is called with each step and how it differs.

    Attributes:
        differences: found so far.
        num_differences: likewise, those that weren't kept in words included.
        num_steps: compared.
        num_roots: signed states of weights and optimizers compared.
        without_rows: steps whose row commitments weren't all compared, since nobody here knows some blinds.
        forgotten: steps of which some can't be compared by anybody, with the numbers of the certificates by which the
            rows were forgotten.
        skipped: names of details that no replay of this release can compare.
        is_over: a difference has ended it.
        done: number of steps taken, those before the segment included.
        span_end: where the run is stopped, at the end of the segment or before.
        stop: ends the run after the step; it's given when the run is open.
        save: takes a checkpoint now; likewise.
    """

    def __init__(
        self,
        run: StandingSteps,
        segment: range,
        blinds: RowSecrets | None,
        *,
        keep_going: bool,
        told: ReplayTold | None = None,
    ) -> None:
        self.run, self.segment, self.keep_going = run, segment, keep_going
        self._expected = run.steps(segment.start, segment.stop)
        self._told = told
        self._tables: Tables | None = None
        self._compared_tables: Tables | None = None
        self._roots: list[tuple[int, bytes]] = []
        self.differences: list[LedgerDifference] = []
        self.num_differences = self.num_steps = self.num_roots = 0
        self.skipped = set[str]()
        self.is_over = False
        self.done, self.span_end = segment.start, segment.stop
        self.stop: Callable[[str], None] = _unopened
        self.save: Callable[[], None] = _unopened
        self.tables_now: Callable[[], Mapping[str, Any]] = _unopened
        self.request = ""
        self.unexplained: Callable[[int, Iterable[bytes]], list[bytes]] = _unopened
        is_known = run.ledger.details.get("rows_version") in (SALTED_VERSION, ROWS_VERSION)
        self._blinds = blinds if is_known else None
        self.without_rows = set[int]()
        self._signed: dict[str, list[str]] = {}
        self.forgotten: dict[int, tuple[int, ...]] = {}

    def commit(self, rows: RowsAt) -> bytes:
        """Return the commitment to rows, or what stands for it where nobody knows their blinds."""
        blinds = self._blinds.blinds(rows) if self._blinds is not None else None
        found = None if blinds is None else commit(rows, blinds)
        if found is not None:
            return found
        closed = self._certificates(rows.class_name) if blinds is not None else ()
        if closed:
            self.forgotten[rows.step] = closed
        else:
            self.without_rows.add(rows.step)
        return UNKNOWN_ROWS

    def _certificates(self, class_name: str) -> tuple[int, ...]:
        """Numbers of the certificates by which rows of a class were forgotten, of those that the ledger has signed.

        After a replay no step that stands has a forgotten row: its certificate excuses nothing.
        """
        told = {} if self._blinds is None else self._blinds.certificates
        if class_name not in self._signed:
            self._signed[class_name] = certificates_of_drops(self.run.ledger, class_name)
        return tuple(sorted(told[one] for one in self._signed[class_name] if one in told))

    def differs(self, *found: LedgerDifference) -> None:
        """Take note of differences."""
        self.num_differences += len(found)
        self.differences += found[: max(0, _MOST_TOLD - len(self.differences))]
        self.is_over = self.is_over or (bool(found) and not self.keep_going)

    # What the observer asks of a writer.

    def append(self, entry: Entry, details: Mapping[str, Any] | None = None) -> None:
        """Compare an entry with the one that was written then."""
        self._look_at_roots()
        if isinstance(entry, StepEntry):
            self._compare_step(entry, details or {})
        elif isinstance(entry, CheckpointEntry) and entry.step in self.run.roots:
            self._compare_checkpoint(entry)
        elif isinstance(entry, EndEntry) and self.run.end is not None and self.run.end.step == entry.step:
            self.num_roots += 1
            was, now = self.run.end.parameter_root, entry.parameter_root
            if was != now:
                self.differs(
                    LedgerDifference(entry.step - 1, "root of the weights at the end", _short(was), _short(now))
                )

    def checkpoint(self) -> None:
        """Sign nothing."""

    def close(self) -> None:
        """Look at what is left to compare."""
        self._look_at_roots()

    def has_ended(self) -> bool:
        """Let the end be compared."""
        return False

    def next_attempt(self) -> int:
        """Return a number that nobody reads."""
        return 0

    def resume_entry(self, from_step: int) -> ResumeEntry:
        """Return an entry that nobody reads."""
        return ResumeEntry(from_step, 0, 0)

    @property
    def in_force(self) -> RunEntry | AmendEntry:
        """What the ledger commits to."""
        return self.run.ledger.run if self._tables is None else self._tables.entry

    def _compare_step(self, made: StepEntry, details: Mapping[str, Any]) -> None:
        found = list[LedgerDifference]()
        for item, logged, tables in self._next(made.step):
            if tables is not self._compared_tables:
                found += compare_tables(made.step, tables.details, self.tables_now(), _TABLES)
                self._tables = self._compared_tables = tables
            unlike, skipped = compare_step(
                item,
                logged,
                tables,
                made,
                details,
                origin=self.run.ledger.key.name,
                keys=self.run.ledger.keys,
            )
            found += unlike
            self.skipped |= skipped
            self.num_steps += 1
        self.differs(*found)
        if self._told is not None:
            self._told(made.step, found)
        done = self.done = made.step + 1
        if done in self.run.roots and done < self.span_end:  # at its end there's one in any case
            self.save()
        if self.is_over or done >= self.span_end:
            self.stop("the replay has what it compares")

    def _next(self, step: int) -> Iterator[tuple[ScannedEntry, StepEntry, Tables]]:
        yield from (one for one in itertools.islice(self._expected, 1) if one[1].step == step)

    def _compare_checkpoint(self, made: CheckpointEntry) -> None:
        self.num_roots += 1
        if others := self.run.roots[made.step] - {made.parameter_root}:  # of each that was signed, also twice
            what = f"root of parameters and buffers after {made.step} steps"
            self.differs(LedgerDifference(None, what, _short(min(others)), _short(made.parameter_root)))
        elif self.run.states(made.step, self.request) - {made.state_digest}:
            self._roots.append((made.step, made.state_digest))

    def _look_at_roots(self) -> None:
        """Look again at states that are signed otherwise: the digest covers facts that bits don't rest on.

        Each of them, though one be as it was made here: whoever is handed another finds that signed, too.
        """
        for step, digest in self._roots:
            self.differs_in_state(step, digest, self.unexplained(step, self.run.states(step, self.request)))
        self._roots.clear()

    def differs_in_state(self, step: int, digest: bytes, wrong: Sequence[bytes]) -> None:
        """Take note of states that are signed and aren't that which a step gives, if there are any."""
        if wrong:
            what = f"digest of weights, optimizers and averages after {step} steps"
            self.differs(LedgerDifference(None, what, _short(wrong[0]), _short(digest)))


class ReplayedLedger(LedgerObserver):
    """The ledger's observer of a replay: it writes no ledger.

    Args:
        comparison: takes what it would write.
        digest: gives the model's Merkle root as it is now.
    """

    def __init__(self, comparison: LedgerComparison, digest: Callable[[], bytes]) -> None:
        self._comparison, self._digest_of = comparison, digest

    def on_open(self, run: WatchedRun) -> None:
        """Take note of what is replayed: only now are its facts known."""
        assert run.folder is not None, "a replay has a folder of its own"
        super().__init__(run.folder, run.facts, Ranks.alone(), self._digest_of)
        self._comparison.stop = run.stop

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Open nothing."""
        self._writer = cast("LedgerWriter", self._comparison)  # takes what it is given
        self._comparison.tables_now = self._details

    def _commit(self, rows: RowsAt) -> bytes:
        return self._comparison.commit(rows)

    def _keep_archive(self) -> None:
        """Keep nothing: the ledger has it."""


def _unopened(*_: Any) -> Any:  # noqa: ANN401  (stands for several functions)
    raise AssertionError("the run isn't open")


def _short(digest: bytes) -> str:
    return digest.hex()[:16]
