"""What blinds a run's row commitments: drawn once, kept apart from the ledger, committed to by entry 0.

Keys of rows can be forgotten one by one. The salt stays: it names what was forgotten, so that nobody can try ids out. A
run that was begun before rows had keys keeps its salt for both.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NoReturn

from cosmati.errors import LedgerError
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.row_blinds import secret_commitments
from cosmati.ledger.row_keys import KEY_BYTES, RowKeys
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE, RowsAt
from cosmati.records.ledger import RunEntry
from cosmati.storage.atomic import create_secret

_SALT_BYTES = 32


def refuse_other_secrets(ledger: Path, private: Path) -> None:
    """Compare salt and keys with what entry 0 commits to: with others, nobody could open the rows of later steps."""
    first = next(iter(Scan(ledger, read_head(ledger, read_verifier_key(ledger)))), None)
    if first is None or not isinstance(first.entry, RunEntry):
        return
    was, found = dict(first.entry.commitments), secret_commitments(private)
    for name, what, mend in (("rows_salt", "the salt", SALT_FILE), ("rows_keys", "the tree of row keys", KEYS_FILE)):
        if was.get(name) != found.get(name):
            msg = f"{private / mend} isn't {what} that entry 0 of the ledger commits to. Put the run's own {mend} back."
            raise LedgerError(msg)


def keep_secrets(private: Path, *, may_create: bool) -> None:
    """Draw what isn't there for a run that begins, and refuse a salt that a crash has cut: short, it would hide no row.

    Raises:
        LedgerError: the salt is cut, or gone where rows are salted with it.
    """
    keys, salt = private / KEYS_FILE, private / SALT_FILE
    if may_create and not keys.exists():
        RowKeys(secrets.token_bytes(KEY_BYTES)).save(keys)
    if not salt.exists():
        if not may_create:
            raise LedgerError(f"{salt} is gone, and the ledger's rows are salted with it. Put the run's own salt back.")
        create_secret(salt, secrets.token_bytes(_SALT_BYTES))
    if (size := salt.stat().st_size) != _SALT_BYTES:
        mend = "Delete it, and start the run again." if may_create else "Put the run's own salt back."
        raise LedgerError(f"{salt} holds {size} bytes, and a salt has {_SALT_BYTES}: its writing was cut. {mend}")


def refuse_forgotten(rows: RowsAt) -> NoReturn:
    """Refuse rows of which one was forgotten: nobody could ever open what the ledger would say of them.

    Raises:
        LedgerError: always.
    """
    msg = (
        f"Step {rows.step} has rows of class {rows.class_name} that were forgotten: their keys are gone from "
        f"private/{KEYS_FILE}. Train on with the data of the run that forgot them, or begin a new run."
    )
    raise LedgerError(msg)
