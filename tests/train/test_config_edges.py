"""What a configuration may hold, at the edges of each rule: the last that's allowed, and the first that isn't."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati import RunConfig
from cosmati.errors import PlanError
from cosmati.train.config import LEARNING_CADENCES

POWERS = (1, 2, 4, 8, 64)
OTHERS = (-2, -1, 0, 3, 6, 12)
AT_LEAST_1 = ("max_ranks", "details_every", "update_norm_every", "check_every", "num_checkpoints")


@pytest.mark.parametrize(
    "given",
    [
        *({"num_microbatches": n} for n in (None, *POWERS)),
        *({"shard_ranks": n, "sharding": "full"} for n in (None, *POWERS[1:])),
        *({"virtual_shards": n} for n in (None, *POWERS[1:])),
        *({"virtual_shards": 8, "tensor_parallel": n} for n in (1, 2, 4, 8)),
        *({"parallel_styles": {"up": "colwise"}, "tensor_parallel": n} for n in POWERS),
        *({name: 1} for name in AT_LEAST_1),
        *({name: n} for name in LEARNING_CADENCES for n in (0, 1)),
        {"precision": "bfloat16", "gather_precision": "bfloat16"},
        {"entropy_every": 0, "compile_blocks": True},
        {"entropy_every": 1, "compile_blocks": False},
        {"resume_from": "whole", "on_divergence": "skip", "ledger_profile": "self"},
    ],
    ids=str,
)
def test_what_may_be_given(given: dict[str, Any]) -> None:
    config = RunConfig(**given)
    assert all(getattr(config, name) == value for name, value in given.items() if name != "parallel_styles")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"num_microbatches": n}, f"V = {n} microbatches is not a power of two") for n in OTHERS),
        *(({"shard_ranks": n, "sharding": "full"}, f"shard_ranks = {n}: so many") for n in (*OTHERS, 1)),
        *(({"shard_ranks": 2, "sharding": kind}, "shard_ranks = 2 says on") for kind in ("replicated", "optimizer")),
        *(({"virtual_shards": n}, f"virtual_shards = {n}; parts are summed") for n in (*OTHERS, 1)),
        *(({"virtual_shards": 8, "tensor_parallel": n}, f"tensor_parallel = {n} ranks can't") for n in (0, -1, 3, 16)),
        ({"tensor_parallel": 2}, "tensor_parallel = 2 ranks can't share virtual_shards=None"),
        *(
            ({"parallel_styles": {"up": "colwise"}, "tensor_parallel": n}, f"tensor_parallel = {n}; ranks sum")
            for n in OTHERS
        ),
        ({"parallel_styles": {"up": "colwise"}, "virtual_shards": 2}, "has virtual_shards, by which"),
        *(({name: n}, rf"RunConfig\.{name} = {n}; it must be at least 1") for name in AT_LEAST_1 for n in (0, -1)),
        *(({name: -1}, rf"RunConfig\.{name} = -1; it's a number of steps") for name in LEARNING_CADENCES),
        ({"precision": "float16"}, "Precision 'float16' is not known"),
        ({"gather_precision": "int8"}, "Precision 'int8' is not known"),
        ({"entropy_every": 1, "compile_blocks": True}, "entropy_every reads what modules compute"),
        ({"sharding": "some"}, "sharding = 'some' is not known"),
        ({"resume_from": "oldest"}, "resume_from = 'oldest' is not known"),
        ({"on_divergence": "go on"}, "on_divergence = 'go on' is not known"),
        ({"ledger_profile": "other"}, "ledger_profile = 'other' is not known"),
        ({"ledger_profile": "attested"}, "'attested' takes witnesses"),
        ({"witness_quorum": 1}, "witness_quorum = 1, and there are 0 witnesses"),
        ({"witness_quorum": -1}, "witness_quorum = -1, and there are 0 witnesses"),
        ({"change": "budget, nothing"}, "RunConfig.change names nothing"),
    ],
    ids=str,
)
def test_what_may_not(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        RunConfig(**given)


@pytest.mark.parametrize(
    ("given", "governed", "num"),
    [
        ({}, False, 1),
        ({}, True, 8),
        ({"num_microbatches": 2}, True, 2),
        ({"num_microbatches": 2, "max_ranks": 2}, False, 2),
        ({"num_microbatches": 2, "max_ranks": 3}, False, 4),
        ({"num_microbatches": 8, "max_ranks": 8}, True, 8),
        ({"num_microbatches": 1, "max_ranks": 9}, True, 16),
    ],
)
def test_there_are_as_many_microbatches_as_there_may_be_ranks(given: dict[str, Any], governed: bool, num: int) -> None:
    assert RunConfig(**given).resolve_microbatches(governed=governed) == num
    assert RunConfig(**given, elastic=True).resolve_microbatches(governed=False) == (num if given or governed else 8)


def test_names_are_listed_by_commas_too() -> None:
    assert RunConfig(change=" budget ,schedule").change == ("budget", "schedule")
    assert RunConfig(sensitive=["a", "b"]).sensitive == ("a", "b")
