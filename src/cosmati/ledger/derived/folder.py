"""The folder of derived tables: made from a verified scan, brought up to a ledger that has grown, refused otherwise.

    derived/tables.json        what it was made from, and its parts with their digests; put in place last
    derived/TABLE-FIRST-END.parquet    rows of the entries FIRST to END; a part ends with a bundle, but for the last one

`tables.json` names the log's origin, tree size and root. It isn't signed: who may write here can change what quick
answers say. So what has to be believed is asked of the entries (`--prove`, and exclusion statements always).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.derived.rows import TABLES, PartRows, RegionSets, form_of
from cosmati.ledger.details import DETAILS_FILE, check_line
from cosmati.ledger.entry import decode_entry
from cosmati.ledger.history import RunHistory
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.reader import ScannedEntry, has_details, operators
from cosmati.ledger.tables import Tables, read_tables
from cosmati.ledger.tiles import ENTRIES, TILE_WIDTH, Frontier, decode_bundle, needed_width, read_tile
from cosmati.records.ledger import AmendEntry, RunEntry
from cosmati.storage.atomic import draft_of, publish, replace_file
from cosmati.storage.duck import connection, quoted, text
from cosmati.storage.lock import FileLock
from cosmati.storage.merkle import leaf_hash

FORMAT = "cosmati-derived/2"
_EARLIER = ("cosmati-derived/1",)
"""Forms of earlier releases, which lack tables: they're made anew."""
INDEX_FILE = "tables.json"
PART_ROWS = 1 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class RareEntry(msgspec.Struct, frozen=True):
    """An entry that isn't a step: its index, its bytes in base64, and where its details line is (size 0 if none)."""

    index: _Count
    data: str
    details_at: _Count = 0
    details_size: _Count = 0


class DerivedPart(msgspec.Struct, frozen=True):
    """Rows of the entries `first` to `end`, bytes of details before them, and the files' SHA-256 and rows by table."""

    first: _Count
    end: _Count
    details_at: _Count
    files: dict[str, tuple[str, int]]

    def name_of(self, table: str) -> str:
        """Return the name of a table's file."""
        return f"{table}-{self.first:012}-{self.end:012}.parquet"


class DerivedIndex(msgspec.Struct, frozen=True):
    """What stands in `tables.json`."""

    format: str
    origin: str
    vkey: str
    tree_size: _Count
    root: str
    rare: list[RareEntry]
    sets: list[tuple[_Count, list[_Count]]]
    parts: list[DerivedPart]


@dataclass(slots=True)
class _State:
    """What a scan goes on from."""

    history: RunHistory
    tables: list[Tables]


def place_of(ledger: Path) -> Path:
    """Return the folder of a ledger's derived tables."""
    return ledger.with_name("derived" if ledger.name == "ledger" else f"{ledger.name}-derived")


def read_index(folder: Path) -> DerivedIndex | None:
    """Return what a folder of derived tables says of itself; None where there are none of this release's form.

    Raises:
        TamperError: it can't be read.
    """
    path = folder / INDEX_FILE
    try:
        index = msgspec.json.decode(path.read_bytes(), type=DerivedIndex)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TamperError(f"{path} is damaged: {error}. {mend(folder)}") from error
    if index.format in _EARLIER:
        return None
    if index.format != FORMAT:
        msg = f"{path} is of the form {index.format!r:.40}, and this release reads {FORMAT}. {mend(folder)}"
        raise TamperError(msg)
    if wrong := _problem_with(index):
        raise TamperError(f"{path} is damaged: {wrong}. {mend(folder)}")
    return index


def _problem_with(index: DerivedIndex) -> str:
    """Return what names nothing that derived tables have; empty for nothing."""
    for part in index.parts:
        if part.first % TILE_WIDTH or not part.first < part.end <= index.tree_size:
            return f"no part goes from entry {part.first} to {part.end} of {index.tree_size}"
        if others := part.files.keys() - TABLES.keys():
            return f"there's no table {min(others)!r:.40}"
    numbers = [one.index for one in index.rare]
    if numbers != sorted({*numbers}) or any(number >= index.tree_size for number in numbers):
        return "its entries that aren't steps aren't in the order of the log"
    return ""


