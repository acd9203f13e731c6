"""The blinds of rows, for whoever may compare row commitments: from the run's salt, or from a file for some steps.

Who has the salt can open the rows of every step, and try ids and contents against them. A file of blinds opens the
steps that it was written for and no others. Nobody has to trust it: with other blinds, commitments don't fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import rfc8785
from numpy.typing import NDArray

from cosmati.errors import LedgerError
from cosmati.ledger.rows import BLIND_BYTES, ROWS_VERSION, derive_blinds
from cosmati.ledger.standing import StandingSteps, microbatch_of_cells

_KIND = "cosmati row blinds"
_MORE_SLOTS = 16
"""Rows of a microbatch that took no part have blinds, too."""


class RowBlinds(Protocol):
    """Gives the blinds of a microbatch's rows [rows, 32]; None where it hasn't them."""

    def __call__(self, step: int, microbatch: int, num_rows: int) -> NDArray[np.uint8] | None:
        """Return them."""


def blinds_of_salt(run: StandingSteps, salt: bytes) -> RowBlinds:
    """Return the blinds of a run's salt.

    Raises:
        LedgerError: entry 0 commits to another salt.
    """
    if dict(run.ledger.run.commitments).get("rows_salt") != salt_commitment(salt):
        msg = (
            "This salt isn't the one that entry 0 commits to, so no row commitment can be compared with it. Give the "
            "run's own private/rows.salt, or none."
        )
        raise LedgerError(msg)
    return lambda step, microbatch, num_rows: derive_blinds(salt, step, microbatch, num_rows)


def salt_commitment(salt: bytes) -> bytes:
    """Return what entry 0 commits to of the rows' salt: 32 bytes."""
    return hashlib.sha256(b"cosmati rows salt" + salt).digest()


def write_blinds(run: StandingSteps, salt: bytes, segment: range) -> bytes:
    """Return the file of the blinds of some steps: for an auditor, in place of the salt.

    Raises:
        LedgerError: entry 0 commits to another salt.
    """
    derive = blinds_of_salt(run, salt)
    told = dict[str, str]()
    for item, entry, _ in run.steps(segment.start, segment.stop):
        rows = dict[int, int]()
        for m, cell in zip(microbatch_of_cells(item, entry), entry.microbatches, strict=False):
            rows[m] = rows.get(m, 0) + cell.num_rows
        for m in rows:
            # As many as the fullest microbatch's rows could need: those without a part have slots, too.
            found = derive(entry.step, m, 2 * max(rows.values()) + _MORE_SLOTS)
            assert found is not None, "a salt has all"
            told[f"{entry.step}/{m}"] = found.tobytes().hex()
    return rfc8785.dumps({"kind": _KIND, "version": ROWS_VERSION, "origin": run.ledger.key.name, "blinds": told})


def read_blinds(run: StandingSteps, data: bytes) -> RowBlinds:
    """Return the blinds of a file.

    Raises:
        LedgerError: it's none, or of another run.
    """
    try:
        file = json.loads(data)
        kind, origin = (file["kind"], file["version"]), file["origin"]
        told: Mapping[str, bytes] = {place: bytes.fromhex(text) for place, text in file["blinds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"This is no file of row blinds: {error!r}. `cosmati ledger blinds` writes one.") from error
    if kind != (_KIND, ROWS_VERSION) or origin != run.ledger.key.name:
        raise LedgerError(f"These row blinds are of {origin!r} in form {kind!r}. Ask for those of this run.")

    def find(step: int, microbatch: int, num_rows: int) -> NDArray[np.uint8] | None:
        found = told.get(f"{step}/{microbatch}", b"")
        if len(found) < BLIND_BYTES * num_rows or len(found) % BLIND_BYTES:
            return None
        return np.frombuffer(found, np.uint8).reshape(-1, BLIND_BYTES)[:num_rows]

    return find
