"""The files of one ledger, written in the order that a crash at any moment leaves mendable.

1. `details.jsonl`, then `wal`, each fdatasync'd: the batch is safe.
2. Tiles and bundles, then `checkpoint`, each by temporary file, fsync, rename; directories synced.
3. A fresh `wal`: the checkpoint covers all that the one before held.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import DETAILS_FILE, check_line, committed_digest
from cosmati.ledger.entry import decode_entry, encode_entry
from cosmati.ledger.history import RunHistory
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text, signature_line
from cosmati.ledger.reader import CHECKPOINT_FILE, VKEY_FILE, Scan, operators, read_head, read_verifier_key
from cosmati.ledger.rotation import rotation_entry
from cosmati.ledger.tiles import (
    ENTRIES,
    TILE_WIDTH,
    Frontier,
    decode_bundle,
    encode_bundle,
    needed_width,
    read_tile,
    tile_path,
)
from cosmati.ledger.wal import WAL_FILE, Wal, WalContent, read_wal
from cosmati.ledger.writer_lock import WriterLock
from cosmati.records.ledger import NO_DETAILS
from cosmati.storage.atomic import DRAFT_SUFFIX, replace_file, replace_files, sync, write_all
from cosmati.storage.fence import EPOCH, LOCK
from cosmati.storage.merkle import MerkleTree, leaf_hash

WAL_PURPOSE = "write-ahead log"


class LedgerFiles:
    """Files of a ledger that is open for writing. Not for several threads.

    Attributes:
        head: What the checkpoint on disk covers.
        frontier: The tree's right edge, the unsigned entries included.
    """

    def __init__(self, directory: Path, key: SigningKey, lock: WriterLock, scan: Scan, head: TreeHead) -> None:
        self.head = head
        self.frontier: Frontier = scan.frontier
        self._directory = directory
        self._key = key
        self._lock = lock
        self._bundle = list(scan.bundle)
        self._recent: list[bytes] = []
        self._full_tiles: list[tuple[int, int, list[bytes]]] = []
        self._details = os.open(directory / DETAILS_FILE, os.O_WRONLY | os.O_APPEND)
        self._wal: Wal | None = None

    @property
    def num_unsigned(self) -> int:
        """Entries that no checkpoint covers yet."""
        return len(self._recent)

    def append(self, batch: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Put entries, each with its details line or None, on disk."""
        self._lock.check()
        entries = [entry for entry, _ in batch]
        lines = b"".join(line + b"\n" for _, line in batch if line is not None)
        if lines:
            write_all(self._details, lines)
        assert self._wal is not None
        self._wal.append(entries)
        self._take(entries)

    def _take(self, entries: Iterable[bytes]) -> None:
        for entry in entries:
            self._recent.append(entry)
            self._full_tiles += self.frontier.append(leaf_hash(entry))

    def checkpoint(self) -> TreeHead:
        """Write tiles and bundles, sign and publish the tree head, start a fresh write-ahead log."""
        if self._recent or self._wal is None:
            self._lock.check()
            if self._recent:
                self._publish()
            before, self._wal = self._wal, Wal(self._directory, self._key.derive(WAL_PURPOSE), self.head)
            if before is not None:
                before.close()
        return self.head

    def rotate(self, new: SigningKey) -> TreeHead:
        """Hand over to another key: sign, and publish the tree with the entry that says so.

        Both keys sign that one checkpoint: until `operator.vkey` names the new key the old one verifies it.
        """
        self.checkpoint()
        self._lock.check()
        self._take([encode_entry(rotation_entry(self._key, new, self.head))])
        self._publish(new)
        return self.head

    def _publish(self, new: SigningKey | None = None) -> None:
        entries = self._bundle + self._recent
        first = self.head.size // TILE_WIDTH
        chunks = [entries[i : i + TILE_WIDTH] for i in range(0, len(entries), TILE_WIDTH)]
        data = {tile_path(ENTRIES, first + i, len(chunk)): encode_bundle(chunk) for i, chunk in enumerate(chunks)}
        for level, index, hashes in (*self._full_tiles, *self.frontier.partial_tiles()):
            data[tile_path(level, index, len(hashes))] = b"".join(hashes)
        replace_files(self._directory, data)
        head = TreeHead(self.frontier.size, self.frontier.root())
        publish_head(self._directory, self._key, head, *([new] if new else []))
        for name in data:
            shutil.rmtree(self._directory / (name + ".p"), ignore_errors=True)
        self._bundle = chunks[-1] if len(chunks[-1]) < TILE_WIDTH else []
        self._recent, self._full_tiles, self.head = [], [], head

    def entries(self, start: int, end: int) -> list[bytes]:
        """Return the bytes of the entries `start` to `end`."""
        signed = self.head.size
        found: list[bytes] = []
        for index in range(start // TILE_WIDTH, -(-min(end, signed) // TILE_WIDTH)):
            _, data = read_tile(self._directory, ENTRIES, index, needed_width(index, signed))
            skip = max(0, start - index * TILE_WIDTH)
            found += decode_bundle(data)[skip : min(end, signed) - index * TILE_WIDTH]
        return found + self._recent[max(0, start - signed) : max(0, end - signed)]

    def recover(self, wal: WalContent, scan: Scan) -> None:
        """Take the entries that no checkpoint covers from the write-ahead log, and cut what a crash tore.

        Raises:
            TamperError: the log isn't the operator's, or the details don't go with it.
        """
        wal.authenticate(self._key.derive(WAL_PURPOSE))
        tail = [entry for index, entry in sorted(wal.entries.items()) if index >= self.head.size]
        path = self._directory / DETAILS_FILE
        position = scan.details_size
        with path.open("rb") as details:
            details.seek(position)
            for data in tail:
                try:
                    entry = decode_entry(data)
                    scan.history.append(entry)
                except LedgerError as error:
                    raise TamperError(f"The write-ahead log in {self._directory} doesn't fit: {error}") from error
                if committed_digest(entry) != NO_DETAILS:
                    line = details.readline()
                    check_line(line, entry, f"{path}, byte {position},")
                    position += len(line)
        os.truncate(path, position)
        self._take(tail)

    def close(self) -> None:
        """Close the files and give the lock back; signs nothing."""
        if self._wal is not None:
            self._wal.close()
        os.close(self._details)
        self._lock.release()


def publish_head(directory: Path, key: SigningKey, head: TreeHead, *others: SigningKey) -> None:
    """Sign a tree head and put it in place as the checkpoint; others may sign it too."""
    text = checkpoint_text(key.name, head)
    note = key.sign_note(text) + "".join(signature_line(o.verifier, o.private.sign(text.encode())) for o in others)
    replace_file(directory / CHECKPOINT_FILE, note.encode())


def is_unbegun(directory: Path) -> bool:
    """Say whether a directory is new or empty, or has what a start leaves that was killed: nothing was appended.

    Raises:
        TamperError: its write-ahead log is damaged.
    """
    found = {path.name for path in directory.iterdir() if path.suffix != DRAFT_SUFFIX} if directory.exists() else set()
    if not found <= {LOCK, EPOCH, VKEY_FILE, DETAILS_FILE, WAL_FILE}:
        return False
    has_details = DETAILS_FILE in found and (directory / DETAILS_FILE).stat().st_size > 0
    return not has_details and (WAL_FILE not in found or not read_wal(directory).entries)


def create_files(directory: Path, key: SigningKey) -> tuple[LedgerFiles, RunHistory]:
    """Start a ledger in a directory that is new or empty, but for what a killed start has left; open it for writing.

    The checkpoint comes last: a directory that has one has a ledger.

    Raises:
        LedgerError: the directory has files. OSError: it can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not is_unbegun(directory):
        raise LedgerError(
            f"{directory} isn't empty, so no new ledger is started in it. Open the ledger that is there, "
            "or name another directory."
        )
    lock = WriterLock(directory)
    try:
        head = TreeHead(0, MerkleTree().root())
        replace_file(directory / VKEY_FILE, (key.verifier.text + "\n").encode())
        replace_file(directory / DETAILS_FILE, b"")
        begun = _begin(directory, key, lock, Scan(directory, head), head)
    except BaseException:
        lock.release()
        raise
    try:
        publish_head(directory, key, head)
        sync(directory.parent)
    except BaseException:
        begun[0].close()
        raise
    return begun


def open_files(directory: Path, key: SigningKey) -> tuple[LedgerFiles, RunHistory]:
    """Verify a ledger, take what the write-ahead log holds beyond the checkpoint, sign it; open for writing.

    Raises:
        LedgerError: no ledger, another operator's, or one that has a writer. TamperError: something doesn't
        verify. OSError: it can't be read or written.
    """
    verifier = read_verifier_key(directory)
    if verifier != key.verifier:
        raise LedgerError(
            f"The ledger {directory} is signed by {verifier.text}, and this key is {key.verifier.text}. "
            "Give the "
            "operator key with which it was created."
        )
    lock = WriterLock(directory)
    try:
        for path in directory.rglob(f"*{DRAFT_SUFFIX}"):
            path.unlink()
        wal = read_wal(directory)
        head = read_head(directory, verifier)
        scan = Scan(directory, head, [wal.head])
        covered = wal.entries
        for item in scan:
            check_overlap(covered, item.index, item.data)
        operators(scan.history, verifier)
        return _begin(directory, key, lock, scan, head, wal)
    except BaseException:
        lock.release()
        raise


def check_overlap(covered: dict[int, bytes], index: int, data: bytes) -> None:
    """Refuse a write-ahead log that has another entry than the tree."""
    if covered.get(index, data) != data:
        raise TamperError(f"Entry {index} of the write-ahead log isn't that of the tree. Restore the log from a copy.")


def _begin(
    directory: Path,
    key: SigningKey,
    lock: WriterLock,
    scan: Scan,
    head: TreeHead,
    wal: WalContent | None = None,
) -> tuple[LedgerFiles, RunHistory]:
    files = LedgerFiles(directory, key, lock, scan, head)
    try:
        if wal is not None:
            files.recover(wal, scan)
        files.checkpoint()
    except BaseException:
        files.close()
        raise
    return files, scan.history
