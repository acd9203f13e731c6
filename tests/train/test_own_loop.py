"""A loop of the user's own: the same cadences as in `fit`, its own signals, and a process that is left as it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import Evaluation, InMemory, RunConfig, Trainer
from cosmati.errors import CheckpointError
from cosmati.optim import AdamW
from cosmati.records.run import RunRecord
from cosmati.train.evaluation import accuracy
from cosmati.train.observers.observer import History
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(40, 4, generator=GENERATOR), torch.randint(3, (40,), generator=GENERATOR)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("view", self.embedding.weight.detach()[:2])

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def make(folder: Path | None = None, model: nn.Module | None = None, data: Any = None, **given: Any) -> Trainer:
    torch.manual_seed(0)
    config = {"budget": "6ba", "num_threads": 1, "run_folder": folder} | given.pop("config", {})
    return Trainer(
        nn.Linear(4, 3) if model is None else model,
        given.pop("loss", loss),
        data,
        optimizers=[AdamW(lr=0.01)],
        config=RunConfig(**config),
        **given,
    )


def steps() -> list[tuple[Tensor, Tensor]]:
    return [(ROWS[0][i : i + 8], ROWS[1][i : i + 8]) for i in range(0, 40, 8)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_same_cadences_as_in_fit(tmp_path: Path, num_microbatches: int) -> None:
    config = {
        "checkpoint_every": "2ba",
        "evaluate_every": "3ba",
        "num_checkpoints": 9,
        "num_microbatches": num_microbatches,
    }
    found = []
    for name in ("own", "fit"):
        history = History()
        evaluation = Evaluation(steps(), {"accuracy": accuracy})
        data = steps() if name == "fit" else None
        trainer = make(tmp_path / name, data=data, evaluation=evaluation, observers=[history], config=config)
        if name == "fit":
            trainer.fit()
        else:
            with trainer:
                while not trainer.should_stop:
                    trainer.step(steps()[trainer.clock.step % 5])
                trainer.evaluate()
        weights = read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[0]).model
        evaluations = [(clock.step, metrics) for clock, _, metrics in history.evaluations]
        names = [path.name for path in list_checkpoints(tmp_path / name / "checkpoints")]
        found.append((names, evaluations, {k: v.tolist() for k, v in weights.items()}))
    assert found[0] == found[1]
    assert found[0][0] == [f"step-{step:08d}" for step in (6, 4, 2, 0)]
    assert [step for step, _ in found[0][1]] == [3, 6]


def test_a_stop_that_the_user_asks_for(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with trainer:
        for batch in steps():
            trainer.step(batch)
            if trainer.clock.step == 2:
                trainer.stop()
            if trainer.should_stop:
                break
    assert trainer.clock.step == 2
    assert RunRecord.from_json((tmp_path / "run.json").read_text()).outcome == "stopped"
    again = make(tmp_path)
    with again:
        assert again.clock.step == 2
        assert not again.should_stop


def test_save_and_evaluate_when_asked(tmp_path: Path) -> None:
    trainer = make(tmp_path, evaluation=Evaluation(steps(), {"accuracy": accuracy}), config={"num_checkpoints": 5})
    assert trainer.evaluate() == {}
    with trainer:
        trainer.step(steps()[0])
        assert set(trainer.evaluate()) == {"accuracy"}
        trainer.save()
        trainer.save()
        trainer.step(steps()[1])
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000001", "step-00000000"]


LOOP = """
import signal, sys, torch
from pathlib import Path
from torch import nn
from cosmati import RunConfig, Trainer
from cosmati.optim import AdamW

model = nn.Linear(4, 1)
config = RunConfig(budget="1000000ba", num_threads=1, run_folder=Path(sys.argv[1]))
with Trainer(model, lambda m, x: m(x).square().mean(), optimizers=[AdamW(lr=0.01)], config=config) as trainer:
    print("begun", flush=True)
    while True:
        trainer.step(torch.ones(4, 4))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_are_the_loops_own(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(timeout=100) in (status, 128 + number, 1)
    record = RunRecord.from_json((tmp_path / "run" / "run.json").read_text())
    assert record.outcome == ("failed" if number == signal.SIGINT else "running")


def test_between_bare_steps_the_process_is_as_the_user_left_it() -> None:
    was = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    random.seed(5)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    expected = torch.random.get_rng_state()
    try:
        trainer = make()
        torch.random.set_rng_state(expected)
        for batch in steps():
            trainer.step(batch)
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == 2
            assert torch.equal(torch.random.get_rng_state(), expected)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        inside = make()
        with inside:
            for batch in steps():
                inside.step(batch)
        pairs = zip(trainer.model.parameters(), inside.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    finally:
        torch.set_num_threads(was)


def test_data_that_end_early_are_not_a_completed_run(tmp_path: Path) -> None:
    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from steps()[:4]

    result = make(tmp_path, data=once()).fit()
    assert (result.outcome, result.clock.step) == ("exhausted", 4)
    assert RunRecord.from_json((tmp_path / "run.json").read_text()).outcome == "exhausted"
    assert make(data=steps()).fit().outcome == "completed"


def test_what_would_fail_at_the_first_evaluation_fails_before_the_first_step(tmp_path: Path) -> None:
    def broken(model: nn.Module, data: object) -> Tensor:
        raise ZeroDivisionError

    trainer = make(tmp_path, data=steps(), evaluation=Evaluation(steps(), {"broken": broken}))
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.clock.step == 0


# ----------------------------------------------------------------------------------------------------- what is saved

TOKENS = InMemory((torch.randint(5, (16, 3), generator=GENERATOR), torch.randint(5, (16, 3), generator=GENERATOR)), 4)


def token_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    config = {"checkpoint_every": "2ba"}
    whole = make(tmp_path / "whole", Tied(), TOKENS, loss=token_loss, config=config)
    whole.fit()
    stored = read_checkpoint(list_checkpoints(tmp_path / "whole" / "checkpoints")[0]).model
    assert set(stored) == {"embedding.weight", "view"}
    first = make(tmp_path / "run", Tied(), TOKENS, loss=token_loss, config=config)

    def interrupted() -> None:
        with first:
            for _ in range(3):
                assert first.feed is not None
                batches = first.feed.microbatches(first.clock, [0])
                assert batches is not None
                first.step(batches[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    again = make(tmp_path / "run", Tied(), TOKENS, loss=token_loss, config=config)
    again.fit()
    assert again.model.head.weight is again.model.embedding.weight
    assert torch.equal(again.model.head.weight, whole.model.head.weight)


def test_a_compiled_model_resumes(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        torch.manual_seed(0)
        return torch.compile(nn.Linear(4, 3), backend="eager")  # type: ignore[return-value]

    whole = make(model=compiled(), data=steps())
    whole.fit()
    first = make(tmp_path, compiled(), steps())
    with first:
        for batch in steps()[:3]:
            first.step(batch)
    assert set(read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).model) == {"weight", "bias"}
    again = make(tmp_path, compiled(), steps())
    assert again.fit().clock.step == 6
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_a_list_with_other_content_is_another_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, data=steps(), config={"budget": "3ba"})
    trainer.fit()
    changed = steps()
    changed[4] = (changed[4][0] + 1e-3, changed[4][1])
    longer = {"budget": "6ba", "change": ("budget",)}
    with pytest.raises(CheckpointError, match="data: content"):
        make(tmp_path, data=changed, config=longer).fit()
    assert make(tmp_path, data=steps(), config=longer).fit().clock.step == 6


def test_the_pid_of_a_killed_run_is_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000000"
