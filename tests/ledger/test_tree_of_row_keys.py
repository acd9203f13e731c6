"""Of the tree of row keys, what's kept, what's at hand and what a file says are those of its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from cosmati.errors import LedgerError
from cosmati.ledger import row_keys
from cosmati.ledger.row_keys import KEY_BYTES, KEYS_MAGIC, RowKeys

from .row_oracle import child, key_at, key_of_class

ROOT = bytes(range(100, 132))
LAST = 2**63 - 1


def node_key(level: int, position: int) -> bytes:
    key = ROOT
    for shift in reversed(range(level)):
        key = child(key, position >> 8 * shift & 255)
    return key


def expected_nodes(place: int) -> dict[tuple[int, int], bytes]:
    """The siblings along a leaf's path."""
    return {
        (level, sibling): node_key(level, sibling)
        for level in range(1, 9)
        for own in [place >> 8 * (8 - level)]
        for sibling in range(own & ~255, (own | 255) + 1)
        if sibling != own
    }


def sealed(head: object, marks: bytes, keys: bytes, magic: bytes = KEYS_MAGIC) -> bytes:
    data = magic + json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n" + marks + keys
    return data + blake3(data).digest()


def test_a_fresh_tree_keeps_its_root_alone() -> None:
    keys = RowKeys(ROOT)
    assert list(keys.nodes()) == [((0, 0), ROOT)]
    assert keys.commitment == blake3(b"cosmati row keys root" + ROOT).digest()
    assert keys.certificates == {}
    head = {"certificates": {}, "commitment": keys.commitment.hex(), "opened": []}
    assert keys.to_bytes() == sealed(head, b"\x01", ROOT)


@pytest.mark.parametrize("row_id", [0, 1, 255, 256, 0x0102030405060708, LAST])
def test_one_puncture_keeps_the_siblings_along_its_path_in_their_order(row_id: int) -> None:
    keys = RowKeys(ROOT)
    assert keys.of(row_id) == key_at(ROOT, row_id)
    assert keys.has(row_id) is True
    keys.forget([row_id])
    expected = expected_nodes(row_id)
    assert list(keys.nodes()) == sorted(expected.items())
    assert (keys.of(row_id), keys.has(row_id)) == (None, False)
    for other in {row_id ^ 1, row_id ^ 256, row_id ^ 1 << 40, row_id ^ 1 << 62}:
        assert keys.of(other) == key_at(ROOT, other)
    assert keys.of_class("a") == key_of_class(ROOT, "a")
    assert keys.commitment == RowKeys(ROOT).commitment


def test_a_row_is_forgotten_once_and_nothing_else_by_negative_ids() -> None:
    keys = RowKeys(ROOT)
    keys.forget([-1, -(2**63), 3, -1, 3])
    once = list(keys.nodes())
    keys.forget([3])
    keys.forget([])
    keys.forget_classes([])
    assert list(keys.nodes()) == once == sorted(expected_nodes(3).items())
    assert [keys.of(one) for one in (-1, -2)] == [None, None]
    assert keys.of(0) == key_at(ROOT, 0)


def test_classes_are_forgotten_by_name_and_stand_beyond_every_row() -> None:
    keys = RowKeys(ROOT)
    keys.forget_classes(iter(["a", "b+c"]))
    assert [keys.of_class(name) for name in ("a", "b+c")] == [None, None]
    assert keys.of_class("c") == key_of_class(ROOT, "c")
    assert [keys.of(one) for one in (0, LAST)] == [key_at(ROOT, one) for one in (0, LAST)]
    for name in ("a", "b+c", "c", ""):
        found = int.from_bytes(blake3(b"cosmati class " + name.encode()).digest(8), "big")
        assert row_keys._place_of(name) == found | 1 << 63
        assert row_keys._place_of(name).bit_length() == 64


def test_where_all_children_are_gone_their_parent_goes_and_what_is_left_is_the_same() -> None:
    keys = RowKeys(ROOT)
    keys.forget(range(256, 511))
    assert (7, 1) in keys._opened
    assert keys.of(511) == key_at(ROOT, 511)
    keys.forget([511])
    assert (7, 1) not in keys._opened
    assert (6, 0) in keys._opened
    assert [keys.of(one) for one in (256, 300, 511)] == [None] * 3
    assert [keys.of(one) for one in (255, 512)] == [key_at(ROOT, one) for one in (255, 512)]
    kept = dict(keys.nodes())
    assert {node for node in kept if node[0] == 8} == set()
    assert {position for level, position in kept if level == 7} == {n for n in range(256) if n != 1}


def test_a_tree_of_which_nothing_is_left_derives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = RowKeys(ROOT)
    keys.forget([0])
    for node in sorted(keys._opened, reverse=True):
        for index in range(256):
            if keys._opened.get(node):
                keys._put(node[0] + 1, (node[1] << 8) + index, None)
    assert (keys._root, keys._opened, list(keys.nodes())) == (None, {}, [])
    assert [keys.of(one) for one in (0, 1, LAST)] == [None] * 3
    assert keys.of_class("a") is None
    keys.forget([5])
    again = RowKeys.from_bytes(keys.to_bytes())
    assert (again.of(1), list(again.nodes()), again.commitment) == (None, [], RowKeys(ROOT).commitment)
    assert again.to_bytes() == keys.to_bytes()


