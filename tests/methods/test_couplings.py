"""Couplings are what methods declare: one row or one region is perturbed, and it's seen where the change arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati import methods as m
from cosmati.core.batch import Batch
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Coupling, Method, Position, Stage, overrides
from cosmati.core.plan import describe
from cosmati.core.surgery import replace_modules
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.train.trainer import Trainer
from tests.methods.cases import CASES, Case, digits, network
from tests.methods.couplings import (
    BODY,
    HEAD,
    ROWS,
    governed_faults,
    region_faults,
    row_coupled_layers,
    row_faults,
    see_rows,
)
from tests.optim.test_optimizer_contract import OPTIMIZERS

OPTIONS = (
    Case(m.Alibi(max_sequence_length=15, train_sequence_length_scaling=1.0), None, is_text=True),
    Case(m.ColOut(per_row=True), None),
    Case(m.CutMix(interpolate_loss=True), None),
    Case(m.GradientClipping(clipping_type="norm", clipping_threshold=0.1, per_region=True), None),
    Case(m.GradientClipping(clipping_type="value", clipping_threshold=1e-3), None),
    Case(m.GradientClipping(clipping_type="adaptive", clipping_threshold=1e-3), None),
    Case(m.MixUp(interpolate_loss=True), None),
    Case(m.ProgressiveResizing(mode="crop", delay_fraction=0.3), None),
    Case(m.SelectiveBackprop(start=0.0, end=1.0, scale_factor=0.5), None),
    Case(
        m.SeqLengthWarmup(duration=0.5, min_seq_length=3, max_seq_length=15, step_size=1, truncate=False),
        None,
        is_text=True,
    ),
    Case(m.StochasticDepth(target_layer_name="ResidualBlock", stochastic_method="sample", drop_rate=0.5), None),
    Case(m.StochasticDepth(target_layer_name="Block", stochastic_method="sample", drop_rate=0.5), None, is_text=True),
)
"""Options that change how a method acts on rows or regions."""

every_case = pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=lambda case: describe(case.on))


@every_case
def test_rows_are_coupled_where_the_method_says_so(case: Case) -> None:
    assert row_faults(case) == set()


def on_regions(method: Method) -> bool:
    return overrides(method, "gradients") or overrides(method, "perturbation")


@pytest.mark.parametrize(
    "case", [c for c in (*CASES, *OPTIONS) if on_regions(c.on)], ids=lambda case: describe(case.on)
)
def test_regions_are_coupled_where_the_method_says_so(case: Case) -> None:
    assert region_faults(case) == set()


@pytest.mark.parametrize("denied", [BODY, HEAD])
@every_case
def test_a_region_learns_nothing_of_a_class_that_it_denies_unless_the_plan_says_so(case: Case, denied: str) -> None:
    assert governed_faults(case, denied) == set()


@pytest.mark.parametrize("case", [case for case in CASES if case.off], ids=str)
def test_what_is_off_declares_nothing(case: Case) -> None:
    assert case.off is not None
    assert case.off.couples == frozenset()


def group_norm() -> nn.Module:
    return network(is_text=False, group_norm=True)


def without_running_statistics() -> nn.Module:
    model = network(is_text=False)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    replace_modules(model, {layer: nn.BatchNorm2d(layer.num_features, track_running_stats=False) for layer in layers})
    return model


def batch_norm() -> nn.Module:
    return network(is_text=False)


@pytest.mark.parametrize("methods", [(), (m.GhostBatchNorm(ghost_batch_size=4),)], ids=["", "ghosts"])
@pytest.mark.parametrize("make", [batch_norm, without_running_statistics, group_norm])
@pytest.mark.filterwarnings("ignore:GhostBatchNorm changes nothing")
def test_layers_that_couple_rows_are_those_of_the_plan(make: type[nn.Module], methods: tuple[Method, ...]) -> None:
    source = InMemory(digits(), rows_per_step=ROWS)
    run = Trainer(make(), Classification(10), source, optimizers=[SGD(lr=0.1)], methods=methods)
    assert sorted(run.plan.facts.row_coupled_layers) == sorted(row_coupled_layers(run.model))


def test_batch_norm_reaches_all_rows_and_a_ghost_its_own() -> None:
    rows = frozenset(range(ROWS))
    plain = Case(Nothing(), None)
    inputs = [sight for sight in see_rows(plain, batch_norm()) if sight.is_coupled]
    assert {sight.row for sight in inputs} == rows
    assert all(sight.reached == rows - {sight.row} for sight in inputs)
    ghosts = m.GhostBatchNorm(ghost_batch_size=4).apply(batch_norm())
    inputs = [sight for sight in see_rows(plain, ghosts) if sight.is_coupled]
    assert {sight.row for sight in inputs} == rows
    half = frozenset(range(4))
    assert all(s.reached == (half if s.row in half else rows - half) - {s.row} for s in inputs)


AVERAGES = (
    m.EMA(half_life="2ba"),
    m.EMA(half_life="4ba", update_interval="2ba"),
    m.SWA(swa_start="1ba", swa_end="8ba", update_interval="1ba"),
    m.SWA(swa_start="2ba", swa_end="8ba", update_interval="2ba"),
)


def test_every_average_is_looked_at() -> None:
    assert {type(a) for a in AVERAGES} == {type(case.on) for case in CASES if overrides(case.on, "after")}


@pytest.mark.parametrize("method", AVERAGES, ids=describe)
def test_an_average_stays_where_it_is_while_only_another_region_learns(method: Method) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    both = {name: p for name, p in model.named_parameters()}
    learns = frozenset({"0.weight", "0.bias"})
    state = method.init(model)
    seen: list[dict[str, Tensor]] = []
    for step in range(1, 9):
        learnt = frozenset(both) if step <= 4 else learns
        with torch.no_grad():
            for name in learnt:
                both[name].add_(float(step))
        at = Position(Clock(step=step), Budget(Time.parse("20ba")), 0, 0, model, Classification(2))
        state = method.after(state, model, at, learnt)
        weights = method.evaluation_weights(state, at)
        if step in {4, 8}:
            assert weights is not None
            seen.append({name: value.clone() for name, value in weights.items()})
    # The average that stays isn't the weight that stays: an update would be seen.
    assert not any(torch.equal(seen[0][name], both[name]) for name in both)
    assert {name for name in both if not torch.equal(seen[0][name], seen[1][name])} == learns


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_each_parameter_by_its_own_gradient(name: str) -> None:
    def stepped(factor: float | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 6, generator=generator)) for _ in range(2)]
        optimizer = OPTIMIZERS[name][0].build([(f"layer.{i}", p) for i, p in enumerate(parameters)])
        start = parameters[0].detach().clone()
        for _ in range(4):
            first, second = torch.randn(2, 4, 6, generator=generator)
            parameters[0].grad = None if factor is None else factor * first + factor - 1
            parameters[1].grad = second
            optimizer.step()
        assert torch.equal(parameters[0], start) is (factor is None)
        others = getattr(optimizer, "evaluation_weights", dict)().values()
        return [parameters[1].detach(), *list(others)[1:]]

    one = stepped(1.0)
    assert all(torch.equal(a, b) for a, b in zip(one, stepped(5.0), strict=True))
    # What is absent from a step changes nothing for others.
    assert torch.equal(one[0], stepped(None)[0])


@dataclass(frozen=True, kw_only=True)
class Nothing(Method):
    stage: ClassVar[Stage] = Stage.MIX


@dataclass(frozen=True, kw_only=True)
class Boaster(Method):
    """Declares what it doesn't do."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"rows", "regions"})


