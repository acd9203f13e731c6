"""What observers see, keep and ask for: the run's model, state in checkpoints, a stop; attempts that are superseded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Evaluation, InMemory, Observer, RunConfig, StepOutcome, Trainer
from cosmati.core.clock import Budget, Clock
from cosmati.errors import CheckpointError
from cosmati.records.attempts import RunAttempt, attempt_of, read_attempts, read_lines, superseded_from
from cosmati.train.observers import WatchedRun
from cosmati.train.run.attempts import begin_attempt, end_attempt
from cosmati.train.run.checkpoints import read_checkpoint

pytestmark = pytest.mark.long

ROWS = torch.arange(48.0).reshape(16, 3) / 48


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def mean_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).abs().mean()


def make(folder: Path | None, *observers: Observer, budget: str = "12ba", **config: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    data = InMemory((ROWS, ROWS.sum(1, keepdim=True)), 4)
    evaluation = Evaluation([(ROWS, ROWS.sum(1, keepdim=True))], {"error": mean_error})
    return Trainer(
        model,
        squared_error,
        data,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)],
        evaluation=evaluation if "evaluate_every" in config else None,
        observers=observers,
        config=RunConfig(budget=budget, run_folder=folder, **config),
    )


class Recorder(Observer):
    """Keeps a running mean of the loss as a tensor, an infinity, and what it was told."""

    def __init__(self, every: int = 1, stop_at: int | None = None) -> None:
        self.every, self.stop_at = every, stop_at
        self.mean, self.best = torch.zeros(()), math.inf
        self.told: list[tuple[str, int]] = []

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def state_dict(self) -> Mapping[str, Any]:
        return {"mean": self.mean, "best": self.best, "told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.best, self.told = state["mean"], state["best"], list(state["told"])

    def on_step_begin(self, clock: Clock) -> None:
        self.told.append(("begin", clock.step))

    def on_step(self, outcome: StepOutcome) -> None:
        self.told.append(("step", outcome.clock.step))
        self.mean = 0.9 * self.mean + 0.1 * outcome.loss
        self.best = min(self.best, float(outcome.loss))
        if outcome.clock.step == self.stop_at:
            self.run.stop("it was enough")

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        self.told.append(("evaluation", clock.step))


def same(one: Recorder, other: Recorder) -> bool:
    return torch.equal(one.mean, other.mean) and (one.best, one.told) == (other.best, other.told)


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*/model.safetensors"))


def test_the_begin_of_a_step_is_told_with_its_end() -> None:
    watch = Recorder(every=4)
    make(None, watch).fit()
    assert watch.told == [("begin", 3), ("step", 4), ("begin", 7), ("step", 8), ("begin", 11), ("step", 12)]


def test_a_stop_ends_the_run_cleanly_and_says_why(tmp_path: Path) -> None:
    whole, stopped, again = Recorder(), Recorder(stop_at=5), Recorder()
    make(tmp_path / "whole", whole, evaluate_every="2ba").fit()
    result = make(tmp_path / "run", stopped, evaluate_every="2ba").fit()
    assert (result.outcome, result.reason, result.clock.step) == ("stopped", "it was enough", 5)
    assert json.loads((tmp_path / "run/run.json").read_text())["outcome"] == "stopped"
    assert (tmp_path / "run/checkpoints/step-00000005").is_dir()
    (attempt,) = read_attempts(tmp_path / "run")
    assert (attempt.outcome, attempt.last_step, attempt.reason) == ("stopped", 5, "it was enough")
    assert make(tmp_path / "run", again, evaluate_every="2ba").fit().outcome == "completed"
    assert same(again, whole), "the state goes on as if nothing had happened"
    assert weights(tmp_path / "run")[-1].read_bytes() == weights(tmp_path / "whole")[-1].read_bytes()
    assert read_attempts(tmp_path / "run")[1].reason == ""


def test_watching_changes_no_bits(tmp_path: Path) -> None:
    make(tmp_path / "bare").fit()
    make(tmp_path / "watched", Recorder(), Recorder(every=3)).fit()
    bare, watched = (
        sorted((tmp_path / name).glob("checkpoints/step-*/model.safetensors")) for name in ("bare", "watched")
    )
    assert [path.read_bytes() for path in bare] == [path.read_bytes() for path in watched]


def test_the_ledger_signs_the_same_digest_whoever_watches(tmp_path: Path) -> None:
    for name, watchers in {"bare": (), "watched": (Recorder(),)}.items():
        make(tmp_path / name, *watchers, ledger=True, budget="4ba").fit()
    states = [
        [line.get("state_digest") for line in read_lines(tmp_path / name / "ledger/details.jsonl")]
        for name in ("bare", "watched")
    ]
    assert states[0] == states[1]
    found = [read_checkpoint(tmp_path / name / "checkpoints/step-00000004") for name in ("bare", "watched")]
    assert found[0].signed_digest == found[1].signed_digest
    assert "Recorder" in found[1].facts["observers"]


def test_a_state_that_nobody_takes_is_told(tmp_path: Path) -> None:
    make(tmp_path, Recorder(stop_at=3)).fit()
    with pytest.warns(UserWarning, match="keeps the state of Recorder.*Give the observers"):
        make(tmp_path).fit()


def test_two_of_a_kind_keep_a_state_each(tmp_path: Path) -> None:
    make(tmp_path, Recorder(every=2), Recorder(stop_at=4)).fit()
    first, second = Recorder(every=2), Recorder()
    make(tmp_path, first, second, budget="12ba").fit()
    assert [step for kind, step in first.told if kind == "step"] == [2, 4, 6, 8, 10, 12]
    assert [step for kind, step in second.told if kind == "step"] == list(range(1, 13))


class Unsavable(Recorder):
    def state_dict(self) -> Mapping[str, Any]:
        return {"file": object()}


def test_a_state_that_needs_pickle_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Unsavable/file"):
        make(tmp_path, Unsavable()).fit()


class Publisher(Recorder):
    def on_step(self, outcome: StepOutcome) -> None:
        self.run.publish(outcome.clock, {"double": 2.0 * outcome.clock.step, "odd": math.nan})


class Listener(Observer):
    def __init__(self) -> None:
        self.values: list[tuple[int, Mapping[str, float]]] = []

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        self.values.append((clock.step, values))


def test_published_values_reach_all_and_the_folder(tmp_path: Path) -> None:
    listener = Listener()
    make(tmp_path, Publisher(every=6), listener).fit()
    assert [(step, values["double"]) for step, values in listener.values] == [(6, 12.0), (12, 24.0)]
    lines = list(read_lines(tmp_path / "monitors.jsonl"))
    assert [(line["step"], line["double"], line["odd"]) for line in lines] == [(6, 12.0, None), (12, 24.0, None)]


def write(folder: Path, steps: Sequence[int]) -> None:
    with (folder / "steps.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": float(step)}) + "\n" for step in steps)


def begin(folder: Path, step: int) -> tuple[int, dict[int, int]]:
    attempt, superseded = begin_attempt(folder, Clock(step=step))
    return attempt.number, superseded


def test_what_a_restart_takes_anew_is_kept_under_its_attempt(tmp_path: Path) -> None:
    assert begin(tmp_path, 0) == (0, {})
    write(tmp_path, [10, 20, 30])
    assert begin(tmp_path, 20) == (1, {0: 20})
    write(tmp_path, [30, 40])
    assert begin(tmp_path, 10) == (2, {0: 10, 1: 10})
    write(tmp_path, [20])
    end_attempt(tmp_path, 2, Clock(step=24), "stopped", "why")
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == [10, 20]
    kept = [
        (line["attempt"], line["from_step"], line["line"]["step"]) for line in read_lines(tmp_path / "superseded.jsonl")
    ]
    assert kept == [(0, 20, 30), (0, 10, 20), (1, 10, 30), (1, 10, 40)]
    assert superseded_from(tmp_path) == {0: 10, 1: 10}
    attempts = read_attempts(tmp_path)
    assert [attempt_of(step, attempts) for step in (0, 10, 11, 20, 24)] == [0, 0, 2, 2, 2]
    assert attempts[0].last_step is None
    assert attempts[2] == RunAttempt(
        number=2, first_step=10, started=attempts[2].started, last_step=24, outcome="stopped", reason="why"
    )


def test_a_clean_stop_supersedes_nothing(tmp_path: Path) -> None:
    make(tmp_path, Recorder(stop_at=5)).fit()
    seen = Recorder()
    make(tmp_path, seen).fit()
    assert (seen.run.attempt, seen.run.superseded) == (1, {})
    assert not (tmp_path / "superseded.jsonl").exists()


def test_a_torn_line_of_attempts_harms_no_other(tmp_path: Path) -> None:
    begin_attempt(tmp_path, Clock())
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 0, "last')
    assert begin(tmp_path, 0)[0] == 1
    assert [one.number for one in read_attempts(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    "odd", ['{"attempt": 0, "started": 1}', '{"attempt": 7, "last_step": 3}', '{"attempt": "x"}', "[]"]
)
def test_an_odd_line_of_attempts_ends_no_run(odd: str, tmp_path: Path) -> None:
    make(tmp_path, Recorder(stop_at=3)).fit()
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write(odd + "\n")
    (tmp_path / "superseded.jsonl").write_text(odd + "\n")
    assert make(tmp_path, Recorder()).fit().outcome == "completed"
    assert [one.first_step for one in read_attempts(tmp_path)] == [0, 3]
    assert superseded_from(tmp_path) == {}


def test_an_observer_is_told_the_budget_only_after_its_state(tmp_path: Path) -> None:
    order: list[str] = []

    class Ordered(Recorder):
        def on_open(self, run: WatchedRun) -> None:
            super().on_open(run)
            order.append("open")

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            order.append("state")

        def on_start(self, clock: Clock, budget: Budget) -> None:
            order.append("start")

    make(tmp_path, Ordered(stop_at=2)).fit()
    make(tmp_path, Ordered()).fit()
    assert order == ["open", "start", "state", "open", "start"]
