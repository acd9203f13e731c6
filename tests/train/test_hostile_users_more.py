"""More of what ordinary users bring: state in forward, generators of their own, spoilt buffers, early stops."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cosmati import Evaluation, RunConfig, Trainer
from cosmati.errors import DivergenceError, PlanError, RunError
from cosmati.optim import SGD
from cosmati.train.evaluation import accuracy

GENERATOR = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(64, 4, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


class Counting(nn.Module):
    """Warms up by a counter of its own, as many a temperature does."""

    def __init__(self, *, is_kept: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.num_calls: Any = 0
        if is_kept:
            del self.num_calls
            self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.linear(rows) * (1 + 0.1 * self.num_calls)
        if self.training:
            self.num_calls = self.num_calls + 1
        return hidden


def trainer_of(model: nn.Module, data: Any, folder: Path | None, **given: Any) -> Trainer:
    config = {"budget": "8ba", "num_threads": 1, "run_folder": folder} | given.pop("config", {})
    return Trainer(model, loss_of, data, optimizers=[SGD(lr=0.1)], config=RunConfig(**config), **given)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(ROWS[i : i + 8], LABELS[i : i + 8]) for i in range(0, 64, 8)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("is_kept", [False, True])
def test_state_that_no_checkpoint_keeps_withdraws_resume(num_microbatches: int, is_kept: bool) -> None:
    trainer = trainer_of(
        Counting(is_kept=is_kept), batches(), None, config={"num_microbatches": num_microbatches, "budget": "2ba"}
    )
    assert trainer.plan.holds("resume")
    trainer.fit()
    assert trainer.plan.holds("resume") == is_kept
    assert ("forward changes the attributes num_calls" in str(trainer.plan)) == (not is_kept)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_model_that_counts_its_calls_goes_on(tmp_path: Path, is_kept: bool) -> None:
    whole = trainer_of(Counting(is_kept=is_kept), batches(), None)
    whole.fit()
    config = {"budget": "4ba", "checkpoint_every": "4ba"}
    trainer_of(Counting(is_kept=is_kept), batches(), tmp_path, config=config).fit()
    again = trainer_of(Counting(is_kept=is_kept), batches(), tmp_path, config={"change": ("budget",)})
    again.fit()
    assert again.clock.step == 8
    assert again.plan.holds("resume") == is_kept
    if is_kept:
        assert torch.equal(again.model.linear.weight, whole.model.linear.weight)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with a generator that it holds."""

    def __init__(self, generator: Any) -> None:
        self.noise = [generator]

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held = self.noise[0]
        shift = torch.rand((), generator=held) if isinstance(held, torch.Generator) else held.random()
        return ROWS[index] + shift, LABELS[index]


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(0), np.random.RandomState(0), torch.Generator()], ids=lambda g: type(g).__name__
)
def test_a_data_set_with_a_generator_of_its_own_is_no_function_of_the_position(generator: Any) -> None:
    assert not trainer_of(nn.Linear(4, 3), DataLoader(Noisy(generator), 8), None).plan.holds("resume")
    plain = DataLoader(TensorDataset(ROWS, LABELS), 8, shuffle=True, generator=torch.Generator())
    assert trainer_of(nn.Linear(4, 3), plain, None).plan.holds("resume")


def test_a_validation_loader_may_share_the_training_loaders_generator(tmp_path: Path) -> None:
    def run(stops: list[int], every: str | None, folder: Path | None) -> nn.Module:
        for stop in stops:
            generator = torch.Generator().manual_seed(3)
            data = DataLoader(TensorDataset(ROWS, LABELS), 16, shuffle=True, generator=generator)
            validation = DataLoader(TensorDataset(ROWS, LABELS), 32, shuffle=True, generator=generator)
            torch.manual_seed(0)
            config = {"budget": f"{stop}ba", "evaluate_every": every, "change": ("budget",), "checkpoint_every": "4ba"}
            evaluation = Evaluation(validation, {"accuracy": accuracy})
            trainer = trainer_of(nn.Linear(4, 3), data, folder, config=config, evaluation=evaluation)
            trainer.fit()
        return trainer.model

    whole = run([10], None, None)
    assert torch.equal(run([10], "1ba", None).weight, whole.weight)
    assert torch.equal(run([6, 10], "2ba", tmp_path).weight, whole.weight)


