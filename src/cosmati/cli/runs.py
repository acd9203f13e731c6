"""`cosmati runs`, `show`, `logs`, `stop`, `resume`, `clone` and `delete`: jobs that `cosmati launch` has begun."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import STOPPED
from cosmati.errors import RunError
from cosmati.launch import commands
from cosmati.launch.job import JobAttempt, LaunchedJob, folder_of
from cosmati.launch.program import of_job
from cosmati.launch.states import ENDED, LaunchState
from cosmati.launch.supervisor import is_supervised

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="A job's, as `cosmati runs` lists it.")]
QueueOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Of the queue; else $COSMATI_QUEUE, or one of this user's own.")
]


def runs(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state.")] = None,
    slots: Annotated[
        int | None, typer.Option(help="From now on so many ranks may run at once on this machine; else its devices.")
    ] = None,
    queue: QueueOption = None,
) -> None:
    """List jobs: where each stands, how far it is, when it's likely to end, how often it was resumed.

    \b
    Examples:
      cosmati runs
      cosmati runs --state running --state queued
      cosmati runs --slots 2
    """  # noqa: D301
    if slots is not None:
        commands.set_slots(slots, queue)
    wanted = {_state_of(one) for one in state or []} or set(LaunchState)
    jobs = [job for job in commands.runs(queue) if job.state in wanted]
    for other in commands.of_other_releases(queue):
        typer.echo(f"{other} is another release's, and can't be read. Take it out: cosmati delete {other}", err=True)
    if not jobs:
        typer.echo("No jobs. Begin one: cosmati launch FILE")
        return
    home = commands.home_of(queue).absolute()
    head = ("id", "state", "ranks", "priority", "step", "time", "left", "resumed", "")
    typer.echo(_table(head, [_line(home, job, queue) for job in jobs]))


def show(job_id: JobArgument, queue: QueueOption = None) -> None:
    """Show a job: what was asked for, how it stands, and each of its attempts.

    \b
    Example:
      cosmati show digits-1
    """  # noqa: D301
    job, attempts, bad = commands.show(job_id, queue)
    home, asked = commands.home_of(queue).absolute(), job.request
    last = attempts[-1] if attempts else None
    whole = f"replicas of {job.tensor_parallel} ranks, whose" if job.tensor_parallel > 1 else "the"
    idle = f", {last.idle} idle ({whole} number has to divide V = {job.num_microbatches})" if last and last.idle else ""
    left = f", about {span(job.seconds_left)} left" if job.seconds_left is not None and job.state not in ENDED else ""
    told = {
        "state": f"{job.state}{_notes(home, job)}",
        "program": " ".join(of_job(asked.program, job.id).command),
        "ranks": f"{last.ranks if last else asked.ranks} of {asked.ranks}{idle}",
        "step": f"{_steps(job)}{left}",
        "time": span(job.seconds) + (f" of {span(asked.max_seconds)}" if asked.max_seconds else ""),
        "run": job.run_folder or "not known",
        "logs": str(folder_of(home, job.id)),
        "priority": str(asked.priority),
        "retries": f"{asked.retries} failures in a row; {job.failures} now",
    }
    for place, reason in bad.items():
        told[f"without {place}"] = reason
    width = max(map(len, told))
    for name, text in told.items():
        typer.echo(f"{name:{width}}  {text}")
    if attempts:
        head = ("attempt", "began", "time", "ranks", "steps", "outcome", "")
        typer.echo("\n" + _table(head, [_attempt_line(one) for one in attempts]))


def logs(
    job_id: JobArgument,
    rank: Annotated[int, typer.Option(help="Whose words.")] = 0,
    attempt: Annotated[int | None, typer.Option(help="Of this attempt; else the latest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    queue: QueueOption = None,
) -> None:
    """Print what a rank of a job has said.

    \b
    Examples:
      cosmati logs digits-1 --follow
      cosmati logs digits-1 --rank 1 --attempt 0
    """  # noqa: D301
    try:
        for piece in commands.logs(job_id, rank=rank, attempt=attempt, follow=follow, queue=queue):
            typer.echo(piece, nl=False)
    except KeyboardInterrupt:  # of who looks on, which ends nothing
        raise typer.Exit(STOPPED) from None


def stop(job_id: JobArgument, queue: QueueOption = None) -> None:
    """Stop a job after the step in progress, with a checkpoint; `cosmati resume` goes on from there.

    \b
    Example:
      cosmati stop digits-1
    """  # noqa: D301
    commands.stop(job_id, queue)
    typer.echo(f"{job_id} was asked to stop. See when it has: cosmati show {job_id}")


def resume(
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A job's, as `cosmati runs` lists it.")] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="All that have lost their supervisor, as when the machine was started anew.")
    ] = False,
    max_duration: Annotated[
        str, typer.Option(metavar="TIME", help="Another duration, of all attempts together: 90s, 30m, 8h, 2d.")
    ] = "",
    queue: QueueOption = None,
) -> None:
    """Go on with a job that was stopped, has failed, or has lost its supervisor.

    \b
    Examples:
      cosmati resume digits-1
      cosmati resume digits-1 --max-duration 16h
      cosmati resume --lost
    """  # noqa: D301
    if lost == (job_id is not None):
        raise RunError("Which job is to go on? Name one (cosmati resume ID), or take all that are lost: --lost.")
    seconds = seconds_of(max_duration) if max_duration else None
    if seconds is not None and job_id is None:
        raise RunError("--max-duration is of one job. Name it: cosmati resume ID --max-duration 8h.")
    jobs = commands.resume_lost(queue) if job_id is None else [commands.resume(job_id, queue, max_seconds=seconds)]
    for job in jobs:
        typer.echo(f"{job.id} goes on. Follow it: cosmati logs {job.id} --follow")
    if not jobs:
        typer.echo("No job is lost.")


def clone(
    job_id: JobArgument,
    ranks: Annotated[int | None, typer.Option(help="Another number of processes.")] = None,
    priority: Annotated[int | None, typer.Option(help="Another priority.")] = None,
    max_duration: Annotated[str, typer.Option(metavar="TIME", help="Another duration: 90s, 30m, 8h, 2d.")] = "",
    queue: QueueOption = None,
) -> None:
    """Begin a new job that is asked for as another one was, from its first step.

    A recipe gets a run folder of its own. A script says itself where it trains: let it take {job} as an argument.

    \b
    Example:
      cosmati clone digits-1 --ranks 4
    """  # noqa: D301
    changes = {"ranks": ranks, "priority": priority, "max_seconds": seconds_of(max_duration) if max_duration else None}
    given = {name: value for name, value in changes.items() if value is not None}
    typer.echo(commands.clone(job_id, queue, **given).id)


def delete(job_id: JobArgument, queue: QueueOption = None) -> None:
    """Take a job that has ended out of the list, with its logs; its run stays, with checkpoints and ledger.

    \b
    Example:
      cosmati delete digits-1
    """  # noqa: D301
    commands.delete(job_id, queue)
    typer.echo(f"{job_id} is out of the list.")


def seconds_of(text: str) -> float:
    """Return a span such as `90s`, `30m`, `8h` or `2d` in seconds.

    Raises:
        RunError: it's none.
    """
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise RunError(f"{text!r} is no duration. Write a number and a unit: 90s, 30m, 8h or 2d.") from error
    if not 0 < seconds < float("inf"):
        raise RunError(f"{text!r} has no length. Give a longer one, or leave it out where there's no end.")
    return seconds


def named_values(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Return `NAME=VALUE` words as a mapping.

    Raises:
        RunError: one has no `=`.
    """
    for one in given or []:
        if not one.partition("=")[0] or "=" not in one:
            raise RunError(f"{option} {one}: write a name and a value, as in {option} NAME=VALUE.")
    return {name: value for name, _, value in (one.partition("=") for one in given or [])}


