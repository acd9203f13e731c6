"""What every method owes: one suite over the list of them, on small real models and the real loop."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cosmati import methods as m
from cosmati.core.batch import Batch, Lineage, iterate_tensors
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Method, Position, Stage, overrides
from cosmati.core.plan import describe
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import AdamW, Cosine
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

NUM_STEPS = 5


@dataclass(frozen=True)
class Case:
    """A method with settings that act within five steps, its off-value, and what it trains on."""

    on: Method
    off: Method | None
    is_text: bool = False

    def __str__(self) -> str:
        return type(self.on).__name__


CASES = (
    Case(m.BlurPool(min_channels=1), m.BlurPool(replace_convs=False, replace_maxpools=False)),
    Case(m.ChannelsLast(), None),
    Case(m.CutMix(), m.CutMix(alpha=0.0)),
    Case(m.CutOut(), m.CutOut(num_holes=0)),
    Case(m.EMA(half_life="2ba"), m.EMA(half_life="0ba")),
    Case(
        m.GradientClipping(clipping_type="norm", clipping_threshold=0.1),
        m.GradientClipping(clipping_type="norm", clipping_threshold=float("inf")),
    ),
    Case(m.LabelSmoothing(), m.LabelSmoothing(smoothing=0.0)),
    Case(m.LayerFreezing(freeze_start=0.1), m.LayerFreezing(freeze_level=0.0)),
    Case(m.MixUp(), m.MixUp(alpha=0.0)),
    Case(m.ProgressiveResizing(delay_fraction=0.3), m.ProgressiveResizing(initial_scale=1.0)),
    Case(m.SAM(interval=2), m.SAM(rho=0.0)),
    Case(m.ScaleSchedule(ratio=0.5), m.ScaleSchedule(ratio=1.0)),
    Case(m.SelectiveBackprop(start=0.0, end=1.0), m.SelectiveBackprop(keep=1.0)),
    Case(
        m.SeqLengthWarmup(duration=0.5, min_seq_length=4, max_seq_length=15, step_size=4),
        m.SeqLengthWarmup(duration=0.0, max_seq_length=15),
        is_text=True,
    ),
)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:64] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels[:64])


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(list(b"marble of known origin, laid piece by piece into patterns. " * 20))[:1024].view(64, 16)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def network(*, is_text: bool) -> nn.Module:
    torch.manual_seed(0)
    if is_text:
        return GPT(GPTConfig(width=16, num_blocks=2, num_heads=2, sequence_length=15, dropout=0.1))
    return ResNet(ResNetConfig(widths=(4, 8), stem_max_pool=True))


def trainer(
    chosen: Sequence[Method], *, is_text: bool = False, observers: Sequence[Observer] = (), **config: Any
) -> Trainer:
    source = InMemory(text() if is_text else digits(), rows_per_step=16)
    loss = LanguageModel() if is_text else Classification(10)
    settings = {"budget": f"{NUM_STEPS}ba", "num_microbatches": 2, **config}
    optimizers = [AdamW(lr=0.01, schedule=Cosine(warmup="1ba"))]
    return Trainer(
        network(is_text=is_text),
        loss,
        source,
        optimizers=optimizers,
        methods=chosen,
        observers=observers,
        config=RunConfig(**settings),
    )


def everything(run: Trainer) -> dict[str, Tensor]:
    """Return all that a run ends with: weights, buffers, optimizer and method states."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    found: dict[str, Tensor] = dict(run.model.state_dict())
    for optimizer in run.assembly.optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    for index, state in run.states.items():
        found |= {f"method {index}/{name}": value for name, value in state.items()}
    return found


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


