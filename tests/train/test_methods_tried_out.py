"""What a method of the user's own does to gradients is tried out in the first two steps, region by region."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.methods import GradientClipping
from cosmati.train.couplings import method_coupling

WEIGHTS = Pieces({"a": torch.randn(3, 2), "b": torch.randn(4), "c": torch.randn(())}, {"a": 0, "b": 1, "c": 1})
Change = Callable[[Pieces, Position], Pieces]


def position(step: int) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("9ba")), 0, 0, nn.Identity(), lambda model, batch: model(batch))


def said_of(change: Change, *, couples: frozenset[Coupling] = frozenset()) -> str:
    """What is said of a method that declares something and changes gradients so."""

    class Own(Method):
        stage: ClassVar[Stage] = Stage.GRADIENT

        def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
            assert all(torch.equal(tensor, WEIGHTS.tensors[name]) for name, tensor in weights.tensors.items())
            for tensor in weights.tensors.values():
                tensor.zero_()  # It's a copy.
            return change(gradients, at)

    Own.couples = couples  # type: ignore[method-assign, assignment]
    return method_coupling(Own(), WEIGHTS, position)


def test_each_region_is_tried_in_the_steps_0_and_1() -> None:
    seen: list[tuple[int, tuple[str, ...]]] = []

    def note(gradients: Pieces, at: Position) -> Pieces:
        seen.append((at.clock.step, gradients.names))
        return gradients

    assert said_of(note) == ""
    everything = ("a", "b", "c")
    assert seen == [
        (step, names) for own in (("a",), ("b", "c")) for step in (0, 1) for names in (own, everything, everything)
    ]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("region", [0, 1])
def test_one_regions_gradients_act_on_anothers(step: int, region: int) -> None:
    def couple(gradients: Pieces, at: Position) -> Pieces:
        own = gradients.only([name for name in gradients.names if WEIGHTS.regions[name] == region])
        scale = own.norm() if at.clock.step == step and own else 1.0
        return gradients.map(lambda one: one) if at.clock.step != step else gradients.scaled(scale)

    assert said_of(couple) == "Own() lets one region's gradients act on another's"


@pytest.mark.parametrize("step", [0, 1])
def test_a_direction_alone_acts(step: int) -> None:
    """The one that is changed has another length and another direction; a method that looks at one sees it."""

    def couple(gradients: Pieces, at: Position) -> Pieces:
        if at.clock.step != step or "a" not in gradients or "b" not in gradients:
            return gradients
        unit = gradients.tensors["a"] / gradients.tensors["a"].norm()
        return gradients.having({**gradients.tensors, "b": gradients.tensors["b"] + unit.sum()})

    assert said_of(couple) == "Own() lets one region's gradients act on another's"


@pytest.mark.parametrize("step", [0, 1])
def test_what_has_no_gradient_is_given_one(step: int) -> None:
    def fill(gradients: Pieces, at: Position) -> Pieces:
        missing = {name: torch.zeros_like(WEIGHTS.tensors[name]) for name in WEIGHTS.names if name not in gradients}
        return gradients.having({**gradients.tensors, **missing}) if at.clock.step == step else gradients

    assert said_of(fill) == "Own() gives a gradient to what has none"


def test_each_region_by_itself_may_be_scaled() -> None:
    assert said_of(lambda gradients, _: gradients.scaled(1 / (1 + max(gradients.norm_by_region())))) == ""
    apart = said_of(lambda gradients, _: gradients.map(lambda one: one / one.norm()))
    assert apart == ""


def test_what_cannot_be_tried_out_is_said_so() -> None:
    def fail(gradients: Pieces, at: Position) -> Pieces:
        msg = f"{len(gradients.names)} at {at.clock.step}"
        raise ValueError(msg)

    assert said_of(fail) == "Own() can't be tried out (ValueError: 1 at 0)"


def test_who_declares_it_or_is_ours_is_not_tried() -> None:
    def fail(gradients: Pieces, at: Position) -> Pieces:
        raise AssertionError

    assert said_of(fail, couples=frozenset({"regions"})) == ""
    assert (
        method_coupling(
            GradientClipping(clipping_type="norm", clipping_threshold=1.0, per_region=True), WEIGHTS, position
        )
        == ""
    )


def test_who_declares_nothing_is_asked_to() -> None:
    class Silent(Method):
        stage: ClassVar[Stage] = Stage.GRADIENT

        def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
            return gradients

    said = "Silent() doesn't say what it couples (`couples = frozenset()`, if it leaves regions apart)"
    assert method_coupling(Silent(), WEIGHTS, position) == said
