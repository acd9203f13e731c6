"""The commands and what they say of themselves, without loading any: each is loaded when it's called.

PyTorch takes seconds to load, and `cosmati --help`, `--version` and the completion of a command's name don't need it.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand

from cosmati.cli.errors import Teaching

SUMMARIES = {
    "quickstart": "Train, compare, govern and report in minutes, offline, on data that this machine has.",
    "train": "Train a recipe to the end of its budget.",
    "plan": "Show what a recipe would do and may promise, and what it would need on so many ranks, without training.",
    "launch": "Begin a job that survives its machines: what is killed, hangs or fails goes on from its checkpoint.",
    "runs": "List jobs: where each stands, how far it is, when it's likely to end, how often it was resumed.",
    "show": "Show a job: what was asked for, how it stands, and each of its attempts.",
    "logs": "Print what a rank of a job has said.",
    "stop": "Stop a job after the step in progress, with a checkpoint; `cosmati resume` goes on from there.",
    "resume": "Go on with a job that was stopped, has failed, or has lost its supervisor.",
    "clone": "Begin a new job that is asked for as another one was, from its first step.",
    "delete": "Take a job that has ended out of the list, with its logs; its run stays, with checkpoints and ledger.",
    "profile": "Train a few steps of a recipe under PyTorch's profiler, and say what bounds a step.",
    "report": "Write one page about a run that needs nothing from outside: no network, no recipe, no data, no model.",
    "export": "Export the model that a run measured: its evaluated weights, in plain layers, checked before it says "
    "done.",
    "track": "Send a run to a tracker after the fact: losses, what monitors measured, metrics, checkpoints' digests.",
    "explore": "Look at runs and studies in a browser, offline, while they run and afterwards.",
    "data": "Write, inspect, verify, convert, plan and search streamed data.",
    "study": "Run and report studies: arms, budgets and seeds.",
    "store": "Folders of runs and studies: into other tools, and out of them.",
    "ledger": "Verify a run's ledger, and ask it what it knows.",
    "audit": "Hand a run to an auditor as one file, and check such a file.",
    "forget": "Plan a deletion from a run, do it, certify it; keep what is on legal hold.",
    "policy": "Begin, check, show, explain, compare and sign policies.",
    "keys": "Who may sign which class of data: make an authority, name its people, take keys back.",
}
_HOMES = dict.fromkeys(("show", "logs", "stop", "resume", "clone", "delete"), "runs")
"""Modules that aren't called as their command is."""


def load_command(name: str) -> Any:  # noqa: ANN401  (a class that typer keeps private)
    """Return a command, or a group of them, from its module."""
    module = importlib.import_module(f"cosmati.cli.{_HOMES.get(name, name)}")
    if name in vars(module):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(getattr(module, name))
        return typer.main.get_command(alone)
    group = typer.main.get_group(module.app)
    group.name = name
    return group


class Commands(Teaching):
    """The group of all commands: for help and completion by their summaries, loaded to be called."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (its base's)
        stubs = {name: TyperCommand(name, help=summary, rich_markup_mode=None) for name, summary in SUMMARIES.items()}
        super().__init__(**{**options, "commands": stubs})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        """Return the name of the command that's called, the command, and its arguments."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub and load_command(str(name)), rest
