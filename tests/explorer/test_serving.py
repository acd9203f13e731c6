"""`cosmati explore` as a process: where it listens, what it says, and what it bears while its store changes."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cosmati.storage.lock import is_locked
from cosmati.store.index import RunIndex
from cosmati.store.summary import key_of
from tests.explorer.serving import OFTEN, ExploreServer, child_environment
from tests.processes import PythonProcess, run_python
from tests.store.samples import run_record, small_study, write_run, write_study

pytestmark = pytest.mark.long

WRITER = """
import sys, time
from pathlib import Path
from tests.store.samples import *
root, record = Path(sys.argv[1]), small_study("grows", seeds=range(30))
begin_study(root / "study", record)
for number, run in enumerate(record.runs):
    with (root / "study" / "runs.jsonl").open("a") as file:
        line = study_line(run)
        file.write(line[:50])
        file.flush()
        time.sleep(0.01)
        file.write(line[50:])
    write_run(root / f"run-{number}", run_record(f"run-{number}"), [{"step": n} for n in range(number)])
    print(2 * number + 2, time.time(), flush=True)
"""


def num_runs(server: ExploreServer, query: str = "") -> int:
    status, page, _ = server.get(f"/runs{query}")
    assert status == 200, page[-2000:]
    found = re.search(r"<strong>([\d,]+)</strong> runs?", page)
    assert found is not None
    return int(found[1].replace(",", ""))


def lateness(server: ExploreServer) -> float:
    found = re.search(r"stands here within (\d+) s", server.get("/runs")[1])
    assert found is not None, "no page says how late it can be"
    return float(found[1])


def soon(true: Callable[[], bool], seconds: float) -> bool:
    """Say whether something comes true in time; a busy machine is given ten times as long as one that idles."""
    end = time.monotonic() + 10 * seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.1)
    return False


HELD = """
import os, time
from cosmati.store import index
hold, read, num_read = Path(os.environ["HOLD"]), index.read_source, 0

def held(root, source):
    global num_read
    num_read += hold.exists()
    if num_read == 10:
        hold.write_text("now")
        time.sleep(600)
    return read(root, source)

index.read_source = held
"""
"""What a server begins with that once `HOLD` is there stops amid its look, and says so there."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed under /proc on Linux alone")
def test_it_listens_to_this_machine_alone_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    with ExploreServer(tmp_path) as server:
        held = Path(f"/proc/{server.process.pid}/fd")
        own = {str(one.readlink()) for one in held.iterdir() if one.is_symlink()}
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        listening = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
        port = int(server.address.rpartition(":")[2])
        assert listening == [f"0100007F:{port:04X}"]
        assert num_runs(server) == 0
        said = server.close()
    assert server.process.returncode == 0
    assert "Traceback" not in said
    assert f"Open http://127.0.0.1:{port}/" in said


def test_the_command_says_that_a_port_is_in_use(tmp_path: Path) -> None:
    with ExploreServer(tmp_path) as server:
        port = server.address.rpartition(":")[2]
        environment = child_environment(COLUMNS="200", NO_COLOR="1")
        found = run_python(["-m", "cosmati", "explore", tmp_path, "--port", port], env=environment)
    assert found.returncode not in (0, None)
    assert f"Port {port} can't be had" in found.stderr
    assert "--port" in found.stderr
    assert "Traceback" not in found.stderr


def test_two_stores_and_two_servers_of_one_store(tmp_path: Path, stack: ExitStack) -> None:
    for name, seeds in (("a", 2), ("b", 3)):
        write_study(tmp_path / name / "study", small_study(name, seeds=range(seeds)))
    first, second, third = (stack.enter_context(ExploreServer(tmp_path / name, before=OFTEN)) for name in "aba")
    assert [num_runs(one) for one in (first, second, third)] == [8, 12, 8]
    assert third.get("/runs/" + key_of("study", "fast", 1.0, 2))[0] == 404
    assert second.get("/runs/" + key_of("study", "fast", 1.0, 2))[0] == 200
    write_run(tmp_path / "a" / "more", run_record("more"))
    assert soon(lambda: num_runs(first) == num_runs(third) == 9, lateness(first))
    assert num_runs(second) == 12
    for one in (first, second, third):
        assert "failed" not in one.close()


