"""What the processes of an attempt leave in its folder for the supervisor, who may be a later one.

rank-R.process    the mark of the process that is rank R        agent-K.process    of agent K
rank-R.log        what it says                                  rank-R.stacks      its stacks, where the watchdog asked
rank-R.end        how it has ended badly, by an error of its own
run               which run it trains (see `cosmati.records.launched`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmati.launch.guard import mark_of
from cosmati.storage.atomic import replace_file

PLACE_VARIABLE = "COSMATI_PLACE"
"""Tells a rank the name of its place."""
_LAST_BYTES, _LONGEST_LINE = 4096, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEnd:
    """How a rank has ended by an error of its own; one that a signal has ended leaves none.

    Attributes:
        status: its exit status.
        error: in one line.
        lost_others: it's an error of talking to other ranks, so that the first fault is another's.
        place: where it ran.
        is_final: the run was refused for what it is, and would be again.
    """

    status: int
    error: str
    lost_others: bool
    place: str
    is_final: bool = False


def note_process(folder: Path, name: str) -> None:
    """Write down this process as `rank-R` or `agent-K`."""
    replace_file(folder / f"{name}.process", mark_of(os.getpid()).encode())


def processes_in(folder: Path, kind: str) -> Iterator[str]:
    """Yield the marks of the processes of a kind (`rank`, `agent`), in order of their numbers."""
    found = folder.glob(f"{kind}-*.process") if folder.is_dir() else iter(())
    for path in sorted(found, key=lambda path: int(path.stem.partition("-")[2])):
        yield path.read_text()


def note_end(folder: Path, rank: int, end: BadEnd) -> None:
    """Write down how a rank has ended."""
    replace_file(folder / f"rank-{rank}.end", json.dumps(asdict(end)).encode())


def ends_in(folder: Path) -> dict[int, BadEnd]:
    """Return how ranks have ended by errors of their own."""
    paths = folder.glob("rank-*.end") if folder.is_dir() else iter(())
    return {int(path.stem.partition("-")[2]): BadEnd(**json.loads(path.read_text())) for path in paths}


def log_of(folder: Path, rank: int) -> Path:
    """Return where a rank says what it says."""
    return folder / f"rank-{rank}.log"


def last_line(log: Path) -> str:
    """Return the last line of a log that isn't blank, empty where there is none; no more is read than its end."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        said = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:_LONGEST_LINE] for line in reversed(said) if line.strip()), "")


def stacks_of(folder: Path, rank: int) -> Path:
    """Return where a rank's stacks are."""
    return folder / f"rank-{rank}.stacks"
