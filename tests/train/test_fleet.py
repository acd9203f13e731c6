"""Machines of a fleet: what differs between ranks withdraws what rests on it, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.plan import Facts, Promise, make_plan
from cosmati.errors import PlanError
from cosmati.records.run import RunRecord
from cosmati.train.facts import describe_environment
from cosmati.train.fleet import surroundings_of, without_unlike
from tests.processes import launch_ranks

pytestmark = pytest.mark.long

SCRIPT = """
import os, sys, torch
from pathlib import Path
from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW

rank = int(os.environ["RANK"])
OTHER
generator = torch.Generator().manual_seed(1)
data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
torch.manual_seed(0)
config = RunConfig(budget="2ba", num_microbatches=4, run_folder=Path(sys.argv[1]), ledger=True)
trainer = Trainer(MLP((6, 8, 3)), Classification(3), data, optimizers=[AdamW(lr=0.01)], config=config)
trainer.fit()
"""


def _run(folder: Path, other: str) -> RunRecord:
    (folder / "script.py").write_text(SCRIPT.replace("OTHER", other))
    launch_ranks([folder / "script.py", folder / "run"], 2)
    return RunRecord.from_json((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("other", "because"),
    [
        ("torch.set_num_threads(1 + rank)", "ranks run on unlike machines: threads 1 on rank 0, 2 on rank 1"),
        ("torch.set_num_threads(1)", ""),
    ],
)
def test_ranks_with_unlike_threads_promise_less(tmp_path: Path, other: str, because: str) -> None:
    record = _run(tmp_path, other)
    held = {one.name: one for one in record.guarantees}
    for name in ("resume", "elastic", "replayable"):
        assert held[name].holds is not bool(because)
        assert ("unlike machines" in held[name].because) is bool(because)
        assert because in held[name].because


@pytest.mark.parametrize("threads", ["1 + rank", "1"])
def test_unlike_machines_may_compute_unlike_losses_and_like_ones_may_not(tmp_path: Path, threads: str) -> None:
    scaled = "lambda model, data: torch.nn.functional.cross_entropy(model(data[0]), data[1]) * (1 + rank)"
    other = f"torch.set_num_threads({threads}); Classification = lambda _: {scaled}"
    if threads == "1":
        with pytest.raises(AssertionError, match="PlanError: A fixed microbatch has the loss"):
            _run(tmp_path, other)
    else:
        held = {one.name: one for one in _run(tmp_path, other).guarantees}
        assert "unlike machines" in held["elastic"].because


def test_ranks_with_unlike_releases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"unlike releases of torch: .* on rank 0, 2.9.1 on rank 1"):
        _run(tmp_path, "torch.__version__ = '2.9.1+cpu' if rank else torch.__version__")


PLAN = make_plan([], Facts(num_microbatches=4, rows_per_microbatch=8, positional_data=True, has_ledger=True))
OWN = surroundings_of(describe_environment(torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("device", ["H200", "H100", "H200"], "device H200 on ranks 0, 2, H100 on rank 1"),
        ("cpu_capability", ["AVX512", "AVX512", "AVX2"], "instruction set AVX512 on ranks 0 to 1, AVX2 on rank 2"),
        ("torch", ["2.13.0+cpu", "2.13.0", "2.13.0"], "build of PyTorch 2.13.0+cpu on rank 0, 2.13.0 on ranks 1 to 2"),
        ("cuda", ["", "12.6", "12.6"], "cuda none on rank 0, 12.6 on ranks 1 to 2"),
    ],
)
def test_what_differs_is_told_by_rank(name: str, values: list[str], told: str) -> None:
    plan = without_unlike(PLAN, [{**OWN, name: value} for value in values])
    for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE, Promise.PARITY):
        assert PLAN.holds(promise)
        assert not plan.holds(promise)
        assert [g.because for g in plan.guarantees if g.promise is promise] == [f"ranks run on unlike machines: {told}"]


def test_what_is_compared_between_ranks() -> None:
    assert {"device", "cpu_capability", "torch", "cuda", "threads", "cosmati"} <= OWN.keys()


def test_what_chooses_other_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    told = [OWN, surroundings_of(describe_environment(torch.device("cpu")))]
    plan = without_unlike(PLAN, told)
    because = {g.because for g in plan.guarantees if g.promise is Promise.ELASTIC}
    assert not plan.holds(Promise.ELASTIC)
    assert "MKL_CBWR=COMPATIBLE on rank 1" in because.pop()


def test_machines_of_a_kind_may_have_more_cores() -> None:
    cores = [surroundings_of({**OWN, "device": f"A Processor, {count} cores"}) for count in (8, 64)]
    assert without_unlike(PLAN, cores) is PLAN


@pytest.mark.parametrize("name", ["torch", "cosmati"])
def test_another_release_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"unlike releases of {name}: 1.0 on rank 0, 1.1 on rank 1"):
        without_unlike(PLAN, [{**OWN, name: "1.0"}, {**OWN, name: "1.1"}])
