"""A loss that isn't finite stops the run: before its commit on CPU, at the next look on an accelerator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cosmati.errors import DivergenceError
from cosmati.train.config import RunConfig
from cosmati.train.finite import FiniteCheck

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BAD)
def test_on_a_cpu_the_loss_is_refused_before_its_commit(value: float) -> None:
    check = FiniteCheck(RunConfig(), torch.device("cpu"))
    for step in range(60):
        check.check(torch.tensor(1e30), step)
    with pytest.raises(DivergenceError, match=rf"The loss is {value} at step 60 and isn't committed") as error:
        check.check(torch.tensor(value), 60)
    assert "No run_folder is set" in str(error.value)
    with pytest.raises(DivergenceError, match="at step 61"):
        check.check(torch.tensor(value), 61)
    check.look(62)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("bad_at", [0, 3, 4, 5, 9])
def test_an_accelerator_is_looked_at_as_often_as_asked(value: float, bad_at: int) -> None:
    check = FiniteCheck(RunConfig(check_every=5, run_folder=Path("somewhere")), torch.device("meta"))
    looked_at = 4 if bad_at <= 4 else 9
    for step in range(looked_at):
        check.check(torch.tensor(value if step == bad_at else 1.0, requires_grad=True), step)
    last = torch.tensor(value if looked_at == bad_at else 1.0)
    with pytest.raises(
        DivergenceError, match=rf"A loss or a gradient in the 5 steps up to {looked_at} isn't finite"
    ) as error:
        check.check(last, looked_at)
    assert "Checkpoints before it are whole" in str(error.value)


def test_a_look_sees_what_came_since_the_last_one() -> None:
    check = FiniteCheck(RunConfig(check_every=50), torch.device("meta"))
    check.look(0)
    check.check(torch.tensor(1.0), 0)
    check.look(1)
    check.check(torch.tensor(math.nan), 1)
    check.check(torch.tensor(1.0), 2)
    with pytest.raises(DivergenceError, match="up to 3"):
        check.look(3)
