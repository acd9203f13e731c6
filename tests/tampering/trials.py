"""One campaign over everything that leaves a run: what is tampered with, by whom it's found, and what it covered.

A trial tampers once, seeded, with one thing, and says of it one of three words. *found*: who checks it was told.
*harmless*: it was taken, and all that it covers reads as before, by a reader that isn't ours. *missed*: it was taken,
and something reads otherwise. *readers differ*: two that check the same don't agree.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FOUND, HARMLESS, MISSED, DIFFER = "found", "harmless", "missed", "readers differ"


@dataclass(frozen=True)
class Trial:
    """What came of one tampering.

    Attributes:
        kind: What was done.
        outcome: One of the four words above.
        outside: What other people's verifier said: found, taken, or nothing where it wasn't asked.
    """

    kind: str
    outcome: str
    outside: str = ""


class Target(Protocol):
    """Something that can be tampered with."""

    name: str

    def check_untouched(self) -> None:
        """Fail unless what nobody touched is taken."""

    def try_once(self, draw: random.Random) -> Trial:
        """Tamper once and have it checked."""


def campaign(target: Target, seeds: Iterable[int]) -> tuple[Counter[tuple[str, str, str]], list[int]]:
    """Return how often each kind came to what, and the seeds of those that nobody may miss."""
    counts, wrong = Counter[tuple[str, str, str]](), []
    for seed in seeds:
        one = target.try_once(random.Random(f"{target.name} {seed}"))
        counts[one.kind, one.outcome, one.outside] += 1
        if one.outcome in {MISSED, DIFFER}:
            wrong.append(seed)
    return counts, wrong


def change_bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Flip, cut, drop, repeat or swap some bytes; the kind, and what is left."""
    told, kind = bytearray(data), draw.choice(["flip", "flip", "truncate", "drop", "duplicate", "reorder"])
    place = draw.randrange(max(1, len(told)))
    end = place + draw.randrange(1, 100)
    if kind == "flip" and told:
        told[place] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del told[place:]
    elif kind == "drop":
        del told[place:end]
    elif kind == "duplicate":
        told[place:place] = told[place:end]
    elif told:
        other = draw.randrange(len(told))
        told[place], told[other] = told[other], told[place]
    return kind, bytes(told)