def span(seconds: float) -> str:
    """Return seconds in words that fit into a table."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _state_of(text: str) -> LaunchState:
    try:
        return LaunchState(text.upper())
    except ValueError as error:
        raise RunError(f"No job is ever {text!r}. The states are {', '.join(LaunchState)}.") from error


def _line(home: Path, job: LaunchedJob, queue: Path | None) -> tuple[str, ...]:
    _, attempts, _ = commands.show(job.id, queue)
    left = "" if job.state in ENDED or job.seconds_left is None else span(job.seconds_left)
    ranks = str(job.request.ranks)
    if attempts and attempts[-1].ranks != job.request.ranks:
        ranks = f"{attempts[-1].ranks}/{ranks}"
    resumed = str(max(0, len(attempts) - 1))
    note = _notes(home, job).removeprefix(": ")
    return (job.id, job.state, ranks, str(job.request.priority), _steps(job), span(job.seconds), left, resumed, note)


def _notes(home: Path, job: LaunchedJob) -> str:
    if job.state not in ENDED and not is_supervised(home, job.id):
        return f": has no supervisor just now; if that lasts: cosmati resume {job.id}"
    return f": {job.reason}" if job.reason else ""


def _steps(job: LaunchedJob) -> str:
    if job.step is None:
        return ""
    return f"{job.step}/{job.num_steps}" if job.num_steps is not None else str(job.step)


def _attempt_line(attempt: JobAttempt) -> tuple[str, ...]:
    began = datetime.fromtimestamp(attempt.started).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    steps = "" if attempt.last_step is None else f"{attempt.first_step} to {attempt.last_step}"
    place = f" ({attempt.place})" if attempt.place and attempt.place not in attempt.reason else ""
    outcome = attempt.outcome or "goes on"
    return (
        str(attempt.number),
        began,
        span(attempt.seconds),
        str(attempt.ranks),
        steps,
        outcome,
        attempt.reason + place,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)
