"""Arrays of a study that Slurm has: found by the folder in their comment, and cancelled."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.slurm import ask_slurm

STOP_FILE = "stop"
"""In an array's folder: its tasks are to end, and none goes back to the queue."""


def arrays_of(parent: Path) -> dict[str, Path]:
    """Return the arrays of a study that Slurm still has: their folders, by the job's number.

    Args:
        parent: of the arrays' folders.

    Raises:
        RunError: it doesn't say.
    """
    listed = ask_slurm("squeue", "--noheader", "--me", "--format=%F %k").splitlines()
    jobs = {tuple(line.partition(" ")) for line in listed}
    return {job: folder for job, _, comment in jobs if (folder := Path(comment.strip())).parent == parent}


def cancel(job: str, folder: Path) -> None:
    """Cancel an array, unless it has ended meanwhile.

    Raises:
        RunError: it can't be.
    """
    with contextlib.suppress(OSError):  # a disk that is lost or full keeps nothing from being cancelled
        (folder / STOP_FILE).touch()
    try:
        ask_slurm("scancel", job)
    except RunError as error:
        if "Invalid job id" not in str(error):
            msg = f"Slurm's job {job} goes on: {error} Then cancel it, or begin the study again: scancel {job}"
            raise RunError(msg) from error


def cancel_all(known: Mapping[str, Path], parent: Path | None) -> None:
    """Cancel these arrays, and all that Slurm has of a study where its folder of arrays is given.

    Those may be of a command before, which was killed, or submitted by this one while it was interrupted.

    Raises:
        RunError: something can't be cancelled; everything else is.
    """
    with contextlib.ExitStack() as left:
        for job, folder in known.items():
            left.callback(cancel, job, folder)
        if parent:
            for job, folder in arrays_of(parent).items() - known.items():
                left.callback(cancel, job, folder)


def tasks_of(arrays: Collection[str]) -> set[tuple[str, int]]:
    """Return the tasks of these jobs, by job and number, that Slurm still has.

    Raises:
        RunError: it doesn't say.
    """
    if not arrays:
        return set()
    listed = ask_slurm("squeue", "--noheader", "--me", "--array", "--format=%F %K")
    tasks = (line.split() for line in listed.splitlines())
    return {(job, int(number)) for job, number in tasks if job in arrays}
