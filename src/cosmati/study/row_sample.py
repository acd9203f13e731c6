"""A small sample of the rows that something was evaluated on, by which two sets of rows can be compared.

It is the smallest digests of the rows (a bottom-k sketch: Cohen and Kaplan 2007, doi:10.1145/1281100.1281133), so it
depends neither on the rows' order nor on how they're cut into batches, and shows sets that overlap in part.
"""

from __future__ import annotations

from collections.abc import Iterable

SAMPLE_SIZE = 128
COMMON_ROWS = 0.05
"""Share of rows that two sets may have in common and still be apart: copies of a row are common in real data."""
_LEAST_COMPARED = 59
"""Rows of which none is in the other set with a chance below 5 % where `COMMON_ROWS` are: 0.95 ** 59 = 0.048."""


def joined(samples: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the sample of several sets' rows together; none where those of any set aren't known."""
    found = list(samples)
    return smallest({digest for one in found for digest in one}) if all(found) else ()


def shared_share(one: tuple[str, ...], other: tuple[str, ...]) -> float | None:
    """Return about which share of the rows of the smaller of two sets is in the other one, too; None if unknown.

    Unknown is it, too, where too few rows can be compared for sets that are hardly apart to show it: a few hundred rows
    against many thousands.
    """
    # Up to the least of the samples' ends both sets are known whole.
    ends = [sample[-1] for sample in (one, other) if len(sample) == SAMPLE_SIZE]
    known = [{digest for digest in sample if not ends or digest <= min(ends)} for sample in (one, other)]
    fewest = min(len(digests) for digests in known)
    share = len(known[0] & known[1]) / fewest if fewest else 0.0
    is_told = fewest and (not ends or fewest >= _LEAST_COMPARED or share > COMMON_ROWS)
    return share if is_told else None


def smallest(digests: Iterable[str]) -> tuple[str, ...]:
    """Return the sample of digests: the smallest ones, in order."""
    return tuple(sorted(digests)[:SAMPLE_SIZE])
