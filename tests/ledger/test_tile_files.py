"""Which file of a tile is read, and that the edge of a tree is the same by leaves, by tiles and from files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.tiles import (
    ENTRIES,
    Frontier,
    decode_bundle,
    encode_bundle,
    needed_width,
    read_tile,
    tile_files,
    tile_path,
)
from tests.storage.rfc6962 import root_of

Tile = tuple[int, int, list[bytes]]


def leaves(start: int, number: int) -> list[bytes]:
    return [hashlib.sha256(n.to_bytes(4, "big")).digest() for n in range(start, start + number)]


def put(folder: Path, name: str, data: bytes = b"") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ----------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize(
    ("index", "path"),
    [
        (0, "000"),
        (10, "010"),
        (100, "100"),
        (12345, "x012/345"),
        (999999, "x999/999"),
        (1000000, "x001/x000/000"),
        (10**9, "x001/x000/x000/000"),
    ],
)
def test_an_index_is_written_by_three_digits(index: int, path: str) -> None:
    assert tile_path(3, index) == f"tile/3/{path}"
    assert tile_path(ENTRIES, index, 255) == f"tile/entries/{path}.p/255"


def test_the_widths_of_a_tree_are_counted_by_hand() -> None:
    for size in (0, 1, 255, 256, 257, 511, 512, 65535, 65536, 65537, 65792):
        for level, unit in ((0, 1), (1, 256), (2, 65536)):
            known = size // unit
            for index in (0, 1, 255, 256, 257):
                assert needed_width(index, size, level) == sum(
                    index * 256 <= n < index * 256 + 256 for n in range(known)
                )
    assert needed_width(0, 300) == needed_width(0, 300, 0) == 256


def test_widths_are_listed_from_the_narrowest_to_the_full_one(tmp_path: Path) -> None:
    assert tile_files(tmp_path, 0, 1) == []
    for name in ("10", "9", "255", "1", "0", "256", "300", "٣", "x", "9.tmp"):
        put(tmp_path, f"tile/0/001.p/{name}")
    (tmp_path / "tile/0/001.p/7").mkdir()
    put(tmp_path, "tile/0/000")
    put(tmp_path, "tile/1/001")
    found = [(width, tmp_path / f"tile/0/001.p/{width}") for width in (1, 9, 10, 255)]
    assert tile_files(tmp_path, 0, 1) == found
    put(tmp_path, "tile/0/001")
    assert tile_files(tmp_path, 0, 1) == [*found, (256, tmp_path / "tile/0/001")]
    assert tile_files(tmp_path, 0, 0) == [(256, tmp_path / "tile/0/000")]
    assert tile_files(tmp_path, ENTRIES, 0) == []


def test_the_width_that_is_asked_for_is_read_and_else_the_full_tile(tmp_path: Path) -> None:
    part = put(tmp_path, "tile/0/002.p/5", b"part")
    put(tmp_path, "tile/0/002.p/6", b"another")
    assert read_tile(tmp_path, 0, 2, 5) == (part, b"part")
    with pytest.raises(TamperError) as caught:
        read_tile(tmp_path, 0, 2, 4)
    assert str(caught.value).startswith(f"{tmp_path / 'tile/0/002.p/4'} is missing, and the checkpoint covers it.")
    full = put(tmp_path, "tile/0/002", b"full")
    assert read_tile(tmp_path, 0, 2, 5) == (part, b"part")
    assert read_tile(tmp_path, 0, 2, 4) == read_tile(tmp_path, 0, 2, 256) == (full, b"full")
    # A file in the folder's place isn't the tile.
    put(tmp_path, "tile/1/000.p")
    with pytest.raises(TamperError, match=r"tile/1/000\.p/3 is missing"):
        read_tile(tmp_path, 1, 0, 3)


def test_a_bundle_that_ends_within_an_entry_says_in_which() -> None:
    whole = encode_bundle([b"", b"abc", b"d" * 65535])
    assert decode_bundle(whole) == [b"", b"abc", b"d" * 65535]
    assert decode_bundle(b"") == []
    for cut, number in ((1, 0), (3, 1), (4, 1), (5, 1), (6, 1), (8, 2), (9, 2), (len(whole) - 1, 2)):
        with pytest.raises(TamperError) as caught:
            decode_bundle(whole[:cut])
        assert str(caught.value) == f"it ends inside its entry {number}"
    assert decode_bundle(whole[:2]) == [b""]
    assert decode_bundle(whole[:7]) == [b"", b"abc"]


# ------------------------------------------------------------------------------------------------------------ the edge


def grown(number: int, *, start: Frontier | None = None) -> tuple[Frontier, list[Tile]]:
    """Add so many tiles of leaves, and say which tiles they filled."""
    frontier, found = start or Frontier(), list[Tile]()
    for _ in range(number):
        found += frontier.append_tile(leaves(frontier.size, 256))
    return frontier, found


def by_leaves(number: int) -> tuple[Frontier, list[Tile]]:
    frontier, found = Frontier(), list[Tile]()
    for leaf in leaves(0, number):
        found += frontier.append(leaf)
    return frontier, found


def same(one: Frontier, other: Frontier) -> bool:
    return (one.size, one.root(), one.partial_tiles()) == (other.size, other.root(), other.partial_tiles())


def test_leaf_by_leaf_and_tile_by_tile_it_is_one_tree() -> None:
    one, filled = by_leaves(3 * 256)
    other, at_once = grown(3)
    assert same(one, other)
    assert filled == at_once == [(0, index, leaves(256 * index, 256)) for index in range(3)]
    assert other.levels == one.levels
    assert one.root() == root_of(leaves(0, 768))
    more, _ = by_leaves(770)
    for leaf in leaves(768, 2):
        assert other.append(leaf) == []
    assert same(more, other)
    assert other.partial_tiles() == [(0, 3, leaves(768, 2)), (1, 0, [root_of(leaves(n, 256)) for n in (0, 256, 512)])]


def test_nothing_has_the_root_of_nothing_and_no_tile() -> None:
    assert (Frontier().root(), Frontier().partial_tiles(), Frontier().size) == (hashlib.sha256().digest(), [], 0)


def test_the_tiles_that_are_told_are_not_those_that_grow() -> None:
    frontier, _ = by_leaves(2)
    ((_, _, told),) = frontier.partial_tiles()
    frontier.append(b"3" * 32)
    assert told == leaves(0, 2)


@pytest.fixture(scope="module")
def three_levels() -> tuple[Frontier, list[Tile]]:
    return grown(258)


@pytest.fixture(scope="module")
def roots() -> list[bytes]:
    """The root of each tile, which is all that a tree of full tiles is of."""
    return [root_of(leaves(256 * n, 256)) for n in range(258)]


def test_a_second_level_is_filled_after_65536_leaves(
    three_levels: tuple[Frontier, list[Tile]], roots: list[bytes]
) -> None:
    frontier, filled = three_levels
    assert [tile[:2] for tile in filled[255:258]] == [(0, 255), (1, 0), (0, 256)]
    assert filled[256][2] == roots[:256]
    assert [(level, index, len(hashes)) for level, index, hashes in frontier.partial_tiles()] == [(1, 1, 2), (2, 0, 1)]
    assert frontier.root() == root_of(roots)


def written(folder: Path, frontier: Frontier, filled: list[Tile]) -> Path:
    for level, index, hashes in (*filled, *frontier.partial_tiles()):
        put(folder, tile_path(level, index, len(hashes)), b"".join(hashes))
    return folder


def edges(number: int) -> Iterator[Frontier]:
    frontier = Frontier()
    for _ in range(number):
        yield frontier
        frontier.append_tile(leaves(frontier.size, 256))


def test_the_edge_is_read_from_files_at_each_full_tile(tmp_path: Path) -> None:
    written(tmp_path, *grown(5))
    for number, edge in enumerate(edges(5)):
        found = Frontier.of_tiles(tmp_path, 256 * number)
        assert same(found, edge)
        assert len(found.levels) == max(1, len(edge.levels))
        # It goes on from there as the tree itself does.
        assert found.append(b"x" * 32) == []
        assert found.size == 256 * number + 1
    with pytest.raises(TamperError) as caught:
        Frontier.of_tiles(tmp_path, 6 * 256)
    assert str(caught.value).startswith(f"{tmp_path / 'tile/1/000.p/6'} is missing or cut short.")


def test_the_edge_of_three_levels_is_read_and_goes_on(
    tmp_path: Path, three_levels: tuple[Frontier, list[Tile]], roots: list[bytes]
) -> None:
    frontier, filled = three_levels
    written(tmp_path, frontier, filled)
    assert same(Frontier.of_tiles(tmp_path, 258 * 256), frontier)
    for number in (255, 256, 257):
        found = Frontier.of_tiles(tmp_path, 256 * number)
        assert found.root() == root_of(roots[:number])
        rest, told = grown(258 - number, start=found)
        assert same(rest, frontier)
        assert told == filled[number + (number >= 256) :]
        assert [len(level) for level in Frontier.of_tiles(tmp_path, 256 * number).levels] == {
            255: [0, 255],
            256: [0, 0, 1],
            257: [0, 1, 1],
        }[number]


def test_the_narrowest_tile_that_is_wide_enough_is_taken(tmp_path: Path) -> None:
    edge, filled = grown(3)
    hashes = edge.levels[1]
    written(tmp_path, edge, filled)
    right = tmp_path / "tile/1/000.p/3"
    put(tmp_path, "tile/1/000.p/2", b"".join(hashes[:2]))
    wider = put(tmp_path, "tile/1/000.p/5", b"w" * 160)
    assert same(Frontier.of_tiles(tmp_path, 768), edge)
    right.unlink()
    assert Frontier.of_tiles(tmp_path, 768).levels[1] == [b"w" * 32] * 3
    wider.write_bytes(b"".join(hashes))
    assert same(Frontier.of_tiles(tmp_path, 768), edge)
    wider.write_bytes(b"".join(hashes)[:-1])
    with pytest.raises(TamperError, match=r"tile/1/000\.p/3 is missing or cut short"):
        Frontier.of_tiles(tmp_path, 768)