class StopAt(Observer):
    """Asks for a stop as an operating system does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Losses(Observer):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.values.append(float(report.loss))


def test_every_method_is_under_contract() -> None:
    assert [type(case.on) for case in CASES] == list(m.ALL)


@each_case
def test_trains_and_acts(case: Case) -> None:
    losses = Losses()
    run = trainer([case.on], is_text=case.is_text, observers=[losses], budget="24ba")
    assert run.fit().outcome == "completed"
    assert sum(losses.values[-4:]) < sum(losses.values[:4])
    without = trainer([], is_text=case.is_text, budget="24ba")
    without.fit()
    assert not same(everything(run), everything(without))


@pytest.mark.parametrize("case", [case for case in CASES if case.off], ids=str)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_off_value_is_a_bit_exact_no_op(case: Case, num_microbatches: int) -> None:
    assert case.off is not None
    off = trainer([case.off], is_text=case.is_text, num_microbatches=num_microbatches)
    off.fit()
    without = trainer([], is_text=case.is_text, num_microbatches=num_microbatches)
    without.fit()
    assert same(everything(off), everything(without))


@each_case
def test_resumes_at_every_step_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    whole = trainer([case.on], is_text=case.is_text)
    whole.fit()
    for step in range(1, whole.clock.step):
        folder = tmp_path / str(step)
        stopped = trainer([case.on], is_text=case.is_text, run_folder=folder, observers=[StopAt(step)])
        assert (stopped.fit().outcome, stopped.clock.step) == ("stopped", step)
        resumed = trainer([case.on], is_text=case.is_text, run_folder=folder)
        assert resumed.fit().outcome == "completed"
        assert same(everything(resumed), everything(whole)), step


def position(case: Case, step: int = 0) -> Position:
    model = network(is_text=case.is_text)
    loss = LanguageModel() if case.is_text else Classification(10)
    return Position(Clock(step=step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, loss)


BATCH_CASES = [case for case in CASES if overrides(case.on, "batch")]


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_rows_permuted_or_declared_coupled(case: Case, step: int) -> None:
    data = text() if case.is_text else digits()
    batch = Batch(data, Lineage.of_rows(100, 64)).select(slice(0, 16))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(step))
    changed = case.on.batch(batch, position(case, step))
    permuted = case.on.batch(batch.select(order), position(case, step))
    expected = changed.select(order) if changed.num_rows == 16 else changed
    is_equivariant = changed.num_rows == 16 and all(
        torch.equal(a, b) for a, b in zip(iterate_tensors(permuted.data), iterate_tensors(expected.data), strict=True)
    )
    assert is_equivariant or "rows" in case.on.couples
    assert changed.num_rows == len(next(iterate_tensors(changed.data)))


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_lineage_names_every_row_that_is_in_the_content(case: Case, step: int) -> None:
    """Each row's content is its own id, so that what a row was made of can be read from it."""
    ids = torch.arange(1, 17)
    shape = (16, 15) if case.is_text else (16, 1, 8, 8)
    content = ids.view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    target = content if case.is_text else ids % 10
    batch = Batch((content if case.is_text else content.float(), target), Lineage(ids, torch.zeros_like(ids)))
    changed = case.on.batch(batch, position(case, step))
    lineage = changed.lineage
    parents = lineage.row_ids[:, None] if lineage.parents is None else lineage.parents
    for row, own in zip(changed.input, parents, strict=True):
        values = row[row != 0].unique()
        low, high = float(own.min()) - 1e-4, float(own.max()) + 1e-4
        # Nothing but holes and one mixture of the parents, or pieces of them side by side.
        assert len(values) == 1 or set(values.tolist()) <= set(own.tolist())
        assert all(low <= value <= high for value in values.tolist())


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_parameters = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return on_parameters + sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@each_case
def test_leaves_no_hooks_and_the_users_own(case: Case) -> None:
    run = trainer([case.on], is_text=case.is_text)
    calls: list[int] = []
    run.model.register_forward_hook(lambda *_: calls.append(1))
    run.fit()
    assert hooks(run.model) == 1
    assert len(calls) >= 2 * run.clock.step
    assert all(p.requires_grad for p in run.model.parameters())


@each_case
def test_exports_to_a_plain_module(case: Case) -> None:
    run = trainer([case.on], is_text=case.is_text)
    run.fit()
    model = run.model.eval()
    example = (text() if case.is_text else digits())[0][:4]
    exported = torch.export.export(model, (example,)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    torch.testing.assert_close(exported(example), model(example))
    plain = network(is_text=case.is_text)
    plain.load_state_dict(model.state_dict(), strict=True)


@each_case
def test_trains_under_bfloat16(case: Case) -> None:
    run = trainer([case.on], is_text=case.is_text, precision="bfloat16", budget="3ba")
    run.fit()
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


# Methods of images say so when they are given text, and the other way round.
NOT_FOR_TEXT = (m.CutMix, m.CutOut, m.MixUp, m.ProgressiveResizing)
PAIRS = list(itertools.combinations(CASES, 2))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_pairs_compose_or_are_refused(pair: tuple[Case, Case]) -> None:
    is_text = any(case.is_text for case in pair)
    if is_text and any(isinstance(case.on, NOT_FOR_TEXT) for case in pair):
        with pytest.raises(PlanError, match=r"changes (images|features or images), and .* is tokens. Remove it"):
            trainer([case.on for case in pair], is_text=True)
        return
    if is_text and any(isinstance(case.on, m.BlurPool) for case in pair):
        with pytest.warns(UserWarning, match="BlurPool changes nothing"):
            run = trainer([case.on for case in pair], is_text=True, budget="3ba")
    else:
        run = trainer([case.on for case in pair], is_text=is_text, budget="3ba")
    assert [type(method) for method in run.plan.methods] == [
        type(case.on) for case in sorted(pair, key=lambda case: case.on.stage)
    ]
    run.fit()
    assert run.clock.step == run.assembly.budget.num_steps
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


@pytest.mark.parametrize("case", [case for case in CASES if case.on.claims], ids=str)
def test_two_owners_of_one_thing_are_refused(case: Case) -> None:
    with pytest.raises(PlanError, match="both own the evaluation weights"):
        trainer([case.on, dataclasses.replace(case.on)], is_text=case.is_text)


@each_case
def test_the_plan_shows_it(case: Case) -> None:
    run = trainer([case.on], is_text=case.is_text)
    assert describe(case.on) in str(run.plan)
    assert run.plan.digest != trainer([], is_text=case.is_text).plan.digest
    assert isinstance(case.on.stage, Stage)
