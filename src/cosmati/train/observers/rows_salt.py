"""The salt of a run's row commitments: drawn once, kept apart from the ledger, committed to by entry 0."""

from __future__ import annotations

import secrets
from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.row_blinds import salt_commitment
from cosmati.records.ledger import RunEntry
from cosmati.storage.atomic import create_secret

_SALT_BYTES = 32


def refuse_another_salt(ledger: Path, path: Path) -> None:
    """Compare the salt with what entry 0 commits to: with another one, nobody could open the rows of later steps."""
    first = next(iter(Scan(ledger, read_head(ledger, read_verifier_key(ledger)))), None)
    if first is None or not isinstance(first.entry, RunEntry):
        return
    if dict(first.entry.commitments).get("rows_salt") != salt_commitment(path.read_bytes()):
        msg = f"{path} isn't the salt that entry 0 of the ledger commits to. Put the run's own salt back."
        raise LedgerError(msg)


def keep_salt(path: Path, *, may_create: bool) -> None:
    """Draw a salt where there is none, and refuse one that a crash has cut: short, it would hide no row."""
    if not path.exists():
        if not may_create:
            raise LedgerError(f"{path} is gone, and the ledger's rows are salted with it. Put the run's own salt back.")
        create_secret(path, secrets.token_bytes(_SALT_BYTES))
    if (size := path.stat().st_size) != _SALT_BYTES:
        mend = "Delete it, and start the run again." if may_create else "Put the run's own salt back."
        raise LedgerError(f"{path} holds {size} bytes, and a salt has {_SALT_BYTES}: its writing was cut. {mend}")
