"""A writer whose place was taken commits nothing: no checkpoint, no line, no entry, no record."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from cosmati import Classification, Evaluation, InMemory, Observer, RunConfig, StepOutcome, Trainer, accuracy, batches
from cosmati.errors import CosmatiError
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.storage.fence import fence_off
from tests.launch.jobs import (
    alone,
    assert_same_run,
    has_newer_checkpoint,
    recipe_in,
    until,
    with_secrets_of,
)
from tests.processes import PythonProcess, run_python

pytestmark = pytest.mark.long

# What the run writes first after it was fenced off, and after which step that is.
WRITES = {
    "a checkpoint": ({"checkpoint_every": "4ba"}, 2),
    "a line of metrics": ({}, 2),
    "an entry": ({"ledger": True}, 2),
    "an evaluation": ({"evaluate_every": "3ba"}, 2),
    "the end": ({}, 12),
}
_IN_FLIGHT_SECONDS = 0.1


class FencesOff(Observer):
    """Takes the run's place away after a step, and keeps what its files hold then."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self.content: dict[str, bytes] = {}

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self._step:
            for folder in (self._folder, self._folder / "ledger"):
                fence_off(folder)
            time.sleep(_IN_FLIGHT_SECONDS)  # what the ledger's thread had begun to write
            self.content = content_of(self._folder)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITES)
def test_a_writer_that_was_fenced_off_leaves_every_file_as_it_is(tmp_path: Path, write: str) -> None:
    more, step = WRITES[write]
    data = InMemory((torch.rand(24, 3), torch.arange(24) % 2), 4)
    run = tmp_path / "run"
    config = RunConfig(budget="12ba", num_threads=1, run_folder=run, **more)  # type: ignore[arg-type]
    evaluation = (
        Evaluation(batches((torch.rand(8, 3), torch.arange(8) % 2), 4), {"accuracy": accuracy})
        if write == "an evaluation"
        else None
    )
    fences = FencesOff(run, step)
    trainer = Trainer(
        MLP((3, 4, 2)),
        Classification(2),
        data,
        optimizers=[SGD(lr=0.1)],
        config=config,
        evaluation=evaluation,
        observers=[fences],
    )
    with pytest.raises(CosmatiError, match="is stale"):
        trainer.fit()
    assert fences.content
    assert content_of(run) == fences.content


class Loses(Observer):
    """Has the run's folder moved away at a step, as a disk is lost."""

    every = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == 5:
            self._folder.rename(self._folder.with_name("elsewhere"))


def test_a_folder_that_is_lost_is_said_to_be_so_and_not_begun_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def trainer(*observers: Observer) -> Trainer:
        data = InMemory((torch.rand(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2), 4)
        torch.manual_seed(0)
        config = RunConfig(budget="12ba", num_threads=1, run_folder=run, ledger=False, checkpoint_every="4ba")
        loss = Classification(2)
        return Trainer(MLP((3, 4, 2)), loss, data, optimizers=[SGD(lr=0.1)], config=config, observers=list(observers))

    with pytest.raises(CosmatiError, match=r"run isn't there any more.*Bring it back"):
        trainer(Loses(run)).fit()
    assert not run.exists()
    run.with_name("elsewhere").rename(run)
    assert trainer().fit().clock.step == 12


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_comes_back_from_a_machine_that_nobody_reached_commits_nothing(tmp_path: Path) -> None:
    num_steps = 14
    file, whole, run = recipe_in(tmp_path, num_steps, 0.02), tmp_path / "whole" / "run", tmp_path / "lost" / "run"
    alone(file, whole)
    with_secrets_of(whole, run)
    train = ["-m", "cosmati", "train", file, "--run-folder", run]
    lost = PythonProcess(train)
    until((run / "checkpoints").exists)
    until(has_newer_checkpoint(run))
    lost.send_signal(signal.SIGSTOP)
    refused = run_python(train)
    assert "Another process is training in" in refused.stderr
    for folder in (run, run / "ledger"):
        fence_off(folder, wait_seconds=0.1)
    done = run_python(train)
    assert done.returncode == 0, done.stderr
    after = content_of(run)
    lost.send_signal(signal.SIGCONT)
    _, errors = lost.communicate()
    assert lost.returncode == 1
    assert "is stale" in errors
    assert content_of(run) == after
    assert_same_run(whole, run, num_steps)
