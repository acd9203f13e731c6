"""Who reads of an error from the midst of the optimizers' steps also reads what it leaves, and where to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati import InMemory, RunConfig, SubStep, Trainer
from cosmati.errors import PlanError
from cosmati.methods import GradientClipping

ROWS = torch.arange(24.0).view(8, 3) / 24, torch.ones(8, 1)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model(data[0]), data[1])


class Fails(torch.optim.SGD):
    """Steps its first parameter, and then fails, from its second step on."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        if self.num_steps > 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0].sub_(1.0)
            msg = "the kernel has failed"
            raise RuntimeError(msg)
        super().step(closure)


def made(num_microbatches: int = 1, losses: Any = loss, folder: Path | None = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return Trainer(
        model,
        losses,
        InMemory(ROWS, rows_per_step=4),
        optimizers=[torch.optim.SGD(model[0].parameters(), lr=0.1), Fails(model[1].parameters(), lr=0.1)],
        config=RunConfig(
            budget="4ba", num_microbatches=num_microbatches, run_folder=folder, checkpoint_every="1ba", num_threads=1
        ),
        **more,
    )


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("methods", [[], [GradientClipping(clipping_type="norm", clipping_threshold=1.0)]])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_optimizer_that_fails_midway_leaves_a_note_of_it(
    num_microbatches: int, methods: list[Any], has_folder: bool, tmp_path: Path
) -> None:
    folder = tmp_path if has_folder else None
    trainer = made(num_microbatches, folder=folder, methods=methods)
    with pytest.raises(RuntimeError, match="the kernel has failed") as caught:
        trainer.fit()
    assert caught.value.__notes__ == [
        "The optimizers were stepping: parameters and optimizer state may be half updated. Don't train on, or save, "
        "from here. "
        + (
            "A Trainer made anew goes on from the last checkpoint in its run_folder."
            if has_folder
            else "No run_folder is set, so there's no checkpoint: begin anew."
        )
    ]
    if has_folder:
        with made(num_microbatches, folder=folder, methods=methods) as again:
            assert again.clock.step == 1


def test_what_is_put_back_or_refused_or_fails_before_is_no_half_update() -> None:
    turns = [SubStep("first", loss, "0.*"), SubStep("second", loss, "1.*")]
    trainer = made(losses=turns)
    trainer.step((ROWS[0][:4], ROWS[1][:4]))
    kept = {name: value.clone() for name, value in trainer.assembly.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="the kernel has failed") as caught:
        trainer.step((ROWS[0][4:], ROWS[1][4:]))
    assert not getattr(caught.value, "__notes__", [])
    assert all(torch.equal(value, kept[name]) for name, value in trainer.assembly.model.state_dict().items())

    trainer = made()
    trainer.assembly.optimizers[0].optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(PlanError, match="another parameter group") as refused:
        trainer.step((ROWS[0][:4], ROWS[1][:4]))
    assert not getattr(refused.value, "__notes__", [])

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as before:
        made().step((torch.ones(4, 2), torch.ones(4, 1)))
    assert not [note for note in getattr(before.value, "__notes__", []) if "half updated" in note]
