"""No run ends well with what isn't finite, nor does a loop of one's own; what can't be saved is found at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import RunConfig, Trainer
from cosmati.errors import CheckpointError, DivergenceError
from tests.train.test_other_run_more import LABELS, ROWS, batches, loss


def dead() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A unit without gradients, whose RMSprop divides nothing by nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias[0] = -1e6
    return model, torch.optim.RMSprop(model.parameters(), eps=0.0)


@pytest.mark.parametrize("on_divergence", ["stop", "skip"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_loop_of_ones_own_does_not_end_well_with_nan(on_divergence: Any, stops: bool) -> None:
    model, optimizer = dead()
    config = RunConfig(budget="9ba" if stops else "1ba", on_divergence=on_divergence, num_threads=1)
    trainer = Trainer(model, loss, optimizers=[optimizer], config=config)
    with pytest.raises(DivergenceError, match=r"0\.weight"), trainer:  # noqa: PT012
        trainer.step((ROWS[:8], LABELS[:8]))
        if stops:
            trainer.stop()
    assert trainer._ended == "diverged"


def test_a_loop_that_fails_keeps_its_own_error() -> None:
    model, optimizer = dead()
    trainer = Trainer(model, loss, optimizers=[optimizer], config=RunConfig(budget="9ba", num_threads=1))
    with pytest.raises(ZeroDivisionError), trainer:  # noqa: PT012
        trainer.step((ROWS[:8], LABELS[:8]))
        raise ZeroDivisionError


def test_a_loop_of_ones_own_ends_well() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    mask = torch.full((3, 3), -torch.inf)
    model.register_buffer("mask", mask)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(model, loss, optimizers=[optimizer], config=RunConfig(budget="2ba", num_threads=1))
    with trainer:
        while not trainer.should_stop:
            trainer.step((ROWS[:8], LABELS[:8]))
    assert trainer._ended == "completed"


@pytest.mark.parametrize("own_loop", [False, True])
def test_what_an_optimizer_keeps_is_looked_at_without_a_folder_too(own_loop: bool) -> None:
    calls: list[int] = []

    def bursting(model: nn.Module, data: Any) -> Tensor:
        calls.append(0)
        return loss(model, data) * (1e25 if len(calls) == 2 else 1.0)

    model = nn.Linear(6, 3)
    data = None if own_loop else batches()
    optimizers = [torch.optim.Adam(model.parameters(), 0.01)]
    trainer = Trainer(model, bursting, data, optimizers=optimizers, config=RunConfig(budget="4ba", num_threads=1))
    with pytest.raises(DivergenceError, match=r"optimizer/0/(weight|bias)/exp_avg_sq"):  # noqa: PT012
        if own_loop:
            with trainer:
                while not trainer.should_stop:
                    trainer.step((ROWS[:8], LABELS[:8]))
        else:
            trainer.fit()


class Bag(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.out(self.words(rows).mean(1))
        return output


WORDS = [(torch.randint(0, 20, (8, 4), generator=torch.Generator().manual_seed(i)), LABELS[:8]) for i in range(9)]


def trained(folder: Path | None, momentum: float) -> Trainer:
    model = Bag()
    config = RunConfig(budget="9ba", run_folder=folder, num_threads=1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)]
    return Trainer(model, loss, WORDS, optimizers=optimizers, config=config)


def test_sparse_state_is_found_after_the_first_step(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", 0.9)
    with pytest.raises(CheckpointError, match=r"optimizer/0/words\.weight/momentum_buffer \(torch\.sparse_coo\)"):
        trainer.fit()
    assert trainer.clock.step == 1


def test_sparse_state_trains_where_nothing_is_saved_and_sparse_gradients_anywhere(tmp_path: Path) -> None:
    assert trained(None, 0.9).fit().outcome == "completed"
    assert trained(tmp_path / "run", 0.0).fit().outcome == "completed"
