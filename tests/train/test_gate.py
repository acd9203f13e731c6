"""Nothing that isn't finite is committed or saved, whatever made it so; and what is bad can be left out, on record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati import InMemory, Loss, RunConfig, SubStep, Trainer
from cosmati.core.method import Method, Position, Stage
from cosmati.core.pieces import Pieces, Uncut
from cosmati.core.plan import Promise
from cosmati.errors import DivergenceError
from cosmati.ledger.verify import verify_ledger
from cosmati.methods.ema import EMA
from cosmati.methods.sam import SAM
from cosmati.optim import SGD, AdamW
from cosmati.train.buffers import BatchNormStatistics
from cosmati.train.finite import FiniteCheck
from cosmati.train.layout.whole_step import WholeStep
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(32, 4, generator=GENERATOR), torch.randn(32, 1, generator=GENERATOR)


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient isn't finite from some call on."""

    @staticmethod
    def forward(context: Any, value: Tensor, by: float) -> Tensor:
        context.by = by
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.by, None


class Model(nn.Module):
    """Its weights' gradients can be spoilt while the loss stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.by = (1.0,)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = BadGradient.apply(self.norm(self.first(rows)), self.by[0])
        return self.second(hidden)


class SpoiltAt:
    """A squared error that spoils the gradients in one step."""

    forward_caches = ("_calls",)

    def __init__(self, step: int, by: float, num_microbatches: int = 1) -> None:
        self._calls, self._step, self._by, self._v = 0, step, by, num_microbatches

    def __call__(self, model: Model, data: tuple[Tensor, Tensor]) -> Tensor:
        is_training = torch.is_grad_enabled()
        step = self._calls // self._v
        self._calls += is_training
        model.by = (self._by if is_training and step == self._step else 1.0,)
        return mse_loss(model(data[0]), data[1])


def trainer_of(loss: Any, folder: Path | None = None, methods: Any = (), **config: Any) -> Trainer:
    settings = {"budget": "6ba", "num_threads": 1, "run_folder": folder, "checkpoint_every": "1ba"} | config
    return Trainer(
        Model(),
        loss,
        InMemory(ROWS, 8),
        optimizers=[AdamW(lr=0.01)],
        methods=list(methods),
        config=RunConfig(**settings),
    )


def take_steps(trainer: Trainer, num: int, without: int | None = None) -> None:
    """Take steps one by one, as if one of them had never come."""
    with trainer:
        assert trainer.feed is not None
        for step in range(num):
            mine = trainer.feed.microbatches(trainer.clock, trainer.assembly.layout.mine)
            assert mine is not None
            if step == without:
                trainer.clock = trainer.clock.advanced(8, 8, 4, 0.0)
            elif trainer.is_plain:
                trainer.plain_step(mine[0])
            else:
                trainer.step_microbatches(mine, trainer.feed.class_ids(trainer.clock))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that training moves."""
    found = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for index, scheduled in enumerate(trainer.assembly.optimizers):
        for number, state in enumerate(scheduled.optimizer.state.values()):
            found |= {f"{index}/{number}/{key}": value.clone() for key, value in state.items()}
    for index, state in trainer.states.items():
        found |= {f"m{index}/{key}": value.clone() for key, value in state.items()}
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("by", [math.nan, math.inf, 1e38])
def test_a_finite_loss_with_a_bad_gradient_is_not_committed(tmp_path: Path, num_microbatches: int, by: float) -> None:
    """1e38 squared is no float32: a gradient of that size would be committed by no optimizer of use."""
    trainer = trainer_of(
        SpoiltAt(3, by, num_microbatches), tmp_path, [EMA(half_life="2ba")], num_microbatches=num_microbatches
    )
    with pytest.raises(DivergenceError, match=r"A gradient isn't finite at step 3, and none is committed"):
        trainer.fit()
    assert trainer.clock.step == 3
    clean = trainer_of(SpoiltAt(-1, 1.0), None, [EMA(half_life="2ba")], num_microbatches=num_microbatches)
    take_steps(clean, 3)
    assert_equal(state_of(trainer), state_of(clean))
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    assert newest.name == "step-00000003"
    assert all(bool(value.isfinite().all()) for name, value in read_checkpoint(newest).model.items() if name != "mask")


