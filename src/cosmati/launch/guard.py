"""Processes that end with the one that began them, and numbers of processes that name one process only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends; at once where it has already.

    Linux alone can do that. Elsewhere a process that has lost its parent is fenced off by the next attempt, and ends at
    its next collective.

    Args:
        parent: the number of the process that has begun this one. Its thread that did must live as long as it does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def mark_of(pid: int) -> str:
    """Return what tells a process from a later one of the same number; empty where it has ended."""
    fields = _fields_of(pid)
    if not fields:
        # No /proc: the number alone has to do.
        return "" if Path("/proc/self").exists() else str(pid) * _is_there(pid)
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def end_of(mark: str) -> int | None:
    """Return how the process that a mark names has ended, minus the signal where one ended it.

    Returns:
        None where it's there, and where its parent has seen its end, which the kernel forgets then.
    """
    pid, _, started = mark.partition(":")
    fields = _fields_of(int(pid)) if started else []
    is_own = bool(fields) and fields[19] == started and fields[0] in "ZX"
    return os.waitstatus_to_exitcode(int(fields[-1])) if is_own else None


def kill_group(mark: str) -> None:
    """Kill what is left of the group of processes that one has led, which has ended in this process's time.

    A group keeps its leader's number from being given again.
    """
    pid, _, started = mark.partition(":")
    fields = _fields_of(int(pid)) if started else []
    if started and (not fields or fields[19] == started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return a signal's name; those that have none have a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fields_of(pid: int) -> list[str]:
    """Return what Linux tells of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def send(mark: str, number: int) -> bool:
    """Send a signal to the process that a mark names; return whether it's there."""
    pid = int(mark.partition(":")[0] or 0)
    if not pid or mark_of(pid) != mark:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
