"""A method of one's own around a governed microbatch: what it's told, and what it has to return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.passing import Passing
from cosmati.core.plan import Promise
from cosmati.errors import PlanError
from cosmati.routing.gradient_routing import GradientRouting
from tests.train.strategies.samples import CLASSES, Net, gradients, region_of, trainer
from tests.train.strategies.whole_runs import KINDS


@dataclass(frozen=True, kw_only=True)
class Listener(Method):
    """Takes down what it's told."""

    stage: ClassVar[Stage] = Stage.ROUTE

    heard: list[tuple[Any, ...]] = field(default_factory=list, compare=False, repr=False)

    @property
    def couples(self) -> frozenset[Coupling]:
        return frozenset()

    @contextmanager
    def passing(self, passing: Passing, at: Position) -> Iterator[None]:
        named = passing.class_names[int(passing.class_ids)]
        weights = {name: float(value) for name, value in passing.weights.items()}
        passing.looks.append(lambda objective: self.heard.append((at.microbatch, "look", objective.requires_grad)))
        with passing.replaced({"head.bias": torch.full((3,), 2.0, dtype=torch.float64)}):
            self.heard.append((at.microbatch, named, weights, passing.parameters["head"]["head.bias"].sum().item()))
            yield
        self.heard.append((at.microbatch, "end"))


def test_it_is_told_class_and_route_in_order() -> None:
    listener, network = Listener(), Net()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    gradients(network, KINDS, listener)
    assert [entry[0] for entry in listener.heard] == [index for index in range(8) for _ in range(3)]
    for index in range(8):
        first, look, end = listener.heard[3 * index : 3 * index + 3]
        name = CLASSES[index % 3]
        assert first[1:] == (name, KINDS[name], 6.0)
        assert look[1:] == ("look", True)
        assert end[1:] == ("end",)
    assert {region_of(name) for name in before} == set(KINDS["both"])


def test_it_is_promised_what_it_declares() -> None:
    assert trainer(Net(), KINDS, Listener()).plan.holds(Promise.NO_DIRECT_WRITE)

    class Undeclared(GradientRouting):
        """Of another module than the library's."""

    assert not trainer(Net(), KINDS, Undeclared()).plan.holds(Promise.NO_DIRECT_WRITE)


def test_what_is_no_context_is_refused() -> None:
    class Forgetful(Listener):
        def passing(self, passing: Passing, at: Position) -> AbstractContextManager[None]:
            return None  # type: ignore[return-value]

    with pytest.raises(PlanError, match=r"Forgetful.passing returned a NoneType.*nullcontext"):
        gradients(Net(), KINDS, Forgetful())
