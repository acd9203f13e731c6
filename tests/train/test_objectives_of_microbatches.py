"""A microbatch's objective is in a power of two's scale, which the step's denominators divide out by region."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.loss import Loss
from cosmati.train import gradients
from cosmati.train.gradients import StepInput, StepPasses
from cosmati.train.routes import Route


@pytest.mark.parametrize(
    ("tokens", "num", "policy", "scale"),
    [(1, 1, None, None), (1, 1, object(), 1.0), (3, 2, None, 1 / 4), (4, 2, None, 1 / 8), (5, 3, None, 1 / 8)],
)
def test_the_scale_is_the_power_of_two_at_or_above_one_over_the_size(
    tokens: int, num: int, policy: object, scale: float | None
) -> None:
    passes: Any = object.__new__(StepPasses)
    passes._a = SimpleNamespace(policy=policy)
    step: Any = SimpleNamespace(routes=[None] * num, num_tokens=tokens)
    assert StepPasses._scale(passes, step) == scale


def test_the_objective_of_a_scalar_is_itself_in_the_scale() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    assert gradients._objective(value, None)[0] is value
    objective, loss, weight = gradients._objective(value, 0.25)
    assert (float(objective.detach()), float(loss), weight) == (0.75, 3.0, 1.0)
    assert not loss.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("weight", "scale", "expected"),
    [
        (4.0, None, (3.5, 14.0, 4.0)),
        (4.0, 0.5, (7.0, 14.0, 4.0)),
        (0.0, 0.5, (0.0, 0.0, 0.0)),
        (torch.tensor(4.0), 0.5, (7.0, 14.0, 4.0)),
        (torch.tensor(0.0), 0.5, (0.0, 0.0, 0.0)),
    ],
)
def test_the_objective_of_a_loss_has_its_terms_by_weight_and_nothing_where_it_weighs_nothing(
    weight: float | Tensor, scale: float | None, expected: tuple[float, ...]
) -> None:
    total = torch.tensor(6.0, requires_grad=True)
    result = Loss(total, weight, aux={"a": torch.tensor(1.5), "b": torch.tensor(0.5)})
    objective, loss, own = gradients._objective(result, scale)
    assert tuple(float(torch.as_tensor(one).detach()) for one in (objective, loss, own)) == expected
    assert objective.requires_grad
    assert not loss.requires_grad  # type: ignore[union-attr]


def test_denominators_count_what_may_teach_and_of_packs_the_part_of_their_labels() -> None:
    tokens: Any = SimpleNamespace(teachers=lambda own: torch.stack([own[0], own.sum()]))
    routes = [
        Route(0, 0, 0, (0.0, 0.5), offered=True),
        Route(-1, 0, -1, (1.0, 1.0), offered=True, tokens=tokens),
        Route(-1, 0, -1, (1.0, 1.0), offered=True, tokens=tokens),
    ]
    labels = torch.tensor([[9.0, 9.0], [1.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([2.0, 8.0, 5.0], dtype=torch.float64)
    passes: Any = object.__new__(StepPasses)
    found = StepPasses._denominators(passes, weights, routes, 0.25, labels)
    assert found.tolist() == [0.25 * 8 * 1 / 4, 0.25 * (2 + 8)]
    assert found.dtype is torch.float64


def test_on_an_accelerator_a_weight_is_not_waited_for() -> None:
    total, weight = torch.ones((), device="meta", requires_grad=True), torch.ones((), device="meta")
    objective, loss, own = gradients._objective(Loss(total, weight), 0.5)
    assert objective.is_meta
    assert own is weight
    assert not loss.requires_grad  # type: ignore[union-attr]


class Far(Tensor):
    """Says that it isn't on the CPU."""

    is_cpu = False


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 0.0), (1.0, 3.0), (0.25, 3.0), (4.0, 3.0)])
def test_what_weighs_nothing_on_an_accelerator_teaches_nothing(weight: float, expected: float) -> None:
    total = torch.tensor(6.0, requires_grad=True)
    own = torch.tensor(weight).as_subclass(Far)
    objective, loss, told = gradients._objective(Loss(total, own), 0.5)
    assert (float(objective.detach()), float(loss), told) == (expected, 2 * expected, own)
    objective.backward()
    assert total.grad is not None
    assert float(total.grad) == expected / 6


def test_the_input_of_a_step_is_what_every_pass_reads_and_cannot_be_changed() -> None:
    step = StepInput([], [], [], 3)
    assert (step.frozen, step.failure) == (frozenset(), None)
    with pytest.raises(FrozenInstanceError):
        step.num_tokens = 4  # type: ignore[misc]
