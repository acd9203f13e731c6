"""Virtual shards: real processes over gloo, however microbatches and their parts are shared out, have the same bits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks
from tests.train.sharding.virtual_worker import CASES, STEPS

QUICK = ("everything", "routed", "bfloat16")


def launch(
    folder: Path, ranks: tuple[int, int], cases: tuple[str, ...], *, stop: int = 0, shards: int = 4, **more: str
) -> dict[str, Any]:
    """Run cases on D replicas of T ranks, and return what came out."""
    replicas, degree = ranks
    command = ["-m", "tests.train.sharding.virtual_worker", folder, ",".join(cases), *map(str, (stop, shards, degree))]
    launch_ranks(command, replicas * degree, **more)
    return json.loads((folder / f"{stop}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process gives that computes all parts."""

    @cache
    def given(cases: tuple[str, ...]) -> dict[str, Any]:
        return launch(tmp_path_factory.mktemp("alone"), (1, 1), cases)

    return given


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_replicas_and_their_ranks_give_the_bits_of_one_process(
    tmp_path: Path, alone: Any, ranks: tuple[int, int]
) -> None:
    assert launch(tmp_path, ranks, QUICK) == alone(QUICK)
