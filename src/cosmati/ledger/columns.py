"""One verified pass over a ledger, its steps in columns: it checks what `Scan` and `in_force` check, many at once.

What looks in any way unlike an ordinary step is left to their code, which says what is wrong with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cosmati.ledger.entry import ENTRY_VERSION, decode_entry
from cosmati.ledger.history import RunHistory, content_of
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import KEY_KIND, Scan, ScannedEntry, has_details
from cosmati.ledger.tables import WITHHELD, Tables, check_step, read_tables
from cosmati.ledger.tiles import TILE_WIDTH, Frontier
from cosmati.records.ledger import NO_DETAILS, AmendEntry, Entry, EntryKind, RunEntry, StepEntry
from cosmati.storage.merkle import leaf_hash

_STEP_KEY = bytes([ENTRY_VERSION, EntryKind.STEP])
_POLICY, _DETAILS, _ROOT_FLAG, _HEAD_SIZE = slice(14, 46), slice(46, 78), 78, 79
_CELL = np.dtype(
    [
        ("class_id", ">u4"),
        ("band", ">u2"),
        ("phase", ">u2"),
        ("route", ">u4"),
        ("rows", ">u4"),
        ("weight", ">f8"),
        ("commitment", "V32"),
    ]
)
_LARGEST_KEY = 1 << 29


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Steps that follow one another in the log, with as many cells each, under the same tables and policy.

    Attributes:
        first: Index of the first one's entry.
        step: Its number.
        attempt: Of all of them.
        policy: Digest of their policy.
        tables: What they are read with; their classes, routes, bands and phases are there.
        data: Their entries.
        lines: Their details; None for a step without.
        cells: [steps, cells], with the fields of a `MicrobatchCell`; `route` and `rows` for short.
    """

    first: int
    step: int
    attempt: int
    policy: bytes
    tables: Tables
    data: Sequence[bytes]
    lines: Sequence[bytes | None]
    cells: NDArray[np.void]

    def item(self, number: int) -> tuple[ScannedEntry, StepEntry]:
        """Return a step of the block as `Scan` gives it."""
        entry = decode_entry(self.data[number])
        assert isinstance(entry, StepEntry), "only steps stand in blocks"
        return ScannedEntry(self.first + number, self.data[number], entry, self.lines[number]), entry


