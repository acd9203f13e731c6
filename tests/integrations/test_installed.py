"""Each tracker that is installed, offline: what it stored is read back with the tool's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.integrations import Tracking, track_run
from tests.integrations.places import Attempts, Place, place
from tests.integrations.runs import Values, begun_again, make, told

__all__ = ["place"]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


def named(values: Values, first: int, last: int) -> dict[tuple[str, int], list[float]]:
    return {key: [pytest.approx(value)] for key, value in values.items() if first < key[1] <= last}


def curves(stored: Attempts, attempt: int) -> dict[tuple[str, int], list[float]]:
    names = ("loss", "learning_rate", "gradient_norm", "evaluation/error")
    return {key: value for key, value in stored[attempt].values.items() if key[0] in names}


def test_a_run_that_was_begun_again_is_two_of_a_group(place: Place, tmp_path: Path) -> None:
    begun_again(tmp_path / "run")
    sent = track_run(tmp_path / "run", place.make(tmp_path))
    assert [one.attempt for one in sent] == [0, 1]
    stored = place.read(tmp_path)
    values = told(tmp_path / "run")
    # Attempt 0 had evaluated after step 24, too; the folder has kept it apart.
    lost = curves(stored, 0).pop(("evaluation/error", 24))
    assert len(lost) == 1
    assert {k: v for k, v in curves(stored, 0).items() if k[1] <= 20} == named(values, 0, 20)
    assert curves(stored, 1) == named(values, 20, 30)
    assert "superseded" in stored[0].words
    assert "superseded" not in stored[1].words


def test_the_same_again_stores_nothing_twice(place: Place, tmp_path: Path) -> None:
    make(tmp_path / "run", budget="12ba").fit()
    track_run(tmp_path / "run", place.make(tmp_path))
    once = curves(place.read(tmp_path), 0)
    assert once == named(told(tmp_path / "run"), 0, 12)
    track_run(tmp_path / "run", place.make(tmp_path))
    assert curves(place.read(tmp_path), 0) == once


def test_a_run_watched_live_is_stored_as_it_goes(place: Place, tmp_path: Path) -> None:
    first, second = Tracking(place.make(tmp_path)), Tracking(place.make(tmp_path))
    begun_again(tmp_path / "run", [first], [second])
    assert (first.problem, second.problem, first.num_dropped) == ("", "", 0)
    stored, values = place.read(tmp_path), named(told(tmp_path / "run"), 20, 30)
    # The folder has a line of an attempt's first step, too.
    live = {key: value for key, value in values.items() if key[0].startswith("evaluation") or key[1] % 10 == 0}
    assert live.keys() < values.keys()
    assert curves(stored, 1) == live
    assert ("evaluation/error", 24) in stored[0].values
    tracker = place.make(tmp_path)
    track_run(tmp_path / "run", tracker)
    assert curves(place.read(tmp_path), 1) == (values if tracker.rewrites else live), "nothing stands there twice"
