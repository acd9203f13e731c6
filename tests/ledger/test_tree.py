from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.tiles import (
    TILE_WIDTH,
    TileTree,
    decode_bundle,
    encode_bundle,
    needed_width,
    tile_path,
)
from cosmati.ledger.tree import (
    EMPTY_ROOT,
    Frontier,
    TreeHead,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    tree_root,
    verify_consistency,
    verify_inclusion,
)

ENTRIES = [i.to_bytes(2, "big") * (i % 5) for i in range(70)]
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 64, 70)


def mth(entries: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, by its own words."""
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    split = max(2**p for p in range(20) if 2**p < len(entries))
    return hashlib.sha256(b"\x01" + mth(entries[:split]) + mth(entries[split:])).digest()


def path(index: int, entries: Sequence[bytes]) -> list[bytes]:
    """PATH of RFC 6962, section 2.1.1."""
    if len(entries) == 1:
        return []
    split = max(2**p for p in range(20) if 2**p < len(entries))
    if index < split:
        return [*path(index, entries[:split]), mth(entries[split:])]
    return [*path(index - split, entries[split:]), mth(entries[:split])]


def subproof(old: int, entries: Sequence[bytes], *, whole: bool) -> list[bytes]:
    """SUBPROOF of RFC 6962, section 2.1.2."""
    if old == len(entries):
        return [] if whole else [mth(entries)]
    split = max(2**p for p in range(20) if 2**p < len(entries))
    if old <= split:
        return [*subproof(old, entries[:split], whole=whole), mth(entries[split:])]
    return [*subproof(old - split, entries[split:], whole=False), mth(entries[:split])]


def complete(height: int, index: int) -> bytes:
    return mth(ENTRIES[index << height : (index + 1) << height])


def head(size: int) -> TreeHead:
    return TreeHead(size, mth(ENTRIES[:size]))


def test_roots_are_those_of_the_published_vectors() -> None:
    leaves = [bytes.fromhex(x) for x in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657")]
    leaves.append(bytes.fromhex("606162636465666768696a6b6c6d6e6f"))
    # Certificate Transparency's reference vectors, sizes 0, 1 and 8.
    expected = {
        0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    }
    for size, root in expected.items():
        frontier = Frontier()
        for leaf in leaves[:size]:
            frontier.append(leaf_hash(leaf))
        assert frontier.root().hex() == root


def test_inclusion_proofs_are_the_recursions_and_verify_nowhere_else() -> None:
    for size in SIZES[1:]:
        for index in range(size):
            proof = inclusion_proof(complete, index, size)
            assert list(proof) == path(index, ENTRIES[:size])
            leaf = leaf_hash(ENTRIES[index])
            assert verify_inclusion(leaf, index, head(size), proof)
            assert not verify_inclusion(leaf_hash(b"other"), index, head(size), proof)
            assert not verify_inclusion(leaf, index, head(size), [*proof, EMPTY_ROOT])
            assert not verify_inclusion(leaf, index, TreeHead(size, EMPTY_ROOT), proof)
            assert not verify_inclusion(leaf, size, head(size), proof)
            if proof:
                assert not verify_inclusion(leaf, index, head(size), proof[:-1])
                assert not verify_inclusion(leaf, index ^ 1, head(size), proof)


def test_consistency_proofs_are_the_recursions_and_verify_nowhere_else() -> None:
    for new in SIZES:
        for old in (size for size in SIZES if size <= new):
            proof = consistency_proof(complete, old, new)
            expected = subproof(old, ENTRIES[:new], whole=True) if 0 < old < new else []
            assert list(proof) == expected
            assert verify_consistency(head(old), head(new), proof)
            assert not verify_consistency(TreeHead(old, leaf_hash(b"forged")), head(new), proof)
            assert not verify_consistency(head(old), head(new), [*proof, EMPTY_ROOT])
            if proof:
                assert not verify_consistency(head(old), TreeHead(new, leaf_hash(b"forged")), proof)
                assert not verify_consistency(head(old), head(new), proof[:-1])
                assert not verify_consistency(head(new), head(old), proof)


def test_proofs_outside_of_the_tree_are_refused() -> None:
    with pytest.raises(LedgerError, match="no entry 4"):
        inclusion_proof(complete, 4, 4)
    with pytest.raises(LedgerError, match="prefix"):
        consistency_proof(complete, 5, 4)
    assert tree_root(complete, 0) == EMPTY_ROOT


@given(st.lists(st.binary(max_size=3), max_size=40))
def test_the_frontier_has_the_root_at_each_size(entries: list[bytes]) -> None:
    frontier = Frontier()
    for size, entry in enumerate(entries):
        assert frontier.root() == mth(entries[:size])
        frontier.append(leaf_hash(entry))
    assert frontier.root() == mth(entries)


def test_tiles_of_three_levels_give_roots_and_proofs(tmp_path: Path) -> None:
    size = 256 * 256 + 300
    hashes = [leaf_hash(i.to_bytes(3, "big")) for i in range(size)]
    frontier, found = Frontier(), []
    for leaf in hashes:
        found += frontier.append(leaf)
    found += frontier.partial_tiles()
    for level, index, tile in found:
        file = tmp_path / tile_path(level, index, len(tile))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(tile))
    widths = {(level, index): len(tile) for level, index, tile in found}
    # floor(size / 256**level) mod 256 hashes at each right edge, as tlog-tiles says.
    assert [widths[0, 257], widths[1, 1], widths[2, 0]] == [44, 1, 1]
    assert len(found) == 257 + 1 + 3
    row = list(hashes)
    while len(row) > 1:  # RFC 9162's bottom-up form: a lone last node moves up unchanged
        pairs = [hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(row[::2], row[1::2], strict=False)]
        row = pairs + row[len(row) & ~1 :]
    top = TreeHead(size, row[0])
    tiles = TileTree(tmp_path, top)
    assert frontier.root() == tree_root(tiles.complete, size) == top.root
    for index in (0, 255, 256, 65535, 65536, size - 1):
        assert verify_inclusion(hashes[index], index, top, inclusion_proof(tiles.complete, index, size))
    old = TreeHead(1000, tree_root(tiles.complete, 1000))
    assert verify_consistency(old, top, consistency_proof(tiles.complete, 1000, size))
    with pytest.raises(LedgerError, match="no complete subtree"):
        tiles.complete(17, 0)
    (tmp_path / tile_path(0, 3)).unlink()
    with pytest.raises(TamperError, match=r"003.* is missing"):
        tiles.complete(0, 3 * TILE_WIDTH)


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
