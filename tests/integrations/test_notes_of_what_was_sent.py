"""What a tracker is known to have, and so what a replay sends: nothing twice, and nothing never."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cosmati import Observer, StepOutcome
from cosmati.core.clock import Clock
from cosmati.errors import RunError
from cosmati.integrations import Tracking, track_run
from cosmati.train.observers import WatchedRun
from tests.integrations.runs import Cut, PowerCutError, begun_again, make, told
from tests.integrations.test_tracking import Notebook


def values(notebook: Notebook) -> list[tuple[str, int, float]]:
    return [(name, step, value) for step, own, _ in notebook.named("log") for name, value in own.items()]  # type: ignore[attr-defined,misc]


class ReplayAt(Observer):
    """Replays the run while it goes on, at a step or after an evaluation, before the folder has a line of it."""

    def __init__(self, notebook: Notebook, step: int = -1, evaluation: int = -1) -> None:
        self.notebook, self.step, self.evaluation = notebook, step, evaluation
        self.notes: list[str] = []

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def _replay(self) -> None:
        assert self.run.folder is not None
        self.notes = [one.note for one in track_run(self.run.folder, self.notebook)]

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            self._replay()

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        if clock.step == self.evaluation:
            self._replay()


def test_a_tracker_that_could_not_be_opened_may_be_tried_again(tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    with pytest.raises(
        RunError, match=r"notebook \(here\) failed at attempt 0: OSError: no route.*run the command again"
    ):
        track_run(tmp_path, Notebook("open"))
    notebook = Notebook()
    track_run(tmp_path, notebook)
    assert {(name, step): value for name, step, value in values(notebook)} == told(tmp_path)


def test_nor_is_a_run_known_that_could_not_be_opened_live(tmp_path: Path) -> None:
    make(tmp_path, [Tracking(Notebook("open"))], budget="12ba").fit()
    notebook = Notebook()
    track_run(tmp_path, notebook)
    assert {(name, step): value for name, step, value in values(notebook)} == told(tmp_path)


def test_an_attempt_that_nobody_watched_is_sent_though_a_later_one_was_watched(tmp_path: Path) -> None:
    notebook = Notebook()
    begun_again(tmp_path, [], [Tracking(notebook)])
    assert notebook.named("supersede") == [], "it isn't there"
    track_run(tmp_path, notebook)
    assert [(call[1], call[2]) for call in notebook.named("open")] == [(1, 20), (0, 0)]
    assert [call[1:] for call in notebook.named("supersede")] == [(0, 20)]
    assert ("loss", 20, told(tmp_path)["loss", 20]) in values(notebook)


def test_what_was_replayed_of_an_attempt_stays_known_when_a_later_one_is_watched(tmp_path: Path) -> None:
    notebook = Notebook()
    with pytest.raises(PowerCutError):
        make(tmp_path, [Cut(26)]).fit()
    track_run(tmp_path, notebook)
    make(tmp_path, [Tracking(notebook)]).fit()
    assert [call[1:] for call in notebook.named("supersede")] == [(0, 20)]
    found = track_run(tmp_path, notebook)
    assert [one.note for one in found] == ["all of it is there", "it was watched live there"]


@pytest.mark.parametrize("at", [{"evaluation": 30}, {"evaluation": 12}, {"step": 20}, {"step": 1}])
def test_what_is_written_of_a_step_after_a_replay_comes_with_the_next(at: dict[str, int], tmp_path: Path) -> None:
    notebook = Notebook()
    make(tmp_path, [ReplayAt(notebook, **at)]).fit()
    track_run(tmp_path, notebook)
    found = values(notebook)
    assert len(found) == len({one[:2] for one in found}), "nothing twice"
    assert {(name, step): value for name, step, value in found} == told(tmp_path)
    assert notebook.named("close") == [("running",), ("completed",)]
    assert notebook.named("summary")[-1] == ({"error": told(tmp_path)["evaluation/error", 30]},)


def test_where_the_second_part_would_replace_the_first_all_is_sent_again(tmp_path: Path) -> None:
    class Replacing(Notebook):
        replaces = True

    notebook = Replacing()
    make(tmp_path, [ReplayAt(notebook, step=20)]).fit()
    num = len(notebook.calls)
    track_run(tmp_path, notebook)
    notebook.calls = notebook.calls[num:]
    assert {(name, step): value for name, step, value in values(notebook)} == told(tmp_path)
    num = len(notebook.calls)
    assert track_run(tmp_path, notebook)[0].note == "all of it is there"
    assert len(notebook.calls) == num


def test_how_much_was_there_is_counted_where_all_is_sent_again(tmp_path: Path) -> None:
    notebook = Notebook()
    notebook.rewrites = True
    make(tmp_path, [ReplayAt(notebook, step=20)]).fit()
    there = len(notebook.named("log"))
    (again,) = track_run(tmp_path, notebook)
    assert 0 < there < again.num_lines
    assert again.note == f"{there} of them were there, and are written anew"


def test_a_live_attempt_that_is_sent_again_says_so(tmp_path: Path) -> None:
    notebook = Notebook()
    notebook.rewrites = True
    make(tmp_path, [Tracking(notebook)], budget="12ba").fit()
    assert track_run(tmp_path, notebook)[0].note == "it was watched live there, and is written anew"


def test_a_run_without_a_line_is_told_its_end(tmp_path: Path) -> None:
    class Early(ReplayAt):
        def on_step_begin(self, clock: Clock) -> None:
            self._replay()
            raise PowerCutError

    notebook = Notebook()
    with pytest.raises(PowerCutError):
        make(tmp_path, [Early(notebook)]).fit()
    track_run(tmp_path, notebook)
    assert notebook.named("close") == [("running",), ("failed",)]


def test_a_run_that_is_being_watched_is_left_to_the_watcher(tmp_path: Path) -> None:
    """TensorBoard would read the replay's file last, and hide what comes by the watcher after it."""
    live, after = Notebook(), Notebook()
    live.rewrites = after.rewrites = True
    replay = ReplayAt(after, step=20)
    make(tmp_path, [Tracking(live, patience_seconds=20), Wait(live), replay]).fit()
    assert replay.notes == ["it is being watched live there"]
    assert after.calls == []
    track_run(tmp_path, after)
    assert after.named("close") == [("completed",)]


