"""Runs that once stood still, saved what nothing could read, or answered a newcomer with a raw error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cosmati import RunConfig, Trainer
from cosmati.core.batch import Batch, Lineage
from cosmati.core.plan import Promise
from cosmati.errors import BatchError, CheckpointError, DivergenceError, PlanError, RunError
from cosmati.methods import EMA, SWA, LayerFreezing, StochasticDepth
from cosmati.optim import SGD, AdamW, Constant, Cosine, Linear, MultiStep
from cosmati.records.run import RunRecord
from cosmati.train import opening
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 8, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def steps() -> list[tuple[Tensor, Tensor]]:
    return [(ROWS[0][i : i + 8], ROWS[1][i : i + 8]) for i in range(0, 64, 8)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def make(model: nn.Module | None = None, data: Any = None, **given: Any) -> Trainer:
    config = {"budget": "8ba", "num_threads": 1} | given.pop("config", {})
    optimizers, loss = given.pop("optimizers", [AdamW(lr=0.01)]), given.pop("loss", loss_of)
    return Trainer(model or network(), loss, data, optimizers=optimizers, config=RunConfig(**config), **given)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of rows, which has no length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*ROWS, strict=True))


class Rates(Observer):
    """Keeps learning rates."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.rates.append(outcome.learning_rates[0])


# An epoch that has no length


def test_a_loop_of_ones_own_has_no_budget_in_epochs() -> None:
    for schedule in (Constant(), Cosine(warmup="0.1dur")):
        with pytest.raises(PlanError, match=r"'5ep' never ends here.*1000ba"):
            make(optimizers=[SGD(lr=0.1, schedule=schedule)], config={"budget": "5ep"})


def test_the_default_budget_has_no_end_in_a_loop_of_ones_own() -> None:
    trainer = Trainer(network(), loss_of, optimizers=[SGD(lr=0.1)])
    trainer.step(steps()[0])
    with pytest.raises(PlanError, match="'1ep' never ends here"):
        _ = trainer.should_stop
    with pytest.raises(PlanError, match=r"SGD's Cosine.*A loop of one's own"):
        Trainer(network(), loss_of, optimizers=[SGD(lr=0.1, schedule=Cosine())])


@pytest.mark.parametrize("schedule", [Cosine(warmup="0.1dur"), Linear(), Constant(warmup="1ep")])
def test_a_schedule_that_moves_needs_data_with_a_length_or_another_budget(schedule: Any) -> None:
    with pytest.raises(PlanError, match=rf"{type(schedule).__name__}.*DataLoader.*1000ba"):
        make(None, DataLoader(Stream(), 8), optimizers=[AdamW(lr=0.1, schedule=schedule)], config={"budget": "2ep"})
    rates = Rates()
    optimizers = [AdamW(lr=0.1, schedule=type(schedule)(warmup="0.25dur"))]
    make(None, DataLoader(Stream(), 8), optimizers=optimizers, config={"budget": "16ba"}, observers=[rates]).fit()
    assert min(rates.rates) > 0


def test_a_stream_of_epochs_has_constant_rates_or_such_as_step_with_epochs() -> None:
    for schedule, expected in (
        (Constant(), [0.1] * 16),
        (MultiStep(milestones=("1ep",), factor=0.5), [0.1] * 8 + [0.05] * 8),
    ):
        rates = Rates()
        optimizers = [SGD(lr=0.1, schedule=schedule)]
        make(None, DataLoader(Stream(), 8), optimizers=optimizers, config={"budget": "2ep"}, observers=[rates]).fit()
        assert rates.rates == pytest.approx(expected)


def test_a_method_that_follows_the_run_needs_a_length_too() -> None:
    config = {"budget": "2ep"}
    with pytest.raises(PlanError, match=r"LayerFreezing\(\).*would follow"):
        make(None, DataLoader(Stream(), 8), methods=[LayerFreezing()], config=config)
    method = StochasticDepth(target_layer_name="Linear", drop_warmup="0.1dur")
    with pytest.raises(PlanError, match=r"StochasticDepth.*would follow"):
        make(None, DataLoader(Stream(), 8), methods=[method], config=config)
    steady = StochasticDepth(target_layer_name="Linear", stochastic_method="sample")
    assert not steady.follows_elapsed


