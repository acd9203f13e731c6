"""Full sharding: real processes over gloo, and the bits of one plain process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks

WORKER = Path(__file__).with_name("full_worker.py")
QUICK = ("adamw", "averaged", "routed", "muon", "tied")


def launch(
    folder: Path, world: int, cases: tuple[str, ...], *, stop: int = 0, sharding: str = "full"
) -> dict[str, Any]:
    """Run cases on so many ranks, and return what came out."""
    command = ["-m", "tests.train.sharding.full_worker", folder, ",".join(cases), str(stop), sharding]
    launch_ranks(command, world)
    return json.loads((folder / f"{stop}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank gives that holds everything."""

    @cache
    def given(cases: tuple[str, ...]) -> dict[str, Any]:
        return launch(tmp_path_factory.mktemp("plain"), 1, cases, sharding="replicated")

    return given


def test_two_ranks_give_the_bits_of_one(tmp_path: Path, plain: Any) -> None:
    alone = plain(QUICK)
    assert all(facts["elastic"] for facts in alone.values())
    assert launch(tmp_path, 2, QUICK) == alone
