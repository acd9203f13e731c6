"""Which steps an auditor replays, so that neither side has chosen them; and the file that says what was found.

The segments follow from the signed tree head and from the auditor's own seed. The operator fixes the head first, and
doesn't know the seed; the auditor's seed alone chooses nothing, since the head is hashed with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from cosmati.errors import LedgerError
from cosmati.ledger.note import TreeHead
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.standing import StandingSteps

_DOMAIN = b"cosmati spot check 1\x00"


def choose_segments(head: TreeHead, seed: str, *, num_steps: int, number: int, length: int) -> list[range]:
    """Return the segments that a tree head and an auditor's seed choose, in the order of steps.

    Each begins at SHA-256(domain || size || root || SHA-256(seed) || i) modulo the places where one fits; one that was
    chosen before is passed over.

    Args:
        head: signed, and known to both before the seed is.
        seed: the auditor's own, which the operator hasn't seen.
        num_steps: that stand.
        number: of segments; all places, where there are fewer.
        length: of each, in steps.

    Raises:
        LedgerError: an empty seed, or no such segments.
    """
    places = num_steps - length + 1
    if not seed or number < 1 or length < 1 or places < 1:
        msg = (
            f"{number} segments of {length} steps can't be chosen from {num_steps} steps with the seed {seed!r}. Give "
            "at least one of each, no longer than the run, and a seed that nobody can guess."
        )
        raise LedgerError(msg)
    begun = _DOMAIN + head.size.to_bytes(8, "big") + head.root + hashlib.sha256(seed.encode()).digest()
    starts = list[int]()
    draw = 0
    while len(starts) < min(number, places):
        digest = hashlib.sha256(begun + draw.to_bytes(8, "big")).digest()
        start, draw = int.from_bytes(digest, "big") % places, draw + 1
        if start not in starts:
            starts.append(start)
    return [range(start, start + length) for start in sorted(starts)]


def result_of(
    ledger: VerifiedLedger,
    run: StandingSteps,
    segments: Sequence[SegmentResult],
    *,
    seed: str,
    witnessed: bool,
    compares_rows: bool,
    skipped: Sequence[str] = (),
    doubts: Sequence[str] = (),
    environment: Mapping[str, str],
) -> ReplayResult:
    """Return what was found, with the head under which it was."""
    return ReplayResult(
        origin=ledger.key.name,
        vkey=ledger.key.text,
        size=ledger.head.size,
        root=ledger.head.root.hex(),
        num_steps=run.num_steps,
        has_ended=run.end is not None,
        is_witnessed=witnessed,
        seed=seed,
        segments=tuple(segments),
        compares_rows=compares_rows,
        skipped=tuple(skipped),
        doubts=tuple(doubts),
        environment=dict(environment),
    )
