"""What failures leave: the simulation against closed forms, brute force, and what follows from more of anything."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PlanError
from cosmati.planning.failures import FailureModel, _one_run, best_interval, daly_goodput, simulate

ENOUGH = FailureModel(spares=10_000, num_runs=60, days=15)
near = pytest.approx


@pytest.mark.parametrize(
    ("mtbf", "restart", "checkpoint", "every"),
    [(6300.0, 120.0, 5.0, None), (500.0, 600.0, 60.0, 1800.0), (100.0, 30.0, 300.0, 600.0), (40.0, 1800.0, 10.0, None)],
)
def test_with_spares_without_end_it_comes_to_the_closed_form(
    mtbf: float, restart: float, checkpoint: float, every: float | None
) -> None:
    model = dataclasses.replace(
        ENOUGH,
        node_mtbf_hours=mtbf,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        checkpoint_every_seconds=every,
    )
    found = simulate(model, 512, 8, 512)
    half = (found.high - found.low) / 2
    # Five standard errors, and the part of an interval that the horizon counts as kept.
    assert abs(found.mean - found.closed_form) < 5 / 1.96 * half + found.checkpoint_every_seconds / (15 * 86_400)
    assert found.failures_per_day == near(64 * 24 / mtbf, rel=0.15)
    assert found.num_runs == 60


def test_the_closed_form_is_the_mean_of_segments_drawn_one_by_one() -> None:
    """Brute force: each segment is tried until no failure falls into it, and each restart likewise."""
    interval, checkpoint, restart, mtbf = 100.0, 20.0, 50.0, 300.0
    draws = np.random.default_rng(0)
    spent = 0.0
    num = 20_000
    for _ in range(num):
        while True:
            lasts = draws.exponential(mtbf)
            if lasts >= interval + checkpoint:
                spent += interval + checkpoint
                break
            spent += lasts
            while (lasts := draws.exponential(mtbf)) < restart:
                spent += lasts
            spent += restart
    assert num * interval / spent == near(daly_goodput(interval, checkpoint, restart, mtbf), rel=0.02)


@given(checkpoint=st.floats(0.1, 100), ratio=st.floats(1e4, 1e8))
def test_where_failures_are_rare_it_is_youngs(checkpoint: float, ratio: float) -> None:
    mtbf = checkpoint * ratio
    best = best_interval(checkpoint, mtbf)
    assert best == near(math.sqrt(2 * checkpoint * mtbf), rel=2 / math.sqrt(ratio) + 1e-3)
    first_order = 1 - checkpoint / best - best / (2 * mtbf)
    assert daly_goodput(best, checkpoint, 0.0, mtbf) == near(first_order, abs=20 / ratio)


@given(checkpoint=st.floats(1, 600), mtbf=st.floats(3600, 1e6))
def test_no_other_interval_loses_much_less(checkpoint: float, mtbf: float) -> None:
    best = daly_goodput(best_interval(checkpoint, mtbf), checkpoint, 60.0, mtbf)
    others = [daly_goodput(math.exp(x), checkpoint, 60.0, mtbf) for x in np.linspace(1, 15, 200)]
    assert best >= max(others) * 0.999


def test_a_checkpoint_longer_than_the_time_between_failures_is_taken_once_in_it() -> None:
    assert best_interval(100.0, 50.0) == 50.0


def test_without_a_spare_a_lost_node_halves_the_ranks() -> None:
    """Of two nodes one fails soon, and is never back: half the speed, since a half is the next divisor of V."""
    model = FailureModel(node_mtbf_hours=1e4, repair_hours=1e9, days=2000, checkpoint_every_seconds=3600.0)
    found = simulate(model, 16, 8, 16)
    # Both for 5,000 hours on average, then one for 10,000 more, and nothing afterwards: 10,000 of full speed.
    assert found.mean == near(1e4 / (2000 * 24), rel=0.2)
    alone = simulate(dataclasses.replace(model, repair_hours=0.0), 16, 8, 16)
    assert alone.mean > 0.95
    third = simulate(dataclasses.replace(model, node_mtbf_hours=1e7, spares=1, days=30), 16, 8, 16)
    assert third.of_paid == near(third.mean * 2 / 3)


def test_ranks_that_divide_v_go_on_and_others_idle() -> None:
    """Four nodes less one: two go on, and the third is idle; with V = 4 and one rank a node likewise."""
    model = FailureModel(node_mtbf_hours=4000.0, repair_hours=1e9, days=10_000 / 24, restart_seconds=0.0, num_runs=300)
    found = simulate(dataclasses.replace(model, checkpoint_seconds=1e-3, checkpoint_every_seconds=60.0), 4, 1, 4)
    # Stretches of 4, then 2 (three healthy, two of which compute and may fail), then 2, then 1: by their rates.
    whole = 1000 + 0.5 * 2000 + 0.5 * 2000 + 0.25 * 4000
    assert found.mean < whole / 10_000
    assert found.mean == near(whole / 10_000, rel=0.12)


def test_more_spares_never_hurt_and_repairs_bring_the_ranks_back() -> None:
    base = FailureModel(node_mtbf_hours=1000.0)
    means = [simulate(dataclasses.replace(base, spares=spares), 256, 8, 256).mean for spares in (0, 1, 2, 4, 8)]
    assert means == sorted(means)
    assert means[-1] - means[0] > 0.2
    slow, fast = (simulate(dataclasses.replace(base, repair_hours=hours), 256, 8, 256).mean for hours in (72, 1))
    assert fast > slow + 0.1


class Given:
    """Times until the next failure, one after another."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def exponential(self, _: float) -> float:
        return self.left.pop(0)


