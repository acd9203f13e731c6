"""The contract in bfloat16 and with compiled blocks: methods act alike, resume alike, and keep their types."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cosmati.core.loss import Classification
from cosmati.core.method import overrides
from cosmati.data.in_memory import InMemory
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.trainer import Trainer
from tests.methods.cases import CASES, Case, Losses, StopAt, everything, run_of, same
from tests.methods.test_contract import each_case

pytestmark = pytest.mark.long

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def _trained(case: Case, **options: object) -> tuple[Trainer, Tensor]:
    losses = Losses()
    run = run_of(case, observers=[losses], **options)
    run.fit()
    return run, torch.tensor(losses.values)


@each_case
def test_bfloat16_is_near_float32_and_keeps_types(case: Case) -> None:
    runs = [_trained(case, precision=precision) for precision in ("bfloat16", "float32")]
    narrow, wide = (losses for _, losses in runs)
    assert torch.equal(narrow, wide) is not case.learns, "autocast acts"
    # bfloat16 has 8 bits: 2^-8 a rounding, and a few of them in a row.
    torch.testing.assert_close(narrow[0], wide[0], rtol=0.02, atol=0)
    torch.testing.assert_close(narrow, wide, rtol=0.15, atol=0)
    assert all(bool(value.isfinite().all()) for run, _ in runs for value in run.model.state_dict().values())
    states = [{name: value.dtype for name, value in everything(run).items()} for run, _ in runs]
    assert states[0] == states[1]


# What has a hook where autocast is; batches, schedules and what is frozen are as in float32.
_IN_AUTOCAST = ("apply", "passing", "loss", "perturbation", "gradients", "after")


# In float32 it's two microbatches.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if any(overrides(case.on, hook) for hook in _IN_AUTOCAST) else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bfloat16_resumes_with_the_same_bits(case: Case, num_microbatches: int, tmp_path: Path) -> None:
    options = {"precision": "bfloat16", "num_microbatches": num_microbatches}
    whole = run_of(case, **options)
    whole.fit()
    stop = whole.clock.step // 2
    stopped = run_of(case, run_folder=tmp_path, observers=[StopAt(stop)], **options)
    assert (stopped.fit().outcome, stopped.clock.step) == ("stopped", stop)
    resumed = run_of(case, run_folder=tmp_path, **options)
    assert resumed.fit().outcome == "completed"
    assert same(everything(resumed), everything(whole))


@pytest.fixture
def _nothing_compiled_yet() -> None:
    """Recompilations are counted by function in the whole process, and each case is a run of its own."""
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_compiled_yet")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:::torch")
@needs_a_compiler
@each_case
def test_compiled_blocks_train_and_resume_alike(case: Case, tmp_path: Path) -> None:
    # Dropout's draws are then those of the eager kernels.
    with torch._inductor.config.patch(fallback_random=True):
        eager, compiled = (_trained(case, compile_blocks=choice)[1] for choice in (False, True))
    torch.testing.assert_close(compiled, eager, rtol=2e-3, atol=0)
    options = {"compile_blocks": True}
    whole = run_of(case, **options)
    whole.fit()
    assert any(module._compiled_call_impl for module in whole.model.modules())
    plain = run_of(case)
    plain.fit()
    assert everything(whole).keys() == everything(plain).keys()
    stop = whole.clock.step // 2
    run_of(case, run_folder=tmp_path, observers=[StopAt(stop)], **options).fit()
    resumed = run_of(case, run_folder=tmp_path, **options)
    assert resumed.fit().outcome == "completed"
    assert same(everything(resumed), everything(whole))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.usefixtures("_nothing_compiled_yet")
@needs_a_compiler
def test_a_network_of_four_stages_compiles() -> None:
    torch.manual_seed(0)
    data = torch.randn(32, 1, 16, 16), torch.arange(32) % 10
    run = Trainer(
        ResNet(ResNetConfig(in_channels=1, widths=(4, 8, 12, 16), blocks_per_stage=2)),
        Classification(10),
        InMemory(data, 16),
        optimizers=[AdamW(lr=0.01)],
        evaluation=Evaluation(batches(data, 16), {"accuracy": accuracy}),
        config=RunConfig(budget="2ba", num_threads=1, compile_blocks=True),
    )
    assert run.fit().outcome == "completed"
