"""Small runs, one of them begun again, and what their folders hold, read without the library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cosmati import Evaluation, InMemory, Observer, RunConfig, StepOutcome, Trainer

ROWS = torch.arange(48.0).reshape(16, 3) / 48
DATA = (ROWS, ROWS.sum(1, keepdim=True))
Values = dict[tuple[str, int], float]


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def mean_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).abs().mean()


def make(folder: Path | None, observers: Sequence[Observer] = (), budget: str = "30ba") -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    return Trainer(
        model,
        squared_error,
        InMemory(DATA, 4),
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)],
        evaluation=Evaluation([DATA], {"error": mean_error}),
        observers=observers,
        config=RunConfig(budget=budget, run_folder=folder, checkpoint_every="10ba", evaluate_every="4ba"),
    )


class PowerCutError(Exception):
    """What ends a run without a checkpoint."""


class Cut(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            raise PowerCutError


def begun_again(folder: Path, first: Sequence[Observer] = (), second: Sequence[Observer] = ()) -> None:
    """Train 30 steps, with a failure after 26 that goes on from 20."""
    failing = make(folder, [*first, Cut(26)])
    try:
        failing.fit()
    except PowerCutError:
        assert make(folder, second).fit().outcome == "completed"
    else:
        raise AssertionError


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(folder: Path) -> Values:
    """What the folder says of the run as it counts."""
    steps, evaluations = lines(folder / "steps.jsonl"), lines(folder / "evaluations.jsonl")
    names = ("loss", "learning_rate", "gradient_norm")
    found = {(name, int(line["step"])): line[name] for line in steps for name in names}
    return found | {("evaluation/error", int(line["step"])): line["error"] for line in evaluations}
