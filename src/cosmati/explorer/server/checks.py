"""Ledgers verified on request, each in a thread, so that no page waits for a long one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cosmati.errors import CosmatiError
from cosmati.explorer.run_view import RunView, read_run
from cosmati.explorer.server.site import FolderState, KeysOf, no_keys

WATCHED = ("run.json", "steps.jsonl", "evaluations.jsonl")
"""And each file of the ledger."""
_KEPT = 16


@dataclass(frozen=True)
class CheckedRun:
    """A run folder that was read, its ledger verified or not.

    Attributes:
        view: What was read, None where it can't be.
        problem: Why not.
        state: Of its files before they were read.
        ended: When, in seconds since 1970.
        seconds: That it took.
        is_opened: Whether it shows what is sealed, as far as a credential goes.
    """

    view: RunView | None
    problem: str
    state: FolderState
    ended: float
    seconds: float
    is_opened: bool = False


@dataclass
class LedgerChecks:
    """Runs that were checked lately, and those that are being checked now.

    Args:
        keys_of: gives the keys of sealed columns that are shown.
    """

    keys_of: KeysOf = no_keys
    _found: OrderedDict[Path, CheckedRun] = field(default_factory=OrderedDict)
    _going: dict[Path, threading.Event] = field(default_factory=dict)
    _began: dict[Path, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self, folder: Path, *, wait: float = 0.0, anew: bool = False, if_new: bool = True
    ) -> tuple[CheckedRun | None, float | None]:
        """Return what the last check found, and for how many seconds one has been going on, None where none is.

        A check begins where there was none since the folder changed.

        Args:
            folder: of the run.
            wait: for a check that is going on, in seconds at most.
            anew: check though nothing changed; tampering may leave no trace in time and size of a file.
            if_new: check what changed since the last check; else only what was never checked.
        """
        with self._lock:
            found, going = self._found.get(folder), self._going.get(folder)
            is_stale = found is None or (if_new and found.state != state_of_run(folder))
            if going is None and (anew or is_stale):
                going = self._going[folder] = threading.Event()
                self._began[folder] = time.monotonic()
                threading.Thread(target=self._check, args=(folder, going), daemon=True).start()
        if going is not None:
            going.wait(wait)
        with self._lock:
            began = self._began.get(folder)
            return self._found.get(folder), None if began is None else time.monotonic() - began

    def known(self, folder: Path) -> CheckedRun | None:
        """Return what the last check found, without beginning one."""
        with self._lock:
            return self._found.get(folder)

    def _check(self, folder: Path, done: threading.Event) -> None:
        state, began = state_of_run(folder), time.monotonic()
        view, problem, is_opened = None, "", False
        try:
            keys = self.keys_of(folder)
            view, is_opened = read_run(folder, keys=keys), keys is not None
        except (CosmatiError, OSError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001  (a thread has nobody to raise to, and the page must say it)
            problem = f"It can't be read: {type(error).__name__}: {error}. Restore it from a copy."
        found = CheckedRun(view, problem, state, time.time(), time.monotonic() - began, is_opened)
        with self._lock:
            self._found[folder] = found
            self._found.move_to_end(folder)
            while len(self._found) > _KEPT:
                self._found.popitem(last=False)
            self._going.pop(folder, None)
            self._began.pop(folder, None)
        done.set()


def state_of_run(folder: Path) -> FolderState:
    """Return name, time of change and size of each file that a check reads.

    The time is the kernel's own (ctime): whoever changes a file can set the other one back.
    """
    ledger = (str(Path(place, name)) for place, _, names in os.walk(folder / "ledger") for name in names)
    states = []
    for path in [*(str(folder / name) for name in WATCHED), *sorted(ledger)]:
        with contextlib.suppress(OSError):
            state = os.lstat(path)
            states.append((path, state.st_ctime_ns, state.st_size))
    return tuple(states)


def time_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, as people write it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
