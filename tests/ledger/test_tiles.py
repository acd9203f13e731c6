from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import TamperError
from cosmati.ledger.tiles import Frontier, decode_bundle, encode_bundle, needed_width, tile_path
from cosmati.storage.merkle import leaf_hash


def pairs(row: list[bytes]) -> list[bytes]:
    """The next level by RFC 9162's bottom-up form, without a lone last node."""
    return [hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(row[::2], row[1::2], strict=False)]


@pytest.mark.long
def test_tiles_of_three_levels_hold_the_hashes_of_every_eighth_level() -> None:
    size = 256 * 256 + 300
    levels = [[leaf_hash(i.to_bytes(3, "big")) for i in range(size)]]
    frontier, found = Frontier(), []
    for leaf in levels[0]:
        found += frontier.append(leaf)
    found += frontier.partial_tiles()
    while len(levels[-1]) > 1:
        levels.append(pairs(levels[-1]))
    stored = {(level, index): tile for level, index, tile in found}
    # floor(size / 256**level) mod 256 hashes at each right edge, as tlog-tiles says.
    assert [len(stored[key]) for key in ((0, 257), (1, 1), (2, 0))] == [44, 1, 1]
    assert len(found) == len(stored) == 257 + 1 + 3
    for level in range(3):
        row = [value for (at, _), tile in sorted(stored.items()) if at == level for value in tile]
        assert row == levels[8 * level]
    row = levels[0]
    while len(row) > 1:  # a lone last node moves up unchanged
        row = pairs(row) + row[len(row) & ~1 :]
    assert frontier.root() == row[0]


@pytest.mark.parametrize(
    ("level", "index", "width", "expected"),
    [
        (0, 0, 256, "tile/0/000"),
        (0, 0, 1, "tile/0/000.p/1"),
        (1, 999, 256, "tile/1/999"),
        (1, 1000, 256, "tile/1/x001/000"),
        (63, 1234067, 8, "tile/63/x001/x234/067.p/8"),
        ("entries", 1234067, 256, "tile/entries/x001/x234/067"),
    ],
)
def test_paths_are_those_of_the_specification(level: int | str, index: int, width: int, expected: str) -> None:
    assert tile_path(level, index, width) == expected


def test_widths_are_those_of_the_specifications_example() -> None:
    size = 70_000
    assert [needed_width(i, size) for i in (0, 272, 273, 274)] == [256, 256, 112, 0]
    assert [needed_width(i, size, 1) for i in (0, 1, 2)] == [256, 17, 0]
    assert [needed_width(i, size, 2) for i in (0, 1)] == [1, 0]


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_bundles_are_length_prefixed(entries: list[bytes]) -> None:
    bundle = encode_bundle(entries)
    assert bundle == b"".join(len(e).to_bytes(2, "big") + e for e in entries)
    assert decode_bundle(bundle) == entries
    for cut in range(1, len(entries[-1]) + 2 if entries else 0):
        with pytest.raises(TamperError):
            decode_bundle(bundle[:-cut])