class Codebook(nn.Module):
    """Keeps a running mean of what it sees, which one bad row spoils."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.lerp_(rows.detach().mean(0), 0.5)
        hidden: Tensor = self.linear(rows + 0.01 * self.seen)
        return hidden


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_that_is_left_out_leaves_no_buffer_spoilt(num_microbatches: int) -> None:
    bad = batches()
    bad[3] = (bad[3][0] * torch.nan, bad[3][1])
    config = {"num_microbatches": num_microbatches}
    trainer = trainer_of(Codebook(), bad, None, config={"on_divergence": "skip", **config})
    trainer.fit()
    kept = trainer_of(Codebook(), [b for i, b in enumerate(bad) if i != 3], None, config={"budget": "7ba", **config})
    kept.fit()
    assert torch.equal(trainer.model.seen, kept.model.seen)
    assert torch.equal(trainer.model.linear.weight, kept.model.linear.weight)
    with pytest.raises(DivergenceError):
        trainer_of(Codebook(), bad, None, config=config).fit()


def test_who_stops_before_the_start_takes_no_step(tmp_path: Path) -> None:
    trainer = trainer_of(nn.Linear(4, 3), batches(), tmp_path)
    trainer.stop()
    assert trainer.fit().outcome == "stopped"
    assert trainer.clock.step == 0
    assert trainer.fit().outcome == "completed"
    assert trainer.clock.step == 8


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"0\.weight, 0\.bias have no shape yet.*Run one batch"):
        trainer_of(nn.Sequential(nn.LazyLinear(3)), batches(), None)
    model = nn.Sequential(nn.LazyLinear(3))
    model(ROWS[:2])
    assert trainer_of(model, batches(), None).fit().outcome == "completed"


class Spoilt(Codebook):
    """Keeps what it has seen in another way each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.memory: Any = []
        if kind == "attribute":
            del self.seen
            self.seen = torch.zeros(4)
        elif "parameter" in kind:
            self.memory = [nn.Parameter(torch.zeros(4), requires_grad="list" in kind)]
            self.book = self.memory[0] if "list" not in kind else None

    def forward(self, rows: Tensor) -> Tensor:
        mean = rows.detach().mean(0)
        if self.kind == "growing":
            self.memory.append(mean)
            self.seen.copy_(torch.stack(self.memory[-3:]).mean(0))
        elif "parameter" in self.kind:
            self.memory[0].data.lerp_(mean, 0.5)
            self.seen = self.memory[0].data.clone()
        else:
            self.seen = self.seen * 0.5 + mean * 0.5
        hidden: Tensor = self.linear(rows + 0.01 * self.seen)
        return hidden


@pytest.mark.parametrize("kind", ["attribute", "reassigned", "growing", "parameter", "parameter in a list"])
def test_nothing_of_a_step_that_is_left_out_stays(kind: str) -> None:
    bad = batches()
    bad[3] = (bad[3][0] * torch.nan, bad[3][1])
    skipping = trainer_of(Spoilt(kind), bad, None, config={"on_divergence": "skip"})
    skipping.fit()
    kept = trainer_of(Spoilt(kind), [b for i, b in enumerate(bad) if i != 3], None, config={"budget": "7ba"})
    kept.fit()
    assert torch.equal(skipping.model.seen, kept.model.seen)
    assert torch.equal(skipping.model.linear.weight, kept.model.linear.weight)
    assert not skipping.plan.holds("parity")


