"""Two ranks that are given unlike batches, or that talk to each other by themselves, are told so by name."""

from __future__ import annotations

import json

import pytest
from torch import nn

from cosmati import Classification, Trainer
from cosmati.errors import PlanError
from cosmati.optim import SGD
from tests.processes import launch_ranks
from tests.train import rank_cases

pytestmark = pytest.mark.long

OTHER = "DataError: At step 0, rank 1 had another batch than rank 0. Every rank has to be given the same whole batch"
MET = "call collectives of torch.distributed: what they compute follows from the number of ranks"


def _told(world: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(launch_ranks([rank_cases.__file__], world)[0])
    return found


@pytest.mark.timeout(300)
def test_what_is_unlike_on_two_ranks_is_told() -> None:
    alone, both = _told(1), _told(2)
    for name in ("the same", "own loop", "told by the first", "a graph", "a graph by rows", "a hash of its own"):
        assert both[name] == alone[name]
        assert "elastic" not in both[name]
    for name in ("own loop, shares", "own loop, arrays", "a generator by rank", "a split by rank", "rows by rank"):
        assert both[name].startswith(OTHER), name
        assert "Error" not in alone[name]
    assert both["strings by rank, later"].startswith("DataError: At step 2, rank 1 had another batch")
    for name in ("other code on one rank", "other code on one rank, own loop"):
        assert both[name].startswith("PlanError: A fixed microbatch has the loss 1."), name
        assert "on rank 0, and 1." in both[name]
        assert "on rank 1, from the same weights: model or loss are other code there" in both[name]
        assert alone[name] == alone["the same"]
    for name in ("another graph on each rank", "another graph by rows"):
        assert both[name].startswith("PlanError: 0.edges (sparse)"), name
        assert "every rank has to make" in both[name]
        assert "Error" not in alone[name]
    early = "DataError: At step 3 the data of some ranks have ended, and others' haven't"
    assert both["ends earlier on one rank"].startswith(early)
    assert both["ends alike"] == alone["ends alike"] == alone["ends earlier on one rank"]
    for promise in ("parity", "elastic"):
        assert f"{promise} model or loss call all_gather(): what they compute" in both["a gathering loss"]
        assert f"{promise} model, loss or a hook {MET}" in both["a hook that sums"]
    assert "elastic model or loss call" in both["a gathering loss by rank"], "what's known to be unlike isn't refused"
    assert "elastic model or loss call all_gather()" in alone["a gathering loss"]
    assert "parity" not in alone["a gathering loss"]
    assert both["written by the first"].startswith("PlanError: The ranks have been given different runs: loss")
    assert "writer differ. Every rank" in both["written by the first"]
    assert both["DDP"].startswith("PlanError: The model is wrapped in DistributedDataParallel")


def test_a_model_that_shares_by_itself_is_refused() -> None:
    with pytest.raises(PlanError, match=r"wrapped in DataParallel.*Give the module itself"):
        Trainer(nn.DataParallel(nn.Linear(2, 3)), Classification(3), optimizers=[SGD(lr=0.1)])
