"""A run from its opening to its end: what became of it, where its clock stands, what may be done again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Regression
from cosmati.errors import CheckpointError, DataError, DivergenceError
from cosmati.optim import SGD
from cosmati.records.run import RunRecord
from cosmati.storage.lock import is_locked
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.finite import FiniteCheck
from cosmati.train.observers import Observer, StepOutcome
from cosmati.train.run import saving
from cosmati.train.run.checkpoints import list_checkpoints
from cosmati.train.trainer import Trainer

DATA = [(torch.full((4, 3), float(step)), torch.ones(4, 1)) for step in range(4)]


class Loader:
    """Batches without a length."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DATA[: self.num])


class Events(Observer):
    """Writes down steps with their clocks, evaluations, checkpoints and the end."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.told.append((outcome.clock.step, outcome.clock.epoch, outcome.clock.step_in_epoch))

    def on_evaluation(self, clock: Any, metrics: Any, seconds: float) -> None:
        self.told.append(("evaluation", clock.step))

    def on_checkpoint(self, clock: Any, state_digest: bytes, parameter_root: bytes) -> None:
        self.told.append(("checkpoint", clock.step))

    def on_end(self, clock: Any, ended: str) -> None:
        self.told.append((ended, clock.step))


def _trainer(data: Any = DATA, *observers: Observer, loss: Any = None, **config: Any) -> Trainer:
    torch.manual_seed(0)
    settings = RunConfig(**{"budget": "4ba", "num_threads": 1} | config)
    evaluation = Evaluation(DATA[:1], {"m": lambda model, data: model(data[0]).mean()})
    return Trainer(
        nn.Linear(3, 1),
        loss or Regression(),
        data,
        optimizers=[SGD(lr=0.01)],
        observers=observers,
        evaluation=evaluation,
        config=settings,
    )


def _outcome(folder: Path) -> str:
    return RunRecord.from_json((folder / "run.json").read_text()).outcome


def _saved(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_epochs_of_data_without_a_length_end_where_the_data_do(num_microbatches: int) -> None:
    events = Events()
    trainer = _trainer(Loader(3), events, budget="2ep", num_microbatches=num_microbatches)
    assert trainer.fit().outcome == "completed"
    steps = [(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 1, 1), (5, 1, 2), (6, 1, 3)]
    assert events.told == [*steps, ("evaluation", 6), ("completed", 6)]
    assert trainer.clock[:3] == (6, 2, 0)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_generator_that_ends_ends_the_run(num_microbatches: int) -> None:
    trainer = _trainer(iter(DATA[:3]), budget="9ba", num_microbatches=num_microbatches)
    assert trainer.fit().outcome == "exhausted"
    assert trainer.clock.step == 3


def test_evaluations_and_checkpoints_come_after_their_steps_and_at_the_end(tmp_path: Path) -> None:
    events = Events()
    config = {"evaluate_every": "2ba", "checkpoint_every": "3ba", "run_folder": tmp_path, "num_checkpoints": 9}
    _trainer(DATA, events, **config).fit()
    assert [event for event in events.told if isinstance(event[0], str)] == [
        ("checkpoint", 0), ("evaluation", 2), ("checkpoint", 3), ("evaluation", 4), ("checkpoint", 4), ("completed", 4)
    ]  # fmt: skip
    assert (_outcome(tmp_path), _saved(tmp_path)) == ("completed", [4, 3, 0])


def _raises(error: type[BaseException]) -> Callable[[nn.Module, Data], Tensor]:
    seen: list[int] = []

    def loss(model: nn.Module, data: Data) -> Tensor:
        # Without gradients it's a checkpoint's fixed microbatch.
        seen.extend([1] * torch.is_grad_enabled())
        if len(seen) == 3:
            raise error
        return model(data[0]).mean()

    return loss


@pytest.mark.parametrize(
    ("error", "outcome"), [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "failed"), (DivergenceError, "diverged")]
)
def test_a_run_that_breaks_off_says_how_and_saves_nothing_of_it(
    tmp_path: Path, error: type[BaseException], outcome: str
) -> None:
    events = Events()
    with pytest.raises(error):
        _trainer(DATA, events, loss=_raises(error), run_folder=tmp_path).fit()
    assert (_outcome(tmp_path), _saved(tmp_path), events.told[-1]) == (outcome, [0], (outcome, 2))


@pytest.mark.parametrize("config", [{"checkpoint_every": "3ba"}, {}])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_on_an_accelerator_a_bad_loss_is_found_before_anything_is_kept(
    tmp_path: Path, config: dict[str, Any], num_microbatches: int
) -> None:
    """There the loss is looked at every so many steps, and before each checkpoint and the last evaluation."""
    events, losses = Events(), iter([1.0, 1.0, torch.nan, torch.nan] + [1.0] * 9)

    def loss(model: nn.Module, data: Data) -> Tensor:
        return model(data[0]).mean() * next(losses)

    options = {"run_folder": tmp_path, "num_microbatches": num_microbatches, "check_every": 50} | config
    trainer = _trainer([DATA[0]] * 4, events, loss=loss, **options)
    trainer.finite = FiniteCheck(trainer.assembly.config, torch.device("meta"))
    with pytest.raises(DivergenceError, match=f"up to {3 if config else 4} isn't finite"):
        trainer.fit()
    assert (_outcome(tmp_path), _saved(tmp_path)) == ("diverged", [0])
    assert not [event for event in events.told if event[0] == "evaluation"]


def test_on_an_accelerator_the_users_own_loop_is_looked_at_too(tmp_path: Path) -> None:
    events = Events()
    options = {"run_folder": tmp_path, "check_every": 50}
    trainer = _trainer(None, events, loss=lambda model, data: model(data[0]).mean() * torch.nan, **options)
    trainer.finite = FiniteCheck(trainer.assembly.config, torch.device("meta"))

    def loop() -> None:
        with trainer:
            trainer.step(DATA[0])

    with pytest.raises(DivergenceError, match="up to 1 isn't finite"):
        loop()
    assert (_outcome(tmp_path), _saved(tmp_path), events.told[-1]) == ("diverged", [0], ("diverged", 1))


def test_a_last_checkpoint_that_cannot_be_written_still_ends_the_users_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told of the end, the record and the lock don't wait for the process to go."""
    events, before = Events(), signal.getsignal(signal.SIGINT)
    trainer = _trainer(None, events, run_folder=tmp_path)

    usual = saving.WholeDraft.write

    def full(draft: saving.WholeDraft) -> None:
        if trainer.clock.step:
            raise CheckpointError("no space")
        usual(draft)

    def loop() -> None:
        with trainer:
            trainer.step(DATA[0])

    monkeypatch.setattr(saving.WholeDraft, "write", full)
    with pytest.raises(CheckpointError, match="no space"):
        loop()
    assert (_outcome(tmp_path), events.told[-1]) == ("failed", ("failed", 1))
    assert not is_locked(tmp_path / "lock")
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    loop()
    assert (_outcome(tmp_path), _saved(tmp_path), trainer.clock.step) == ("stopped", [1, 0], 1)


