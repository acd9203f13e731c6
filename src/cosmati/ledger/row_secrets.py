"""What blinds row commitments: the tree of row keys of a run, or the one salt of a run before it had such a tree.

A blind of version 3 is BLAKE3, keyed with the row's key, over the class's key, the keys of the other rows that it was
mixed or packed from, and `cosmati row ORIGIN`, a newline, `STEP/MICROBATCH/` and the slot (4 bytes, little-endian). So
each of them closes it when it's forgotten. Rows with negative ids have no key; the class's takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import blake3
import numpy as np
from numpy.typing import NDArray

from cosmati.errors import LedgerError
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.rows import BLIND_BYTES, commit_rows, derive_blinds, hash_rows

KEYS_FILE, SALT_FILE = "rows.keys", "rows.salt"
"""Names in a run's private folder."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows of one class that took part in a microbatch: a leaf each.

    Attributes:
        step: number of the step.
        microbatch: its index in the step.
        class_name: of the rows, as the ledger's tables name it.
        slots: int64 [rows], their places in the microbatch, rising.
        ids: int64 [rows, parents + 1], which the leaves have.
        contents: digests of the rows' content, uint8 [rows, 32]; None where the source doesn't know them.
        owners: int64 [rows, owners], ids of the rows whose content it is: of packs, of their documents. Negative ones
            fill up. None where `ids` says it.
    """

    step: int
    microbatch: int
    class_name: str
    slots: NDArray[np.int64]
    ids: NDArray[np.int64]
    contents: NDArray[np.uint8] | None = None
    owners: NDArray[np.int64] | None = None


class RowSecrets(Protocol):
    """Gives the blinds of rows."""

    @property
    def certificates(self) -> Mapping[str, int]:
        """Certificates of the deletions that have closed rows: number by digest, in hex."""
        ...

    def blinds(self, rows: RowsAt) -> list[bytes | None] | None:
        """Return each row's blind, 32 bytes, or None where it was forgotten; None for all where nobody here knows."""
        ...


@dataclass(frozen=True, slots=True)
class SaltedRows:
    """Blinds of version 2: all follow from one salt, so that none can be forgotten."""

    salt: bytes

    @property
    def certificates(self) -> Mapping[str, int]:
        """None: nothing is forgotten."""
        return {}

    def blinds(self, rows: RowsAt) -> list[bytes | None]:
        """Return each row's blind."""
        found = derive_blinds(self.salt, rows.step, rows.microbatch, 1 + int(rows.slots.max(initial=-1)))
        return [found[slot].tobytes() for slot in rows.slots.tolist()]


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Blinds of version 3: each follows from its rows' own keys.

    Args:
        keys: of the run's rows.
        origin: name of the run's log.
    """

    keys: RowKeys
    origin: str

    @property
    def certificates(self) -> Mapping[str, int]:
        """Of the deletions that have closed rows."""
        return self.keys.certificates

    def blinds(self, rows: RowsAt) -> list[bytes | None]:
        """Return each row's blind, or None where one of its rows was forgotten, or its class."""
        place = f"cosmati row {self.origin}\n{rows.step}/{rows.microbatch}/".encode()
        of_class = self.keys.of_class(rows.class_name)
        if of_class is None:
            return [None] * len(rows.slots)
        owners = rows.ids if rows.owners is None else rows.owners
        if owners.shape[1] > 1:
            return [*self._of_several(rows.slots.tolist(), owners.tolist(), of_class, place)]
        found: list[bytes | None] = []
        hasher, key_of, begin = blake3.blake3, self.keys.of, of_class + place
        for slot, row_id in zip(rows.slots.tolist(), owners[:, 0].tolist(), strict=True):
            key = of_class if row_id < 0 else key_of(row_id)
            found.append(None if key is None else hasher(begin + slot.to_bytes(4, "little"), key=key).digest())
        return found

    def _of_several(
        self, slots: list[int], owners: list[list[int]], of_class: bytes, place: bytes
    ) -> Iterator[bytes | None]:
        for slot, own in zip(slots, owners, strict=True):
            found = [self.keys.of(row_id) for row_id in own if row_id >= 0]
            keys = [key for key in found if key is not None]
            first, *others = keys or [of_class]
            message = b"".join((of_class, *others, place, slot.to_bytes(4, "little")))
            yield blake3.blake3(message, key=first).digest() if len(keys) == len(found) else None


def commit(rows: RowsAt, blinds: list[bytes | None]) -> bytes | None:
    """Return the commitment to rows, 32 bytes; None where some were forgotten, and nobody can make it any more."""
    known = [one for one in blinds if one is not None]
    if len(known) < len(blinds):
        return None
    whole = np.frombuffer(b"".join(known), np.uint8).reshape(-1, BLIND_BYTES)
    return commit_rows(hash_rows(whole, rows.ids, rows.contents))


def open_secrets(private: Path, origin: str) -> RowSecrets:
    """Return what blinds a run's rows.

    Args:
        private: the run's private folder.
        origin: name of its log.

    Raises:
        LedgerError: neither keys nor a salt are there, or can't be read.
    """
    path = private / KEYS_FILE
    if path.exists():
        return KeyedRows(RowKeys.load(path), origin)
    try:
        return SaltedRows((private / SALT_FILE).read_bytes())
    except OSError as error:
        msg = f"{private} has neither {KEYS_FILE} nor {SALT_FILE}: {error}. Only the operator has them."
        raise LedgerError(msg) from error
