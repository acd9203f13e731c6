"""What looks like state and isn't: names that are attributes and globals at once, hooks that a first pass installs."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Plan, Promise
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

SCRIPT = """
import torch
from torch import nn
from cosmati import RunConfig, Trainer
from cosmati.optim import SGD

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.loss = nn.Linear(6, 8), nn.Linear(8, 3), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.head(self.first(x) {times}), y)

def given(model, data):
    return model(*data) * data[0].new_ones(())

rows, labels = torch.randn(16, 6), torch.arange(16) % 3
config = RunConfig(budget="4ba", num_microbatches=4, num_threads=1)
new_ones = loss = kaput = 1.0
trainer = Trainer(Net(), given, optimizers=[SGD(lr=0.1)], config=config)
with trainer:
    while not trainer.should_stop:
        new_ones = loss = kaput = float(trainer.step((rows, labels)).loss)
"""


def _plan(tmp_path: Path, times: str) -> Plan:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("{times}", times))
    plan: Plan = runpy.run_path(str(path), run_name="script")["trainer"].plan
    return plan


@pytest.mark.parametrize("times", ["", "* kaput", "* [kaput for _ in x][0]", "* type('T', (), {'t': kaput}).t"])
def test_a_variable_of_the_loop_is_no_attribute_of_its_name(tmp_path: Path, times: str) -> None:
    """A script's `loss = float(report.loss)` has nothing to do with `self.loss`; a global that's read does count."""
    plan = _plan(tmp_path, times)
    assert ("kaput changes between steps" in str(plan)) == bool(times)
    for promise in (Promise.RESUME, Promise.ELASTIC, Promise.PARITY):
        assert plan.holds(promise) == (not times)
    if times:
        assert "forward.loss" not in str(plan)


class Capturing(nn.Module):
    """Installs a hook when it's first run, as Transformers does to collect hidden states."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, rows: Tensor) -> Tensor:
        if not getattr(self, "is_installed", False):
            self.first.register_forward_hook(self._hook(rows))
            self.is_installed = True
        output: Tensor = self.second(self.first(rows).relu())
        return output

    def _hook(self, rows: Tensor) -> Callable[..., Tensor | None]:
        index, key, mean, box, count = 1, "hidden", float(rows.mean()), {"mean": 1.0}, 0

        def captures(module: nn.Module, given: Any, output: Tensor) -> None:
            assert index, key

        def fixes(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            return output * mean

        def remembers(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            box["mean"] = 0.9 * box["mean"] + 0.1 * float(output.detach().mean())
            return output / box["mean"]

        def counts(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            nonlocal count
            count += 1 + int(output.mean() > 0)
            return output * (1 + count)

        return {"captures": captures, "fixes": fixes, "remembers": remembers, "counts": counts}[self.kind]


def plan_of(model: nn.Module, budget: str = "1ba") -> Plan:
    config = RunConfig(budget=budget, num_microbatches=4, num_threads=1)
    steps = [(torch.randn(16, 6), torch.arange(16) % 3)] * 3
    trainer = Trainer(model, Classification(3), steps, optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    return trainer.plan


@pytest.mark.parametrize("budget", ["1ba", "3ba"])
@pytest.mark.parametrize("kind", ["captures", "fixes", "remembers", "counts"])
def test_a_hook_that_a_first_pass_installs_counts_by_what_it_holds(kind: str, budget: str) -> None:
    plan = plan_of(Capturing(kind), budget)
    is_seen = kind in ("fixes", "remembers") or (kind, budget) == ("counts", "3ba")
    for promise in (Promise.RESUME, Promise.ELASTIC):
        assert plan.holds(promise) != is_seen


class Flagged(Capturing):
    """A flag by itself may come of the rows."""

    def forward(self, rows: Tensor) -> Tensor:
        if not hasattr(self, "is_high"):
            self.is_high = bool(rows.numel())
        output: Tensor = self.second(self.first(rows).relu()) * (2 if self.is_high else 1)
        return output


def test_a_flag_that_a_first_pass_sets_is_state() -> None:
    assert "forward changes the attributes is_high" in str(plan_of(Flagged("")))


class Named(Flagged):
    """An attribute whose name only sounds like a hook's."""

    def forward(self, rows: Tensor) -> Tensor:
        if not hasattr(self, "hook"):
            self.hook = rows.numel()
        output: Tensor = self.second(self.first(rows).relu()) * self.hook
        return output


def test_an_attribute_called_hook_is_state() -> None:
    assert "forward changes the attributes hook (" in str(plan_of(Named("")))
