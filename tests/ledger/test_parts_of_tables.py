"""Tables in parts say what the entries say, whichever head they were brought up to on the way."""

from __future__ import annotations

import base64
import hashlib
import shutil
from copy import copy
from pathlib import Path

import msgspec
import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.derived import folder
from cosmati.ledger.derived.answers import num_standing
from cosmati.ledger.derived.folder import (
    FORMAT,
    INDEX_FILE,
    DerivedIndex,
    DerivedPart,
    RareEntry,
    check_files,
    derive,
    place_of,
    read_index,
    told_by,
)
from cosmati.ledger.derived.opened import open_derived
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.records.ledger import CheckpointEntry, EvaluationEntry, ResumeEntry, StepEntry
from cosmati.storage.duck import connection
from cosmati.storage.lock import FileLock
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest
from .test_amend import FIRST as WARM
from .test_amend import SECOND as MAIN
from .test_amend import Policy
from .test_verify import Item, write_signed

pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")
KEY, OTHER = SigningKey.generate(ORIGIN), SigningKey.generate(ORIGIN)


def longer(policy: Policy) -> Policy:
    found = copy(policy)
    found.details = policy.details | {"phases": [["warm", 0, 4], ["main", 4, 4000]]}
    return found


FIRST, SECOND = longer(WARM), longer(MAIN)
SCORES: dict[str, object] = {"step": 4, "metrics": {"accuracy": 0.5}, "weights": "trained"}


def _items() -> list[Item]:
    """Entries of which the ones around each bundle's end aren't steps, under two policies."""
    found: list[Item] = [FIRST.run()]
    found += [FIRST.step(step) for step in range(254)]
    scores = EvaluationEntry(4, digest("root"), hashlib.sha256(encode_details(SCORES)).digest())
    found += [(scores, SCORES), (CheckpointEntry(254, digest("state"), digest("root")), None)]
    found += [FIRST.step(step) for step in range(254, 260)]
    found += [(ResumeEntry(250, 251, 1), None), SECOND.amend(250)]
    found += [SECOND.step(step, 1) for step in range(250, 498)]
    found += [(CheckpointEntry(498, digest("state"), digest("root")), None)]
    return [*found, *(SECOND.step(step, 1) for step in range(498, 508))]


ITEMS = _items()
DATA = [encode_entry(entry) for entry, _ in ITEMS]
SIZES = [0 if details is None else len(encode_details(details)) + 1 for _, details in ITEMS]


def head_of(size: int) -> TreeHead:
    return TreeHead(size, mth(DATA[:size]))


def is_step(entry: object) -> bool:
    return isinstance(entry, StepEntry)


def rows_of(first: int, end: int) -> int:
    """Count the rows of tables: one a step, one a cell, one a norm."""
    num = 0
    for entry, details in ITEMS[first:end]:
        if isinstance(entry, StepEntry) and details is not None:
            norms = details["gradient_norm"]
            assert isinstance(norms, dict)
            num += 1 + len(entry.microbatches) + sum(value is not None for row in norms.values() for value in row)
    return num


def rare_of(first: int, end: int) -> list[RareEntry]:
    return [
        RareEntry(n, base64.b64encode(DATA[n]).decode(), sum(SIZES[:n]), SIZES[n])
        for n in range(first, end)
        if not is_step(ITEMS[n][0])
    ]


def ledger_at(place: Path, size: int, key: SigningKey = KEY) -> Path:
    shutil.rmtree(place / "ledger", ignore_errors=True)
    write_signed(place / "ledger", ITEMS[:size], key)
    return place / "ledger"


def derived_at(place: Path, size: int, *, anew: bool = False) -> DerivedIndex:
    return derive(ledger_at(place, size), KEY.verifier, head_of(size), anew=anew)


def spans(index: DerivedIndex) -> list[tuple[int, int]]:
    return [(part.first, part.end) for part in index.parts]


def change_index(place: Path, **changed: object) -> None:
    path = place / "derived" / INDEX_FILE
    index = msgspec.json.decode(path.read_bytes(), type=DerivedIndex)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(index, **changed)))


