"""Row commitments against their definition, byte by byte, and what they hide."""

from __future__ import annotations

import hashlib
import struct

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.ledger.rows import commit_rows, derive_blinds, hash_rows

SALT = bytes(range(32))


def leaf(slot: int, ids: list[int], content: bytes, *, step: int = 7, microbatch: int = 2) -> bytes:
    """The definition, for one row."""
    stream = blake3.blake3(b"cosmati rows %d/%d" % (step, microbatch), key=SALT)
    blind = stream.digest(length=32, seek=32 * slot)
    return hashlib.sha256(
        b"\x00" + bytes([bool(content)]) + blind + struct.pack(f"<{len(ids)}q", *ids) + content
    ).digest()


@given(
    st.lists(st.tuples(st.integers(-1, 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=9),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_leaves_are_as_defined(ids: list[tuple[int, int]], has_contents: bool, seed: int) -> None:
    contents = np.random.default_rng(seed).integers(0, 256, (len(ids), 32), dtype=np.uint8) if has_contents else None
    found = hash_rows(derive_blinds(SALT, 7, 2, len(ids)), np.array(ids, dtype=np.int64), contents)
    expected = [
        leaf(slot, list(row), b"" if contents is None else contents[slot].tobytes()) for slot, row in enumerate(ids)
    ]
    assert found == expected
    assert commit_rows(found) == hashlib.sha256(b"".join(expected)).digest()


def test_a_column_of_ids_may_be_a_view() -> None:
    ids = np.arange(12, dtype=np.int64).reshape(4, 3)
    blinds = derive_blinds(SALT, 0, 0, 4)
    assert hash_rows(blinds, ids[:, ::2]) == hash_rows(blinds, ids[:, ::2].copy())
    assert hash_rows(blinds, ids[::-1]) != hash_rows(blinds, ids)


def test_no_rows() -> None:
    assert hash_rows(derive_blinds(SALT, 0, 0, 0), np.zeros((0, 1), np.int64)) == []
    assert commit_rows([]) == hashlib.sha256(b"").digest()


@pytest.mark.parametrize("other", [(SALT[::-1], 7, 2), (SALT, 8, 2), (SALT, 7, 3)])
def test_blinds_belong_to_salt_and_position(other: tuple[bytes, int, int]) -> None:
    """No blind of one position is one of another: equal rows never show that they are equal."""
    own = {row.tobytes() for row in derive_blinds(SALT, 7, 2, 500)}
    assert len(own) == 500
    assert not own & {row.tobytes() for row in derive_blinds(*other, 500)}


def test_a_row_has_its_blind_whatever_stands_behind_it() -> None:
    assert np.array_equal(derive_blinds(SALT, 7, 2, 10), derive_blinds(SALT, 7, 2, 64)[:10])
