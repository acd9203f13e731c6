"""Keys of rows against an independent derivation, and what can't be derived once they're forgotten."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import LedgerError
from cosmati.ledger import row_keys
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.row_secrets import KeyedRows, RowsAt, SaltedRows, commit
from cosmati.ledger.rows import commit_rows, derive_blinds, hash_rows
from tests.ledger.row_oracle import child, key_at, key_of_class

pytestmark = pytest.mark.long

ROOT = bytes(range(32))
NAMES = "licensed/news", "personal", "open+personal", ""
# Close together, so that they share nodes; far apart, so that they don't; and the last ones that there are.
IDS = st.one_of(st.integers(0, 600), st.integers(0, 2**63 - 1), st.integers(2**63 - 300, 2**63 - 1))


def place_of(name: str) -> int:
    """Where a class is in the tree."""
    found = int.from_bytes(blake3(b"cosmati class " + name.encode()).digest()[:8], "big") | 1 << 63
    assert key_at(ROOT, found) == key_of_class(ROOT, name)
    return found


@given(IDS)
@settings(max_examples=50)
def test_a_row_has_the_key_of_its_leaf(row_id: int) -> None:
    keys = RowKeys(ROOT)
    assert keys.of(row_id) == key_at(ROOT, row_id)
    assert keys.has(row_id)


def test_what_rows_share_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven keys lead to the leaves of 256 rows, six of which lead to those of 65,536."""
    derived: list[int] = []
    one = row_keys._child
    monkeypatch.setattr(row_keys, "_child", lambda key, index: [derived.append(index), one(key, index)][1])
    keys = RowKeys(ROOT)
    found = [keys.of(row_id) for row_id in range(256)]
    assert len(derived) == 7 + 256
    assert [keys.of(row_id) for row_id in range(256)] == found
    assert len(derived) == 7 + 2 * 256
    keys.of(256)
    assert len(derived) == 7 + 2 * 256 + 2
    keys.forget([3])
    assert [keys.of(row_id) for row_id in range(256) if row_id != 3] == [key for n, key in enumerate(found) if n != 3]


def test_classes_have_keys_of_their_own_and_negative_ids_none() -> None:
    keys = RowKeys(ROOT)
    assert [keys.of_class(name) for name in NAMES] == [key_of_class(ROOT, name) for name in NAMES]
    assert [keys.of(row_id) for row_id in (-1, -2, -(2**63))] == [None] * 3
    before = keys.to_bytes()
    keys.forget([-1, -5])
    assert keys.to_bytes() == before


def test_an_id_that_no_row_has_forgets_no_other_rows_key() -> None:
    keys = RowKeys(ROOT)
    before = keys.to_bytes()
    assert [keys.of(row_id) for row_id in (2**63, 2**64 + 5, 2**80)] == [None] * 3
    keys.forget([2**63, 2**64 + 5, 2**80])
    assert keys.to_bytes() == before
    keys.forget(np.array([5, 7]))
    assert RowKeys.from_bytes(keys.to_bytes()).has(6)
    assert [keys.has(row_id) for row_id in (5, 7)] == [False, False]


