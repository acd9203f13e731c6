"""A loss that isn't finite stops the run: before its commit on CPU, at the next look on an accelerator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cosmati.errors import DivergenceError
from cosmati.train.config import RunConfig
from cosmati.train.finite import FiniteCheck, not_finite

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_one_element_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    """As isfinite finds it, in the vector's body and in its rest; the largest finite number is finite."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 64, 1001):
        values = torch.randn(size, generator=generator).to(dtype)
        values[0] = torch.finfo(dtype).max
        assert not not_finite({"whole": values, "turned": values.view(1, -1).t().expand(size, 3)})
        for bad in BAD:
            at = int(torch.randint(size, (), generator=generator))
            spoilt = values.clone()
            spoilt[at] = complex(0, bad) if dtype.is_complex else bad
            assert not_finite({"whole": values, "spoilt": spoilt, "turned": spoilt.expand(2, size).t()}) == {
                "spoilt",
                "turned",
            }


def test_a_sparse_tensor_is_finite_where_what_it_holds_is() -> None:
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0), (4,), check_invariants=True)
    spoilt = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([math.nan]), (4,), check_invariants=True)
    assert not_finite({"empty": empty, "spoilt": spoilt, "ints": torch.ones(3, dtype=torch.int64)}) == {"spoilt"}
