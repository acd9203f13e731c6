"""Shards are fetched before they're read, in the order's order, no further than they may, each once."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from torch import Tensor

from cosmati.data import opened as data_opened
from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.order.interleave import Ints
from cosmati.data.read_ahead import ReadAhead, fetch_from_here
from cosmati.data.rows import RowBatch
from cosmati.data.shards.remote import Remote, RemoteMissingError
from cosmati.data.source import StreamingOrder, StreamingSource
from cosmati.data.streaming import StreamingDataset
from tests.data.faults.server import Server, serve
from tests.data.shard_files import write_data_set, write_source

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]
ROWS = 10
SHARDS = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = write_source(tmp_path / "remote" / "one", [ROWS] * SHARDS)
    write_data_set(tmp_path / "remote" / "two", {"open/psf": [ROWS] * 6, "unknown": [ROWS] * 3})
    with serve(folder.parent) as state:
        yield state


def opened(server: Server, cache: Path, name: str = "one", window: int = 40, **options: int) -> StreamingDataset:
    kept = CacheOptions(cache, deadline_seconds=60, **options)  # type: ignore[arg-type]
    return StreamingDataset(f"{server.url}/{name}", columns=("number",), cache=kept, window_rows=window)


def fetched(server: Server, name: str = "one") -> list[str]:
    """Return the shards that were asked for, in order of the first request."""
    return [path for path in server.requests if path.startswith(name) and path.endswith(".mds")]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def others() -> Callable[[], int]:
    """Return what counts this process's children that aren't there yet: other tests' may not have ended."""
    before = set(multiprocessing.active_children())
    return lambda: len(set(multiprocessing.active_children()) - before)


def ahead_of(data: StreamingDataset, rows: int, max_bytes: int) -> ReadAhead:
    orders = data.orders(data.seed)
    return ReadAhead(
        data.sources, orders, lambda n: data.needs(n * rows, (n + 1) * rows), max_bytes=max_bytes, max_parts=1000
    )


def in_order(data: StreamingDataset, rows: int, source: int = 0) -> list[int]:
    """Return the shards in the order in which reading row after row meets their windows."""
    found: list[int] = []
    order = data.orders(data.seed)[source]
    for index in range(rows):
        found += [shard for shard in order.shards_of(0, index, index + 1).tolist() if shard not in found]
    return found


def test_what_comes_next_is_fetched_in_order_and_no_further_than_allowed(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path / "cache")
    size = data.sources[0].index.largest_shard
    ahead = ahead_of(data, rows=5, max_bytes=4 * size)
    expected = in_order(data, ROWS * SHARDS)
    try:
        ahead.go_on(0)
        # The part that is read needs the first window, one shard; four more may be fetched beyond it.
        wait_for(lambda: len(fetched(server)) >= 5)
        time.sleep(0.2)
        assert {*fetched(server)} == {f"one/shard.{n:05d}.mds" for n in expected[:5]}
        ahead.go_on(2)
        # Rows 10 to 29 need the next two shards, and four more may be fetched beyond those.
        wait_for(lambda: len(fetched(server)) >= 7)
        time.sleep(0.2)
        assert {*fetched(server)} == {f"one/shard.{n:05d}.mds" for n in expected[:7]}
    finally:
        ahead.close()
        ahead.wait()


def test_it_goes_on_into_the_next_epoch(server: Server, tmp_path: Path) -> None:
    data, looked_at = opened(server, tmp_path / "cache", name="two"), set()

    def upcoming(part: int) -> tuple[Ints, Ints, Ints]:
        looked_at.add(part)
        return data.needs(part * 10, part * 10 + 10)

    ahead = ReadAhead(data.sources, data.orders(data.seed), upcoming, max_bytes=1 << 20, max_parts=12)
    try:
        ahead.go_on(0)
        wait_for(lambda: len(fetched(server, "two")) == 9)
        assert max(looked_at) == 12 > len(data) // 10, "into the next epoch, and no further than it should"
    finally:
        ahead.close()
        ahead.wait()


