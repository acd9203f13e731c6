"""Limits of a process, a disk and a machine: they raise, or bound what is used; no row is left out for them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmati.data import opened as data_opened
from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import MAPPED, CacheOptions
from cosmati.data.rows import RowBatch
from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.folder import CacheFolder
from cosmati.data.shards.index import Column, FileInfo, ShardInfo, dump_index
from cosmati.data.shards.mds import encode_sample, encode_shard
from cosmati.data.shards.remote import EnvironmentFaultError, Remote
from cosmati.data.shards.split import SplitShard
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.storage.lock import FileLock
from tests.data import peer
from tests.data.faults import limited_reader
from tests.data.faults.test_cache import one_shard
from tests.data.shard_files import bytes_on_disk, write_data_set, write_source
from tests.processes import PythonProcess, run_python

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def under(url: Path, kind: str, amount: int, *more: str) -> list[str]:
    done = run_python([limited_reader.__file__, url, kind, str(amount), *more])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(script: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", textwrap.dedent(script)])


def test_six_classes_under_few_handles_lose_no_row(tmp_path: Path) -> None:
    folder = write_data_set(tmp_path, {f"class/{number}": [100] * 50 for number in range(6)})
    whole = [f"{policy} {workers} 30000 30000 0" for policy in ("skip", "raise") for workers in (0, 2)]
    assert under(folder, "handles", 256) == whole


def test_a_mapped_shard_holds_no_handle(tmp_path: Path) -> None:
    data = StreamingDataset(write_source(tmp_path, [3] * 40), columns=("number",))
    data[0]
    assert len(data.__getitems__(range(120))) == 120
    assert not any(one.resolve().is_relative_to(tmp_path) for one in Path("/proc/self/fd").iterdir())
    assert sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines()) == 40
    del data
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_one_budget_of_mappings_for_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAPPED, "limit", 7)
    data = StreamingDataset(write_data_set(tmp_path, {"a": [2] * 9, "b": [2] * 9}), columns=("number",))
    assert sorted(row["number"] for row in data.__getitems__(range(36))) == list(range(36))
    assert sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines()) == 7


def test_a_full_disk_is_no_bad_row(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", [5, 5, 500, 5])
    lines = under(remote, "disk", 8000, str(tmp_path / "cache"))
    assert len(lines) == 2
    assert all("EnvironmentFaultError" in line and "files may not become that large here" in line for line in lines)


def wide_source(folder: Path, shards: int, row_bytes: int) -> Path:
    columns = (Column("number", "int", 8), Column("blob", "bytes", None))
    folder.mkdir()
    infos = []
    for shard in range(shards):
        raw = encode_shard(columns, [encode_sample(columns, {"number": shard, "blob": bytes(row_bytes)})])
        (folder / f"shard.{shard:05d}.mds").write_bytes(raw)
        infos.append(ShardInfo(1, columns, FileInfo(f"shard.{shard:05d}.mds", len(raw), {})))
    (folder / "index.json").write_bytes(dump_index(infos, {}))
    return folder


def test_too_little_memory_is_no_bad_row_and_what_is_only_kept_for_later_goes_first(tmp_path: Path) -> None:
    folder = wide_source(tmp_path / "data", 8, 100 << 20)
    assert under(folder, "memory", 350 << 20) == ["skip 0 8 8 0", "raise 0 8 8 0"]
    lines = under(folder, "memory", 60 << 20)
    assert all("EnvironmentFaultError" in line and "too little memory" in line for line in lines)
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("fault", "is_bad_row"),
    [
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (MemoryError(), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes"), False),
        (OSError("image file is truncated (3 bytes not processed)"), True),
        (ValueError("no such label"), True),
    ],
    ids=["handles", "disk", "permission", "memory", "torch-memory", "image", "value"],
)
def test_only_a_rows_own_fault_is_left_out(tmp_path: Path, fault: Exception, is_bad_row: bool) -> None:
    def transform(batch: RowBatch) -> torch.Tensor:
        if 5 in batch.row_ids:
            raise ValueError("it can't be read") from fault
        return batch.tensor("number")

    data = StreamingDataset(write_source(tmp_path, [12]), transform=transform, on_bad_row="skip")
    loader = StreamingLoader(data, 12)
    if is_bad_row:
        with pytest.warns(UserWarning, match="left out"):
            (batch,) = loader
        assert sorted(batch.lineage.row_ids.tolist()) == [-1, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
        return
    with pytest.raises(ValueError, match="can't be read"):
        list(loader)
    assert data.skipped == []


def test_a_missing_and_a_damaged_shard_are_no_bad_rows(tmp_path: Path) -> None:
    write_source(tmp_path, [6, 6])
    path = tmp_path / "shard.00001.mds"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    for what in ("no remote to fetch it from", "isn't there"):
        data = StreamingDataset(tmp_path, columns=("number",), on_bad_row="skip")
        with pytest.raises(EnvironmentFaultError, match=what):
            list(StreamingLoader(data, 12))
        assert data.skipped == []
        path.unlink(missing_ok=True)


def test_a_shard_cut_off_while_its_mapped_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    write_source(tmp_path, [2000], first=0)
    done = run(f"""
        import os
        from cosmati.data.streaming import StreamingDataset
        data = StreamingDataset({str(tmp_path)!r}, on_bad_row="skip", columns=("number",))
        assert len(data.__getitems__(range(2000))) == 2000
        os.truncate({str(tmp_path / "shard.00000.mds")!r}, 5000)
        try:
            data.batch(data.locate(range(2000)))
        except Exception as error:
            print(type(error).__name__, error, len(data.skipped))
    """)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "EnvironmentFaultError" in done.stdout
    assert "has 5000 bytes where" in done.stdout


def test_a_shard_that_was_only_touched_is_read_on_and_one_that_was_replaced_isnt(tmp_path: Path) -> None:
    write_source(tmp_path, [20])
    data = StreamingDataset(tmp_path, columns=("number",))
    path = tmp_path / "shard.00000.mds"
    data[0]
    os.utime(path, (1, 1))
    assert sorted(row["number"] for row in data.__getitems__(range(20))) == list(range(20))
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[:-1] + b"?")
    other.replace(path)
    with pytest.raises(DataError, match=r"shard.00000.mds has sha256 .* where .* was due"):
        data[0]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_shard_that_changes_while_it_is_verified_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    write_source(tmp_path, [20])
    path = tmp_path / "shard.00000.mds"
    cache, plain, calls = ShardCache(tmp_path, None), ShardCache._make, itertools.count()

    def make(self: ShardCache, path: Path, files: ShardFiles) -> None:
        plain(self, path, files)
        if not next(calls):
            changed = path.read_bytes()[:-1] + b"?"
            target = path if in_place else path.with_suffix(".new")
            target.write_bytes(changed)
            target.replace(path)

    monkeypatch.setattr(ShardCache, "_make", make)
    with pytest.raises(EnvironmentFaultError, match=r"shard.00000.mds has sha256 .* where .* was due"):
        cache.open(one_shard(tmp_path))
    assert path.read_bytes()[-1:] == b"?"


def test_a_shard_that_never_stays_the_same_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path, [20])
    cache, plain, times = ShardCache(tmp_path, None), ShardCache._make, itertools.count(1)

    def make(self: ShardCache, path: Path, files: ShardFiles) -> None:
        plain(self, path, files)
        os.utime(path, (0, next(times)))

    monkeypatch.setattr(ShardCache, "_make", make)
    with pytest.raises(EnvironmentFaultError, match="changed each time that it was verified"):
        cache.open(one_shard(tmp_path))


def mapped(cache: Path, pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(cache) in line]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_budget_bounds_the_disk_over_all_sources_and_processes(tmp_path: Path, workers: int) -> None:
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    write_data_set(remote, {f"class/{number}": [40] * 5 for number in range(8)})
    largest = max(path.stat().st_size for path in remote.rglob("*.mds"))
    small = sum(path.stat().st_size for path in remote.rglob("*.json"))
    limit = 4 * largest + small
    data = StreamingDataset(remote, columns=("number",), cache=CacheOptions(cache, max_bytes=limit), window_rows=80)
    numbers: list[int] = []
    for batch in StreamingLoader(data, 64, num_workers=workers):
        numbers += batch.data.tolist()  # type: ignore[union-attr]
        assert bytes_on_disk(cache) <= limit
        assert mapped(cache, os.getpid()) == []
        # A worker may be at a shard's first reading; what it maps for that is leased, and so still lies there.
        for worker in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            assert not [line for line in mapped(cache, worker) if line.endswith("(deleted)")]
    assert sorted(numbers) == list(range(1600))


@pytest.mark.parametrize("moment", ["before the shards are counted", "after"])
def test_a_shard_that_another_process_publishes_while_room_is_made_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    (tmp_path / "old.shard").write_bytes(bytes(100))
    part = tmp_path / "new.shard.100.part"
    part.write_bytes(bytes(100))
    plain, walks = os.walk, itertools.count()

    def walk(top: Path) -> list[tuple[str, list[str], list[str]]]:
        evicts = next(walks) == 1  # the first one asks what stays for ever
        if evicts and moment != "after":
            part.replace(tmp_path / "new.shard")
        found = list(plain(top))
        if evicts and moment == "after":
            part.replace(tmp_path / "new.shard")
        return found

    folder = CacheFolder(tmp_path, max_bytes=300)
    monkeypatch.setattr(os, "walk", walk)
    with FileLock(part), folder.part(tmp_path / "next.shard", 150):
        monkeypatch.undo()
        assert bytes_on_disk(tmp_path) + 150 <= 300


def test_a_budget_that_is_too_small_is_refused_with_the_least(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", [40, 10], compression="gz")
    with pytest.raises(
        EnvironmentFaultError, match=r"max_bytes=100 .* can't hold the largest shard.*: give \d+ or more"
    ) as told:
        StreamingDataset(remote, cache=CacheOptions(tmp_path / "cache", max_bytes=100))
    least = int(str(told.value).split("give ")[1].split()[0])
    for limit in (least, least - 1):
        options = CacheOptions(tmp_path / f"cache-{limit}", max_bytes=limit)
        if limit < least:
            with pytest.raises(EnvironmentFaultError, match="can't hold"):
                StreamingDataset(remote, cache=options)
        else:
            data = StreamingDataset(remote, columns=("number",), cache=options)
            assert sorted(row["number"] for row in data.__getitems__(range(50))) == list(range(50))


def least_of(urls: list[Path], cache: Path) -> int:
    with pytest.raises(EnvironmentFaultError, match=r"give \d+ or more") as told:
        StreamingDataset(urls, cache=CacheOptions(cache, max_bytes=10))
    return int(str(told.value).split("give ")[1].split()[0])


def test_a_budget_over_several_sources_is_refused_at_the_opening_with_the_least(tmp_path: Path) -> None:
    remotes = [write_source(tmp_path / "a", [40] * 2), write_source(tmp_path / "b", [2] * 60, first=100)]
    least = least_of(remotes, tmp_path / "cache")
    with pytest.raises(EnvironmentFaultError, match=rf"give {least} or more"):
        StreamingDataset(remotes, cache=CacheOptions(tmp_path / "other", max_bytes=least - 1))
    options = CacheOptions(tmp_path / "cache", max_bytes=least, deadline_seconds=5)
    assert len(list(StreamingDataset(remotes, columns=("number",), cache=options))) == 200


@pytest.mark.parametrize("kind", ["json-zstd", "csv-gz"])
def test_a_shard_of_two_files_has_room_for_both_and_keeps_both_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    remote, cache = Path(peer.__file__).parent / "written/split" / kind, tmp_path / "cache"
    least = least_of([remote], cache)

    def made(path: Path, offsets: Path, info: ShardInfo) -> SplitShard:
        CacheFolder(cache, max_bytes=1)._evict(1)  # as another process does that wants room
        return SplitShard(path, offsets, info)

    monkeypatch.setattr(data_opened, "SplitShard", made)
    options = CacheOptions(cache, max_bytes=least, deadline_seconds=5)
    found = [list(StreamingDataset(remote, shuffle=False, cache=one)) for one in (options, None)]
    assert [dict(row) for row in found[0]] == [dict(row) for row in found[1]]
    assert bytes_on_disk(cache) <= least


def test_a_shard_in_use_isnt_evicted_until_its_reader_is_dead(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", [50, 50]), tmp_path / "cache"
    size = (remote / "shard.00000.mds").stat().st_size
    script = textwrap.dedent(f"""
        import time
        from cosmati.data.streaming import StreamingDataset
        data = StreamingDataset({str(remote)!r}, cache={str(cache)!r}, columns=("number",), shuffle=False)
        data[0]
        print("reading", flush=True)
        time.sleep(600)
    """)
    reader = PythonProcess(["-c", script])
    try:
        assert reader.stdout.readline() == "reading\n"
        (directory,) = (path for path in cache.iterdir() if path.is_dir())
        limit = bytes_on_disk(cache) + size // 2
        small = ShardCache(directory, Remote(str(remote)), max_bytes=limit, root=cache, patience_seconds=0.2)
        with pytest.raises(EnvironmentFaultError, match=r"in use by processes that are reading: \d+ more are needed"):
            small.open(one_shard(remote, 1))
        assert len(list(directory.glob("*.shard"))) == 1
    finally:
        reader.send_signal(signal.SIGKILL)
        reader.communicate()
    assert small.open(one_shard(remote, 1)).exists()
    assert len(list(directory.glob("*.shard"))) == 1


def test_a_column_of_the_name_row_id_keeps_its_values(tmp_path: Path) -> None:
    columns = (Column("row_id", "int", 8), Column("text", "str", None))
    raw = encode_shard(columns, [encode_sample(columns, {"row_id": 900 + n, "text": str(n)}) for n in range(4)])
    (tmp_path / "shard.00000.mds").write_bytes(raw)
    info = FileInfo("shard.00000.mds", len(raw), {"sha256": hashlib.sha256(raw).hexdigest()})
    (tmp_path / "index.json").write_bytes(dump_index([ShardInfo(4, columns, info)], {}))
    data = StreamingDataset(tmp_path, shuffle=False)
    batch = data.__getitems__(range(4))
    assert [row["row_id"] for row in batch] == [900, 901, 902, 903]
    assert batch.row_ids.tolist() == [0, 1, 2, 3]
    assert np.array_equal(batch.tensor("row_id").numpy(), [900, 901, 902, 903])
