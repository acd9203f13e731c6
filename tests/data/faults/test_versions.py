"""Data without hashes, remotes that are replaced, remotes that are gone: one version a run, and a cache that serves."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards import opening
from cosmati.data.shards.cache import ReplacedRemoteError
from cosmati.data.shards.index import Column
from cosmati.data.shards.opening import UnverifiedDataWarning
from cosmati.data.shards.parquet import write_parquet
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.faults.server import serve
from tests.data.shard_files import write_data_set, write_source

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::cosmati.data.shards.opening.UnverifiedDataWarning"),
]
ROWS = [6, 6, 6, 6]


@pytest.fixture(autouse=True)
def _nothing_told() -> Iterator[None]:
    opening._told.clear()
    yield
    opening._told.clear()


def write_unhashed(folder: Path, first: int = 100) -> Path:
    """As the peer's writer does it by default; equal indices for equal lengths."""
    write_source(folder, ROWS, first=first)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["hashes"], shard["raw_data"]["hashes"] = [], {}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def opened(url: str | Path, cache: Path, **options: object) -> StreamingDataset:
    return StreamingDataset(url, columns=("number",), shuffle=False, cache=CacheOptions(cache), **options)  # type: ignore[arg-type]


def numbers(data: StreamingDataset, start: int = 0, stop: int = 24) -> list[int]:
    return [row["number"] for row in data.__getitems__(range(start, stop))]


def test_the_first_use_says_what_isnt_verified_and_the_second_says_nothing(tmp_path: Path) -> None:
    remote = write_unhashed(tmp_path / "remote")
    with pytest.warns(UnverifiedDataWarning, match="has no hashes: what is fetched first is taken for right, noted"):
        data = opened(remote, tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(remote, tmp_path / "cache")
        assert numbers(pickle.loads(pickle.dumps(data))) == list(range(100, 124))


def test_a_flipped_bit_in_the_cache_of_unhashed_data_is_found_and_healed(tmp_path: Path) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    assert numbers(opened(remote, cache)) == list(range(100, 124))
    path = sorted(cache.rglob("*.shard"))[1]
    damaged = bytearray(path.read_bytes())
    damaged[-10] ^= 1
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match=r"has sha256 .* where .* was due; it's in .*quarantine, and fetched again"):
        assert numbers(opened(remote, cache)) == list(range(100, 124))


def test_damaged_notes_are_no_notes(tmp_path: Path) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    numbers(opened(remote, cache))
    (notes,) = cache.rglob(".notes")
    lines = notes.read_bytes().splitlines()
    notes.write_bytes(b"\n".join([lines[0].replace(b"sha256", b"sha255"), *lines[1:-1], lines[-1][:50]]))
    with pytest.warns(UserWarning, match="nothing was noted when it was fetched"):
        assert numbers(opened(remote, cache)) == list(range(100, 124))
    assert numbers(opened(remote, cache)) == list(range(100, 124))


@pytest.mark.parametrize("with_index", [True, False])
def test_a_remote_replaced_in_mid_run_is_never_mixed_in(tmp_path: Path, with_index: bool) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    data = opened(remote, cache)
    assert numbers(data, 0, 12) == list(range(100, 112))
    for path in write_unhashed(tmp_path / "new", first=200).iterdir():
        if with_index or path.suffix == ".mds":
            path.replace(remote / path.name)
    worker = pickle.loads(pickle.dumps(data))
    for one in (data, worker):
        with pytest.raises(ReplacedRemoteError, match="two versions would be mixed"):
            numbers(one, 12, 24)
    assert numbers(data, 0, 12) == list(range(100, 112))
    # A later run takes neither: the first half lies in the cache as it was.
    with pytest.raises(ReplacedRemoteError), pytest.warns(UserWarning, match="something was replaced since"):
        numbers(opened(remote, cache))


@pytest.mark.parametrize("has_etags", [True, False])
def test_a_remote_replaced_in_mid_run_behind_http(tmp_path: Path, has_etags: bool) -> None:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp, of the extra `streaming`")
    remote = write_unhashed(tmp_path / "remote")
    with serve(remote) as server:
        server.has_etags = has_etags
        data = opened(server.url, tmp_path / "cache")
        assert numbers(data, 0, 12) == list(range(100, 112))
        for path in write_unhashed(tmp_path / "new", first=200).iterdir():
            path.replace(remote / path.name)
        if not has_etags:
            # Nothing tells then, but what the index says.
            (remote / "index.json").write_text((remote / "index.json").read_text().replace("[]", "[ ]", 1))
        with pytest.raises(ReplacedRemoteError, match="two versions would be mixed"):
            numbers(data, 12, 24)


