"""One verified pass over a ledger: every file that the checkpoint covers is read and checked on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import DETAILS_FILE, check_line, committed_digest
from cosmati.ledger.entry import decode_entry
from cosmati.ledger.history import RunHistory
from cosmati.ledger.note import TreeHead, VerifierKey, parse_checkpoint
from cosmati.ledger.rotation import check_rotation
from cosmati.ledger.tiles import (
    ENTRIES,
    TILE_WIDTH,
    Frontier,
    decode_bundle,
    encode_bundle,
    needed_width,
    read_tile,
    tile_files,
)
from cosmati.records.ledger import NO_DETAILS, Entry, EntryKind, KeyEntry
from cosmati.storage.merkle import leaf_hash

CHECKPOINT_FILE = "checkpoint"
VKEY_FILE = "operator.vkey"
KEY_KIND = bytes([EntryKind.KEY])


def read_verifier_key(directory: Path, vkey: str | None = None) -> VerifierKey:
    """Return the key in `operator.vkey`, which must be `vkey` where that is given, or one that `vkey` handed over to.

    Raises:
        LedgerError: there is no ledger in the directory, or `vkey` is no key. TamperError: the file is
        damaged, or holds another key.
    """
    path = directory / VKEY_FILE
    given = None if vkey is None else VerifierKey.parse(vkey)
    if not directory.is_dir() or not any(directory.iterdir()):
        raise LedgerError(f"There is no ledger in {directory}. Give the `ledger` directory of a run that keeps one.")
    try:
        text = path.read_bytes().decode("utf-8")
        found = VerifierKey.parse(text)
    except FileNotFoundError as error:
        raise TamperError(f"{path} is missing. Give a ledger directory, or restore the file from a copy.") from error
    except (UnicodeDecodeError, LedgerError) as error:
        raise TamperError(f"{path} is damaged: {error}") from error
    if text != found.text + "\n":
        raise TamperError(f"{path} has more or other white space than the key's one line. Restore it from a copy.")
    if given is not None and given != found and not _took_over(directory, given, found):
        raise TamperError(
            f"The ledger names the operator {found.text}, and you trust {given.text}. Ask the operator "
            "which is right; "
            "until then believe nothing in it."
        )
    return found


def operators(history: RunHistory, key: VerifierKey) -> tuple[VerifierKey, ...]:
    """Return the keys that have signed a log, the oldest first, the one that signs it now last.

    Args:
        history: of the whole log.
        key: that its checkpoint was verified with.

    Raises:
        TamperError: the log has handed over to another key.
    """
    keys = history.keys or [key.public]
    if keys[-1] != key.public:
        now = VerifierKey(key.name, keys[-1])
        raise TamperError(
            f"The log's last entries hand over to the key {now.text}, and {VKEY_FILE} names {key.text}: the change of "
            "keys was broken off. The operator runs `cosmati ledger rotate-key` again."
        )
    return tuple(VerifierKey(key.name, public) for public in keys)


def operators_of(directory: Path, key: VerifierKey) -> tuple[VerifierKey, ...]:
    """Return the keys that have signed a ledger, from one pass over it; see `operators`.

    Raises:
        TamperError: it doesn't verify.
    """
    from cosmati.ledger.columns import ColumnScan  # the quicker form of `Scan`, made from it

    scan = ColumnScan(directory, read_head(directory, key))
    for _ in scan.blocks():
        pass
    return operators(scan.history, key)


def _took_over(directory: Path, given: VerifierKey, found: VerifierKey) -> bool:
    try:
        return given.name == found.name and given in operators_of(directory, found)
    except TamperError:
        return False


def read_head(directory: Path, key: VerifierKey) -> TreeHead:
    """Return the tree head of the signed checkpoint; see `read_signed_head`."""
    return read_signed_head(directory, key)[0]


def read_signed_head(directory: Path, key: VerifierKey) -> tuple[TreeHead, str]:
    """Return the tree head of the signed checkpoint, and the checkpoint's text as it was read: a writer replaces it.

    Raises:
        TamperError: it is missing or doesn't verify.
    """
    path = directory / CHECKPOINT_FILE
    try:
        note = path.read_bytes()
        return parse_checkpoint(note, key), note.decode("utf-8")
    except FileNotFoundError as error:
        raise TamperError(f"{path} is missing, so nothing here is signed. Restore it from a copy.") from error
    except TamperError as error:
        raise TamperError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """An entry with its index, its bytes, and its details line (None where it has none)."""

    index: int
    data: bytes
    entry: Entry
    details: bytes | None


class Scan:
    """Reads the entries under a tree head in order and checks all that the head covers.

    Iterate to the end before you believe anything: the root is checked last.

    Args:
        directory: the ledger.
        head: a tree head whose signature was checked.
        roots: roots that the tree must have had at earlier sizes, such as those of pinned checkpoints.

    Attributes:
        history: What may follow, and which steps stand.
        frontier: The tree's right edge.
        bundle: Entries of the bundle that isn't full.
        details_size: Bytes of details.jsonl read so far.
    """

    def __init__(self, directory: Path, head: TreeHead, roots: Sequence[TreeHead] = ()) -> None:
        self.history = RunHistory()
        self.frontier = Frontier()
        self.bundle: list[bytes] = []
        self.details_size = 0
        self._directory = directory
        self._head = head
        self._roots: Mapping[int, list[bytes]] = {r.size: [q.root for q in roots if q.size == r.size] for r in roots}
        for root in roots:
            if root.size > head.size:
                raise TamperError(
                    f"The checkpoint covers {head.size} entries, and an earlier one covered {root.size}: "
                    "the ledger was "
                    "cut back. Restore it from a copy."
                )

    def __iter__(self) -> Iterator[ScannedEntry]:
        """Yield the entries.

        Raises:
            TamperError: something doesn't verify; the message says what and where.
        """
        with self._open_details() as details:
            self._check_root()
            for index in range(-(-self._head.size // TILE_WIDTH)):
                for data in self._read_bundle(index):
                    number = self.frontier.size
                    entry = self._admit(data)
                    line = self._check_details(details.readline(), entry, number) if has_details(entry) else None
                    yield ScannedEntry(number, data, entry, line)
        for level, tile, hashes in self.frontier.partial_tiles():
            self._check_tile(level, tile, hashes)

    def _open_details(self) -> BufferedReader:
        path = self._directory / DETAILS_FILE
        try:
            return path.open("rb")
        except FileNotFoundError as error:
            raise TamperError(f"{path} is missing. Restore it from a copy.") from error

    def _admit(self, data: bytes) -> Entry:
        number = self.frontier.size
        before = self._head_before(data)
        for level, tile, hashes in self.frontier.append(leaf_hash(data)):
            self._check_tile(level, tile, hashes)
        entry = self._decode(number, data, before)
        self._check_root()
        return entry

    def _head_before(self, data: bytes) -> TreeHead:
        """Return the tree on which an entry follows, with its root where the entry is about that."""
        return TreeHead(self.frontier.size, self.frontier.root() if data[1:2] == KEY_KIND else b"")

    def _decode(self, number: int, data: bytes, before: TreeHead) -> Entry:
        try:
            entry = decode_entry(data)
            if isinstance(entry, KeyEntry):
                check_rotation(entry, before)
            self.history.append(entry)
        except LedgerError as error:
            raise TamperError(f"Entry {number} in {self._directory} isn't valid: {error}") from error
        return entry

    def _check_root(self) -> None:
        size = self.frontier.size
        if size == self._head.size and self.frontier.root() != self._head.root:
            raise TamperError(
                f"The entries in {self._directory} don't give the root that the checkpoint signs: one was "
                "changed, "
                "dropped or moved. Restore the ledger from a copy."
            )
        if any(root != self.frontier.root() for root in self._roots.get(size, ())):
            raise TamperError(
                f"The first {size} entries in {self._directory} aren't those of the earlier checkpoint: "
                "the log was "
                "rewritten. Restore it from a copy, or treat it as another log."
            )

    def _read_bundle(self, index: int) -> list[bytes]:
        width = needed_width(index, self._head.size)
        path, data = read_tile(self._directory, ENTRIES, index, width)
        try:
            entries = decode_bundle(data)[:width]
        except TamperError as error:
            raise TamperError(f"{path} is damaged: {error}. Restore it from a copy.") from error
        if len(entries) < width:
            raise TamperError(f"{path} holds {len(entries)} of {width} entries. Restore it from a copy.")
        self._check_tile(ENTRIES, index, [encode_bundle([entry]) for entry in entries])
        self.bundle = entries if width < TILE_WIDTH else []
        return entries

    def _check_tile(self, level: int | str, index: int, units: Sequence[bytes]) -> None:
        """Check all stored widths of a tile; what a wider one holds beyond the head isn't covered."""
        read_tile(self._directory, level, index, len(units))
        for width, path in tile_files(self._directory, level, index):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            expected = b"".join(units[:width])
            if data[: len(expected)] != expected or (width <= len(units) and len(data) != len(expected)):
                raise TamperError(f"{path} doesn't hold what the entries give. Restore it from a copy.")

    def _check_details(self, line: bytes, entry: Entry, number: int) -> bytes | None:
        where = f"{self._directory / DETAILS_FILE}, byte {self.details_size} (entry {number}),"
        self.details_size += len(line)
        return check_line(line, entry, where)


def has_details(entry: Entry) -> bool:
    """Return whether an entry has a details line."""
    return committed_digest(entry) != NO_DETAILS
