"""Modes that a loop or an observer changes in mid-run are there again after a resume, or the promise isn't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import RunConfig, Trainer
from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
STEPS = [(torch.randn(8, 6, generator=GENERATOR), torch.arange(8) % 3) for _ in range(8)]


class Net(nn.Module):
    """What behaves otherwise in evaluation mode: BatchNorm and dropout, the latter off from the start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.late, self.second = nn.Dropout(0.5).eval(), nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.late(self.drop(self.norm(self.first(rows)))))
        return output


class Criterion(nn.Module):
    """A loss with a mode."""

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        return loss if self.training else loss * 2


class At(Observer):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            self.act()


def freeze(net: Net, loss: Any) -> None:
    net.norm.eval()


def everything(net: Net, loss: Any) -> None:
    net.eval()


def thaw(net: Net, loss: Any) -> None:
    net.late.train()


def criterion(net: Net, loss: Any) -> None:
    loss.eval()


def equal(one: nn.Module, other: nn.Module) -> bool:
    both = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in both)


@pytest.mark.parametrize("change", [freeze, everything, thaw, criterion])
@pytest.mark.parametrize("stopped_at", [2, 4])
def test_modes_that_an_observer_sets_come_back(
    change: Callable[[Net, Any], None], stopped_at: int, tmp_path: Path
) -> None:
    def run(folder: Path | None, stop: int | None, *, changes: bool = True) -> Trainer:
        net, loss = Net(), Criterion()
        observers = [At(2, lambda: change(net, loss))] if changes else []
        config = RunConfig(budget="8ba", num_threads=1, run_folder=folder)
        trainer = Trainer(net, loss, STEPS, optimizers=[SGD(lr=0.1)], observers=observers, config=config)
        if stop is not None:
            trainer.observers.append(At(stop, trainer.stop))
        trainer.fit()
        return trainer

    whole, plain = run(None, None), run(None, None, changes=False)
    assert not equal(whole.model, plain.model)  # The control: the mode does something.
    run(tmp_path, stopped_at)
    again = run(tmp_path, None)
    if (change, stopped_at) == (everything, 2):
        # After its last step the model was put into evaluation mode, as who evaluates by hand does.
        assert not again.plan.holds(Promise.RESUME)
        assert "was saved in another mode than its last step's" in str(again.plan)
    else:
        assert again.plan.holds(Promise.RESUME)
        assert equal(again.model, whole.model)


def own_loop(folder: Path | None, stop: int | None, evaluate: Callable[[Trainer], None]) -> Trainer:
    config = RunConfig(budget="8ba", num_threads=1, run_folder=folder)
    trainer = Trainer(Net(), Classification(3), optimizers=[SGD(lr=0.1)], config=config)
    with trainer:
        while not trainer.should_stop:
            trainer.step(STEPS[trainer.clock.step])
            if trainer.clock.step % 3 == 0:
                evaluate(trainer)
            if trainer.clock.step == stop:
                trainer.stop()
    return trainer


def forgetful(trainer: Trainer) -> None:
    trainer.model.eval()


def saving(trainer: Trainer) -> None:
    modes = {module: module.training for module in trainer.model.modules()}
    trainer.model.eval()
    trainer.model(STEPS[0][0])
    trainer.save()
    for module, mode in modes.items():
        module.training = mode


@pytest.mark.parametrize("stopped_at", [3, 4])
def test_an_evaluation_that_forgets_to_go_back_comes_back(stopped_at: int, tmp_path: Path) -> None:
    whole = own_loop(None, None, forgetful)
    own_loop(tmp_path, stopped_at, forgetful)
    again = own_loop(tmp_path, None, forgetful)
    assert again.plan.holds(Promise.RESUME) == (stopped_at == 4)
    if stopped_at == 4:
        assert equal(again.model, whole.model)


def test_a_checkpoint_in_the_midst_of_an_evaluation_keeps_no_modes(tmp_path: Path) -> None:
    whole = own_loop(None, None, saving)
    own_loop(tmp_path, 3, saving)
    again = own_loop(tmp_path, None, saving)
    assert equal(again.model, whole.model)
    assert "call model.train() before save()" in str(again.plan)


def test_modes_come_back_after_a_second_resume(tmp_path: Path) -> None:
    whole = own_loop(None, None, forgetful)
    for stop in (4, 5, None):
        again = own_loop(tmp_path, stop, forgetful)
    assert again.plan.holds(Promise.RESUME)
    assert equal(again.model, whole.model)
