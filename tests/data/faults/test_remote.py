"""What a remote can do to a reader: each fault is retried, or raised with its name and its mend; none hangs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.cache import DamagedRemoteError
from cosmati.data.shards.remote import Remote, RemoteError, RemoteMissingError
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.faults.server import Server, serve
from tests.data.shard_files import write_source

pytest.importorskip("aiohttp", reason="HTTP needs aiohttp, of the extra `streaming`")
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
SHARD = "shard.00001.mds"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_source(tmp_path / "remote", [6, 5, 7])
    with serve(tmp_path / "remote") as found:
        yield found


def opened(server: Server, tmp_path: Path) -> StreamingDataset:
    # Long, but for the test of the deadline: a busy machine takes seconds for what no server delays.
    options = CacheOptions(tmp_path / "cache", deadline_seconds=60.0)
    return StreamingDataset(server.url, columns=("number",), cache=options, window_rows=8)


def numbers(data: StreamingDataset) -> list[int]:
    return sorted(row["number"] for row in data.__getitems__(range(len(data))))


@pytest.mark.parametrize("fault", ["reset", "short", "503", "429", "500"])
def test_what_passes_is_retried(server: Server, tmp_path: Path, fault: str) -> None:
    server.fault(SHARD, fault, fault)
    assert numbers(opened(server, tmp_path)) == list(range(18))
    assert server.requests[SHARD] >= 3


@pytest.mark.parametrize(
    ("fault", "error", "what"), [("404", RemoteMissingError, "isn't there"), ("403", RemoteError, "may not be read")]
)
def test_what_wont_pass_is_raised_at_once(
    server: Server, tmp_path: Path, fault: str, error: type[DataError], what: str
) -> None:
    server.fault(SHARD, fault, forever=True)
    start = time.monotonic()
    with pytest.raises(error, match=rf"shard.00001.mds {what}"):
        numbers(opened(server, tmp_path))
    assert time.monotonic() - start < 30
    assert server.requests[SHARD] <= 2
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_it_fetches_stays_one(server: Server, tmp_path: Path, error: type[BaseException]) -> None:
    data = opened(server, tmp_path)
    for shard in range(3):
        server.fault(f"shard.{shard:05d}.mds", "hang", forever=True)

    def interrupt(_signal: int, _frame: object) -> None:
        raise error

    gc.collect()  # What other tests have left: Python ignores an error that a signal raises in a finalizer.
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(error):
            data[0]
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("fault", ["hang", "drip", "reset", "503", "short"])
def test_one_deadline_holds_for_all_attempts(server: Server, tmp_path: Path, fault: str) -> None:
    server.fault(SHARD, fault, forever=True)
    data = opened(server, tmp_path)
    assert data[0]["number"] < 6, "of the first shard"
    assert data[17]["number"] >= 11, "of the last"
    for source in data.sources:
        # From here on: opening and the other shards take their time on a busy machine.
        source._cache._remote._deadline_seconds = 1.0  # type: ignore[union-attr]
    start = time.monotonic()
    with pytest.raises(RemoteError, match=r"shard.00001.mds couldn't be fetched in 1 s"):
        numbers(data)
    assert time.monotonic() - start < 29, "one attempt of `hang` alone takes 30"
    assert not list((tmp_path / "cache").rglob("*.part"))
    server.faults.clear()
    assert numbers(opened(server, tmp_path)) == list(range(18))


def test_a_server_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="couldn't be fetched in 1 s"):
        Remote("http://127.0.0.1:9", deadline_seconds=1).read("index.json", max_bytes=100)


def test_damage_in_the_remote_is_raised_and_never_served(server: Server, tmp_path: Path) -> None:
    server.fault(SHARD, "flip", forever=True)
    for _ in range(2):
        with pytest.raises(DamagedRemoteError, match=r"shard.00001.mds has sha256 .* where .* was due"):
            numbers(opened(server, tmp_path))
    server.faults.clear()
    assert numbers(opened(server, tmp_path)) == list(range(18))


def test_a_remote_replaced_in_mid_run_is_found(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path)
    first = data.__getitems__([0])
    assert len(first) == 1
    write_source(tmp_path / "remote", [6, 5, 7], first=100)
    with pytest.raises(DataError, match="was changed or damaged"):
        numbers(data)


def test_an_error_in_a_worker_reaches_the_main_process(server: Server, tmp_path: Path) -> None:
    server.fault(SHARD, "404", forever=True)
    loader = StreamingLoader(opened(server, tmp_path), 4, num_workers=2)
    with pytest.raises(DataError, match=r"shard.00001.mds isn't there"):
        list(loader)


def test_an_index_longer_than_any_is_refused(server: Server) -> None:
    with pytest.raises(RemoteError, match="more than 50 bytes"):
        Remote(server.url).read("index.json", max_bytes=50)


def test_urls_that_nobody_knows() -> None:
    with pytest.raises(DataError, match=r"no URL that fsspec knows|needs another package"):
        Remote("nowhere://x").read("index.json", max_bytes=10)


JOB = """
import os, signal, sys, threading
from cosmati.data.opened import CacheOptions
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data = StreamingDataset(sys.argv[1], columns=("number",), cache=CacheOptions(sys.argv[2], deadline_seconds=300))
    order = StreamingSource(data, 4).order(seed=0, num_microbatches=1, route_pure=False)
    order.expect(0, (0,))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    order.microbatch(0, 0)
"""


def test_a_process_that_reads_ahead_ends_on_ctrl_c_while_its_server_hangs(server: Server, tmp_path: Path) -> None:
    for number in range(3):
        server.fault(f"shard.{number:05d}.mds", "hang", forever=True)
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), server.url, str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt"), ended.stderr
    assert ended.returncode == -signal.SIGINT
