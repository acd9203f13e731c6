"""Three names are told, and how many more there are."""

from __future__ import annotations

import pytest

from cosmati.train.isolation import _listed


@pytest.mark.parametrize(
    ("names", "told"),
    [("a", "a"), ("ab", "a, b"), ("abc", "a, b, c"), ("abcd", "a, b, c and 1 more"), ("abcdef", "a, b, c and 3 more")],
)
def test_three_names_are_told_and_how_many_more(names: str, told: str) -> None:
    assert _listed(list(names)) == told