@dataclass(frozen=True, kw_only=True)
class SecretMix(Method):
    """Lets each row see the mean of the batch's inputs."""

    stage: ClassVar[Stage] = Stage.MIX

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.replace(input=0.9 * batch.input + 0.1 * batch.input.mean(0, keepdim=True))


class OpenMix(SecretMix):
    """Says that it mixes, and not which rows."""

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset({"rows"})


@dataclass(frozen=True, kw_only=True)
class SecretTarget(Method):
    """Gives the last row the first one's target, at one step of five."""

    stage: ClassVar[Stage] = Stage.LABEL

    def batch(self, batch: Batch, at: Position) -> Batch:
        if at.clock.step != 3:
            return batch
        return batch.replace(target=torch.cat([batch.target[:-1], batch.target[1:2]]))


@dataclass(frozen=True, kw_only=True)
class SecretChoice(Method):
    """Leaves out the row that has most ink."""

    stage: ClassVar[Stage] = Stage.SELECT

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.select(batch.input.flatten(1).sum(1).argsort()[:-1].sort().values)


class SharedGradient(nn.Module):
    """Returns what it's given, and lets each row's gradient flow into all rows."""

    def forward(self, input: Tensor) -> Tensor:
        mean = input.mean(0, keepdim=True)
        return input + (mean - mean.detach())


