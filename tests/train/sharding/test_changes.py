"""A run goes on under another sharding and on other ranks, wherever it stopped, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.sharding.test_full import QUICK, launch, plain

pytestmark = pytest.mark.long

__all__ = ["plain"]

WAYS = {
    "in short": ((2, "replicated"), (4, "optimizer"), (2, "full"), (1, "replicated")),
    "all three": ((4, "replicated"), (2, "optimizer"), (4, "full"), (2, "replicated"), (1, "full")),
    "fewer and fewer": ((4, "full"), (4, "optimizer"), (2, "full"), (2, "replicated"), (1, "optimizer")),
    "back and forth": ((2, "optimizer"), (4, "full"), (2, "full"), (4, "optimizer"), (2, "full"), (1, "replicated")),
}


def _along(folder: Path, ways: tuple[tuple[int, str], ...], cases: tuple[str, ...]) -> dict[str, Any]:
    """Train a step in each way but the last, and the rest in that; return what came out."""
    for number, (world, sharding) in enumerate(ways[:-1], 1):
        found = launch(folder, world, cases, stop=number, sharding=sharding)
        assert {(facts["outcome"], facts["step"]) for facts in found.values()} == {("stopped", number)}
    world, sharding = ways[-1]
    return launch(folder, world, cases, sharding=sharding)


def test_sharding_and_ranks_may_change_step_by_step(tmp_path: Path, plain: Any) -> None:
    expected = plain(QUICK)["everything"]
    assert _along(tmp_path, WAYS["in short"], ("everything",)) == {"everything": expected}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_so_it_does_with_matrices_and_tied_weights(tmp_path: Path, plain: Any, way: str) -> None:
    assert _along(tmp_path, WAYS[way], QUICK) == plain(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sharding", ["replicated", "optimizer"])
def test_the_quick_cases_have_the_same_bits_under_each_sharding(
    tmp_path: Path, plain: Any, sharding: str, world: int
) -> None:
    """Under full sharding, `test_full.py` says so."""
    assert launch(tmp_path, world, QUICK, sharding=sharding) == plain(QUICK)
