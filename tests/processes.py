"""Python processes that begin with PyTorch loaded, which takes seconds each time: forks of one that has loaded it.

They are as tests use `subprocess.Popen`: killed by their own number, with their own streams and environment. What forks
share, and processes begun anew don't: the seed of hashes, what a library reads when it's loaded, and their end, which
tears nothing down. Tests of these begin processes of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerContext
from pathlib import Path
from typing import Any, Self

_OWN = ("benchmarks", "cosmati", "tests", "tools")
_DEFAULT = multiprocessing.get_all_start_methods()[0]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.tensor", "cosmati.train.trainer", "cosmati.explorer.server.app"]
)


class PythonProcess:
    """A Python process, begun with what comes after `python` on a command line.

    Args:
        command: `script.py ...`, `-c code ...` or `-m module ...`.
        env: its environment, whole; None for this process's.
        cwd: where it begins.
        start_new_session: whether it leads a group of processes, to be killed with `os.killpg`.
        is_anew: whether it loads this repository's modules anew, from where its own PYTHONPATH has them.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
        is_anew: bool = False,
    ) -> None:
        self.args = [str(one) for one in command]
        handle, self._errors = tempfile.mkstemp(prefix="stderr-")
        os.close(handle)
        weakref.finalize(self, os.unlink, self._errors)
        read, write = _CONTEXT.Pipe(duplex=False)
        environment = dict(os.environ if env is None else env)
        given = (self.args, environment, str(cwd or Path.cwd()), start_new_session, is_anew, write, self._errors)
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()
        write.close()
        self.stdout = os.fdopen(os.dup(read.fileno()), encoding="utf-8", errors="replace")
        read.close()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for its end."""
        self.stdout.close()
        self.wait()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, minus the signal where one ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return how it ended.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float = 280.0) -> tuple[str, str]:
        """Return what it says to its end, and its errors; it's killed where that takes longer."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        said = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self.wait()
        timer.cancel()
        return said, Path(self._errors).read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server may have seen its end, and not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def preloaded(method: str | None = None) -> ForkServerContext:
    """Return what makes processes that begin with PyTorch loaded; a test puts it in the place of `get_context`."""
    return _CONTEXT


class Alone:
    """Makes forks that hold no file but their connections, as spawned processes do: they see when their parent ends.

    For programs that a `PythonProcess` runs. Tests themselves have threads, and forks of a fork server.
    """

    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def Process(*, target: Callable[..., object], args: tuple[Any, ...], name: str) -> ForkProcess:  # noqa: N802
        """Return a process that isn't begun yet."""
        return ForkProcess(target=_alone, args=(target, args), name=name)


def _alone(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    kept = {0, 1, 2, parent.sentinel, *(one.fileno() for one in args if isinstance(one, Connection))}
    for number in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(number)
    target(*args)


def _run(
    args: list[str],
    environment: dict[str, str],
    cwd: str,
    is_leader: bool,
    is_anew: bool,
    output: Connection,
    errors: str,
) -> None:
    import numpy as np
    import torch

    # Or its own processes, workers that read data for one, would come of a second server, which loads PyTorch again.
    multiprocessing.set_start_method(_DEFAULT, force=True)
    if is_leader:
        os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    output.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "COVERAGE_PROCESS_START" in environment:
        _measure_anew()
    if environment.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    random.seed()
    np.random.seed()  # noqa: NPY002  (the one that forks share)
    if is_anew:
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
    program, sys.argv = args[0], args
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(program).parent) if program[0] != "-" else cwd, *filter(None, paths)]
    if program == "-c":
        sys.argv = ["-c", *args[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    elif program == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _measure_anew() -> None:
    """Have what this process runs told apart from what the server ran: the environment says for which test it is."""
    import coverage

    if (of_the_server := coverage.Coverage.current()) is not None:
        of_the_server.stop()
        of_the_server.save = lambda: None  # type: ignore[method-assign]  # else each process would write it too
    coverage.process_startup(force=True)


def run_python(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    is_anew: bool = False,
    timeout: float = 280.0,
) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end, however it ends."""
    process = PythonProcess(command, env=env, cwd=cwd, is_anew=is_anew)
    said, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), said, errors)


def begin_ranks(command: Sequence[str | Path], world: int, **more: str) -> list[PythonProcess]:
    """Begin a program on so many ranks, each the leader of a group of processes.

    Args:
        command: as a `PythonProcess` has it.
        world: ranks; they're told of each other as torchrun does.
        more: environment variables.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
        **more,
    }
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [PythonProcess(command, env={**environment, **number}, start_new_session=True) for number in numbers]


def launch_ranks(command: Sequence[str | Path], world: int, *, timeout: float = 280.0, **more: str) -> list[str]:
    """Run a program on so many ranks, and return what each says.

    Args:
        command: as a `PythonProcess` has it.
        world: ranks.
        timeout: seconds that each has.
        more: environment variables.

    Raises:
        AssertionError: one doesn't end well; the message has all errors.
    """
    ranks = begin_ranks(command, world, **more)
    try:
        said = [rank.communicate(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors for _, errors in said)
    return [output for output, _ in said]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
