"""Trains a small net, then a large one, and says by how many bytes the process grew, and what was planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from cosmati.planning.measuring import measure
from cosmati.planning.memory import memory_of
from cosmati.recipes.recipe import Recipe
from tests.planning import recipes


def status(name: str) -> int:
    """Return a size that the kernel knows of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def train(recipe: Recipe) -> None:
    trainer = recipe.trainer()
    for _ in range(2):
        trainer.step((torch.ones(128, 32), torch.ones(128, 1)))


def main() -> None:
    torch.set_num_threads(1)
    width = int(sys.argv[1])
    if width < 0:  # What measuring leaves behind isn't the run's.
        plan = memory_of(measure(recipes.dense(width=-width).trainer()), 1, "replicated")
        json.dump({"planned": plan.total}, sys.stdout)
        return
    train(recipes.dense())
    before = status("VmRSS")
    train(recipes.dense(width=width))
    json.dump({"grew": status("VmHWM") - before}, sys.stdout)


if __name__ == "__main__":
    main()
