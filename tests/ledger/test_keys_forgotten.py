"""A tree of row keys in small: which node gives which key, what a puncture leaves, and the file byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from blake3 import blake3

from cosmati.errors import LedgerError
from cosmati.ledger import row_keys
from cosmati.ledger.row_keys import KEY_BYTES, KEYS_MAGIC, RowKeys, _place_of
from tests.ledger.row_oracle import child, key_at, key_of_class

ROOT = bytes(range(32))
PLACES = (0, 1, 255, 256, 65535, 65536, 2**32, 2**56, 2**63 - 1)


def ancestors(places: Iterable[int]) -> dict[tuple[int, int], bytes]:
    """Return the key of each node from the root to these leaves."""
    found: dict[tuple[int, int], bytes] = {}
    for place in places:
        key = ROOT
        for level in range(9):
            if level:
                key = child(key, place >> 8 * (8 - level) & 255)
            found[level, place >> 8 * (8 - level)] = key
    return found


def file_of(head: Mapping[str, object], marks: bytes, keys: bytes, magic: bytes = b"cosmati row keys 1\n") -> bytes:
    data = magic + json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n" + marks + keys
    return data + blake3(data).digest()


COMMITMENT = blake3(b"cosmati row keys root" + ROOT).hexdigest()
WHOLE: dict[str, object] = {"certificates": {}, "commitment": COMMITMENT, "opened": []}


def test_rows_and_classes_have_the_keys_of_their_leaves() -> None:
    keys = RowKeys(ROOT)
    assert [keys.of(place) for place in PLACES] == [key_at(ROOT, place) for place in PLACES]
    # In any other order, and once what they share is at hand.
    assert [keys.of(place) for place in PLACES[::-1] * 2] == [key_at(ROOT, place) for place in PLACES[::-1] * 2]
    assert keys.of_class("a/b") == key_of_class(ROOT, "a/b")
    assert _place_of("a/b") >= 1 << 63
    assert keys.of_class("é") == key_of_class(ROOT, "é")
    assert keys.of(-1) is None
    assert (keys.has(0), keys.has(-1)) == (True, False)
    assert keys.commitment.hex() == COMMITMENT
    assert dict(keys.certificates) == {}
    assert [*keys.nodes()] == [((0, 0), ROOT)]


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("gone", PLACES)
def test_of_a_row_that_is_forgotten_the_siblings_of_its_path_are_left(gone: int, asked_before: bool) -> None:
    keys = RowKeys(ROOT)
    if asked_before:
        assert keys.of(gone) is not None
    keys.forget([gone])
    path = ancestors([gone])
    expected: dict[tuple[int, int], bytes] = {}
    for (level, position), key in path.items():
        if level < 8:
            mine = gone >> 8 * (7 - level) & 255
            expected |= {(level + 1, position * 256 + n): child(key, n) for n in range(256) if n != mine}
    assert dict(keys.nodes()) == expected
    assert [place for place, _ in keys.nodes()] == sorted(expected)
    assert [keys.of(place) for place in PLACES] == [None if p == gone else key_at(ROOT, p) for p in PLACES]
    assert (keys.has(gone), keys.has(gone ^ 1)) == (False, True)
    assert keys.commitment.hex() == COMMITMENT
    held = {*keys._cache.values(), *keys._above_leaves.values(), keys._root}
    assert not held & {*path.values()}


def test_what_was_at_hand_does_not_outlive_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = RowKeys(ROOT)
    assert None not in [keys.of(place) for place in range(256)]
    keys.forget(range(256))
    assert [keys.of(place) for place in range(257)] == [None] * 256 + [key_at(ROOT, 256)]
    # The node above is gone with the last leaf below it, and its place says so.
    assert (7, 0) not in keys._opened
    assert keys._opened[6, 0][0] is None
    assert keys._opened[6, 0].count(None) == 1
    keys.forget([5, 5])
    assert keys.of(256) == key_at(ROOT, 256)
    monkeypatch.setattr(row_keys, "_MOST_CACHED", 1)
    assert [keys.of(place) for place in (256, 512, 65536)] == [key_at(ROOT, place) for place in (256, 512, 65536)]


def test_where_all_children_are_gone_their_parents_go_up_to_the_root() -> None:
    keys = RowKeys(ROOT)
    keys.forget([7])
    for level in range(7, -1, -1):
        position = 7 >> 8 * (8 - level)
        for index in range(256):
            keys._put(level + 1, position * 256 + index, None)
    assert keys._opened == {}
    assert keys._root is None
    assert [*keys.nodes()] == []
    assert [keys.of(place) for place in PLACES] == [None] * len(PLACES)
    assert keys.of_class("a") is None
    again = RowKeys.from_bytes(keys.to_bytes())
    assert ([*again.nodes()], again.of(1), again.commitment) == ([], None, keys.commitment)
    keys.forget([1])
    keys.forget_classes(["a"])
    assert [*keys.nodes()] == []


def test_a_class_is_forgotten_and_no_other_and_no_row() -> None:
    keys = RowKeys(ROOT)
    keys.forget_classes(["a", "b"])
    assert [keys.of_class(name) for name in "abc"] == [None, None, key_of_class(ROOT, "c")]
    assert [keys.of(place) for place in PLACES] == [key_at(ROOT, place) for place in PLACES]
    keys.forget([-1, 3])
    assert (keys.of(3), keys.of(2)) == (None, key_at(ROOT, 2))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_what_is_at_hand_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(row_keys, "_MOST_CACHED", most)
    keys, sizes = RowKeys(ROOT), []
    for place in [*PLACES, *PLACES]:
        assert keys.of(place) == key_at(ROOT, place)
        sizes.append((len(keys._cache), len(keys._above_leaves)))
    assert max(sizes) == (most, most)
    assert max(above for _, above in sizes) == most


def test_what_leads_to_the_rows_is_at_hand_once_and_the_rows_themselves_are_not() -> None:
    keys = RowKeys(ROOT)
    keys.of(0)
    assert {*keys._cache} == {(level, 0) for level in range(1, 7)}
    assert keys._above_leaves == {0: ancestors([0])[7, 0]}
    keys.of(256)
    assert {*keys._cache} == {(level, 0) for level in range(1, 7)}
    assert {*keys._above_leaves} == {0, 1}


# ----------------------------------------------------------------------------------------------------------- the file


def test_a_whole_tree_is_its_root(tmp_path: Path) -> None:
    data = file_of(WHOLE, b"\1", ROOT)
    assert RowKeys(ROOT).to_bytes() == data
    again = RowKeys.from_bytes(data)
    assert again.of(5) == key_at(ROOT, 5)
    assert again.commitment.hex() == COMMITMENT
    again.save(tmp_path / "keys")
    assert (tmp_path / "keys").read_bytes() == data
    assert data[: data.index(b"\n") + 1] == KEYS_MAGIC


def test_an_opened_tree_is_its_marks_and_the_keys_that_are_kept() -> None:
    keys = RowKeys(ROOT)
    keys.certificates = {"b": 2, "a": 1}
    keys.forget([7, 2**40])
    opened = sorted(place for place in ancestors([7, 2**40]) if place[0] < 8)
    path = ancestors([7, 2**40])
    marks, kept = [2], list[bytes]()
    for level, position in opened:
        for index in range(256):
            below = level + 1, position * 256 + index
            marks.append((0 if level == 7 else 2) if below in path else 1)
            kept += [] if below in path else [child(path[level, position], index)]
    head = {"certificates": {"a": 1, "b": 2}, "commitment": COMMITMENT, "opened": opened}
    data = file_of(head, bytes(marks), b"".join(kept))
    assert keys.to_bytes() == data
    again = RowKeys.from_bytes(data)
    assert (again.to_bytes(), dict(again.certificates)) == (data, {"a": 1, "b": 2})
    assert [again.of(place) for place in (7, 6, 2**40, 2**41)] == [None, key_at(ROOT, 6), None, key_at(ROOT, 2**41)]
    again.forget([6])
    keys.forget([6])
    assert again.to_bytes() == keys.to_bytes()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "its first line or its digest is another"),
        (file_of(WHOLE, b"\1", ROOT, b"cosmati row keys 2\n"), "its first line or its digest is another"),
        (file_of(WHOLE, b"\1", ROOT)[:-1] + b"x", "its first line or its digest is another"),
        (file_of(WHOLE, b"\1", ROOT[:-1]), "it has more or fewer keys than it says"),
        (file_of(WHOLE, b"\1", ROOT + b"x"), "it has more or fewer keys than it says"),
        (file_of(WHOLE, b"\1", ROOT * 2), "it has more or fewer keys than it says"),
        (file_of(WHOLE, b"\0", ROOT), "it has more or fewer keys than it says"),
        (file_of(WHOLE, b"\3", b""), "IndexError"),
        (file_of(WHOLE, b"", b""), "IndexError"),
        (file_of({"commitment": COMMITMENT, "opened": []}, b"\1", ROOT), "KeyError"),
        (file_of({**WHOLE, "commitment": "no hex"}, b"\1", ROOT), "ValueError"),
        (file_of({**WHOLE, "opened": 3}, b"\1", ROOT), "TypeError"),
    ],
)
def test_what_is_no_such_file_is_told_with_what_to_do(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(LedgerError) as caught:
        RowKeys.from_bytes(data)
    said = str(caught.value)
    assert said.startswith("This is no file of row keys, or it's damaged (")
    assert why in said
    assert said.endswith("forget again whatever was forgotten since: the copy may still have its keys.")
    path = tmp_path / "rows.keys"
    path.write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        RowKeys.load(path)
    assert str(caught.value) == f"{path}: {said}"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(LedgerError, match=rf"{path} can't be read: .*\. Put the run's own row keys back\."):
            RowKeys.load(path)


def test_a_root_has_the_length_of_a_key() -> None:
    for length in (0, 31, 33):
        with pytest.raises(AssertionError):
            RowKeys(bytes(length))
    assert KEY_BYTES == 32
