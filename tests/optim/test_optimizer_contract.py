"""What every optimizer owes: the same bits from any step on and on any number of ranks; what is absent stays whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from cosmati.core.loss import LanguageModel
from cosmati.core.method import Method, Position, Stage
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.methods import SAM
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import (
    SGD,
    SGDW,
    SOAP,
    AdamW,
    Aurora,
    Constant,
    Cosine,
    Lion,
    Muon,
    NorMuon,
    Optimizer,
    ScheduleFreeAdamW,
    Sophia,
    matrices,
)
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer
from tests.processes import launch_ranks

pytestmark = pytest.mark.long

NUM_STEPS = 6
SCHEDULE = Cosine(warmup="2ba")
REST = AdamW(lr=3e-3, schedule=SCHEDULE)
OPTIMIZERS: dict[str, tuple[Optimizer, ...]] = {
    "SGD": (SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, schedule=SCHEDULE),),
    "AdamW": (AdamW(lr=3e-3, decay_vectors=False, schedule=SCHEDULE),),
    "AdamW, cautious": (AdamW(lr=3e-3, weight_decay=0.1, cautious=True, schedule=SCHEDULE),),
    "AdamW, hyperball": (
        AdamW(lr=3e-3, weight_decay=0.0, hyperball=True, parameters=matrices, schedule=SCHEDULE),
        REST,
    ),
    "Aurora": (Aurora(lr=0.02, schedule=SCHEDULE), REST),
    "Lion": (Lion(lr=1e-3, weight_decay=0.1, schedule=SCHEDULE),),
    "Muon": (Muon(lr=0.02, weight_decay=0.01, schedule=SCHEDULE), REST),
    "Muon, hyperball": (Muon(lr=0.02, hyperball=True, schedule=SCHEDULE), REST),
    "NorMuon": (NorMuon(lr=0.01, weight_decay=0.01, schedule=SCHEDULE), REST),
    "SGDW": (SGDW(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, schedule=SCHEDULE),),
    "ScheduleFreeAdamW": (ScheduleFreeAdamW(lr=3e-3, weight_decay=0.01, schedule=Constant(warmup="2ba")),),
    "Sophia": (Sophia(lr=3e-3, num_labels=240, update_interval=2, schedule=SCHEDULE),),
    "SOAP": (SOAP(lr=3e-3, precondition_frequency=2, schedule=SCHEDULE),),
}
each = pytest.mark.parametrize("name", OPTIMIZERS)


class StopAt(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            os.kill(os.getpid(), 15)


def trainer(
    name: str, *, observers: Any = (), methods: Any = (), dtype: torch.dtype = torch.float32, **config: Any
) -> Trainer:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=16, num_blocks=2, num_heads=2, sequence_length=15, dropout=0.1)).to(dtype)
    tokens = torch.tensor(list(b"marble of known origin, laid piece by piece into patterns. " * 20))[:1024].view(64, 16)
    return Trainer(
        model,
        LanguageModel(),
        InMemory((tokens[:, :-1], tokens[:, 1:]), rows_per_step=16),
        optimizers=OPTIMIZERS[name],
        methods=methods,
        observers=observers,
        config=RunConfig(**{"budget": f"{NUM_STEPS}ba", "num_microbatches": 2, **config}),
    )


def everything(run: Trainer) -> dict[str, Tensor]:
    names = {id(p): n for n, p in run.model.named_parameters()}
    found = dict(run.model.state_dict())
    for scheduled in run.assembly.optimizers:
        for parameter, state in scheduled.optimizer.state.items():
            assert all(isinstance(value, Tensor) for value in state.values()), "state is tensors only"
            found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    with run.averaged() as model:
        found |= {f"averaged/{key}": value.clone() for key, value in model.state_dict().items()}
    return found


@each
def test_learns(name: str) -> None:
    losses: list[float] = []

    class Losses(Observer):
        def on_step(self, report: StepReport) -> None:
            losses.append(float(report.loss))

    trainer(name, observers=[Losses()], budget="30ba").fit()
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@each
def test_resumes_at_every_step_with_the_same_bits(name: str, every: int, tmp_path: Path) -> None:
    """One run is stopped after each step, or each second one, which then has only what a checkpoint holds."""
    whole = trainer(name)
    whole.fit()
    expected = everything(whole)
    for step in range(1, NUM_STEPS, every):
        stopped = trainer(name, run_folder=tmp_path, observers=[StopAt(step)])
        assert (stopped.fit().outcome, stopped.clock.step) == ("stopped", step)
    resumed = trainer(name, run_folder=tmp_path)
    assert resumed.fit().outcome == "completed"
    found = everything(resumed)
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@dataclass(frozen=True, kw_only=True)
class FreezeFirstBlock(Method):
    """Keeps the first block out of every second step."""

    stage: ClassVar[Stage] = Stage.ROUTE

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        return frozenset(n for n in parameters if n.startswith("blocks.0") and at.clock.step % 2)


@each
def test_what_is_absent_stays_whole(name: str) -> None:
    seen: list[dict[str, Tensor]] = []

    class Keep(Observer):
        def on_step(self, report: StepReport) -> None:
            seen.append({key: value.detach().clone() for key, value in everything(run).items()})

    run = trainer(name, methods=[FreezeFirstBlock()], observers=[Keep()])
    run.fit()
    for step in range(1, NUM_STEPS):
        moved = {key for key in seen[step] if not torch.equal(seen[step][key], seen[step - 1].get(key, torch.empty(0)))}
        assert any(key.startswith("blocks.1") for key in moved)
        assert any("blocks.0" in key for key in moved) is (step % 2 == 0), step


@each
def test_composes_with_a_second_point(name: str) -> None:
    run = trainer(name, methods=[SAM(interval=2)])
    assert run.fit().outcome == "completed"
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


def main() -> None:
    """One rank: trains with every optimizer, and rank 0 writes what each ended with."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    found = {}
    for name in OPTIMIZERS:
        run = trainer(name)
        run.fit()
        found[name] = parameter_root(everything(run)).hex()
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(out: Path, world: int) -> dict[str, str]:
    launch_ranks([__file__, out], world)
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(300)
def test_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = (launch(tmp_path / f"{world}.json", world) for world in (1, 2))
    assert set(one) == set(OPTIMIZERS)
    assert {name for name in one if one[name] != two[name]} == set()
    assert len(set(one.values())) == len(one)


def test_every_optimizer_is_under_contract() -> None:
    from cosmati import optim

    kinds = {
        kind.__name__
        for kind in (getattr(optim, name) for name in optim.__all__)
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert {type(chosen[0]).__name__ for chosen in OPTIMIZERS.values()} == kinds


if __name__ == "__main__":
    main()
