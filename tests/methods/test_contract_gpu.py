"""The contract on a GPU: every method trains there, stays there, and resumes to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.batch import Batch, Lineage, iterate_tensors, map_tensors
from cosmati.core.method import overrides
from tests.methods.cases import CASES, Case, StopAt, digits, everything, run_of, same, text
from tests.methods.test_contract import position

pytestmark = pytest.mark.gpu
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_trains_and_resumes_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    whole = run_of(case, device="cuda")
    assert whole.fit().outcome == "completed"
    assert all(value.is_cuda for value in whole.model.state_dict().values())
    assert all(bool(value.isfinite().all()) for value in whole.model.state_dict().values())
    stop = whole.clock.step // 2
    stopped = run_of(case, device="cuda", run_folder=tmp_path, observers=[StopAt(stop)])
    assert (stopped.fit().outcome, stopped.clock.step) == ("stopped", stop)
    resumed = run_of(case, device="cuda", run_folder=tmp_path)
    assert resumed.fit().outcome == "completed"
    assert same(
        {k: v.cpu() for k, v in everything(resumed).items()}, {k: v.cpu() for k, v in everything(whole).items()}
    )


@pytest.mark.parametrize("case", [case for case in CASES if overrides(case.on, "batch")], ids=str)
def test_batches_stay_on_the_device_and_draws_are_those_of_the_host(case: Case) -> None:
    data = text() if case.is_text else digits()
    at = position(case, step=1)
    batch = Batch(data, Lineage.of_rows(0, 64)).select(slice(0, 16))
    here = case.on.batch(batch, at)
    at.model.cuda()
    there = case.on.batch(Batch(map_tensors(lambda t: t.cuda(), batch.data), batch.lineage), at)
    assert all(tensor.is_cuda for tensor in iterate_tensors(there.data) if tensor.ndim)
    for a, b in zip(iterate_tensors(here.data), iterate_tensors(there.data), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-3)
