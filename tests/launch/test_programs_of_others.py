"""Programs of other people's kind: they fork, end by every door there is, and say what is no text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptPhase, AttemptStanding, RankProgram
from cosmati.launch.guard import end_of, kill_group, mark_of, signal_name
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob
from cosmati.launch.local import _LocalAttempt
from cosmati.launch.notes import BadEnd, ends_in, last_line, note_end
from cosmati.launch.queue import JobQueue
from cosmati.launch.slurm import _with_ends
from cosmati.launch.states import LaunchState
from cosmati.launch.worker import _status_of, is_of_others
from tests.launch.jobs import is_there, serving, until
from tests.processes import run_python

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="how a process has ended is read from /proc"),
    pytest.mark.long,
]

FORKS = """
import os
import time
from pathlib import Path

if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
"""
ENDS = """
mine = Path(__file__).with_name("num_ends")
mine.write_text(str(int(mine.read_text()) + 1) if mine.exists() else "1")
if mine.read_text() == "1":
    os.kill(os.getpid(), 9)
os._exit(3)
"""


def ended(folder: Path, text: str, *, begins_in: Path | None = None, retries: int = 1) -> tuple[LaunchedJob, list[str]]:
    """Run a script as a job of one rank, and return it, with its attempts' outcomes and reasons."""
    file = folder / "their script.py"
    file.write_text(text)
    program = RankProgram(command=(str(file),), folder=begins_in or folder, python=Path(sys.executable))
    asked = JobRequest(name="--theirs", program=program, retries=retries, backoff_seconds=0.01)
    with JobQueue(folder / "queue") as jobs:
        job = jobs.add(asked)
        _, errors = serving(jobs.home, job.id).communicate(120)
        assert not errors
        return jobs.get(job.id), [_told(one) for one in jobs.attempts(job.id)]


def _told(attempt: JobAttempt) -> str:
    host = os.uname().nodename
    return f"{attempt.outcome}: {attempt.reason}".replace(host, "HOST").removesuffix(": ")


@pytest.mark.slow
def test_a_rank_is_seen_to_end_whatever_it_has_forked_and_leaves_nothing(tmp_path: Path) -> None:
    job, told = ended(tmp_path, FORKS + ENDS)
    assert told == ["failed: the rank at HOST/0 was ended by SIGKILL", "failed: the rank at HOST/0 ended with 3"]
    assert job.state is LaunchState.FAILED
    assert job.reason.endswith("(before a first step, so it isn't tried again)")
    until(lambda: not _running(tmp_path), 20)  # what was killed takes a moment to be gone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(
            "import os; os.kill(os.getpid(), 37)", "failed: the rank at HOST/0 was ended by signal 37", id="rt"
        ),
        pytest.param("raise RuntimeError('can not restore')", "failed: RuntimeError: can not restore", id="word"),
        pytest.param(
            "import os; os.write(1, b'caf\\xc3'); raise SystemExit(2)",
            "failed: caf\N{REPLACEMENT CHARACTER}",
            id="text",
        ),
        pytest.param("raise SystemExit(256)", "completed", id="byte"),
        pytest.param("import os; os._exit(0)", "completed", id="exit"),
        pytest.param(FORKS, "completed", id="forks"),
        pytest.param("print('x' * 100 * 2**20)", "completed", id="much"),
        pytest.param("import sys; print('y' * 2**20); sys.exit(1)", "failed: " + "y" * 300, id="line"),
    ],
)
def test_however_it_ends_it_is_said(tmp_path: Path, text: str, told: str) -> None:
    _, attempts = ended(tmp_path, text, retries=0)
    assert attempts == [told]


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_what_a_program_has_begun_is_left_where_it_has_ended_well(tmp_path: Path, status: int) -> None:
    own = f"import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit({status})"
    job, _ = ended(tmp_path, own, retries=0)
    assert job.state is (LaunchState.FAILED if status else LaunchState.COMPLETED)
    if status:
        until(lambda: not _running(tmp_path), 20)
    else:
        time.sleep(1.0)
        left = _running(tmp_path)
        assert len(left) == 1
        os.kill(int(left[0]), signal.SIGKILL)


