"""Odd models have the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import json

import pytest

from tests.processes import launch_ranks
from tests.train import hostile_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _launch(world: int) -> dict[str, str]:
    """Run the worker on so many ranks, and return what rank 0 found."""
    found: dict[str, str] = json.loads(launch_ranks([hostile_worker.__file__], world)[0])
    return found


def test_odd_models_have_the_same_bits_on_any_number_of_ranks() -> None:
    alone = _launch(1)
    assert len(set(alone.values())) == len(alone)
    assert _launch(2) == alone
    assert _launch(4) == alone
