"""Couplings are what methods declare: one row or one region is perturbed, and it's seen where the change arrives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel, Loss
from cosmati.core.method import Coupling, Method, Position, Stage, overrides
from cosmati.core.pieces import Pieces
from cosmati.methods import GhostBatchNorm
from cosmati.optim import Optimizer
from cosmati.testing.pieces import weights_of
from tests.methods.cases import CASES, NUM_STEPS, Case, digits, network, text, trainer
from tests.optim.test_optimizer_contract import OPTIMIZERS

ROWS = 8
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def applied(method: Method, model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.apply(model)


def losses_by_row(method: Method, model: nn.Module, data: Any, step: int, *, is_text: bool) -> dict[int, float]:
    """Return what each row adds to the loss, after the method had the batch and the model."""
    loss = LanguageModel() if is_text else Classification(10)
    batch = Batch(data, Lineage.of_rows(0, ROWS))
    at = Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, loss)
    torch.manual_seed(step)
    batch = method.batch(batch, at)
    torch.manual_seed(step)
    result = loss(model, batch.data)
    assert isinstance(result, Loss)
    assert result.per_row is not None
    found: dict[int, float] = {}
    for row, value in zip(batch.lineage.row_ids.tolist(), result.per_row.tolist(), strict=True):
        found[row] = found.get(row, 0.0) + value
    return found


def perturbed(data: tuple[Tensor, Tensor], row: int) -> list[tuple[Tensor, Tensor]]:
    """Return the data with another input in a row, and with another target."""
    inputs, targets = data[0].clone(), data[1].clone()
    inputs[row] = 1 - inputs[row].flip(-1) if inputs.is_floating_point() else (inputs[row] * 7 + 1) % 256
    targets[row] = (targets[row] + 1) % 10
    return [(inputs, data[1]), (data[0], targets)]


def rows_are_coupled(method: Method, model: nn.Module, *, is_text: bool) -> bool:
    """Say whether what happens to a row changes the loss of another one, or whether that one takes part."""
    data = tuple(part[:ROWS] for part in (text() if is_text else digits()))
    for step in range(NUM_STEPS):
        before = losses_by_row(method, copy.deepcopy(model), data, step, is_text=is_text)
        for row in range(step % 4, ROWS, 4):  # two in each step, and every one over the steps
            for other in perturbed(data, row):
                after = losses_by_row(method, copy.deepcopy(model), other, step, is_text=is_text)
                moved = [r for r in (set(before) | set(after)) - {row} if _differ(before.get(r), after.get(r))]
                if moved:
                    return True
    return False


def _differ(before: float | None, after: float | None) -> bool:
    """Rounding may differ where a kernel takes rows together; a coupling is orders of magnitude larger."""
    return before is None or after is None or abs(before - after) > 1e-5 * abs(before)


def plain_network(*, is_text: bool) -> nn.Module:
    """A model that couples no rows itself."""
    return network(is_text=is_text, group_norm=not is_text)


@each_case
def test_rows_are_coupled_where_the_method_says_so(case: Case) -> None:
    if case.on.stage is Stage.REPLACE and isinstance(case.on, GhostBatchNorm):
        return  # It changes a layer that couples rows already: see below.
    model = applied(case.on, plain_network(is_text=case.is_text))
    assert rows_are_coupled(case.on, model, is_text=case.is_text) is ("rows" in case.on.couples)


@pytest.mark.parametrize("methods", [(), (GhostBatchNorm(ghost_batch_size=4),)], ids=["BatchNorm", "GhostBatchNorm"])
def test_layers_that_couple_rows_are_in_the_plan(methods: tuple[Method, ...]) -> None:
    run = trainer(methods)
    layers = [n for n, layer in run.model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert list(run.plan.facts.row_coupled_layers) == layers
    assert rows_are_coupled(Nothing(), run.model, is_text=False)


def regions_are_coupled(method: Method, model: nn.Module) -> bool:
    """Say whether another gradient in one region changes what becomes of the other region's."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    regions = {name: int(index >= len(names) // 2) for index, name in enumerate(names)}
    generator = torch.Generator().manual_seed(0)
    weights = weights_of(model, regions)
    gradients = weights.map(lambda p: torch.randn(p.shape, generator=generator))
    first = next(name for name in names if regions[name] == 0)
    other = gradients.having({name: 3 * g + 1 if name == first else g for name, g in gradients.tensors.items()})
    coupled = False
    for step in range(NUM_STEPS):
        at = Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, Classification(10))
        for outcome in (
            lambda g, at=at: method.gradients(g, weights, at),
            lambda g, at=at: method.perturbation(weights, g, at) or Pieces({}),
        ):
            here, there = outcome(gradients).tensors, outcome(other).tensors
            far = [name for name in here if regions[name] == 1]
            coupled = coupled or any(not torch.equal(here[name], there[name]) for name in far)
    return coupled


