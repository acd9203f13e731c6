"""Worker processes and SIGKILL: the loss of one is an error in the main process, and none outlives it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch

from cosmati.data.loader import StreamingLoader
from cosmati.data.rows import RowBatch
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.faults import slow_reader
from tests.data.shard_files import write_source
from tests.processes import PythonProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def start(folder: Path) -> tuple[PythonProcess, list[int]]:
    process = PythonProcess([slow_reader.__file__, folder])
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208


def test_undisturbed_it_reads_everything(tmp_path: Path) -> None:
    process, _ = start(write_source(tmp_path, [50, 70]))
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert sorted(map(int, out.split())) == list(range(120))


def test_a_killed_worker_is_an_error_and_no_hang(tmp_path: Path) -> None:
    process, workers = start(write_source(tmp_path, [2000]))
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=280)
    assert process.returncode not in (0, None)
    assert "killed by signal" in errors or "Connection reset" in errors


def test_a_killed_job_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    before = shared_memory()
    process, workers = start(write_source(tmp_path, [5000]))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    own = {str(pid) for pid in (process.pid, *workers)}
    left = {name for name in shared_memory() - before if own & set(name.split("_"))}
    assert left == set()


# Forked workers hold each other's pipes; others don't, and each of them loads PyTorch anew.
METHODS = pytest.mark.parametrize(
    ("method", "num_workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow), ("forkserver", 1)]
)


@pytest.mark.parametrize(
    ("method", "num_workers", "has_read"),
    [
        ("fork", 2, True),
        ("fork", 2, False),
        pytest.param("forkserver", 1, True, marks=pytest.mark.slow),
        pytest.param("forkserver", 1, False, marks=pytest.mark.slow),
        pytest.param("spawn", 1, True, marks=pytest.mark.slow),
        pytest.param("spawn", 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_worker_whose_parent_was_killed_before_it_began_ends(
    tmp_path: Path, method: str, num_workers: int, has_read: bool
) -> None:
    write_source(tmp_path / "data", [500])
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, os, signal, time
        from cosmati.data.loader import StreamingLoader
        from cosmati.data.streaming import StreamingDataset

        def begin(worker):  # before PyTorch notes who the parent is
            above = os.getppid()
            time.sleep({0.5 if has_read else 0})
            os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)
            while os.getppid() == above:
                time.sleep(0.01)

        if __name__ == "__main__":
            data = StreamingDataset({str(tmp_path / "data")!r}, columns=("number",))
            context = multiprocessing.get_context({method!r})
            options = dict(num_workers={num_workers}, worker_init_fn=begin, multiprocessing_context=context)
            next(iter(StreamingLoader(data, 4, **options)))
        """)
    )
    process = PythonProcess([script])
    process.communicate(timeout=120)  # until nobody holds the pipe
    assert process.returncode == -signal.SIGKILL


@METHODS
def test_a_worker_ends_with_its_killed_parent_while_a_process_forked_later_lives(
    tmp_path: Path, method: str, num_workers: int
) -> None:
    write_source(tmp_path / "data", [500])
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, os, signal, sys, time
        from pathlib import Path
        from cosmati.data.loader import StreamingLoader
        from cosmati.data.streaming import StreamingDataset

        FOLDER = Path({str(tmp_path)!r})

        def begin(worker):  # opens a tokenizer, say
            (FOLDER / f"{{os.getpid()}}.begun").touch()
            time.sleep(100)

        if __name__ == "__main__":
            data = StreamingDataset(FOLDER / "data", columns=("number",))
            context = multiprocessing.get_context({method!r})
            options = dict(num_workers={num_workers}, worker_init_fn=begin, multiprocessing_context=context)
            batches = iter(StreamingLoader(data, 4, **options))
            helper = os.fork()
            if helper == 0:
                time.sleep(100)
                os._exit(0)
            print(helper, flush=True)
            while len(list(FOLDER.glob("*.begun"))) < {num_workers}:
                time.sleep(0.05)
            time.sleep(1.5)  # a parent that lives is seen
            print(*(path.stem for path in FOLDER.glob("*.begun") if Path("/proc", path.stem).exists()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    process = PythonProcess([script])
    helper, workers = int(process.stdout.readline()), [*map(int, process.stdout.readline().split())]
    try:
        process.wait(timeout=60)
        assert len(workers) == num_workers
        deadline = time.monotonic() + 60
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert is_running(helper)
        assert not any(map(is_running, workers))
    finally:
        process.stdout.close()
        for pid in (helper, *filter(is_running, workers)):
            os.kill(pid, signal.SIGKILL)


def refuse_seven(batch: RowBatch) -> torch.Tensor:
    if 7 in batch.columns["number"]:
        raise ValueError("seven")
    return batch.tensor("number")


@pytest.mark.parametrize("reader", ["loader", "source", "error"])
def test_workers_in_a_cycle_that_is_collected_are_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    gc.collect()  # what other tests have left
    before = set(multiprocessing.active_children())
    data = StreamingDataset(write_source(tmp_path, [20]), columns=("number",), transform=refuse_seven, shuffle=False)
    cycle: list[object] = []
    cycle.append(cycle)
    if reader == "source":
        order = StreamingSource(data, 4, num_workers=1).order(seed=0, num_microbatches=1, route_pure=False)
        order.expect(0, (0,))
        order.microbatch(0, 0)
        cycle.append(order)
        del order
    else:
        batches = iter(StreamingLoader(data, 4, num_workers=1))
        next(batches)
        if reader == "loader":
            cycle.append(batches)
        else:
            with pytest.raises(DataError, match="row 7 is bad: ValueError: seven"):
                next(batches)
        del batches
    [worker] = set(multiprocessing.active_children()) - before
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 30.0)
    terminated = []
    monkeypatch.setattr(worker, "terminate", lambda: (terminated.append(worker.pid), worker.kill()))
    del cycle
    gc.collect()
    assert (worker.exitcode, terminated) == (0, []), "what isn't told in time PyTorch terminates"
