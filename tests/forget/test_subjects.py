"""The subject index against a dictionary; what it shows without its key; what is wrong with it, each by name."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.data.ingest import read_jsonl
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError, TamperError
from cosmati.forget.subjects import SubjectIndex, index_subjects, make_key, padded, read_key

KEY = bytes(range(32))
COLUMNS = {"text": "str", "author": "json", "mentions": "json", "annotator": "str", "class": "str"}
IDS = st.sampled_from(["ada", "bob", "Ada", " ada ", "u\u0308", "\u00fc", "", "7", "gr\u00fcn 4"])


def rows_of(authors: list[Any], mentions: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": f"text {number}",
            "author": who,
            "mentions": others,
            "annotator": f"a{number % 3}",
            "class": f"c{number % 2}",
        }
        for number, (who, others) in enumerate(zip(authors, mentions, strict=True))
    ]


def written(folder: Path, rows: list[dict[str, Any]]) -> StreamingDataset:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    read = read_jsonl(folder / "rows.jsonl", COLUMNS, class_of=lambda row: str(row["class"]))
    write_dataset(read, folder / "out", read.columns, class_of=read.class_of, source="s", size_limit=600)
    return StreamingDataset(folder / "out")


def indexed(dataset: StreamingDataset, folder: Path, *fields: str, key: bytes = KEY) -> SubjectIndex:
    index_subjects(dataset, fields or ("author", "mentions"), folder / "index", key)
    return SubjectIndex.open(folder / "index", key, dataset)


def brute(dataset: StreamingDataset) -> dict[str, list[int]]:
    """Who is named where, by reading every row in the order of an epoch."""
    found = defaultdict(set)
    for row in dataset:
        for one in [row["author"], *row["mentions"]]:
            name = {"u\u0308": "\u00fc"}.get(str(one).strip(), str(one).strip())
            if one is not None and name:
                found[name].add(row["row_id"])
    return {name: sorted(rows) for name, rows in found.items()}


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(IDS | st.integers(0, 9) | st.none(), st.lists(IDS | st.integers(0, 9), max_size=3)),
        min_size=4,
        max_size=24,
    )
)
def test_it_finds_what_a_dictionary_finds(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("subjects")
    dataset = written(folder, rows_of([who for who, _ in rows], [others for _, others in rows]))
    index, expected = indexed(dataset, folder), brute(dataset)
    for name in ("ada", "bob", "Ada", " ada ", "u\u0308", "7", 7, "nobody"):
        key = "\u00fc" if name == "u\u0308" else str(name).strip()
        assert list(index.rows_of(name)) == expected.get(key, []), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StreamingDataset]:
    folder = tmp_path_factory.mktemp("plain")
    dataset = written(folder, rows_of([f"person{number % 5}" for number in range(45)], [[] for _ in range(45)]))
    index_subjects(dataset, ["author"], folder / "index", KEY)
    return folder, dataset


def test_without_the_key_it_is_noise(plain: tuple[Path, StreamingDataset], tmp_path: Path) -> None:
    """No id and no order of rows is in it; another key leaves no record where it was; records are all unlike."""
    folder, dataset = plain
    content = (folder / "index").read_bytes()
    assert b"person" not in content
    records = content[content.index(b"\n", content.index(b"\n") + 1) + 1 : -32]
    assert padded(45) == 48
    assert len(records) == 32 * 48 == 32 * json.loads(content.split(b"\n")[1])["records"]
    parts = [records[start : start + 32] for start in range(0, len(records), 32)]
    assert parts == sorted(parts)
    assert len({part[:16] for part in parts}) == len({part[16:] for part in parts}) == len(parts)
    other = indexed(dataset, tmp_path, "author", key=bytes(32))
    assert not set(parts) & {*_parts(tmp_path / "index")}
    assert other.rows_of("person1") == SubjectIndex.open(folder / "index", KEY).rows_of("person1")


def _parts(path: Path) -> list[bytes]:
    records = path.read_bytes().split(b"\n", 2)[2][:-32]
    return [records[start : start + 32] for start in range(0, len(records), 32)]


def test_who_has_how_many_rows_cannot_be_seen(tmp_path: Path) -> None:
    """One person with all rows, or each with one: files of one size."""
    sizes = set()
    for number, authors in enumerate([["x"] * 20, [f"p{n}" for n in range(20)]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        indexed(written(folder, rows_of(authors, [[] for _ in range(20)])), folder, "author")
        sizes.add((folder / "index").stat().st_size)
    assert len(sizes) == 1


@given(st.integers(0, 10**15))
def test_the_padding_is_small_and_says_little(number: int) -> None:
    assert number <= padded(number) <= max(number, math.floor(number * 1.12))
    significant = f"{padded(number):b}".rstrip("0")
    assert len(significant) <= max(1, number.bit_length()).bit_length() + 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_change_of_the_file_is_found(plain: tuple[Path, StreamingDataset], data: Any) -> None:
    folder, dataset = plain
    content = bytearray((folder / "index").read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "add", "drop a record", "swap two"]))
    start = bytes(content).index(b"\n", 20) + 1
    place = start + 32 * data.draw(st.integers(0, (len(content) - start) // 32 - 3))
    match kind:
        case "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "add":
            content += b"\0" * data.draw(st.integers(1, 40))
        case "drop a record":
            del content[place : place + 32]
        case _:
            content[place : place + 64] = content[place + 32 : place + 64] + content[place : place + 32]
    (folder / "changed").write_bytes(content)
    with pytest.raises((DataError, TamperError)):
        SubjectIndex.open(folder / "changed", KEY, dataset)


def test_each_wrong_thing_has_its_own_error(plain: tuple[Path, StreamingDataset], tmp_path: Path) -> None:
    folder, _ = plain
    other = written(tmp_path, rows_of(["ada"] * 4, [[]] * 4))
    with pytest.raises(DataError, match="another key"):
        SubjectIndex.open(folder / "index", bytes(32))
    with pytest.raises(DataError, match="of other data"):
        SubjectIndex.open(folder / "index", KEY, other)
    content = (folder / "index").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-64])
    with pytest.raises(TamperError, match="isn't what was written"):
        SubjectIndex.open(tmp_path / "cut", KEY)
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(DataError, match="no index"):
        SubjectIndex.open(tmp_path / "text", KEY)
    for nothing in ("", "  ", True):
        with pytest.raises(DataError, match="nobody's id"):
            SubjectIndex.open(folder / "index", KEY).find(nothing)
    with pytest.raises(DataError, match=r"No row has a field 'owner'.*annotator, author"):
        index_subjects(other, ["owner"], tmp_path / "index", KEY)


@pytest.mark.parametrize("wrong", [1.5, True, {"id": "ada"}, [["ada", 0.5]]])
def test_what_is_no_id_is_refused_and_leaves_the_index_before(tmp_path: Path, wrong: Any) -> None:
    dataset = written(tmp_path, rows_of(["ada", wrong, "bob", "eve"], [[]] * 4))
    (tmp_path / "index").write_bytes(b"before")
    with pytest.raises(DataError, match=r"Row \d: author is"):
        index_subjects(dataset, ["author"], tmp_path / "index", KEY)
    assert (tmp_path / "index").read_bytes() == b"before"
    assert not list(tmp_path.glob("index?*"))


def test_classes_without_the_fields_are_named(tmp_path: Path) -> None:
    """A class whose rows have nobody's name keeps its row ids, and both the write and the answer say so."""
    for number, (name, fields) in enumerate({"a": {"text": "str"}, "b": {"text": "str", "author": "json"}}.items()):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows_of(["ada", "bob", "eve"], [[]] * 3))))
        read = read_jsonl(tmp_path / f"{name}.jsonl", fields, class_of=f"open/{name}")
        write_dataset(read, tmp_path / "out" / str(number), read.columns, class_of=f"open/{name}", source=name)
    dataset = StreamingDataset([tmp_path / "out" / "0", tmp_path / "out" / "1"])
    made = index_subjects(dataset, ["author"], tmp_path / "index", KEY)
    assert (made.num_subjects, made.num_rows, made.num_unnamed, made.without) == (3, 3, 3, ("open/a",))
    index = SubjectIndex.open(tmp_path / "index", KEY, dataset)
    assert index.without == ("open/a",)
    assert index.rows_of("bob") == (4,)
    with pytest.raises(DataError, match="No row has a field that was named"):
        index_subjects(dataset, [], tmp_path / "index", KEY)


