"""What a method is before it overrides anything, and where a hook is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, Regression
from cosmati.core.method import Method, Position, Stage, State, overrides
from cosmati.core.rng import position_generator, row_uniform
from cosmati.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Idle(Method):
    stage: ClassVar[Stage] = Stage.AVERAGE
    owns: ClassVar[frozenset[str]] = frozenset({"evaluation weights"})


def position(loss: object = None) -> Position:
    clock = Clock(step=25, epoch=3)
    return Position(clock, Budget(Time.parse("100ba")), 11, 2, nn.Identity(), loss)  # type: ignore[arg-type]


def test_a_method_that_overrides_nothing_changes_nothing() -> None:
    method, model, at = Idle(), nn.Linear(2, 2), position()
    batch = Batch(torch.ones(2), Lineage.of_rows(0, 2))
    state: State = {"x": torch.ones(1)}
    named: dict[str, Tensor] = {"w": torch.ones(1)}
    assert (method.dilation(), method.shapes(at.budget), method.learning_rate(lambda e: e / 2, 0.5, at.budget)) == (
        1.0,
        1,
        0.25,
    )
    assert method.apply(model) is model
    assert method.batch(batch, at) is batch
    assert method.gradients(named, {}, {}) is named
    assert method.after(state, model, at, None) is state
    assert (method.frozen(["w"], at), method.couples, method.init(model)) == (frozenset(), frozenset(), {})
    assert method.perturbation(named, named, at) is None
    assert method.evaluation_weights(state, at) is None
    assert method.image_size((32, 48), 0.5) == (32, 48)
    loss = Regression()
    assert method.loss(loss, state, at) is loss
    with method.passing(cast("Any", None), at) as around:
        assert around is None
    assert method.claims == {"evaluation weights"}
    hooks = [name for name in vars(Method) if not name.startswith("_")]
    assert not any(overrides(method, hook) for hook in hooks if hook not in ("stage", "owns"))


def test_stages_act_in_the_order_of_the_loop() -> None:
    order = [
        "BUDGET",
        "REPLACE",
        "CAST",
        "SELECT",
        "SHAPE",
        "PERTURB",
        "MIX",
        "LABEL",
        "LOSS",
        "ROUTE",
        "AGAIN",
        "GRADIENT",
    ]
    assert [stage.name for stage in sorted(Stage)] == [*order, "AVERAGE"]
    assert all(stage % 5 == 0 for stage in Stage), "round numbers, so that there is room between two"


def test_draws_belong_to_the_position_and_to_the_rows() -> None:
    at = position()
    assert at.elapsed == 0.25
    expected = torch.rand(3, generator=position_generator(11, "crop", 25, 2))
    assert torch.equal(torch.rand(3, generator=at.generator("crop")), expected)
    batch = Batch(torch.ones(4), Lineage.of_rows(40, 4))
    assert torch.equal(at.row_uniform("crop", batch, 2), row_uniform(11, "crop", 3, torch.arange(40, 44), num=2))
    assert at.row_uniform("crop", batch).shape == (4, 1)


def test_the_loss_says_how_many_classes_there_are() -> None:
    assert position(Classification(7)).num_classes(torch.zeros(2), "MixUp") == 7
    with pytest.raises(PlanError, match=r"MixUp needs the number of classes of targets \(2,\)"):
        position(Regression()).num_classes(torch.zeros(2), "MixUp")


def test_a_method_that_says_nothing_of_what_it_does_to_regions_leaves_no_words_in_the_plan() -> None:
    assert Idle().contract == ""
