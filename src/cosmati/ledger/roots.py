"""What a ledger says of the weights: the parameter roots that its checkpoints and its end sign."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cosmati.ledger.query import VerifiedLedger
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry


@dataclass(frozen=True, slots=True)
class SignedRoot:
    """A signed root over parameters and buffers.

    Attributes:
        index: Of the entry that holds it.
        step: Number of steps done.
        root: 32 bytes.
        stands: Whether the steps before it stand; a resume further back supersedes it.
    """

    index: int
    step: int
    root: bytes
    stands: bool


def signed_roots(ledger: VerifiedLedger) -> tuple[SignedRoot, ...]:
    """Return the roots of checkpoints and ends, in the order of the log."""
    found: list[SignedRoot] = []
    for item in ledger.entries():
        if isinstance(item.entry, CheckpointEntry | EndEntry):
            found.append(SignedRoot(item.index, item.entry.step, item.entry.parameter_root, stands=True))
        elif isinstance(item.entry, ResumeEntry):
            start = item.entry.from_step
            found = [replace(one, stands=one.stands and one.step <= start) for one in found]
    return tuple(found)