class Wait(Observer):
    """Waits at step 10 until the tracker's thread has written something, and so noted that it's there."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == 11:
            for _ in range(2000):
                if self.notebook.named("log"):
                    return
                self.notebook.released.wait(0.005)


def test_one_that_was_watched_in_part_says_so(tmp_path: Path) -> None:
    make(tmp_path, [Tracking(Notebook("log"))], budget="12ba").fit()
    (one,) = track_run(tmp_path, Notebook())
    assert one.note == "it was watched live there, and not to its end: another project can have all of it"


def test_a_torn_note_harms_no_other(tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    (tmp_path / "tracked.jsonl").write_text('{"to": "note')
    notebook = Notebook()
    track_run(tmp_path, notebook)
    num = len(notebook.calls)
    assert track_run(tmp_path, notebook)[0].note == "all of it is there"
    assert len(notebook.calls) == num


ODD: dict[str, list[Any]] = {
    "tracked.jsonl": [
        {"to": "notebook", "where": "here", "attempt": "x", "last_step": 1, "is_whole": True},
        {"to": "notebook", "where": "here", "attempt": None, "last_step": 1, "is_whole": True},
        {"to": "notebook", "where": "here", "attempt": 0, "last_step": "many", "is_whole": True},
        {"to": "notebook", "where": "here", "attempt": 0},
    ],
    "superseded.jsonl": [{"attempt": [1], "from_step": 3, "file": ["x"], "line": {"step": 3}}],
    "steps.jsonl": [
        {"step": 5, "seconds": float("inf"), "odd": 1},
        {"step": 5, "seconds": float("nan"), "odd": 1},
        {"step": 5, "odd": 10**400},
    ],
    "attempts.jsonl": [
        {"attempt": 0, "first_step": 0, "started": float("nan"), "first_seconds": 0},
        {"attempt": 0, "first_step": 0, "started": 1.0, "first_seconds": float("inf")},
    ],
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in ODD.items() for line in lines])
def test_an_odd_line_is_left_out(name: str, line: Mapping[str, object], tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    with (tmp_path / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    notebook = Notebook()
    track_run(tmp_path, notebook)
    assert [one for one in values(notebook) if one[0] == "odd"] == []
    times = [float(time) for _, _, time in notebook.named("log")]  # type: ignore[arg-type]
    assert max(times) - min(times) < 60
    assert min(times) > 1e9


def test_a_record_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"run\.json can't be read.*Give the folder of one run"):
        track_run(tmp_path, Notebook())


@pytest.mark.parametrize("fails_at", ["log", "summary", "artifact", "close"])
def test_what_a_tool_raises_in_a_replay_is_told_as_its_own(fails_at: str, tmp_path: Path) -> None:
    make(tmp_path, budget="12ba").fit()
    with pytest.raises(RunError, match=r"notebook \(here\) failed at attempt 0: SystemExit: 3"):
        track_run(tmp_path, Notebook(fails_at, SystemExit(3)))


def test_a_replay_sends_the_very_times_that_were_sent_live(tmp_path: Path) -> None:
    """MLflow knows a value that is sent twice by its millisecond, and the last bit may tip one over."""
    live, after = Notebook(), Notebook()
    begun_again(tmp_path, [Tracking(live)], [Tracking(live)])
    after.where = "there"
    track_run(tmp_path, after)
    first = {(step, time) for step, _, time in live.named("log")}
    assert first <= {(step, time) for step, _, time in after.named("log")}


def test_what_came_out_is_told_of_the_last_attempt_only(tmp_path: Path) -> None:
    begun_again(tmp_path)
    notebook = Notebook()
    track_run(tmp_path, notebook)
    order = [str(call[0]) for call in notebook.calls if call[0] in ("open", "summary", "artifact", "close")]
    assert order == ["open", "close", "open", "summary", "artifact", "artifact", "close"]


def test_one_rank_speaks_for_all(tmp_path: Path) -> None:
    class Second(Tracking):
        def on_open(self, run: WatchedRun) -> None:
            super().on_open(dataclasses.replace(run, rank=1))

    notebook = Notebook()
    make(tmp_path, [Second(notebook)], budget="12ba").fit()
    assert notebook.calls == []


def keys(notebook: Notebook) -> list[object]:
    return [call[0] for call in notebook.named("open")]


def test_a_folder_with_another_name_is_the_same_run(tmp_path: Path) -> None:
    live, after = Notebook(), Notebook()
    with pytest.raises(PowerCutError):
        make(tmp_path / "old", [Tracking(live), Cut(26)]).fit()
    (tmp_path / "old").rename(tmp_path / "new")
    make(tmp_path / "new", [Tracking(live)]).fit()
    after.where = "there"
    track_run(tmp_path / "new", after)
    assert keys(live) == keys(after)
    assert live.named("supersede")[0][0] == keys(live)[0], "the attempt that is there is tagged"


def test_copies_of_a_folder_that_go_on_are_two_runs(tmp_path: Path) -> None:
    with pytest.raises(PowerCutError):
        make(tmp_path / "one", [Cut(26)]).fit()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    found = []
    for name in ("one", "two"):
        notebook = Notebook()
        make(tmp_path / name).fit()
        track_run(tmp_path / name, notebook)
        found.append(keys(notebook))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
