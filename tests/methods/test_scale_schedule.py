"""Scale schedule: everything keeps its fraction of the run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.clock import Budget, Time
from cosmati.core.method import Stage
from cosmati.errors import PlanError
from cosmati.methods.scale_schedule import ScaleSchedule


@given(st.floats(0.1, 10), st.integers(1, 1000), st.floats(0, 1))
def test_budget_and_warm_up_dilate_together(ratio: float, num_steps: int, warm_up: float) -> None:
    budget = Budget(Time.parse(f"{num_steps}ba"))
    dilated = dataclasses.replace(budget, ratio=ScaleSchedule(ratio=ratio).dilation())
    assert dilated.num_steps == max(1, round(num_steps * ratio))
    time = Time.parse(f"{warm_up * num_steps:f}ba")
    assert dilated.step_of(time) == pytest.approx(budget.fraction_of(time) * dilated.num_steps, abs=0.5)


def test_declarations_and_bad_ratios() -> None:
    method = ScaleSchedule(ratio=1.0)
    assert (method.dilation(), method.stage, method.couples, method.claims) == (
        1.0,
        Stage.BUDGET,
        frozenset(),
        frozenset(),
    )
    for ratio in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(PlanError, match="ratio"):
            ScaleSchedule(ratio=ratio)
