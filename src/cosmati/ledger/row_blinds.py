"""The blinds of rows, for whoever may compare row commitments: from its own secrets, or from a file for some steps.

Who has the run's keys or salt can open the rows of every step, and try ids and contents against them. A file of blinds
opens the steps that it was written for and no others. Nobody has to trust it: with other blinds, commitments don't fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rfc8785

from cosmati.errors import LedgerError
from cosmati.ledger.row_keys import KEYS_MAGIC, RowKeys
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE, KeyedRows, RowsAt, RowSecrets, SaltedRows
from cosmati.ledger.rows import BLIND_BYTES, ROWS_VERSION, SALTED_VERSION, derive_blinds
from cosmati.ledger.standing import StandingSteps, microbatch_of_cells
from cosmati.records.foreign_json import read_foreign_json

_KIND = "cosmati row blinds"
_MORE_SLOTS = 16
"""Rows of a microbatch that took no part have blinds, too."""


@dataclass(frozen=True, slots=True)
class Substituted:
    """In whose place steps have tombstones, since a deletion; for who replays them without the run's private folder.

    Attributes:
        classes: names.
        rows: ids, of packs those of their documents.
        data: the digest of the data without them, which their commitment is of.
    """

    classes: tuple[str, ...]
    rows: frozenset[int] = field(repr=False)
    data: str


@dataclass(frozen=True, slots=True)
class FileOfBlinds:
    """What a file of blinds has.

    Attributes:
        version: of the blinds.
        told: the blinds of a microbatch's slots, one after another, by `STEP/MICROBATCH`.
        closed: slots whose rows were forgotten, likewise.
        certificates: of the deletions by which they were: number by digest, in hex.
        substituted: what has tombstones in its place, by the digest of the deletion.
    """

    version: int
    told: Mapping[str, bytes]
    closed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    certificates: Mapping[str, int] = field(default_factory=dict)
    substituted: Mapping[str, Substituted] = field(default_factory=dict)

    def blinds(self, rows: RowsAt) -> list[bytes | None] | None:
        """Return each row's blind, or None where it was forgotten; None for all where the file hasn't them."""
        place = f"{rows.step}/{rows.microbatch}"
        found, closed = self.told.get(place), self.closed.get(place, frozenset())
        if found is None or len(found) < BLIND_BYTES * (1 + int(rows.slots.max(initial=-1))):
            return None
        starts = (BLIND_BYTES * rows.slots).tolist()
        each = zip(rows.slots.tolist(), starts, strict=True)
        return [None if slot in closed else found[start : start + BLIND_BYTES] for slot, start in each]


class RecordedBlinds:
    """Keeps the blinds that a replay of the operator's asks for, to write them down.

    Args:
        secrets: of the run.
        segment: the steps of which they're kept; a replay takes others on the way.
    """

    def __init__(self, secrets: RowSecrets, segment: range) -> None:
        self._secrets, self._segment = secrets, segment
        self._kept: dict[str, dict[int, bytes | None]] = {}

    @property
    def certificates(self) -> Mapping[str, int]:
        """Of the deletions that have closed rows."""
        return self._secrets.certificates

    def blinds(self, rows: RowsAt) -> list[bytes | None] | None:
        """Return what the run's secrets give, and keep it."""
        found = self._secrets.blinds(rows)
        if found is not None and rows.step in self._segment:
            kept = self._kept.setdefault(f"{rows.step}/{rows.microbatch}", {})
            kept.update(zip(rows.slots.tolist(), found, strict=True))
        return found

    def to_bytes(self, run: StandingSteps, substituted: Mapping[str, Substituted]) -> bytes:
        """Return the file.

        Args:
            run: of which it is.
            substituted: what has tombstones in its place, by the digest of the deletion.
        """
        told, closed = dict[str, str](), dict[str, list[int]]()
        for place, kept in self._kept.items():
            slots = range(1 + max(kept, default=-1))
            told[place] = b"".join(kept.get(slot) or bytes(BLIND_BYTES) for slot in slots).hex()
            if gone := sorted(slot for slot, blind in kept.items() if blind is None):
                closed[place] = gone
        more: dict[str, Any] = {"closed": closed, "certificates": dict(self.certificates)} if closed else {}
        if substituted:
            more["substituted"] = {
                # As texts: JSON's numbers end at 2 ** 53.
                asked: {"classes": list(one.classes), "rows": [str(r) for r in sorted(one.rows)], "data": one.data}
                for asked, one in substituted.items()
            }
        return _file(run, _version(run), told, more)


def _version(run: StandingSteps) -> int:
    return ROWS_VERSION if "rows_keys" in dict(run.ledger.run.commitments) else SALTED_VERSION


def _file(run: StandingSteps, version: int, told: Mapping[str, str], more: Mapping[str, Any]) -> bytes:
    head: dict[str, Any] = {"kind": _KIND, "version": version, "origin": run.ledger.key.name, "blinds": dict(told)}
    return rfc8785.dumps(head | dict(more))


