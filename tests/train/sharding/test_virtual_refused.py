"""What virtual shards haven't been tried with is refused by name, on one rank too; and what a run says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.isolated import Isolated
from cosmati.core.loss import LanguageModel
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError, PlanError
from cosmati.methods import SAM, SeqLengthWarmup
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer
from cosmati.train.virtual_shards import share_parts

TURNS = [SubStep("one", LanguageModel(9), "blocks.*"), SubStep("two", LanguageModel(9), "[!b]*")]
EACH = [AdamW(lr=1e-2, parameters=turn.parameters) for turn in TURNS]
ROWS = torch.randint(9, (8, 7), generator=torch.Generator().manual_seed(0))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary_size=9, sequence_length=6, width=8, num_blocks=1, num_heads=2))


def planned(model: nn.Module | None = None, **changed: Any) -> Trainer:
    given = {name: changed.pop(name) for name in ("methods", "loss") if name in changed}
    optimizers = changed.pop("optimizers", AdamW(lr=1e-2))
    loss = given.pop("loss", LanguageModel(9))
    config = RunConfig(**{"budget": "2ba", "num_microbatches": 2, "virtual_shards": 2, "num_threads": 1, **changed})
    return Trainer(model or gpt(), loss, InMemory(ROWS, 8), optimizers=optimizers, config=config, **given)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sharding": "full"}, "sharding='full'"),
        ({"compile_blocks": True}, "compile_blocks"),
        ({"gather_precision": "bfloat16"}, "gather_precision='bfloat16'"),
        ({"entropy_every": 1}, "entropy_every"),
        ({"methods": [SeqLengthWarmup()]}, "SeqLengthWarmup"),
        ({"methods": [type("SAM", (SAM,), {})()]}, r"SAM\."),
        ({"loss": TURNS, "optimizers": EACH}, "several sub-steps"),
        ({"device": "meta"}, "device meta"),
    ],
)
def test_what_is_not_tried_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"virtual_shards=2 hasn't been tried with {named}"):
        planned(**changed)


def test_what_only_a_planned_run_tells_is_refused_by_name() -> None:
    given, ranks = planned().prepared.given, Ranks()
    ranks.has_met = True
    model = gpt()
    model.own = Isolated("open")
    with pytest.raises(PlanError, match="of one class alone; packs under a policy; collectives in model or loss"):
        share_parts(given, model, ranks, packed=True)


class Lending(nn.Module):
    """Passes on what it's asked for, as compiled modules do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(super().__getattr__("inner"), name)


def test_compiled_and_wrapped_models_are_refused() -> None:
    model = gpt()
    assert Lending(model).compute_in_parts(None)
    with pytest.raises(PlanError, match="Lending can't compute its products"):
        share_parts(planned().prepared.given, Lending(model), Ranks(), packed=False)
    model.blocks[0]._compiled_call_impl = model.forward
    with pytest.raises(PlanError, match="hasn't been tried with compiled modules"):
        planned(model)


def test_models_that_do_not_offer_it_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    with pytest.raises(PlanError, match="Sequential can't compute its products in virtual_shards=2"):
        planned(model)
    assert planned(model, virtual_shards=None).plan


@pytest.mark.parametrize("number", [-2, 0, 1, 3, 6])
def test_the_number_of_shards_is_a_power_of_two(number: int) -> None:
    with pytest.raises(PlanError, match=f"virtual_shards = {number}; parts are summed in a binary tree"):
        RunConfig(virtual_shards=number)


@pytest.mark.parametrize(("degree", "shards"), [(2, None), (8, 4), (3, 4), (0, 4), (-1, 4)])
def test_the_degree_divides_the_shards(degree: int, shards: int | None) -> None:
    with pytest.raises(PlanError, match=f"tensor_parallel = {degree} ranks can't share virtual_shards={shards}"):
        RunConfig(virtual_shards=shards, tensor_parallel=degree)


def test_ranks_that_make_no_whole_replicas_are_refused() -> None:
    ranks = Ranks.alone()
    ranks.world = 3
    with pytest.raises(PlanError, match="3 ranks can't be replicas of tensor_parallel=2 ranks each"):
        ranks._join(2)


def test_other_names_lead_here() -> None:
    with pytest.raises(TypeError, match="tensor_parallel=2"):
        RunConfig(tensor_model_parallel_size=2)  # type: ignore[call-arg]


def test_parity_is_withdrawn_and_elastic_holds() -> None:
    plan = planned().plan
    assert plan.holds(Promise.ELASTIC)
    (parity,) = (one for one in plan.guarantees if one.promise == Promise.PARITY)
    assert not parity.holds
    assert "virtual_shards=2 sums the parts of each product in a tree of its own" in parity.because
    assert planned(virtual_shards=None).plan.holds(Promise.PARITY)


def test_the_number_of_shards_is_part_of_what_a_run_is_and_the_degree_is_not(tmp_path: Path) -> None:
    planned(run_folder=tmp_path, tensor_parallel=2).fit()
    again = planned(run_folder=tmp_path, tensor_parallel=1, budget="2ba").fit()
    assert again.clock.step == 2
    with pytest.raises(CheckpointError, match="virtual_shards absent, was 2"):
        planned(run_folder=tmp_path, virtual_shards=None).fit()
    plain = planned(virtual_shards=None).prepared.identity
    assert not any("virtual" in name or "tensor_parallel" in name for name in plain)
    assert planned().plan.digest != planned(virtual_shards=None).plan.digest
    assert planned().plan.digest == planned(tensor_parallel=2).plan.digest


def test_a_model_that_was_cut_is_plain_again_in_a_plain_run(tmp_path: Path) -> None:
    model = gpt()
    planned(model)
    assert model.blocks[0].attention.shards is not None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = planned(model, virtual_shards=None, run_folder=tmp_path / "again")
    fresh = planned(virtual_shards=None)
    assert plain.prepared.identity == fresh.prepared.identity
    plain.fit()
    fresh.fit()
    assert not torch.equal(state["head.weight"], model.head.weight)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), fresh.model.parameters(), strict=True))


def test_a_model_in_another_one_is_put_back_too() -> None:
    model = gpt()
    planned(model)
    planned(nn.Sequential(model), virtual_shards=None)
    assert model.blocks[0].attention.shards is None


def test_an_export_computes_whole_products(tmp_path: Path) -> None:
    trainer = planned(run_folder=tmp_path / "run")
    trainer.fit()
    exported = trainer.export(tmp_path / "out", "safetensors")
    assert isinstance(exported, GPT)
    assert exported.blocks[0].attention.shards is None
    assert trainer.model.blocks[0].attention.shards is not None
    with torch.no_grad():
        torch.testing.assert_close(exported(ROWS[:, :6]), trainer.model.eval()(ROWS[:, :6]))