@dataclass(frozen=True, kw_only=True)
class SecretGradient(Method):
    """Couples what rows teach, and not what they lose."""

    stage: ClassVar[Stage] = Stage.REPLACE

    def apply(self, model: nn.Module, optimizers: object = ()) -> nn.Module:
        return nn.Sequential(model, SharedGradient())


@dataclass(frozen=True, kw_only=True)
class SecretNorm(Method):
    """Divides by the norm of all gradients."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], regions: Mapping[str, int]
    ) -> Mapping[str, Tensor]:
        norm = sum(g.square().sum() for g in gradients.values()) ** 0.5
        return {name: g / norm for name, g in gradients.items()}


@dataclass(frozen=True, kw_only=True)
class SecretCount(SecretNorm):
    """Divides by the number of gradients that are there."""

    def gradients(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], regions: Mapping[str, int]
    ) -> Mapping[str, Tensor]:
        return {name: g / len(gradients) for name, g in gradients.items()}


@dataclass(frozen=True, kw_only=True)
class SecretPass(Method):
    """Goes along the gradient for a second pass, each parameter by its own: the model couples them in that pass."""

    stage: ClassVar[Stage] = Stage.AGAIN

    def perturbation(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], at: Position
    ) -> Mapping[str, Tensor] | None:
        return {name: 0.01 * g.sign() for name, g in gradients.items()}


UNDECLARED, UNSEEN = "{}: seen, not declared", "{}: declared, never seen"


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        (Nothing(), set()),
        (Boaster(), {UNSEEN.format("rows")}),
        (SecretMix(), {UNDECLARED.format("rows"), "not in the lineage"}),
        (OpenMix(), {"not in the lineage"}),
        (SecretTarget(), {UNDECLARED.format("rows"), "not in the lineage"}),
        (SecretChoice(), {UNDECLARED.format("rows")}),
        (SecretGradient(), {UNDECLARED.format("rows")}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_instrument_sees_planted_faults_of_rows(method: Method, faults: set[str]) -> None:
    assert row_faults(Case(method, None)) == faults


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        (Nothing(), set()),
        (Boaster(), {UNSEEN.format("regions")}),
        (SecretNorm(), {UNDECLARED.format("regions")}),
        (SecretCount(), {UNDECLARED.format("regions")}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_instrument_sees_planted_faults_of_regions(method: Method, faults: set[str]) -> None:
    assert region_faults(Case(method, None)) == faults


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        (Nothing(), set()),
        (Boaster(), {"the promise is withheld for nothing"}),
        (SecretNorm(), {"the promise is broken"}),
        (SecretPass(), {"the promise is broken"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_instrument_sees_planted_faults_of_a_governed_step(method: Method, faults: set[str]) -> None:
    assert governed_faults(Case(method, None), BODY) == faults
