"""What goes wrong says so, and leaves a run that can go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, Loss
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError, DivergenceError, PlanError, RunError
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW
from cosmati.provenance.taxonomy import software_licences
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

LOSS = Classification(num_classes=3)


def _steps() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(10)]


def _trainer(folder: Path | None = None, loss: Any = LOSS, lr: float = 0.01, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = RunConfig(
        **{"budget": "10ba", "num_threads": 1, "run_folder": folder, "checkpoint_every": "3ba"} | options
    )
    return Trainer(MLP((4, 8, 3)), loss, _steps(), optimizers=[AdamW(lr=lr)], config=config)


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class FailsAt:
    """A loss that is NaN in one step."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        # Without gradients it's a checkpoint's fixed microbatch.
        self._left -= torch.is_grad_enabled()
        loss = LOSS(model, data)
        return loss if self._left >= 0 else Loss(loss.sum * torch.nan, loss.weight)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_nan_loss_is_not_committed(num_microbatches: int) -> None:
    trainer = _trainer(loss=FailsAt(2 * num_microbatches), num_microbatches=num_microbatches)
    with trainer:
        trainer.step(_steps()[0])
        trainer.step(_steps()[1])
        before = copy.deepcopy(trainer.model)
        with pytest.raises(DivergenceError):
            trainer.step(_steps()[2])
    assert _equal(trainer.model, before)
    assert trainer.clock.step == 2


def test_after_divergence_the_checkpoint_is_whole(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError):
        _trainer(tmp_path, FailsAt(5)).fit()
    resumed, whole = _trainer(tmp_path, FailsAt(10**9)), _trainer()
    resumed.fit()
    whole.fit()
    assert _equal(resumed.model, whole.model)


def test_rows_that_v_does_not_divide() -> None:
    trainer = _trainer(num_microbatches=4)
    with trainer, pytest.raises(PlanError, match=r"6 rows.*V = 4.*multiple of 4"):
        trainer.step((torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    _trainer(tmp_path).fit()
    last = max((tmp_path / "checkpoints").glob("step-*"))
    content = bytearray((last / name).read_bytes())
    content[len(content) // 2] ^= 1
    (last / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        _trainer(tmp_path).fit()


def test_a_run_folder_holds_one_job(tmp_path: Path) -> None:
    with _trainer(tmp_path), pytest.raises(RunError, match="Another Trainer of this process"):
        _trainer(tmp_path).fit()
    assert _trainer(tmp_path).fit().outcome == "completed"


def test_another_recipe_does_not_resume(tmp_path: Path) -> None:
    _trainer(tmp_path).fit()
    with pytest.raises(CheckpointError, match=r"learning rate 0\.02, was"):
        _trainer(tmp_path, lr=0.02).fit()


def test_a_class_that_the_taxonomy_lacks_is_named() -> None:
    data = InMemory(_steps()[0], 4, class_names=("nobody/knows",))
    policy = "version: 1\ntaxonomy: software-licences\nrules:\n  - {class: '**', weight: 1}\n"
    with pytest.raises(PlanError, match=r"classes that the taxonomy lacks: nobody/knows\. It has .*open/permissive"):
        Trainer(
            MLP((4, 8, 3)),
            LOSS,
            data,
            optimizers=[AdamW(lr=0.01)],
            policy=load_policy(policy),
            taxonomy=software_licences(),
            config=RunConfig(budget="2ba", num_microbatches=2),
        )
