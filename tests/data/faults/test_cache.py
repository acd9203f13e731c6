"""The cache under SIGKILL, damage, full disks and company: right rows or a clear error, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.data.opened import CacheOptions
from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.index import parse_index
from cosmati.data.shards.opening import UnverifiedDataWarning
from cosmati.data.shards.remote import EnvironmentFaultError, Remote
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.storage.lock import FileLock
from tests.data.faults import reader
from tests.data.shard_files import write_source
from tests.processes import PythonProcess, run_python

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
ROWS = [9, 8, 7, 12]
NUMBERS = list(range(sum(ROWS)))


def read(url: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return run_python([reader.__file__, url, cache])


def rows_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return sorted(int(word) for word in done.stdout.splitlines()[-1].split())


def one_shard(remote: Path, number: int = 0) -> ShardFiles:
    info = parse_index((remote / "index.json").read_bytes(), name="index").shard(number)
    return ShardFiles(info.raw, info.zip, info.compression)


def left_behind(cache: Path) -> list[Path]:
    """What was half made; what a cache keeps beside its shards (index, locks, notes) isn't."""
    return [path for path in cache.rglob("*") if path.suffix in {".part", ".turn", ".tmp"}]


def test_sigkill_at_any_moment_leaves_a_cache_that_serves(tmp_path: Path) -> None:
    # Large enough that a kill can fall into download, decompression, hashing, the rename and eviction.
    write_source(tmp_path / "remote", [3000] * 6, compression="gz")
    index = parse_index((tmp_path / "remote" / "index.json").read_bytes(), name="index")
    limit = str(2 * index.largest_shard)
    draw, cache = random.Random(2), tmp_path / "cache"
    for _ in range(6):
        process = PythonProcess([reader.__file__, tmp_path / "remote", cache, limit, "wait"])
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert rows_of(read(tmp_path / "remote", cache)) == list(range(18_000))
    assert left_behind(cache) == []


def test_a_part_left_by_a_dead_process_takes_no_room_from_another_source(tmp_path: Path) -> None:
    rows = [500, 500]
    write_source(tmp_path / "one", rows)
    most = int(1.9 * (write_source(tmp_path / "two", rows) / "shard.00000.mds").stat().st_size)
    options = CacheOptions(tmp_path / "cache", max_bytes=most, deadline_seconds=60.0)
    first = StreamingDataset(f"file://{tmp_path}/one", cache=options)
    first[0]
    (cached,) = (tmp_path / "cache").rglob("*.shard")
    part = cached.with_name(f"{cached.name}.{cached.stat().st_size}.part")
    part.write_bytes(b"half")
    with FileLock(part):
        with pytest.raises(EnvironmentFaultError, match="all of them are in use"):
            StreamingDataset(f"file://{tmp_path}/two", cache=replace(options, deadline_seconds=2.0))[0]
        assert part.exists(), "whoever writes it lives"
    second = StreamingDataset(f"file://{tmp_path}/two", columns=("number",), cache=options)
    assert sorted(row["number"] for row in second.__getitems__(range(1000))) == list(range(1000))
    assert not part.exists()


def test_a_part_left_by_a_dead_process_is_swept_and_a_live_ones_is_not(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    cache.mkdir()
    (cache / "sha256-00.shard.part").write_bytes(b"half")
    held = cache / "sha256-11.shard.part"
    script = (
        f"import fcntl, time; f = open({str(held)!r}, 'wb'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        ShardCache(cache, Remote(str(remote)))
        assert left_behind(cache) == [held]
    finally:
        process.kill()
        process.communicate()
    ShardCache(cache, Remote(str(remote)))
    assert left_behind(cache) == []


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_damaged_cached_file_heals_and_is_kept_for_a_look(tmp_path: Path, place: int) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    path = ShardCache(cache, Remote(str(remote))).open(one_shard(remote))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 4
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match="fetched again"):
        assert ShardCache(cache, Remote(str(remote))).open(one_shard(remote)).read_bytes() == whole
    assert (cache / "quarantine" / path.name).read_bytes() == damaged


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_cached_file_heals(tmp_path: Path, length: int) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    path = ShardCache(cache, Remote(str(remote))).open(one_shard(remote))
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with pytest.warns(UserWarning, match=f"has {length} bytes where {len(whole)} were due"):
        assert ShardCache(cache, Remote(str(remote))).open(one_shard(remote)).read_bytes() == whole


@pytest.mark.parametrize("compression", ["gz", "zstd", "br", "bz2", "snappy"])
def test_every_flip_in_a_compressed_remote_raises(tmp_path: Path, compression: str) -> None:
    remote = write_source(tmp_path / "remote", [2], compression=compression)
    packed = next(path for path in remote.iterdir() if path.name.startswith("shard"))
    good = packed.read_bytes()
    for place in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[place] ^= 1
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match=r"has sha256 .* where .* was due"):
            ShardCache(tmp_path / "cache", Remote(str(remote))).open(one_shard(remote))
    assert left_behind(tmp_path / "cache") == []


