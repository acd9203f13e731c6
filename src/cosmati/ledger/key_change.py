"""The steps of a change of the operator's key, so that a crash between any two leaves what a second call finishes.

1. The new key is written beside the old one, as `operator.key.next`.
2. The entry that both sign is published, under a checkpoint that both sign. From here on the old key can't go on.
3. `operator.vkey` names the new key; a fresh write-ahead log is under it; it takes the old one's place.
"""

from __future__ import annotations

from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.files import WAL_PURPOSE, open_files
from cosmati.ledger.keys import SigningKey, create_key, load_key
from cosmati.ledger.note import VerifierKey, parse_checkpoint
from cosmati.ledger.reader import CHECKPOINT_FILE, VKEY_FILE, Scan, operators, read_signed_head, read_verifier_key
from cosmati.ledger.wal import Wal, read_wal
from cosmati.ledger.writer_lock import WriterLock
from cosmati.storage.atomic import publish, replace_file

NEXT_KEY = "operator.key.next"


def rotate_key(directory: Path, key_file: Path) -> tuple[VerifierKey, VerifierKey]:
    """Have a ledger signed with a new key from here on; return the old key and the new one.

    The old key's file is deleted: who still has a copy of it can't sign what follows. A change that was broken off is
    finished.

    Args:
        directory: the ledger's, which nobody writes to now.
        key_file: the operator's.

    Raises:
        LedgerError: no ledger, another key's, or one that has a writer. TamperError: something doesn't verify.
    """
    present = read_verifier_key(directory)
    next_file = key_file.with_name(NEXT_KEY)
    name = present.name
    new = load_key(next_file, name=name) if next_file.exists() else create_key(next_file, name=name)
    if not _is_published(directory, present, new):
        files, _ = open_files(directory, load_key(key_file, name=name))
        try:
            files.rotate(new)
        finally:
            files.close()
    keys = _finished(directory, new, next_file, key_file)
    return keys[-2], keys[-1]


def _is_published(directory: Path, present: VerifierKey, new: SigningKey) -> bool:
    """Return whether the log has handed over to the new key already."""
    if present == new.verifier:
        return True
    _, note = read_signed_head(directory, present)
    try:
        parse_checkpoint(note.encode(), new.verifier)
    except TamperError:
        return False
    return True


def _finished(directory: Path, new: SigningKey, next_file: Path, key_file: Path) -> tuple[VerifierKey, ...]:
    lock = WriterLock(directory)
    try:
        note = (directory / CHECKPOINT_FILE).read_bytes()
        head = parse_checkpoint(note, new.verifier)
        scan = Scan(directory, head)
        for _ in scan:
            pass
        keys = operators(scan.history, new.verifier)
        if any(index >= head.size for index in read_wal(directory).entries):
            raise LedgerError(
                f"{directory} has entries that the old key's log holds alone. Open the run once, then again."
            )
        replace_file(directory / VKEY_FILE, (new.verifier.text + "\n").encode())
        Wal(directory, new.derive(WAL_PURPOSE), head).close()
        publish(next_file, key_file)
    finally:
        lock.release()
    return keys