def test_before_it_grows_a_run_takes_a_checkpoint() -> None:
    """By hand: two ranks until 50 s, one for 1,045 s until the other is back, then both until 3,000 s."""
    model = FailureModel(checkpoint_seconds=10, restart_seconds=0, repair_hours=1045 / 3600)
    draws: Any = Given(50, 1e9, 1e9)
    useful, failures = _one_run(model, [0, 1, 2], 1, 100.0, 3000.0, draws)
    # Nine intervals with their checkpoints, and 55 s of which 10 are the checkpoint before it grows.
    alone = 900 + 45
    # Seventeen, and 35 s under way at the end.
    both = 1700 + 35
    assert useful == near(alone / 2 + both)
    assert failures == 1


def test_the_first_stretch_begins_without_a_restart() -> None:
    """By hand: 225 s until a failure, which leaves two intervals; 30 s of restart, and 745 s until the end."""
    model = FailureModel(checkpoint_seconds=10, restart_seconds=30, repair_hours=0.0)
    draws: Any = Given(225, 1e9)
    useful, failures = _one_run(model, [0, 1], 1, 100.0, 1000.0, draws)
    assert useful == near(200 + 600 + 85)
    assert failures == 1


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    model = FailureModel(node_mtbf_hours=200.0, spares=10_000, num_runs=20, days=5)
    covered = 0
    for seed in range(60):
        found = simulate(dataclasses.replace(model, seed=seed), 64, 8, 64)
        covered += found.low <= found.closed_form <= found.high
    assert covered >= 48  # 57 expected; the horizon counts what's under way, which is a little more.


def test_a_simulation_is_the_same_each_time() -> None:
    model = FailureModel(spares=1)
    assert simulate(model, 64, 8, 64) == simulate(model, 64, 8, 64)
    assert simulate(model, 64, 8, 64) != simulate(dataclasses.replace(model, seed=1), 64, 8, 64)


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        ({"node_mtbf_hours": 0.0}, "node_mtbf_hours=0"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds=-1"),
        ({"spares": -1}, "spares=-1"),
        ({"num_runs": 1}, "num_runs=1"),
        ({"checkpoint_every_seconds": 0.0}, "checkpoint_every_seconds=0"),
        ({"days": float("nan")}, "days=nan"),
        ({"node_mtbf_hours": float("inf")}, "node_mtbf_hours=inf can't be: give a number from 1e-12 to 1e+12"),
        ({"seed": -1}, "seed=-1 can't be: give a number from 0"),
        ({"spares": 1.9}, "spares=1.9 can't be: give a whole number"),
        ({"num_runs": 2.5}, "num_runs=2.5 can't be: give a whole number"),
        ({"seed": 0.5}, "seed=0.5 can't be: give a whole number"),
    ],
)
def test_figures_that_can_t_be_are_refused(figure: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        FailureModel(**figure)  # type: ignore[arg-type]
