"""What stands in `tables.json` is read as it was written, changed by nobody, and refused where it's of another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cosmati.errors import TamperError
from cosmati.ledger.derived.folder import (
    FORMAT,
    INDEX_FILE,
    DerivedIndex,
    DerivedPart,
    RareEntry,
    check_files,
    mend,
    place_of,
    read_index,
)

RARE = RareEntry(0, "AAAA", 12, 34)
PART = DerivedPart(256, 1024, 34, {"steps": ("ab" * 32, 7)})
INDEX = DerivedIndex(FORMAT, "run", "key", 1024, "cd" * 32, [RARE], [(1, [2, 3])], [PART])


def write(folder: Path, **changed: Any) -> Path:
    (folder / INDEX_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(INDEX, **changed)))
    return folder


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    assert read_index(write(tmp_path)) == INDEX
    assert read_index(tmp_path / "nowhere") is None


def test_an_entry_without_details_has_none_at_the_file_s_beginning() -> None:
    assert RareEntry(3, "AAAA") == RareEntry(3, "AAAA", 0, 0)


@pytest.mark.parametrize("one", [RARE, PART, INDEX], ids=lambda one: type(one).__name__)
def test_nothing_that_was_read_can_be_changed(one: msgspec.Struct) -> None:
    """Digests are compared with what was read first."""
    before = msgspec.structs.asdict(one)
    for name in one.__struct_fields__:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(one, name, None)
    assert msgspec.structs.asdict(one) == before


def test_files_are_named_by_table_and_entries_and_stand_in_the_order_of_these() -> None:
    assert PART.name_of("steps") == "steps-000000000256-000000001024.parquet"
    parts = [DerivedPart(first, first + 1, 0, {}) for first in (0, 9, 10, 99, 123_456_789_012)]
    names = [part.name_of("cells") for part in parts]
    assert names == sorted(names)
    assert len(set(map(len, names))) == 1


def test_an_earlier_form_is_none_and_another_one_is_refused(tmp_path: Path) -> None:
    assert read_index(write(tmp_path, format="cosmati-derived/1")) is None
    for other in ("cosmati-derived/3", "", "COSMATI-DERIVED/1"):
        with pytest.raises(TamperError, match="this release reads cosmati-derived/2") as told:
            read_index(write(tmp_path, format=other))
        assert f"is of the form {other!r}" in str(told.value)
        assert str(told.value).endswith(mend(tmp_path))
    with pytest.raises(TamperError) as told:
        read_index(write(tmp_path, format="x" * 99))
    assert f"the form '{'x' * 39}, and" in str(told.value), "what somebody else wrote isn't told at any length"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "\xff"}', b'{"format": "cosmati-derived/2"}'])
def test_an_index_that_cannot_be_read_is_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / INDEX_FILE).write_bytes(data)
    with pytest.raises(TamperError, match="is damaged") as told:
        read_index(tmp_path)
    assert str(told.value).endswith(mend(tmp_path))
    assert f"Remove {tmp_path}" in mend(tmp_path)


@pytest.mark.parametrize(("ledger", "place"), [("ledger", "derived"), ("other", "other-derived")])
def test_tables_lie_beside_their_ledger(tmp_path: Path, ledger: str, place: str) -> None:
    assert place_of(tmp_path / ledger) == tmp_path / place


def test_files_are_those_of_which_the_index_has_the_digest(tmp_path: Path) -> None:
    digests = {
        b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    parts = [DerivedPart(n, n + 1, 0, {"steps": (digest, 1)}) for n, digest in enumerate(digests.values())]
    paths = [tmp_path / part.name_of("steps") for part in parts]
    for path, data in zip(paths, digests, strict=True):
        path.write_bytes(data)
    index = msgspec.structs.replace(INDEX, parts=parts)
    found = check_files(tmp_path, index)
    assert found["steps"] == paths
    assert not any(own for table, own in found.items() if table != "steps")
    paths[1].write_bytes(b"abd")
    with pytest.raises(TamperError, match="was changed since it was derived") as told:
        check_files(tmp_path, index)
    assert str(paths[1]) in str(told.value)
    paths[0].unlink()
    with pytest.raises(TamperError, match="is missing") as told:
        check_files(tmp_path, index)
    assert str(paths[0]) in str(told.value)
