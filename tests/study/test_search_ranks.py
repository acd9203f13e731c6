"""Promotion, edges and points of a search, each where a slip would go unseen: ranks that change with the budget."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cosmati.errors import RunError
from cosmati.records.study import SearchRecord
from cosmati.study import points, search
from cosmati.study.measured import MeasuredRun
from cosmati.study.points import Dimension, PointSettings, SearchSpace
from cosmati.study.search import TRIALS_FILE, SearchedArm, SearchPlan, chosen_settings, search_arms
from cosmati.train.facts import describe_hardware
from tests.study.fake_runs import FakeRun

LETTERS = "abcdefgh"
LETTER = Dimension(name="x", choices=tuple(LETTERS))
KNOWN = [{"x": letter} for letter in LETTERS]
LADDER = SearchPlan(rungs=((0.25, 8), (0.5, 4), (1.0, 2)), max_rounds=0)


def found_by(
    quality: Callable[[PointSettings, float, int], float], folder: Path, plan: SearchPlan = LADDER, **changes: Any
) -> SearchRecord:
    options = {"dimensions": [LETTER], "recipe_text": "a", "known": KNOWN}
    arm = SearchedArm(start=lambda s, b, d: FakeRun(b, quality(s, b, d)), **{**options, **changes})  # type: ignore[arg-type]
    quiet = Console(file=io.StringIO())
    return search_arms({"a": arm}, plan, folder, quality="loss", higher_is_better=False, hardware="h", console=quiet)[
        "a"
    ]


def letters(found: SearchRecord, budget: float) -> str:
    return "".join(str(one.settings["x"]) for one in found.trials if one.budget == budget)


TABLE: Mapping[float, str] = {0.25: "dcbahgfe", 0.5: "abcd", 1.0: "ba"}
"""Letters from best to worst, at each budget: each rung turns the one before it round."""


@pytest.mark.parametrize("sign", [1, -1])
def test_points_go_on_by_the_rank_of_the_latest_rung(tmp_path: Path, sign: int) -> None:
    """By the first rung's rank d and c went on to the last one, and d was chosen."""

    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        return FakeRun(budget, sign * float(TABLE[budget].index(str(chosen["x"]))))

    arm = SearchedArm(start=start, dimensions=[LETTER], recipe_text="a", known=KNOWN)
    options = {"quality": "loss", "higher_is_better": sign < 0, "hardware": "h"}
    found = search_arms({"a": arm}, LADDER, tmp_path, console=Console(file=io.StringIO()), **options)["a"]  # type: ignore[arg-type]
    assert letters(found, 0.25) == LETTERS
    assert letters(found, 0.5) == "dcba"
    assert letters(found, 1.0) == "ab"
    assert chosen_settings(found) == {"x": "b"}


@pytest.mark.parametrize("counts", [(8, 4, 2), (8, 7, 1), (5, 5, 5), (8, 1, 1)])
def test_as_many_go_on_as_the_plan_says(tmp_path: Path, counts: tuple[int, int, int]) -> None:
    plan = SearchPlan(rungs=tuple(zip((0.25, 0.5, 1.0), counts, strict=True)), max_rounds=0)
    found = found_by(lambda s, b, d: float(LETTERS.index(str(s["x"]))), tmp_path, plan, known=KNOWN[: counts[0]])
    assert tuple(Counter(one.budget for one in found.trials).values()) == counts
    assert [letters(found, budget) for budget in (0.25, 0.5, 1.0)] == [LETTERS[:count] for count in counts]


def test_ties_go_to_the_point_that_came_first(tmp_path: Path) -> None:
    found = found_by(lambda s, b, d: 1.0, tmp_path)
    assert [letters(found, budget) for budget in (0.25, 0.5, 1.0)] == ["abcdefgh", "abcd", "ab"]
    assert found.chosen == 0
    # With the same quality for all but the first, whatever order runs came in.
    last = found_by(lambda s, b, d: 2.0 if s["x"] == "a" else 1.0, tmp_path / "2")
    assert [letters(last, budget) for budget in (0.25, 0.5, 1.0)] == ["abcdefgh", "bcde", "bc"]
    assert last.chosen == 1


def test_what_is_known_by_hand_is_run_at_the_first_rung_of_every_arm(tmp_path: Path) -> None:
    log: list[tuple[str, object, float]] = []

    def arm(name: str, known: list[PointSettings]) -> SearchedArm:
        def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
            log.append((name, chosen["lr"], budget))
            return FakeRun(budget, float(chosen["lr"]))

        rate = Dimension(name="lr", low=0.01, high=1.0)
        return SearchedArm(start=start, dimensions=[rate], recipe_text=name, known=known)

    arms = {"a": arm("a", [{"lr": 0.9}]), "b": arm("b", [{"lr": 0.8}, {"lr": 0.7}])}
    quiet = Console(file=io.StringIO())
    record = search_arms(arms, LADDER, tmp_path, quality="loss", higher_is_better=False, hardware="h", console=quiet)
    assert next(rate for name, rate, budget in log if name == "a" and budget == 0.25) == 0.9
    assert [rate for name, rate, budget in log if name == "b" and budget == 0.25][:2] == [0.8, 0.7]
    known = {name: [one.settings["lr"] for one in found.trials if one.is_known] for name, found in record.items()}
    assert known == {"a": [0.9], "b": [0.8, 0.7]}


