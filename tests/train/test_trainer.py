"""What the Trainer takes, and what it leaves as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import Data
from cosmati.core.loss import Classification
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

LOSS = Classification(num_classes=3)


@dataclass(frozen=True)
class Pair:
    """A batch as a dataclass."""

    x: Tensor
    y: Tensor


class Unsized:
    """An iterable of five batches, without a length."""

    def __iter__(self) -> Iterator[Data]:
        yield from _steps(5)


def _steps(num: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)) for _ in range(num)
    ]


def _train(data: Any, budget: str = "4ba", **options: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        MLP((4, 6, 3)),
        LOSS,
        data,
        optimizers=[SGD(lr=0.1)],
        config=RunConfig(**{"budget": budget, "num_threads": 1} | options),
    )
    trainer.fit()
    return trainer


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_batches_of_any_kind_teach_the_same(num_microbatches: int) -> None:
    pairs = _steps(4)
    kinds: list[Any] = [
        [{"x": x, "y": y} for x, y in pairs],
        [Pair(x, y) for x, y in pairs],
        [[x, y] for x, y in pairs],
    ]
    expected = _flat(_train(pairs, num_microbatches=num_microbatches).model)
    for data in kinds:
        assert torch.equal(_flat(_train(data, num_microbatches=num_microbatches).model), expected)


def test_loaders_iterables_and_generators() -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*_steps(4), strict=True))
    expected = _flat(_train(_steps(4)).model)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    assert torch.equal(_flat(_train(loader).model), expected)
    assert torch.equal(_flat(_train(iter(_steps(4))).model), expected)
    unsized = _train(Unsized(), "2ep")
    assert (unsized.clock.step, unsized.clock.epoch) == (10, 2)
    assert not unsized.plan.holds("resume")


def test_two_sub_steps_move_their_own_parts() -> None:
    class Pairing(nn.Module):
        """A generator and a critic."""

        def __init__(self) -> None:
            super().__init__()
            self.maker, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def rates(critic: float, maker: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Pairing()

        def judge(net: Any, data: Data) -> Tensor:
            return (net.critic(net.maker(data[0]).detach()) - net.critic(data[0])).mean()

        def fool(net: Any, data: Data) -> Tensor:
            return -net.critic(net.maker(data[0])).mean()

        Trainer(
            model,
            [SubStep("critic", judge, "critic.*"), SubStep("maker", fool, "maker.*")],
            _steps(5),
            optimizers=[SGD(lr=critic, parameters="critic.*"), SGD(lr=maker, parameters="maker.*")],
            config=RunConfig(budget="5ba", num_threads=1),
        ).fit()
        return _flat(model.critic), _flat(model.maker)

    critic, maker = rates(0.0, 0.0)
    only_critic, only_maker = rates(0.1, 0.0), rates(0.0, 0.1)
    assert not torch.equal(only_critic[0], critic)
    assert torch.equal(only_critic[1], maker)
    assert torch.equal(only_maker[0], critic)
    assert not torch.equal(only_maker[1], maker)


def test_fit_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    trainer = Trainer(
        nn.Sequential(MLP((4, 3)), nn.Dropout(0.5)), LOSS, _steps(4), optimizers=[SGD(lr=0.1)], config=RunConfig()
    )
    torch.set_rng_state(state)
    flags = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    trainer.fit()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == flags
    assert torch.equal(torch.rand(3), expected)


def test_observers_are_called_as_often_as_they_ask() -> None:
    class Every3(Observer):
        """Keeps the steps it was told of."""

        every = 3

        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step(self, report: StepReport) -> None:
            self.steps.append(report.clock.step)

    observer = Every3()
    config = RunConfig(budget="10ba", num_threads=1)
    Trainer(MLP((4, 3)), LOSS, _steps(10), optimizers=[SGD(lr=0.1)], observers=[observer], config=config).fit()
    assert observer.steps == [3, 6, 9]


def test_metrics_are_those_of_all_rows() -> None:
    model = MLP((4, 3))
    inputs, targets = (torch.cat(parts) for parts in zip(*_steps(3, 7), strict=True))
    evaluation = Evaluation(batches((inputs, targets), 8), {"accuracy": accuracy})
    trainer = Trainer(
        model, LOSS, _steps(2), optimizers=[SGD(lr=0.1)], evaluation=evaluation, config=RunConfig(num_threads=1)
    )
    metrics = trainer.fit().metrics
    assert metrics["accuracy"] == (model(inputs).argmax(1) == targets).double().mean().item()


def test_bfloat16_keeps_parameters_in_float32() -> None:
    trainer = _train(_steps(4), precision="bfloat16")
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert not torch.equal(_flat(trainer.model), _flat(_train(_steps(4)).model))