@given(st.lists(IDS, max_size=6), st.lists(st.sampled_from(NAMES), max_size=2), st.lists(IDS, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_what_is_forgotten_cannot_be_derived_and_all_else_can(
    gone: list[int], classes: list[str], others: list[int]
) -> None:
    keys = RowKeys(ROOT)
    keys.forget(gone)
    keys.forget_classes(classes)
    neighbours = {other for one in gone for other in (one - 1, one + 1, one ^ 256, one ^ 1 << 62) if other >= 0}
    for row_id in {*others, *neighbours, *gone}:
        if row_id < 1 << 63:
            assert keys.of(row_id) == (None if row_id in gone else key_at(ROOT, row_id))
    for name in NAMES:
        assert keys.of_class(name) == (None if name in classes else key_of_class(ROOT, name))
    # By brute force: nothing that's kept is the leaf or an ancestor of it, by place or by value.
    places = [*gone, *map(place_of, classes)]
    ancestors = {(level, place >> 8 * (8 - level)) for place in places for level in range(9)}
    kept = dict(keys.nodes())
    assert not ancestors & kept.keys()
    data = keys.to_bytes()
    for level, position in ancestors:
        key = ROOT
        for shift in reversed(range(level)):
            key = child(key, position >> 8 * shift & 255)
        assert key not in data
    assert len(kept) <= 255 * 8 * len({*places}) + (not places)


@given(st.lists(IDS, min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_order_and_repetition_make_no_difference(gone: list[int]) -> None:
    one, other, parts = RowKeys(ROOT), RowKeys(ROOT), RowKeys(ROOT)
    one.forget(gone)
    other.forget([*sorted(gone, reverse=True), *gone])
    for row_id in gone:
        parts.forget([row_id])
        parts = RowKeys.from_bytes(parts.to_bytes())
    assert one.to_bytes() == other.to_bytes() == parts.to_bytes()


def test_what_is_forgotten_whole_takes_no_room() -> None:
    """Rows in a run of ids leave the siblings of their ends, however many they are."""
    keys, few = RowKeys(ROOT), RowKeys(ROOT)
    keys.forget(range(65536))
    few.forget([0])
    assert len(dict(keys.nodes())) == 255 * 6
    assert len(dict(few.nodes())) == 255 * 8
    assert len(keys.to_bytes()) < len(few.to_bytes()) < 70_000
    assert keys.of(65535) is None
    assert keys.of(65536) == key_at(ROOT, 65536)


def test_keys_are_the_same_however_few_are_kept_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_keys, "_MOST_CACHED", 2)
    keys = RowKeys(ROOT)
    keys.forget([1 << 40])
    places = [number << 8 * level for number in (1, 2, 3, 1) for level in range(5)]
    assert [keys.of(place) for place in places] == [key_at(ROOT, place) for place in places]
    assert max(len(keys._cache), len(keys._above_leaves)) == 2


def test_the_file_is_the_owners_and_says_what_is_damaged(tmp_path: Path) -> None:
    keys, path = RowKeys(ROOT), tmp_path / "rows.keys"
    keys.forget([5, 70000])
    keys.certificates = {"ab" * 32: 1}
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = RowKeys.load(path)
    assert (again.commitment, again.certificates) == (RowKeys(ROOT).commitment, {"ab" * 32: 1})
    assert [again.of(row_id) for row_id in (5, 6)] == [None, key_at(ROOT, 6)]
    data = path.read_bytes()
    for wrong in (b"", data[:-1], data[:100], data.replace(b"keys 1", b"keys 2", 1), b"x" + data[1:], data + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(LedgerError, match=r"rows\.keys: .*Restore it from a copy, and forget again"):
            RowKeys.load(path)
    path.unlink()
    with pytest.raises(LedgerError, match="can't be read"):
        RowKeys.load(path)


@pytest.mark.parametrize("before", range(6))
def test_killed_while_it_is_saved_there_is_the_one_or_the_other(tmp_path: Path, before: int) -> None:
    """At each call to the system that changes the disk; what lies beside it has no forgotten key either."""
    path, keys = tmp_path / "rows.keys", RowKeys(ROOT)
    keys.save(path)
    old = path.read_bytes()
    keys.forget([7])
    if (child := os.fork()) == 0:
        calls = 0

        def counted(call: object) -> object:
            def run(*arguments: object, **named: object) -> object:
                nonlocal calls
                if calls == before:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return call(*arguments, **named)  # type: ignore[operator]

            return run

        for name in ("open", "write", "fsync", "replace", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        keys.save(path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or before >= 5
    assert path.read_bytes() in (old, keys.to_bytes())
    for draft in tmp_path.glob("*.tmp"):
        assert key_at(ROOT, 7) not in draft.read_bytes()
        assert ROOT not in draft.read_bytes()
    again = RowKeys.load(path)
    again.forget([7])
    again.save(path)
    assert RowKeys.load(path).of(7) is None
    assert [one.name for one in tmp_path.iterdir()] == ["rows.keys"]


# ------------------------------------------------------------------------------------------------------------ blinds


def at(ids: list[list[int]], name: str = "a", step: int = 3, microbatch: int = 1, **more: object) -> RowsAt:
    return RowsAt(step, microbatch, name, np.arange(len(ids)), np.array(ids, np.int64), **more)  # type: ignore[arg-type]


def test_forgetting_any_parent_or_the_class_closes_a_mixed_row() -> None:
    rows = at([[4, 9], [9, 4], [4, 0], [-1, 9], [-1, -1]])
    whole = KeyedRows(RowKeys(ROOT), "log").blinds(rows)
    assert len({*whole}) == 5
    assert None not in whole
    for gone, closed in (([4], {0, 1, 2}), ([9], {0, 1, 3}), ([0], {2}), ([6], set())):
        keys = RowKeys(ROOT)
        keys.forget(gone)
        left = KeyedRows(keys, "log").blinds(rows)
        assert left == [None if i in closed else blind for i, blind in enumerate(whole)]
        assert (commit(rows, left) is None) == bool(closed)
    keys = RowKeys(ROOT)
    keys.forget_classes(["a"])
    assert KeyedRows(keys, "log").blinds(rows) == [None] * 5
    assert None not in KeyedRows(keys, "log").blinds(at([[4]], name="b"))


def test_blinds_belong_to_log_class_place_and_row() -> None:
    own = KeyedRows(RowKeys(ROOT), "log")
    (blind,) = own.blinds(at([[4]]))
    others = [
        *KeyedRows(RowKeys(ROOT), "other").blinds(at([[4]])),
        *own.blinds(at([[4]], name="b")),
        *own.blinds(at([[4]], step=31)),
        *own.blinds(at([[4]], step=3, microbatch=0)),
        *own.blinds(at([[5], [4]])),
        *own.blinds(at([[4, 4]])),
        *own.blinds(at([[-2]])),
    ]
    assert blind not in others
    assert len({*others}) == len(others)


def test_of_packs_the_documents_own_the_leaf() -> None:
    rows = at([[70], [71]], owners=np.array([[-1, 3], [3, 8]]))
    keys = RowKeys(ROOT)
    keys.forget([70, 8])
    first, second = KeyedRows(keys, "log").blinds(rows)
    assert (first is None, second is None) == (False, True)


def test_salted_rows_are_those_of_version_2() -> None:
    rows = RowsAt(7, 2, "any", np.array([1, 4]), np.array([[5], [6]]))
    blinds = derive_blinds(ROOT, 7, 2, 5)
    assert commit(rows, SaltedRows(ROOT).blinds(rows)) == commit_rows(hash_rows(blinds[[1, 4]], rows.ids))
    none = RowsAt(7, 2, "any", np.zeros(0, np.int64), np.zeros((0, 1), np.int64))
    assert commit(none, SaltedRows(ROOT).blinds(none)) == commit_rows([])
    assert commit(none, KeyedRows(RowKeys(ROOT), "log").blinds(none)) == commit_rows([])


def test_a_guess_can_be_confirmed_with_the_keys_and_not_without() -> None:
    """The operator with all his files: before a row is forgotten he tries ids and contents, and afterwards in vain."""
    content = np.full((2, 32), 7, np.uint8)
    rows = at([[3], [8]], contents=content)
    keys = RowKeys(ROOT)
    commitment = commit(rows, KeyedRows(keys, "log").blinds(rows))

    def confirmed(known: RowKeys) -> list[int]:
        guesses = [at([[3], [row]], contents=content) for row in range(20)]
        tried = [commit(guess, KeyedRows(known, "log").blinds(guess)) == commitment for guess in guesses]
        return [row for row, fits in enumerate(tried) if fits]

    assert confirmed(keys) == [8]
    keys.forget([8])
    assert confirmed(RowKeys.from_bytes(keys.to_bytes())) == []
    assert confirmed(RowKeys(bytes(32))) == []


def test_a_file_says_the_same_in_whatever_order_certificates_were_noted() -> None:
    files = []
    for order in (("b", "a"), ("a", "b")):
        keys = RowKeys(ROOT)
        keys.certificates = {name: ord(name) for name in order}
        files.append(keys.to_bytes())
    assert files[0] == files[1]
    assert dict(RowKeys.from_bytes(files[0]).certificates) == {"a": 97, "b": 98}
