"""A model that reads how many batches its BatchNorm has counted reads the same number in each microbatch of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati import Classification, RunConfig, Trainer
from cosmati.core.plan import Promise
from cosmati.methods import SAM
from cosmati.optim import SGD
from tests.processes import launch_ranks

pytestmark = pytest.mark.long

WORKER = """
import hashlib
import torch
from cosmati import Classification, RunConfig, Trainer
from cosmati.optim import SGD
from tests.train.test_counted_batches import Counts, data

torch.manual_seed(0)
model = Counts()
config = RunConfig(budget="3ba", num_threads=1, num_microbatches=4)
trainer = Trainer(model, Classification(3), data(), optimizers=SGD(lr=0.1), config=config)
trainer.fit()
assert trainer.plan.holds("elastic")
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


class Counts(nn.Module):
    """Warms up by what its BatchNorm has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(rows))
        output: torch.Tensor = self.last(hidden * (1 + 0.1 * self.norm.num_batches_tracked))
        return output


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=generator), torch.arange(16) % 3) for _ in range(3)]


@pytest.mark.parametrize("methods", [[], [SAM(rho=0.05)]], ids=["alone", "two passes"])
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_each_microbatch_reads_what_was_counted_before_the_step(num_microbatches: int, methods: list[SAM]) -> None:
    seen: list[int] = []
    model = Counts()
    model.norm.register_forward_hook(lambda norm, *_: seen.append(int(norm.num_batches_tracked)))
    config = RunConfig(budget="3ba", num_threads=1, num_microbatches=num_microbatches)
    trainer = Trainer(model, Classification(3), data(), optimizers=SGD(lr=0.1), methods=methods, config=config)
    trainer.fit()
    num_passes = num_microbatches * (1 + len(methods))
    assert seen == [1 + step * num_microbatches for step in range(3) for _ in range(num_passes)]
    assert int(model.norm.num_batches_tracked) == 3 * num_microbatches


@pytest.mark.timeout(300)
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    """The plan promises it."""
    (tmp_path / "worker.py").write_text(WORKER)
    one, *others = (said for world in (1, 2, 4) for said in launch_ranks([tmp_path / "worker.py"], world))
    assert set(others) == {one}


def test_a_bare_loop_counts_otherwise_and_the_plan_says_so() -> None:
    config = RunConfig(budget="3ba", num_threads=1, num_microbatches=2)
    trainer = Trainer(Counts(), Classification(3), data(), optimizers=SGD(lr=0.1), config=config)
    trainer.fit()
    assert not trainer.plan.holds(Promise.PARITY)
    assert trainer.plan.holds(Promise.ELASTIC)
