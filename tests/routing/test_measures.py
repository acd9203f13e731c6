"""Attenuation by what was measured: against brute force, and never more than the rules alone give."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.routing.bands import Bands
from cosmati.routing.measures import Grading
from cosmati.routing.policy import CompiledPolicy, check_rules
from cosmati.routing.policy_analysis import diff, explain, heat_map_text
from cosmati.routing.policy_diff import PolicyDiff, other_changes
from cosmati.routing.policy_file import load_policy
from tests.routing.samples import CLASSES, MERGED, PARTITION, PHASES, REGIONS, TAXONOMY, compiled, policy_of, refusal
from tests.routing.test_bands import BANDS
from tests.routing.test_policy_oracle import COVERS, oracle_table, some

MEASURES = {
    "evidence": {"grades": ["report", "trial", "review"]},
    "trust": {"grades": ["low", "high"], "thresholds": [0.5]},
}
GRADES = {"evidence": ("report", "trial", "review"), "trust": ("low", "high")}
RULES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"class": some(tuple(COVERS)), "weight": st.sampled_from([0.25, 0.5, 1.0])},
            optional={"region": some((*REGIONS, "*")), "phase": some((*PHASES, "*"))},
        ),
        st.fixed_dictionaries(
            {"class": some(tuple(COVERS)), "decision": st.just("defer"), "phase": st.just(["early"])}
        ),
    ),
    max_size=4,
)
ATTENUATIONS = st.lists(
    st.sampled_from(sorted(GRADES)).flatmap(
        lambda name: st.fixed_dictionaries(
            {
                "class": some(tuple(COVERS)),
                "measure": st.just(name),
                "grade": some(GRADES[name]),
                "factor": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
            },
            optional={"region": some((*REGIONS, "*")), "phase": some((*PHASES, "*"))},
        )
    ),
    max_size=4,
)


def factor_of(attenuations: list[dict[str, Any]], path: str, grades: dict[str, str], phase: str, region: str) -> float:
    """Return the least factor of what covers a cell, by looking at each name that each attenuation gives."""
    found = [1.0]
    for one in attenuations:
        axes = (one["class"], one["grade"], one.get("region", ["*"]), one.get("phase", ["*"]))
        for pattern, grade, own_region, own_phase in product(*axes):
            is_of_grade = grades[one["measure"]] == "" or grades[one["measure"]] == grade
            if path in COVERS[pattern] and is_of_grade and own_region in {region, "*"} and own_phase in {phase, "*"}:
                found.append(one["factor"])
    return min(found)


def measured() -> list[dict[str, str]]:
    names = sorted(GRADES)
    return [dict(zip(names, own, strict=True)) for own in product(*(("", *GRADES[name]) for name in names))]


def cell(table: CompiledPolicy, path: str, grades: dict[str, str], phase: int, region: str, band: int = 0) -> float:
    row = table.row(CLASSES.index(path), table.kind_of(band, grades))
    return table.weight[row][phase][table.regions.index(region)]


@pytest.mark.long
@given(RULES, ATTENUATIONS)
def test_every_cell_agrees_with_the_oracle(rules: list[dict[str, Any]], attenuations: list[dict[str, Any]]) -> None:
    given_ = [{**rule, "weight": rule.get("weight"), "decision": rule.get("decision")} for rule in rules]
    sound = oracle_table([{name: value for name, value in rule.items() if value is not None} for rule in given_])
    more = {"measures": MEASURES, "attenuate": attenuations}
    if sound is None:
        refusal(rules, **more)
        return
    plain, table = compiled(rules), compiled(rules, **more)
    assert len(table.weight) == len(CLASSES) * 12
    for path, grades in product(CLASSES, measured()):
        own = CLASSES.index(path)
        row = table.row(own, table.kind_of(0, grades))
        left = []
        for p, phase in enumerate(PHASES):
            route = [
                plain.weight[own][p][r] * factor_of(attenuations, path, grades, phase, region)
                for r, region in enumerate(plain.regions)
            ]
            assert table.weight[row][p] == tuple(route)
            left.append(route)
        for p, was in enumerate(plain.decision[own]):
            expected = "reject"
            if was == "defer" and any(map(any, left[p:])):
                expected = "defer"
            elif any(left[p]):
                expected = "gate" if any(0 < weight < 1 for weight in left[p]) else "admit"
            assert table.decision[row][p] == expected


@pytest.mark.long
@given(RULES, ATTENUATIONS, ATTENUATIONS)
def test_one_more_only_ever_lowers(
    rules: list[dict[str, Any]], some_: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    try:
        fewer = compiled(rules, measures=MEASURES, attenuate=some_)
    except PolicyError:
        return
    table = compiled(rules, measures=MEASURES, attenuate=[*more, *some_])
    assert all(change.direction == "tightens" for change in diff(fewer, table))
    assert all(change.direction == "loosens" for change in diff(table, fewer))


def test_tied_regions_learn_as_little_as_the_least_of_them() -> None:
    rules: list[dict[str, object]] = [{"class": "f", "weight": 1}, {"class": "f", "region": "head", "weight": 0.5}]
    less = [{"class": "f", "measure": "trust", "grade": "low", "region": "tail", "factor": 0.25}]
    table = compiled(rules, MERGED, allow={"tied": True}, measures=MEASURES, attenuate=less)
    assert [cell(table, "f", {"trust": grade}, 0, "head&tail") for grade in ("", "low", "high")] == [0.25, 0.25, 0.5]


def test_bands_and_grades_go_together() -> None:
    table = compiled(
        [{"class": "f", "weight": 1}, {"class": "f", "band": "high", "weight": 0.5}],
        bands=BANDS,
        floors=[{"class": "f", "band": "middle"}],
        measures=MEASURES,
        attenuate=[{"class": "f", "measure": "evidence", "grade": "report", "factor": 0.5}],
    )
    found = [[cell(table, "f", {"evidence": g}, 0, "head", band) for g in ("report", "review")] for band in range(3)]
    assert found == [[0, 0], [0.5, 1], [0.25, 0.5]]
    assert table.bands[:2] == ("low, evidence unmeasured, trust unmeasured", "low, evidence unmeasured, trust low")
    with pytest.raises(PolicyError, match=r"Rows say evidence 'rumour', and the policy has the grades report, review"):
        table.kind_of(0, {"evidence": "rumour"})
    with pytest.raises(PolicyError, match="Rows say band 3"):
        table.kind_of(3, {})
    assert table.kind_of(1, {"colour": "red"}) == table.kind_of(1, {}), "what the policy doesn't speak of doesn't count"


FRONT = "version: 1\ntaxonomy: t\nrules: [{class: f, weight: 1}]\nmeasures: {evidence: {grades: [report, trial]}}\n"
WRONG = {
    "attenuate: [{class: f, measure: evidence, grade: report, factor: 1.5}]": "less than or equal to 1",
    "attenuate: [{class: f, measure: evidence, grade: report, factor: -0.5}]": "greater than or equal to 0",
    "attenuate: [{class: f, measure: evidence, grade: report, factor: .nan}]": "valid number",
    "attenuate: [{class: f, measure: evidence, grade: report, factor: yes}]": "valid number",
    "attenuate: [{class: f, measure: evidence, grade: report}]": "factor: Field required",
    "attenuate: [{class: f, measure: evidence, grade: report, weight: 1}]": "no such field",
    "attenuate: [{class: f, measure: evidence, factor: 0.5}]": "grade: Field required",
    "attenuate: [{class: f, measure: evidence, grade: [], factor: 0.5}]": "at least 1",
    "attenuate: [{class: f, measure: evidense, grade: report, factor: 1}]": "did you mean evidence",
    "attenuate: [{class: f, measure: evidence, grade: rep\u043ert, factor: 1}]": "CYRILLIC SMALL LETTER O",
    "attenuate: [{class: f, measure: evidence, grade: '*', factor: 1}]": "no grade '\\*'",
    "attenuate: [{class: g, measure: evidence, grade: report, factor: 1}]": "no class 'g'",
    "attenuate: [{class: f, measure: evidence, grade: report, region: hat, factor: 1}]": "no region 'hat'",
    "attenuate: [{class: f, measure: evidence, grade: report, phase: hat, factor: 1}]": "no phase 'hat'",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_isnt_one_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(PolicyError, match=rf"line 5.*{WRONG[text]}"):
        check_rules(load_policy(FRONT + text), taxonomy=TAXONOMY)


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        ("{grades: [a, a]}", "named twice"),
        ("{grades: []}", "at least 1"),
        ("{grades: [a, b], thresholds: []}", "need 1 thresholds"),
        ("{grades: [a, b, c], thresholds: [2, 1]}", "go up"),
        ("{grades: [a, b], thresholds: [1e999]}", "finite number"),
        ("{grades: [a b]}", "pattern"),
        ("{names: [a]}", "no such field"),
        ("[a]", "Input should be"),
    ],
)
def test_measures_that_are_none_are_refused_with_their_line(measure: str, why: str) -> None:
    with pytest.raises(PolicyError, match=rf"line 5, measures.*{why}"):
        load_policy(f"version: 1\ntaxonomy: t\nrules: []\nmeasures:\n  evidence: {measure}\n")


def test_too_many_kinds_are_refused() -> None:
    grades = ", ".join(f"g{n}" for n in range(99))
    with pytest.raises(PolicyError, match="line 4, policy: measures and bands tell 10000 kinds of rows apart"):
        load_policy(
            f"version: 1\ntaxonomy: t\nrules: []\nmeasures: {{a: {{grades: [{grades}]}}, b: {{grades: [{grades}]}}}}\n"
        )


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=4, unique=True), st.floats(allow_nan=True))
def test_a_value_has_the_grade_between_its_thresholds(thresholds: list[float], value: float) -> None:
    thresholds.sort()
    names = tuple(f"g{n}" for n in range(len(thresholds) + 1))
    measure = Grading(grades=names, thresholds=tuple(thresholds))
    if math.isnan(value):
        with pytest.raises(ValueError, match="NaN"):
            measure.grade_of(value)
    else:
        assert measure.grade_of(value) == names[sum(value >= one for one in thresholds)]
    with pytest.raises(ValueError, match="has no thresholds"):
        Grading(grades=names).grade_of(0.0)


def test_policies_without_measures_have_the_digests_that_they_had() -> None:
    assert not {"measures", "attenuate"} & {*policy_of([]).to_mapping()}
    less = [
        {"class": "f", "measure": "trust", "grade": ["low", "high"], "factor": 0.5},
        {"class": "a/e", "measure": "trust", "grade": "low", "factor": 0},
    ]
    one = policy_of([], measures=MEASURES, attenuate=less)
    assert one.digest == policy_of([], measures=dict(reversed(MEASURES.items())), attenuate=less[::-1]).digest
    assert one.digest != policy_of([], measures=MEASURES, attenuate=less[:1]).digest
    assert (
        one.digest != policy_of([], attenuate=less, measures=MEASURES | {"trust": {"grades": ["low", "high"]}}).digest
    )


def test_a_cell_is_explained_with_what_lowers_it() -> None:
    less = [
        {"class": "**", "measure": "evidence", "grade": "report", "factor": 0.5},
        {"class": "f", "measure": "trust", "grade": "low", "region": "head", "factor": 0.25},
    ]
    policy = policy_of([{"class": "f", "weight": 0.5}], measures=MEASURES, attenuate=less)

    def told(region: str, **grades: str) -> tuple[float, tuple[str, ...], str]:
        found = explain(policy, "f", region, "early", taxonomy=TAXONOMY, grades=grades)
        return found.weight, found.lowered, found.why

    first, second = (
        "attenuation 1 (class **, evidence report: times 0.5)",
        "attenuation 2 (class f, trust low, region head",
    )
    weight, lowered, why = told("head", evidence="report", trust="low")
    assert (weight, lowered[0], lowered[1].startswith(second)) == (0.125, first, True)
    assert "times 0.25, for evidence report, trust low: the least factor of 2" in why
    assert told("tail", evidence="report", trust="low")[:2] == (0.25, (first,))
    assert told("head")[:2] == (0.125, lowered), "what wasn't measured counts as the grade that's attenuated most"
    assert told("tail", evidence="trial", trust="high")[:2] == (0.5, ())
    for grades, wrong in (({"evidense": "x"}, "no measure 'evidense'"), ({"trust": "lo"}, "no grade 'lo' of trust")):
        with pytest.raises(PolicyError, match=wrong):
            told("head", **grades)


def test_a_difference_names_the_grades() -> None:
    rules: list[dict[str, object]] = [{"class": "f", "weight": 1}]
    less = [{"class": "f", "measure": "trust", "grade": "low", "region": "head", "factor": 0.5}]
    plain, low = compiled(rules), compiled(rules, measures={"trust": MEASURES["trust"]}, attenuate=less)
    changes = diff(plain, low)
    assert [(one.name, one.region, one.result) for one in changes] == [
        ("f, trust unmeasured", "head", "1 (admit) -> 0.5 (gate)"),
        ("f, trust low", "head", "1 (admit) -> 0.5 (gate)"),
        ("f, trust any other", "tail", "1 (admit) -> 0 (reject)"),
        ("f, trust any other", "head", "1 (admit) -> 0 (reject)"),
    ]
    assert "f, trust low, head" in str(PolicyDiff(plain, low))
    fewer = {"trust": {"grades": ["low"]}}
    gone = diff(low, compiled(rules, measures=fewer, attenuate=less))
    assert [(one.name, one.new_weight) for one in gone] == [("f, trust high", 0.0)] * 2, "a grade that it lacks"
    one, other = (policy_of(rules, measures={"trust": {"grades": ["low", "high"], "thresholds": [t]}}) for t in (1, 2))
    assert other_changes(one, other)[0].startswith("measures: ")
    assert PARTITION.names == ("tail", "head")


SOME_MEASURES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(sorted(GRADES)),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True).map(lambda own: {"grades": own}),
)


@st.composite
def graded_policies(draw: st.DrawFn) -> CompiledPolicy:
    measures = draw(SOME_MEASURES)
    rules: list[dict[str, Any]] = [*map(dict, draw(RULES))]
    names = sorted(measures)
    pairs = st.sampled_from([(name, grade) for name in names for grade in measures[name]["grades"]] or [("", "")])
    factor = st.fixed_dictionaries(
        {"class": some(tuple(COVERS)), "of": pairs, "factor": st.sampled_from([0.0, 0.5])},
        optional={"region": some((*REGIONS, "*"))},
    )
    less = [{**one, "measure": one["of"][0], "grade": [one["of"][1]]} for one in draw(st.lists(factor, max_size=3))]
    less = [{name: value for name, value in one.items() if name != "of"} for one in less if names]
    try:
        return compiled(rules, measures=measures, attenuate=less)
    except PolicyError:
        return compiled([], measures=measures)


@pytest.mark.long
@given(graded_policies(), graded_policies())
def test_a_difference_tells_whatever_teaches_more_or_less(old: CompiledPolicy, new: CompiledPolicy) -> None:
    """By a look at each row that a shard may describe, of grades that neither policy knows, too."""
    found = diff(old, new)
    known = {
        name: {grade for one in (old, new) for kind in one.kinds for own, grade in kind.grades if own == name}
        for name in GRADES
    }
    for grades in product(*((("", "a", "b", "c", "z"),) * 2)):
        said = dict(zip(GRADES, grades, strict=True))
        wanted = {m: said[m] if said[m] in known[m] else "any other" for m in GRADES if known[m]}
        for path, region, step in product(CLASSES, REGIONS, (0, 9)):
            weights = []
            for one in (old, new):
                kind = one.find_kind(0, said)
                row = None if kind is None else one.weight[one.row(CLASSES.index(path), kind)]
                weights.append(0.0 if row is None else row[one.phase_at(step)][one.regions.index(region)])
            told = [
                (change.old_weight, change.new_weight)
                for change in found
                if (change.class_path, change.new_region) == (path, region)
                and change.start_step <= step < change.end_step
                and dict(change.grades) == wanted
            ]
            if weights[0] != weights[1]:
                assert told == [tuple(weights)]


def test_a_class_for_which_grades_dont_matter_is_one_line() -> None:
    less = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0.5}]
    table = compiled([{"class": "**", "weight": 1}], measures=MEASURES, attenuate=less)
    lines = heat_map_text(table, "early").splitlines()[2:]
    assert [line.split("  ")[0] for line in lines[:3]] == ["a/b/c", "a/b/d", "a/e"]
    assert len(lines) == 3 + 12
    assert lines[3].startswith("f, evidence unmeasured, trust unmeasured")
    assert "0.5" in lines[3]


def test_what_would_wait_for_nothing_is_rejected() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "phase": "early", "decision": "defer"},
        {"class": "f", "phase": "late", "weight": 1},
    ]
    nothing = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0}]
    table = compiled(rules, measures=MEASURES, attenuate=nothing)
    found = {g: table.decision[table.row(3, table.kind_of(0, {"trust": g}))] for g in ("low", "high")}
    assert found == {"low": ("reject", "reject"), "high": ("defer", "admit")}


@given(
    st.floats(allow_nan=False) | st.integers(-(10**400), 10**400) | st.sampled_from(["low", "high", "x", None, True])
)
def test_a_value_has_a_grade_or_is_refused(value: Any) -> None:
    trust = Grading(grades=("low", "high"), thresholds=(0.5,))
    bands = Bands(measure="m", names=("low", "high"), thresholds=(0.5,))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1.7976931348623157e308
    if is_number or value in ("low", "high"):
        wanted = value if isinstance(value, str) else ("low", "high")[value >= 0.5]
        assert trust.read(value) == wanted
        assert bands.names[bands.read(value)] == wanted
        return
    for read in (trust.read, bands.read):
        with pytest.raises(ValueError, match="neither a finite number"):
            read(value)
    with pytest.raises(ValueError, match="none of the grades"):
        Grading(grades=("low",)).read(value)
