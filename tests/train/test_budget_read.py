"""A checkpoint says whether a method has acted by how long the run is to be, and whether it says all that it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from cosmati import Method, RunConfig, Stage, Trainer
from cosmati.core.method import Position, State
from cosmati.core.pieces import Pieces
from cosmati.optim import SGD
from cosmati.train.continuity import Continuity
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.train.test_watching import squared_error


@dataclass(frozen=True, kw_only=True)
class Asks(Method):
    """Asks for the run's length."""

    how: str
    stage: ClassVar[Stage] = Stage.AVERAGE

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        if "unsaid" in self.how:
            assert at.budget.num_steps == 3
        if "told" in self.how:
            assert at.budget_told.num_steps == 3
        return state


def trained(folder: Path, *methods: Method) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
    config = RunConfig(budget="3ba", run_folder=folder, num_threads=1)
    trainer = Trainer(nn.Linear(2, 1), squared_error, data, optimizers=SGD(lr=0.1), methods=methods, config=config)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("how", "was_read", "is_told"),
    [("", False, True), ("told", True, True), ("unsaid", True, False), ("unsaid, told", True, False)],
)
def test_what_was_asked_of_the_budget_is_told(how: str, was_read: bool, is_told: bool, tmp_path: Path) -> None:
    trained(tmp_path, Asks(how=how))
    facts = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).facts
    assert (facts["budget_was_read"], facts["budget_use_is_told"]) == (was_read, is_told)


def test_the_form_of_a_microbatch_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks meet for it."""
    seen: list[object] = []
    see = Continuity.see
    monkeypatch.setattr(Continuity, "see", lambda self, data: (seen.append(data), see(self, data)))
    trained(tmp_path)
    assert len(seen) == 1
