"""What a run that was gone on with says of itself: all its time, and what it measured, not its last attempt's."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer
from cosmati.core.clock import Clock
from cosmati.models.mlp import MLP
from cosmati.optim.optimizers import SGD
from cosmati.records.attempts import read_attempts
from cosmati.store.index import RunIndex
from cosmati.train.observers.observer import Observer
from cosmati.train.run.result import RunResult


class Slow(Observer):
    """Takes its time, so that each attempt's can be told, and stops after some steps."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at

    def on_open(self, run: Any) -> None:
        self.watched = run

    def on_step(self, outcome: Any) -> None:
        time.sleep(0.01)
        if outcome.clock.step == self.stop_at:
            self.watched.stop("asked to")


def train(folder: Path, *, stop_at: int = 0) -> RunResult:
    torch.manual_seed(0)
    rows = torch.randn(64, 4), torch.arange(64) % 3
    trainer = Trainer(
        MLP((4, 8, 3)),
        Classification(3),
        InMemory(rows, rows_per_step=8),
        optimizers=SGD(lr=0.01),
        evaluation=Evaluation([rows], {"mean": lambda _model, data: data[0].mean()}),
        observers=Slow(stop_at),
        config=RunConfig(budget="24ba", run_folder=folder, evaluate_every="8ba", num_threads=1),
    )
    return trainer.fit()


def seconds_of(folder: Path) -> tuple[float, float, float]:
    """Return what the record says, what the store does, and the clock of the last evaluation."""
    parts = json.loads((folder / "run.json").read_text())["seconds_by_part"]
    with RunIndex(folder.parent) as index:
        index.refresh()
        (run,) = index.runs()
    last = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
    return (
        math.fsum(value for name, value in parts.items() if name not in ("evaluation", "checkpoint")),
        run.seconds or 0.0,
        last["seconds"],
    )


def test_the_time_of_a_resumed_run_is_of_all_its_attempts(tmp_path: Path) -> None:
    assert train(tmp_path / "run", stop_at=16).outcome == "stopped"
    first, in_store, _ = seconds_of(tmp_path / "run")
    assert in_store == pytest.approx(first)
    assert first > 0.16
    assert train(tmp_path / "run").outcome == "completed"
    whole, in_store, clock = seconds_of(tmp_path / "run")
    assert in_store == pytest.approx(whole)
    assert whole == pytest.approx(clock, rel=0.1)
    assert whole > 0.24, "24 steps of 10 ms"
    parts = json.loads((tmp_path / "run" / "run.json").read_text())["seconds_by_part"]
    assert parts["earlier attempts"] == read_attempts(tmp_path / "run")[-1].first_seconds > 0.16


def test_the_same_command_again_changes_no_figure(tmp_path: Path) -> None:
    once = train(tmp_path / "run")
    before, _, _ = seconds_of(tmp_path / "run")
    again = train(tmp_path / "run")
    after, in_store, _ = seconds_of(tmp_path / "run")
    assert after == pytest.approx(before, rel=0.1)
    assert in_store == pytest.approx(after)
    assert again.metrics == once.metrics


def test_a_stopped_run_that_is_asked_again_still_has_its_metrics(tmp_path: Path) -> None:
    once = train(tmp_path / "run", stop_at=16)
    assert once.metrics
    again = train(tmp_path / "run", stop_at=17)
    assert again.clock.step == 17
    assert again.metrics == once.metrics
    assert json.loads((tmp_path / "run" / "run.json").read_text())["metrics"] == dict(once.metrics)


def test_one_trainer_that_goes_on_counts_its_time_once(tmp_path: Path) -> None:
    rows = torch.randn(64, 4), torch.arange(64) % 3
    trainer = Trainer(
        MLP((4, 8, 3)),
        Classification(3),
        InMemory(rows, rows_per_step=8),
        optimizers=SGD(lr=0.01),
        observers=Slow(8),
        config=RunConfig(budget="16ba", num_threads=1),
    )
    trainer.fit()
    result = trainer.fit()
    assert "earlier attempts" not in result.seconds_by_part
    assert isinstance(result.clock, Clock)
    assert math.fsum(result.seconds_by_part.values()) < 2 * result.seconds