def test_a_run_that_leaves_out_everything_ends() -> None:
    bad = [(rows * torch.nan, labels) for rows, labels in batches()]
    trainer = trainer_of(Codebook(), bad, None, config={"on_divergence": "skip", "budget": "100ba"})
    with pytest.raises(DivergenceError):
        trainer.fit()
    assert trainer.clock.step == 20


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_sub_steps_are_all_or_none_whatever_goes_wrong(error: type[BaseException]) -> None:
    from cosmati import SubStep
    from cosmati.optim import AdamW

    def build(fails: list[int]) -> Trainer:
        torch.manual_seed(0)
        model = nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)})
        calls = iter(range(100))

        def second(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
            if torch.is_grad_enabled() and next(calls) in fails:
                raise error
            return loss_of(model["two"], data)  # type: ignore[index]

        turns = [SubStep("one", lambda m, d: loss_of(m["one"], d), "one.*"), SubStep("two", second, "two.*")]
        optimizers = [AdamW(lr=0.01, parameters="one.*"), AdamW(lr=0.01, parameters="two.*")]
        return Trainer(model, turns, optimizers=optimizers, config=RunConfig(budget="4ba", num_threads=1))

    failing, clean = build([2]), build([])
    with failing, clean:
        for batch in batches()[:4]:
            clean.step(batch)
            try:
                failing.step(batch)
            except error:
                failing.step(batch)
    for one, other in zip(failing.model.parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_gradient_that_somebody_has_left_is_none_of_the_steps(num_microbatches: int) -> None:
    left, clean = (
        trainer_of(nn.Linear(4, 3, device="cpu"), None, None, config={"num_microbatches": num_microbatches})
        for _ in range(2)
    )
    clean.model.load_state_dict(left.model.state_dict())
    with left, clean:
        for batch in batches()[:3]:
            loss_of(left.model, batch).backward()
            left.step(batch)
            clean.step(batch)
    assert torch.equal(left.model.weight, clean.model.weight)


class Initialised(nn.Module):
    """Takes its scale from the first rows that it sees (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.done, self.history = nn.Linear(4, 3), False, [0.0]
        self.register_buffer("scale", torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        if not self.done:
            self.done = True
            self.scale.copy_(rows.std())
            self.extra = rows.mean()
        self.history.append(float(rows.mean()))
        hidden: Tensor = self.linear(rows / self.scale) * (1 + 0.01 * len(self.history))
        return hidden


def test_an_evaluation_leaves_no_trace() -> None:
    validation = [(ROWS[:8] * 50, LABELS[:8])]
    weights = []
    for every in (None, "1ba", "never"):
        evaluation = None if every == "never" else Evaluation(validation, {"accuracy": accuracy})
        config = {"evaluate_every": None if every == "never" else every}
        trainer = trainer_of(Initialised(), batches(), None, config=config, evaluation=evaluation)
        trainer.fit()
        weights.append(trainer.model.linear.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


class Scripted(nn.Module):
    """What TorchScript takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.linear(self.norm(rows)) + self.offset
        return hidden


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("wrap", [torch.jit.script, lambda model: torch.compile(model, backend="eager")])
def test_scripted_and_compiled_models_train_evaluate_and_resume(
    wrap: Any, num_microbatches: int, tmp_path: Path
) -> None:
    evaluation = Evaluation(batches(), {"accuracy": accuracy})
    config = {"num_microbatches": num_microbatches, "evaluate_every": "2ba", "change": ("budget",)}
    whole = trainer_of(wrap(Scripted()), batches(), None, evaluation=evaluation, config=config)
    whole.fit()
    trainer_of(wrap(Scripted()), batches(), tmp_path, evaluation=evaluation, config=config | {"budget": "3ba"}).fit()
    again = trainer_of(wrap(Scripted()), batches(), tmp_path, evaluation=evaluation, config=config)
    again.fit()
    assert again.plan.holds("resume")
    for one, other in zip(again.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_fit_that_failed_goes_on_with_the_batch_that_failed(num_microbatches: int) -> None:
    def run(fails_at: int | None) -> Trainer:
        calls = 0

        def failing(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise KeyError
            return loss_of(model, data)

        failing.forward_caches = ("calls",)  # type: ignore[attr-defined]
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(ROWS, LABELS), 8, shuffle=True)
        config = RunConfig(budget="8ba", num_threads=1, num_microbatches=num_microbatches)
        trainer = Trainer(nn.Linear(4, 3), failing, data, optimizers=[SGD(lr=0.1)], config=config)
        if fails_at is not None:
            with pytest.raises(KeyError):
                trainer.fit()
        trainer.fit()
        return trainer

    whole, again = run(None), run(4 * num_microbatches)
    assert again.clock.step == 8
    assert torch.equal(again.model.weight, whole.model.weight)


class Experiment:
    """Holds the trainer that trains by its method, as many a script's class does."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.log = Path(folder.parent / "log").open("w")  # noqa: SIM115
        self.model = nn.Linear(4, 3)
        config = RunConfig(budget="6ba", num_threads=1, run_folder=folder, checkpoint_every="1ba", ledger=True)
        data = batches()
        self.trainer = Trainer(self.model, self.compute, data, optimizers=[SGD(lr=0.1)], config=config)

    def compute(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        self.log.write("x")
        return loss_of(model, data)


def test_a_loss_may_hold_its_trainer_and_open_files(tmp_path: Path) -> None:
    from cosmati.train.run.folder import RunFolder

    experiment = Experiment(tmp_path / "run")
    with experiment.trainer as trainer:
        for batch in batches()[:3]:
            trainer.step(batch)
        with pytest.raises(RunError, match="Another Trainer of this process"):
            RunFolder.open(tmp_path / "run", None)  # type: ignore[arg-type]
    assert experiment.trainer.fit().outcome == "completed"
    experiment.log.close()


def test_who_steps_without_opening_is_told_where_the_run_goes_on(tmp_path: Path) -> None:
    trainer_of(nn.Linear(4, 3), None, tmp_path, config={"budget": "3ba"}).step(batches()[0])
    with trainer_of(nn.Linear(4, 3), None, tmp_path, config={"budget": "3ba"}) as first:
        for batch in batches()[first.clock.step : 2]:
            first.step(batch)
    again = trainer_of(nn.Linear(4, 3), None, tmp_path, config={"budget": "3ba"})
    with pytest.warns(UserWarning, match="goes on at step 2.*`with trainer:`"):
        again.step(batches()[again.clock.step])


@pytest.mark.long
def test_a_trainer_that_is_forgotten_lets_go_while_another_thread_collects(tmp_path: Path) -> None:
    """A collection that is asked for meanwhile does nothing, and finalizers may take their time."""

    class Slow:
        def __init__(self) -> None:
            self.own, self.pause = self, threading.Event()

        def __del__(self) -> None:
            begun.set()
            self.pause.wait(1.0)

    def collect() -> None:
        Slow()
        gc.collect()

    begun = threading.Event()
    trainer_of(nn.Linear(4, 3), None, tmp_path, config={"budget": "3ba"}).step(batches()[0])
    thread = threading.Thread(target=collect)
    thread.start()
    assert begun.wait(60.0)
    with trainer_of(nn.Linear(4, 3), None, tmp_path, config={"budget": "3ba"}) as again:
        again.step(batches()[again.clock.step])
    thread.join()