def test_spans_in_epochs_are_refused_at_setup_where_nobody_knows_an_epochs_steps() -> None:
    for given, said in (
        ({"config": {"checkpoint_every": "1ep"}}, r"RunConfig\(checkpoint_every='1ep'\)"),
        ({"methods": [EMA(half_life="2ep")]}, r"EMA\(half_life='2ep'\)"),
        ({"methods": [SWA()]}, r"SWA\(update_interval='1ep'\)"),
        ({"optimizers": [SGD(lr=0.1, schedule=Cosine(warmup="1ep"))]}, r"Cosine\(warmup='1ep'\)"),
        ({"optimizers": [SGD(lr=0.1, schedule=MultiStep(milestones=("1ep",)))]}, r"MultiStep\(milestones"),
    ):
        for data in (None, DataLoader(Stream(), 8)):
            with pytest.raises(PlanError, match=rf"{said}.* can't be placed"):
                make(None, data, **given)
    make(optimizers=[SGD(lr=0.1, schedule=Constant(warmup="0ep"))])


@pytest.mark.parametrize("data", [steps(), DataLoader(TensorDataset(*ROWS), 8), None])
def test_rows_are_counted_where_no_source_says_how_many_a_step_has(data: Any) -> None:
    trainer = make(None, data, config={"budget": "32sp"}, optimizers=[AdamW(lr=0.01, schedule=Linear())])
    if data is not None:
        assert trainer.fit().clock[:2] == (4, 0)
        return
    with trainer:
        while not trainer.should_stop:
            trainer.step(steps()[trainer.clock.step])
    assert trainer.clock.step == 4


# What newcomers give


class Called(nn.Module):
    """Has a call of its own in place of `forward`."""

    def __call__(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, data)


def test_optimizers_losses_schedules_and_budgets_of_another_kind_are_refused_by_name() -> None:
    for optimizers, said in (
        (AdamW, r"optimizers=\[AdamW"),
        (torch.optim.AdamW, r"optimizers=\[AdamW"),
        ([torch.optim.AdamW], "names the class"),
        ([network().parameters()], "no optimizer"),
    ):
        with pytest.raises(PlanError, match=said):
            make(optimizers=optimizers)
    for loss, said in (
        (nn.CrossEntropyLoss(), r"CrossEntropyLoss\(input, target\).*loss\(model, data\)"),
        (lambda output, target: cross_entropy(output, target, reduction="sum"), r"compares outputs with targets"),
        (lambda batch: batch, r"can't be called with two arguments"),
        (3, "The loss is a int"),
    ):
        with pytest.raises(PlanError, match=said):
            make(loss=loss)
    make(loss=Called())
    with pytest.raises(PlanError, match="is no schedule"):
        SGD(lr=0.1, schedule=lambda step: 1.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="is no schedule"):
        SGD(lr=0.1, schedule=Cosine)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="'100ba' for steps"):
        RunConfig(budget=100)  # type: ignore[arg-type]


def test_a_loss_that_takes_the_model_for_its_output_is_told_so() -> None:
    with pytest.raises(TypeError) as found:
        make(None, steps(), loss=lambda o, t: cross_entropy(o, t, reduction="sum")).fit()
    assert "A loss is given the Sequential itself" in found.value.__notes__[0]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_optimizer_may_hold_frozen_parameters(num_microbatches: int, tmp_path: Path) -> None:
    def run(budget: str, folder: Path | None = None) -> nn.Module:
        model = network()
        model[0].requires_grad_(requires_grad=False)
        optimizers = [torch.optim.Adam(model.parameters(), 0.01)]
        config = {"budget": budget, "run_folder": folder, "num_microbatches": num_microbatches, "change": "budget"}
        make(model, steps(), optimizers=optimizers, config=config).fit()
        return model

    whole, start = run("8ba"), network()
    run("3ba", tmp_path)
    resumed = run("8ba", tmp_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
        assert torch.equal(value, start.state_dict()[name]) == name.startswith("0.")
    model = network().requires_grad_(requires_grad=False)
    model[2].bias.requires_grad_(requires_grad=True)
    with pytest.raises(PlanError, match="None of the 2 parameters of Adam are trainable parameters"):
        make(model, optimizers=[torch.optim.Adam(model[0].parameters())])


# What nothing could read back


class Grows(nn.Module):
    """Has a memory bank, and a mean that is None before the first forward pass."""

    def __init__(self, kept: Tensor | None = None) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("bank", torch.zeros(0, 3))
        self.register_buffer("mean", None)
        self.register_buffer("kept", kept)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.inner(rows)
        seen = out.detach()
        self.bank = torch.cat([self.bank, seen])[-20:]
        self.mean = seen.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * seen.mean(0)
        return out - self.mean - self.bank.mean(0)


class Spectral(nn.Module):
    """Has a complex parameter, as Fourier operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.filter = nn.Parameter(torch.ones(5, dtype=torch.cfloat))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.fft.irfft(torch.fft.rfft(rows) * self.filter, n=8))
        return out


class Remembers(nn.Module):
    """A loss with buffers: complex, and None before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.ones(2, dtype=torch.cfloat))
        self.register_buffer("mean", None)

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, data)
        self.phase.mul_(0.9)
        self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean + self.phase.real.sum())