def refused(place: Path, size: int, match: str, key: SigningKey = KEY) -> str:
    with pytest.raises(TamperError, match=match) as caught:
        derive(ledger_at(place, size, key), key.verifier, head_of(size))
    assert "ledger derive RUN --anew" in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- what is in parts


def test_tables_name_what_they_were_made_from_and_how_many_rows_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    index = derived_at(tmp_path, len(ITEMS))
    assert (index.format, index.origin, index.vkey) == (FORMAT, ORIGIN, KEY.verifier.text)
    assert (index.tree_size, index.root) == (len(ITEMS), mth(DATA).hex())
    assert index.rare == rare_of(0, len(ITEMS))
    assert spans(index) == [(0, 256), (256, 512), (512, len(ITEMS))]
    assert [part.details_at for part in index.parts] == [0, sum(SIZES[:256]), sum(SIZES[:512])]
    for part in index.parts:
        steps = [entry for entry, _ in ITEMS[part.first : part.end] if isinstance(entry, StepEntry)]
        assert set(part.files) == {"steps", "cells", "norms"}, "there's no file without rows"
        assert part.files["steps"][1] == len(steps)
        assert sum(rows for _, rows in part.files.values()) == rows_of(part.first, part.end)
        with connection() as database:
            for table, (checksum, rows) in part.files.items():
                path = tmp_path / "derived" / part.name_of(table)
                assert hashlib.sha256(path.read_bytes()).hexdigest() == checksum
                source = f"'{path}'"
                pairs = database.execute(f"SELECT key, value FROM parquet_kv_metadata({source})").fetchall()
                assert dict(pairs) == {
                    b"format": FORMAT.encode(),
                    b"origin": ORIGIN.encode(),
                    b"tree_size": str(part.end).encode(),
                    b"root": mth(DATA[: part.end]).hex().encode(),
                }
                codec = database.execute(f"SELECT DISTINCT compression FROM parquet_metadata({source})").fetchall()
                assert codec == [("ZSTD",)]
                first, end, num = database.execute(f"SELECT min(entry), max(entry), count(*) FROM {source}").fetchall()[
                    0
                ]
                assert part.first <= first <= end < part.end
                assert num == rows
            steps_file = tmp_path / "derived" / part.name_of("steps")
            epochs = database.execute(f"SELECT entry, policy_epoch FROM '{steps_file}'").fetchall()
        amended = next(n for n, (entry, _) in enumerate(ITEMS) if isinstance(entry, ResumeEntry)) + 1
        assert all(epoch == (entry > amended) for entry, epoch in epochs)
    assert sorted(path.name for path in (tmp_path / "derived").glob("*.parquet*")) == sorted(
        part.name_of(table) for part in index.parts for table in part.files
    )


@pytest.mark.long
def test_a_part_ends_with_the_bundle_in_which_it_has_enough_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, size = rows_of(256, 512), len(ITEMS)
    assert num <= rows_of(0, 256)
    for enough, expected in (
        (num, [(0, 256), (256, 512), (512, size)]),
        (num + 1, [(0, 256), (256, size)]),
        (rows_of(0, 256), [(0, 256), (256, size)]),
        (rows_of(0, 256) + 1, [(0, 512), (512, size)]),
        (rows_of(0, 512), [(0, 512), (512, size)]),
        (rows_of(0, 512) + 1, [(0, size)]),
    ):
        monkeypatch.setattr(folder, "PART_ROWS", enough)
        assert spans(derived_at(tmp_path, size, anew=True)) == expected


def test_nothing_is_left_to_write_where_a_part_ends_with_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    assert spans(derived_at(tmp_path, 512)) == [(0, 256), (256, 512)]


def test_an_entry_alone_has_a_part_without_files(tmp_path: Path) -> None:
    index = derived_at(tmp_path, 1)
    assert index.parts == [DerivedPart(0, 1, 0, {})]
    assert index.rare == rare_of(0, 1)


