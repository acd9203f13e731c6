"""Facts, ranks and outcomes made by hand: what the engine's parts need of a run where there is no trainer."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Clock
from cosmati.core.method import Method
from cosmati.core.plan import Facts, make_plan
from cosmati.routing.policy import CompiledPolicy, Phase
from cosmati.routing.regions import Regions
from cosmati.train.facts import RunFacts
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.routes import Route

REGIONS = Regions(("body", "head"), (("0.weight",), ("1.weight",)), (("body",), ("head",)))
POLICY = CompiledPolicy(
    classes=("free", "bound", "late"),
    partition=REGIONS,
    phases=(Phase("first", 0, 10), Phase("second", 10, 20)),
    weight=(((1.0, 1.0), (1.0, 1.0)), ((0.0, 1.0), (0.0, 0.5)), ((0.0, 0.0), (1.0, 1.0))),
    decision=(("admit", "admit"), ("admit", "gate"), ("defer", "admit")),
    policy_digest=b"P" * 32,
    taxonomy_digest=b"T" * 32,
)


def run_facts(*methods: Method, has_ledger: bool = True, **changed: Any) -> RunFacts:
    """Facts of a run of 20 steps with V = 2 and two regions."""
    about = Facts(
        num_microbatches=2, rows_per_microbatch=3, positional_data=True, has_ledger=has_ledger, settings={"lr": 0.5}
    )
    given: dict[str, Any] = {
        "recipe": "by hand",
        "plan": make_plan(methods, about),
        "seed": 7,
        "num_microbatches": 2,
        "num_steps": 20,
        "regions": REGIONS.names,
        "policy": None,
        "data_digest": "d1",
        "model_root": b"M" * 32,
        "environment": {"torch": "2", "python": "3"},
        "hardware": "an abacus",
    }
    return RunFacts(**given | changed)


class SecondOfTwo(Ranks):
    """The second of two ranks, the first of which has microbatches like its own."""

    def __init__(self, degree: int = 1) -> None:
        super().__init__(degree)
        self.world, self.rank = 2, 1

    def gather(self, rows: Tensor) -> Tensor:
        return rows.repeat_interleave(2, 0)


def rows(*ids: int, **lineage: Tensor) -> Batch:
    """A batch of so many rows, by their ids."""
    return Batch(
        torch.zeros(len(ids), 1), Lineage(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.int64), **lineage)
    )


def outcome(step: int, loss: float = 0.5, **changed: Any) -> StepOutcome:
    """What step number `step` did on two microbatches of three rows."""
    given: dict[str, Any] = {
        "batches": [rows(0, 1, 2), rows(3, 4, -1)],
        "routes": [Route(1, 0, 0, (1.0, 1.0), offered=True), Route(2, 1, 1, (0.0, 1.0), offered=True)],
        "weights": torch.tensor([3.0, 2.5], dtype=torch.float64),
        "num_rows": torch.tensor([3.0, 2.0], dtype=torch.float64),
    }
    clock = Clock(step=step + 1, rows=6 * (step + 1))
    return StepOutcome(
        **{"clock": clock, "loss": torch.tensor(loss), "sub_losses": [torch.tensor(loss)]} | given | changed
    )


class Ticks:
    """A clock that goes only when it's told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> Self:
        self.now += seconds
        return self