def test_a_store_that_grows_is_followed_in_time_and_never_shrinks(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(ExploreServer(tmp_path))
    bound = lateness(server)
    writer = PythonProcess(["-c", WRITER, tmp_path], env=child_environment())
    written: list[tuple[int, float]] = []

    def listen() -> None:
        for line in writer.stdout:
            number, at = line.split()
            written.append((int(number), float(at)))

    listener = threading.Thread(target=listen)
    listener.start()
    seen: list[tuple[float, float, int]] = []
    while not seen or seen[-1][2] < 240:
        asked = time.time()
        seen.append((asked, time.time(), num_runs(server)))
        assert asked < seen[0][0] + 120, "it never came to its end"
        for page in ("/", "/studies/study", "/problems"):
            assert server.get(page)[0] in (200, 404), page
        time.sleep(0.05)
    writer.wait(timeout=60)
    listener.join()
    writer.stdout.close()
    counts = [count for _, _, count in seen]
    assert counts == sorted(counts)
    assert max(counts) == 240
    # Slack for a busy machine: a look can be put off by others' work.
    late = [
        (asked - at, number, count)
        for asked, _, count in seen
        for number, at in written
        if count < number and asked - at > 3 * bound + 5
    ]
    assert late == []
    assert "1 can" not in server.get("/problems")[1]
    assert "failed" not in server.close()


def test_what_is_removed_or_replaced_while_it_is_read_breaks_nothing(tmp_path: Path, stack: ExitStack) -> None:
    steps = [{"step": n, "rows": n, "loss": 1 / (n + 1)} for n in range(2000)]
    write_run(tmp_path / "run", run_record(), steps)
    write_study(tmp_path / "study", small_study())
    server = stack.enter_context(ExploreServer(tmp_path, before=OFTEN))
    is_over, answers = threading.Event(), list[tuple[str, int, str]]()
    pages = ("/runs/" + key_of("run"), "/studies/study", "/", "/runs", "/runs/" + key_of("study", "fast", 1.0, 1))

    def read(page: str) -> None:
        while not is_over.is_set():
            status, text, _ = server.get(page)
            answers.append((page, status, text))

    readers = [threading.Thread(target=read, args=(page,)) for page in pages]
    for reader in readers:
        reader.start()
    for number in range(12):
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "study")
        time.sleep(0.05)
        write_run(tmp_path / "run", run_record("run", seed=number), steps[: 100 * number])
        write_study(tmp_path / "study", small_study(seeds=range(1 + number % 3)))
        (tmp_path / "run" / "steps.jsonl").write_bytes(b'{"step": 1, "loss": ' * (number % 2))
        time.sleep(0.1)
    is_over.set()
    for reader in readers:
        reader.join(timeout=60)
    assert {page for page, _, _ in answers} == set(pages)
    assert [(page, text[-3000:]) for page, status, text in answers if status not in (200, 404)] == []
    wrong = [text for page, status, text in answers if status == 404 and 'class="alarm"' not in text]
    assert wrong == []
    assert "Traceback" not in server.close()


def test_a_server_that_is_killed_while_it_reads_leaves_a_store_that_opens(tmp_path: Path, stack: ExitStack) -> None:
    store, hold = tmp_path / "store", tmp_path / "hold"
    for number in range(20):
        write_study(store / f"s{number}", small_study(f"s{number}", seeds=range(10)))
    first = stack.enter_context(ExploreServer(store, environment={"HOLD": str(hold)}, before=OFTEN + HELD))
    assert num_runs(first) == 800
    first.process.send_signal(signal.SIGSTOP)  # between two looks, so that the next one sees all
    while is_locked(store / ".cosmati" / "index.lock"):
        first.process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
        first.process.send_signal(signal.SIGSTOP)
    for number in range(20):
        write_study(store / f"s{number}", small_study(f"s{number}", seeds=range(12)))
    hold.touch()
    first.process.send_signal(signal.SIGCONT)
    assert soon(lambda: hold.read_text() == "now", 12)
    first.kill()
    with RunIndex(store) as index:
        assert index.count() == 800, "it died with its work undone, and nothing of that stands"
    second = stack.enter_context(ExploreServer(store))
    assert num_runs(second) == 20 * 48
    assert second.get("/problems")[1].count("can't be read") <= 1
    assert "Traceback" not in second.close()


