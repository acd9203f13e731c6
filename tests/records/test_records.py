"""Records go to JSON and back unchanged, and nothing else is let in."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import RunError
from cosmati.records.governance import (
    ContributionSeries,
    ContributionTotal,
    GovernanceFacts,
    LedgerFacts,
    SourceRow,
)
from cosmati.records.run import GuaranteeRecord, PlanLine, RunRecord
from cosmati.records.study import (
    ArmRecord,
    ChecklistItem,
    CostProfile,
    DimensionRecord,
    EvaluationPoint,
    Prediction,
    Registration,
    SearchRecord,
    StudyRecord,
    StudyRun,
    TrialRecord,
)
from tests.store.samples import small_study

text = st.text(max_size=12)
number = st.floats(allow_nan=False)
count = st.integers(min_value=0, max_value=2**70)
figures = st.dictionaries(text, number, max_size=3)


def tuples(items: st.SearchStrategy[Any], **kwargs: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=3, **kwargs).map(tuple)


runs = st.builds(
    RunRecord,
    version=st.just(1),
    digests=st.dictionaries(text, text, max_size=3),
    environment=st.dictionaries(text, text, max_size=3),
    plan=tuples(st.builds(PlanLine, text, text, text)),
    guarantees=tuples(st.builds(GuaranteeRecord, text, st.booleans(), text)),
    cost=st.none() | number,
    seconds_by_part=figures,
    metrics=figures,
)
seconds = st.floats(0, 1e10)
points = st.builds(EvaluationPoint, count, seconds, number, count, count, number, seconds)
predictions = st.builds(Prediction, text, text, text, number)
setting_values = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
searches = st.none() | st.builds(
    SearchRecord,
    tuples(st.builds(DimensionRecord, text, number, number, st.booleans(), tuples(text), count)),
    tuples(
        st.builds(
            TrialRecord,
            count,
            st.dictionaries(text, setting_values, max_size=3),
            st.booleans(),
            number,
            count,
            number,
            count,
            count,
            number,
        )
    ),
    count,
    count,
)

registrations = st.builds(Registration, text, tuples(predictions), text, text, st.none() | count)


@st.composite
def studies(draw: st.DrawFn) -> StudyRecord:
    names = draw(st.lists(text, min_size=1, max_size=3, unique=True))
    keys = draw(st.lists(st.tuples(st.sampled_from(names), number, count), max_size=4, unique=True))
    return StudyRecord(
        name=draw(text),
        task=draw(text),
        quality_name=draw(text),
        higher_is_better=draw(st.booleans()),
        unit=draw(text),
        baseline_arm=names[0],
        arms=tuple(
            ArmRecord(name, draw(text), draw(text), draw(tuples(text)), draw(st.none() | text), "", draw(searches))
            for name in names
        ),
        runs=tuple(StudyRun(*key, draw(text), draw(tuples(points)), draw(points), draw(figures)) for key in keys),
        checklist=draw(tuples(st.builds(ChecklistItem, text, st.booleans(), text))),
        hardware=draw(text),
        price_per_hour=draw(st.none() | number),
        command=draw(text),
        notes=draw(text),
        costs=draw(tuples(st.builds(CostProfile, text, count, count, number))),
        registration=draw(
            st.none() | st.builds(Registration, text, tuples(predictions), text, text, st.none() | count)
        ),
    )


@st.composite
def governance(draw: st.DrawFn) -> GovernanceFacts:
    classes, regions, phases = (draw(tuples(text, unique=True)) for _ in range(3))
    cells = {c: {p: {r: draw(number) for r in regions} for p in phases} for c in classes}
    ledger = st.builds(LedgerFacts, problems=tuples(text), commands=tuples(text))
    return GovernanceFacts(
        classes=classes,
        regions=regions,
        phases=phases,
        weight=cells,
        decision={c: {p: draw(text) for p in phases} for c in classes},
        contribution=draw(tuples(st.builds(ContributionSeries, text, text, tuples(count), tuples(number)))),
        totals=draw(tuples(st.builds(ContributionTotal, text, text, count, count, number, number))),
        exclusions=draw(tuples(text)),
        sources=draw(tuples(st.builds(SourceRow, text, text, count, count, text, text))),
        ledger=draw(st.none() | ledger),
        notes=draw(tuples(text)),
    )


@given(runs)
@settings(max_examples=40, deadline=None)
def test_run_round_trip(record: RunRecord) -> None:
    assert RunRecord.from_json(record.to_json()) == record


@given(studies())
@settings(max_examples=40, deadline=None)
def test_study_round_trip(record: StudyRecord) -> None:
    assert StudyRecord.from_json(record.to_json()) == record


@given(governance())
@settings(max_examples=40, deadline=None)
def test_governance_round_trip(record: GovernanceFacts) -> None:
    assert GovernanceFacts.from_json(record.to_json()) == record


def example() -> RunRecord:
    return RunRecord(
        run_id="r1",
        recipe_name="plain",
        recipe_text="{}",
        digests={"plan": "00"},
        environment={"torch": "2.13"},
        plan=(PlanLine("update", "AdamW", "moves the weights"),),
        guarantees=(GuaranteeRecord("resume", holds=True, because="all state is in the checkpoint"),),
        seed=1,
        num_microbatches=4,
        num_steps=10,
        hardware="one core",
        cost=None,
        seconds_by_part={"forward": 1.5},
        outcome="completed",
        started="2025-01-01T00:00:00+00:00",
        ended=None,
        metrics={"accuracy": 0.5},
    )


def test_diverged_metric_survives() -> None:
    record = replace(example(), metrics={"loss": math.nan})
    assert "NaN" in record.to_json()
    assert math.isnan(RunRecord.from_json(record.to_json()).metrics["loss"])


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_other_versions_are_refused(version: Any) -> None:
    fields = json.loads(example().to_json()) | {"version": version}
    with pytest.raises(RunError, match="version"):
        RunRecord.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"seed": True}, "RunRecord.seed"),
        ({"seed": 1.0}, "RunRecord.seed"),
        ({"cost": "dear"}, "RunRecord.cost"),
        ({"plan": {}}, "RunRecord.plan"),
        ({"plan": [{"stage": "a", "method": "b"}]}, r"RunRecord.plan\[0\].*does"),
        ({"metrics": {"a": False}}, "RunRecord.metrics.a"),
        ({"digests": []}, "RunRecord.digests"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_other_forms_are_refused(change: dict[str, Any], path: str) -> None:
    fields = json.loads(example().to_json()) | change
    with pytest.raises(RunError, match=path):
        RunRecord.from_json(json.dumps(fields))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e308])
@pytest.mark.parametrize("name", ["seconds", "cpu_seconds"])
def test_times_that_no_clock_has_are_refused(seconds: float, name: str) -> None:
    record = small_study()
    run = record.runs[2]
    damaged = replace(run, final=replace(run.final, **{name: seconds}))
    text = replace(record, runs=(*record.runs[:2], damaged, *record.runs[3:])).to_json()
    with pytest.raises(
        RunError, match=rf"Run {re.escape(run.run_id)} has .* s of training and .*which no clock has shown"
    ):
        StudyRecord.from_json(text)


@pytest.mark.parametrize("bad", ["", "[]", "{", '{"version": 1}', "null"])
def test_other_texts_are_refused(bad: str) -> None:
    with pytest.raises(RunError):
        RunRecord.from_json(bad)


def test_repeated_keys_and_bare_infinities_are_refused() -> None:
    source = example().to_json()
    with pytest.raises(RunError, match="repeats"):
        RunRecord.from_json(source.replace('"seed": 1', '"seed": 1, "seed": 1'))
    with pytest.raises(RunError, match="accuracy"):
        RunRecord.from_json(source.replace("0.5", "Infinity"))


def test_a_study_refuses_what_does_not_fit() -> None:
    point = EvaluationPoint(1, 1.0, 0.5)
    run = StudyRun("b", 1.0, 0, "r", (), point, {})
    study = StudyRecord(
        name="s",
        task="",
        quality_name="q",
        higher_is_better=True,
        unit="",
        baseline_arm="b",
        arms=(ArmRecord("b", "", ""),),
        runs=(run,),
        checklist=(),
        hardware="",
        price_per_hour=None,
        command="",
        notes="",
    )
    for change in (
        {"baseline_arm": "c"},
        {"runs": (replace(run, arm="c"),)},
        {"runs": (run, run)},
        {"arms": study.arms * 2},
    ):
        with pytest.raises(RunError, match="doesn't fit"):
            replace(study, **change)


def test_a_study_of_version_1_is_read() -> None:
    study = StudyRecord(
        name="s",
        task="",
        quality_name="q",
        higher_is_better=True,
        unit="",
        baseline_arm="b",
        arms=(ArmRecord("b", "", ""),),
        runs=(),
        checklist=(),
        hardware="",
        price_per_hour=None,
        command="",
        notes="",
    )
    old = json.loads(study.to_json())
    for name in ("costs", "registration"):
        del old[name]
    for name in ("opponent", "source", "search"):
        del old["arms"][0][name]
    assert StudyRecord.from_json(json.dumps(old | {"version": 1})) == study
    with pytest.raises(RunError, match="repeats"):
        StudyRecord.from_json(json.dumps(old | {"version": 1}).replace('"unit"', '"task": "t", "unit"'))
    with pytest.raises(RunError, match="missing"):
        StudyRecord.from_json(json.dumps(old | {"version": 2}))


def test_a_study_of_version_2_is_read() -> None:
    """Neither the number of tests of a family nor trials by hand; an arm with a search and one without."""
    search = SearchRecord((), (TrialRecord(0, {"lr": 0.1}, True, 1.0, 0, 0.5, 1, 1, 1.0),), 0)
    study = StudyRecord(
        name="s",
        task="",
        quality_name="q",
        higher_is_better=True,
        unit="",
        baseline_arm="b",
        arms=(ArmRecord("b", "", "", search=search), ArmRecord("c", "", "")),
        runs=(),
        checklist=(),
        hardware="",
        price_per_hour=None,
        command="",
        notes="",
        registration=Registration("f", (Prediction("c", "b", "step", 2.0),), "2026-11-22", "00"),
    )
    old = json.loads(study.to_json()) | {"version": 2}
    del old["registration"]["num_tests"], old["arms"][0]["search"]["by_hand"]
    found = StudyRecord.from_json(json.dumps(old))
    assert found == study
    assert found.registration is not None
    assert found.registration.family_size == 4
    bare = StudyRecord.from_json(json.dumps(old | {"registration": None}))
    assert bare == replace(study, registration=None)
    with pytest.raises(RunError, match="missing"):
        StudyRecord.from_json(json.dumps(old | {"version": 3}))
    with pytest.raises(RunError, match="StudyRecord"):
        StudyRecord.from_json(json.dumps(old | {"arms": "none"}))


def test_governance_refuses_a_policy_with_holes() -> None:
    facts = GovernanceFacts(
        classes=("c",),
        regions=("r",),
        phases=("p",),
        weight={"c": {"p": {"r": 1.0}}},
        decision={"c": {"p": "admit"}},
        contribution=(),
        totals=(),
        exclusions=(),
        sources=(),
        ledger=None,
        notes=(),
    )
    for change in ({"regions": ("r", "s")}, {"phases": ("p", "q")}, {"decision": {}}):
        with pytest.raises(RunError, match="lacks"):
            replace(facts, **change)


def test_a_ledger_is_verified_only_when_checked() -> None:
    ledger = LedgerFacts("o", 3, "00", "L0", True, (), 0, ())
    assert ledger.is_verified
    assert not replace(ledger, checked=False).is_verified
    assert not replace(ledger, problems=("root differs",)).is_verified


def test_runs_and_costs_of_version_2_are_read() -> None:
    point = EvaluationPoint(3, 1.5, 0.5, 24, 0, 9.0)
    run = StudyRun("b", 1.0, 0, "r", (point,), point, {"data": 0.1})
    study = StudyRecord(
        name="s",
        task="",
        quality_name="q",
        higher_is_better=True,
        unit="",
        baseline_arm="b",
        arms=(ArmRecord("b", "", ""),),
        runs=(run,),
        checklist=(),
        hardware="",
        price_per_hour=None,
        command="",
        notes="",
        costs=(CostProfile("b", 0, 3, 1.5),),
    )
    old = json.loads(study.to_json()) | {"version": 2}
    (old_run,), (old_cost,) = old["runs"], old["costs"]
    del old_run["num_threads"]
    for one in (old_run["points"][0], old_run["final"]):
        del one["cpu_seconds"]
    for name in ("evaluation_seconds", "evaluated_rows", "num_threads"):
        del old_cost[name]
    assert StudyRecord.from_json(json.dumps(old)) == study
    with pytest.raises(RunError, match="missing fields"):
        StudyRecord.from_json(json.dumps(old | {"version": 3}))
    for damaged in ({"runs": 3}, {"runs": [3]}, {"runs": [{}]}, {"costs": [{"arm": "b"}]}, {"runs": [{"final": 1}]}):
        with pytest.raises(RunError, match="StudyRecord"):
            StudyRecord.from_json(json.dumps(old | damaged))
