"""The checklist, read from a study's records: each demand seen met and seen not met."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cosmati.optim import WSD, AdamW, Constant, Cosine, Linear, Optimizer, ScheduleFreeAdamW
from cosmati.records.study import (
    ChecklistItem,
    CostProfile,
    DimensionRecord,
    Registration,
    SearchRecord,
    StudyRecord,
    TrialRecord,
)
from cosmati.study.checks import checks_of, effort_of, is_as_hard
from cosmati.study.definition import Arm
from cosmati.study.evaluated_rows import row_sample
from tests.study.fake_runs import FakeRun
from tests.study.oracles import log_quality, study

LR = DimensionRecord("lr", 0.001, 0.1, True, (), 0)
BATCH = DimensionRecord("batch", 0.0, 0.0, False, ("4", "8", "16"), 1, ends_below=True)


def searched(
    lr: float = 0.01,
    batch: int = 8,
    *,
    counts: Sequence[tuple[float, int]] = ((0.25, 4), (1.0, 1)),
    steps: int = 400,
    rows: int = 8,
    seed: int = 900,
    dimensions: tuple[DimensionRecord, ...] = (LR, BATCH),
) -> SearchRecord:
    """A search whose point 0 is chosen, and whose last run at the smallest budget diverged early."""
    trials = []
    for budget, count in counts:
        for point in range(count):
            done = 3 if point == 3 else round(steps * budget)
            chosen = {"lr": lr if point == 0 else 0.02 + point / 1000, "batch": batch}
            trials.append(TrialRecord(point, chosen, False, budget, seed, 1.0, done, done * rows, 1.0))
    return SearchRecord(dimensions, tuple(trials), 0)


def recipe(*optimizers: Optimizer) -> str:
    return json.dumps({"optimizers": [repr(one) for one in optimizers]})


def record(base: SearchRecord | None = None, fast: SearchRecord | None = None, text: str = "") -> StudyRecord:
    made = study({"baseline": log_quality(), "fast": log_quality(0.05), "aa": log_quality()})
    found = {"baseline": base, "fast": fast}
    arms = [replace(arm, search=found.get(arm.name), recipe_text=text) for arm in made.arms]
    return replace(made, arms=tuple(arms), checklist=())


def check(one: StudyRecord, name: str) -> ChecklistItem:
    (found,) = [item for item in checks_of(one) if item.name == name]
    return found


HARD = "Opponent searched as hard as the arms"
SAME = "Shared settings searched over the same ranges"
INSIDE = "Optimum inside of what was searched"
SEEDS = "Settings chosen on seeds of their own"


def test_equal_searches_are_equally_hard_whatever_diverged() -> None:
    found = check(record(searched(), searched(0.03)), HARD)
    assert found.met
    # Three runs of 100 steps, one that diverged after 3, one of 400; and the same for the other arm.
    assert "baseline: 5 runs, 4 settings, 703 steps, over lr 0.001 to 0.1; batch 4, 8, 16 (widened 1x)." in found.note
    assert effort_of(searched()).num_rows == 703 * 8


@pytest.mark.parametrize(
    ("base", "fast", "met"),
    [
        (searched(counts=((0.25, 3), (1.0, 1))), searched(), False),
        (searched(counts=((0.25, 5),)), searched(), False),
        (searched(counts=((0.5, 4), (1.0, 1))), searched(), False),
        (searched(steps=300), searched(), False),
        (searched(steps=200, rows=16), searched(steps=400, rows=8), True),
        (searched(steps=400, rows=16), searched(steps=400, rows=8), True),
        (searched(steps=400, rows=8), searched(steps=400, rows=16), True),
        (searched(steps=400, rows=16), searched(steps=200, rows=16), True),
        (searched(steps=200, rows=16), searched(steps=400, rows=16), False),
        (None, searched(), False),
        (None, None, False),
        (searched(), None, True),
    ],
)
def test_an_opponent_that_was_searched_less_is_told(
    base: SearchRecord | None, fast: SearchRecord | None, met: bool
) -> None:
    assert check(record(base, fast), HARD).met == met
    if base and fast:
        assert is_as_hard(base, fast) == met


def test_shared_ranges_are_compared_by_name() -> None:
    found = check(record(searched(), searched()), SAME)
    assert (found.met, found.note) == (True, "batch, lr in common")
    own = searched(dimensions=(replace(LR, high=1.0), BATCH))
    found = check(record(searched(), own), SAME)
    assert (found.met, found.note) == (False, "baseline lr 0.001 to 0.1 and fast lr 0.001 to 1")
    assert SAME not in {item.name for item in checks_of(record(searched()))}


@pytest.mark.parametrize(
    ("lr", "batch", "edge"),
    [
        (0.01, 8, None),
        (0.0012, 8, "lr = 0.0012"),
        (0.0013, 8, None),
        (0.09, 8, "lr = 0.09"),
        (0.01, 16, "batch = 16"),
        (0.01, 4, None),  # nothing lies below
    ],
)
def test_an_optimum_at_an_edge_is_told_unless_nothing_lies_beyond(lr: float, batch: int, edge: str | None) -> None:
    found = check(record(searched(), searched(lr, batch)), INSIDE)
    assert found.met == (edge is None)
    assert edge is None or found.note == f"at an edge are fast: {edge}"


def test_settings_known_before_the_search_stand_beside_how_hard_it_was() -> None:
    def known(by_hand: int, **options: Any) -> SearchRecord:
        made = searched(**options)
        trials = tuple(replace(one, is_known=one.point == 0) for one in made.trials)
        return replace(made, trials=trials, by_hand=by_hand)

    name = "Opponent searched as hard as the arms"
    found = check(record(known(10), known(50, lr=0.02)), name)
    assert found.met
    assert found.note.endswith(
        "; the best settings of baseline and fast were known before the search, found by hand (about 10 trials for "
        "baseline, about 50 trials for fast)"
    )
    found = check(record(known(0), searched()), name)
    assert found.note.endswith("; the best settings of baseline were known before the search")
    assert "known" not in check(record(searched(), searched()), name).note


def test_selection_seeds_are_compared_with_those_reported() -> None:
    assert check(record(searched(), searched()), SEEDS).met
    found = check(record(searched(), searched(seed=3)), SEEDS)
    assert (found.met, found.note) == (False, "searched on seed 3, 900; reported too: 3")


def test_noise_registration_and_costs_are_read_from_the_record() -> None:
    bare = record()
    whole = replace(
        bare,
        registration=Registration("headlines", (), "2026-11-22T00:00:00+00:00", "abcdef" * 10),
        costs=tuple(CostProfile(arm.name, turn, 10, 1.0) for turn in range(8) for arm in bare.arms),
    )
    names = ("Noise floor measured", "Predicted before the runs", "Costs profiled alone, in turns")
    assert [check(whole, name).met for name in names] == [True, True, True]
    assert check(whole, names[2]).note == "8 turns of all arms"
    assert check(whole, names[1]).note.startswith("0 of the 4 tests of the family 'headlines'")
    assert check(replace(whole, costs=whole.costs[:2]), names[2]).note == "not for aa"
    small = replace(bare, arms=bare.arms[:2], runs=tuple(one for one in bare.runs if one.arm != "aa"))
    assert [check(small, name).met for name in names] == [False, False, False]


SCHEDULE = "Schedule fully decayed at every budget"


@pytest.mark.parametrize(
    ("optimizers", "met"),
    [
        ((AdamW(lr=0.1, schedule=WSD(warmup="0.05dur", decay="0.5dur")),), True),
        ((AdamW(lr=0.1, schedule=Linear(warmup="0.1dur")),), True),
        ((AdamW(lr=0.1, schedule=Cosine()),), True),
        ((AdamW(lr=0.1, schedule=WSD(warmup="100ba", decay="0.5dur")),), False),
        ((AdamW(lr=0.1, schedule=WSD(decay="50ba")),), False),
        ((AdamW(lr=0.1, schedule=WSD(decay="0ba")),), False),
        ((AdamW(lr=0.1, schedule=Cosine(final=0.1)),), False),
        ((AdamW(lr=0.1, schedule=Cosine(final=0.05)),), False),
        ((AdamW(lr=0.1, schedule=Linear(final=0.001)),), False),
        ((AdamW(lr=0.1, schedule=Constant()),), False),
        ((AdamW(lr=0.1, schedule=Cosine()), AdamW(lr=0.1, schedule=Constant())), False),
        ((ScheduleFreeAdamW(lr=0.1, schedule=Constant(warmup="0.05dur")),), True),
    ],
)
def test_schedules_are_read_from_the_recipe(optimizers: tuple[Optimizer, ...], met: bool) -> None:
    assert check(record(text=recipe(*optimizers)), SCHEDULE).met == met


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"optimizers": 3}'])
def test_a_recipe_that_says_nothing_of_schedules_meets_no_demand(text: str) -> None:
    found = check(record(text=text), SCHEDULE)
    assert (found.met, found.note) == (False, "the baseline's recipe text doesn't name its optimizers")


@pytest.mark.parametrize("schedule", ["WSD(final=0.0)", "Linear(warmup='1.2.3dur', final=0.0)", "Linear(final=1.2.3)"])
def test_a_schedule_that_is_not_ours_meets_no_demand(schedule: str) -> None:
    text = json.dumps({"optimizers": [f"AdamW(lr=0.1, schedule={schedule})"]})
    assert not check(record(text=text), SCHEDULE).met


def test_the_noise_arm_must_have_run_with_other_seeds() -> None:
    name = "Noise floor measured"
    whole = record()
    seeds = sorted({one.seed for one in whole.runs if one.arm == "baseline"})
    apart = tuple(replace(one, seed=5000 + one.seed) if one.arm == "aa" else one for one in whole.runs)
    assert check(replace(whole, runs=apart), name).met
    mine = [one for one in whole.runs if one.arm == "aa"]
    alike = [replace(one, seed=seeds[0]) for one in mine if one.seed == mine[0].seed]
    same = check(replace(whole, runs=(*(one for one in whole.runs if one.arm != "aa"), *alike)), name)
    assert (same.met, same.note) == (False, "'aa' has the baseline's own seeds")
    none = check(replace(whole, runs=tuple(one for one in whole.runs if one.arm != "aa")), name)
    assert (none.met, none.note) == (False, "'aa' has no finished run")
    diverged = tuple(
        replace(one, final=replace(one.final, quality=math.nan)) if one.arm == "aa" else one for one in apart
    )
    assert not check(replace(whole, runs=diverged), name).met


def test_a_search_without_trials_is_no_search() -> None:
    found = check(record(SearchRecord((LR,), (), 0), searched()), HARD)
    assert not found.met


def test_the_studys_own_items_follow_and_stand_in_for_no_derived_one() -> None:
    own = (ChecklistItem("Scaling-law size", met=True, note="small"), ChecklistItem(HARD, met=True, note="trust me"))
    found = checks_of(replace(record(), checklist=own))
    assert found[-1] == own[0]
    assert [item.met for item in found if item.name == HARD] == [False]


DATA = "Data loading isn't the bottleneck"


def with_parts(parts: dict[tuple[str, float], dict[str, float]]) -> StudyRecord:
    made = record()
    runs = tuple(replace(one, seconds_by_part=parts.get((one.arm, one.budget), {"data": 9.0})) for one in made.runs)
    return replace(made, runs=runs)


@pytest.mark.parametrize(("seconds", "met"), [(4.9, True), (5.1, False)])
def test_data_that_hold_an_arm_up_at_its_largest_budget_are_told(seconds: float, met: bool) -> None:
    # Evaluation and checkpoints are no training: 4.9 of 100 is below 5 %, though 4.9 of 104.9 were, too.
    quick = {"data": 1.0, "forward": 99.0, "evaluation": 900.0}
    parts = {"data": seconds, "forward": 100 - seconds, "checkpoint": 500.0}
    found = check(with_parts({("baseline", 1.0): quick, ("aa", 1.0): quick, ("fast", 1.0): parts}), DATA)
    assert found.met == met
    assert f"baseline 1.0 %, fast {seconds:.1f} %, aa 1.0 %" in found.note


def test_data_count_only_where_they_were_measured() -> None:
    made = with_parts({(arm, 1.0): {"forward": 1.0} for arm in ("baseline", "fast")})
    assert check(made, DATA).note.endswith("aa 100.0 %")
    gone = replace(made, runs=tuple(replace(one, seconds_by_part={}) for one in made.runs if one.arm != "aa"))
    assert check(gone, DATA) == ChecklistItem(DATA, False, "time by part isn't measured for baseline, fast, aa")


MIXED = "Mixed precision"


def precise(precision: str, lr: float = 0.1, name: str = "a") -> str:
    return json.dumps({"name": name, "lr": lr, "config": {"precision": precision, "name": name, "budget": "9ba"}})


@pytest.mark.parametrize(
    ("base", "other", "paces", "met", "note"),
    [
        (precise("bfloat16"), "", (1, 1, 1), True, "bfloat16"),
        (precise("float32"), "", (1, 1, 1), False, "float32, and no arm shows that mixed precision is no faster here"),
        # Another rate makes it another arm, so that it's no measurement of the precision.
        (precise("float32"), precise("bfloat16", 0.2), (2, 2, 2), False, "float32, and no arm shows"),
        (precise("float32"), precise("bfloat16", name="b"), (1.0, 1.01, 0.99), True, "takes 1.00 of it (0.98 to 1.03)"),
        (precise("float32"), precise("bfloat16", name="b"), (0.7, 0.71, 0.69), False, "takes 0.70 of it"),
        # Noise shows nothing: it may be faster.
        (precise("float32"), precise("bfloat16", name="b"), (1.0, 0.6, 1.6), False, "n = 3"),
        ("made by hand", "", (1, 1, 1), False, "the baseline's recipe text doesn't name its precision"),
    ],
)
def test_precision_is_mixed_or_measured_to_be_no_faster(
    base: str, other: str, paces: tuple[float, ...], met: bool, note: str
) -> None:
    made = record()
    texts = {"baseline": base, "fast": other, "aa": base}
    costs = tuple(
        CostProfile(arm, turn, 10, 10 * (1 + turn) * (pace if arm == "fast" else 1))
        for turn, pace in enumerate(paces)
        for arm in texts
    )
    arms = tuple(replace(arm, recipe_text=texts[arm.name]) for arm in made.arms)
    found = check(replace(made, arms=arms, costs=costs), MIXED)
    assert found.met == met
    assert note in found.note


def of_settings(*rates: float, is_known: int = 0, dimensions: tuple[DimensionRecord, ...] = (LR,)) -> SearchRecord:
    """A search of as many points as there are rates, one after another, the first of which were known."""
    trials = (
        TrialRecord(point, {"lr": rate, "fixed": True}, point < is_known, 1.0, 900, 1.0, 10, 80, 1.0)
        for point, rate in enumerate(rates)
    )
    return SearchRecord(dimensions, tuple(trials), 0)


FIXED = DimensionRecord("fixed", 0.0, 0.0, False, ("True",), 0, ends_below=True, ends_above=True)


def test_a_search_of_one_setting_is_no_search() -> None:
    single, real = of_settings(0.01, 0.01, 0.01), of_settings(0.01, 0.02, 0.03)
    found = check(record(single, real), HARD)
    assert not found.met
    assert found.note.startswith("baseline wasn't searched")
    assert "the search of baseline had one setting, so nothing was tuned" in found.note
    alone = check(record(single), HARD)
    assert (alone.met, alone.note) == (False, "the search of baseline had one setting, so nothing was tuned")
    with pytest.raises(ValueError, match="have one setting, so it isn't tuned"):
        Arm(start=FakeRun, opponent="tuned", search=single)
    assert Arm(start=FakeRun, opponent="tuned", search=real).search == real


def test_distinct_settings_count_and_not_their_repetitions() -> None:
    few, many = of_settings(0.01, 0.02, 0.01, 0.02), of_settings(0.01, 0.02, 0.03, 0.04)
    assert (effort_of(few).num_trials, effort_of(few).num_settings) == (4, 2)
    assert not is_as_hard(few, many)
    assert is_as_hard(many, few)
    assert not check(record(few, many), HARD).met


def test_settings_known_by_hand_are_counted_and_what_could_not_vary_is_no_dimension() -> None:
    made = replace(of_settings(0.01, 0.02, 0.01, 0.03, is_known=2, dimensions=(LR, FIXED)), chosen=3)
    found = check(record(made), HARD)
    assert found.note == "baseline: 4 runs, 3 settings, 2 of them known by hand, 40 steps, over lr 0.001 to 0.1"


def test_failed_trials_are_counted() -> None:
    made = of_settings(0.01, 0.02)
    failed = replace(made, trials=(made.trials[0], replace(made.trials[1], error="ValueError: x", quality=math.inf)))
    assert "2 runs, 1 of which failed, 2 settings" in check(record(failed), HARD).note


ROWS = "Settings chosen on rows of their own"


def sample(start: int, end: int) -> tuple[str, ...]:
    return row_sample([torch.arange(start, end)])


@pytest.mark.parametrize(
    ("base", "fast", "reported", "met", "note"),
    [
        ((0, 500), (0, 500), (500, 900), True, "at most 0 % in common, by a sample of the rows' digests"),
        ((0, 500), (0, 500), (0, 500), False, "about 100 % of the rows for baseline are reported too; about 100 % of"),
        ((0, 500), (600, 900), (600, 900), False, "about 100 % of the rows for fast are reported too"),
        ((0, 90), (0, 90), (80, 200), False, "about 11 % of the rows for baseline are reported too; about 11 % of"),
        ((0, 100), (0, 100), (97, 200), True, "at most 3 % in common"),
        ((0, 0), (0, 500), (500, 900), False, "not known for baseline: no record of the rows of its runs"),
        ((0, 500), (0, 500), (0, 0), False, "not known for baseline, fast: no record"),
    ],
)
def test_selection_rows_are_compared_with_those_reported(
    base: tuple[int, int], fast: tuple[int, int], reported: tuple[int, int], met: bool, note: str
) -> None:
    arms = [replace(searched(), evaluated_on=sample(*rows)) for rows in (base, fast)]
    found = check(replace(record(*arms), evaluated_on=sample(*reported)), ROWS)
    assert found.met == met
    assert found.note.startswith(note)


def test_without_a_search_there_are_no_selection_rows() -> None:
    assert ROWS not in {item.name for item in checks_of(record())}
