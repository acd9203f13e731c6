"""Models of the user's own in parts: slips that several ranks alone would show are refused by name, at the start."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import LanguageModel
from cosmati.core.virtual_shards import VirtualShards
from cosmati.errors import PlanError
from cosmati.train.layout.in_replicas import InReplicas, Parts
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.parts_compared import refuse_unlike_parts
from tests.processes import launch_ranks
from tests.train.sharding.mistaken_worker import ROWS, SHARDS, TOKENS, Own, planned, said_of

pytestmark = pytest.mark.long

NAMED = {
    "no copies": "the gradient of embedding.weight",
    "no total": "the loss",
    "draws on the last rank": "draws",
    "draws": "draws",
    "statistics": "statistics",
    "a bias in each part": "the gradient of bias",
}


def test_a_slip_that_several_ranks_alone_would_show_is_refused_by_all_before_a_step() -> None:
    alone = said_of("none", 1)
    slips = ",".join(("none", "another loss each time", *NAMED))
    for said in launch_ranks(["-m", "tests.train.sharding.mistaken_worker", "2", slips], 2):
        found = json.loads(said)
        assert found.pop("none") == alone
        assert found.pop("another loss each time").endswith("4 runs"), "that says nothing of its parts"
        assert found.keys() == NAMED.keys()
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


@pytest.mark.parametrize(("error", "is_short"), [(MemoryError(), True), (RuntimeError("another"), False)])
def test_nothing_is_compared_where_memory_is_too_short_for_it(error: Exception, is_short: bool) -> None:
    assembly = planned(model := Own()).assembly
    parts = Parts(
        ReplicaPeers(assembly.ranks), {}, shards := VirtualShards(SHARDS), model.compute_in_parts, VirtualShards(4)
    )
    model.compute_in_parts(shards)
    layout = InReplicas(model, assembly.regions, assembly.ranks, 2, parts)
    assembly = dataclasses.replace(assembly, layout=layout)
    batch = Batch(ROWS, Lineage(torch.arange(len(ROWS)), torch.zeros(len(ROWS))))

    def objective(rows: Batch) -> torch.Tensor:
        assert rows.num_rows in (2, len(ROWS)), "a few, or all where these can't be"
        if model.shards is not shards:
            raise error
        return LanguageModel(TOKENS)(model, rows.data).mean()

    expected = nullcontext() if is_short else pytest.raises(RuntimeError, match="another")
    with assembly.statistics.captured(), expected:
        refuse_unlike_parts(assembly, {"": model}, objective, batch)
    assert model.shards is shards


@pytest.mark.parametrize("hooked", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_see_a_part_of_a_gradient_are_refused(hooked: str) -> None:
    model = Own()
    getattr(model.head.weight, hooked)(lambda _: None)
    assert planned(model).plan
    getattr(model.up.weight, hooked)(lambda _: None)
    with pytest.raises(PlanError, match=r"up\.weight has hooks, and with virtual_shards=4"):
        planned(model)
