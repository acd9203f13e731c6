"""The three sentences: each figure is the records', and there's no figure of a gain that isn't shown."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from cosmati.explorer.opening import opening_sentences
from cosmati.explorer.report import render_report
from cosmati.records.study import SearchRecord, StudyRecord, TrialRecord
from cosmati.study.comparison import SpeedUp, comparisons, speed_up_at_equal_quality
from tests.explorer.samples import demo_run
from tests.explorer.test_composition_view import parts
from tests.study.oracles import SECONDS, log_quality, study


def noisy(gain: float, place: int) -> object:
    exact = log_quality(gain)
    return lambda budget, seed: exact(budget, seed) + 0.02 * math.sin(53 * (place + 1) * (seed + 1) * (budget + 1))


def silent() -> StudyRecord:
    """No arm is shown to differ: gains of nothing in much noise."""
    return study({"baseline": noisy(0.0, 0), "x": noisy(0.0, 1), "y": noisy(0.0, 2)})  # type: ignore[dict-item]


def test_what_was_trained_gained_and_paid_is_the_records() -> None:
    record = replace(parts(both=1.5), price_per_hour=2.0)
    trained, gained, cost = opening_sentences([record], None)
    assert trained == f"Trained: {len(record.runs)} runs of 4 arms ({record.task})."
    found = speed_up_at_equal_quality(record, "both")
    assert hasattr(found, "ratio")
    assert f"both needs {100 / found.ratio:.1f} % of baseline's training time to the same accuracy" in gained
    assert f"({found.ratio:.2f}×, 95 % interval" in gained
    assert ", by a screening)" in gained, "nothing of it was registered"
    seconds = sum(run.final.seconds for run in record.runs)
    assert seconds == SECONDS * 2.5 * 5 * 4
    money = f"{seconds / 3600 * 2.0:.1f} $ at 2 $ an hour"
    assert cost == f"Cost: {seconds / 3600:.1f}\u00a0h of training on {record.hardware}, without evaluation ({money})."


def test_no_figure_stands_where_no_difference_is_shown() -> None:
    record = silent()
    gained = opening_sentences([record], None)[1]
    assert gained == f"Gained: in {record.name} nothing is shown to be gained: for 2 arms no difference is shown."
    page = render_report(title="t", studies=[record], run=demo_run())
    body = page[: page.index('<script type="application/json"')]
    large = re.findall(r'<p class="big">(.*?)</p>', body)
    assert large == [], "neither a dash, nor a ratio, nor a metric is large"


def test_of_several_things_the_whole_cost_comes_first() -> None:
    record, run = parts(both=1.5), demo_run()
    trained, _, cost = opening_sentences([record], run)
    assert trained.startswith(f"Trained: {len(record.runs)} runs of 4 arms in {record.name} and one run of composed ")
    seconds = sum(one.final.seconds for one in record.runs)
    alone = sum(run.record.seconds_by_part.values())
    assert cost.startswith(f"Cost: {(seconds + alone) / 3600:.1f}\u00a0h of training on ")
    assert f"({seconds / 3600:.1f}\u00a0h for {record.name} " in cost
    assert cost.endswith(f" and {alone / 60:.2f}\u00a0min for the run by itself).")


def test_metrics_of_single_classes_are_left_to_the_figures() -> None:
    run = demo_run()
    more = {**run.metrics, "loss/all": ((10, 1.5),), "loss/customer/pii": ((10, 9.0),)}
    gained = opening_sentences([], replace(run, metrics=more))[1]
    assert gained.endswith("it came to accuracy 0.9200, loss on held-out rows 1.500.")


def test_slower_arms_are_no_gain() -> None:
    gained = opening_sentences([parts(both=0.5)], None)[1]
    assert "both needs" not in gained
    assert "1 arm is shown to be slower" in gained


def test_a_hint_is_neither_a_gain_nor_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval that excludes 1, and an adjusted p that doesn't let it be claimed."""
    record = silent()
    one, other = comparisons(record)
    assert isinstance(one.found, SpeedUp)
    hint = replace(one, found=replace(one.found, ratio=1.8, low=1.1, high=3.0), p_value=0.2)
    monkeypatch.setattr("cosmati.explorer.opening.comparisons", lambda _: (hint, other))
    gained = opening_sentences([record], None)[1]
    assert gained.endswith("1 arm is perhaps faster (a hint and no claim) and for 1 arm no difference is shown.")
    assert "nothing is shown to be gained: " in gained
    claim, unstable = (
        replace(hint, p_value=0.01, level=0.05),
        replace(hint, found=replace(hint.found, is_unstable=True)),
    )
    for changed, word in ((claim, "hint"), (unstable, "perhaps")):
        monkeypatch.setattr("cosmati.explorer.opening.comparisons", lambda _, one=changed: (one, other))
        assert word not in opening_sentences([record], None)[1]


def test_the_search_is_counted() -> None:
    trial = TrialRecord(0, {}, is_known=False, budget=1.0, seed=0, quality=0.5, steps=10, rows=10, seconds=30.0)
    record = silent()
    search = SearchRecord((), (trial, replace(trial, point=1)), 0)
    arms = tuple(replace(arm, search=search) if arm.name == "x" else arm for arm in record.arms)
    cost = opening_sentences([replace(record, arms=arms)], None)[2]
    assert "60.0\u00a0s for 2 trials of its search" in cost


def test_a_run_by_itself_gains_nothing_and_nothing_has_no_opening() -> None:
    run = demo_run()
    trained, gained, cost = opening_sentences([], run)
    assert "under a policy, with a ledger (1,000 steps, completed)" in trained
    assert gained == "Gained: one run is compared with nothing, so no gain is shown; it came to accuracy 0.9200."
    assert "4.32\u00a0min" in cost
    assert opening_sentences([], None) == ()
    assert opening_sentences([replace(silent(), runs=())], None)[1].endswith("no run has finished.")


def test_one_seed_is_no_gain() -> None:
    gained = opening_sentences([parts(both=1.5, seeds=(0,))], None)[1]
    assert "nothing is shown to be gained" in gained


def test_evaluation_is_no_part_of_what_a_run_cost() -> None:
    run = demo_run()
    parts_of_run = {"forward": 100.0, "data": 20.0, "evaluation": 3600.0}
    timed = replace(run, record=replace(run.record, seconds_by_part=parts_of_run))
    cost = opening_sentences([], timed)[2]
    assert cost == "Cost: 2.00\u00a0min of training on one CPU core, without evaluation."
