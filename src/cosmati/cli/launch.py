"""`cosmati launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import STOPPED
from cosmati.cli.runs import QueueOption, named_values, seconds_of, span
from cosmati.launch.asking import asked_for
from cosmati.launch.commands import begin_asked, stop, wait
from cosmati.launch.engines import dry_run
from cosmati.launch.job import LaunchedJob
from cosmati.launch.states import LaunchState
from cosmati.progress import ProgressDisplay


def launch(  # noqa: PLR0913, PLR0917  (each an option)
    file: Annotated[
        str, typer.Argument(metavar="SCRIPT|FILE[:FUNCTION]", help="A script, or a file with a function recipe().")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="The script's; {job} is the job's id.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that train it, as many as divide V.")] = 1,
    priority: Annotated[int, typer.Option(help="Higher ones start first, among equals the older one.")] = 0,
    max_duration: Annotated[
        str, typer.Option(metavar="TIME", help="Stop it after so long: 90s, 30m, 8h, 2d. It can be resumed.")
    ] = "",
    retries: Annotated[int, typer.Option(help="Failures in a row (one that gets further is the first again).")] = 5,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a recipe's setting.")
    ] = None,
    run_folder: Annotated[Path | None, typer.Option(help="Where a recipe's run goes; else runs/ID.")] = None,
    on: Annotated[
        str,
        typer.Option(help="What carries it out: local, slurm; with --dry-run also kubernetes, skypilot, dstack."),
    ] = "local",
    engine_settings: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME=VALUE", help="A setting of what carries it out.")
    ] = None,
    queue: QueueOption = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show what --on would be given, and begin nothing.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Say its id and leave it to itself.")] = False,
) -> None:
    """Begin a job that survives its machines: what is killed, hangs or fails goes on from its checkpoint.

    FILE is a script, or a recipe that `cosmati train` would train; a script keeps its run by RunConfig(run_folder=...).
    The job has this shell's environment, and goes on when the terminal is closed. Ctrl-C stops it after the step in
    progress, with a checkpoint, which is no failure: `cosmati resume ID` goes on. A second Ctrl-C leaves it to itself.

    \b
    PENDING > QUEUED > STARTING > RUNNING > COMPLETED, or FAILED, or TERMINATING > STOPPED
    A failure leads back to PENDING, up to --retries times in a row; one that got further is the first again.

    \b
    Examples:
      cosmati launch digits.py --ranks 2
      cosmati launch digits.py:big --ranks 4 --run-folder runs/big --set config.num_microbatches=4 --detach
      cosmati launch digits.py --ranks 4 --on slurm --with nodes=1-2 --with partition=gpu
      cosmati launch gpt.py --ranks 16 --on kubernetes --with image=me/gpt:1 --with volume=runs --dry-run > gpt.yaml
      cosmati launch train.py --ranks 2 --max-duration 8h --retries 10 -- --lr 3e-4 --out runs/{job}
    """  # noqa: D301
    asked = asked_for(
        file,
        *(arguments or []),
        ranks=ranks,
        priority=priority,
        max_seconds=seconds_of(max_duration) if max_duration else None,
        retries=retries,
        settings=settings or [],
        run_folder=run_folder,
        engine=on,
        engine_settings=named_values("--with", engine_settings),
    )
    if is_dry:
        typer.echo(dry_run(asked), nl=False)
        return
    job = begin_asked(asked, queue)
    typer.echo(job.id)
    if not detach:
        follow(job, queue)


def follow(job: LaunchedJob, queue: Path | None) -> None:
    """Show a job until it has ended; Ctrl-C stops it."""
    with ProgressDisplay(job.id) as progress:
        try:
            job = wait(job.id, lambda now: _show(progress, now), queue)
        except KeyboardInterrupt:
            stop(job.id, queue)
            typer.echo("Stopping after the step in progress. Ctrl-C again leaves it to itself.", err=True)
            try:
                job = wait(job.id, lambda now: _show(progress, now), queue)
            except KeyboardInterrupt:
                typer.echo(f"{job.id} ends by itself. See when it has: cosmati show {job.id}", err=True)
                sys.exit(STOPPED)
    typer.echo(f"{job.id}: {job.state} after {span(job.seconds)}{': ' + job.reason if job.reason else ''}")
    if job.run_folder:
        typer.echo(f"Kept in {job.run_folder}")
    if job.state is LaunchState.FAILED:
        typer.echo(f"See what it said: cosmati logs {job.id}", err=True)
        sys.exit(1)
    if job.state is LaunchState.STOPPED:
        typer.echo(f"Go on: cosmati resume {job.id}")
        sys.exit(STOPPED)


def _show(progress: ProgressDisplay, job: LaunchedJob) -> None:
    share = None if job.step is None or not job.num_steps else job.step / job.num_steps
    step = "" if job.step is None else f"  step {job.step}"
    progress.update(share, f"{job.state}{step}{'  ' + job.reason if job.reason else ''}")
