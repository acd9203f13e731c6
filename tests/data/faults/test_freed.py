"""A data set that nobody holds is gone at once, with what it has mapped: not when the garbage collector next comes."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmati.data.loader import StreamingLoader
from cosmati.data.streaming import StreamingDataset
from tests.data.faults.server import serve
from tests.data.shard_files import write_data_set, write_source

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def a_source(folder: Path) -> Path:
    return write_source(folder, [3] * 5)


def a_data_set(folder: Path) -> Path:
    return write_data_set(folder, {"a": [2, 3], "b": [4]})


def parquet(folder: Path) -> Path:
    folder.mkdir()
    pq.write_table(pa.table({"number": list(range(9))}), folder / "a.parquet", row_group_size=4)
    return folder


@pytest.mark.parametrize("place", ["here", "with a cache", "remote"])
@pytest.mark.parametrize("write", [a_source, a_data_set, parquet])
@pytest.mark.filterwarnings("ignore::cosmati.data.shards.opening.UnverifiedDataWarning")
def test_a_data_set_and_its_mappings_go_with_the_last_who_holds_it(
    tmp_path: Path, write: Callable[[Path], Path], place: str
) -> None:
    url = str(write(tmp_path / "data"))
    if place == "remote":
        fsspec.filesystem("memory").put(url, url, recursive=True)
        shutil.rmtree(url)
        url = f"memory://{url}"
    cache = None if place == "here" else tmp_path / "cache"
    data = StreamingDataset(url, columns=("number",), cache=cache)
    rows = data.__getitems__(range(len(data)))
    assert sorted(row["number"] for row in rows) == list(range(len(data)))
    ends = [weakref.ref(data), *map(weakref.ref, data.sources)]
    del data, rows
    assert [end() for end in ends] == [None] * len(ends)
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("write", [a_source, a_data_set])
def test_one_that_was_read_by_http_goes_too(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp, of the extra `streaming`")
    with serve(write(tmp_path / "data")) as server:
        data = StreamingDataset(server.url, columns=("number",), cache=tmp_path / "cache")
        assert len(data.__getitems__(range(len(data)))) == len(data)
        end = weakref.ref(data)
        del data
        assert end() is None


def test_a_loader_leaves_nothing_behind_either(tmp_path: Path) -> None:
    data = StreamingDataset(a_data_set(tmp_path), columns=("number",))
    assert len(list(StreamingLoader(data, 3))) == 3
    end = weakref.ref(data)
    del data
    assert end() is None
