"""Whole runs with a strategy: they resume with the same bits, and their ledgers verify and answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.method import Method
from cosmati.ledger.verify import verify_ledger
from tests.methods.cases import StopAt, everything, same
from tests.train.strategies.whole_runs import BOTH, whole_run

each = pytest.mark.parametrize("method", BOTH, ids=lambda method: type(method).__name__)


@each
def test_stopped_and_resumed_with_the_same_bits(method: Method, tmp_path: Path) -> None:
    whole = whole_run(method)
    whole.fit()
    stopped = whole_run(method, tmp_path, observers=[StopAt(2)])
    assert stopped.fit().outcome == "stopped"
    resumed = whole_run(method, tmp_path)
    assert resumed.fit().outcome == "completed"
    assert same(everything(resumed), everything(whole))
    assert verify_ledger(tmp_path / "ledger")


def test_they_train_to_bits_of_their_own() -> None:
    ends = []
    for method in BOTH:
        run = whole_run(method)
        run.fit()
        ends.append(run.model.state_dict()["stem.weight"])
    assert not torch.equal(*ends)
