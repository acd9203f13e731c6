"""A small sample of the rows that something was evaluated on, by which two sets of rows can be compared.

It is the smallest digests of the rows (a bottom-k sketch: Cohen and Kaplan 2007, doi:10.1145/1281100.1281133), so it
depends neither on the rows' order nor on how they're cut into batches, and shows sets that overlap in part.
"""

from __future__ import annotations

from collections.abc import Iterable

SAMPLE_SIZE = 128


def joined(samples: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the sample of several sets' rows together; none where those of any set aren't known."""
    found = list(samples)
    return smallest({digest for one in found for digest in one}) if all(found) else ()


def shared_share(one: tuple[str, ...], other: tuple[str, ...]) -> float | None:
    """Return about which share of the rows of the smaller of two sets is in the other one, too; None if unknown."""
    # Up to the least of the samples' ends both sets are known whole.
    ends = [sample[-1] for sample in (one, other) if len(sample) == SAMPLE_SIZE]
    known = [{digest for digest in sample if not ends or digest <= min(ends)} for sample in (one, other)]
    fewest = min(len(digests) for digests in known)
    return len(known[0] & known[1]) / fewest if fewest else None


def smallest(digests: Iterable[str]) -> tuple[str, ...]:
    """Return the sample of digests: the smallest ones, in order."""
    return tuple(sorted(digests)[:SAMPLE_SIZE])
