"""One rank: runs the job's program as `python` would, ends with its agent, and says how it has ended.

An engine's agent calls `run_program` in a process of its own, or runs this module: `python -m cosmati.launch.worker
FOLDER COMMAND...`.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import faulthandler
import logging
import multiprocessing.util
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path

from cosmati.errors import ChangedRunError, CosmatiError
from cosmati.launch.guard import die_with_parent
from cosmati.launch.notes import PLACE_VARIABLE, BadEnd, last_line, log_of, note_end, note_process, stacks_of
from cosmati.records.launched import NOTE_VARIABLE

_LOST_OTHERS = re.compile(
    r"\b(gloo|nccl\w*|connections?|(tcp)?store|sockets?|timeouts?|timed out|peers?)\b", re.IGNORECASE
)
"""Words of errors that a rank has because another one has ended. Gloo's are plain RuntimeErrors."""
_LOST_SECONDS = 0.5
_THREADS_SECONDS = 30.0
"""That a rank which has failed waits for its threads."""


def run_program(folder: str, command: Sequence[str], parent: int) -> None:
    """Run a program as this process's rank; return where it ends well, else end the process with its status.

    Args:
        folder: of the attempt.
        command: what comes after `python` on a command line.
        parent: the process that has begun this one.
    """
    die_with_parent(parent)
    rank, place = int(os.environ["RANK"]), os.environ.get(PLACE_VARIABLE, "")
    os.environ[NOTE_VARIABLE] = str(Path(folder) / "run")
    _speak_into(log_of(Path(folder), rank))
    stacks = stacks_of(Path(folder), rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    note_process(Path(folder), f"rank-{rank}")
    status, error, lost_others, is_final = 0, "", False, False
    try:
        _run_as_python_does(command)
    except SystemExit as left:
        status, error = _status_of(left, log_of(Path(folder), rank))
        is_final = _comes_again(left)
    except BaseException as raised:  # noqa: BLE001  (told, and the process ends)
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        status, lost_others, is_final = 1, is_of_others(raised), _comes_again(raised)
    # Whoever asks a rank to stop that has just ended has what he wants.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if status:
        with contextlib.suppress(OSError):  # a full disk: the status has to do
            end = BadEnd(status=status, error=error, lost_others=lost_others, place=place, is_final=is_final)
            note_end(Path(folder), rank, end)
    _end_as_python_does(status)
    if status:
        if lost_others:
            # The agent tells of the first rank that it sees ended: let it see the one that was lost.
            time.sleep(_LOST_SECONDS)
        os._exit(status)


def _speak_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run_as_python_does(command: Sequence[str]) -> None:
    from cosmati.core.rng import seed_by_chance

    _forget_what_was_registered()
    seed_by_chance()
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).absolute().parent))
        runpy.run_path(command[0], run_name="__main__")


def _forget_what_was_registered() -> None:
    """Leave what the process that this one was forked from has registered for its end to that one.

    What modules register as they're first imported, once a process, is registered for this one.
    """
    atexit._clear()  # noqa: SLF001
    atexit.register(logging.shutdown)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        one.detach()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # noqa: SLF001


def _end_as_python_does(status: int) -> None:
    """Wait for threads, and then run what was registered: a forked process does neither before Python 3.13."""
    if status:
        # Others wait for a rank that has failed, and a thread of its own may wait for ever.
        threading.Thread(target=_end_later, args=(status,), daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()


def _end_later(status: int) -> None:
    time.sleep(_THREADS_SECONDS)
    os._exit(status)


def _status_of(end: SystemExit, log: Path) -> tuple[int, str]:
    """Return a program's exit status, and why it isn't 0: what it has said last."""
    if end.code is None or isinstance(end.code, int):
        sys.stderr.flush()
        status = (end.code or 0) & 0xFF  # of which the kernel keeps a byte
        return status, (status and last_line(log)) or f"exit status {status}"
    sys.stderr.write(f"{end.code}\n")
    return 1, str(end.code).partition("\n")[0]


def _comes_again(error: BaseException) -> bool:
    """Return whether a run was refused for what it is, by an error or by what led to it: a command exits for one."""
    led: BaseException | None = error
    while led is not None and not isinstance(led, ChangedRunError):
        led = led.__cause__ or led.__context__
    return led is not None


def is_of_others(error: BaseException, num_ranks: int | None = None) -> bool:
    """Return whether an error is one that a rank has because another one has ended.

    Args:
        error: that it has.
        num_ranks: of its process group; None where the environment says.
    """
    from torch.distributed import DistError

    if num_ranks == 1 or (num_ranks is None and os.environ.get("WORLD_SIZE") == "1"):
        return False  # there are none
    if isinstance(error, CosmatiError):
        return False  # which says what it is
    if isinstance(error, DistError | ConnectionError | TimeoutError):
        return True
    if not isinstance(error, RuntimeError) or _LOST_OTHERS.search(str(error)) is None:
        return False
    led = error.__cause__ or error.__context__
    return not _is_raised_by_own_code(error) or (led is not None and is_of_others(led, num_ranks))


def _is_raised_by_own_code(error: BaseException) -> bool:
    """Return whether a `raise` of the program's own is where an error comes from: PyTorch's kernels have none."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        return False
    return dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"


if __name__ == "__main__":
    run_program(sys.argv[1], sys.argv[2:], os.getppid())
