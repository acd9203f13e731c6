"""Monotone cubics against scipy's, and the place where a curve is first so high against a fine scan."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from cosmati.study.interpolation import MonotoneCubic

pytestmark = pytest.mark.long

HEIGHTS = st.sampled_from([-2.0, -0.7, 0.0, 0.1, 0.11, 0.5, 3.0])


@given(st.lists(st.tuples(st.floats(0.05, 3.0), HEIGHTS), min_size=2, max_size=7))
@settings(max_examples=150, deadline=None)
def test_values_are_scipys(knots: list[tuple[float, float]]) -> None:
    """Rising, falling, flat and turning, over even and uneven steps."""
    x, y = np.cumsum([step for step, _ in knots]), np.array([height for _, height in knots])
    places = np.linspace(x[0], x[-1], 57)
    found = MonotoneCubic(np.stack([x, 2 * x]), np.stack([y, -y])).at(np.stack([places, 2 * places]))
    expected = PchipInterpolator(x, y)(places)
    np.testing.assert_allclose(found, np.stack([expected, -expected]), rtol=0, atol=1e-13)


@given(st.lists(st.tuples(st.floats(0.05, 3.0), HEIGHTS), min_size=2, max_size=6), st.floats(-2.5, 3.5))
@settings(max_examples=150, deadline=None)
def test_the_first_place_so_high_is_a_root_with_nothing_so_high_before(
    knots: list[tuple[float, float]], target: float
) -> None:
    x, y = np.cumsum([step for step, _ in knots]), np.array([height for _, height in knots])
    (found,) = MonotoneCubic(x[None], y[None]).first_reaching(np.array([target]))
    curve = PchipInterpolator(x, y)
    if target > y.max():
        assert found == math.inf
        return
    index = int(np.argmax(y >= target))
    if index == 0:
        assert found == x[0]
        return
    assert x[index - 1] <= found <= x[index]
    assert curve(found) == pytest.approx(target, abs=1e-9)
    scan = np.linspace(x[0], found, 500, endpoint=False)
    assert (curve(scan) < target + 1e-9).all()


def test_each_row_has_its_own_curve_and_target() -> None:
    generator = np.random.Generator(np.random.Philox(2))
    x, y = generator.uniform(0.1, 1.0, (200, 3)).cumsum(axis=1), generator.normal(size=(200, 3)).cumsum(axis=1)
    target = generator.normal(size=200)
    found = MonotoneCubic(x, y).first_reaching(target)
    for row in range(200):
        if y[row, 0] < target[row] <= y[row, 1]:
            root = brentq(lambda at, row=row: PchipInterpolator(x[row], y[row])(at) - target[row], *x[row, :2])
            assert found[row] == pytest.approx(root, abs=1e-9)


def test_a_knots_own_height_is_reached_there_where_the_curve_ends_flat() -> None:
    """The slope at a summit is 0, so that a search by values alone would stop before it."""
    x, y = np.array([[0.0, 0.7, 1.1]]), np.array([[0.1, 0.9, 0.3]])
    assert MonotoneCubic(x, y).first_reaching(np.array([0.9])) == [0.7]


def test_through_two_knots_it_is_a_line_and_through_one_it_is_flat() -> None:
    line = MonotoneCubic(np.array([[1.0, 3.0]]), np.array([[5.0, 1.0]]))
    np.testing.assert_allclose(line.at(np.array([[0.0, 1.0, 1.5, 3.0, 9.0]])), [[5.0, 5.0, 4.0, 1.0, 1.0]])
    dot = MonotoneCubic(np.array([[2.0]]), np.array([[0.4]]))
    assert dot.at(np.array([[1.0, 2.0, 3.0]])).tolist() == [[0.4, 0.4, 0.4]]
    assert dot.first_reaching(np.array([0.4])) == [2.0]
    assert dot.first_reaching(np.array([0.41])) == [math.inf]


def test_knots_at_one_place_are_a_jump() -> None:
    jump = MonotoneCubic(np.array([[0.0, 1.0, 1.0, 2.0]]), np.array([[0.0, 0.2, 0.8, 1.0]]))
    values = jump.at(np.array([[0.999999, 1.0, 1.000001]]))[0]
    assert values[0] == pytest.approx(0.2, abs=1e-5)
    assert values[1:] == pytest.approx([0.8, 0.8], abs=1e-5)
    assert jump.first_reaching(np.array([0.5])) == pytest.approx([1.0])
