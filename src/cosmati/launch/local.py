"""Processes of this machine: the supervisor's own children, through torchelastic's agents."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it isn't named among what's exported

from cosmati.errors import RunError
from cosmati.launch.agent import run_agent
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding
from cosmati.launch.guard import end_of, kill_group, send, signal_name
from cosmati.launch.notes import ends_in, last_line, log_of, processes_in

_END_SECONDS = 10.0
_UNSEEN_SECONDS = 3.0
_UNTOLD_SECONDS = 60.0
"""An agent that has seen a bad end tells of it long before."""
_CONTEXT = multiprocessing.get_context("fork")


class LocalEngine:
    """Carries attempts out on this machine. Its processes end when the one that begins them does.

    A handle is the attempt's folder. Settings: `agents`, over which the ranks are spread (1), as hosts would have them.
    """

    name = "local"
    poll_seconds = 0.1

    def __init__(self) -> None:
        self._running: dict[str, _LocalAttempt] = {}

    def submit(self, request: AttemptRequest) -> str:
        """Begin an attempt.

        Raises:
            RunError: the machine refuses.
        """
        request.folder.mkdir(parents=True, exist_ok=True)
        handle = str(request.folder)
        try:
            self._running[handle] = _LocalAttempt(request)
        except (OSError, RuntimeError) as error:
            msg = f"The ranks of {request.job} can't be begun: {error}. See what the machine lacks, and resume the job."
            raise RunError(msg) from error
        return handle

    def poll(self, handle: str) -> AttemptStanding:
        """Return how an attempt stands."""
        attempt = self._running.get(handle)
        if attempt is None:
            return AttemptStanding(phase=AttemptPhase.ENDED, reason="nothing of it runs any more")
        return attempt.standing()

    def ask_to_stop(self, handle: str) -> None:
        """Let the first rank stop after its step, which stops them all."""
        marks = list(processes_in(Path(handle), "rank"))
        if not marks:
            self.cancel(handle)  # nothing was begun that could be lost
        for mark in marks[:1]:
            send(mark, signal.SIGTERM)

    def dump_stacks(self, handle: str) -> None:
        """Let every rank write its stacks."""
        for mark in processes_in(Path(handle), "rank"):
            send(mark, signal.SIGUSR1)

    def cancel(self, handle: str) -> None:
        """Kill all processes of an attempt, also one that an earlier supervisor has begun; wait until they're gone.

        Raises:
            RunError: the kernel doesn't let one go, as where a disk hangs.
        """
        attempt = self._running.pop(handle, None)
        # What a program that has ended well leaves running, it leaves running.
        leaves_none = attempt is not None and attempt.standing().status != 0
        if attempt is not None:
            attempt.kill()
        until = time.monotonic() + _END_SECONDS
        marks = [mark for kind in ("agent", "rank") for mark in processes_in(Path(handle), kind)]
        while left := [mark for mark in marks if send(mark, signal.SIGKILL)]:
            if time.monotonic() > until:
                msg = f"Process {left[0].partition(':')[0]} doesn't end, though killed: a disk or a device hangs."
                raise RunError(msg)
            time.sleep(0.01)
        for mark in processes_in(Path(handle), "rank") if leaves_none else ():
            kill_group(mark)

    def logs(self, handle: str) -> Sequence[Path]:
        """Return the logs of an attempt's ranks."""
        number = len(list(Path(handle).glob("rank-*.log")))
        return [log_of(Path(handle), rank) for rank in range(number)]