@pytest.mark.parametrize("before", [1, 255, 256, 257, 264, 265, 512])
def test_tables_that_grew_are_those_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    derived_at(tmp_path, before)
    grown, size = derived_at(tmp_path, len(ITEMS)), len(ITEMS)
    assert (grown.rare, grown.tree_size, grown.root) == (rare_of(0, size), size, mth(DATA).hex())
    assert spans(grown) == [(0, 256), (256, 512), (512, size)]
    assert read_index(tmp_path / "derived") == grown
    check_files(tmp_path / "derived", grown)
    stored = {path.name for path in (tmp_path / "derived").iterdir()}
    assert stored == {"lock", INDEX_FILE, *(part.name_of(table) for part in grown.parts for table in part.files)} | {
        path.name for path in (tmp_path / "derived").glob(f"*-{before:012}.parquet")
    }
    once = derived_at(tmp_path, size, anew=True)
    assert [(part.details_at, {t: rows for t, (_, rows) in part.files.items()}) for part in grown.parts] == [
        (part.details_at, {t: rows for t, (_, rows) in part.files.items()}) for part in once.parts
    ]
    assert grown.sets == once.sets


def test_what_is_told_is_of_the_entries_that_the_tables_cover(tmp_path: Path) -> None:
    for size in (1, 250, 265, len(ITEMS)):
        index = derived_at(tmp_path, size)
        history, tables = told_by(tmp_path / "ledger", index)
        assert (history.size, history.attempt) == (size, int(size > 263))
        assert [one.index for one in tables] == [0, *([264] if size > 264 else [])]
        assert tables[0].classes == ("a", "b", "c")
        assert tables[0].details == FIRST.details
    assert tables[1].changes == (("policy", "first", "second"),)
    assert history.num_steps == 508
    assert history.standing() == {n for n, (e, _) in enumerate(ITEMS) if is_step(e) and not 251 <= n < 263}


def test_each_moment_of_the_log_has_its_own_number_of_steps(tmp_path: Path) -> None:
    with open_derived(ledger_at(tmp_path, len(ITEMS))) as derived:
        first, second = derived.milestones
        assert [num_standing(derived, at) for at in (None, first, None, second, first)] == [508, 254, 508, 498, 254]


# --------------------------------------------------------------------------------------------- what is there and isn't


def test_tables_of_the_same_head_are_left_as_they_are(tmp_path: Path) -> None:
    index = derived_at(tmp_path, 40)
    stray, file = tmp_path / "derived" / "stray.parquet", tmp_path / "derived" / INDEX_FILE
    stray.write_bytes(b"a query that runs may be reading it")
    inode = file.stat().st_ino
    assert derive(tmp_path / "ledger", KEY.verifier, head_of(40)) == index
    assert (stray.exists(), file.stat().st_ino) == (True, inode)
    change_index(tmp_path, sets=[])
    assert derive(tmp_path / "ledger", KEY.verifier, head_of(40), anew=True) == index, "whatever is there"


def test_files_that_no_index_names_go_when_it_is_brought_up(tmp_path: Path) -> None:
    place = tmp_path / "derived"
    named = [place / part.name_of(table) for part in derived_at(tmp_path, 40).parts for table in part.files]
    others = [place / "old.parquet", place / "cells-000000000000-000000000040.parquet.tmp"]
    kept = place / "notes.txt"
    for path in (*others, kept):
        path.write_bytes(b"x")
    derived_at(tmp_path, 50)
    assert all(path.exists() for path in (*named, kept))
    assert not any(path.exists() for path in others)
    derived_at(tmp_path, 60)
    assert not any(path.exists() for path in named), "the index before this one was the last that named them"
    (place / INDEX_FILE).write_bytes(b"{")
    refused(tmp_path, 60, "is damaged")
    derived_at(tmp_path, 60, anew=True)
    left = {path.name for path in place.glob("*.parquet*")}
    assert left == {f"{t}-{0:012}-{60:012}.parquet" for t in ("steps", "cells", "norms")}


