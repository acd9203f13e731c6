"""Consistency proofs from tiles, against RFC 6962's definition over all leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.consistency import is_consistent, prove_consistency
from cosmati.ledger.note import TreeHead
from cosmati.ledger.tiles import Frontier, tile_path
from cosmati.storage.merkle import leaf_hash

from .outside_witness import consistency_proof, tree_hash

pytestmark = pytest.mark.long


def leaves(size: int) -> list[bytes]:
    return [b"entry %d" % number for number in range(size)]


def write_tiles(directory: Path, size: int) -> None:
    frontier, tiles = Frontier(), []
    for leaf in leaves(size):
        tiles += frontier.append(leaf_hash(leaf))
    for level, index, hashes in (*tiles, *frontier.partial_tiles()):
        path = directory / tile_path(level, index, len(hashes))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(hashes))


def head(size: int) -> TreeHead:
    return TreeHead(size, tree_hash(leaves(size)))


def test_a_small_proof_is_as_defined_and_holds(tmp_path: Path) -> None:
    heads = [head(size) for size in range(20)]
    for new in range(1, 20):
        write_tiles(tmp_path / str(new), new)
        for old in range(1, new + 1):
            proof = prove_consistency(tmp_path / str(new), old, new)
            assert proof == consistency_proof(old, leaves(new))
            assert is_consistent(heads[old], heads[new], proof)
        assert prove_consistency(tmp_path / str(new), 0, new) == []
        assert is_consistent(heads[0], heads[new], [])


@pytest.mark.parametrize("new", [256, 257, 511, 513, 700])
def test_a_proof_over_borders_of_tiles_is_as_defined(tmp_path: Path, new: int) -> None:
    write_tiles(tmp_path, new)
    for old in (1, 2, 127, 255, 256, 257, 300, 512, 640):
        if old <= new:
            proof = prove_consistency(tmp_path, old, new)
            assert proof == consistency_proof(old, leaves(new))
            assert is_consistent(head(old), head(new), proof)


def test_an_earlier_tree_is_not_larger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="doesn't go on"):
        prove_consistency(tmp_path, 3, 2)


@settings(max_examples=150)
@given(st.integers(1, 70), st.integers(1, 70), st.data())
def test_no_other_proof_or_tree_holds(one: int, other: int, data: st.DataObject) -> None:
    old, new = sorted((one, other))
    proof = consistency_proof(old, leaves(new))
    assert is_consistent(head(old), head(new), proof)
    forged = TreeHead(old, tree_hash([b"other", *leaves(old)[1:]]))
    assert not is_consistent(forged, head(new), proof)
    assert not is_consistent(head(old), TreeHead(new, forged.root), proof)
    assert not is_consistent(head(old), head(new), [*proof, b"x" * 32])
    if proof:
        place = data.draw(st.integers(0, len(proof) - 1))
        assert not is_consistent(head(old), head(new), [*proof[:place], b"x" * 32, *proof[place + 1 :]])
        assert not is_consistent(head(old), head(new), [*proof[:place], *proof[place + 1 :]])
        assert not is_consistent(head(old), head(new), [])
    if old < new:
        assert not is_consistent(head(new), head(old), proof)


@pytest.mark.parametrize("size", [256, 512, 1024, 128 * 256, 256 * 256, 256 * 256 + 512])
def test_the_edge_of_a_tree_is_read_from_tiles(tmp_path: Path, size: int) -> None:
    write_tiles(tmp_path, size)
    edge = Frontier.of_tiles(tmp_path, size)
    assert (edge.size, edge.root()) == (size, tree_hash(leaves(size)))
    appended = Frontier()
    for leaf in leaves(size):
        appended.append(leaf_hash(leaf))
    assert edge.levels == appended.levels
    top = (size.bit_length() - 1) // 8
    path = tmp_path / tile_path(top, *divmod(size >> 8 * top, 256))
    held = path.read_bytes()
    for left in (held[:-1], b"", None):
        path.unlink() if left is None else path.write_bytes(left)
        with pytest.raises(TamperError, match=f"{path.name} is missing or cut short. Restore it"):
            Frontier.of_tiles(tmp_path, size)
