"""Means, spikes and counts of losses, against the rule written out over the whole list of them."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.train.observers.monitors.losses import LossHealth

BUDGET = Budget(Time.parse("100ba"))
LOSSES = st.sampled_from([1.0, 1.0, 1.25, 0.75, 2.0, 9.0, 100.0, -3.0, math.nan, math.inf])


def outcome(loss: float, *, left_out: str = "", withheld: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(loss=torch.tensor(loss, dtype=torch.float64), left_out=left_out, withheld=withheld)


def measured(watch: LossHealth, losses: list[float]) -> dict[str, float]:
    for loss in losses:
        watch.note(outcome(loss))
    found = {name: value.tolist() for name, value in watch.measure(outcome(0.0)).items()}  # type: ignore[union-attr]
    return dict(watch.judge(found, outcome(0.0)))


@pytest.mark.long
@settings(deadline=None)
@given(
    parts=st.lists(st.lists(LOSSES, max_size=25), max_size=5),
    window=st.integers(20, 40),
    far=st.sampled_from([1.0, 8.0]),
)
def test_a_spike_lies_far_above_the_losses_before_it(parts: list[list[float]], window: int, far: float) -> None:
    watch = LossHealth(window=window, deviations=far)
    seen: list[float] = []
    spikes = odd = 0
    for losses in parts:
        bound, last = math.inf, seen[-window:]
        if len(last) >= 20:
            middle = statistics.median(last)
            deviation = 1.4826 * statistics.median(abs(one - middle) for one in last)
            bound = middle + max(far * deviation, abs(middle) / 1000)
        finite = [one for one in losses if math.isfinite(one)]
        spikes += sum(one > bound for one in finite)
        odd += len(losses) - len(finite)
        seen += finite
        mean = {"loss_mean": pytest.approx(statistics.fmean(finite))} if finite else {}
        assert measured(watch, losses) == {
            **mean,
            "loss_spikes": spikes,
            "losses_not_finite": odd,
            "steps_left_out": 0,
        }


def test_steps_that_are_left_out_are_counted_and_losses_that_are_withheld_are_not_read() -> None:
    watch = LossHealth()
    watch.note(outcome(math.nan, left_out="a loss of nan"))
    watch.note(outcome(5.0, withheld=("loss",)))
    assert measured(watch, [2.0]) == {
        "loss_mean": 2.0,
        "loss_spikes": 0,
        "losses_not_finite": 0,
        "steps_left_out": 1,
    }


def test_it_goes_on_where_it_was_and_begins_anew_at_step_0() -> None:
    watch = LossHealth(window=20)
    measured(watch, [1.0] * 20)
    watch.note(outcome(50.0))
    again = LossHealth(window=20)
    again.start(Clock(step=21), BUDGET)
    again.load_state_dict(watch.state_dict())
    found = measured(again, [1.0])
    assert (found["loss_spikes"], found["loss_mean"]) == (1, 25.5)
    again.start(Clock(step=22), BUDGET)
    assert measured(again, [])["loss_spikes"] == 1
    again.start(Clock(), BUDGET)
    assert measured(again, [50.0]) == {
        "loss_mean": 50.0,
        "loss_spikes": 0,
        "losses_not_finite": 0,
        "steps_left_out": 0,
    }


@pytest.mark.parametrize("given", [{"window": 19}, {"deviations": 0.0}, {"deviations": math.inf}, {"deviations": -1.0}])
def test_what_it_cannot_be_told_is_refused(given: dict[str, Any]) -> None:
    LossHealth(window=20, deviations=0.1)
    with pytest.raises(ValueError, match="at least 20 losses, and more than 0"):
        LossHealth(**given)


@pytest.mark.parametrize("devices", [(), ("cpu",), ("cpu", "cpu"), ("meta",), ("cpu", "meta"), ("meta", "cpu")])
def test_a_loss_is_copied_where_a_part_of_the_model_is_on_an_accelerator(devices: tuple[str, ...]) -> None:
    """A compiled graph may write the next loss there into the same memory."""
    model = nn.ModuleList(nn.Linear(1, 1, device=device) for device in devices)
    watch, one, other = LossHealth(), outcome(1.0), outcome(2.0)
    watch.open(SimpleNamespace(model=model))  # type: ignore[arg-type]
    watch.note(one)
    one.loss.fill_(5.0)
    expected = 1.0 if "meta" in devices else 5.0
    assert watch.measure(one)["losses"].tolist() == [expected]  # type: ignore[union-attr]
    # It goes by the run that it watches now.
    watch.open(SimpleNamespace(model=nn.Linear(1, 1)))  # type: ignore[arg-type]
    watch.note(other)
    other.loss.fill_(7.0)
    assert watch.measure(one)["losses"].tolist() == [expected, 7.0]  # type: ignore[union-attr]


def test_before_a_run_is_open_a_loss_is_kept_as_it_is_and_nothing_is_measured_of_none() -> None:
    watch, one = LossHealth(), outcome(1.0)
    assert watch.measure(one) == {}
    watch.note(one)
    one.loss.fill_(2.0)
    assert watch.measure(one)["losses"].tolist() == [2.0]  # type: ignore[union-attr]
