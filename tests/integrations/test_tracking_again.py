"""A `Tracking` that's used again, trackers that aren't any, and names that tools refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cosmati import Observer, StepOutcome
from cosmati.errors import RunError
from cosmati.integrations import TrackedRun, Tracking, track_run
from cosmati.integrations.mlflow import _name
from cosmati.train.observers import WatchedRun
from tests.integrations.places import PLACES
from tests.integrations.runs import make
from tests.integrations.test_tracking import Notebook


class StopAt(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            self.run.stop("enough for now")


def test_a_tracker_that_failed_is_tried_again_when_the_run_goes_on(tmp_path: Path) -> None:
    notebook = Notebook("log")
    tracking = Tracking(notebook, every=1, capacity=4)
    trainer = make(tmp_path, [tracking, StopAt(11)])
    trainer.fit()
    assert tracking.problem
    notebook.fails_at = ""
    trainer.fit()
    assert [call[1:] for call in notebook.named("open")] == [(0, 0), (1, 11)]
    assert tracking.problem == ""


def test_one_that_still_hangs_is_left_alone(tmp_path: Path) -> None:
    notebook = Notebook(blocks_at="log")
    tracking = Tracking(notebook, patience_seconds=0.05)
    trainer = make(tmp_path, [tracking, StopAt(11)])
    trainer.fit()
    assert trainer.fit().outcome == "completed"
    notebook.released.set()
    assert "hasn't returned yet" in tracking.problem
    assert [call[1:] for call in notebook.named("open")] == [(0, 0)]


def test_a_tracker_may_be_named_in_words() -> None:
    with pytest.raises(RunError, match=r"'tensorbord' is no tracker\. Did you mean tensorboard"):
        Tracking("tensorbord")


@pytest.mark.parametrize("odd", [Notebook, object(), None])
def test_what_is_no_tracker_is_named_before_the_run(odd: Any) -> None:
    with pytest.raises(RunError, match=r"is given no tracker.*Give one of cosmati\.integrations"):
        Tracking(odd)


@pytest.mark.parametrize("patience", [math.nan, math.inf])
def test_a_patience_without_end_is_refused(patience: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Tracking(Notebook(), patience_seconds=patience)


LONG = "y" * 300
NAMES = (
    "loss",
    "a/b",
    "a b",
    "a_b",
    "a:b",
    "a,b",
    "a\nb",
    "ä",
    "x//y",
    "/x",
    "../x",
    ".",
    "",
    "x/y/",
    LONG,
    LONG + "y",
)


def test_mlflow_is_given_names_that_it_takes_and_none_twice() -> None:
    names = [_name(name) for name in NAMES]
    assert len(set(names)) == len(NAMES)
    assert names[:4] == ["loss", "a/b", "a b", "a_b"], "as they are where they can be"
    assert all(0 < len(name) <= 250 for name in names)
    assert all(part.strip(".") for name in names for part in name.split("/"))


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.slow  # MLflow makes its database anew
@pytest.mark.parametrize("tool", ["tensorboard", "mlflow"])
def test_each_name_is_a_curve_of_its_own(tool: str, tmp_path: Path) -> None:
    for package in PLACES[tool].packages:
        pytest.importorskip(package, reason=f"{package} isn't installed", exc_type=ImportError)
    tracker = PLACES[tool].make(tmp_path)
    config: Mapping[str, object] = dict.fromkeys(NAMES, "text")
    tracker.open(TrackedRun("n" * 255, "ab" * 16), 0, 0, config)
    tracker.log(1, {name: float(index) for index, name in enumerate(NAMES)}, 1.7e9)
    tracker.summary(dict.fromkeys(NAMES, 1.0))
    tracker.close("completed")
    stored = PLACES[tool].read(tmp_path)[0].values
    found = sorted(value for (name, _), (value,) in stored.items() if "summary" not in name and value < len(NAMES))
    assert found == [float(index) for index in range(len(NAMES))]


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_the_longest_name_is_tracked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed", exc_type=ImportError)
    folder = tmp_path / ("ü" * 127)
    make(folder, budget="12ba").fit()
    assert track_run(folder, PLACES["tensorboard"].make(tmp_path))[0].num_lines > 0


@pytest.mark.slow  # as above
@pytest.mark.filterwarnings("ignore")
def test_mlflow_is_told_how_each_attempt_ended(tmp_path: Path) -> None:
    for package in PLACES["mlflow"].packages:
        pytest.importorskip(package, reason=f"{package} isn't installed", exc_type=ImportError)
    tracker, run = PLACES["mlflow"].make(tmp_path), TrackedRun("run", "ab" * 16)
    ends = {
        "completed": "FINISHED",
        "exhausted": "FINISHED",
        "stopped": "KILLED",
        "failed": "FAILED",
        "killed": "FAILED",
    }
    ends["running"] = "RUNNING"
    for attempt, outcome in enumerate(ends):
        tracker.open(run, attempt, 0, {})
        tracker.close(outcome)
    stored = PLACES["mlflow"].read(tmp_path)
    assert [stored[attempt].words.rpartition(" ")[2] for attempt in range(len(ends))] == list(ends.values())
