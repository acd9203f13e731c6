"""What a run says of parallel styles: promises it doesn't make, what they aren't tried with, and what it's known by."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import LanguageModel
from cosmati.core.plan import Promise
from cosmati.core.virtual_shards import VirtualShards
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError, PlanError
from cosmati.methods import SeqLengthWarmup
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.layout.in_replicas import InReplicas, Parts
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.parts_compared import refuse_unlike_parts
from cosmati.train.trainer import Trainer
from tests.train.sharding.styles_worker import BOTH, ROWS, TOKENS, Slip, make_trainer


def planned(model: nn.Module | None = None, methods: Any = (), **changed: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"budget": "2ba", "num_microbatches": 2, "num_threads": 1, "parallel_styles": BOTH, "tensor_parallel": 2}
    return Trainer(
        model or Slip("none"),
        LanguageModel(TOKENS),
        InMemory(ROWS[:16], 8),
        optimizers=AdamW(lr=1e-2),
        methods=methods,
        config=RunConfig(**{**settings, **changed}),
    )


def test_what_does_not_hold_is_withdrawn_by_name() -> None:
    plain, plan = planned(parallel_styles={}, tensor_parallel=1).plan, planned().plan
    lost = {one.name for one in plan.guarantees if not one.holds} - {o.name for o in plain.guarantees if not o.holds}
    assert lost == {"elastic", "parity"}  # without a ledger nothing is replayable
    (elastic,) = (one for one in plan.guarantees if one.promise is Promise.ELASTIC)
    assert "parallel_styles cut products over tensor_parallel=2 ranks: another number of these" in elastic.because
    assert plan.holds(Promise.RESUME)
    assert planned(tensor_parallel=1).plan.holds(Promise.ELASTIC), "nothing is cut"


def test_a_run_with_a_ledger_is_not_replayable(tmp_path: Path) -> None:
    assert make_trainer("plain", 1, run_folder=tmp_path / "one").plan.holds(Promise.REPLAYABLE)
    assert not make_trainer("plain", 2, run_folder=tmp_path / "two").plan.holds(Promise.REPLAYABLE)


def test_one_process_has_the_plain_bits() -> None:
    cut, plain = planned(), planned(parallel_styles={}, tensor_parallel=1)
    assert not any("shards" in vars(module) for module in cut.model.modules())
    cut.fit()
    plain.fit()
    assert all(torch.equal(one, two) for one, two in zip(cut.model.parameters(), plain.model.parameters(), strict=True))


def test_styles_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    planned(run_folder=tmp_path).fit()
    assert planned(run_folder=tmp_path, parallel_styles=tuple(reversed(BOTH.items()))).fit().clock.step == 2
    with pytest.raises(CheckpointError, match="parallel_styles"):
        planned(run_folder=tmp_path, parallel_styles={}, tensor_parallel=1).fit()
    plain = planned(parallel_styles={}, tensor_parallel=1).prepared.identity
    assert not any("parallel" in name for name in plain)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sharding": "full"}, "sharding='full'"),
        ({"compile_blocks": True}, "compile_blocks"),
        ({"methods": [SeqLengthWarmup()]}, "SeqLengthWarmup"),
    ],
)
def test_what_is_not_tried_is_refused_by_name_on_one_rank_too(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"parallel_styles hasn't been tried with {named}"):
        planned(**changed)


def test_nothing_is_refused_where_nothing_is_cut() -> None:
    assert planned(tensor_parallel=1, methods=[SeqLengthWarmup()]).plan


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("is_alone", [True, False])
def test_nothing_is_compared_where_memory_is_too_short_alone_and_together_it_ends_the_run(
    error: Exception, is_alone: bool
) -> None:
    assembly = planned().assembly
    told: list[VirtualShards | None] = []
    shards = VirtualShards(2)
    parts = Parts(ReplicaPeers(assembly.ranks), {}, shards, told.append, None)
    layout = InReplicas(assembly.model, assembly.regions, assembly.ranks, 2, parts)

    def fails(rows: Batch) -> torch.Tensor:
        if is_alone == (told[-1] is None):
            raise error
        return LanguageModel(TOKENS)(assembly.model, rows.data).mean()

    batch = Batch(ROWS, Lineage(torch.arange(len(ROWS)), torch.zeros(len(ROWS))))
    # The others are in the middle of an exchange then.
    expected = nullcontext() if is_alone else pytest.raises(type(error))
    with assembly.statistics.captured(), expected:
        refuse_unlike_parts(dataclasses.replace(assembly, layout=layout), {"": assembly.model}, fails, batch)
    assert told == [None, shards, *([] if is_alone else [shards, shards])], "cut again"


def test_what_cannot_be_cut_is_refused_on_one_rank_too() -> None:
    with pytest.raises(
        PlanError, match=r"down\.weight of shape \(8, 16\) can't be cut .* into tensor_parallel=32 equal"
    ):
        planned(tensor_parallel=32, parallel_styles={"down": "rowwise"})
    with pytest.raises(PlanError, match="names 'middle', and Slip has no module of that name"):
        planned(parallel_styles={"middle": "colwise"})
    model = Slip("none")
    model.up.weight.register_hook(lambda _: None)
    with pytest.raises(PlanError, match=r"up\.weight has hooks, and with tensor_parallel=2"):
        planned(model)


@pytest.mark.parametrize("degree", [-2, 0, 3, 6])
def test_the_degree_is_a_power_of_two(degree: int) -> None:
    with pytest.raises(PlanError, match=f"tensor_parallel = {degree}; ranks sum in a binary tree"):
        RunConfig(parallel_styles=BOTH, tensor_parallel=degree)


def test_a_model_is_cut_by_itself_or_by_styles() -> None:
    with pytest.raises(PlanError, match="Leave one out: with virtual_shards the bits don't follow from"):
        RunConfig(parallel_styles=BOTH, virtual_shards=2, tensor_parallel=2)
    with pytest.raises(PlanError, match=r"can't share virtual_shards=None.*is cut by parallel_styles"):
        RunConfig(tensor_parallel=2)
    with pytest.raises(PlanError, match=r"Slip can't compute its products in virtual_shards=2.*by parallel_styles"):
        planned(parallel_styles={}, virtual_shards=2)


def test_other_names_lead_here() -> None:
    with pytest.raises(TypeError, match="parallel_styles="):
        RunConfig(tp_plan=BOTH)  # type: ignore[call-arg]