@pytest.mark.slow
def test_an_agent_that_cannot_begin_says_why(tmp_path: Path) -> None:
    job, told = ended(tmp_path, "", begins_in=tmp_path / "gone", retries=1)
    assert job.state is LaunchState.FAILED
    early = "failed: an agent failed before its ranks began: FileNotFoundError: [Errno 2] No such file or directory"
    assert len(told) == 2
    assert all(one.startswith(early) for one in told)


def _running(folder: Path) -> list[str]:
    """Return the processes that have this folder's logs open."""
    found = []
    for log in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(log.readlink()).startswith(str(folder)):
                found.append(log.parts[2])
        except OSError:
            continue
    return found


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    text = "import os, time; os.fork(); time.sleep(30)"
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    yield process
    kill_group(mark_of(process.pid) or f"{process.pid}:0")
    process.kill()
    process.wait()


def _members(group: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(stat.parts[2]))
    return found


def test_what_a_process_leaves_of_its_group_is_killed(leader: subprocess.Popen[bytes]) -> None:
    until(lambda: len(_members(leader.pid)) == 2)
    mark = mark_of(leader.pid)
    kill_group(f"{leader.pid}:1")  # of a process of that number that was there earlier
    time.sleep(0.05)
    assert len(_members(leader.pid)) == 2
    assert end_of(mark) is None
    leader.kill()
    until(lambda: not is_there(mark))
    assert end_of(mark) == -signal.SIGKILL  # and nobody has asked yet
    assert end_of(f"{leader.pid}:1") is None
    assert leader.wait() == -signal.SIGKILL
    assert end_of(mark) is None
    assert len(_members(leader.pid)) == 1
    kill_group(mark)
    until(lambda: not _members(leader.pid))


def test_a_group_that_is_gone_is_nobodys(leader: subprocess.Popen[bytes]) -> None:
    until(lambda: len(_members(leader.pid)) == 2)
    mark = mark_of(leader.pid)
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    kill_group(mark)
    kill_group("")
    until(lambda: not _members(leader.pid))


def test_every_signal_has_a_name() -> None:
    assert [signal_name(number) for number in (9, 37)] == ["SIGKILL", "signal 37"]


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"one\n  two \n\n", "two"),
        (b"\xff\n", "\N{REPLACEMENT CHARACTER}"),
        (b"a" * 5000 + b"\n", "a" * 300),
    ],
)
def test_the_last_line_of_a_log_is_read_from_its_end(tmp_path: Path, said: bytes, last: str) -> None:
    (tmp_path / "log").write_bytes(said)
    assert last_line(tmp_path / "log") == last
    assert last_line(tmp_path / "none") == ""


