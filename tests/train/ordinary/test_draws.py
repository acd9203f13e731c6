"""Losses and data that draw from generators nobody named: keyed by position, the same after a resume, put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import Data
from cosmati.core.rng import DefaultGenerators
from cosmati.testing.bare_loop import bare_loop
from tests.train.ordinary.loaders import KilledError, Seen, draw_numpy, draw_python, draw_torch, trainer

pytestmark = pytest.mark.long

DRAWS = [draw_torch, draw_python, draw_numpy]
ROWS = [torch.ones(4, 2) * i for i in range(1, 9)]


class Drawing:
    """A loss that adds what it draws to its input, and fails at a call."""

    def __init__(self, draw: Callable[[], float], fails_at: int | None = None) -> None:
        self.draw, self._fails_at = draw, fails_at
        self.drawn: list[float] = []

    def __call__(self, model: nn.Module, data: Data) -> Tensor:
        drawn = self.draw()
        # Without gradients it's a checkpoint's fixed microbatch.
        if torch.is_grad_enabled():
            if len(self.drawn) == self._fails_at:
                raise KilledError
            self.drawn.append(drawn)
        return model(data + drawn).square().mean()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_loss_that_draws_resumes_to_the_same_bits(
    draw: Callable[[], float], num_microbatches: int, tmp_path: Path
) -> None:
    whole, first, second = (Drawing(draw, stop) for stop in (None, 5 * num_microbatches, None))
    options = {"num_microbatches": num_microbatches}
    expected = trainer(ROWS, whole, **options)
    expected.fit()
    with pytest.raises(KilledError):
        trainer(ROWS, first, tmp_path, **options).fit()
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    again = trainer(ROWS, second, tmp_path, **options)
    again.fit()
    assert first.drawn + second.drawn == whole.drawn
    assert len(set(whole.drawn)) == 8 * num_microbatches
    for one, other in zip(again.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_loss_that_draws_is_the_bare_loop(draw: Callable[[], float], num_microbatches: int) -> None:
    run, drawing = trainer(ROWS, Drawing(draw), num_microbatches=num_microbatches), Drawing(draw)
    plain = copy.deepcopy(run.model)
    run.fit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    with DefaultGenerators(torch.device("cpu")).restored():
        bare_loop(plain, drawing, [batch.chunk(num_microbatches) for batch in ROWS], optimizer, seed=5)
    for one, other in zip(run.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_process_has_its_generators_back() -> None:
    def states() -> tuple[Any, ...]:
        legacy: Any = np.random.get_state()  # noqa: NPY002
        return random.getstate(), legacy[1].tolist(), legacy[2], torch.get_rng_state().tolist()

    run = trainer(ROWS, Drawing(lambda: draw_torch() + draw_python() + draw_numpy()))
    before = states()
    run.fit()
    assert states() == before


class Augmented(Sequence[Tensor]):
    """Batches by position, with something drawn each time."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        return ROWS[index] + self.draw()


@pytest.mark.parametrize("draw", DRAWS)
def test_a_sequence_that_draws_is_keyed_by_step(draw: Callable[[], float], tmp_path: Path) -> None:
    whole, first, second = Seen(), Seen(fails_at=3), Seen()
    trainer(Augmented(draw), whole).fit()
    with pytest.raises(KilledError):
        trainer(Augmented(draw), first, tmp_path).fit()
    again = trainer(Augmented(draw), second, tmp_path)
    again.fit()
    assert first.steps + second.steps == whole.steps
    assert again.plan.holds("resume")


def test_a_smaller_last_batch_trains_at_v_of_one() -> None:
    loader = DataLoader(TensorDataset(torch.arange(36.0).view(18, 2)), batch_size=8)
    rows: list[int] = []

    def loss(model: nn.Module, data: Data) -> Tensor:
        rows.append(len(data[0]))
        return model(data[0]).square().mean() * 1e-6

    run = trainer(loader, loss, budget="2ep")
    assert run.fit().clock[:4] == (6, 2, 0, 36)
    assert rows == [8, 8, 2] * 2