def everything(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Grows, loss_of),
        (lambda: Grows(torch.ones(1).expand(4)), loss_of),
        (lambda: Grows(torch.randn(4, 2, dtype=torch.cfloat).T), loss_of),
        (lambda: Grows(torch.ones(3, dtype=torch.uint16)), loss_of),
        (Spectral, loss_of),
        (network, Remembers),
    ],
    ids=["growing", "expanded", "complex", "uint16", "complex-parameter", "loss"],
)
def test_state_of_any_type_and_shape_goes_on_to_the_same_bits(
    model: Any, loss: Any, num_microbatches: int, tmp_path: Path
) -> None:
    def run(budget: str, folder: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        config = {"budget": budget, "run_folder": folder, "change": "budget", "num_microbatches": num_microbatches}
        made = loss() if loss is Remembers else loss
        trainer = make(model(), steps(), loss=made, config=config)
        trainer.fit()
        return everything(trainer)

    whole = run("6ba", None)
    run("3ba", tmp_path)
    resumed = run("6ba", tmp_path)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_other_weights_are_still_refused(tmp_path: Path) -> None:
    save_file({"kept": torch.zeros(5), **network_weights()}, tmp_path / "w.safetensors")
    model = Grows(torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"bank is missing.*kept is torch.float32 \(4,\), and was .* \(5,\)"):
        make(model, config={"load_weights": tmp_path / "w.safetensors"})


def network_weights() -> dict[str, Tensor]:
    return {f"inner.{name}": value for name, value in network().state_dict().items()}


def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for kept, said in (
        (torch.eye(3).to_sparse(), r"kept \(torch.sparse_coo\)"),
        (torch.ones(3, dtype=torch.cfloat).conj(), r"kept \(conjugate\)"),
    ):
        with pytest.raises(PlanError, match=rf"{said} has no elements of its own.*persistent=False"):
            make(Grows(kept))
    trainer = make(Grows(torch.ones(3, dtype=torch.cdouble)), steps(), config={"run_folder": tmp_path})
    with pytest.raises(CheckpointError, match=r"kept \(torch.complex128\).*complex64"):
        trainer.fit()
    assert trainer.clock.step == 0
    twice = nn.Module()
    twice._orig_mod = nn.Linear(8, 3)
    twice.weight, twice.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    with pytest.raises(PlanError, match="weight, bias stands for two tensors"):
        make(twice)


def test_the_first_checkpoint_is_read_back_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def refused(path: Path) -> Any:
        seen.append(len(list(path.iterdir())))
        raise CheckpointError("can't be read")

    monkeypatch.setattr(opening, "read_checkpoint", refused)
    trainer = make(None, steps(), config={"run_folder": tmp_path})
    with pytest.raises(CheckpointError, match="can't be read"):
        trainer.fit()
    assert (trainer.clock.step, len(seen)) == (0, 1)


# What isn't finite, and what a checkpoint doesn't know


def test_what_is_not_finite_is_never_published(tmp_path: Path) -> None:
    class Spoils(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["d"] = float("nan")

    model = Spectral()
    huge = [torch.optim.SGD(model.parameters(), 3e38, momentum=0.9)]
    config = {"budget": "1ba", "run_folder": tmp_path / "complex"}
    with pytest.raises(DivergenceError, match="filter"):
        make(model, steps(), optimizers=huge, loss=lambda m, d: 1e4 * loss_of(m, d), config=config).fit()
    assert [path.name for path in list_checkpoints(tmp_path / "complex/checkpoints")] == ["step-00000000"]
    model = network()
    config = {"run_folder": tmp_path / "group"}
    with pytest.raises(DivergenceError, match="optimizer 0 groups 0 d is not finite"):
        make(model, steps(), optimizers=[Spoils(model.parameters(), 0.1)], config=config).fit()


def test_a_torch_scheduler_that_is_made_within_the_run_is_seen(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with make(model, optimizers=[optimizer], config={"run_folder": tmp_path}) as trainer:
        assert trainer.plan.holds(Promise.RESUME)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        trainer.step(steps()[0])
        assert not trainer.plan.holds(Promise.RESUME)
    record = RunRecord.from_json((tmp_path / "run.json").read_text())
    assert not next(g for g in record.guarantees if g.name == "resume").holds


def test_nothing_is_saved_or_trained_while_averages_stand_in_for_the_weights(tmp_path: Path) -> None:
    made = make(methods=[EMA(half_life="2ba")], config={"run_folder": tmp_path})
    with made as trainer:
        for batch in steps()[:4]:
            trainer.step(batch)
        with trainer.averaged():
            for refused in (trainer.save, lambda: trainer.step(steps()[4])):
                with pytest.raises(PlanError, match=r"within averaged\(\)"):
                    refused()
        trainer.save()
        trainer.step(steps()[4])
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000005", "step-00000004"]


def test_a_folder_that_another_trainer_of_this_process_holds_is_said_to_be(tmp_path: Path) -> None:
    first = make(config={"run_folder": tmp_path})
    first.step(steps()[0])
    second = make(config={"run_folder": tmp_path})
    with pytest.raises(RunError, match=r"Another Trainer of this process.*`with trainer:`"):
        second.step(steps()[0])
    with first:
        pass
    with pytest.warns(UserWarning, match="goes on at step 1"):
        second.step(steps()[1])
    assert second.clock.step == 2


# Lineage


def lineage(rows: int, **given: Any) -> Lineage:
    return Lineage(**{"row_ids": torch.arange(rows), "class_ids": torch.zeros(rows, dtype=torch.int64), **given})


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_lineage_and_data_speak_of_the_same_rows(num_microbatches: int) -> None:
    data = ROWS[0][:16], ROWS[1][:16]
    for batch, said in (
        (Batch(data, lineage(12)), "data have 16 rows, and its lineage 12"),
        (Batch(data, lineage(32)), "data have 16 rows, and its lineage 32"),
        (Batch(data, Lineage.of_rows(0, 8)), "data have 16 rows, and its lineage 8"),
        (Batch(data, lineage(16, class_ids=torch.full((16,), 0.7))), r"class_ids is torch.float32 \(16,\)"),
        (Batch(data, lineage(16, row_ids=torch.zeros(16, 1, dtype=torch.int64))), r"row_ids is torch.int64 \(16, 1\)"),
        (Batch(data, lineage(16, class_ids=torch.zeros(8, dtype=torch.int64))), "row_ids 16, class_ids 8"),
        (Batch(data, lineage(16), "hot"), "class_id = 'hot' is no id"),  # type: ignore[arg-type]
        (Batch(data, lineage(16), True), "class_id = True is no id"),
    ):
        for feeds in (False, True):
            trainer = make(None, [batch] if feeds else None, config={"num_microbatches": num_microbatches})
            if feeds and num_microbatches == 1 and "data have" not in said:
                continue  # The short road of a loader's own batches counts rows, and looks at nothing else.
            with pytest.raises(BatchError, match=said):
                trainer.fit() if feeds else trainer.step(batch)
        assert trainer.clock.step == 0
        if "data have" in said:  # or its first batch is looked at, and no later one
            trainer = make(None, [Batch(data, lineage(16)), batch], config={"num_microbatches": num_microbatches})
            with pytest.raises(BatchError, match=said):
                trainer.fit()
            assert trainer.clock.step == 1
    with make(config={"num_microbatches": num_microbatches}) as trainer:
        trainer.step(Batch(data, lineage(16)))
