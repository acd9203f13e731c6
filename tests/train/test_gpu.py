"""The guarantees on a GPU; `bash benchmarks/gpu.sh` runs them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.core.state import model_tensors, parameter_root
from cosmati.methods import EMA, MixUp
from cosmati.testing.bare_loop import bare_loop
from cosmati.train.config import Precision

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).cuda()


def data() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return InMemory((torch.randn(256, 16, generator=generator), torch.randint(0, 4, (256,), generator=generator)), 24)


def config(v: int, folder: Path | None = None, budget: str = "50ba", precision: Precision = "float32") -> RunConfig:
    return RunConfig(budget=budget, num_microbatches=v, run_folder=folder, checkpoint_every="10ba", precision=precision)


@pytest.mark.parametrize("v", [1, 4])
def test_parity_with_the_bare_loop(v: int) -> None:
    ours, theirs = network(), network()
    source = data()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    Trainer(ours, Classification(4), source, optimizers=[optimizer], config=config(v)).fit()
    order = source.order(seed=0, num_microbatches=v, route_pure=False)
    steps = [[order.microbatch(s, m).to(torch.device("cuda")).data for m in range(v)] for s in range(50)]
    torch.use_deterministic_algorithms(mode=True)
    try:
        bare_loop(theirs, Classification(4), steps, torch.optim.AdamW(theirs.parameters(), lr=1e-3))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_gives_the_same_bits(tmp_path: Path, precision: Precision) -> None:
    def run(folder: Path, stop: int | None) -> nn.Module:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        methods = [MixUp(), EMA(half_life="10ba")]
        settings = config(4, folder, precision=precision)
        trainer = Trainer(model, Classification(4), data(), optimizers=[optimizer], methods=methods, config=settings)
        if stop is None:
            trainer.fit()
            return model
        with trainer:
            for _ in range(stop):
                assert trainer.feed is not None
                parts = trainer.feed.microbatches(trainer.clock, range(4))
                assert parts is not None
                trainer.step_microbatches(parts, [None] * 4)
        return model

    start = network()
    whole = run(tmp_path / "whole", None)
    run(tmp_path / "parts", 17)
    resumed = run(tmp_path / "parts", None)
    assert parameter_root(model_tensors(whole)) == parameter_root(model_tensors(resumed))