def test_what_was_derived_is_at_hand_and_forgotten_with_what_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[int] = []
    one = row_keys._child

    def counted(key: bytes, index: int) -> bytes:
        derived.append(index)
        return one(key, index)

    def num(ask: Callable[[], object]) -> int:
        derived.clear()
        ask()
        return len(derived)

    monkeypatch.setattr(row_keys, "_child", counted)
    keys = RowKeys(ROOT)
    assert num(lambda: keys.of(0x0102030405060708)) == 8
    assert derived == [1, 2, 3, 4, 5, 6, 7, 8]
    assert num(lambda: keys.of(0x0102030405060709)) == 1
    assert num(lambda: keys.of(0x0102030405060800)) == 2
    assert num(lambda: keys.of(0x0102030405070800)) == 3
    assert {level for level, _ in keys._cache} == {1, 2, 3, 4, 5, 6}, "those above leaves are kept apart"
    assert set(keys._above_leaves) == {0x01020304050607, 0x01020304050608, 0x01020304050708}
    keys.forget([0x0102030405060708])
    assert (keys._cache, keys._above_leaves) == ({}, {})
    assert num(lambda: keys.of(0x0102030405060709)) == 0, "a sibling's key is kept"
    assert num(lambda: keys.of(0x0102030405060900)) == 1
    assert num(lambda: keys.of(0x0102030405060708)) == 0


@pytest.mark.parametrize("most", [1, 3])
def test_caches_are_emptied_when_they_are_full(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(row_keys, "_MOST_CACHED", most)
    keys, sizes = RowKeys(ROOT), list[int]()
    for number in range(7):
        assert keys.of(number << 8) == key_at(ROOT, number << 8)
        sizes.append(len(keys._above_leaves))
    assert sizes == [n % most + 1 for n in range(7)]
    keys, sizes = RowKeys(ROOT), list[int]()
    for number in range(7):
        keys._key(1, number)
        sizes.append(len(keys._cache))
    assert sizes == [n % most + 1 for n in range(7)]


def test_a_file_names_what_is_opened_and_marks_what_is_kept_of_it() -> None:
    keys = RowKeys(ROOT)
    keys.forget([0x0506])
    keys.certificates = {"cd": 2, "ab": 1}
    opened = [(level, 0x0506 >> 8 * (8 - level)) for level in range(8)]
    marks, kept = b"\x02", b""
    for level, position in opened:
        for index in range(256):
            below = level + 1, position * 256 + index
            on_path = below in opened or below == (8, 0x0506)
            marks += b"\x01" if not on_path else b"\x00" if level == 7 else b"\x02"
            kept += b"" if on_path else node_key(*below)
    head = {"certificates": {"ab": 1, "cd": 2}, "commitment": keys.commitment.hex(), "opened": opened}
    assert keys.to_bytes() == sealed(head, marks, kept)
    again = RowKeys.from_bytes(keys.to_bytes())
    assert again.commitment == keys.commitment
    assert again.certificates == {"ab": 1, "cd": 2}
    assert again._opened == keys._opened
    assert (again._root, again._cache, again._above_leaves) == (b"", {}, {})
    again.forget([0x0507])
    keys.forget([0x0507])
    assert again.to_bytes() == keys.to_bytes()


HEAD = {"certificates": {}, "commitment": "00" * 32, "opened": []}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "its first line or its digest is another"),
        (sealed(HEAD, b"\x01", ROOT)[:-1], "its first line or its digest is another"),
        (sealed(HEAD, b"\x01", ROOT) + b"\0", "its first line or its digest is another"),
        (sealed(HEAD, b"\x01", ROOT, b"cosmati row keys 2\n"), "its first line or its digest is another"),
        (sealed(HEAD, b"\x01", ROOT[:-1]), "it has more or fewer keys than it says"),
        (sealed(HEAD, b"\x01", ROOT + ROOT), "it has more or fewer keys than it says"),
        (sealed(HEAD, b"\x00", ROOT), "it has more or fewer keys than it says"),
        (sealed(HEAD, b"\x03", b""), "IndexError"),
        (sealed(HEAD, b"", b""), "IndexError"),
        (sealed({}, b"\x01", ROOT), "KeyError"),
        (sealed(3, b"\x01", ROOT), "TypeError"),
        (sealed(HEAD | {"commitment": "xy"}, b"\x01", ROOT), "ValueError"),
    ],
)
def test_a_file_that_is_none_or_damaged_is_refused_with_why(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "rows.keys"
    path.write_bytes(data)
    says = "This is no file of row keys, or it's damaged ("
    ways: list[tuple[Callable[[], RowKeys], str]] = [
        (lambda: RowKeys.from_bytes(data), says),
        (lambda: RowKeys.load(path), f"{path}: {says}"),
    ]
    for read, begins in ways:
        with pytest.raises(LedgerError) as caught:
            read()
        assert str(caught.value).startswith(begins)
        assert why in str(caught.value)
        assert str(caught.value).endswith(
            "forget again whatever was forgotten since: the copy may still have its keys."
        )
        assert caught.value.__cause__ is not None


def test_what_was_saved_is_read_and_what_is_gone_is_named(tmp_path: Path) -> None:
    path, keys = tmp_path / "rows.keys", RowKeys(ROOT)
    keys.forget([9])
    keys.save(path)
    assert path.read_bytes() == keys.to_bytes()
    assert RowKeys.load(path).to_bytes() == keys.to_bytes()
    with pytest.raises(LedgerError, match=r"none can't be read: .*Put the run's own row keys back\."):
        RowKeys.load(tmp_path / "none")


def test_keys_are_of_32_bytes_from_their_parents_stream() -> None:
    assert KEY_BYTES == 32
    whole = row_keys._stream(ROOT)(length=256 * 32)
    assert [row_keys._child(ROOT, n) for n in range(256)] == [whole[32 * n : 32 * n + 32] for n in range(256)]
    assert whole[:32] == child(ROOT, 0)
    for wrong in (ROOT[:-1], ROOT + b"\0"):
        with pytest.raises(AssertionError):
            RowKeys(wrong)
