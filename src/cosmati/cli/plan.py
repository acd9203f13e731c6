"""`cosmati plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from cosmati.cli.files import load_recipe, under_policy
from cosmati.cli.plan_shown import show_plan
from cosmati.cli.train import FolderOption, PolicyRoot, PolicyVersion, RecipeArgument, Settings, SignedPolicy
from cosmati.errors import PlanError
from cosmati.planning.devices import Device, device_named, with_figures
from cosmati.planning.failures import FailureModel
from cosmati.planning.job import JobPlan, plan_job
from cosmati.planning.measuring import measure
from cosmati.recipes.recipe import Recipe, parse_setting
from cosmati.train.config import Sharding

_DEVICE_FIGURES = tuple(
    field.name for field in dataclasses.fields(Device) if field.name not in ("name", "title", "is_here")
)
_FAILURE_FIGURES = tuple(field.name for field in dataclasses.fields(FailureModel))
_FIGURES = ("efficiency", *_DEVICE_FIGURES, *_FAILURE_FIGURES)


def plan(  # noqa: PLR0913, PLR0917  (a command's options)
    file: RecipeArgument,
    settings: Settings = None,
    policy: SignedPolicy = None,
    policy_name: PolicyVersion = "main",
    policy_root: PolicyRoot = "",
    run_folder: FolderOption = None,
    ranks: Annotated[int | None, typer.Option(help="Plan what it needs on so many ranks, which divide V.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of each rank: h200, h100, a100-80gb, l4, cpu (this machine's).")
    ] = None,
    sharding: Annotated[
        Sharding | None,
        typer.Option(
            help="What is cut over the ranks: nothing, optimizer state, or parameters too; else the recipe's."
        ),
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of a rank: what the whole run would cost.")] = None,
    failures: Annotated[
        bool, typer.Option("--failures", help="Simulate nodes that fail, and say what is left of the time.")
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another figure for the device, the efficiency or the failures."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The needs as JSON: bytes, seconds.")] = False,
) -> None:
    """Show what a recipe would do and may promise, and what it would need on so many ranks, without training.

    A run keeps a ledger in its run folder only: give the one that `cosmati train` is to have. Nothing is written.

    With --ranks or --device it says what the run would need there: memory of a rank by part, bytes that it sends, time
    of a step, cost, whether it fits, and what to change where it doesn't. For that it runs one microbatch on this
    machine, a few times; weights and one microbatch have to fit here. Times are what these figures come to, and no
    measurement: products at a share of the device's peak (--assume efficiency=0.4), bytes at its bandwidth.

    Figures for --assume. Of the device: memory_gb, bf16_tflops, fp32_tflops, memory_gb_per_second,
    link_gb_per_second, network_gb_per_second, ranks_per_node. Of failures: node_mtbf_hours, restart_seconds,
    checkpoint_seconds, checkpoint_every_seconds, spares, repair_hours, days, num_runs, seed.

    \b
    Examples:
      cosmati plan digits.py
      cosmati plan digits.py --set config.num_microbatches=4 --run-folder runs/digits
      cosmati plan gpt.py --ranks 8 --device h200
      cosmati plan gpt.py --ranks 64 --device h100 --sharding full --price-per-hour 3
      cosmati plan gpt.py --ranks 512 --device h200 --failures --assume node_mtbf_hours=4000 --assume spares=2
      cosmati plan gpt.py --ranks 2 --device cpu --json
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    recipe = under_policy(load_recipe(file, settings or []), policy, policy_name, policy_root, run_folder)
    if ranks is None and device is None:
        if as_json or failures or assume or price_per_hour is not None or sharding is not None:
            raise PlanError("That's of a run on ranks of some device: say how many of which, --ranks 8 --device h200.")
        _say_plan(recipe, run_folder)
        return
    job = _job(
        recipe,
        1 if ranks is None else ranks,
        device or "cpu",
        sharding or recipe.config.sharding,
        price_per_hour,
        failures,
        assume or [],
    )
    if as_json:
        typer.echo(json.dumps(job.as_mapping(), indent=1))
    else:
        show_plan(job, recipe.name)


def _say_plan(recipe: Recipe, run_folder: Path | None) -> None:
    trainer = recipe.trainer(run_folder=run_folder)
    typer.echo(str(trainer.plan))
    if recipe.policy is not None and trainer.assembly.config.run_folder is None and recipe.config.ledger is None:
        typer.echo("With --run-folder the run keeps a ledger, as it has a policy.")


def _job(
    recipe: Recipe,
    ranks: int,
    device: str,
    sharding: Sharding,
    price: float | None,
    failures: bool,
    assume: Sequence[str],
) -> JobPlan:
    if recipe.config.tensor_parallel > 1:
        raise PlanError(
            "What a run would need is reckoned for data-parallel ranks alone. Say --set config.tensor_parallel=1, and "
            "take a microbatch's activations and products over T ranks by hand (docs: scaling-tensor)."
        )
    given = dict(map(_figure, assume))
    own = with_figures(device_named(device), _of(given, _DEVICE_FIGURES))
    about = _of(given, _FAILURE_FIGURES)
    if about and not failures:
        raise PlanError(f"{', '.join(about)}: that's of failures, and none are simulated. Say --failures too.")
    model = FailureModel(**{name: _as_field(name, value) for name, value in about.items()}) if failures else None
    with TemporaryDirectory(prefix="cosmati-plan-") as aside:
        has_ledger = recipe.policy is not None if recipe.config.ledger is None else recipe.config.ledger
        folder = Path(aside) / "run" if has_ledger else None  # It isn't opened, and nothing lies there.
        config = dataclasses.replace(recipe.config, run_folder=folder)
        measured = measure(dataclasses.replace(recipe, config=config, evaluation=None).trainer())
    return plan_job(
        measured,
        ranks,
        own,
        sharding,
        shards=recipe.config.shard_ranks if sharding == "full" else None,
        efficiency=given.get("efficiency"),
        price_per_hour=price,
        failures=model,
    )


def _of(given: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: value for name, value in given.items() if name in names}


def _as_field(name: str, value: float) -> Any:  # noqa: ANN401  (of one of the model's types)
    return int(value) if name in ("spares", "num_runs", "seed") and value.is_integer() else value


def _figure(text: str) -> tuple[str, float]:
    """Read NAME=VALUE.

    Raises:
        PlanError: there's no such figure, or it's no number.
    """
    name, value = parse_setting(text)
    if name not in _FIGURES:
        raise PlanError(f"--assume {text}: there is no figure {name!r}. There are {', '.join(_FIGURES)}.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"--assume {text}: {value!r} is no number. Write {name}=1.5, say.")
    try:
        return name, float(value)
    except OverflowError:
        raise PlanError(f"--assume {name} can't be: that's a number of more than 300 digits.") from None
