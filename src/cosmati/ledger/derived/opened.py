"""Derived tables opened for questions: a database with one view for each thing that an entry says, by names."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.consistency import is_consistent, prove_consistency
from cosmati.ledger.derived.folder import (
    INDEX_FILE,
    DerivedIndex,
    check_files,
    derive,
    mend,
    place_of,
    read_index,
    told_by,
)
from cosmati.ledger.derived.rows import TABLES, form_of
from cosmati.ledger.entry import decode_entry
from cosmati.ledger.evidence import LEVEL_0, NOBODY, TrustedEvidence, Witnessing
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import operators, read_head, read_verifier_key
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry
from cosmati.storage.duck import connection, text

if TYPE_CHECKING:
    import duckdb

_TYPES = {
    np.uint64: "UBIGINT",
    np.uint32: "UINTEGER",
    np.uint16: "USMALLINT",
    np.float64: "DOUBLE",
    np.float32: "FLOAT",
    np.bool_: "BOOLEAN",
    np.object_: "VARCHAR",
}
NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Milestone:
    """A model checkpoint, or the end.

    Attributes:
        entry: Index of its entry.
        step: Steps done.
        state_digest: Of the whole training state in hexadecimal, empty for the end.
        root: Over parameters and buffers, in hexadecimal.
        outcome: How the run ended; empty for a checkpoint.
    """

    entry: int
    step: int
    state_digest: str
    root: str
    outcome: str = ""


class DerivedLedger:
    """The tables of a ledger, as they were made from all that its signed head covers.

    Attributes:
        ledger: The ledger's folder.
        folder: Theirs.
        index: What they were made from.
        history: What follows what in the log.
        evidence_level: What an answer shows that rests on that tree.
        tables: What entry 0 and each amendment say; a `policy_epoch` is an index into these.
        resumes: Those of the log, each with the index of its entry.
        milestones: Checkpoints and ends, in the order of the log.
        database: With the views of `cosmati.ledger.derived.views`.
    """

    def __init__(self, ledger: Path, index: DerivedIndex, database: duckdb.DuckDBPyConnection) -> None:
        self.ledger, self.folder, self.index = ledger, place_of(ledger), index
        self.evidence_level = LEVEL_0
        self.history, self.tables = told_by(ledger, index)
        entries = [(one.index, decode_entry(base64.b64decode(one.data))) for one in index.rare]
        self.resumes = [(number, one) for number, one in entries if isinstance(one, ResumeEntry)]
        ends = CheckpointEntry | EndEntry
        self.milestones = [_milestone(number, one) for number, one in entries if isinstance(one, ends)]
        self.database = database
        self.files = check_files(self.folder, index)
        with readable(ledger):
            for table, files in self.files.items():
                self._view(table, files)
        self.set_cuts(None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in all tables, in order of first appearance."""
        return tuple(dict.fromkeys(name for one in self.tables for name in one.classes))

    @property
    def regions(self) -> tuple[str, ...]:
        """Likewise."""
        return tuple(dict.fromkeys(name for one in self.tables for name in one.regions))

    @property
    def origin_line(self) -> str:
        """What an answer came from, in a line."""
        return f"Derived from tree of size {self.index.tree_size}, root {self.index.root}; level {self.evidence_level}"

    def milestone(self, *, step: int | None = None, state_digest: str = "") -> Milestone:
        """Return the latest checkpoint or end of a step, or that of a state.

        Raises:
            LedgerError: the ledger has none.
        """
        for one in reversed(self.milestones):
            if (state_digest and one.state_digest == state_digest) or (not state_digest and one.step == step):
                return one
        what = f"with the digest {state_digest[:16]}" if state_digest else f"after {step} steps"
        steps = ", ".join(dict.fromkeys(str(one.step) for one in self.milestones))
        others = f"It has some after {steps} steps." if steps else "It has none."
        raise LedgerError(f"The ledger has no checkpoint {what}. {others}")

    def cuts(self, moment: Milestone | None) -> list[int]:
        """Return for each attempt the first step of it that doesn't stand, as of a moment of the log.

        A step of an attempt stands until a later one resumes at it, or before it.
        """
        at, limit = (NEVER, NEVER) if moment is None else (moment.entry, moment.step)
        begun = [0, *(number for number, _ in self.resumes)]
        found = []
        for attempt, began in enumerate(begun):
            later = [one.from_step for number, one in self.resumes if number < at and one.attempt > attempt]
            found.append(min([limit, *later]) if began < at else 0)
        return found

    def set_cuts(self, moment: Milestone | None) -> None:
        """Let `stands` mean what stood at a moment; None means the signed head."""
        cuts = np.asarray(self.cuts(moment), np.int64)
        self.put("cuts", {"attempt": np.arange(len(cuts), dtype=np.uint32), "cut": cuts})

    def put(self, name: str, columns: Mapping[str, Any]) -> None:
        """Make a table of columns, of this connection alone."""
        assert columns, "DuckDB reads them by their name"
        self.database.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM columns")

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a question."""
        with readable(self.ledger):
            return self.database.execute(sql, list(values)).fetchall()

    def _view(self, table: str, files: Sequence[Path]) -> None:
        if files:
            source = f"read_parquet([{', '.join(text(str(path)) for path in files)}])"
        else:
            nothing = ", ".join(f"NULL::{_TYPES[form]} AS {name}" for name, form in form_of(table).items())
            source = f"(SELECT {nothing} WHERE false)"
        self.database.execute(f"CREATE VIEW {table}_file AS SELECT * FROM {source}")


def _milestone(number: int, one: CheckpointEntry | EndEntry) -> Milestone:
    if isinstance(one, EndEntry):
        return Milestone(number, one.step, "", one.parameter_root.hex(), one.outcome)
    return Milestone(number, one.step, one.state_digest.hex(), one.parameter_root.hex())


@contextmanager
def open_derived(
    ledger: Path, *, vkey: str | None = None, witnesses: TrustedEvidence = NOBODY, anew: bool = False
) -> Iterator[DerivedLedger]:
    """Bring a ledger's derived tables up to its signed head, and open them.

    Args:
        ledger: the ledger's folder.
        vkey: the operator's verifier key from a source that you trust.
        witnesses: whom you trust to have seen the ledger: what they cosigned must be a prefix.
        anew: scan all signed entries and make the tables anew, whatever is there.

    Raises:
        LedgerError: no ledger, an empty one, or the tables can't be written.
        TamperError: the ledger doesn't verify, or the tables there aren't of it.
        MissingExtraError: DuckDB isn't installed.
    """
    key = read_verifier_key(ledger, vkey)
    witnessing = Witnessing(ledger, witnesses)
    head = read_head(ledger, key)
    if head.size == 0:
        raise LedgerError(f"The ledger {ledger} is empty. Query it once the run has begun.")
    with connection() as database:
        index = derive(ledger, key, head, anew=anew)
        for one in witnessing.heads:
            _check_beginning(ledger, one, head)
        derived = DerivedLedger(ledger, index, database)
        witnessing.check(operators(derived.history, key))
        derived.evidence_level = witnessing.level(head.size)
        yield derived


def _check_beginning(ledger: Path, old: TreeHead, new: TreeHead) -> None:
    """Check by a proof from the tiles that what somebody has seen is the beginning of what is signed now.

    Raises:
        TamperError: it isn't.
    """
    if old.size > new.size or not is_consistent(old, new, prove_consistency(ledger, old.size, new.size)):
        raise TamperError(
            f"The checkpoint in {ledger} covers {new.size} entries, and doesn't go on from an earlier one of "
            f"{old.size} that others have seen: the log was cut back or rewritten. Restore it from a copy."
        )


@contextmanager
def readable(ledger: Path) -> Iterator[None]:
    """Say what it means where DuckDB can't read the tables, or a number in them names nothing.

    Raises:
        TamperError: instead of DuckDB's error, or a LookupError.
    """
    import duckdb

    try:
        yield
    except (duckdb.Error, LookupError) as error:
        raise TamperError(f"The tables don't say what derived tables say: {error}. {mend(place_of(ledger))}") from error


@contextmanager
def open_proven(
    ledger: Path, *, vkey: str | None = None, witnesses: TrustedEvidence = NOBODY
) -> Iterator[tuple[DerivedLedger, bool]]:
    """Scan all signed entries, make the tables anew and open them; say whether those there before said something else.

    Raises:
        LedgerError, TamperError, MissingExtraError: as for `open_derived`.
    """
    before = _fingerprint_before(ledger)
    with open_derived(ledger, vkey=vkey, witnesses=witnesses, anew=True) as derived:
        was_other = before is not None and before[1] != fingerprint(derived, below=before[0])
        yield derived, was_other


def _fingerprint_before(ledger: Path) -> tuple[int, object] | None:
    """Return how many entries the tables cover that are there, and their fingerprint; None where there are none."""
    folder = place_of(ledger)
    if not (folder / INDEX_FILE).exists():
        return None
    try:
        index = read_index(folder)
        if index is None:  # of an earlier form, with which nothing can be compared
            return None
        if index.tree_size > read_head(ledger, read_verifier_key(ledger)).size:
            return 0, "more than was signed"
        with connection() as database:
            found = DerivedLedger(ledger, index, database)
            return index.tree_size, fingerprint(found, below=index.tree_size)
    except LedgerError as error:
        return 0, str(error)  # nothing equals that


def fingerprint(derived: DerivedLedger, *, below: int) -> object:
    """Return what the tables say of the entries below a number, in few words, however they are divided."""
    names = [str(one) for one in derived.index.sets]
    derived.put("set_names", {"number": np.arange(len(names), dtype=np.uint32), "name": np.asarray(names, object)})
    sums = []
    for table in TABLES:
        columns, joins = list(form_of(table)), ""
        if table == "cells":  # the numbers of sets depend on when they were met
            columns = [{"reaches": "a.name", "opens": "b.name"}.get(name, name) for name in columns]
            joins = "JOIN set_names a ON a.number = reaches JOIN set_names b ON b.number = opens"
        of_row = f"hash({', '.join(columns)})"
        sql = f"SELECT count(*), bit_xor({of_row}), sum({of_row}) FROM {table}_file {joins} WHERE entry < ?"
        sums += derived.rows(sql, [below])
    return sums, [(one.index, one.data) for one in derived.index.rare if one.index < below]
