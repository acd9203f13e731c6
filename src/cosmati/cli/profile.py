"""`cosmati profile`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from cosmati.cli.files import load_recipe
from cosmati.cli.train import RecipeArgument, Settings
from cosmati.train.profiling import profiled


def profile(
    file: RecipeArgument,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="The folder to write the trace into.")] = Path("profile"),
    steps: Annotated[int, typer.Option(help="How many steps to measure, and to profile after that.")] = 10,
    warm_up: Annotated[int, typer.Option(help="Steps before.")] = 5,
) -> None:
    """Train a few steps of a recipe under PyTorch's profiler, and say what bounds a step.

    Nothing of the run is kept, and nothing is evaluated. Times by part are measured without the profiler. The trace
    opens in chrome://tracing and ui.perfetto.dev; on CUDA, a snapshot of memory for pytorch.org/memory_viz lies
    beside it.

    \b
    Examples:
      cosmati profile digits.py
      cosmati profile digits.py:big --steps 20 --out profiles/big
    """  # noqa: D301
    recipe = load_recipe(file, settings or [])
    has_ledger = recipe.policy is not None if recipe.config.ledger is None else recipe.config.ledger
    with TemporaryDirectory(prefix="cosmati-profile-") as aside:
        folder = Path(aside) / "run" if has_ledger else None  # It's a part of the step, and has to lie somewhere.
        config = dataclasses.replace(
            recipe.config, run_folder=folder, evaluate_every=None, checkpoint_every=None, checkpoint_to=""
        )
        recipe = dataclasses.replace(recipe, config=config, evaluation=None)
        found = profiled(lambda observers: recipe.trainer(observers=observers), out, warm_up=warm_up, num_steps=steps)
    typer.echo(str(found))
    for path in found.files:
        typer.echo(f"Wrote {path}")
    if found.device_seconds is None:
        typer.echo("There's no memory snapshot: PyTorch takes one on CUDA only.")