def derive(ledger: Path, key: VerifierKey, head: TreeHead, *, anew: bool = False) -> DerivedIndex:
    """Make the tables of all that a head covers, or bring them up to it; return what they say of themselves.

    Args:
        ledger: the ledger.
        key: the operator's, with which the head was checked.
        head: a tree head whose signature was checked.
        anew: from the entries alone, whatever is there.

    Raises:
        TamperError: the ledger doesn't verify, or the tables aren't of it.
        LedgerError: they can't be written. MissingExtraError: DuckDB isn't installed.
    """
    folder = place_of(ledger)
    try:
        folder.mkdir(exist_ok=True)
        with _locked(folder):
            before = None if anew else read_index(folder)
            if before is not None:
                _check_prefix(ledger, folder, before, key, head)
                if before.tree_size == head.size:
                    return before
            _sweep(folder)
            index = _Deriving(ledger, folder, key, head, before).run()
            replace_file(folder / INDEX_FILE, msgspec.json.encode(index))
            return index
    except OSError as error:
        msg = f"The tables in {folder} can't be written: {error}. Make the folder writable, or copy the ledger."
        raise LedgerError(msg) from error


def check_files(folder: Path, index: DerivedIndex) -> dict[str, list[Path]]:
    """Return the files of each table, after comparing them with their digests.

    Raises:
        TamperError: one is missing or was changed.
    """
    found: dict[str, list[Path]] = {table: [] for table in TABLES}
    for part in index.parts:
        for table, (digest, _) in part.files.items():
            path = folder / part.name_of(table)
            try:
                with path.open("rb") as file:
                    is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
            except FileNotFoundError as error:
                raise TamperError(f"{path} is missing. {mend(folder)}") from error
            if not is_same:
                raise TamperError(f"{path} was changed since it was derived. {mend(folder)}")
            found[table].append(path)
    return found


def told_by(ledger: Path, index: DerivedIndex) -> tuple[RunHistory, list[Tables]]:
    """Return what follows what, and what entry 0 and each amendment say, read from the ledger again.

    Raises:
        TamperError: they aren't those that the tables were derived with.
    """
    state = _replayed(ledger, index, index.tree_size)
    widths = [len(tables.regions) for tables in state.tables]
    if not all(epoch < len(widths) and all(one < widths[epoch] for one in regions) for epoch, regions in index.sets):
        folder = place_of(ledger)
        raise TamperError(f"{folder / INDEX_FILE} names regions that the ledger doesn't have. {mend(folder)}")
    return state.history, state.tables


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / "lock", wait=True)
    try:
        yield
    finally:
        lock.release()


def mend(folder: Path) -> str:
    """Return what to do about tables that can't be read, or aren't of the ledger."""
    return f"Remove {folder}, or derive it anew: cosmati ledger derive RUN --anew."


def _sweep(folder: Path) -> None:
    """Remove what no index names any more: a query that was running then may have read it until now."""
    try:
        index = read_index(folder)
    except TamperError:
        index = None
    kept = {part.name_of(table) for part in (index.parts if index else ()) for table in part.files}
    for path in folder.glob("*.parquet*"):
        if path.name not in kept:
            path.unlink()


def _check_prefix(ledger: Path, folder: Path, index: DerivedIndex, key: VerifierKey, head: TreeHead) -> None:
    """Refuse tables that weren't derived from the first entries of what is signed now."""
    of = f"{index.tree_size} entries of {index.origin}, root {index.root[:16]}"
    what = f"The tables in {folder} were derived from {of}"
    if index.tree_size > head.size:
        raise TamperError(f"{what}, and the signed head covers {head.size}: the ledger was cut back. {mend(folder)}")
    root = head.root if index.tree_size == head.size else _root_at(ledger, index.tree_size, head)
    # A key that has handed over since is found in the entries after these.
    if index.vkey != key.text and (index.tree_size == head.size or root.hex() != index.root):
        raise TamperError(f"{what}, under another key than this ledger's. {mend(folder)}")
    if root.hex() != index.root:
        raise TamperError(f"{what}, which aren't the first entries of what is signed now. {mend(folder)}")


def _root_at(ledger: Path, size: int, head: TreeHead) -> bytes:
    """Return the root over the first entries, as the tiles have it; the scan that follows checks these."""
    whole, rest = divmod(size, TILE_WIDTH)
    edge = Frontier.of_tiles(ledger, whole * TILE_WIDTH)
    if rest:
        _, data = read_tile(ledger, ENTRIES, whole, needed_width(whole, head.size))
        for entry in decode_bundle(data)[:rest]:
            edge.append(leaf_hash(entry))
    return edge.root()


