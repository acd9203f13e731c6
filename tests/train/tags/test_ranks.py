"""Tags on two ranks: each says of its own rows what their content shows, and both together what one rank says."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.processes import launch_ranks
from tests.train.tags.pipelines import written

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_tags_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    seen: list[list[list[int]]] = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        (folder / "shards").mkdir(parents=True)
        written(folder / "shards")
        launch_ranks([WORKER, folder], world)
        told = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(world)]
        seen.append([sorted(chain(*parts)) for parts in zip(*told, strict=True)])
    assert seen[0] == seen[1]
    assert all(seen[0])
