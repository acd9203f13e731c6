"""What people get wrong on their first day, and what they are told: never a bare error from deep below."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, IterableDataset

from cosmati.data.foreign import refuse_rows, refuse_shares
from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.writer import ShardWriter, merge_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.shard_files import write_data_set, write_source

# Parquet files have no hashes.
pytestmark = pytest.mark.filterwarnings("ignore::cosmati.data.shards.opening.UnverifiedDataWarning")
Index = dict[str, Any]


def read(folder: Any, **options: Any) -> list[Any]:
    return list(StreamingDataset(folder, **options))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda _: [], "[] is no place of data"),
        (lambda _: None, "None is no place of data"),
        (lambda _: "", "A data set's place is empty"),
        (lambda folder: folder / "nowhere", "holds neither an index.json"),
        (lambda folder: folder / "index.json", "is a file, and a folder"),
        (lambda folder: f"{folder}/*.parquet", "matches *.parquet"),
        (lambda folder: [folder, folder / "nowhere"], "holds neither an index.json"),
    ],
)
def test_places_that_hold_no_data(tmp_path: Path, wrong: Callable[[Path], Any], what: str) -> None:
    write_source(tmp_path, [3])
    with pytest.raises(DataError, match=re.escape(what)):
        read(wrong(tmp_path))


def renamed(index: Index) -> None:
    index["shards"][1]["raw_data"] = index["shards"][0]["raw_data"]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (renamed, "several shards are in one file, shard.00000.mds"),
        (lambda index: index["shards"][1]["raw_data"].update(bytes=7), "bytes where 7 were due"),
        (lambda index: index["shards"][1].update(samples=7), "says 5 rows, and its index 7"),
        (lambda index: index["shards"][0].update(hashes=["md5"]), "lacks a hash of md5"),
        (lambda index: index["shards"][0]["raw_data"].update(hashes={"sha256": ""}), "lacks a hash of sha256"),
        (lambda index: index.update(version=1), "index.json: it has version 1"),
        (lambda index: index.pop("shards"), "isn't an index"),
        (lambda index: index.clear(), "it has version None"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, edit: Callable[[Index], Any], what: str) -> None:
    path = write_source(tmp_path, [5, 5]) / "index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=re.escape(what)):
        read(tmp_path)


def test_an_index_that_is_none_and_a_shard_that_isnt_there(tmp_path: Path) -> None:
    path = write_source(tmp_path, [5, 5]) / "index.json"
    (tmp_path / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds isn't there"):
        read(tmp_path)
    index = json.loads(path.read_text())
    shard = index["shards"][0]
    shard.update(hashes=["crc9"])
    shard["raw_data"].update(hashes={"crc9": "aa"})
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"none of the hashes crc9 can be computed\. Write the index again"):
        read(tmp_path)
    for content in (b"", b"{bad", b"\xff\xfe", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="isn't an index"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"columns": ("colour",)}, "There is no column 'colour'"),
        ({"columns": "number"}, "columns='number' is a string. Give a tuple: columns=('number',)"),
        ({"seed": "a"}, "seed='a' isn't a whole number"),
        ({"window_rows": 1.5}, "window_rows=1.5 isn't a whole number"),
        ({"window_rows": -5}, "window_rows=-5: give 1 or more"),
        ({"cache": CacheOptions("cache", ahead_bytes=-1)}, "ahead_bytes=-1: give 0 or more"),
        ({"cache": CacheOptions("cache", ahead_bytes=1.5)}, "ahead_bytes=1.5 isn't a whole number"),  # type: ignore[arg-type]
        ({"cache": CacheOptions("cache", deadline_seconds=0)}, "deadline_seconds=0: give a number above 0"),
        ({"cache": CacheOptions("cache", deadline_seconds="1m")}, "deadline_seconds='1m': give a number above 0"),  # type: ignore[arg-type]
        ({"on_bad_row": "ignore"}, "there are 'raise' and 'skip'"),
        ({"repeats": [2]}, "classes have to be named"),
        ({"repeats": {"unknown": "x"}}, "no number of visits"),
        ({"repeats": {"unknown": -1}}, "negative number of times"),
        ({"cache": CacheOptions("cache", max_bytes="10gb")}, "max_bytes='10gb' isn't a number of bytes"),  # type: ignore[arg-type]
        ({"shuffle_algo": "py1e", "batch_size": 8}, "mosaicml-streaming's. Here: batch_size: StreamingLoader(dataset"),
    ],
)
def test_options_that_arent(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    write_source(tmp_path, [3])
    with pytest.raises(DataError, match=re.escape(what)):
        StreamingDataset(tmp_path, **options)


def test_their_call_says_what_to_write_and_a_subclass_may_keep_their_names(tmp_path: Path) -> None:
    write_source(tmp_path, [3])
    with pytest.raises(DataError, match=r"remote: give it as the first argument; local: cache="):
        StreamingDataset(remote=str(tmp_path), local="here")  # type: ignore[call-arg]

    class Mine(StreamingDataset):
        def __init__(self, remote: str, batch_size: int) -> None:
            super().__init__(remote, shuffle=False)
            self.batch_size = batch_size

    assert len(Mine(remote=str(tmp_path), batch_size=8)) == 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"batch_size": 4.0}, "batch_size=4.0 isn't a whole number"),
        ({"batch_size": np.float64(4)}, r"batch_size=.*4.0.* isn't a whole number"),
        ({"tail": "pad"}, "there are keep, drop, carry"),
        ({"rank": 2, "world": 2}, "ranks are 0 to 1"),
        ({"shuffle": True}, "shuffle= would change the order"),
        ({"collate_fn": list}, "collate_fn= would change"),
    ],
)
def test_loaders_that_cant_be(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    data = StreamingDataset(write_source(tmp_path, [3]))
    with pytest.raises(DataError, match=what):
        StreamingLoader(data, **{"batch_size": 2, **options})


def test_writers_that_cant(tmp_path: Path) -> None:
    def write(row: Any, **options: Any) -> None:
        with ShardWriter(tmp_path / "w", {"a": "int"}, class_path="open/x", source="s", **options) as writer:
            writer.write(row)

    with pytest.raises(DataError, match="A row is a list, and a dictionary"):
        write([1])
    with pytest.raises(DataError, match="size_limit='64mb': give a number of bytes"):
        write({"a": 1}, size_limit="64mb")
    with pytest.raises(DataError, match="No parts are given"):
        merge_sources([], tmp_path / "merged")
    write_source(tmp_path / "merged" / "part", [3])
    with pytest.raises(DataError, match=r"part has no manifest\.json"):
        merge_sources([tmp_path / "merged" / "part"], tmp_path / "merged")


def test_nulls_in_lists_are_no_numbers(tmp_path: Path) -> None:
    for values in ([[1, None]], [[1, None], [2]], pa.array([[1, None]], pa.list_(pa.int64(), 2))):
        pq.write_table(pa.table({"a": values}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"Column .a. of .* has nulls"):
            read(tmp_path)


def parts(folder: Path) -> Path:
    for n, name in enumerate(("a.parquet", "x=1/b.parquet", "x=2/deep/c.parquet", "_log/d.parquet", ".e.parquet")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [2 * n, 2 * n + 1]}), folder / name)
    return folder


def test_folders_of_parquet_patterns_and_single_files_are_sources(tmp_path: Path) -> None:
    folder = parts(tmp_path / "data")

    def found(place: Any, **options: Any) -> list[int]:
        return sorted(row["n"] for row in read(place, **options))

    assert found(folder) == list(range(6))
    assert found(folder / "x=1") == [2, 3]
    assert found(f"{folder}/x=*/*.parquet") == [2, 3]
    assert found(f"{folder}/x=*/**/*.parquet") == [2, 3, 4, 5]
    assert found(f"{folder}/[ab].parquet") == [0, 1]
    assert found(folder / "a.parquet") == [0, 1]
    assert found([f"{folder}/a.parquet", f"{folder}/_log/*"]) == [0, 1, 6, 7]
    assert found(f"{folder}/x=*/*.parquet", cache=tmp_path / "cache") == [2, 3]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "there").symlink_to(folder, target_is_directory=True)
    assert found(tmp_path / "linked") == list(range(6))
    # A folder whose name looks like a pattern, or like a file, is a folder.
    (tmp_path / "out[1].parquet").mkdir()
    pq.write_table(pa.table({"n": [7]}), tmp_path / "out[1].parquet" / "part-0.parquet")
    assert found(tmp_path / "out[1].parquet") == [7]
    assert StreamingDataset(folder).digest != StreamingDataset(f"{folder}/x=*/*.parquet").digest


def test_patterns_are_found_in_remotes(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.put(str(parts(tmp_path / "data")), "/peer-patterns/data", recursive=True)
    for place, wanted in (
        ("memory://peer-patterns/data", list(range(6))),
        ("memory://peer-patterns/data/x=*/*.parquet", [2, 3]),
        ("memory://peer-patterns/data/a.parquet", [0, 1]),
    ):
        assert sorted(row["n"] for row in read(place, cache=tmp_path / "cache")) == wanted


def test_a_trainer_says_what_to_make_of_these_data_and_refuses_shares_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Give StreamingSource\(data, rows_per_step=32\)"):
        refuse_rows(StreamingDataset(write_source(tmp_path, [3])))

    class Theirs(IterableDataset[int]):
        """Holds its share of the rows as mosaicml-streaming's data sets do."""

        def __init__(self, num_ranks: int) -> None:
            self._unique_rank_world = SimpleNamespace(rank=0, num_ranks=num_ranks)

        def __iter__(self) -> Iterator[int]:
            return iter(())

    refuse_shares(DataLoader(Theirs(1)))
    with pytest.raises(DataError, match="gives each of 2 ranks a share"):
        refuse_shares(DataLoader(Theirs(2)))


