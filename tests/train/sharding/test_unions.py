"""What ranks compute and send beside what their own microbatches may teach, dealt and sorted by class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.identity import check_resume
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer
from tests.train.sharding.test_full import launch

V, STEPS = 8, 50
TAUGHT = {0: {"near_input", "near_output"}, 1: {"near_output"}}
"""By class, which of two regions of as many parameters it may teach."""


def source(class_ids: torch.Tensor, *, sort_by_class: bool) -> InMemory:
    rows = (torch.zeros(len(class_ids), 2), torch.zeros(len(class_ids), dtype=torch.long))
    return InMemory(rows, 2 * V, class_ids, ("open", "doubtful"), sort_by_class=sort_by_class)


def differentiated(world: int, *, share: float, sort_by_class: bool) -> float:
    """Return what part of all gradients of regions the ranks of all slots differentiate for and send."""
    class_ids = (torch.arange(2 * V * STEPS) % 100 < 100 * share).long()
    order = source(class_ids, sort_by_class=sort_by_class).order(seed=1, num_microbatches=V, route_pure=True)
    ranks = Ranks.alone()
    ranks.world = world
    ranks.share_out(V, is_strided=True)
    found = 0
    for step in range(STEPS):
        for slot in ranks.slots(V):
            found += world * len(set.union(*(TAUGHT[order.class_id(step, m) or 0] for m in slot)))
    return found / (2 * V * STEPS)


@pytest.mark.parametrize(
    ("share", "world", "dealt", "by_class"),
    [(0.5, 1, 0.75, 0.75), (0.5, 2, 1.0, 0.75), (0.5, 4, 1.0, 0.75), (0.5, 8, 1.0, 1.0), (0.25, 2, 1.0, 0.875)],
)
def test_unions_cost_less_where_steps_are_sorted(share: float, world: int, dealt: float, by_class: float) -> None:
    """On one rank there are no unions: what is admitted is differentiated. The docs have these figures."""
    assert differentiated(world, share=share, sort_by_class=False) == pytest.approx(dealt, abs=0.01)
    assert differentiated(world, share=share, sort_by_class=True) == pytest.approx(by_class, abs=0.01)


def test_a_sorted_order_is_another_run_and_others_are_what_they_were() -> None:
    def identity(*, sort_by_class: bool) -> dict[str, object]:
        data = source(torch.arange(64) % 2, sort_by_class=sort_by_class)
        config = RunConfig(budget="1ba", num_microbatches=V)
        trainer = Trainer(torch.nn.Linear(2, 2), Classification(2), data, optimizers=SGD(lr=0.1), config=config)
        return dict(trainer.prepared.identity)

    before, after = identity(sort_by_class=False), identity(sort_by_class=True)
    assert "data.sort_by_class" not in before
    assert after == {**before, "data.sort_by_class": True}
    with pytest.raises(CheckpointError, match="sort_by_class True, was absent"):
        check_resume(before, after, asked=(), where="It")


@pytest.mark.slow
def test_ranks_meet_less_often_where_steps_are_sorted(tmp_path: Path) -> None:
    met = {}
    for case in ("routed", "sorted"):
        (tmp_path / case).mkdir()
        launch(tmp_path / case, 2, (case,), V="8", KILLED="none")
        met[case] = int((tmp_path / case / "exchanges").read_text())
    assert met["sorted"] < met["routed"]
