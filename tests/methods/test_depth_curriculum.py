"""A depth curriculum against the rule, written apart: count layers, open them one after another."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import PlanError
from cosmati.methods import DepthCurriculum


def model(num_layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(num_layers)))


def opened(method: DepthCurriculum, net: nn.Module, step: int, steps: int = 100) -> list[int]:
    """Return the numbers of the layers that learn."""
    names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    at = Position(Clock(step=step), Budget(Time.parse(f"{steps}ba")), 0, 0, net, None)  # type: ignore[arg-type]
    return sorted({int(name.split(".")[0]) for name in set(names) - method.frozen(names, at)})


@given(
    st.integers(0, 100), st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 8), st.sampled_from(["output", "input"])
)
def test_as_many_layers_as_the_ramp_says(step: int, start: float, end: float, num_layers: int, first: Any) -> None:
    start, end = sorted((start, end))
    found = opened(DepthCurriculum(first=first, start=start, end=end), model(num_layers), step)
    elapsed = step / 100
    share = 1.0 if elapsed >= end else 0.0 if elapsed <= start else (elapsed - start) / (end - start)
    due = 1 + share * (num_layers - 1)
    assert len(found) in {math.floor(due), math.floor(due + 1e-8)}
    everything = list(range(num_layers))
    assert found == (everything[num_layers - len(found) :] if first == "output" else everything[: len(found)])


def test_ramp_by_hand() -> None:
    down, up = DepthCurriculum(start=0.1, end=0.6), DepthCurriculum(first="input", start=0.1, end=0.6)
    net = model(6)
    assert [opened(down, net, step) for step in (0, 10, 19, 20, 40, 60)] == [
        [5],
        [5],
        [5],
        [4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert [opened(up, net, step) for step in (0, 20, 59, 100)] == [[0], [0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_groups_open_together_and_the_rest_learns_all_the_time() -> None:
    net = model(6)
    method = DepthCurriculum(groups=("[01].*", "[23].*", "4.*"), end=1.0)
    assert [opened(method, net, step) for step in (0, 49, 50, 100)] == [
        [4, 5],
        [4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_frozen_and_shared_parameters() -> None:
    """What the user has frozen is no layer; a shared one opens with the last that holds it."""
    net = model(4)
    net[3].requires_grad_(False)
    assert opened(DepthCurriculum(end=1.0), net, 0) == [2]
    tied = model(4)
    tied[3][0].weight = tied[0][0].weight
    names = [name for name, _ in tied.named_parameters()]
    at = Position(Clock(step=0), Budget(Time.parse("100ba")), 0, 0, tied, None)  # type: ignore[arg-type]
    assert set(names) - DepthCurriculum(end=1.0).frozen(names, at) == {"0.0.weight", "3.0.bias"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"first": "top"}, "no end of a model"),
        ({"start": 0.6, "end": 0.5}, "0 <= start <= end <= 1"),
        ({"end": 1.5}, "fractions of the run"),
        ({"start": float("nan")}, "fractions of the run"),
        ({"groups": "0.*"}, "one string"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        DepthCurriculum(**options)


@pytest.mark.parametrize(("groups", "says"), [(("7.*",), "names no parameter"), (("[01].*", "1.*"), "shares 1.0.bias")])
def test_groups_that_are_empty_or_overlap_are_refused(groups: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        opened(DepthCurriculum(groups=groups), model(3), 0)


def test_it_is_a_route_and_may_be_off() -> None:
    assert DepthCurriculum.stage is Stage.ROUTE
    assert opened(DepthCurriculum(end=0.0), model(6), 0) == [0, 1, 2, 3, 4, 5]
