"""The fixed microbatch has the same bits in every release and process, and what a loss does to state is undone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.rng import DefaultGenerators
from cosmati.train.probe import Probe

CPU = torch.device("cpu")


def losses(probe: Probe, *taken: Callable[[nn.Module, Any], Any], model: nn.Module | None = None) -> Any:
    return probe.losses(model or nn.Identity(), list(taken), DefaultGenerators(CPU), CPU)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0x5EED)


def test_numbers_are_drawn_of_one_seed_tensor_by_tensor(tmp_path: Path) -> None:
    def keep(_: nn.Module, data: Any) -> Tensor:
        torch.save(data, tmp_path / "given")
        return torch.zeros(())

    probe = Probe()
    data = (
        torch.zeros(3, 2),
        torch.zeros(4, dtype=torch.bool),
        torch.tensor([3, 6]),
        torch.zeros(0, dtype=torch.int64),
    )
    probe.see(data)
    assert probe.specs == [([3, 2], "float32", 1), ([4], "bool", 1), ([2], "int64", 7), ([0], "int64", 1)]
    assert losses(probe, keep) == [(0.0).hex()]
    drawn, of = torch.load(tmp_path / "given", weights_only=True), generator()
    expected = (
        torch.rand(3, 2, generator=of),
        torch.rand(4, generator=of) < 0.5,
        torch.randint(0, 7, (2,), generator=of),
        torch.zeros(0, dtype=torch.int64),
    )
    assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))


def test_what_a_loss_draws_follows_from_no_seed_of_the_run() -> None:
    probe = Probe()
    probe.see(torch.zeros(2))
    found = []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(losses(probe, lambda _, data: torch.rand(())))
            assert torch.initial_seed() == seed
        torch.manual_seed(0x5EED)
        assert found == [[float(torch.rand(())).hex()]] * 2


class Held(nn.Module):
    """A model that a loss reaches past all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


HELD: list[Held] = []


@pytest.fixture
def held() -> Iterator[Held]:
    HELD.append(Held())
    yield HELD[-1]
    HELD.clear()


def counting(model: nn.Module, data: Tensor) -> Tensor:
    sys.modules["tests.train.test_probe_pinned"].__dict__["HELD"][-1].seen.add_(1)
    return model(data).sum()


def test_a_loss_that_moves_state_past_the_copies_is_put_back_and_asked_no_more(held: Held) -> None:
    probe = Probe()
    probe.see(torch.zeros(2))
    assert losses(probe, counting, model=held) is None
    assert held.seen.tolist() == [0]
    assert losses(probe, counting, model=held) is None
    assert held.seen.tolist() == [0]


def test_a_steady_loss_leaves_all_as_it_was(held: Held) -> None:
    probe = Probe()
    probe.see(torch.zeros(2))

    def steady(model: nn.Module, data: Tensor) -> Tensor:
        model.seen.add_(1)  # type: ignore[operator, union-attr]
        return model(data).sum() + model.seen.sum()  # type: ignore[operator, union-attr]

    first = losses(probe, steady, model=held)
    assert first == losses(probe, steady, model=held) is not None
    held.seen.fill_(3)
    assert losses(probe, steady, model=held) != first
    assert held.seen.tolist() == [3]
