"""Registration: what is committed before the first run, what is refused after it, and what came of predictions."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cosmati.errors import RunError
from cosmati.records.study import Prediction, Registration, SearchRecord, StudyRecord
from cosmati.study.comparison import SpeedUp, speed_up_at_equal_quality
from cosmati.study.predictions import outcomes_of
from cosmati.study.registration import REGISTRATION_FILE
from cosmati.study.runner import LINES_FILE, Arm, RegistrationPlan, Study, run_study
from tests.study.fake_runs import FakeRun
from tests.study.oracles import log_quality, study
from tests.study.test_checks import searched

PLAN = RegistrationPlan(family="headlines", predictions=(Prediction("fast", "baseline", "seconds", 1.6),))


def make_study(**changes: Any) -> Study:
    arms = {
        "baseline": Arm(start=lambda b, s: FakeRun(b, 1.0 + s / 100), recipe_text="b"),
        "fast": Arm(start=lambda b, s: FakeRun(b, 0.9 + s / 100), recipe_text="f"),
    }
    options = {"name": "s", "task": "t", "arms": arms, "budgets": (0.5, 1.0), "seeds": (0, 1), "quality": "loss"}
    return Study(**{**options, "higher_is_better": False, "registration": PLAN, **changes})  # type: ignore[arg-type]


def run(one: Study, folder: Path) -> StudyRecord:
    return run_study(one, folder, hardware="machine", console=Console(file=io.StringIO()))


def stopping(budget: float, seed: int) -> FakeRun:
    return FakeRun(budget, 0.0, outcome="stopped")


def test_predictions_are_written_before_the_first_run_and_land_in_the_record(tmp_path: Path) -> None:
    seen = []

    def start(budget: float, seed: int) -> FakeRun:
        seen.append(json.loads((tmp_path / REGISTRATION_FILE).read_text()))
        return FakeRun(budget, 1.0)

    record = run(make_study(arms={"baseline": Arm(start=start), "fast": Arm(start=start)}), tmp_path)
    found = record.registration
    assert found is not None
    assert (found.family, found.predictions) == ("headlines", PLAN.predictions)
    assert datetime.fromisoformat(found.date).tzinfo is not None
    assert len(found.digest) == 64
    assert all(one["registration"]["digest"] == found.digest for one in seen)
    assert StudyRecord.from_json(record.to_json()) == record


def test_a_study_that_is_as_registered_goes_on(tmp_path: Path) -> None:
    whole = run(make_study(), tmp_path)
    path = tmp_path / LINES_FILE
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert run(make_study(), tmp_path) == whole


def test_the_same_search_done_once_more_is_the_same(tmp_path: Path) -> None:
    def study_with(search: SearchRecord) -> Study:
        arms = make_study().arms
        return make_study(arms={**arms, "fast": replace(arms["fast"], search=search)})

    search = searched()
    whole = run(study_with(search), tmp_path)
    slower = replace(search, trials=tuple(replace(one, seconds=9.0) for one in search.trials))
    assert run(study_with(slower), tmp_path).registration == whole.registration
    with pytest.raises(RunError, match="search of fast differs"):
        run(study_with(searched(0.02)), tmp_path)


CHANGES: dict[str, Any] = {
    "predictions": {"registration": replace(PLAN, predictions=(Prediction("fast", "baseline", "seconds", 1.4),))},
    "family": {"registration": replace(PLAN, family="others")},
    "seeds": {"seeds": (0, 1, 2)},
    "budgets": {"budgets": (0.5,)},
    "quality": {"higher_is_better": True},
    "cost turns": {"cost_turns": 2},
    "recipe of fast": {"arms": {**make_study().arms, "fast": replace(make_study().arms["fast"], recipe_text="other")}},
    "seeds of fast": {"arms": {**make_study().arms, "fast": replace(make_study().arms["fast"], seed_offset=9)}},
    "opponent baseline": {
        "arms": {
            **make_study().arms,
            "baseline": replace(make_study().arms["baseline"], opponent="plain", source="web"),
        }
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_after_the_first_run_nothing_of_it_changes(tmp_path: Path, name: str) -> None:
    run(make_study(), tmp_path)
    with pytest.raises(RunError, match=rf"another study: {name} differs.*new folder"):
        run(make_study(**CHANGES[name]), tmp_path)


def test_predictions_can_neither_be_added_nor_dropped_after_the_first_run(tmp_path: Path) -> None:
    run(make_study(registration=None), tmp_path / "without")
    with pytest.raises(RunError, match="isn't a prediction"):
        run(make_study(), tmp_path / "without")
    run(make_study(), tmp_path / "with")
    with pytest.raises(RunError, match=r"predictions, .*differ"):
        run(make_study(registration=None), tmp_path / "with")


def test_before_the_first_run_all_of_it_may_change(tmp_path: Path) -> None:
    stopped = {name: replace(arm, start=stopping) for name, arm in make_study().arms.items()}
    with pytest.raises(KeyboardInterrupt):
        run(make_study(arms=stopped), tmp_path)
    assert (tmp_path / REGISTRATION_FILE).exists()
    with pytest.raises(KeyboardInterrupt):
        run(make_study(arms=stopped, registration=None), tmp_path)
    assert not (tmp_path / REGISTRATION_FILE).exists()
    with pytest.raises(KeyboardInterrupt):
        run(make_study(arms=stopped), tmp_path)
    record = run(make_study(**CHANGES["predictions"]), tmp_path)
    assert record.registration is not None
    assert record.registration.predictions[0].at_least == 1.4


def test_a_registration_that_somebody_changed_is_refused(tmp_path: Path) -> None:
    run(make_study(), tmp_path)
    path = tmp_path / REGISTRATION_FILE
    for old, new in (("1.6", "1.1"), ("headlines", "others")):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        with pytest.raises(RunError, match="its digest doesn't match"):
            run(make_study(), tmp_path)
        path.write_text(text)
    assert run(make_study(), tmp_path).registration is not None


@pytest.mark.parametrize(
    "wrong",
    [
        Prediction("slow", "baseline", "seconds", 1.6),
        Prediction("fast", "other", "seconds", 1.6),
        Prediction("fast", "baseline", "weeks", 1.6),
        Prediction("fast", "baseline", "seconds", 0.0),
    ],
)
def test_a_prediction_that_cannot_be_read_off_is_refused(tmp_path: Path, wrong: Prediction) -> None:
    with pytest.raises(ValueError, match="doesn't fit"):
        run(make_study(registration=replace(PLAN, predictions=(wrong,))), tmp_path)


def test_a_family_without_a_test_is_refused() -> None:
    with pytest.raises(ValueError, match="predicts nothing"):
        RegistrationPlan(family="none", predictions=())


def registered(*predictions: Prediction, **changes: Any) -> StudyRecord:
    arms = {
        "baseline": log_quality(),
        "plain": log_quality(-0.1),
        "fast": log_quality(0.05),
        "far": log_quality(-0.5),
        "hint": lambda b, s: log_quality(0.02)(b, s) + 0.004 * (s - 1),
        "wobbling": lambda b, s: log_quality(0.02)(b, s) + 0.02 * (s - 1),
    }
    made = study(arms, **changes)
    return replace(made, registration=Registration("headlines", predictions, "2026-11-22T00:00:00+00:00", "0" * 64))


def test_predictions_are_met_or_not_or_not_shown() -> None:
    predictions = (
        Prediction("fast", "baseline", "seconds", 1.5),
        Prediction("fast", "baseline", "step", 1.7),
        Prediction("fast", "plain", "seconds", 3.0),
        Prediction("far", "baseline", "seconds", 1.1),
    )
    outcomes = outcomes_of(registered(*predictions))
    assert [one.verdict for one in outcomes] == ["met", "not met", "met", "not met"]
    # Quality is linear in the budget's logarithm, so the true ratio is exp(gain / slope).
    ratios = [one.found.ratio if isinstance(one.found, SpeedUp) else None for one in outcomes]
    assert ratios[:2] == [pytest.approx(1.6487, rel=1e-3)] * 2
    assert ratios[3] is None
    (chance,) = outcomes_of(registered(Prediction("wobbling", "baseline", "seconds", 1.05)))
    assert chance.verdict == "not shown"
    (single,) = outcomes_of(registered(predictions[0], seeds=(0,)))
    assert single.verdict == "not shown"
    assert outcomes_of(replace(registered(), registration=None)) == ()


def test_p_values_are_adjusted_for_the_whole_family() -> None:
    weak = Prediction("hint", "baseline", "seconds", 1.05)
    record = registered(weak, weak, weak, seeds=(0, 1, 2))
    raw = speed_up_at_equal_quality(record, "hint")
    assert isinstance(raw, SpeedUp)
    assert raw.p_value is not None
    assert [one.p_value for one in outcomes_of(record)] == [pytest.approx(min(1.0, 3 * raw.p_value))] * 3
