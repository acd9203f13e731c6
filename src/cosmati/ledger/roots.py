"""What a ledger says of the weights: the parameter roots that its checkpoints and its end sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import members_of
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EndEntry, ResumeEntry

FORGOTTEN = "forgotten"
"""Name of what an amendment's details say of a deletion."""
CERTIFICATE = "certificate"
"""Name of what they say of its certificate, beside `FORGOTTEN`, which is what was substituted."""


@dataclass(frozen=True, slots=True)
class SignedRoot:
    """A signed root over parameters and buffers.

    Attributes:
        index: Of the entry that holds it.
        step: Number of steps done.
        root: 32 bytes.
        stands: Whether the steps before it stand, and nothing was dropped from the model since: a resume further back
            supersedes it, and so does a deletion that leaves the steps and drops a part.
    """

    index: int
    step: int
    root: bytes
    stands: bool


def signed_roots(ledger: VerifiedLedger) -> tuple[SignedRoot, ...]:
    """Return the roots of checkpoints and ends, in the order of the log."""
    found: list[SignedRoot] = []
    dropped = {tables.index for tables in ledger.tables if drops(tables)}
    for item in ledger.entries():
        if isinstance(item.entry, CheckpointEntry | EndEntry):
            found.append(SignedRoot(item.index, item.entry.step, item.entry.parameter_root, stands=True))
        elif isinstance(item.entry, ResumeEntry):
            start = item.entry.from_step
            found = [replace(one, stands=one.stands and one.step <= start) for one in found]
        elif isinstance(item.entry, AmendEntry) and item.index in dropped:
            found = [replace(one, stands=False) for one in found]
    return tuple(found)


def drops(tables: Tables) -> bool:
    """Return whether an amendment says that a part of the model was dropped."""
    told = tables.details.get(FORGOTTEN)
    is_new = any(name == FORGOTTEN for name, *_ in tables.changes)
    return is_new and isinstance(told, Mapping) and told.get("method") == "drop"


def signed_certificates(ledger: VerifiedLedger) -> list[str]:
    """Return the digests of the certificates of deletions that a ledger has signed, in order."""
    told = [t.details.get(CERTIFICATE) for t in ledger.tables if any(c[0] == CERTIFICATE for c in t.changes)]
    return [str(one.get("digest")) for one in told if isinstance(one, dict)]


def certificates_of_drops(ledger: VerifiedLedger, class_name: str) -> list[str]:
    """Return the digests of the signed certificates of drops of a class: only these leave steps that had the rows.

    Args:
        ledger: which signs them.
        class_name: of the rows; of several classes, each counts.
    """
    found = []
    for tables in ledger.tables:
        told, forgotten = tables.details.get(CERTIFICATE), tables.details.get(FORGOTTEN)
        is_new = any(change[0] == CERTIFICATE for change in tables.changes)
        if is_new and isinstance(told, dict) and isinstance(forgotten, dict) and forgotten.get("method") == "drop":
            of = tuple(map(str, forgotten.get("classes", ())))
            if any(one == name or one.startswith(f"{name}/") for one in members_of(class_name) for name in of):
                found.append(str(told.get("digest")))
    return found
