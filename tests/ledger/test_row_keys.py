"""A row's key can be forgotten, alone and for good; all others stay."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import LedgerError
from cosmati.ledger.row_keys import (
    RowKeys,
    create_row_keys,
    decode_row_keys,
    encode_row_keys,
    load_row_keys,
    replace_row_keys,
)

IDS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 600)


def key_by_hand(root: bytes, row: int) -> bytes:
    """Walk down a tree of 256 branches by the bytes of an id."""
    for branch in struct.pack(">q", row):
        root = blake3.blake3(b"cosmati row keys", key=root).digest(length=256 * 32)[32 * branch : 32 * branch + 32]
    return root


@given(st.lists(IDS, max_size=20), st.lists(IDS, max_size=4))
def test_each_key_is_that_of_the_walk_and_those_that_were_forgotten_are_gone(ids: list[int], gone: list[int]) -> None:
    root = bytes(range(32))
    keys = RowKeys({b"": root})
    keys.forget(gone[:2])
    keys = decode_row_keys(encode_row_keys(keys))
    keys.forget(gone[2:])
    asked = np.array([*ids, *gone], np.int64)
    for row, key in zip(asked.tolist(), keys.of(asked), strict=True):
        assert key.tobytes() == (bytes(32) if row in gone else key_by_hand(root, row))
    assert keys.has(asked).tolist() == [row not in gone for row in asked.tolist()]


@given(st.lists(IDS, min_size=1, max_size=3))
def test_nothing_that_is_left_leads_to_a_key_that_was_forgotten(gone: list[int]) -> None:
    keys = RowKeys({b"": bytes(32)})
    keys.forget(gone)
    for row in gone:
        path = struct.pack(">q", row)
        assert not any(path.startswith(head) for head in keys.nodes)
    assert sum(256 ** (8 - len(head)) for head in keys.nodes) == 2**64 - len(set(gone))


def test_a_shape_is_kept() -> None:
    keys = RowKeys.new()
    ids = np.arange(6).reshape(2, 3)
    assert keys.of(ids).shape == (2, 3, 32)
    assert np.array_equal(keys.of(ids)[1, 2], keys.of(np.array([5]))[0])
    assert keys.of(np.empty((0, 2), np.int64)).shape == (0, 2, 32)


def test_a_file_is_its_owners_and_holds_no_old_key_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "rows.keys"
    keys = create_row_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = os.open(path, os.O_RDONLY)  # what somebody had open, or an undelete would find
    root = keys.nodes[b""]
    keys.forget([3])
    replace_row_keys(path, keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert root not in os.read(before, 1 << 20)
    os.close(before)
    assert load_row_keys(path).nodes == keys.nodes
    assert [one.name for one in tmp_path.iterdir()] == ["rows.keys"]
    with pytest.raises(FileExistsError):
        create_row_keys(path)


@pytest.mark.parametrize("cut", [0, 5, 25, -1])
def test_a_damaged_file_is_told(tmp_path: Path, cut: int) -> None:
    keys = RowKeys.new()
    keys.forget([7])
    (tmp_path / "rows.keys").write_bytes(encode_row_keys(keys)[:cut])
    with pytest.raises(LedgerError, match="can't be read"):
        load_row_keys(tmp_path / "rows.keys")


def test_nodes_one_above_another_are_refused() -> None:
    data = encode_row_keys(RowKeys({b"": bytes(32), b"\x01": bytes(32)}))
    with pytest.raises(ValueError, match="damaged"):
        decode_row_keys(data)
