"""Tracking costs a run nothing: whatever the tracker does, the run ends as it would, with the same weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest
import torch

from cosmati.errors import RunError
from cosmati.integrations import TrackedRun, Tracking, track_run, tracker_of
from cosmati.integrations.tracker import Config
from cosmati.records.run import RunRecord
from tests.integrations.runs import Cut, PowerCutError, begun_again, make, told


class Notebook:
    """A tracker that writes down its calls; it fails, blocks or forgets at the named one."""

    label, where, rewrites = "notebook", "here", False

    def __init__(self, fails_at: str = "", error: BaseException | None = None, blocks_at: str = "") -> None:
        self.calls: list[tuple[object, ...]] = []
        self.fails_at, self.error, self.blocks_at = fails_at, error, blocks_at
        self.released = threading.Event()

    def _note(self, *call: object) -> None:
        if call[0] == self.blocks_at:
            self.released.wait(20)
        if call[0] == self.fails_at:
            raise self.error or OSError("no route to host")
        self.calls.append(call)

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        self._note("open", run.key(attempt), attempt, first_step)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._note("log", step, dict(values), time)

    def summary(self, values: Mapping[str, float]) -> None:
        self._note("summary", dict(values))

    def artifact(self, path: Path, digest: str) -> None:
        self._note("artifact", path.name, digest)

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        self._note("supersede", run.key(attempt), attempt, from_step)
        return True

    def close(self, outcome: str) -> None:
        self._note("close", outcome)

    def named(self, name: str) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def weights(folder: Path) -> bytes:
    return max(folder.glob("checkpoints/step-*")).joinpath("model.safetensors").read_bytes()


@pytest.mark.parametrize("fails_at", ["open", "log", "summary", "artifact", "close"])
def test_a_tracker_that_fails_ends_tracking_and_not_the_run(
    fails_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "bare").fit()
    tracking = Tracking(Notebook(fails_at))
    with caplog.at_level(logging.WARNING, "cosmati"):
        result = make(tmp_path / "run", [tracking]).fit()
    assert result.outcome == "completed"
    assert weights(tmp_path / "run") == weights(tmp_path / "bare")
    (told_once,) = [record.message for record in caplog.records]
    assert "notebook has ended, and the run goes on: OSError: no route to host" in told_once
    assert tracking.problem == "OSError: no route to host"


def test_even_an_exit_of_the_tool_ends_no_run() -> None:
    tracking = Tracking(Notebook("log", SystemExit(3)))
    assert make(None, [tracking]).fit().outcome == "completed"
    assert tracking.problem == "SystemExit: 3"


def test_a_tracker_that_hangs_is_dropped_from_and_told(caplog: pytest.LogCaptureFixture) -> None:
    notebook = Notebook(blocks_at="open")
    tracking = Tracking(notebook, every=1, capacity=4, patience_seconds=0.2)
    with caplog.at_level(logging.WARNING, "cosmati"):
        assert make(None, [tracking]).fit().outcome == "completed"
    notebook.released.set()
    assert tracking.num_dropped >= 20
    text = " ".join(record.message for record in caplog.records)
    assert "took nothing any more" in text
    assert f"{tracking.num_dropped} calls were dropped" in text


def test_live_and_replayed_say_the_same(tmp_path: Path) -> None:
    live, after = Notebook(), Notebook()
    make(tmp_path / "run", [Tracking(live, every=10)], budget="20ba").fit()
    after.where = "there"
    (sent,) = track_run(tmp_path / "run", after)
    assert sent.num_lines == len(after.named("log"))
    assert live.named("open") == after.named("open")

    def flat(notebook: Notebook) -> set[tuple[object, ...]]:
        return {(s, n, v, t) for s, values, t in notebook.named("log") for n, v in values.items()}  # type: ignore[attr-defined]

    assert flat(live) <= flat(after), "the same values at the same times"
    assert {key[:2] for key in flat(after) - flat(live)} <= {(1, n) for n in ("loss", "learning_rate", "gradient_norm")}
    assert live.named("summary") == after.named("summary")
    assert {name for name, _ in after.named("artifact")} == {"step-00000010", "step-00000020"}
    assert live.named("close") == after.named("close") == [("completed",)]


def test_a_replay_sends_each_attempt_and_says_what_was_superseded(tmp_path: Path) -> None:
    begun_again(tmp_path / "run")
    notebook = Notebook()
    track_run(tmp_path / "run", notebook)
    (first, second) = notebook.named("open")
    assert (first[1:], second[1:]) == ((0, 0), (1, 20))
    assert first[0] != second[0]
    assert notebook.named("supersede") == [(first[0], 0, 20)]
    assert notebook.named("close") == [("failed",), ("completed",)]
    found = {(name, step): value for step, values, _ in notebook.named("log") for name, value in values.items()}  # type: ignore[attr-defined]
    assert found == told(tmp_path / "run")
    num = len(notebook.calls)
    assert [one.note for one in track_run(tmp_path / "run", notebook)] == ["all of it is there"] * 2
    assert len(notebook.calls) == num


def test_what_a_later_restart_supersedes_is_told_at_the_next_replay(tmp_path: Path) -> None:
    notebook = Notebook()
    with pytest.raises(PowerCutError):
        make(tmp_path, [Cut(26)]).fit()
    track_run(tmp_path, notebook)
    assert notebook.named("supersede") == []
    make(tmp_path).fit()
    track_run(tmp_path, notebook)
    assert [call[1:] for call in notebook.named("supersede")] == [(0, 20)]
    track_run(tmp_path, notebook)
    assert len(notebook.named("supersede")) == 1


def test_a_replay_that_was_cut_short_is_not_repeated_blindly(tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    with pytest.raises(RunError, match=r"OSError: no route.*another project, as some of it may be here"):
        track_run(tmp_path, Notebook("log"))
    with pytest.raises(RunError, match=r"attempt 0 to notebook.*cut short.*twice.*another project"):
        track_run(tmp_path, Notebook())
    rewriting = Notebook()
    rewriting.rewrites = True
    (sent,) = track_run(tmp_path, rewriting)
    assert (sent.num_lines > 0, sent.note) == (True, ""), "what was there isn't known"


def test_what_is_sent_again_says_what_was_there(tmp_path: Path) -> None:
    notebook = Notebook()
    notebook.rewrites = True
    with pytest.raises(PowerCutError):
        make(tmp_path, [Cut(26)]).fit()
    assert [one.note for one in track_run(tmp_path, notebook)] == [""]
    (again,) = track_run(tmp_path, notebook)
    assert (again.num_lines > 0, again.note) == (True, "all of it was there, and is written anew")
    make(tmp_path).fit()
    first, second = track_run(tmp_path, notebook)
    assert (first.note, second.note) == ("all of it was there, and is written anew", "")


def test_a_live_attempt_is_not_sent_again(tmp_path: Path) -> None:
    notebook = Notebook()
    make(tmp_path, [Tracking(notebook)], budget="12ba").fit()
    (one,) = track_run(tmp_path, notebook)
    assert (one.num_lines, one.note) == (0, "it was watched live there")


def test_tracking_changes_no_draw(tmp_path: Path) -> None:
    torch.manual_seed(7)
    make(tmp_path, [Tracking(Notebook())], budget="12ba").fit()
    torch.manual_seed(7)
    assert weights(tmp_path)
    make(tmp_path / "bare", budget="12ba").fit()
    assert weights(tmp_path) == weights(tmp_path / "bare")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wand", "'wand' is no tracker. Did you mean wandb"),
        ("comet:projet=x", "comet has no setting 'projet=x'. Did you mean project"),
        ("mlflow:uri", "mlflow has no setting 'uri'"),
        ("mlflow:uri=file:///tmp/x", "refused its file store since 3.17.*sqlite"),
        ("wandb:mode=off", "mode=off is not known"),
    ],
)
def test_what_cannot_be_says_what_can(text: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        tracker_of(text)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run.*Give the folder of one run"):
        track_run(tmp_path, Notebook())


def test_a_folder_of_an_earlier_release_is_one_attempt(tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    (tmp_path / "attempts.jsonl").unlink()
    notebook = Notebook()
    track_run(tmp_path, notebook)
    assert [call[1:] for call in notebook.named("open")] == [(0, 0)]
    assert notebook.named("close") == [("completed",)]
    started = datetime.fromisoformat(RunRecord.from_json((tmp_path / "run.json").read_text()).started).timestamp()
    assert all(started <= time <= started + 60 for _, _, time in notebook.named("log"))  # type: ignore[operator]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    (tmp_path / "tracked.jsonl").mkdir()
    notebook = Notebook()
    with pytest.raises(RunError, match=r"tracked\.jsonl can't be written"):
        track_run(tmp_path, notebook)
    assert not notebook.calls


@pytest.mark.parametrize("wrong", [{"every": 0}, {"capacity": 0}, {"patience_seconds": -1.0}])
def test_numbers_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Tracking(Notebook(), **wrong)  # type: ignore[arg-type]