@each_case
def test_regions_are_coupled_where_the_method_says_so(case: Case) -> None:
    model = applied(case.on, plain_network(is_text=case.is_text))
    assert regions_are_coupled(case.on, model) is ("regions" in case.on.couples)


@pytest.mark.parametrize("case", [case for case in CASES if overrides(case.on, "after")], ids=str)
def test_averages_of_a_region_do_not_follow_another(case: Case) -> None:
    model = plain_network(is_text=case.is_text)
    names = [name for name, _ in model.named_parameters()]
    learnt = frozenset(names[: len(names) // 2])
    state = case.on.init(weights_of(model))
    seen = []
    for step in range(1, NUM_STEPS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in learnt:
                    parameter.add_(1.0)
        at = Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, Classification(10))
        state = case.on.after(state, weights_of(model), at, learnt)
        weights = case.on.evaluation_weights(state, at)
        if weights is not None:
            seen.append({name: value.clone() for name, value in weights.items()})
    assert len(seen) >= 2
    moved = {name for name in names if not torch.equal(seen[0][name], seen[-1][name])}
    assert moved == learnt


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_each_parameter_by_its_own_gradient(name: str) -> None:
    def stepped(factor: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 6, generator=generator)) for _ in range(2)]
        config: Optimizer = OPTIMIZERS[name][0]
        optimizer = config.build([(f"layer.{i}", p) for i, p in enumerate(parameters)])
        for _ in range(4):
            first, second = torch.randn(2, 4, 6, generator=generator)
            parameters[0].grad, parameters[1].grad = factor * first + factor - 1, second
            optimizer.step()
        return parameters[1].detach()

    assert torch.equal(stepped(1.0), stepped(5.0))


@dataclass(frozen=True, kw_only=True)
class Nothing(Method):
    stage: ClassVar[Stage] = Stage.MIX


@dataclass(frozen=True, kw_only=True)
class SecretMix(Method):
    """Lets each row see the batch's mean, and doesn't say so."""

    stage: ClassVar[Stage] = Stage.MIX

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.replace(input=0.9 * batch.input + 0.1 * batch.input.mean(0, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class SecretNorm(Method):
    """Divides by the norm of all gradients, and doesn't say so."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        norm = sum(g.square().sum() for g in gradients.tensors.values()) ** 0.5
        return gradients.map(lambda g: g / norm)


@dataclass(frozen=True, kw_only=True)
class Boaster(Method):
    """Declares what it doesn't do."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"rows", "regions"})


@pytest.mark.long
def test_the_instrument_sees_what_is_planted() -> None:
    model = plain_network(is_text=False)
    assert rows_are_coupled(SecretMix(), model, is_text=False)
    assert regions_are_coupled(SecretNorm(), model)
    faults: Sequence[Method] = (Boaster(), Nothing())
    assert not any(rows_are_coupled(method, model, is_text=False) for method in faults)
    assert not any(regions_are_coupled(method, model) for method in faults)
