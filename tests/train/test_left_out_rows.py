"""Of a step that is left out, no row was offered, and none counts; the clock counts them as read."""

from __future__ import annotations

import math

import pytest

from cosmati import Observer
from cosmati.train.outcome import StepOutcome
from tests.train.test_gate import SpoiltAt, trainer_of


class Keeps(Observer):
    def __init__(self) -> None:
        self.seen: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.seen.append(outcome)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_rows_of_a_step_that_is_left_out_were_not_offered(num_microbatches: int) -> None:
    trainer = trainer_of(
        SpoiltAt(2, math.nan, num_microbatches), num_microbatches=num_microbatches, on_divergence="skip"
    )
    watch = Keeps()
    trainer.observers.append(watch)
    trainer.fit()
    assert [bool(one.left_out) for one in watch.seen] == [step == 2 for step in range(6)]
    for step, one in enumerate(watch.seen):
        assert all(route.offered == (step != 2) for route in one.routes)
        assert math.isnan(float(one.loss)) == (step == 2)
    left = watch.seen[2]
    assert len(left.routes) == num_microbatches
    assert not left.num_rows.any()
    assert not left.weights.any()
    rows = [one.clock.rows for one in watch.seen]
    assert rows == [rows[0] * (step + 1) for step in range(6)]