def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    assert read_key(tmp_path / "key") == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(DataError, match="there already"):
        make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(DataError, match="chmod 600"):
        read_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "key").write_text("abc")
    with pytest.raises(DataError, match="holds no key"):
        read_key(tmp_path / "key")


def test_packs_are_asked_for_documents(tmp_path: Path) -> None:
    """By annotator and by file, against the packs' own spans; a document that's cut lies in two packs."""
    written(tmp_path / "rows", rows_of(["x"] * 4, [[]] * 4))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows_of(["x"] * 12, [[]] * 12))), "utf-8")
    read = read_jsonl(tmp_path / "rows.jsonl", {"text": "str", "annotator": "str"}, class_of="open")
    packed = pack_rows(tokenize(read, ByteTokenizer()), Packing(length=10), class_names=("open",))
    write_dataset(packed, tmp_path / "out", packed.columns, class_of=packed.class_of, source="s")
    dataset = StreamingDataset(tmp_path / "out")
    index = indexed(dataset, tmp_path, "annotator")
    expected = {
        (row["row_id"], doc) for row in dataset for doc in np.asarray(row["spans"])[:, 0].tolist() if doc % 3 == 1
    }
    found = index.find("a1")
    assert {*map(tuple, found.documents.tolist())} == expected
    assert len(expected) > 4  # some are in two packs
    assert index.rows_of("a1") == (1, 4, 7, 10)
    assert not len(found.row_ids)
    by_file = indexed(dataset, tmp_path, "origin_file")
    assert by_file.rows_of("rows.jsonl") == tuple(range(12))
    both = StreamingDataset([tmp_path / "out", tmp_path / "rows" / "out"])
    mixed = indexed(both, tmp_path, "annotator")
    assert (len(mixed.find("a1").row_ids), len(mixed.find("a1").documents)) == (1, len(expected))
    with pytest.raises(DataError, match="Whole rows and documents of packs were found"):
        mixed.rows_of("a1")
    with pytest.raises(
        DataError, match=r"No row has a field 'author'.*has annotator, label_function, origin_file, rater"
    ):
        index_subjects(dataset, ["author"], tmp_path / "other", KEY)