@pytest.mark.parametrize(("num_steps", "outcome"), [(0, "stopped"), (3, "stopped"), (4, "completed"), (6, "completed")])
def test_the_users_own_loop_ends_with_a_checkpoint(tmp_path: Path, num_steps: int, outcome: str) -> None:
    events = Events()
    trainer = _trainer(None, events, run_folder=tmp_path)
    with trainer:
        for step in range(num_steps):
            trainer.step(DATA[step % 4])
    assert (_outcome(tmp_path), _saved(tmp_path)) == (outcome, sorted({num_steps, 0}, reverse=True))
    assert events.told[-2:] == [("checkpoint", num_steps), (outcome, num_steps)]


def test_a_run_can_be_opened_again_and_goes_on() -> None:
    trainer, whole = _trainer(None), _trainer(None)
    for part in (DATA[:1], DATA[1:3]):
        with trainer:
            for data in part:
                trainer.step(data)
    with whole:
        for data in DATA[:3]:
            whole.step(data)
    assert trainer.clock[:5] == whole.clock[:5]
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True))
    assert trainer.clock.seconds > 0


def test_seconds_of_training_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    first, second = _trainer(None, run_folder=tmp_path), _trainer(None, run_folder=tmp_path)
    with first:
        first.step(DATA[0])
        first.stopwatch._before += 1000.0
        first.step(DATA[1])
    with second:
        assert second.clock == first.clock
        second.step(DATA[2])
    assert second.clock.step == 3
    assert second.clock.seconds > first.clock.seconds > 1000.0


def test_fit_without_data_says_what_it_needs() -> None:
    with pytest.raises(DataError, match=r"fit\(\) needs data"):
        _trainer(None).fit()


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    first = _trainer(DATA, run_folder=tmp_path)
    first.fit()
    events = Events()
    again = _trainer(DATA, events, run_folder=tmp_path)
    assert again.fit().outcome == "completed"
    assert events.told == [("evaluation", 4), ("completed", 4)]
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_leaves_are_scaled_by_a_power_of_two_near_one_over_the_weight(rows: int) -> None:
    """So that no sum overflows; as a power of two it leaves every bit of the mean."""
    data = torch.randn(2 * rows, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(2 * rows, 1)
    trainer = _trainer(None, num_microbatches=2)
    found: list[Tensor] = []
    bias = trainer.model.bias
    (summed,) = torch.autograd.grad((trainer.model(data[0][:rows]) - data[1][:rows]).square().sum(), [bias])
    bias.register_hook(lambda gradient: found.append(gradient.clone()))
    with trainer:
        trainer.step(data)
    scale = {1: 1 / 2, 2: 1 / 4, 3: 1 / 4, 4: 1 / 8, 5: 1 / 8}[rows]
    assert len(found) == 2
    torch.testing.assert_close(found[0], summed * scale)
