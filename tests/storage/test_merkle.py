from __future__ import annotations

import hashlib

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.storage.merkle import MerkleTree, leaf_hash

from .rfc6962 import mth, root_of

LEAVES = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")


@pytest.mark.parametrize(
    ("size", "root"),
    [  # Certificate Transparency's reference vectors
        (0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (1, "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
        (8, "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"),
    ],
)
def test_roots_are_those_of_the_published_vectors(size: int, root: str) -> None:
    tree = MerkleTree()
    for leaf in LEAVES[:size]:
        tree.append(leaf_hash(bytes.fromhex(leaf)))
    assert tree.root().hex() == root


def test_a_root_of_many_leaves_stays_as_it_was_first_published() -> None:
    tree = MerkleTree()
    for number in range(70_000):
        tree.append(leaf_hash(number.to_bytes(3, "big")))
    assert tree.root().hex() == "23bdd7b73b44a245871e432bfcb8c0e47c8a759a89c2f9fcd9995ca674008a9f"


def blake(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


@pytest.mark.long
@given(st.lists(st.binary(max_size=3), max_size=40))
def test_the_tree_has_the_root_at_each_size_and_goes_on_from_its_edge(entries: list[bytes]) -> None:
    tree, other = MerkleTree(), MerkleTree(digest=blake)
    for size, entry in enumerate(entries):
        assert (tree.size, tree.root(), other.root()) == (size, mth(entries[:size]), mth(entries[:size], blake))
        tree = MerkleTree(tree.edge)
        tree.append(leaf_hash(entry))
        other.append(leaf_hash(entry, blake))
    assert tree.root() == mth(entries)


def test_a_leaf_completes_the_subtrees_that_end_with_it() -> None:
    leaves = [hashlib.sha256(bytes([n])).digest() for n in range(48)]
    tree = MerkleTree()
    for end, leaf in enumerate(leaves, 1):
        sizes = [1 << height for height in range(6) if end % (1 << height) == 0]
        assert tree.append(leaf) == [root_of(leaves[end - size : end]) for size in sizes]