@pytest.mark.long
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_bad_step_is_left_out_on_record(tmp_path: Path, num_microbatches: int) -> None:
    trainer = trainer_of(
        SpoiltAt(2, math.nan, num_microbatches),
        tmp_path,
        num_microbatches=num_microbatches,
        on_divergence="skip",
        ledger=True,
    )
    undisturbed = trainer_of(SpoiltAt(-1, 1.0), num_microbatches=num_microbatches)  # before a step
    result = trainer.fit()
    assert (result.outcome, result.clock.step) == ("completed", 6)
    left = {guarantee.promise for guarantee in trainer.plan.guarantees if "step 2 was left out" in guarantee.because}
    before = {guarantee.promise for guarantee in undisturbed.plan.guarantees if guarantee.holds}
    assert left == before & {Promise.PARITY, Promise.NO_DIRECT_WRITE, Promise.ISOLATED}
    assert not any(trainer.plan.holds(promise) for promise in left)
    assert before - left, "of others nothing is said"
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    lines = [json.loads(line) for line in (tmp_path / "ledger" / "details.jsonl").read_text().splitlines()]
    left_out = [line["step"] for line in lines if line.get("left_out")]
    assert left_out == [2]
    assert verify_ledger(tmp_path / "ledger").num_steps == 6
    # The same without the rows of that step.
    kept = trainer_of(SpoiltAt(-1, 1.0), num_microbatches=num_microbatches)
    take_steps(kept, 6, without=2)
    assert_equal(state_of(trainer), state_of(kept))


class Diverges:
    """A second sub-step's loss, which isn't finite from one step on."""

    def __init__(self, step: int) -> None:
        self._calls, self._step = 0, step

    def __call__(self, model: Model, data: tuple[Tensor, Tensor]) -> Tensor:
        value = model(data[0]).square().mean()
        self._calls += torch.is_grad_enabled()
        return value * math.nan if self._calls > self._step else value


class Wide(nn.Module):
    """One row of 1e21 has a finite loss and finite gradients, and an infinite variance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(rows))
        return output


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("on_divergence", ["stop", "skip"])
def test_a_statistic_that_is_not_finite_is_not_committed(num_microbatches: int, on_divergence: str) -> None:
    steps = [(ROWS[0].clone(), ROWS[1]) for _ in range(4)]
    steps[2][0][-1] = 1e21

    def run(data: list[tuple[Tensor, Tensor]], budget: str) -> Trainer:
        config = RunConfig(budget=budget, num_microbatches=num_microbatches, on_divergence=on_divergence, num_threads=1)
        loss = lambda model, rows: mse_loss(model(rows[0]), rows[1])  # noqa: E731
        return Trainer(Wide(), loss, data, optimizers=[SGD(lr=0.1)], config=config)

    torch.manual_seed(0)
    loss, gradients = _loss_and_gradients(steps[2])
    assert math.isfinite(loss)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    trainer, clean = run(steps, "4ba"), run(steps[:2], "2ba")
    clean.fit()
    if on_divergence == "stop":
        with pytest.raises(DivergenceError, match="A BatchNorm statistic isn't finite at step 2"):
            trainer.fit()
        for one, other in zip(trainer.model.state_dict().values(), clean.model.state_dict().values(), strict=True):
            assert torch.equal(one, other)
    else:
        trainer.fit()
        assert trainer.clock.step == 4
        assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
        assert int(trainer.model.norm.num_batches_tracked) == 3 * num_microbatches


def _loss_and_gradients(data: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
    model = Wide()
    loss = mse_loss(model(data[0]), data[1])
    loss.backward()
    assert not bool(model.norm.running_var.isfinite().all())
    return loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_statistic_of_a_denied_microbatch_stops_nothing() -> None:
    """It's never folded; what isn't folded isn't looked at."""
    statistics = BatchNormStatistics(nn.Sequential(nn.BatchNorm1d(2)))
    row = torch.tensor([1.0, 0.0, 0.0, math.inf, 1.0])
    assert statistics.taught([row], Ranks(), lambda microbatch, layer: False) == []
    (one,) = statistics.taught([row], Ranks(), lambda microbatch, layer: True)
    check = FiniteCheck(RunConfig(), torch.device("cpu"))
    with pytest.raises(DivergenceError, match="BatchNorm statistic"):
        check.check(torch.ones(()), 0, [torch.ones(2)], [one.mean, one.variance])
    check.check(torch.ones(()), 0, [torch.ones(2)], [one.mean])