def test_the_first_batch_waits_for_one_shard_only(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path / "cache", window=1000)
    first = in_order(data, 1)
    assert len(first) == 1
    for shard in range(SHARDS):
        if shard != first[0]:
            server.fault(f"one/shard.{shard:05d}.mds", "hang", forever=True)
    start = time.monotonic()
    batches = iter(StreamingLoader(data, ROWS))
    assert len(next(batches).lineage.row_ids) == ROWS
    assert time.monotonic() - start < 29, "no other shard was waited for"


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_once_and_each_shard_too(server: Server, tmp_path: Path, workers: int) -> None:
    data = opened(server, tmp_path / "cache")
    loader = StreamingLoader(data, 7, num_workers=workers)
    for _ in range(3):  # workers are forked anew each time, where threads have been
        seen = [row for batch in loader for row in batch.lineage.row_ids.tolist()]
        assert sorted(seen) == list(range(ROWS * SHARDS))
    assert {path: n for path, n in server.requests.items() if path.endswith(".mds")} == {
        f"one/shard.{shard:05d}.mds": 1 for shard in range(SHARDS)
    }
    assert (server.requests["one/index.json"], server.heads) == (1, {}), "a request a file, and nothing else"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_reads_ahead_of_its_steps(server: Server, tmp_path: Path, workers: int) -> None:
    source = StreamingSource(opened(server, tmp_path / "cache"), 20, num_workers=workers, steps_ahead=1)
    order = source.order(seed=3, num_microbatches=2, route_pure=False)
    order.expect(0, (0, 1))
    # Of 8 steps two are read ahead as batches; the shards of all the others are fetched meanwhile.
    wait_for(lambda: len(fetched(server)) == SHARDS)
    seen = [r for step in range(8) for i in (0, 1) for r in order.microbatch(step, i).lineage.row_ids.tolist()]
    assert sorted(seen) == list(range(ROWS * SHARDS))


