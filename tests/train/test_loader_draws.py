"""A loader that restores its place, and draws the next pass's order from a generator that its state doesn't hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_loader_states import Counting, Rows, batch
from tests.train.test_other_run_more import assert_goes_on, run

pytestmark = pytest.mark.long


class Shuffling(Counting):
    """Draws with each batch what no batch shows, and the next pass's order at the end of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.order = list(range(24))

    def __iter__(self) -> Iterator[Rows]:
        while self.place < 24:
            torch.rand(1, generator=self.generator)
            self.place += 1
            yield batch(self.order[self.place - 1])
        self.epoch, self.place = self.epoch + 1, 0
        self.order = torch.randperm(24, generator=self.generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.order = list(state["order"])


@pytest.mark.parametrize("stop_at", [1, 5, 9, 12, 24, 30])
def test_its_next_pass_is_that_of_a_run_never_stopped(tmp_path: Path, stop_at: int) -> None:
    first: dict[str, Any] = {"data": Shuffling, "budget": "55ba"}
    run(tmp_path / "run", stop_at=stop_at, **first)
    assert_goes_on(tmp_path / "run", first)