def test_local_damage_is_raised_and_the_file_stays(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", ROWS)
    path = remote / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    data = StreamingDataset(remote)
    with pytest.raises(DataError, match="no remote to fetch it from"):
        data.__getitems__(range(len(NUMBERS)))
    assert path.exists()


def test_a_file_without_a_remote_is_never_evicted(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "local", ROWS)
    before = sorted(path.name for path in folder.iterdir())
    cache = ShardCache(folder, None, max_bytes=1)
    for number in range(len(ROWS)):
        cache.open(one_shard(folder, number))
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_least_recently_opened_shard_goes_first(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", [5, 5, 5, 5])
    size = (remote / "shard.00000.mds").stat().st_size
    cache = ShardCache(tmp_path / "cache", Remote(str(remote)), max_bytes=3 * size + 64)
    paths = []
    for number in range(3):
        paths.append(cache.open(one_shard(remote, number)))
        os.utime(paths[-1], (number, number))
    cache.open(one_shard(remote, 0))  # a second look makes it the latest
    paths.append(cache.open(one_shard(remote, 3)))
    assert [path.exists() for path in paths] == [True, False, True, True]


def test_two_jobs_share_a_cache(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", [400] * 5, compression="gz"), tmp_path / "cache"
    jobs = [PythonProcess([reader.__file__, remote, cache, "60000"]) for _ in range(3)]
    for job in jobs:
        out, _ = job.communicate()
        assert job.returncode == 0
        assert sorted(map(int, out.splitlines()[-1].split())) == list(range(2000))
    assert left_behind(cache) == []


def test_a_full_disk_is_told_and_what_was_fetched_is_whole(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", [5, 500]), tmp_path / "cache"
    script = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        f"sys.argv = ['reader', {str(remote)!r}, {str(cache)!r}]\n"
        f"runpy.run_path({reader.__file__!r}, run_name='__main__')\n"
    )
    done = run_python(["-c", script])
    assert done.returncode != 0
    assert "files may not become that large here" in done.stderr
    assert left_behind(cache) == []
    assert rows_of(read(remote, cache)) == list(range(505))


def test_too_few_file_handles_are_told(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", [3] * 60), tmp_path / "cache"
    script = (
        "import os, resource, runpy, sys\n"
        "import cosmati.data.streaming\n"
        "in_use = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, in_use + 1))\n"
        f"sys.argv = ['reader', {str(remote)!r}, {str(cache)!r}]\n"
        f"runpy.run_path({reader.__file__!r}, run_name='__main__')\n"
    )
    done = run_python(["-c", script])
    assert done.returncode != 0
    assert "ulimit -n" in done.stderr
    assert rows_of(read(remote, cache)) == list(range(180))


WITHOUT_RIGHTS = """
import ctypes, os, runpy, struct, sys
if os.geteuid() == 0:  # the superuser may write anywhere, until it gives that up: capset(2)
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_cache_that_cant_be_written_is_told_and_a_full_one_still_serves(tmp_path: Path) -> None:
    remote, cache = write_source(tmp_path / "remote", ROWS), tmp_path / "cache"
    cache.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o500)
    assert rows_of(read(remote, cache)) == NUMBERS
    cache.chmod(0o500)
    for path in cache.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)

    def read_heeding(folder: Path) -> subprocess.CompletedProcess[str]:
        return run_python(["-c", WITHOUT_RIGHTS, reader.__file__, remote, folder])

    try:
        refused = read_heeding(empty)
        assert refused.returncode != 0
        assert "may not be written to" in refused.stderr
        assert rows_of(read_heeding(cache)) == NUMBERS
    finally:
        for path in (cache, empty, *cache.rglob("*")):
            path.chmod(0o700)


def test_a_cache_where_a_file_stands_is_told(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", ROWS)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="can't be kept"):
        StreamingDataset(remote, cache=CacheOptions(tmp_path / "cache"))[0]


def test_hashes_that_nobody_can_compute_are_refused_and_none_is_length_only(tmp_path: Path) -> None:
    remote = write_source(tmp_path / "remote", [3])
    index = remote / "index.json"
    text = index.read_text()
    index.write_text(text.replace("sha256", "whirlpool"))
    with pytest.raises(DataError, match="none of the hashes whirlpool can be computed"):
        StreamingDataset(remote)[0]
    digest = text.split('"sha256":"')[1][:64]
    index.write_text(text.replace(f'"sha256":"{digest}"', "").replace('["sha256"]', "[]"))
    with pytest.warns(UnverifiedDataWarning, match="has no hashes: a damaged shard is served as it is"):
        assert StreamingDataset(remote)[0]["number"] in range(3)
    path = remote / "shard.00000.mds"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match="bytes where"):
        StreamingDataset(remote)[0]
