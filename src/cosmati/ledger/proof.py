"""A proof that one entry is in a log, for who has nothing but the operator's key: RFC 6962, section 2.1.1, as JSON.

    {"format": "cosmati-inclusion/1",
     "checkpoint": the signed note, as text,
     "index": of the entry,
     "entry": its bytes in base64 (see `entry`),
     "details": its details line, whose SHA-256 is in the entry, or null,
     "path": [hash in base64, ...]}            the siblings from the leaf SHA-256(0x00 || entry) up to the root

The checkpoint may be cosigned by witnesses.

It shows that the operator signed a log with this entry in this place. It doesn't show what else is in the log: which
tables are in force for a step, or whether a resume superseded it, takes the whole ledger.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.cosignature import cosignatures
from cosmati.ledger.cosigned import CosignedHead
from cosmati.ledger.details import check_line, committed_digest
from cosmati.ledger.entry import decode_entry
from cosmati.ledger.evidence import NOBODY, TrustedEvidence, Witnessing, evidence_level, witnessed_in
from cosmati.ledger.note import TreeHead, VerifierKey, check_note, parse_checkpoint
from cosmati.ledger.reader import Scan, ScannedEntry, operators, read_signed_head, read_verifier_key
from cosmati.ledger.tables import in_force
from cosmati.records.foreign_json import read_foreign_json
from cosmati.records.ledger import NO_DETAILS, Entry, StepEntry
from cosmati.storage.merkle import MerkleTree, leaf_hash, node_hash

FORMAT = "cosmati-inclusion/1"


@dataclass(frozen=True, slots=True)
class Proven:
    """What a proof shows: that this entry, with these details, is in the log under this signed head."""

    origin: str
    index: int
    entry: Entry
    details: dict[str, Any] | None
    head: TreeHead
    evidence_level: str


def prove_inclusion(
    directory: Path, *, step: int | None = None, entry: int | None = None, vkey: str | None = None
) -> str:
    """Verify a ledger, and return the proof of one entry as JSON text.

    Its checkpoint is the largest one that a witness has cosigned and that covers the entry; the newest where none does.

    Args:
        directory: the ledger's.
        step: number of a step that stands; or
        entry: index of an entry.
        vkey: the operator's verifier key from a source that you trust.

    Raises:
        LedgerError: no ledger, not exactly one of `step` and `entry`, or the signed head doesn't cover it.
        TamperError: the ledger doesn't verify.
    """
    if (step is None) == (entry is None):
        raise LedgerError("A proof is of one entry. Give the number of a step, or the index of an entry.")
    key = read_verifier_key(directory, vkey)
    witnessing = Witnessing(directory, NOBODY)
    head, note = read_signed_head(directory, key)
    scan = Scan(directory, head, witnessing.heads)
    leaves: list[bytes] = []
    found: dict[int, ScannedEntry] = {}
    for item, _ in in_force(scan):
        leaves.append(leaf_hash(item.data))
        if item.index == entry or (isinstance(item.entry, StepEntry) and item.entry.step == step):
            found[item.index] = item
    witnessing.check(operators(scan.history, key))
    index = next((i for i in found if i == entry or i in scan.history.standing()), None)
    if index is None:
        held = f"{head.size} entries" if step is None else f"{scan.history.num_steps} steps"
        raise LedgerError(f"The signed head covers {held}, counted from 0. Name one of them.")
    details = found[index].details
    for cosigned, size in witnessing.notes(key):
        if size > index:
            note, leaves = cosigned, leaves[:size]
            break
    proof = {
        "format": FORMAT,
        "checkpoint": note,
        "index": index,
        "entry": base64.b64encode(found[index].data).decode(),
        "details": None if details is None else details.decode(),
        "path": [base64.b64encode(one).decode() for one in _audit_path(index, leaves)],
    }
    return json.dumps(proof, indent=1, ensure_ascii=False) + "\n"


def check_inclusion(text: str, vkey: str, witnesses: TrustedEvidence = NOBODY) -> Proven:
    """Check a proof, knowing the operator's key and nothing else.

    Args:
        text: what `prove_inclusion` returned.
        vkey: the operator's verifier key from a source that you trust, in its `name+id+base64` form.
        witnesses: whom you trust to have seen the log.

    Raises:
        LedgerError: `vkey` is no key, or the text is no proof. RefutedError: it doesn't prove what it says.
    """
    key = VerifierKey.parse(vkey)
    note, index, data, details, path = _read_proof(text)
    try:
        head = parse_checkpoint(note.encode(), key)
        if not 0 <= index < head.size or _root(index, head.size, leaf_hash(data), path) != head.root:
            raise TamperError(f"its hashes don't lead from entry {index} to the root that the checkpoint signs.")
        entry = decode_entry(data)
        if details is not None:
            check_line(details.encode() + b"\n", entry, "its details line")
        elif committed_digest(entry) != NO_DETAILS:
            raise TamperError("the details that the entry commits to aren't in it.")
        told = None if details is None else _read_details(details)
        seen = witnessed_in([CosignedHead(head, cosignatures(note.encode(), witnesses.keys), b"")], witnesses)
    except (TamperError, ValueError) as error:
        raise RefutedError(f"This proof doesn't hold: {error}") from error
    # Of another head a single proof can't tell whether it goes on from this one.
    own = witnesses.replayed if witnesses.replayed and witnesses.replayed[:2] == (key.name, head) else None
    return Proven(key.name, index, entry, told, head, evidence_level(head.size, seen, own))


def _read_proof(text: str) -> tuple[str, int, bytes, str | None, list[bytes]]:
    try:
        proof = read_foreign_json(text)
        if proof["format"] != FORMAT:
            raise ValueError(f"its format is {proof['format']!r:.40}, and this release reads {FORMAT}")
        note, index, details = proof["checkpoint"], proof["index"], proof["details"]
        data, *path = (base64.b64decode(one, validate=True) for one in (proof["entry"], *proof["path"]))
        if type(note) is not str or type(index) is not int or not isinstance(details, str | None):
            raise TypeError("a field has another type")
        check_note(note.encode(), "Its checkpoint")
    except (KeyError, TypeError, ValueError, LedgerError) as error:
        raise LedgerError(
            f"This is no proof that can be read: {error!r}. Give a file of `cosmati ledger prove`."
        ) from error
    return note, index, data, details, path


def _read_details(text: str) -> dict[str, Any]:
    told = read_foreign_json(text)
    if not isinstance(told, dict):
        raise TamperError("its details aren't a JSON object.")
    return told


def _audit_path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """Return the siblings from a leaf up to the root: PATH(m, D[n])."""
    if len(leaves) < 2:
        return []
    half = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = leaves[:half], leaves[half:]
    if index < half:
        return [*_audit_path(index, left), _fold(right)]
    return [*_audit_path(index - half, right), _fold(left)]


def _fold(leaves: Sequence[bytes]) -> bytes:
    tree = MerkleTree()
    for leaf in leaves:
        tree.append(leaf)
    return tree.root()


def _root(index: int, size: int, leaf: bytes, path: Sequence[bytes]) -> bytes | None:
    """Return the root that a leaf and its siblings give in a tree of that size, None where their number is wrong."""
    if size == 1:
        return None if path else leaf
    if not path:
        return None
    half = 1 << (size - 1).bit_length() - 1
    is_left = index < half
    below = _root(index if is_left else index - half, half if is_left else size - half, leaf, path[:-1])
    if below is None:
        return None
    left, right = (below, path[-1]) if is_left else (path[-1], below)
    return node_hash(left, right)