@pytest.mark.parametrize(
    "places",
    [
        lambda here: [here / "a", here / "a"],
        lambda here: [f"{here}/a", f"{here}/a/"],
        lambda here: [here / "a", here / "b" / ".." / "a"],
        lambda here: [here / "a", here / "linked"],
        lambda here: [here / "a", f"file://{here}/a"],
        lambda here: [here / "set", here / "set" / "open/x"],
        lambda here: [here / "tables", here / "tables" / "2024"],
        lambda here: [f"{here}/tables/2024/*.parquet", f"{here}/tables/2024/0.parquet"],
    ],
)
def test_rows_that_are_named_twice(tmp_path: Path, places: Callable[[Path], Any]) -> None:
    for name in ("a", "b"):
        write_source(tmp_path / name, [3])
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    write_data_set(tmp_path / "set", {"open/x": [3], "open/y": [2]})
    (tmp_path / "tables" / "2024").mkdir(parents=True)
    for part in range(2):
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "tables" / "2024" / f"{part}.parquet")
    with pytest.raises(DataError, match=r"is named twice.*repeats="):
        StreamingDataset(places(tmp_path))


def test_places_without_an_order(tmp_path: Path) -> None:
    parts = {f"{write_source(tmp_path / name, [3])}" for name in "ab"}
    with pytest.raises(DataError, match=r"a set has no order.*Give a list"):
        StreamingDataset(parts)  # type: ignore[arg-type]
    assert len(StreamingDataset(sorted(parts))) == len(StreamingDataset(tuple(parts))) == 6