def test_a_shard_that_cannot_be_had_is_told_by_whoever_reads_it(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path / "cache")
    last = in_order(data, ROWS * SHARDS)[-1]
    server.fault(f"one/shard.{last:05d}.mds", "404", forever=True)
    batches = iter(StreamingLoader(data, ROWS))
    assert len(list(itertools.islice(batches, SHARDS // 2))) == SHARDS // 2, "what comes before is read"
    with pytest.raises(RemoteMissingError, match=f"shard.{last:05d}.mds isn't there"):
        list(batches)


def test_an_iterator_that_is_dropped_before_its_first_batch_leaves_no_thread(server: Server, tmp_path: Path) -> None:
    def count() -> int:
        return sum(one.name == "cosmati-ahead" for one in threading.enumerate())

    loader, before = StreamingLoader(opened(server, tmp_path / "cache"), ROWS), count()
    for _ in range(5):
        iter(loader)
    assert count() <= before
    assert fetched(server) == []


@pytest.mark.parametrize("through", ["loader", "source"])
def test_workers_leave_fetching_to_the_process_that_forked_them(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    plain, log = Remote.fetch, tmp_path / "fetched"

    def fetch(self: Remote, path: str, to: IO[bytes], *, num_bytes: int | None = None) -> None:
        if self.url.startswith(server.url):  # what another test has left under way may still ask its own
            with log.open("a") as lines:
                lines.write(f"{os.getpid()} {path}\n")
        plain(self, path, to, num_bytes=num_bytes)

    monkeypatch.setattr(Remote, "fetch", fetch)
    monkeypatch.setattr(data_opened, "_GRACE_SECONDS", 60.0)  # on a busy machine a thread may begin late
    data = opened(server, tmp_path / "cache")
    if through == "loader":
        rows = sum(len(batch.lineage.row_ids) for batch in StreamingLoader(data, 8, num_workers=2))
    else:
        order = StreamingSource(data, 8, num_workers=2).order(seed=0, num_microbatches=1, route_pure=False)
        rows = 0
        for step in range(order.steps_per_epoch):
            order.expect(step, (0,))
            rows += order.microbatch(step, 0).num_rows
    assert rows == ROWS * SHARDS
    asked = [line.split() for line in log.read_text().splitlines()]
    assert {pid for pid, _ in asked} == {str(os.getpid())}
    assert sorted(path for _, path in asked) == [f"shard.{n:05d}.mds" for n in range(SHARDS)]


def test_workers_fetch_by_themselves_where_nobody_does(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path / "cache", ahead_bytes=0)
    fetch_from_here(data.sources)
    rows = [int(n) for batch in StreamingLoader(data, 8, num_workers=2) for n in batch.data]
    assert sorted(rows) == list(range(ROWS * SHARDS))


def test_one_place_is_connected_to_once_and_listed_anew_each_time(server: Server, tmp_path: Path) -> None:
    data = opened(server, tmp_path / "cache", name="two")
    assert [source.num_rows for source in data.sources] == [6 * ROWS, 3 * ROWS]
    assert len(server.connections) <= 2, "two small files are asked for at once, the rest one after another"
    remote, options = f"file://{tmp_path}/remote/one", {"auto_mkdir": False}
    first, second = (Remote(f"simplecache::{remote}", options=options) for _ in range(2))
    before = first.names("*.mds")
    (tmp_path / "remote/one/shard.99999.mds").write_bytes(b"")
    assert second.names("*.mds") == [*before, "shard.99999.mds"] == first.names("*.mds")


def test_a_source_opens_in_as_many_round_trips_as_it_needs(server: Server, tmp_path: Path) -> None:
    opened(server, tmp_path / "cache")
    assert server.requests == {"one/sources.json": 1, "one/index.json": 1}
    server.requests.clear()
    opened(server, tmp_path / "other", name="two")
    asked = {"two/sources.json": 1, "two/index.json": 1, "two/open/psf/index.json": 1, "two/unknown/index.json": 1}
    wait_for(lambda: server.requests == asked)  # one of them isn't waited for


@pytest.mark.parametrize("fault", ["503", "hang"])
def test_a_data_set_doesnt_wait_for_an_index_that_it_doesnt_need(server: Server, tmp_path: Path, fault: str) -> None:
    server.fault("two/index.json", fault, forever=True)
    start = time.monotonic()
    assert len(opened(server, tmp_path / "cache", name="two")) == 9 * ROWS
    assert time.monotonic() - start < 29, "it hangs for 30"
    assert server.requests["two/index.json"] <= 1


def test_a_source_whose_index_comes_at_the_second_try(server: Server, tmp_path: Path) -> None:
    server.fault("one/index.json", "503", "reset")
    assert len(opened(server, tmp_path / "cache")) == SHARDS * ROWS


@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_nobody_holds_leaves_no_thread_and_no_worker(
    server: Server, tmp_path: Path, workers: int
) -> None:
    data, num_workers = opened(server, tmp_path / "cache"), others()
    order = StreamingSource(data, 20, num_workers=workers).order(seed=3, num_microbatches=2, route_pure=False)
    before = [thread for thread in threading.enumerate() if thread.name == "cosmati-ahead"]
    order.expect(0, (0, 1))
    order.microbatch(0, 0)
    ours = {thread for thread in threading.enumerate() if thread.name == "cosmati-ahead"} - set(before)
    assert ours
    assert num_workers() == workers
    end = weakref.ref(data)
    del order, data

    def is_gone() -> bool:
        gc.collect()  # a thread may still read what it had begun
        return end() is None and not any(thread.is_alive() for thread in ours)

    wait_for(is_gone)
    wait_for(lambda: not num_workers())


class _Faulty:
    """Fails at one row, as often as its file has letters."""

    def __init__(self, row: int, left: Path) -> None:
        self.row, self.left = row, left

    def __call__(self, rows: RowBatch) -> Tensor:
        left = self.left.read_text()
        if left and self.row in rows.row_ids.tolist():
            self.left.write_text(left[1:])
            raise OSError(28, "No space left on device")
        return rows.tensor("number")


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_failed_is_read_again_and_the_next_ones_are_theirs(
    tmp_path: Path, workers: int, num_microbatches: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, left, num_workers = write_source(tmp_path / "data", [ROWS] * SHARDS), tmp_path / "left", others()
    left.write_text("")

    def order_of(transform: _Faulty) -> StreamingOrder:
        source = StreamingSource(StreamingDataset(folder, transform=transform), 4, num_workers=workers)
        return source.order(seed=3, num_microbatches=num_microbatches, route_pure=False)

    indices = range(num_microbatches)
    wanted = [[order_of(_Faulty(-1, left)).microbatch(step, i).data.tolist() for i in indices] for step in range(8)]
    order, seen, errors = order_of(_Faulty(wanted[3][-1][0], left)), [], 0
    left.write_text("xx")
    while len(seen) < 8:
        order.expect(len(seen), indices)
        try:
            seen.append([order.microbatch(len(seen), i).data.tolist() for i in indices])
        except OSError:
            errors += 1
    assert errors == 2
    assert seen == wanted
    del order
    wait_for(lambda: not num_workers())
    assert "Exception ignored" not in capfd.readouterr().err, "new workers end the old ones"


def test_a_fault_that_is_mended_ends_no_later_step(tmp_path: Path) -> None:
    full, failed = tmp_path / "full", []

    def transform(rows: RowBatch) -> Tensor:
        if full.exists():
            failed.append(rows)
            raise OSError(28, "No space left on device")
        return rows.tensor("number")

    folder = write_source(tmp_path / "data", [ROWS] * SHARDS)
    order = StreamingSource(StreamingDataset(folder, transform=transform), 4).order(
        seed=3, num_microbatches=2, route_pure=False
    )
    full.touch()
    order.expect(0, (0, 1))
    wait_for(lambda: len(failed) == 6)  # the step and two ahead of it
    with pytest.raises(OSError, match="No space left"):
        order.microbatch(0, 0)
    full.unlink()
    for step in range(3):
        order.expect(step, (0, 1))
        assert [order.microbatch(step, index).num_rows for index in (0, 1)] == [2, 2]


def test_an_owner_that_is_collected_while_a_thread_is_made_ends_that_one_too(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(server, tmp_path / "cache")
    ahead, made = ahead_of(data, rows=5, max_bytes=1 << 20), []

    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name == "cosmati-ahead":
                made.append(self)
                ahead.close()  # as the garbage collector may, at any allocation
            super().start()

    beginning = threading.Thread(target=ahead.go_on, args=(0,), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Thread)
        beginning.start()
        beginning.join(20)
    assert not beginning.is_alive(), "it waits for itself"
    assert len(made) == 1
    wait_for(lambda: not made[0].is_alive())


@pytest.mark.parametrize("workers", [0, 1])
def test_after_an_epoch_finished_as_it_was_planned_shards_are_fetched_ahead_again(
    server: Server, tmp_path: Path, workers: int
) -> None:
    write_source(tmp_path / "remote/grows", [ROWS] * 4)
    loader = StreamingLoader(opened(server, tmp_path / "before", "grows"), 8)
    next(iter(loader))
    state = loader.state_dict()
    write_source(tmp_path / "remote/grows", [ROWS] * 12)
    server.requests.clear()
    data = opened(server, tmp_path / "after", "grows")
    loader = StreamingLoader(data, 8, num_workers=workers)
    loader.load_state_dict(state, grown=True)
    assert sum(len(batch.lineage.row_ids) for batch in loader) == 4 * ROWS - 8
    assert data.sources[0].fetcher is None, "nobody fetched for workers to wait for"
    assert len(fetched(server, "grows")) == 4
    batches = iter(loader)
    next(batches)
    wait_for(lambda: len(fetched(server, "grows")) == 12)