class ColumnScan(Scan):
    """As `Scan`, of which it's a quicker form; read `blocks()` to the end before you believe anything.

    Args:
        directory: the ledger.
        head: a tree head whose signature was checked.
        roots: roots that the tree must have had at earlier sizes.
        start: index of the entry to begin at, a multiple of 256; those before it are taken from the tiles, whose
            root the checkpoint signs.
        history: what stands at `start`.
        tables: what is in force there.
        details_size: bytes of details.jsonl before it.
    """

    def __init__(
        self,
        directory: Path,
        head: TreeHead,
        roots: Sequence[TreeHead] = (),
        *,
        start: int = 0,
        history: RunHistory | None = None,
        tables: Tables | None = None,
        details_size: int = 0,
    ) -> None:
        super().__init__(directory, head, roots)
        self.tables = tables
        self.details_size = details_size
        self._heads_before = dict[int, TreeHead]()
        if start:
            assert start % TILE_WIDTH == 0, "bundles are read whole"
            self.frontier = Frontier.of_tiles(directory, start)
        if history is not None:
            self.history = history

    def blocks(self) -> Iterator[StepBlock | ScannedEntry]:
        """Yield steps in blocks, and each other entry by itself.

        Raises:
            TamperError: something doesn't verify; the message says what and where.
        """
        with self._open_details() as details:
            details.seek(self.details_size)
            self._check_root()
            for index in range(self.frontier.size // TILE_WIDTH, -(-self._head.size // TILE_WIDTH)):
                entries = self._read_bundle(index)
                self._check_hashes(entries)
                number = index * TILE_WIDTH
                for key, group in groupby(entries, key=_key):
                    found = list(group)
                    yield from self._admit_all(number, found, details, is_steps=key is not None)
                    number += len(found)
        for level, tile, hashes in self.frontier.partial_tiles():
            self._check_tile(level, tile, hashes)

    def _check_hashes(self, entries: list[bytes]) -> None:
        first = self.frontier.size
        is_asked = any(first < size < first + TILE_WIDTH for size in self._roots)
        if len(entries) == TILE_WIDTH and not is_asked and not any(data[1:2] == KEY_KIND for data in entries):
            for level, tile, hashes in self.frontier.append_tile([leaf_hash(data) for data in entries]):
                self._check_tile(level, tile, hashes)
            self._check_root()
            return
        self._heads_before = {}
        for index, data in enumerate(entries, first):
            self._heads_before[index] = self._head_before(data)
            for level, tile, hashes in self.frontier.append(leaf_hash(data)):
                self._check_tile(level, tile, hashes)
            self._check_root()

    def _admit_all(
        self, number: int, entries: list[bytes], details: BufferedReader, *, is_steps: bool
    ) -> Iterator[StepBlock | ScannedEntry]:
        if is_steps:
            yield self._admit_steps(number, entries, details)
            return
        for index, data in enumerate(entries, number):
            entry = self._decode_at(index, data)
            line = self._check_details(details.readline(), entry, index) if has_details(entry) else None
            item = ScannedEntry(index, data, entry, line)
            if isinstance(entry, RunEntry | AmendEntry):
                self.tables = read_tables(item, entry, self.tables)
            yield item

    def _decode_at(self, index: int, data: bytes) -> Entry:
        return self._decode(index, data, self._heads_before.get(index, TreeHead(index, b"")))

    def _admit_steps(self, number: int, entries: list[bytes], details: BufferedReader) -> StepBlock:
        cells = self._columns(entries)
        if cells is None:  # something is wrong with one of them
            for index, data in enumerate(entries, number):
                self._decode_at(index, data)
            raise AssertionError("a step that no reader of columns takes is refused one by one")
        lines = self._read_lines(number, entries, details)
        assert self.tables is not None, "the history refuses steps before a run entry"
        step, attempt = self.history.num_steps - len(entries), self.history.attempt
        block = StepBlock(number, step, attempt, entries[0][_POLICY], self.tables, entries, lines, cells)
        _check_tables(block)
        return block

    def _columns(self, entries: list[bytes]) -> NDArray[np.void] | None:
        """Return the cells of steps that may stand here, having taken them; None where one mustn't."""
        width, flag, num, history = len(entries[0]), entries[0][_ROOT_FLAG], len(entries), self.history
        num_cells, rest = divmod(width - _HEAD_SIZE - 32 * flag - 2, _CELL.itemsize)
        if flag > 1 or rest or num_cells < 0 or history.in_force is None or history.has_ended:
            return None
        root = [("root", "V32")] if flag else []
        form = [("head", "V2"), ("step", ">u8"), ("attempt", ">u4"), ("digests", "V64"), ("flag", "u1"), *root]
        steps = np.frombuffer(b"".join(entries), np.dtype([*form, ("count", ">u2"), ("cells", _CELL, (num_cells,))]))
        weights = steps["cells"]["weight"]
        committed = dict(history.in_force.commitments).get("policy", entries[0][_POLICY])
        is_plain = (
            bool((steps["step"] == np.arange(history.num_steps, history.num_steps + num, dtype=np.uint64)).all())
            and bool((steps["attempt"] == history.attempt).all() and (steps["count"] == num_cells).all())
            and bool((np.isfinite(weights) & (weights >= 0)).all())
            and committed == entries[0][_POLICY]
        )
        if not is_plain:
            return None
        history.extend(history.num_steps, history.attempt, committed, list(map(content_of, entries)))
        found: NDArray[np.void] = steps["cells"]
        return found

    def _read_lines(self, number: int, entries: list[bytes], details: BufferedReader) -> list[bytes | None]:
        lines: list[bytes | None] = []
        sha256, readline = hashlib.sha256, details.readline
        for index, data in enumerate(entries, number):
            digest = data[_DETAILS]
            if digest == NO_DETAILS:
                lines.append(None)
                continue
            line = readline()
            if sha256(line[:-1]).digest() != digest or line[-1:] != b"\n":
                self._check_details(line, decode_entry(data), index)
            self.details_size += len(line)
            lines.append(line[:-1])
        return lines


def _key(data: bytes) -> tuple[int, bytes, int] | None:
    """Return what steps of a block have in common; None for what isn't a step, or is cut short."""
    if data[:2] != _STEP_KEY or len(data) < _HEAD_SIZE + 2:
        return None
    return len(data), data[_POLICY], data[_ROOT_FLAG]


def _check_tables(block: StepBlock) -> None:
    """Check each cell against the tables in force, as `check_step` does, and that its class has a name.

    Raises:
        TamperError: as there.
    """
    if _fit_tables(block):
        return
    for number in range(len(block.data)):
        item, entry = block.item(number)
        check_step(block.tables, item, entry)
        for cell in entry.microbatches:
            block.tables.class_of(cell, item)


def _fit_tables(block: StepBlock) -> bool:
    tables, cells = block.tables, block.cells
    last = block.step + len(block.data) - 1
    if any(one.action == "stop" and one.step <= last for one in tables.withdrawn):
        return False
    if not cells.size:
        return True
    classes, routes = cells["class_id"].astype(np.int64), cells["route"].astype(np.int64)
    if classes.max() >= len(tables.classes) or routes.max() >= len(tables.routes):
        return False
    return not tables.policy or _fit_policy(block, classes, routes)


def _fit_policy(block: StepBlock, classes: NDArray[np.int64], routes: NDArray[np.int64]) -> bool:
    tables, cells, num_routes = block.tables, block.cells, len(block.tables.routes)
    phases = cells["phase"].astype(np.int64)
    if phases.max() >= len(tables.phases) or len(tables.classes) * num_routes > _LARGEST_KEY:
        return False
    spans, steps = np.asarray(tables.phases), block.step + np.arange(len(block.data))[:, None]
    if not ((spans[phases, 0] <= steps) & (steps < spans[phases, 1])).all():
        return False
    keys = (((classes * num_routes + routes) << 16 | cells["band"]) << 16 | phases) << 1 | (cells["rows"] > 0)
    return all(_is_of_policy(tables, key) for key in np.unique(keys).tolist())


def _is_of_policy(tables: Tables, key: int) -> bool:
    """Return whether the policy gives a class, route, band and phase, and rows where there are some."""
    rest, has_rows = divmod(key, 2)
    rest, phase = divmod(rest, 1 << 16)
    rest, band = divmod(rest, 1 << 16)
    class_id, route = divmod(rest, len(tables.routes))
    if tables.bands == ("",):
        band = 0
    elif band >= len(tables.bands):
        return False
    weights, decision = tables.policy[class_id * len(tables.bands) + band][phase]
    return tables.routes[route] == weights and not (has_rows and decision in WITHHELD)
