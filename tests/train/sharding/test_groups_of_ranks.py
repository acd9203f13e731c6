"""Which ranks hold a copy together, and which hold the same part of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cosmati.train.layout.shard_groups import split
from cosmati.train.ranks import Ranks
from tests.processes import launch_ranks

SCRIPT = """
import json
import torch
import torch.distributed as dist
from cosmati.train.layout.shard_groups import split
from cosmati.train.ranks import Ranks, all_gather

dist.init_process_group("gloo")
told = {}
for num in (1, 2, 4):
    shards, replicas = split(Ranks(), num, torch.device("cpu"))
    for name, own in (("shards", shards), ("replicas", replicas)):
        met = torch.zeros(own.world, dtype=torch.int64)
        if own.is_parallel:
            all_gather(met, torch.tensor([dist.get_rank()]), group=own.group)
        else:
            met += dist.get_rank()
        told[f"{name} of {num}"] = [own.rank, own.world, own.is_parallel, met.tolist()]
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_consecutive_ranks_hold_a_copy_and_each_has_a_like_one_in_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for rank, said in enumerate(launch_ranks([tmp_path / "script.py"], 4)):
        assert json.loads(said) == {
            "shards of 1": [0, 1, False, [rank]],
            "replicas of 1": [rank, 4, True, [0, 1, 2, 3]],
            "shards of 2": [rank % 2, 2, True, [rank // 2 * 2, rank // 2 * 2 + 1]],
            "replicas of 2": [rank // 2, 2, True, [rank % 2, rank % 2 + 2]],
            "shards of 4": [rank, 4, True, [0, 1, 2, 3]],
            "replicas of 4": [0, 1, False, [rank]],
        }


def test_one_process_is_a_copy_by_itself() -> None:
    shards, replicas = split(Ranks(), 1, torch.device("cpu"))
    assert [(one.rank, one.world, one.is_parallel) for one in (shards, replicas)] == [(0, 1, False)] * 2
