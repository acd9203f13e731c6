"""Points of a search: quasi-random places, edges, and what widening adds."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.records.study import DimensionRecord, settings_key
from cosmati.study.points import Dimension, SearchSpace, quasi_random

RATE = Dimension(name="lr", low=1e-3, high=1e-1)
DECAY = Dimension(name="decay", low=0.0, high=0.2, is_log=False, widest=(0.0, 1.0))
BATCH = Dimension(name="batch", choices=(8, 16, 32), wider=((2, 4), (64,)))
TIED = Dimension(name="tied", choices=(False, True))


def test_places_and_settings_are_each_others_inverse() -> None:
    assert RATE.value(0.5) == pytest.approx(1e-2)
    assert (RATE.value(0.0), RATE.value(1.0)) == (pytest.approx(1e-3), 1e-1)
    assert DECAY.value(0.25) == pytest.approx(0.05)
    assert [BATCH.value(unit) for unit in (0.0, 0.33, 0.34, 0.66, 0.67, 1.0)] == [8, 8, 16, 16, 32, 32]


@given(st.floats(0, 1))
def test_a_place_gives_the_setting_that_lies_there(unit: float) -> None:
    for dimension in (RATE, DECAY):
        assert dimension.place(dimension.value(unit)) == pytest.approx(unit, abs=1e-9)


def test_the_sequence_is_the_one_that_optuna_draws() -> None:
    optuna = pytest.importorskip("optuna")
    names = ("a", "b", "c")
    unit = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=optuna.samplers.QMCSampler(scramble=True, seed=5))
        # Its first trial is drawn at random: the space is inferred from a finished one.
        study.add_trial(optuna.trial.create_trial(params=dict.fromkeys(names, 0.5), distributions=unit, value=0.0))
        asked = [study.ask(unit).params for _ in range(12)]
    assert [[one[name] for name in names] for one in asked] == quasi_random(3, 12, 5)


def test_more_points_begin_with_the_same_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quasi_random(4, 27, 1)[:16] == quasi_random(4, 16, 1) != quasi_random(4, 16, 2)


@pytest.mark.parametrize(
    ("settings", "edges"),
    [
        ({"lr": 1e-2, "decay": 0.1, "batch": 16, "tied": True}, set()),
        ({"lr": 10 ** (-3 + 2 * 0.049), "decay": 0.1, "batch": 16, "tied": True}, {("lr", "below")}),
        ({"lr": 10 ** (-3 + 2 * 0.051), "decay": 0.1, "batch": 16, "tied": True}, set()),
        ({"lr": 10 ** (-1 - 2 * 0.049), "decay": 0.199, "batch": 32, "tied": False},
         {("lr", "above"), ("decay", "above"), ("batch", "above")}),
        ({"lr": 1e-2, "decay": 0.0, "batch": 8, "tied": False}, {("batch", "below")}),
    ],
)  # fmt: skip
def test_an_edge_is_the_outer_twentieth_or_the_last_choice_if_there_is_more_beyond(
    settings: dict[str, float], edges: set[tuple[str, str]]
) -> None:
    assert SearchSpace((RATE, DECAY, BATCH, TIED)).edges(settings) == edges


def test_a_range_widens_by_its_own_length_in_its_scale_up_to_the_widest() -> None:
    assert (RATE.widened("above").low, RATE.widened("above").high) == (1e-3, pytest.approx(10.0))
    assert RATE.widened("below").low == pytest.approx(1e-5)
    assert DECAY.widened("above").high == pytest.approx(0.4)
    assert Dimension(name="x", low=1.0, high=10.0, widest=(0.5, 50.0)).widened("below").low == 0.5
    both = SearchSpace((RATE,)).widened({("lr", "below"), ("lr", "above")}).dimensions[0]
    assert (both.low, both.high) == (pytest.approx(1e-5), pytest.approx(10.0))


def test_choices_widen_by_the_next_one_until_there_is_none() -> None:
    below = BATCH.widened("below")
    assert (below.choices, below.wider) == ((4, 8, 16, 32), ((2,), (64,)))
    assert below.widened("below").choices == (2, 4, 8, 16, 32)
    assert below.widened("below").ends("below")
    assert BATCH.widened("above").ends("above")
    assert not BATCH.ends("above")


def test_points_of_a_widened_space_lie_in_what_was_added() -> None:
    space = SearchSpace((RATE, DECAY, BATCH)).widened({("lr", "above"), ("batch", "below"), ("other", "above")})
    around = {"lr": 0.09, "decay": 0.1, "batch": 8}
    points = space.points(quasi_random(3, 8, 0), around)
    assert points[0] == {**around, "lr": pytest.approx(1.0)}
    assert points[1] == {**around, "batch": 4}
    assert all(0.1 < float(point["lr"]) <= 10 for point in points[2::2])
    assert all(point["batch"] == 4 for point in points[3::2])
    assert len({point["decay"] for point in points[2:]}) == 6
    assert any(float(point["lr"]) < 0.1 for point in points[3::2])
    assert [one.widened for one in space.records()] == [1, 0, 1]


def test_a_side_that_was_widened_twice_adds_only_the_last_part() -> None:
    space = SearchSpace((RATE,)).widened({("lr", "above")}).widened({("lr", "above")})
    assert space.dimensions[0].high == pytest.approx(10 ** (1 + 4))
    assert all(float(point["lr"]) > 10 for point in space.points(quasi_random(1, 8, 0), None))
    again = space.widened(set())
    assert any(float(point["lr"]) < 10 for point in again.points(quasi_random(1, 8, 0), None))


def test_two_added_parts_are_both_drawn_from() -> None:
    space = SearchSpace((RATE,)).widened({("lr", "above"), ("lr", "below")})
    found = [float(point["lr"]) for point in space.points(quasi_random(1, 16, 0), {"lr": 0.099})]
    assert found[0] == pytest.approx(1.0)
    assert all(rate < 1e-3 or rate > 1e-1 for rate in found)
    assert 6 <= sum(rate < 1e-3 for rate in found) <= 9


def test_records_say_where_nothing_lies_beyond() -> None:
    assert SearchSpace((DECAY, TIED)).records() == (
        DimensionRecord("decay", 0.0, 0.2, False, (), 0, ends_below=True, ends_above=False),
        DimensionRecord("tied", 0.0, 0.0, False, ("False", "True"), 0, ends_below=True, ends_above=True),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 0.0, "high": 1.0}, "above 0"),
        ({"low": 2.0, "high": 1.0}, "let it grow"),
        ({}, "or give choices"),
        ({"low": 1.0, "high": math.inf}, "let it grow"),
        ({"low": 1.0, "high": 2.0, "widest": (1.5, 3.0)}, "isn't inside of its widest"),
        ({"choices": (1, 2), "wider": ((), (2,))}, "repeat one"),
        ({"choices": (0, 1, True)}, "repeat one: 0, 1, True"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Dimension(name="x", **options)  # type: ignore[arg-type]


def test_known_settings_are_checked() -> None:
    space = SearchSpace((RATE, BATCH))
    assert space.as_settings({"batch": 8, "lr": 0.01}) == {"lr": 0.01, "batch": 8}
    given = space.as_settings({"batch": 8.0, "lr": 0.01})
    assert settings_key(given) == settings_key({"lr": 0.01, "batch": 8}), "no setting of its own"
    for wrong, words in (
        ({"lr": 0.01}, "name"),
        ({"lr": 0.5, "batch": 8}, "isn't from 0.001 to 0.1"),
        ({"lr": 0.01, "batch": 4}, "has no choice 4"),
    ):
        with pytest.raises(ValueError, match=words):
            space.as_settings(wrong)