def test_files_beside_each_other_are_places_of_their_own(tmp_path: Path) -> None:
    for part in range(2):
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / f"{part}.parquet")
    assert len(StreamingDataset([tmp_path / "0.parquet", tmp_path / "1.parquet"])) == 4


@pytest.mark.parametrize(
    ("choose", "what"),
    [
        (lambda data: data.choose({"unknown": 2.5}), "rows of unknown=2.5 isn't a whole number"),
        (lambda data: data.choose([3]), "classes have to be named"),
        (lambda data: data.epochs_of(1.5), "num_rows=1.5 isn't a whole number"),
        (lambda data: data.epochs_of("3"), "num_rows='3' isn't a whole number"),
    ],
)
def test_choices_that_arent(tmp_path: Path, choose: Callable[[Any], Any], what: str) -> None:
    data = StreamingDataset(write_source(tmp_path, [3]))
    with pytest.raises(DataError, match=re.escape(what)):
        choose(data)


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    folder = write_source(tmp_path, [5])
    of_numpy = StreamingDataset(folder, seed=np.int64(3), window_rows=np.int32(2))  # type: ignore[arg-type]
    plain = StreamingDataset(folder, seed=3, window_rows=2)
    loaders = [StreamingLoader(of_numpy, np.int64(2)), StreamingLoader(plain, 2)]  # type: ignore[arg-type]
    batches = [next(iter(loader)).lineage.row_ids.tolist() for loader in loaders]
    assert batches[0] == batches[1]
    assert json.dumps(loaders[0].state_dict()) == json.dumps(loaders[1].state_dict())
    assert len(plain.choose({"unknown": np.int64(4)})) == len(plain.epochs_of(np.int64(4))) == 4  # type: ignore[arg-type]


def test_parquet_files_with_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"0\.parquet has several columns of the name 'a'"):
        read(tmp_path)