def test_a_remote_replaced_while_it_couldnt_be_reached(tmp_path: Path) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    numbers(opened(remote, cache), 0, 12)
    remote.rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="can't be reached"):
        data = opened(remote, cache)
    write_unhashed(remote, first=200)
    (remote / "index.json").write_text((remote / "index.json").read_text().replace("[]", "[ ]", 1))
    assert numbers(data, 0, 12) == list(range(100, 112))
    with pytest.raises(ReplacedRemoteError):
        numbers(data, 12, 24)


def test_the_same_bytes_put_there_again_are_the_same_version(tmp_path: Path) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    assert numbers(opened(remote, cache)) == list(range(100, 124))
    for path in remote.iterdir():
        os.utime(path, (1, 1))
    with pytest.warns(UserWarning, match="something was replaced since"):
        assert numbers(opened(remote, cache)) == list(range(100, 124))


def test_another_index_is_another_version(tmp_path: Path) -> None:
    remote, cache = write_unhashed(tmp_path / "remote"), tmp_path / "cache"
    numbers(opened(remote, cache))
    write_unhashed(remote, first=200)
    index = remote / "index.json"
    index.write_text(index.read_text() + "\n")
    assert numbers(opened(remote, cache)) == list(range(200, 224))


def parquet(folder: Path) -> Path:
    folder.mkdir()
    columns = [Column("number", "int", 8)]
    for file in range(3):
        rows = ({"number": 8 * file + n} for n in range(8))
        write_parquet(folder / f"{file}.parquet", columns, rows, {"class": "a/b"})
    return folder