class _LocalAttempt:
    """The agents of one attempt, and the store where they meet."""

    def __init__(self, request: AttemptRequest) -> None:
        self._folder, self._ranks, self._ended_since = request.folder, request.ranks, math.inf
        self._places = places = places_of(request.ranks, request.bad)
        num_nodes = int(request.settings.get("agents", "1"))
        num_nodes = max(n for n in range(1, num_nodes + 1) if request.ranks % n == 0)
        each = request.ranks // num_nodes
        run_id = f"{request.job}-{request.number}"
        self._agents: list[tuple[ForkProcess, Connection]] = []
        # Before there's a store, whose thread forks would do without.
        for node in range(num_nodes):
            own, theirs = multiprocessing.Pipe()
            given = (places[node * each : (node + 1) * each], run_id, str(request.folder), request.program.command)
            process = _CONTEXT.Process(target=_begin_agent, args=(theirs, os.getpid(), node, num_nodes, request, given))
            process.start()
            theirs.close()
            self._agents.append((process, own))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for _, connection in self._agents:
            with contextlib.suppress(ConnectionError):  # it was killed meanwhile, which `standing` says
                connection.send(self._store.port)

    def standing(self) -> AttemptStanding:
        """Return how it stands: one agent that ends badly ends it."""
        statuses = [process.exitcode for process, _ in self._agents]
        if any(statuses):
            return self._failure()
        if None not in statuses:
            return AttemptStanding(phase=AttemptPhase.ENDED, status=0)
        return self._ended_unseen() or AttemptStanding(phase=AttemptPhase.RUNNING)

    def _ended_unseen(self) -> AttemptStanding | None:
        """Return how it has ended where the agents don't see that.

        A child that a rank has forked and that outlives it keeps the pipe open by whose end they'd see it; and a rank
        that calls `os._exit(0)` owes them its result.
        """
        marks = list(processes_in(self._folder, "rank"))
        ends = [end_of(mark) for mark in marks]
        bad = next((rank for rank, end in enumerate(ends) if end), None)
        if bad is None and (len(marks) < self._ranks or any(send(mark, 0) for mark in marks)):
            self._ended_since = math.inf
            return None
        self._ended_since = min(self._ended_since, time.monotonic())
        seconds = _UNSEEN_SECONDS if bad is not None or None not in ends else _UNTOLD_SECONDS
        if time.monotonic() - self._ended_since < seconds or (bad is None and ends_in(self._folder)):
            return None
        if bad is None:
            return AttemptStanding(phase=AttemptPhase.ENDED, status=0)
        return self._end_of(self._places[bad], ends[bad] or 1)

    def kill(self) -> None:
        """Kill the agents, and their ranks with them."""
        for process, _ in self._agents:
            process.kill()
        for process, connection in self._agents:
            process.join()
            connection.close()

    def _failure(self) -> AttemptStanding:
        told: list[tuple[str, int]] = []
        for process, connection in self._agents:
            if process.exitcode and process.exitcode < 0:
                reason = f"an agent was ended by {signal_name(-process.exitcode)}"
                return AttemptStanding(phase=AttemptPhase.ENDED, status=process.exitcode, reason=reason)
            with contextlib.suppress(EOFError, OSError):  # it has ended before it had anything to tell
                if process.exitcode and not connection.closed and connection.poll():
                    told.append(connection.recv())
        place, status = next(((place, status) for place, status in told if status < 0), (told or [("", 1)])[0])
        return self._end_of(place, status)

    def _end_of(self, place: str, status: int) -> AttemptStanding:
        ends = list(ends_in(self._folder).values())
        first = min(ends, key=lambda end: (end.lost_others, not end.is_final), default=None)
        own_fault = is_final = False
        if status < 0:
            reason = f"the rank at {place} was ended by {signal_name(-status)}"
        elif first is None:
            own_fault = bool(place)
            logs = (self._folder / f"agent-{node}.log" for node in range(len(self._agents)))
            why = next(filter(None, map(last_line, logs)), "it said nothing")
            early = f"an agent failed before its ranks began: {why}"
            reason = f"the rank at {place} ended with {status}" if place else early
        elif first.lost_others:
            place, reason = "", f"a rank was lost: {first.error}"
        else:
            status, reason, place, own_fault, is_final = first.status, first.error, first.place, True, first.is_final
        ended = AttemptStanding(phase=AttemptPhase.ENDED, status=status, reason=reason, place=place)
        return replace(ended, own_fault=own_fault, is_final=is_final)


def places_of(ranks: int, bad: Sequence[str]) -> list[str]:
    """Return the places of so many ranks on this machine: the first ones that aren't bad."""
    host = socket.gethostname()
    names = (f"{host}/{number}" for number in range(ranks + len(bad)))
    return [name for name in names if name not in bad][:ranks]


def _begin_agent(
    connection: Connection, parent: int, node: int, num_nodes: int, request: AttemptRequest, given: tuple[object, ...]
) -> None:
    log = os.open(request.folder / f"agent-{node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request.program.folder)
    os.environ.update(request.program.environment)
    run_agent(connection, parent, node, num_nodes, *given)  # type: ignore[arg-type]
