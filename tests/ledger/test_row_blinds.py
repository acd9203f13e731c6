"""Files of blinds: for which steps and slots they have some, and of which run; against a plain reading of the form."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmati.errors import LedgerError
from cosmati.ledger import row_blinds
from cosmati.ledger.row_blinds import (
    FileOfBlinds,
    RecordedBlinds,
    Substituted,
    blinds_of_salt,
    read_blinds,
    salt_commitment,
    secret_commitments,
    secrets_in,
    secrets_of_run,
    write_blinds,
)
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE
from cosmati.ledger.rows import BLIND_BYTES, ROWS_VERSION, SALTED_VERSION, derive_blinds

SALT, OTHER = b"s" * 32, b"t" * 32
KEYS = RowKeys(bytes(range(32)))


def run(*commitments: tuple[str, bytes], name: str = "r", steps: Any = None) -> Any:
    ledger = SimpleNamespace(run=SimpleNamespace(commitments=commitments), key=SimpleNamespace(name=name))
    return SimpleNamespace(ledger=ledger, steps=steps)


SALTED = run(("rows_salt", salt_commitment(SALT)))
KEYED = run(("rows_salt", salt_commitment(SALT)), ("rows_keys", KEYS.commitment))


def rows(step: int, microbatch: int, *slots: int) -> Any:
    return SimpleNamespace(step=step, microbatch=microbatch, slots=np.array(slots, np.int64))


def blind(number: int) -> bytes:
    return bytes([number]) * BLIND_BYTES


def test_a_file_gives_the_blinds_of_its_slots_but_of_those_that_are_closed() -> None:
    told = {"3/1": b"".join(map(blind, range(4)))}
    file = FileOfBlinds(ROWS_VERSION, told, {"3/1": frozenset({2})})
    assert file.blinds(rows(3, 1, 0, 3)) == [blind(0), blind(3)]
    assert file.blinds(rows(3, 1, 3, 2, 1)) == [blind(3), None, blind(1)]
    assert file.blinds(rows(3, 1)) == []
    assert file.blinds(rows(3, 1, 4)) is None
    assert file.blinds(rows(3, 0, 0)) is file.blinds(rows(2, 1, 0)) is file.blinds(rows(31, 1, 0)) is None


@pytest.mark.parametrize(("of", "version"), [(SALTED, SALTED_VERSION), (KEYED, ROWS_VERSION)])
@pytest.mark.parametrize("has_closed", [False, True])
def test_what_was_asked_for_within_the_segment_is_written_and_read(of: Any, version: int, has_closed: bool) -> None:
    def given(asked: Any) -> list[bytes | None] | None:
        if asked.step == 5:
            return None
        return [None if has_closed and slot == 3 else blind(slot) for slot in asked.slots.tolist()]

    secrets: Any = SimpleNamespace(blinds=given, certificates={"ab": 7})
    kept = RecordedBlinds(secrets, range(4, 7))
    for asked in (
        rows(3, 0, 1),
        rows(4, 0, 2, 0),
        rows(4, 0, 3),
        rows(4, 1, 1),
        rows(5, 0, 1),
        rows(6, 0),
        rows(7, 0, 1),
    ):
        assert kept.blinds(asked) == given(asked)
    substituted = {"cd": Substituted(("a", "b"), frozenset({2**60, 3}), "data")} if has_closed else {}
    data = kept.to_bytes(of, substituted)
    file = json.loads(data)
    assert (file["kind"], file["version"], file["origin"]) == ("cosmati row blinds", version, "r")
    third = bytes(BLIND_BYTES) if has_closed else blind(3)
    expected = {
        "4/0": blind(0) + bytes(BLIND_BYTES) + blind(2) + third,
        "4/1": bytes(BLIND_BYTES) + blind(1),
        "6/0": b"",
    }
    assert {place: bytes.fromhex(text) for place, text in file["blinds"].items()} == expected
    assert file.keys() - {"kind", "version", "origin", "blinds"} == (
        {"closed", "certificates", "substituted"} if has_closed else set()
    )
    assert file.get("substituted") == (
        {"cd": {"classes": ["a", "b"], "rows": ["3", str(2**60)], "data": "data"}} if has_closed else None
    )
    closed = {"4/0": frozenset({3})} if has_closed else {}
    assert read_blinds(of, data) == FileOfBlinds(
        version, expected, closed, {"ab": 7} if has_closed else {}, substituted
    )
    assert secrets_in(of, data) == read_blinds(of, data)


def test_a_file_of_another_run_or_form_is_refused() -> None:
    secrets: Any = SimpleNamespace(certificates={})
    data = RecordedBlinds(secrets, range(3)).to_bytes(SALTED, {})
    assert read_blinds(SALTED, data).told == {}
    for other in (KEYED, run(name="another")):
        with pytest.raises(LedgerError, match="These row blinds are of 'r'"):
            read_blinds(other, data)
    for odd in (b"{", b'{"kind": 1}', b"[]", data.replace(b'"blinds":{}', b'"blinds":{"1/0":"x"}')):
        with pytest.raises(LedgerError, match="no file of row blinds"):
            read_blinds(SALTED, odd)
    with pytest.raises(LedgerError, match="These row blinds are of 'r' in form"):
        read_blinds(SALTED, data.replace(b"cosmati row blinds", b"cosmati something"))


def test_an_auditors_file_has_enough_blinds_for_the_fullest_microbatch_of_each_step() -> None:
    def cells(*microbatches: tuple[int, int]) -> Any:
        entry = SimpleNamespace(step=0, microbatches=[SimpleNamespace(num_rows=n) for _, n in microbatches])
        return SimpleNamespace(numbers=[m for m, _ in microbatches]), entry

    taken = {4: cells((0, 3), (0, 2), (1, 1)), 5: cells((0, 0))}
    asked: list[tuple[int, int]] = []

    def steps(first: int, end: int) -> Any:
        asked.append((first, end))
        for step in range(first, end):
            item, entry = taken[step]
            entry.step = step
            yield item, entry, None

    of = run(("rows_salt", salt_commitment(SALT)), steps=steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blinds, "microbatch_of_cells", lambda item, _: item.numbers)
        file = read_blinds(of, write_blinds(of, SALT, range(4, 6)))
    assert asked == [(4, 6)]
    expected = {place: 2 * rows + 16 for place, rows in (("4/0", 5), ("4/1", 5), ("5/0", 0))}
    assert {place: len(text) // BLIND_BYTES for place, text in file.told.items()} == expected
    for place, number in expected.items():
        step, microbatch = map(int, place.split("/"))
        assert file.told[place] == derive_blinds(SALT, step, microbatch, number).tobytes()
    with pytest.raises(LedgerError, match="This salt isn't the one"):
        write_blinds(of, OTHER, range(4, 6))


def test_only_what_entry_0_commits_to_opens_rows(tmp_path: Path) -> None:
    assert salt_commitment(SALT) == hashlib.sha256(b"cosmati rows salt" + SALT).digest()
    assert blinds_of_salt(SALTED, SALT) is not None
    with pytest.raises(LedgerError, match="This salt isn't the one"):
        blinds_of_salt(SALTED, OTHER)
    with pytest.raises(LedgerError, match="rows have keys, and its salt opens none"):
        blinds_of_salt(KEYED, SALT)
    assert secrets_in(KEYED, KEYS.to_bytes()) is not None
    for of, data in ((SALTED, KEYS.to_bytes()), (KEYED, RowKeys(bytes(32)).to_bytes())):
        with pytest.raises(LedgerError, match="These row keys aren't of the tree"):
            secrets_in(of, data)
    with pytest.raises(LedgerError, match=r"rows\.salt can't be read"):
        secrets_of_run(SALTED, tmp_path)
    with pytest.raises(LedgerError, match=r"rows\.keys can't be read"):
        secrets_of_run(KEYED, tmp_path)
    (tmp_path / SALT_FILE).write_bytes(SALT)
    assert secret_commitments(tmp_path) == {"rows_salt": salt_commitment(SALT)}
    (tmp_path / KEYS_FILE).write_bytes(KEYS.to_bytes())
    (tmp_path / KEYS_FILE).chmod(0o600)
    assert secret_commitments(tmp_path) == dict(KEYED.ledger.run.commitments)
    opened: Any = secrets_of_run(SALTED, tmp_path), secrets_of_run(KEYED, tmp_path)
    assert [type(one).__name__ for one in opened] == ["SaltedRows", "KeyedRows"]