@pytest.mark.parametrize("kind", ["source", "data set", "parquet"])
def test_what_is_cached_opens_without_its_remote(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp, of the extra `streaming`")
    monkeypatch.setattr("cosmati.data.shards.remote._PROBE_SECONDS", 0.5)
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    if kind == "data set":
        write_data_set(remote, {"a/b": [6, 6], "c": [6, 6]})
    elif kind == "source":
        write_source(remote, ROWS)
    else:
        parquet(remote)
    if kind == "parquet":
        # HTTP lists no folder.
        first = opened(remote, cache)
        before, digest = numbers(first), first.digest
        url: str | Path = remote
        remote.rename(tmp_path / "elsewhere")
    else:
        with serve(remote) as server:
            first = opened(server.url, cache)
            before, digest, url = numbers(first), first.digest, server.url
    with pytest.warns(UserWarning, match=r"can't be reached .* it's read as the cache has it"):
        again = opened(url, cache)
    assert again.digest == digest
    assert numbers(again) == before
    assert sorted(before) == list(range(24))


def test_what_isnt_cached_needs_its_remote_and_a_changed_index_is_noticed(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    data = opened(remote, cache)
    state = StreamingLoader(data, 4).state_dict()
    numbers(data, 0, 12)
    remote.rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="can't be reached"):
        again = opened(remote, cache)
    assert numbers(again, 0, 12) == list(range(12))
    with pytest.raises(DataError, match="isn't there"):
        numbers(again)
    write_source(remote, [6, 6, 6, 7])
    changed = opened(remote, cache)
    assert len(changed) == 25
    with pytest.raises(DataError, match="saved with the digest"):
        StreamingLoader(changed, 4).load_state_dict(state)


def test_a_damaged_copy_of_an_index_is_none(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    numbers(opened(remote, cache))
    (copy,) = cache.rglob("*.kept")
    copy.write_bytes(copy.read_bytes().replace(b"6", b"5", 1))
    remote.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"neither an index.json"):
        opened(remote, cache)
    (tmp_path / "elsewhere").rename(remote)
    assert numbers(opened(remote, cache)) == list(range(24))
    kept = next(cache.rglob("*.kept")).read_bytes()
    assert hashlib.sha256(kept).hexdigest() == opened(remote, cache).sources[0].index.digest
    assert np.all(opened(remote, cache).sources[0].index.shard_rows == 6)


def write_row_groups(folder: Path, first: int) -> Path:
    """Write Parquet files of the same lengths, whatever they hold; more than are held in memory."""
    folder.mkdir(exist_ok=True)
    for number in range(12):
        table = pa.table({"number": list(range(first + 6 * number, first + 6 * number + 6))})
        pq.write_table(table, folder / f"{number:02}.parquet", use_dictionary=False, compression="none")
    return folder


def write_lines(folder: Path, first: int) -> Path:
    """As the peer writes JSON; more shards than are held in memory."""
    folder.mkdir(exist_ok=True)
    shards = []
    for shard in range(12):
        rows = [b'{"number": %d}\n' % (first + 6 * shard + row) for row in range(6)]
        meta = np.asarray([6, *np.cumsum([0, *map(len, rows)])], "<u4").tobytes()
        facts = {"raw_data": (f"{shard}.json", b"".join(rows)), "raw_meta": (f"{shard}.json.meta", meta)}
        for name, content in facts.values():
            (folder / name).write_bytes(content)
        shards.append(
            {"version": 2, "format": "json", "samples": 6, "size_limit": None, "compression": None, "hashes": []}
            | {"columns": {"number": "int"}, "newline": "\n", "zip_data": None, "zip_meta": None}
            | {kind: {"basename": name, "bytes": len(c), "hashes": {}} for kind, (name, c) in facts.items()}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


@pytest.mark.parametrize("write", [write_row_groups, write_unhashed, write_lines])
@pytest.mark.parametrize("when", ["before the first row", "in mid-run", "after an epoch"])
@pytest.mark.parametrize("how", ["renamed", "written in place"])
def test_local_data_without_hashes_are_of_one_version(
    tmp_path: Path, write: Callable[[Path, int], Path], when: str, how: str
) -> None:
    folder = write(tmp_path / "data", 100)
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # the clock of a file system is coarser than this test is quick
    data = StreamingDataset(folder, columns=("number",), shuffle=False)
    worker = pickle.loads(pickle.dumps(data))
    num_read = {"before the first row": 0, "in mid-run": 7, "after an epoch": len(data)}[when]
    assert numbers(data, 0, num_read) == list(range(100, 100 + num_read))
    for path in write(tmp_path / "new", 500).iterdir():
        assert path.stat().st_size == (folder / path.name).stat().st_size
        if how == "renamed":
            path.replace(folder / path.name)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    for one in (data, worker):
        found: list[int] = []
        with pytest.raises(EnvironmentFaultError, match="was changed since"):
            found.extend(number for place in range(len(data)) for number in numbers(one, place, place + 1))
        assert found == list(range(100, 100 + len(found)))


def write_packed(folder: Path, hashes: dict[str, str]) -> Path:
    """Compressed, with hashes of the packed files that nobody computed."""
    write_source(folder, ROWS, first=100, compression="zstd")
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["hashes"] = list(hashes)
        shard["raw_data"]["hashes"] = shard["zip_data"]["hashes"] = hashes
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("hashes", "what"), [({}, "can't be decompressed"), ({"crc9": "aa"}, "can be computed")])
def test_what_is_wrong_with_a_whole_packed_shard_is_no_bad_row(
    tmp_path: Path, hashes: dict[str, str], what: str
) -> None:
    folder = write_packed(tmp_path / "data", hashes)
    packed = folder / "shard.00001.mds.zstd"
    packed.write_bytes(bytes(packed.stat().st_size))
    data = opened(folder, tmp_path / "cache", on_bad_row="skip")
    with pytest.raises(EnvironmentFaultError, match=what):
        list(StreamingLoader(data, 5))
    assert not data.skipped


def test_a_local_shard_is_unpacked_of_the_version_that_was_opened(tmp_path: Path) -> None:
    folder = write_packed(tmp_path, {})
    data = StreamingDataset(folder, columns=("number",), shuffle=False)
    assert numbers(data, 0, 6) == list(range(100, 106))
    os.utime(folder / "shard.00001.mds.zstd", (1, 1))
    with pytest.raises(EnvironmentFaultError, match="was changed since"):
        numbers(data, 6, 12)
    assert not (folder / "shard.00001.mds").exists()


def test_local_data_without_hashes_are_opened_anew_as_they_are_now(tmp_path: Path) -> None:
    folder = write_row_groups(tmp_path / "data", 100)
    assert numbers(StreamingDataset(folder, columns=("number",), shuffle=False))[0] == 100
    write_row_groups(folder, 500)
    assert numbers(StreamingDataset(folder, columns=("number",), shuffle=False))[0] == 500
