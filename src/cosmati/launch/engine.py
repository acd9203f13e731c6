"""What carries an attempt of a job out: processes of this machine, or a scheduler that people have.

The supervisor knows jobs, retries and the watchdog; an engine knows how to begin processes, to look after them and to
end them. It's asked from one thread, about one attempt at a time, and keeps nothing that its handle doesn't say: a
supervisor that comes after a killed one asks with the handle that stands in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class AttemptPhase(StrEnum):
    """Where an attempt stands with its engine."""

    WAITING = "waiting"
    """Accepted; no process of it runs yet."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What every rank runs.

    Attributes:
        command: what comes after `python`: `script.py ARGUMENT...` or `-m MODULE ARGUMENT...`.
        folder: where it begins, absolute.
        python: the interpreter, absolute.
        environment: what is set besides the environment that the launcher was called in.
    """

    command: tuple[str, ...]
    folder: Path
    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """One attempt of a job, as an engine is to carry it out.

    Attributes:
        job: the job's id: letters, digits, hyphens.
        number: of the attempt, from 0.
        program: what every rank runs.
        ranks: how many.
        folder: for logs and notes (`rank-0.log`), absolute; the attempt's own, on a disk that all its machines share.
        bad: names of places (`NODE` or `NODE/LOCAL RANK`) that the attempt is to do without.
        max_seconds: that it may run; None without an end. The supervisor sees to it; a scheduler may want to know.
        settings: the engine's own, by name: partition, image, account.
        tensor_parallel: T, as far as it's known: fewer ranks than asked for are a multiple of it, or one.
    """

    job: str
    number: int
    program: RankProgram
    ranks: int
    folder: Path
    bad: tuple[str, ...] = ()
    max_seconds: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStanding:
    """What an engine says of an attempt.

    Attributes:
        phase: where it stands.
        status: exit status of the whole, once it has ended: 0 where every rank ended well, minus the signal where one
            ended it; None where nobody knows.
        reason: why it ended badly, or what it waits for, in words.
        place: the place (`NODE` or `NODE/LOCAL RANK`) that failed first, where that's known.
        own_fault: it ended badly by itself: an error that the program raised, no lost machine and no signal.
        is_final: that error would come again at every try.
    """

    phase: AttemptPhase
    status: int | None = None
    reason: str = ""
    place: str = ""
    own_fault: bool = False
    is_final: bool = False


class Engine(Protocol):
    """Carries attempts out.

    Each rank's process has the environment of torchrun (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...), is run by
    `cosmati.launch.worker`, and writes what it says to `rank-R.log` in the attempt's folder.

    Attributes:
        name: as `--on` has it.
        poll_seconds: between two looks.
    """

    name: str
    poll_seconds: float

    def submit(self, request: AttemptRequest) -> str:
        """Begin an attempt, and return its handle, which a later process can ask with too.

        Raises:
            RunError: it can't be begun; the message says why and what to do.
        """
        ...

    def poll(self, handle: str) -> AttemptStanding:
        """Return how an attempt stands; ENDED with status None for one that nobody knows any more."""
        ...

    def ask_to_stop(self, handle: str) -> None:
        """Let it end after the step in progress, with a checkpoint (SIGTERM to the first rank); returns at once."""
        ...

    def dump_stacks(self, handle: str) -> None:
        """Let every rank write its stacks to `rank-R.stacks` (SIGUSR1); nothing where that can't be done."""
        ...

    def cancel(self, handle: str) -> None:
        """End it now, all processes; returns when none is left, or the scheduler has promised that. Twice is fine."""
        ...

    def logs(self, handle: str) -> Sequence[Path]:
        """Return the files that hold what its ranks have said, in their order; they may not be there yet."""
        ...