def _replayed(ledger: Path, index: DerivedIndex, start: int) -> _State:
    """Return what stood at an entry, from the entries that aren't steps: between them steps follow one another."""
    state = _State(RunHistory(), [])
    try:
        with (ledger / DETAILS_FILE).open("rb") as details:
            end = os.fstat(details.fileno()).st_size
            for rare in index.rare:
                if rare.index >= start:
                    break
                _fill(state.history, rare.index)
                data = base64.b64decode(rare.data)
                entry, line = decode_entry(data), None
                if has_details(entry):
                    if rare.details_at + rare.details_size > end:
                        raise ValueError(f"{DETAILS_FILE} ends before the details of entry {rare.index}.")
                    details.seek(rare.details_at)
                    line = check_line(details.read(rare.details_size), entry, f"{DETAILS_FILE} (entry {rare.index})")
                state.history.append(entry)
                if isinstance(entry, RunEntry | AmendEntry):
                    before = state.tables[-1] if state.tables else None
                    state.tables.append(read_tables(ScannedEntry(rare.index, data, entry, line), entry, before))
        _fill(state.history, start)
    except (LedgerError, ValueError) as error:
        folder = place_of(ledger)
        raise TamperError(f"{folder / INDEX_FILE} doesn't fit the ledger: {error} {mend(folder)}") from error
    return state


def _fill(history: RunHistory, size: int) -> None:
    """Take the steps up to an entry; what was in them isn't asked."""
    if (num := size - history.size) and history.in_force is not None:
        policy = dict(history.in_force.commitments).get("policy", b"")
        history.extend(history.num_steps, history.attempt, policy, [b""] * num)


class _Deriving:
    """One scan from the last part on, or from entry 0, whose rows become parts."""

    def __init__(
        self, ledger: Path, folder: Path, key: VerifierKey, head: TreeHead, before: DerivedIndex | None
    ) -> None:
        self._folder, self._key, self._head = folder, key, head
        self._key_before = before.vkey if before else key.text
        last = before.parts[-1] if before and before.parts else None
        start = last.first if last else 0
        roots: Sequence[TreeHead] = ()
        if before is None or last is None:
            self._rare, self._parts, self._sets = list[RareEntry](), list[DerivedPart](), RegionSets()
            state = _State(RunHistory(), [])
        else:
            self._rare = [one for one in before.rare if one.index < start]
            self._parts, self._sets = before.parts[:-1], RegionSets(list(before.sets))
            state = _replayed(ledger, before, start)
            roots = [TreeHead(before.tree_size, bytes.fromhex(before.root))]
        self._epoch = len(state.tables) - 1
        self._scan = ColumnScan(
            ledger,
            head,
            roots,
            start=start,
            history=state.history,
            tables=state.tables[-1] if state.tables else None,
            details_size=last.details_at if last else 0,
        )
        self._first, self._details_at, self._rows = start, self._scan.details_size, PartRows(self._sets)

    def run(self) -> DerivedIndex:
        """Scan, write the parts, and return what they are; nothing names them until the scan has ended well."""
        scan = self._scan
        for one in scan.blocks():
            if isinstance(one, StepBlock):
                self._rows.take(one, self._epoch)
                end = one.first + len(one.data)
            else:
                self._take_rare(one)
                end = one.index + 1
            if end == scan.frontier.size and end % TILE_WIDTH == 0 and self._rows.num_rows >= PART_ROWS:
                self._write(end)
        if self._key_before not in {one.text for one in operators(scan.history, self._key)}:
            msg = f"The tables in {self._folder} were derived under a key that never signed this ledger."
            raise TamperError(f"{msg} {mend(self._folder)}")
        if self._first < self._head.size:
            self._write(self._head.size)
        return DerivedIndex(
            format=FORMAT,
            origin=self._key.name,
            vkey=self._key.text,
            tree_size=self._head.size,
            root=self._head.root.hex(),
            rare=self._rare,
            sets=self._sets.known,
            parts=self._parts,
        )

    def _take_rare(self, item: ScannedEntry) -> None:
        self._epoch += isinstance(item.entry, RunEntry | AmendEntry)
        size = 0 if item.details is None else len(item.details) + 1
        data = base64.b64encode(item.data).decode()
        self._rare.append(RareEntry(item.index, data, self._scan.details_size - size, size))

    def _write(self, end: int) -> None:
        part = DerivedPart(self._first, end, self._details_at, {})
        told = {"origin": self._key.name, "tree_size": str(end), "root": self._scan.frontier.root().hex()}
        pairs = ", ".join(f"{name}: {text(value)}" for name, value in {"format": FORMAT, **told}.items())
        with connection() as database:
            for table, columns in self._rows.columns().items():
                num_rows = len(columns["entry"])
                if not num_rows:
                    continue
                path = self._folder / part.name_of(table)
                draft = draft_of(path)
                names = ", ".join(map(quoted, form_of(table)))
                database.execute(
                    f"COPY (SELECT {names} FROM columns) TO {text(str(draft))} "
                    f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{pairs}}})"
                )
                with draft.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                publish(draft, path)
                part.files[table] = digest, num_rows
        self._parts = [*self._parts, part]
        self._first, self._details_at, self._rows = end, self._scan.details_size, PartRows(self._sets)
