"""`cosmati track`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.integrations import TRACKERS, track_run, tracker_of

TRACKER_HELP = f"NAME or NAME:setting=value,...: {', '.join(TRACKERS)}."


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help=TRACKER_HELP)],
) -> None:
    """Send a run to a tracker after the fact: losses, what monitors measured, metrics, checkpoints' digests.

    Each start of the run is a run of its own there, in one group; one that a restart has superseded says so. The same
    command again sends only what is new; TensorBoard and MLflow, which keep the same line once, are sent all of it.

    \b
    tensorboard  folder=tensorboard
    wandb        project=cosmati, entity=, mode=online, folder=.
    mlflow       uri=sqlite:///mlflow.db, experiment=cosmati
    trackio      project=cosmati, space=
    comet        project=cosmati, workspace=, offline_folder=

    \b
    Examples:
      cosmati track runs/digits --to tensorboard
      cosmati track runs/digits --to wandb:project=digits,mode=offline
    """  # noqa: D301
    tracker = tracker_of(to)
    for one in track_run(run, tracker):
        lines = "1 line" if one.num_lines == 1 else f"{one.num_lines} lines"
        typer.echo(f"Attempt {one.attempt}: {lines}{f' ({one.note})' if one.note else ''}")
    typer.echo(f"Stored by {tracker.label}: {tracker.where}")
