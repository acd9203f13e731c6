"""Models of the user's own in parts: slips that several ranks alone would show are refused by name, at the start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cosmati.errors import PlanError
from tests.processes import launch_ranks
from tests.train.sharding.mistaken_worker import Own, planned, said_of

NAMED = {
    "no copies": "the gradient of embedding.weight",
    "no total": "the loss",
    "draws": "draws",
    "statistics": "statistics",
    "a bias in each part": "the gradient of bias",
}


@pytest.mark.parametrize(
    "slips", [("draws", "a bias in each part"), pytest.param(tuple(NAMED), marks=pytest.mark.slow)]
)
def test_a_slip_that_several_ranks_alone_would_show_is_refused_by_all_before_a_step(slips: tuple[str, ...]) -> None:
    alone = said_of("none", 1)
    for said in launch_ranks(["-m", "tests.train.sharding.mistaken_worker", "2", ",".join(("none", *slips))], 2):
        found = json.loads(said)
        assert found.pop("none") == alone
        assert found.keys() == {*slips}
        for slip, told in found.items():
            assert told.startswith("With tensor_parallel=2, Own computes other bits than in one process: ")
            assert NAMED[slip] in told, slip


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((), r"Own.compute_in_parts returned \(\)\. Return the names"),
        (["up.weight"], "Own.compute_in_parts returned .*Return the names"),
        ({"up.weight": "0"}, "Own.compute_in_parts returned .*Return the names"),
        ({"up.weight": 2}, r"up.weight of shape \(16, 8\) can't be cut along dimension 2"),
        ({"head.weight": 0}, r"head.weight of shape \(11, 8\) can't be cut along dimension 0 into virtual_shards=4"),
    ],
)
def test_what_a_model_says_of_its_parts_is_looked_at_on_one_rank_too(told: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(Own(told=told), 2)


def test_names_that_are_none_and_dimensions_from_the_end_are_taken() -> None:
    trainer = planned(Own(told={"up.weight": -2, "inner.down.weight": 1}))
    assert trainer.fit().outcome == "completed"


@pytest.mark.parametrize("hooked", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_see_a_part_of_a_gradient_are_refused(hooked: str) -> None:
    model = Own()
    getattr(model.head.weight, hooked)(lambda _: None)
    assert planned(model).plan
    getattr(model.up.weight, hooked)(lambda _: None)
    with pytest.raises(PlanError, match=r"up\.weight has hooks, and with virtual_shards=4"):
        planned(model)
