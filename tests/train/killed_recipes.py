"""Runs of unlike kinds, for tests that kill them: `killed_recipes.py NAME FOLDER` trains one, and tells of events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from cosmati import (
    Batch,
    Classification,
    InMemory,
    LanguageModel,
    Lineage,
    RunConfig,
    SubStep,
    Taxonomy,
    Trainer,
    load_policy,
)
from cosmati.methods import EMA, SAM, GradientClipping, MixUp
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW, Cosine, Muon
from cosmati.optim.optimizers import matrices
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome

STEPS = 12
TAXONOMY = Taxonomy("two", "1", (("cold", "cold rows"), ("hot", "hot rows")))
POLICY = """
version: 1
taxonomy: two
regions:
  body: {params: ["0.*"]}
  head: {params: ["*"], exclude: ["0.*"]}
rules:
  - {class: "**", weight: 1}
  - {class: cold, region: body, weight: 0}
"""


def rows(num: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 6, generator=generator), torch.randint(3, (num,), generator=generator)


def tokens() -> Tensor:
    return torch.randint(64, (48, 17), generator=torch.Generator().manual_seed(1))


def of_both_classes(indices: list[int]) -> Batch:
    """Collate rows as a loader of one's own may: with their lineage."""
    ids = torch.tensor(indices)
    return Batch(tuple(one[ids] for one in rows()), Lineage(ids, (ids % 3 == 0).long()))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def classify(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def critic(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model["critic"](model["maker"](data[0]).detach()), data[0][:, :1])


def maker(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return -model["critic"](model["maker"](data[0])).mean()


class Tells(Observer):
    """Tells of each step, on the short road too."""

    def on_step(self, outcome: StepOutcome) -> None:
        print("step", flush=True)  # noqa: T201


def make(name: str, folder: Path) -> Trainer:
    """Return a trainer; everything follows from fixed seeds."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "budget": f"{STEPS}ba", "num_threads": 1, "run_folder": folder, "checkpoint_every": "2ba"
    }  # fmt: skip
    given: dict[str, Any] = {"optimizers": [AdamW(lr=0.01, schedule=Cosine())]}
    if name in ("plain", "own loop"):
        model, loss, data = network(), classify, InMemory(rows(), 8)
    elif name == "microbatches":
        model, loss, data = network(), Classification(3), InMemory(rows(), 16, tail="pad")
        config |= {"num_microbatches": 4, "ledger": True}
        given["methods"] = [
            MixUp(),
            EMA(half_life="3ba"),
            GradientClipping(clipping_type="norm", clipping_threshold=1.0),
        ]
    elif name == "governed":
        model, loss = network(), Classification(3)
        data = InMemory(rows(), 16, torch.arange(64) % 2, TAXONOMY.classes)
        config |= {"num_microbatches": 4}
        given |= {"policy": load_policy(POLICY), "taxonomy": TAXONOMY, "methods": [SAM(interval=2)]}
    elif name == "loader":
        model, loss = network(), classify
        data = DataLoader(TensorDataset(*rows(40)), batch_size=8, shuffle=True, num_workers=1)
    elif name == "mixed":
        model, loss = network(), Classification(3)
        data = DataLoader(range(64), batch_size=16, shuffle=True, num_workers=1, collate_fn=of_both_classes)
        config |= {"num_microbatches": 4}
        given |= {"policy": load_policy(POLICY), "taxonomy": TAXONOMY, "methods": [MixUp(), EMA(half_life="3ba")]}
    elif name == "sub-steps":
        model = nn.ModuleDict({"maker": nn.Linear(6, 6), "critic": nn.Linear(6, 1)})
        loss, data = (
            [SubStep("critic", critic, "critic.*"), SubStep("maker", maker, "maker.*", every=2)],
            InMemory(rows(), 8),
        )
        given["optimizers"] = [SGD(lr=0.05, momentum=0.9, parameters="critic.*"), AdamW(lr=0.01, parameters="maker.*")]
    else:
        assert name in ("tied", "ranks"), name
        model = GPT(GPTConfig(sequence_length=16, vocabulary_size=64, width=16, num_blocks=1, num_heads=2, tied=True))
        loss, data = LanguageModel(64), InMemory(tokens(), 8)
        config |= {"num_microbatches": 2, "ledger": True}
        given["optimizers"] = [Muon(lr=0.02, parameters=matrices), AdamW(lr=0.01)]
    return Trainer(model, loss, data, observers=[Tells()], config=RunConfig(**config), **given)  # type: ignore[arg-type]


NAMES = ("plain", "own loop", "microbatches", "governed", "loader", "mixed", "sub-steps", "tied", "ranks")


def train(name: str, folder: Path) -> None:
    """Train one of them to its end."""
    trainer = make(name, folder)
    if trainer.assembly.ranks.rank == 0:
        trainer.trace = lambda event: print(event, flush=True)  # noqa: T201
    if name == "own loop":
        inputs, targets = rows()
        with trainer:
            while not trainer.should_stop:
                start = 8 * (trainer.clock.step % 8)
                trainer.step((inputs[start : start + 8], targets[start : start + 8]))
    else:
        trainer.fit()
    print("ended", flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], Path(sys.argv[2]))
