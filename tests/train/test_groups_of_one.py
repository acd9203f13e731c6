"""Ranks that don't compute a model together need no groups beside the world's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from cosmati.train.ranks import Ranks


@pytest.mark.parametrize(("world", "degree", "joined"), [(4, 1, []), (4, 2, [2]), (4, 4, [4]), (1, 2, [])])
def test_groups_are_made_where_several_compute_together(
    world: int, degree: int, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(Ranks, "_join", lambda self, degree: found.append(degree))
    Ranks(degree)
    assert found == joined