@pytest.mark.parametrize(("side", "grown"), [("below", (0.001, 1.0)), ("above", (0.1, 10.0))])
def test_an_edge_on_either_side_widens(tmp_path: Path, side: str, grown: tuple[float, float]) -> None:
    """A range of one decade grows by one decade; the optimum is far beyond the edge at which it's known."""
    plan = SearchPlan(rungs=((1.0, 4),), extra_rungs=((1.0, 2),), max_rounds=1)
    best = {"below": 0.0001, "above": 100.0}[side]
    low, high = (0.01, 1.0) if side == "below" else (0.1, 1.0)
    found = found_by(
        lambda s, b, d: abs(math.log10(float(s["lr"]) / best)),
        tmp_path,
        plan,
        dimensions=[Dimension(name="lr", low=low, high=high)],
        known=[{"lr": low if side == "below" else high}],
    )
    (dimension,) = found.dimensions
    width = math.log10(high / low)
    expected = (low * 10**-width, high) if side == "below" else (low, high * 10**width)
    assert (dimension.low, dimension.high) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert dimension.widened == 1
    assert grown[0] <= low


def test_points_differ_as_long_as_there_are_others(tmp_path: Path) -> None:
    """Sixteen compositions of two choices by eight: a quasi-random sequence alone repeats some."""
    dimensions = [LETTER, Dimension(name="y", choices=(True, False))]
    plan = SearchPlan(rungs=((1.0, 16),), extra_rungs=((1.0, 1),), max_rounds=0)

    def quality(chosen: PointSettings, budget: float, seed: int) -> float:
        return float(LETTERS.index(str(chosen["x"])))

    known = [{"x": "a", "y": True}, {"x": "b", "y": False}]
    found = found_by(quality, tmp_path, plan, dimensions=dimensions, known=known)
    assert found.num_settings == 16
    drawn = SearchSpace(tuple(dimensions)).points(points.quasi_random(2, 16, 0), None)
    assert len({str(one) for one in [*known, *drawn[2:]]}) < 16
    # Where there are no others they are run again, and counted as what they are.
    more = SearchPlan(rungs=((1.0, 20),), extra_rungs=((1.0, 1),), max_rounds=0)
    again = found_by(quality, tmp_path / "2", more, dimensions=dimensions, known=known)
    assert (len(again.trials), again.num_settings) == (20, 16)


@pytest.mark.parametrize("choice", [True, 3, "only"])
def test_one_choice_is_nothing_to_search(choice: Any) -> None:
    with pytest.raises(ValueError, match=rf"'x' has one choice, {choice!r}, so there is nothing to search"):
        Dimension(name="x", choices=(choice,))
    assert Dimension(name="x", choices=(1,), wider=((), (2,))).choices == (1,)


def test_the_hardware_is_that_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that say another device are kept apart from those of this machine's CPU."""
    log: list[str] = []

    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        log.append(str(chosen["x"]))
        return FakeRun(budget, 1.0)

    def run() -> int:
        log.clear()
        arm = SearchedArm(start=start, dimensions=[LETTER], recipe_text="a", known=KNOWN)
        quiet = Console(file=io.StringIO())
        search_arms({"a": arm}, LADDER, tmp_path, quality="loss", higher_is_better=False, console=quiet)
        return len(log)

    assert run() == 14 + 1  # one is made to ask it what it runs on
    assert run() == 1
    with monkeypatch.context() as patch:
        patch.setattr("cosmati.study.measured.hardware_of", lambda run: "an accelerator")
        assert run() == 14 + 1
        assert run() == 1
    # The same lines that a search of an earlier release left on this CPU, in words, still count.
    arm = SearchedArm(start=start, dimensions=[LETTER], recipe_text="a", known=KNOWN)
    options = {"quality": "loss", "higher_is_better": False, "hardware": describe_hardware(torch.device("cpu"))}
    log.clear()
    search_arms({"a": arm}, LADDER, tmp_path, console=Console(file=io.StringIO()), **options)  # type: ignore[arg-type]
    assert log == []


def test_arms_on_two_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter(["cpu", "cpu", "cpu", "gpu"])
    monkeypatch.setattr("cosmati.study.measured.hardware_of", lambda run: next(places))
    arm = SearchedArm(start=lambda s, b, d: FakeRun(b, 1.0), dimensions=[LETTER], recipe_text="a", known=KNOWN)
    with pytest.raises(RunError, match=r"of 'a', point 3 \(x 'c'\), .* trains on gpu, and others on cpu: use one"):
        search_arms(
            {"a": arm}, LADDER, tmp_path, quality="loss", higher_is_better=False, console=Console(file=io.StringIO())
        )
    assert (tmp_path / TRIALS_FILE).read_text().count("\n") == 2


def test_lines_of_before_rows_and_errors_are_read(tmp_path: Path) -> None:
    whole = found_by(lambda s, b, d: 1.0, tmp_path)
    path = tmp_path / TRIALS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["evaluated_on"], line["trial"]["error"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def never(chosen: PointSettings, budget: float, seed: int) -> float:
        raise AssertionError("all are finished")

    assert found_by(never, tmp_path) == whole


def test_the_rows_of_all_trials_are_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = search.measure

    def measured(*arguments: Any) -> MeasuredRun:
        made = real(*arguments)
        rows = {0.25: ("a", "c"), 0.5: ("b",), 1.0: ("b", "c")}
        return MeasuredRun(made.points, {}, 1, made.hardware, evaluated_on=rows[made.final.step / 1000])

    monkeypatch.setattr(search, "measure", measured)
    assert found_by(lambda s, b, d: 1.0, tmp_path).evaluated_on == ("a", "b", "c")
    monkeypatch.undo()
    assert found_by(lambda s, b, d: 1.0, tmp_path).evaluated_on == ("a", "b", "c")  # from the lines
    assert found_by(lambda s, b, d: 1.0, tmp_path / "2").evaluated_on == ()