def test_a_folder_that_cannot_be_written_is_named_and_the_lock_is_given_back(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path, 3)
    place_of(ledger).write_bytes(b"a file")
    with pytest.raises(LedgerError, match=r"can't be written: .*Make the folder writable") as caught:
        derive(ledger, KEY.verifier, head_of(3))
    assert str(place_of(ledger)) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    place_of(ledger).unlink()
    with pytest.raises(TamperError) as held:
        derive(ledger, KEY.verifier, TreeHead(3, bytes(32)))
    assert not (place_of(ledger) / INDEX_FILE).exists(), "nothing names what a scan wrote that ended in an error"
    FileLock(place_of(ledger) / "lock").release()
    derive(ledger, KEY.verifier, head_of(3))
    assert held.value.__traceback__ is not None, "an error that is held on to holds nothing"


# ------------------------------------------------------------------------------------------------ tables of another log


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 511, 512, 516, len(ITEMS)])
def test_the_root_of_the_first_entries_is_that_of_their_tiles(tmp_path: Path, size: int) -> None:
    ledger = ledger_at(tmp_path, len(ITEMS))
    assert folder._root_at(ledger, size, head_of(len(ITEMS))) == mth(DATA[:size])


def test_a_head_before_that_of_the_tables_is_a_cut(tmp_path: Path) -> None:
    derived_at(tmp_path, 40)
    told = refused(tmp_path, 39, "the ledger was cut back")
    assert f"40 entries of {ORIGIN}, root {mth(DATA[:40]).hex()[:16]}," in told
    assert "covers 39" in told


@pytest.mark.parametrize("size", [40, 41])
def test_another_root_is_refused_at_its_own_size_and_later(tmp_path: Path, size: int) -> None:
    derived_at(tmp_path, 40)
    change_index(tmp_path, root=bytes(32).hex())
    assert f"root {'0' * 16}, which" in refused(tmp_path, size, "aren't the first entries of what is signed now")


def test_another_key_is_refused_unless_it_may_have_handed_over(tmp_path: Path) -> None:
    derived_at(tmp_path, 40)
    refused(tmp_path, 40, "under another key than this ledger's", OTHER)
    refused(tmp_path, 41, "under a key that never signed this ledger", OTHER)
    change_index(tmp_path, root=bytes(32).hex())
    refused(tmp_path, 41, "under another key than this ledger's", OTHER)


def test_what_stood_is_told_of_any_entry_before_the_tables_end(tmp_path: Path) -> None:
    index, ledger = derived_at(tmp_path, len(ITEMS)), tmp_path / "ledger"
    for start in (0, 1, 255, 256, 257, 263, 264, 265):
        state = folder._replayed(ledger, index, start)
        assert state.history.size == start
        assert len(state.tables) == (start > 0) + (start > 264)
        steps = [n for n in range(start) if is_step(ITEMS[n][0])]
        expected = steps if start < 264 else [n for n in steps if not 251 <= n < 263]
        assert sorted(state.history.standing()) == expected


@pytest.mark.parametrize(
    "change",
    [{"details_at": 1}, {"details_size": 7}, {"data": base64.b64encode(DATA[1]).decode()}, {"data": "é"}],
)
def test_entries_that_are_not_the_ledgers_are_named_with_the_index(tmp_path: Path, change: dict[str, object]) -> None:
    index = derived_at(tmp_path, 40)
    others = [msgspec.structs.replace(index.rare[0], **change), *index.rare[1:]]
    with pytest.raises(TamperError, match="doesn't fit the ledger: ") as caught:
        told_by(tmp_path / "ledger", msgspec.structs.replace(index, rare=others))
    assert str(caught.value).startswith(str(tmp_path / "derived" / INDEX_FILE))
    assert str(caught.value).endswith("cosmati ledger derive RUN --anew.")
    if "details_at" in change:
        assert "details.jsonl (entry 0)" in str(caught.value)


def test_a_changed_line_of_details_is_found_where_only_the_tables_are_asked(tmp_path: Path) -> None:
    index = derived_at(tmp_path, 265)
    path = tmp_path / "ledger" / "details.jsonl"
    data = bytearray(path.read_bytes())
    for rare in index.rare:
        if rare.details_size:
            other = data.copy()
            other[rare.details_at + 5] ^= 1
            path.write_bytes(other)
            with pytest.raises(TamperError, match=rf"\(entry {rare.index}\)"):
                told_by(tmp_path / "ledger", index)