def test_an_exit_status_is_a_byte(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("said\n")
    ends = [_status_of(SystemExit(code), tmp_path / "log") for code in (None, 0, 1, -1, 256, "why\nmore")]
    assert ends == [
        (0, "exit status 0"),
        (0, "exit status 0"),
        (1, "said"),
        (255, "said"),
        (0, "exit status 0"),
        (1, "why"),
    ]


def test_a_rank_alone_has_lost_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("the store is closed by its peer")
    for world, expected in (("2", True), ("1", False)):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert is_of_others(error) is expected
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_of_others(ValueError("the store is closed by its peer"))


REFUSED = """
from cosmati.errors import {name}

try:
    raise {name}("of another run")
except {name} as error:
    try:
        raise KeyError("an exit") from error
    except KeyError:
        raise SystemExit(1)
"""


@pytest.mark.parametrize(("name", "is_final"), [("ChangedRunError", True), ("CheckpointError", False)])
def test_a_command_that_exits_for_a_refusal_says_so(tmp_path: Path, name: str, is_final: bool) -> None:
    file = tmp_path / "exits.py"
    file.write_text(REFUSED.format(name=name))
    text = (
        "import os, sys; from cosmati.launch.worker import run_program; "
        "run_program(sys.argv[1], [sys.argv[2]], os.getppid())"
    )
    done = run_python(["-c", text, tmp_path, file], env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 1, done.stderr
    assert ends_in(tmp_path)[0].is_final is is_final


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_refusal_is_told_before_other_errors(tmp_path: Path, ranks: tuple[int, int]) -> None:
    for rank, is_final in zip(ranks, (True, False), strict=True):
        note_end(tmp_path, rank, BadEnd(status=1, error=f"{is_final}", lost_others=False, place="", is_final=is_final))
    attempt = _LocalAttempt.__new__(_LocalAttempt)
    attempt._folder, attempt._agents = tmp_path, []
    ended = attempt._end_of("n/0", 1)
    assert (ended.own_fault, ended.is_final, ended.reason) == (True, True, "True")
    standing = AttemptStanding(phase=AttemptPhase.ENDED, status=1)
    assert _with_ends(standing, tmp_path).is_final
    (tmp_path / "rank-1.end").write_text('{"status": 1, "error": "e", "lost_others": false, "place": ""}')
    assert not ends_in(tmp_path)[1].is_final  # what an earlier release has noted


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:725."), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("ncclRemoteError: a remote process exited"), True),
        (ConnectionResetError("reset"), True),
        (RuntimeError("restore the weights first"), False),
        (RuntimeError("speerstore 9 is unknown"), False),
        (RunError("the connection to the store of rows timed out: bring it back"), False),
    ],
)
def test_what_others_have_caused_is_told_by_whole_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_of_others(error) is expected


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_that_the_program_raises_itself_is_its_own_whatever_it_says(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fails(led: Exception | None) -> None:
        raise kind("no feature store at this timeout") from led

    lost = RuntimeError("Connection closed by peer [::1]:725")
    with pytest.raises(kind) as own:
        fails(None)
    assert not is_of_others(own.value)
    with pytest.raises(kind) as led:
        fails(lost)
    assert is_of_others(led.value) is (kind is RuntimeError)
    with pytest.raises(RuntimeError) as kernels:
        torch.zeros(2) @ torch.zeros(3)
    monkeypatch.setattr("cosmati.launch.worker._LOST_OTHERS", re.compile("size"))
    assert is_of_others(kernels.value)


ENDING = """
import atexit, logging, logging.handlers, sys, tempfile, threading, time, weakref
from pathlib import Path

out = Path("{out}")
kept = tempfile.TemporaryDirectory(dir=out, prefix="tmp-")
handler = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(out / "log"))
logging.getLogger("x").addHandler(handler)
logging.getLogger("x").warning("a line")
class A: pass
a = A()
weakref.finalize(a, (out / "finalized").write_text, "yes")
atexit.register(lambda: (out / "atexit").write_text(str((out / "thread").exists())))
def late():
    time.sleep(0.5)
    (out / "thread").write_text("yes")
threading.Thread(target=late).start()
{end}
"""
FORKED = """
import atexit, multiprocessing, os, sys, tempfile, weakref
from cosmati.launch.worker import run_program

kept = tempfile.TemporaryDirectory(dir={out!r}, prefix="parents-")
atexit.register(print, "parent")
context = multiprocessing.get_context("fork")
process = context.Process(target=run_program, args=({out!r}, [{file!r}], os.getpid()))
process.start()
process.join()
assert os.path.isdir(kept.name)
print("ended with", process.exitcode)
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_rank_ends_as_python_does(tmp_path: Path, end: str, status: int, is_forked: bool) -> None:
    """Threads first, then what was registered, temporary files and the lines of loggers; none of its parent's."""
    file = tmp_path / "ends.py"
    file.write_text(ENDING.format(out=tmp_path, end=end))
    given = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    if is_forked:
        text = FORKED.format(out=str(tmp_path), file=str(file))  # begun anew, so that it ends as Python does
        done = subprocess.run([sys.executable, "-c", text], env=given, capture_output=True, text=True, check=False)
        assert done.stdout.split("\n")[:2] == [f"ended with {status}", "parent"], done.stderr
    else:
        ran = run_python(["-m", "cosmati.launch.worker", tmp_path, file], env=given)
        assert ran.returncode == status, ran.stderr
    assert (tmp_path / "log").read_text() == "a line\n"
    assert (tmp_path / "finalized").read_text() == "yes"
    assert (tmp_path / "atexit").read_text() == "True"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert [one.status for one in ends_in(tmp_path).values()] == ([status] if status else [])


def test_a_rank_that_has_failed_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n1 / 0\n")
    text = (
        "import os, sys; from cosmati.launch import worker; worker._THREADS_SECONDS = 0.3; "
        "worker.run_program(sys.argv[1], [sys.argv[2]], os.getppid())"
    )
    done = run_python(["-c", text, tmp_path, file], env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 1, done.stderr
    assert ends_in(tmp_path)[0].error == "ZeroDivisionError: division by zero"