@pytest.mark.parametrize("check_every", [1, 5])
def test_statistics_are_looked_at_on_an_accelerator_too(check_every: int) -> None:
    check = FiniteCheck(RunConfig(check_every=check_every), torch.device("cuda"))  # Its road; the tensors lie here.
    for step in range(check_every - 1):
        check.check(torch.ones(()), step, [torch.ones(2)], [torch.tensor([math.inf if step == 0 else 1.0])])
    last = torch.tensor([math.inf if check_every == 1 else 1.0])
    with pytest.raises(DivergenceError, match=r"statistic isn't finite|in the 5 steps"):
        check.check(torch.ones(()), check_every - 1, [torch.ones(2)], [last])


def test_all_sub_steps_or_none() -> None:
    first = SubStep("first", lambda model, data: mse_loss(model(data[0]), data[1]), "first.*")
    optimizers = [AdamW(lr=0.01, parameters="first.*"), AdamW(lr=0.01, parameters="second.*")]
    config = RunConfig(budget="6ba", num_threads=1)

    def trainer(step: int) -> Trainer:
        losses = [first, SubStep("second", Diverges(step), "second.*")]
        model = Model()
        model.norm.requires_grad_(requires_grad=False)
        return Trainer(model, losses, InMemory(ROWS, 8), optimizers=optimizers, config=config)

    diverged, clean = trainer(2), trainer(10**9)
    with pytest.raises(DivergenceError, match="loss is nan at step 2"):
        diverged.fit()
    with clean:
        assert clean.feed is not None
        for _ in range(2):
            mine = clean.feed.microbatches(clean.clock, [0])
            assert mine is not None
            clean.step_microbatches(mine, [0])
        assert_equal(state_of(diverged), state_of(clean))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_without_any_weight_rests(num_microbatches: int) -> None:
    """No row has a label: the mean would be 0 over 0."""

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
        error = (model(data[0]) - data[1]).square().flatten()
        has_label = data[1].flatten() < 1e6
        error = torch.where(has_label, error, 0.0)
        return Loss(error.sum(), has_label.sum().float(), error, has_label.float())

    targets = ROWS[1].clone()
    targets[8:16] = 1e9
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = RunConfig(budget="4ba", num_threads=1, num_microbatches=num_microbatches)
    trainer = Trainer(model, loss, optimizers=[SGD(lr=0.1, momentum=0.9, weight_decay=0.1)], config=config)
    with trainer:
        trainer.step((ROWS[0][:8], targets[:8]))
        before = state_of(trainer)
        outcome = trainer.step((ROWS[0][8:16], targets[8:16]))
        assert float(outcome.loss) == 0.0
        assert_equal(before, state_of(trainer))
        trainer.step((ROWS[0][16:24], targets[16:24]))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda trainer: trainer.model.second.bias.data.fill_(math.nan),
        lambda trainer: trainer.model.norm.running_var.fill_(math.inf),
        lambda trainer: next(iter(trainer.assembly.optimizers[0].optimizer.state.values()))["exp_avg"].fill_(math.nan),
        lambda trainer: next(iter(trainer.states[0].values())).fill_(math.nan),
    ],
    ids=["weight", "buffer", "optimizer", "average"],
)
def test_nothing_bad_is_saved(tmp_path: Path, spoil: Callable[[Trainer], object]) -> None:
    trainer = trainer_of(SpoiltAt(-1, 1.0), tmp_path, [EMA(half_life="2ba")], checkpoint_every=None)

    def spoil_and_save() -> None:
        with trainer:
            trainer.step((ROWS[0][:8], ROWS[1][:8]))
            trainer.save()
            spoil(trainer)
            trainer.clock = trainer.clock._replace(step=2)
            trainer.save()

    with pytest.raises(DivergenceError, match="not finite: not saved"):
        spoil_and_save()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001", "step-00000000"]
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "diverged"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("keeps_norms", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_kind_of_what_is_not_finite_is_refused(bad: float, where: str, keeps_norms: bool, device: str) -> None:
    check = FiniteCheck(RunConfig(budget="1ba"), torch.device(device))
    check.keeps_norms = keeps_norms
    good, wrong = torch.tensor(1.0), torch.tensor(bad)
    check.check(good, 0, [torch.ones(3), torch.ones(2, 2)])
    assert check.gradient_norm == pytest.approx(math.sqrt(7) if keeps_norms else math.nan, nan_ok=True)
    with pytest.raises(DivergenceError, match=where):
        check.check(wrong if where == "loss" else good, 0, [torch.ones(3), wrong if where == "gradient" else good])


@pytest.mark.parametrize("keeps_norms", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("check_every", [1, 2])
def test_where_gradients_are_known_to_be_finite_nobody_looks(keeps_norms: bool, device: str, check_every: int) -> None:
    class Asked(Uncut):
        def anywhere(self, flag: bool) -> bool:
            raise AssertionError(flag)

    check = FiniteCheck(RunConfig(budget="1ba", check_every=check_every), torch.device(device))
    check.keeps_norms = keeps_norms
    wrong, good = [torch.tensor(torch.nan)], torch.tensor(1.0)
    for gradients in (wrong, Pieces({"wrong": wrong[0]}, cut=Asked())):
        check.check(good, 1, gradients, is_known=True)
        with pytest.raises(DivergenceError, match="loss"):
            check.check(wrong[0], 1, gradients, is_known=True)
        check = FiniteCheck(check._config, torch.device(device))
        with pytest.raises(DivergenceError, match=r"statistic|loss"):
            check.check(good, 1, gradients, wrong, is_known=True)
        check = FiniteCheck(check._config, torch.device(device))


class Spoils(Method):
    """Turns gradients into what isn't finite, in their own memory."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        for gradient in gradients.tensors.values():
            gradient.fill_(torch.inf)
        return gradients


class Disturbs(Method):
    """Turns gradients into what isn't finite where it may look at them, and asks for no second pass."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> None:
        for gradient in gradients.tensors.values():
            gradient.fill_(torch.inf)


@pytest.mark.parametrize(("methods", "knows", "asked"), [
    ([], [True], [True]),
    ([], [False], [False]),
    ([Spoils()], [True], [False]),
    ([Disturbs()], [True], [False]),
    ([SAM()], [True, False], [False]),
    ([SAM()], [False, True], [True]),
])  # fmt: skip
def test_what_a_pass_knows_of_its_gradients_is_of_those_that_are_committed(
    methods: list[Method], knows: list[bool], asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, own, check = iter(knows), WholeStep.root, FiniteCheck.check
    found = []

    def root(step: WholeStep, denominators: Tensor | None) -> Pieces:
        pieces = own(step, denominators)
        step.is_finite = next(told)
        return pieces

    def looks(self: FiniteCheck, *given: Any, is_known: bool) -> None:
        found.append(is_known)
        check(self, *given, is_known=is_known)

    monkeypatch.setattr(WholeStep, "root", root)
    monkeypatch.setattr(FiniteCheck, "check", looks)
    trainer = trainer_of(SpoiltAt(-1, 1.0), methods=methods, num_microbatches=2)
    if any(isinstance(method, Spoils | Disturbs) for method in methods):
        with pytest.raises(DivergenceError, match="A gradient isn't finite at step 0"):
            take_steps(trainer, 1)
    else:
        take_steps(trainer, 1)
    assert found == asked


def test_each_sub_step_knows_of_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = WholeStep.root, iter([True, False])

    def root(step: WholeStep, denominators: Tensor | None) -> Pieces:
        pieces = own(step, denominators)
        step.is_finite = next(told)
        return pieces if step.is_finite else pieces.map(lambda gradient: gradient * torch.nan)

    monkeypatch.setattr(WholeStep, "root", root)
    losses = [
        SubStep(name, lambda model, data: mse_loss(model(data[0]), data[1]), f"{name}.*")
        for name in ("first", "second")
    ]
    model = Model()
    model.norm.requires_grad_(requires_grad=False)
    optimizers = [AdamW(lr=0.01, parameters=f"{name}.*") for name in ("first", "second")]
    config = RunConfig(budget="6ba", num_threads=1, num_microbatches=2)
    trainer = Trainer(model, losses, InMemory(ROWS, 8), optimizers=optimizers, config=config)
    with pytest.raises(DivergenceError, match="A gradient isn't finite at step 0"):
        take_steps(trainer, 1)


class Half(nn.Module):
    """A weight of float16, whose gradient's float32 sum is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float16))
        self.wide = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        total: Tensor = (self.weight.float() + self.wide) * rows[0]
        return total.sum()


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize(
    ("largest", "is_refused"), [(65_519.0, False), (65_520.0, True), (-65_520.0, True), (1.0, False)]
)
def test_a_gradient_beyond_its_parameters_type_is_not_committed(
    largest: float, is_refused: bool, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It's summed in float32, and 65,519.99 is the last that float16 rounds to a number."""
    own = WholeStep.root

    def root(step: WholeStep, denominators: Tensor | None) -> Pieces:
        pieces = own(step, denominators)
        step.is_finite = knows
        return pieces

    monkeypatch.setattr(WholeStep, "root", root)
    rows = torch.tensor([[0.0, largest, 2.0]]).expand(4, 3).contiguous()
    config = RunConfig(budget="1ba", num_microbatches=2, num_threads=1)
    model = Half()
    trainer = Trainer(model, lambda m, data: m(data), InMemory(rows, 4), optimizers=SGD(lr=2.0**-16), config=config)
    if is_refused:
        with pytest.raises(DivergenceError, match="A gradient isn't finite at step 0, and none is committed"):
            trainer.fit()
        assert torch.equal(model.weight, torch.ones(3).half())
        return
    trainer.fit()
    expected = torch.ones(3) - torch.tensor([0.0, largest, 2.0]).half().float() * 2.0**-16
    torch.testing.assert_close(model.weight, expected.half(), rtol=1e-3, atol=0)
    assert torch.equal(model.wide, torch.ones(3) - rows[0] * 2.0**-16)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": Tensor.double,
    "bfloat16": Tensor.bfloat16,
    "float16": Tensor.half,
    "complex": lambda values: torch.complex(values, values),
    "sparse": Tensor.to_sparse,
    "expanded": lambda values: values[2].expand(4),
    "of stride 2": lambda values: values[::2],
    "followed by autograd": lambda values: values * torch.ones((), requires_grad=True),
    "empty": lambda values: values[:0],
    "beyond its norm": lambda values: values * 1e30,
}


@pytest.mark.parametrize("keeps_norms", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_kind_are_looked_at_and_left_as_they_are(kind: str, keeps_norms: bool) -> None:
    check = FiniteCheck(RunConfig(budget="1ba"), torch.device("cpu"))
    check.keeps_norms = keeps_norms
    values = torch.tensor([1.0, -0.0, 3e-41, 2.0, 5.0])
    given, before = KINDS[kind](values.clone()), KINDS[kind](values.clone())
    check.check(torch.tensor(1.0), 0, [torch.ones(3), given])
    if given.layout is torch.strided:
        as_bytes = [t.detach().resolve_conj().contiguous().view(torch.uint8) for t in (given, before)]
        assert torch.equal(*as_bytes)
    spoilt = KINDS[kind](torch.tensor([1.0, 0.0, math.inf, 2.0, 5.0]))
    if kind == "empty":
        check.check(torch.tensor(1.0), 0, [torch.ones(3), spoilt])
    else:
        with pytest.raises(DivergenceError, match="gradient"):
            check.check(torch.tensor(1.0), 0, [torch.ones(3), spoilt])
