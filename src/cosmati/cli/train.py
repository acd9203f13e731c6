"""`cosmati train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from cosmati.cli.errors import STOPPED
from cosmati.cli.files import load_recipe, under_policy
from cosmati.cli.track import TRACKER_HELP
from cosmati.integrations import Tracking, tracker_of
from cosmati.train.observers import Observer
from cosmati.train.observers.monitors import all_monitors
from cosmati.train.run.result import RunResult
from cosmati.train.trainer import Trainer

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="FILE[:FUNCTION]", help="Python file with a function that returns a Recipe; it is run."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting: config.seed=3.")
]
FolderOption = Annotated[
    Path | None, typer.Option(help="Where record, checkpoints and ledger go; the same folder goes on.")
]

SignedPolicy = Annotated[
    str | None,
    typer.Option("--policy", metavar="URL", help="In place of the recipe's policy, one that an authority has signed."),
]
PolicyVersion = Annotated[
    str, typer.Option("--policy-name", metavar="NAME[/NUMBER]", help="Which; its newest version.")
]
PolicyRoot = Annotated[
    str, typer.Option("--policy-root", metavar="SHA256", help="Digest of that authority's first root.")
]


def train(
    file: RecipeArgument,
    settings: Settings = None,
    policy: SignedPolicy = None,
    policy_name: PolicyVersion = "main",
    policy_root: PolicyRoot = "",
    run_folder: FolderOption = None,
    trackers: Annotated[
        list[str] | None, typer.Option("--track", metavar="TRACKER", help=f"Watch it live. {TRACKER_HELP}")
    ] = None,
    require_signed: Annotated[
        bool, typer.Option("--require-signed", help="Refuse data and a policy that are only declared.")
    ] = False,
    roots: Annotated[
        list[str] | None,
        typer.Option("--root", metavar="DIGEST", help="With --require-signed: trust this authority's first root."),
    ] = None,
    witnesses: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="'VKEY URL'", help="Ask this witness to cosign the ledger, hourly."),
    ] = None,
    attested: Annotated[
        bool, typer.Option("--attested", help="Don't begin without the witnesses, and stop where they can't be had.")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Measure norms, speed, memory, activations and more, every 10 steps.")
    ] = False,
) -> None:
    """Train a recipe to the end of its budget.

    FILE holds a function `recipe()`, or one named as FILE:name, that returns a cosmati Recipe. Ctrl-C ends the run
    after the step in progress, with a checkpoint; the same command with the same folder goes on. Its exit status is
    then 130, and 0 under torchrun, which would start it again.

    \b
    Examples:
      cosmati train digits.py
      cosmati train digits.py --run-folder runs/one --monitor --track tensorboard
      cosmati train licensed.py --require-signed --root 3f9c...
      cosmati train licensed.py --run-folder runs/licensed --witness "VKEY URL" --attested
      cosmati train digits.py:big --set config.seed=3 --set methods.0.alpha=0.3 --run-folder runs/big-3
      cosmati train gpt.py --policy policies --policy-root 3b27... --run-folder runs/governed
      torchrun --nproc-per-node 2 -m cosmati train digits.py --set config.num_microbatches=4
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    recipe = under_policy(load_recipe(file, settings or []), policy, policy_name, policy_root, run_folder)
    config = dataclasses.replace(recipe.config, progress=True)
    if require_signed or roots:  # whom to trust alone would ask nobody, and is refused
        is_required, trusted = require_signed or config.require_signed, tuple(roots or ()) or config.trusted_roots
        config = dataclasses.replace(config, require_signed=is_required, trusted_roots=trusted)
    asked = tuple(witnesses or ()) or config.witnesses
    profile = "attested" if attested else config.ledger_profile
    recipe = dataclasses.replace(recipe, config=dataclasses.replace(config, witnesses=asked, ledger_profile=profile))
    observers: list[Observer] = [Tracking(tracker_of(one)) for one in trackers or []]
    trainer = recipe.trainer(run_folder=run_folder, observers=[*observers, *([all_monitors()] if monitor else [])])
    _say_result(trainer, trainer.fit())


def _say_result(trainer: Trainer, result: RunResult) -> None:
    """Say how a run ended, on the first rank; its exit status says whether it was stopped."""
    # A launcher starts again what ends with another status than 0, and this was asked for; `run.json` says `stopped`.
    is_launched = dist.is_available() and dist.is_torchelastic_launched()
    if trainer.assembly.ranks.rank:
        # Under torchrun one rank speaks for all.
        return
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    name, steps = trainer.assembly.config.name, result.clock.step
    typer.echo(f"{name}: {result.outcome} after {steps} steps, {result.seconds:.1f} s  {metrics}")
    for change in trainer.changed:
        typer.echo(f"Changed since it was stopped: {change}")
    if result.run_folder is not None:
        typer.echo(f"Kept in {result.run_folder}")
        if (result.run_folder / "ledger").exists():
            typer.echo(f"Verify its ledger with: cosmati ledger verify {result.run_folder}")
    if result.reason:
        typer.echo(f"Stopped because {result.reason}")
    elif result.outcome == "stopped" and not is_launched:
        raise typer.Exit(STOPPED)
