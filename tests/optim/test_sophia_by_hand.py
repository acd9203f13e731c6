"""Sophia's step with numbers small enough to follow: when the curvature is estimated, and where a step is clipped."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import Sophia
from cosmati.optim.sophia import ClippedCurvature

DOUBLE = torch.float64


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def options_of(optimizer: torch.optim.Optimizer, place: int = 0) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[place].items() if key != "params"}


@pytest.mark.parametrize("interval", [0, 1, 2, 3])
def test_each_parameter_counts_its_own_steps(interval: int) -> None:
    starts = [row(4.0, -4.0), row(1.0, 8.0)]
    parameters = [Parameter(one.clone()) for one in starts]
    optimizer = ClippedCurvature(
        parameters, 0.5, (0.5, 0.75), 0.25, num_labels=3, update_interval=interval, eps=0.5, weight_decay=0.125
    )
    x, m, h, t = [*starts], [row(0, 0)] * 2, [row(0, 0)] * 2, [0, 0]
    for number in range(5):
        for i, parameter in enumerate(parameters):
            g = row(number + i + 1.0, -0.25)
            parameter.grad = g.clone() if (i, number) not in ((1, 0), (1, 3)) else None
            if parameter.grad is None:
                continue
            m[i] = 0.5 * m[i] + 0.5 * g
            if interval and t[i] % interval == 0:
                h[i] = 0.75 * h[i] + 0.25 * 3 * g**2
            t[i] += 1
            ratio = m[i] / torch.maximum(0.25 * h[i], row(0.5, 0.5))
            x[i] = x[i] - 0.5 * 0.125 * x[i] - 0.5 * torch.clamp(ratio, -1, 1)
        optimizer.step()
        for i, parameter in enumerate(parameters):
            torch.testing.assert_close(parameter.detach(), x[i], rtol=1e-12, atol=0)
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "momentum_buffer", "curvature"}
        assert int(state["step"]) == t[i]
        torch.testing.assert_close(state["momentum_buffer"], m[i], rtol=1e-12, atol=0)
        torch.testing.assert_close(state["curvature"], h[i], rtol=1e-12, atol=0)
    assert optimizer.steps_elements(optimizer.param_groups[0]) is True


def test_a_step_is_clipped_to_the_rate_on_both_sides() -> None:
    parameter = Parameter(row(0, 0, 0, 0))
    optimizer = ClippedCurvature([parameter], 0.5, (0.0, 0.0), 1.0, eps=1.0, update_interval=0, weight_decay=0.0)
    parameter.grad = row(0.5, -0.5, 3.0, -3.0)
    optimizer.step()
    assert parameter.tolist() == [-0.25, 0.25, -0.5, 0.5]


def test_estimates_go_into_the_average_with_their_groups_share() -> None:
    first, second = Parameter(row(0, 0)), Parameter(torch.zeros(1, dtype=torch.float32))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "betas": (0.5, 0.25)}]
    optimizer = ClippedCurvature(groups, betas=(0.5, 0.75), update_interval=0)
    optimizer.update_curvature({})
    assert not optimizer.state
    optimizer.update_curvature({first: row(4.0, 8.0), second: row(4.0)})
    assert optimizer.state[first]["curvature"].tolist() == [1.0, 2.0]
    assert optimizer.state[second]["curvature"].tolist() == [3.0]
    assert optimizer.state[second]["curvature"].dtype is torch.float32
    optimizer.update_curvature({first: row(0.0, 8.0)})
    assert optimizer.state[first]["curvature"].tolist() == [0.75, 3.5]
    assert [int(optimizer.state[one]["step"]) for one in (first, second)] == [0, 0]


def test_estimates_that_fit_nothing_are_counted_and_the_first_shapes_named() -> None:
    parameter = Parameter(row(0, 0))
    optimizer = ClippedCurvature([parameter])
    others: dict[Tensor, Tensor] = {Parameter(torch.zeros(n)): torch.ones(n) for n in range(1, 8)}
    with pytest.raises(
        PlanError, match=r"^7 estimate\(s\) .* \(shapes \[\(1,\), \(2,\), \(3,\), \(4,\), \(5,\)\]\)\. Give"
    ):
        optimizer.update_curvature({parameter: row(1, 1), **others})
    with pytest.raises(PlanError, match=r"^1 estimate\(s\) .* \(shapes \[\(1, 2\)\]\)"):
        optimizer.update_curvature({parameter: row(1, 1)[None]})
    assert not optimizer.state[parameter]


def test_what_is_usual_and_what_the_configuration_says_on() -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    usual = {
        "lr": 1e-3,
        "betas": (0.96, 0.99),
        "gamma": 0.04,
        "num_labels": 1,
        "update_interval": 10,
        "eps": 1e-12,
        "weight_decay": 0.1,
    }
    assert (
        options_of(ClippedCurvature([named[0][1]])) == options_of(Sophia(lr=1e-3, num_labels=1).build(named)) == usual
    )
    [every] = Sophia(lr=1e-3, num_labels=1).build(named).param_groups
    assert every["params"] == [one for _, one in named], "vectors decay, too"
    told: dict[str, Any] = {"lr": 0.5, "betas": (0.25, 0.75), "gamma": 2.0, "num_labels": 3, "update_interval": 4}
    built = Sophia(eps=0.125, weight_decay=0.25, decay_vectors=False, **told).build(named)
    assert [options_of(built, place) for place in (0, 1)] == [
        told | {"eps": 0.125, "weight_decay": decay} for decay in (0.25, 0.0)
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"gamma": 0.0}, {"gamma": float("nan")}, {"eps": 0.0}, {"num_labels": 0}, {"update_interval": -1}],
)
def test_each_number_out_of_range_is_told_with_the_others(wrong: dict[str, Any]) -> None:
    told: dict[str, Any] = {"gamma": 0.5, "eps": 0.25, "num_labels": 1, "update_interval": 0}
    for make in (lambda **more: ClippedCurvature([Parameter(torch.ones(1))], **more), Sophia):
        make(lr=0.0, weight_decay=0.0, betas=(0.0, 0.0), **told)
        with pytest.raises(PlanError) as caught:
            make(lr=0.1, **told | wrong)
        shown = ", ".join(f"{key}={value}" for key, value in (told | wrong).items())
        assert str(caught.value).startswith(f"Sophia can't use {shown}. Use gamma > 0, eps > 0")
        for more in ({"betas": (1.0, 0.5)}, {"betas": (0.5, 1.0)}, {"weight_decay": -1.0}):
            with pytest.raises(PlanError, match=r"^Sophia can't use betas=.*weight_decay"):
                make(**{"lr": 0.1, **told, **more})


def test_what_is_configured_is_given_by_name_and_checked_to_its_rate() -> None:
    configuration: Any = Sophia
    with pytest.raises(TypeError, match="takes its settings by name"):
        configuration(0.1, 5)
    made = Sophia(lr=0.1, num_labels=5)
    assert made.update_interval == 10
    with pytest.raises(FrozenInstanceError):
        made.gamma = 1.0  # type: ignore[misc]
    for make in (Sophia, lambda **more: ClippedCurvature([Parameter(torch.ones(1))], **more)):
        with pytest.raises(PlanError, match=r"lr=-0\.1"):
            make(lr=-0.1, num_labels=5)