def test_damage_is_named_while_the_rest_goes_on_and_its_mend_is_seen(tmp_path: Path, stack: ExitStack) -> None:
    write_run(tmp_path / "run", run_record(), [{"step": n, "loss": 1 / (n + 1)} for n in range(50)])
    write_study(tmp_path / "study", small_study(seeds=(0,)))
    (tmp_path / "run" / "steps.parquet").write_bytes(b"PAR1" + b"junk" * 99 + b"PAR1")
    (tmp_path / "run" / "evaluations.parquet").write_bytes(b"")
    server = stack.enter_context(ExploreServer(tmp_path, before=OFTEN))
    page = "/runs/" + key_of("run")
    status, text, _ = server.get(page)
    assert status == 200, text[-2000:]
    assert '"loss"' in text, "its lines are whole, whatever became of their copy"
    for address in ("/", "/?study=small", "/studies/study"):
        assert server.get(address)[0] == 200, "one seed has no interval, and a page all the same"
    record = (tmp_path / "run" / "run.json").read_bytes()
    for damage in (b"", b"{", b"null", b"\xff\xfe", record[: len(record) // 2], b"[" * 100_000, b'{"version": 99}'):
        (tmp_path / "run" / "run.json").write_bytes(damage)
        assert soon(lambda: "1 can" in server.get("/problems")[1], 3), damage[:20]
        status, text, _ = server.get(page)
        assert status == 404
        assert num_runs(server) == 4
    (tmp_path / "run" / "run.json").write_bytes(record)
    assert soon(lambda: num_runs(server) == 5, 3)
    assert server.get(page)[0] == 200
    assert "Traceback" not in server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that can be removed again, whatever rights a test takes away."""
    yield tmp_path
    for one in (tmp_path, *tmp_path.rglob("*")):
        one.chmod(0o755)


WITHOUT_RIGHTS = """
import ctypes, os, struct
if os.geteuid() == 0:  # the superuser may read and write all, until it gives that up: capset(2)
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
"""


def test_what_may_not_be_read_is_left_out_and_a_store_that_may_not_be_written_is_shown(folder: Path) -> None:
    store, cache = folder / "store", folder / "cache"
    write_study(store / "study", small_study())
    write_run(store / "shut", run_record("shut"))
    write_run(store / "locked-file", run_record("locked file"))
    (store / "locked-file" / "run.json").chmod(0)
    (store / "shut").chmod(0)
    store.chmod(0o555)
    cache.mkdir()
    with ExploreServer(store, before=WITHOUT_RIGHTS, environment={"XDG_CACHE_HOME": str(cache)}) as server:
        assert server.address, "".join(server.said)
        assert num_runs(server) == 8
        problems = server.get("/problems")[1]
        assert "locked-file" in problems
        assert "Permission denied" in problems
        assert server.get("/studies/study")[0] == 200
        assert "Traceback" not in server.close()
    assert list(cache.rglob("index.sqlite")), "the index lies in the cache"
    assert not (store / ".cosmati").exists()


def test_without_a_place_for_the_index_it_says_so(folder: Path) -> None:
    store = folder / "store"
    store.mkdir(mode=0o555)
    with ExploreServer(store, before=WITHOUT_RIGHTS, environment={"XDG_CACHE_HOME": "/proc/nowhere"}) as server:
        said = server.close()
    assert server.address == ""
    assert "no place for the index" in " ".join(said.split())
    assert "Make one writable" in " ".join(said.split())


def test_a_running_job_that_is_killed_is_told(tmp_path: Path, stack: ExitStack) -> None:
    code = """
import sys, time
from pathlib import Path
from cosmati.storage.lock import FileLock
from tests.store.samples import *
folder = Path(sys.argv[1])
write_run(folder, run_record(outcome="running", ended=None, metrics={}), [{"step": 1, "rows": 8, "loss": 2.0}])
with FileLock(folder / "lock"):
    print(1, flush=True)
    time.sleep(600)
"""
    job = PythonProcess(["-c", code, tmp_path / "job"], env=child_environment())
    try:
        job.stdout.readline()
        server = stack.enter_context(ExploreServer(tmp_path, before=OFTEN))
        assert num_runs(server, "?status=running") == 1
        job.send_signal(signal.SIGKILL)
        job.wait(timeout=120)
        assert soon(lambda: num_runs(server, "?status=broken+off") == 1, lateness(server))
        assert num_runs(server, "?status=running") == 0
        assert server.get("/runs/" + key_of("job"))[0] == 200
    finally:
        job.kill()
        job.communicate()
