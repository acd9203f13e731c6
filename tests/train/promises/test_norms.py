"""Norms that aren't quite BatchNorm, and weights that hooks of PyTorch's compute anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.train.promises.swapped import NUM_STEPS, Case, leaked, promised, trained


def pruned(module: nn.Module) -> nn.Module:
    """Half of a layer's weights, which a hook masks before each forward pass."""
    return prune.l1_unstructured(module, "weight", 0.5)


class Renormalised(nn.BatchNorm1d):
    """Reads its running mean in training."""

    def forward(self, rows: Tensor) -> Tensor:
        assert self.running_mean is not None
        before = self.running_mean.clone()
        output: Tensor = super().forward(rows)
        return output + (rows.mean(0) - before).detach()


def test_a_batch_norm_that_reads_its_statistics_is_watched() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Renormalised(8), nn.ReLU(), nn.Linear(8, 3))

    case = Case(build, ("0.*", "1.*"), ("3.*",))
    one, other = (trained(case, [SGD(lr=0.1)], swapped=swapped) for swapped in (None, NUM_STEPS - 1))
    assert leaked(one, other)
    assert not promised(one)
    assert not one.plan.holds(Promise.ELASTIC)
    assert "forward changes the buffers 1.num_batches_tracked, 1.running_mean, 1.running_var" in str(one.plan)
    # In order, on one rank, as in a bare loop.
    assert one.plan.holds(Promise.PARITY)
    assert one.plan.holds(Promise.RESUME)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_norm_that_runs_twice_in_a_microbatch_is_folded_once(num_microbatches: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(torch.cat([self.norm(part) for part in rows.chunk(2)]))

    rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    torch.manual_seed(0)
    model, bare = Twice(), Twice()
    bare.load_state_dict(model.state_dict())
    config = RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1)
    trainer = Trainer(model, Classification(3), [rows], optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    for part in rows[0].chunk(num_microbatches):
        bare(part)
    is_equal = torch.equal(model.norm.running_mean, bare.norm.running_mean)
    assert trainer.plan.holds(Promise.PARITY) == is_equal == (num_microbatches == 1)


class Unreading(nn.Module):
    """Has a norm, and speaks of buffers only where nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.named_buffers_seen = sum(1 for _ in self.named_buffers())

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(rows)) + 0 * self.named_buffers_seen

    def saved(self) -> list[Any]:
        return [self.state_dict(), *self.buffers()]

    def state_dict(self, *given: Any, **options: Any) -> Any:
        return super().state_dict(*given, **options)


class Reading(Unreading):
    """Looks at its norm's running statistics beside what the norm returns."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(rows) - centre_of(self.norm))


def centre_of(norm: nn.BatchNorm1d) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean.clone()


class ReadingBuffers(Unreading):
    def forward(self, rows: Tensor) -> Tensor:
        found = self.norm(rows)
        mean, *_ = self.norm.buffers()
        return self.head(found - mean)


class ReadingNamedBuffers(Unreading):
    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(rows) - self._centre())

    def _centre(self) -> Tensor:
        return dict(self.norm.named_buffers())["running_mean"]


class ReadingOwnBuffers(Unreading):
    def forward(self, rows: Tensor) -> Tensor:
        found = self.norm(rows)
        mean, *_ = super().buffers()  # Python has an operation of its own for it, from 3.12 on
        return self.head(found - mean)


def reading_state(model: Any, data: Any) -> Tensor:
    """Look at the norm's statistics from within a loss."""
    outputs = model(data[0])
    centre = list(model.norm.state_dict().values())[2].mean()
    return nn.functional.cross_entropy(outputs * (1 + centre), data[1])


def plain(model: Any, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("kind", "loss", "told"),
    [
        (Unreading, plain, ""),
        (Reading, plain, "running_mean"),
        (ReadingBuffers, plain, "buffers()"),
        (ReadingOwnBuffers, plain, "buffers()"),
        (ReadingNamedBuffers, plain, "named_buffers()"),
        (Unreading, reading_state, "state_dict()"),
    ],
)
def test_a_model_that_reads_running_statistics_keeps_parity_with_one_microbatch_only(
    kind: type[Unreading], loss: Callable[..., Tensor], told: str, num_microbatches: int
) -> None:
    batches = [(torch.randn(16, 6, generator=torch.Generator().manual_seed(n)), torch.arange(16) % 3) for n in (0, 1)]
    torch.manual_seed(0)
    model = kind()
    bare = copy.deepcopy(model)
    config = RunConfig(budget="2ba", num_microbatches=num_microbatches, num_threads=1)
    trainer = Trainer(model, loss, batches, optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    for rows, labels in batches:
        parts = zip(rows.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True)
        for part, target in parts:
            (loss(bare, (part, target)) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True))
    assert is_equal == (num_microbatches == 1 or not told)
    assert trainer.plan.holds(Promise.PARITY) == is_equal
    if not is_equal:
        assert f"model or loss read {told}, which the microbatches of a step move together" in str(trainer.plan)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("how", [weight_norm, spectral_norm, pruned])
def test_what_hooks_of_pytorch_compute_anew_is_no_state(how: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3

    def run(folder: Path | None, budget: str) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(how(nn.Linear(6, 8)), nn.Linear(8, 3))
        config = RunConfig(budget=budget, num_microbatches=2, num_threads=1, run_folder=folder, change=("budget",))
        trainer = Trainer(model, Classification(3), [rows] * 9, optimizers=[SGD(lr=0.1)], config=config)
        trainer.fit()
        return trainer

    run(tmp_path, "3ba")
    again, whole = run(tmp_path, "6ba"), run(None, "6ba")
    assert again.plan.holds(Promise.RESUME)
    # Spectral norm's vectors are buffers that each forward pass moves.
    assert whole.plan.holds(Promise.ELASTIC) == (how is not spectral_norm)
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
