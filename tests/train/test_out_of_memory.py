"""Where memory is short, each microbatch is cut in two: the same rows in the step, on record, and alike at a resume."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import InMemory, Loss, RunConfig, SubStep, Trainer
from cosmati.errors import OutOfMemoryError
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import AdamW
from cosmati.train.cutting import Cuts
from cosmati.train.run.checkpoints import list_checkpoints
from tests.processes import run_python

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(64, 4, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)


class Short:
    """A loss whose microbatches have no room from some step on, where they have more than so many rows."""

    def __init__(self, largest: int, *, from_call: int = 0, in_backward: bool = False) -> None:
        self.num_calls, self._largest, self._from_call, self._in_backward = 0, largest, from_call, in_backward
        self.rows: list[int] = []

    forward_caches = ("num_calls", "rows")

    def __call__(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
        scores = model(data[0])
        if torch.is_grad_enabled():
            self.num_calls += 1
            if self.num_calls > self._from_call and len(data[0]) > self._largest:
                if not self._in_backward:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                scores.register_hook(self._fail)
            self.rows.append(len(data[0]))
        weights = torch.arange(3.0) + 1
        return Loss(cross_entropy(scores, data[1], weights, reduction="sum"), weights[data[1]].sum())

    def _fail(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def plain(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
    return Short(64)(model, data)


def network(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def trainer_of(loss: Any, folder: Path | None = None, model: nn.Module | None = None, **config: Any) -> Trainer:
    settings = {"budget": "6ba", "num_threads": 1, "run_folder": folder, "num_microbatches": 2} | config
    data = InMemory((ROWS, LABELS), 16)
    return Trainer(model or network(), loss, data, optimizers=[AdamW(lr=0.01)], config=RunConfig(**settings))


def weights(trainer: Trainer) -> list[Tensor]:
    return [*trainer.model.state_dict().values()]


def same(one: Trainer, other: Trainer) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_same_rows_teach_the_same(
    num_microbatches: int, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without draws that follow from the position, the step's mean is that of the whole, but for rounding."""
    model, cuts = network().eval(), list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuts.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short = trainer_of(
            Short(4, from_call=3, in_backward=in_backward), model=model, num_microbatches=num_microbatches
        )
        whole = trainer_of(plain, model=network().eval(), num_microbatches=num_microbatches)
        short.fit()
        whole.fit()
    for one, other in zip(weights(short), weights(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert short.cuts.pieces == 2 ** len(cuts) == 16 // num_microbatches // 4
    assert not short.plan.holds("elastic")
    assert whole.cuts.pieces == 1


@pytest.mark.parametrize("norm", [False, True])
def test_it_trains_as_if_it_had_begun_so(norm: bool) -> None:
    """Cut in the first step, it's the run with twice as many microbatches, whose piece k of m is k * V + m."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
        return ROWS[rows], LABELS[rows]

    short = trainer_of(Short(4), model=network(norm=norm))
    begun = trainer_of(plain, model=network(norm=norm), num_microbatches=4)
    order = torch.tensor([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])
    with short, begun:
        with pytest.warns(UserWarning, match="4 in place of 2 from here on"):
            short.step(data(0))
        for step in range(1, 6):
            short.step(data(step))
        for step in range(6):
            begun.step(tuple(part[order] for part in data(step)))
    assert same(short, begun)


def test_a_run_that_was_killed_cuts_where_it_did(tmp_path: Path) -> None:
    whole = trainer_of(Short(4, from_call=2 * 3), tmp_path / "whole")
    with pytest.warns(UserWarning, match="cut in two"):
        whole.fit()
    assert whole.cuts.made == [(3, 2)]
    assert whole.plan.holds("resume")
    # From before the cut and from after it; with memory enough, now.
    for stop in (2, 3, 5):
        folder = tmp_path / str(stop)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer_of(Short(4, from_call=2 * 3), folder, checkpoint_every="1ba", num_checkpoints=9).fit()
        for path in list_checkpoints(folder / "checkpoints"):
            if int(path.name.removeprefix("step-")) > stop:
                shutil.rmtree(path)
        again = trainer_of(Short(64), folder)
        if stop < 4:
            with pytest.warns(UserWarning, match="as in an earlier attempt"):
                again.fit()
        else:
            again.fit()
        assert same(again, whole), stop
        assert again.cuts.made == [(3, 2)]
        assert again.plan.holds("resume")


class Centred(nn.Module):
    """Keeps a mean that each forward pass in training moves, in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(rows.detach().mean(0), 0.1)
        return rows - self.mean


@pytest.mark.parametrize("moves", [False, True])
def test_a_pass_that_broke_off_has_moved_what_a_model_keeps(tmp_path: Path, moves: bool) -> None:
    """Nobody can take that back: who resumes wouldn't have it."""
    layers = [Centred() if moves else nn.Identity(), *network()]
    run = trainer_of(Short(4, from_call=6), tmp_path / "run", nn.Sequential(*layers), ledger=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit()
    assert run.cuts.pieces == 2
    assert run.plan.holds("resume") is not moves
    whole = trainer_of(plain, tmp_path / "whole", nn.Sequential(*layers), ledger=False)
    whole.fit()
    assert whole.plan.holds("resume")


def test_it_is_on_record(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2.00 GiB"):
        trainer_of(Short(2, from_call=2 * 3), tmp_path, ledger=True).fit()
    report = verify_ledger(tmp_path / "ledger")
    assert (report.num_steps, report.has_ended) == (6, True)
    changes = [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()]
    expected = [{"step": 3, "changes": [["microbatches", was, 2 * was]]} for was in (2, 4)]
    assert changes == expected
    assert json.loads((tmp_path / "cuts.json").read_text()) == [[3, 2], [3, 4]]


def test_rows_that_cannot_be_halved_end_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(Short(0, from_call=2 * 2), tmp_path, checkpoint_every="1ba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OutOfMemoryError, match=r"step 2, also with microbatches of 1 rows: CUDA out of memory"):
            trainer.fit()
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-00000002"


def test_sub_steps_are_taken_all_or_none() -> None:
    """The second one has no room: the first isn't taken twice."""

    def sub_steps(largest: int, **config: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)})
        short = Short(largest)
        turns = [
            SubStep("one", lambda m, d: plain(m["one"], d), "one.*"),
            SubStep("two", lambda m, d: short(m["two"], d), "two.*"),
        ]
        optimizers = [AdamW(lr=0.01, parameters="one.*"), AdamW(lr=0.01, parameters="two.*")]
        settings = {"budget": "4ba", "num_threads": 1} | config
        data = InMemory((ROWS, LABELS), 16)
        trainer = Trainer(model, turns, data, optimizers=optimizers, config=RunConfig(**settings))
        trainer.fit()
        return trainer

    with pytest.warns(UserWarning, match="cut in two"):
        short = sub_steps(4, num_microbatches=2)
    assert short.cuts.pieces == 2
    for one, other in zip(weights(short), weights(sub_steps(64, num_microbatches=2)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_another_runtime_error_is_none_of_its() -> None:
    def broken(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    for num_microbatches in (1, 2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            trainer_of(broken, num_microbatches=num_microbatches).fit()


def test_cuts_that_come_are_those_of_the_later_attempt() -> None:
    cuts = Cuts([(2, 2)], [(5, 4), (7, 8)])
    assert cuts.pieces == 2
    assert [step for step in range(9) if cuts.is_due(step)] == [5, 7]
    cuts.halve(5)
    assert (cuts.pieces, cuts.is_due(5), cuts.is_due(7)) == (4, False, True)


REAL = """
import resource, sys, warnings, torch
from torch import nn
from cosmati import InMemory, RunConfig, Trainer
from cosmati.optim import SGD

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 1))
rows = torch.randn(8192, 8), torch.randn(8192, 1)
config = RunConfig(budget="3ba", num_threads=1, num_microbatches=int(sys.argv[1]), progress=False)
loss = lambda m, d: nn.functional.mse_loss(m(d[0]), d[1])
with Trainer(model, loss, optimizers=[SGD(lr=0.01)], config=config) as trainer:
    trainer.step(tuple(part[:256] for part in rows))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    trainer.step(rows)
    print(trainer.cuts.pieces, trainer.clock.step)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_memory_that_is_really_short(num_microbatches: int) -> None:
    """4096 hidden units of 8192 rows take 128 MiB, several times; 160 MiB are left."""
    done = run_python(["-c", REAL, str(num_microbatches)], timeout=120)
    assert done.returncode == 0, done.stderr
    pieces, step = map(int, done.stdout.split())
    assert pieces * num_microbatches >= 4
    assert step == 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_in_lockstep_a_pass_that_broke_off_is_not_begun_anew(in_backward: bool) -> None:
    """Ranks that meet within a pass would meet at other places: the error ends the run."""
    trainer = trainer_of(loss := Short(4, from_call=4, in_backward=in_backward))
    trainer.assembly.ranks.in_lockstep = True
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.fit()
    assert (loss.num_calls, trainer.clock.step) == (5, 2)
