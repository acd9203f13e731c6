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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        # No /proc: the number alone has to do.
        return "" if Path("/proc/self").exists() else str(pid) * _is_there(pid)
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"


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
