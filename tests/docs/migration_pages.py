"""What the tests of the "coming from" pages share: blocks are run in a folder, and the names of tables looked up."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cosmati
from cosmati import integrations, methods, optim
from cosmati.train import observers
from cosmati.train.observers import monitors

PLACES = (cosmati, integrations, methods, monitors, observers, optim)
FOREIGN = frozenset({"DataLoader", "Subset"})
"""Names of PyTorch's on the right of the tables."""

STOPS = """
from cosmati import Observer


class Stops(Observer):
    def __init__(self, step):
        self.step = step

    def on_open(self, run):
        self.run = run

    def on_step(self, outcome):
        if outcome.clock.step == self.step:
            self.run.stop("enough")


"""
"""An observer that asks a page's run to stop at a step."""


def blocks_of(page: str) -> list[str]:
    """Return a page's Python blocks, in order."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run_blocks(blocks: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run blocks one after the other in a folder; return their names."""
    scope: dict[str, Any] = {"__name__": "page"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, f"block {number}", "exec"), scope)
    finally:
        os.chdir(before)
    return scope


def table_of(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page, but for their heads."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names_are_real(page: str, least: set[str]) -> None:
    """Check that what the right column of a page's tables calls is there, with the settings that it's given."""
    right = "\n".join(row[-1] for row in table_of(page))
    called = re.findall(r"\b([A-Z]\w+|all_monitors|tracker_of|batches)\((?=([^()]*))", right)
    assert least <= {name for name, _ in called}
    for name, arguments in called:
        if name in FOREIGN:
            continue
        found = [getattr(place, name) for place in PLACES if hasattr(place, name)]
        assert found, name
        if dataclasses.is_dataclass(found[0]):
            fields = {field.name for field in dataclasses.fields(found[0])}
            assert set(re.findall(r"(\w+)=(?!=)", arguments)) <= fields, (name, arguments)
    for call in re.findall(r"`([A-Z]\w+\([^`]*\))`", right):
        if "..." not in call:
            with suppress(NameError):  # the reader's own loaders and models
                eval(call, {name: getattr(place, name) for place in PLACES for name in place.__all__})
