"""What is asked of the launcher, checked before it's put into the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.engines import check_local
from cosmati.launch.job import JobRequest
from cosmati.launch.program import program_of

_MOST_PRIORITY = 10**9 - 1


def asked_for(
    file: str,
    *arguments: str,
    ranks: int = 1,
    priority: int = 0,
    max_seconds: float | None = None,
    retries: int = 5,
    settings: Sequence[str] = (),
    run_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    name: str = "",
    engine: str = "local",
    engine_settings: Mapping[str, str] | None = None,
) -> JobRequest:
    """Return what `launch` would put into the queue, for `begin_asked` or `dry_run`; its arguments are `launch`'s.

    Raises:
        RunError: it can't be launched as asked; the message says why.
    """
    if engine == "local":
        check_local(engine_settings or {})
    program = program_of(file, arguments, settings=settings, run_folder=run_folder, environment=environment)
    name = name or Path(file.partition(":")[0]).stem
    return checked(
        JobRequest(
            name=name,
            program=program,
            ranks=ranks,
            priority=priority,
            max_seconds=max_seconds,
            retries=retries,
            engine=engine,
            settings=dict(engine_settings or {}),
        )
    )


def checked(asked: JobRequest) -> JobRequest:
    """Return what is asked for.

    Raises:
        RunError: it can't be.
    """
    if asked.ranks < 1:
        raise RunError(f"A job has one rank at least, and {asked.ranks} were asked for. Give their number: --ranks 2.")
    if asked.retries < 0 or (asked.max_seconds is not None and asked.max_seconds <= 0):
        raise RunError("Retries can't be fewer than 0, and a duration is longer than 0 s. Leave out what has no end.")
    if abs(asked.priority) > _MOST_PRIORITY:
        raise RunError(f"A priority is a number of at most nine digits, and {asked.priority} was given: --priority 10.")
    return asked