def secrets_of_run(run: StandingSteps, private: Path) -> RowSecrets:
    """Return what blinds the rows of a run, from its private folder.

    Raises:
        LedgerError: what entry 0 commits to isn't there, or is something else.
    """
    path = private / (KEYS_FILE if _version(run) == ROWS_VERSION else SALT_FILE)
    try:
        return secrets_in(run, path.read_bytes())
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error}. Only the operator has it.") from error


def secrets_in(run: StandingSteps, data: bytes) -> RowSecrets:
    """Return what blinds the rows of a run, from a file: of blinds, of its row keys, or its salt.

    Raises:
        LedgerError: it's of another run, or damaged; or entry 0 commits to another one.
    """
    if data.startswith(b'{"'):
        return read_blinds(run, data)
    return keys_of_file(run, data) if data.startswith(KEYS_MAGIC) else blinds_of_salt(run, data)


def keys_of_file(run: StandingSteps, data: bytes) -> RowSecrets:
    """Return the blinds of a file of row keys.

    Raises:
        LedgerError: it's damaged, or entry 0 commits to another tree.
    """
    keys = RowKeys.from_bytes(data)
    if dict(run.ledger.run.commitments).get("rows_keys") != keys.commitment:
        msg = (
            "These row keys aren't of the tree that entry 0 commits to, so no row commitment can be compared with "
            "them. Give the run's own private/rows.keys, or none."
        )
        raise LedgerError(msg)
    return KeyedRows(keys, run.ledger.key.name)


def blinds_of_salt(run: StandingSteps, salt: bytes) -> RowSecrets:
    """Return the blinds of a run's salt, where its rows are salted.

    Raises:
        LedgerError: entry 0 commits to another salt, or to keys.
    """
    if dict(run.ledger.run.commitments).get("rows_salt") != salt_commitment(salt):
        msg = (
            "This salt isn't the one that entry 0 commits to, so no row commitment can be compared with it. Give the "
            "run's own private/rows.salt, or none."
        )
        raise LedgerError(msg)
    if _version(run) == ROWS_VERSION:
        raise LedgerError("This run's rows have keys, and its salt opens none of them. Give private/rows.keys.")
    return SaltedRows(salt)


def salt_commitment(salt: bytes) -> bytes:
    """Return what entry 0 commits to of the rows' salt: 32 bytes."""
    return hashlib.sha256(b"cosmati rows salt" + salt).digest()


def secret_commitments(private: Path) -> dict[str, bytes]:
    """Return what entry 0 commits to of a run's salt and row keys, 32 bytes each.

    Raises:
        LedgerError: the keys are damaged.
    """
    found = {"rows_salt": salt_commitment((private / SALT_FILE).read_bytes())}
    keys = private / KEYS_FILE
    return found | ({"rows_keys": RowKeys.load(keys).commitment} if keys.exists() else {})


def write_blinds(run: StandingSteps, salt: bytes, segment: range) -> bytes:
    """Return the file of the blinds of some steps of a run whose rows are salted: for an auditor, in place of the salt.

    Raises:
        LedgerError: entry 0 commits to another salt, or to keys.
    """
    blinds_of_salt(run, salt)
    told = dict[str, str]()
    for item, entry, _ in run.steps(segment.start, segment.stop):
        rows = dict[int, int]()
        for m, cell in zip(microbatch_of_cells(item, entry), entry.microbatches, strict=False):
            rows[m] = rows.get(m, 0) + cell.num_rows
        for m in rows:
            # As many as the fullest microbatch's rows could need: those without a part have slots, too.
            number = 2 * max(rows.values()) + _MORE_SLOTS
            told[f"{entry.step}/{m}"] = derive_blinds(salt, entry.step, m, number).tobytes().hex()
    return _file(run, SALTED_VERSION, told, {})


def read_blinds(run: StandingSteps, data: bytes) -> FileOfBlinds:
    """Return the blinds of a file.

    Raises:
        LedgerError: it's none, or of another run.
    """
    try:
        file = read_foreign_json(data)
        kind, origin = (file["kind"], file["version"]), file["origin"]
        found = FileOfBlinds(
            file["version"],
            {place: bytes.fromhex(text) for place, text in file["blinds"].items()},
            {place: frozenset(slots) for place, slots in file.get("closed", {}).items()},
            {str(digest): int(number) for digest, number in file.get("certificates", {}).items()},
            {asked: _substituted(one) for asked, one in file.get("substituted", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"This is no file of row blinds: {error!r}. `cosmati ledger blinds` writes one.") from error
    if kind != (_KIND, _version(run)) or origin != run.ledger.key.name:
        raise LedgerError(f"These row blinds are of {origin!r} in form {kind!r}. Ask for those of this run.")
    return found


def _substituted(told: Mapping[str, Any]) -> Substituted:
    return Substituted(tuple(map(str, told["classes"])), frozenset(map(int, told["rows"])), str(told["data"]))
