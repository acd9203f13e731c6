"""A compiled policy has one row for each kind of each class, one route for each step, and refuses all others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from cosmati.errors import PlanError, PolicyError
from cosmati.routing.measures import RowKind
from cosmati.routing.policy import Phase, check_rules, compile_policy, partition_by, resolve_time
from cosmati.routing.policy_file import load_policy
from tests.routing.samples import CLASSES, PARTITION, TAXONOMY, compiled, policy_of

BANDS: dict[str, Any] = {"measure": "quality", "names": ["low", "high"], "thresholds": [0.5]}
KINDS: dict[str, Any] = {"bands": BANDS, "measures": {"trust": {"grades": ["poor", "good"]}}}
RULES: list[dict[str, object]] = [{"class": "f", "weight": 1}, {"class": "f", "band": "low", "weight": 0.5}]


def test_each_kind_of_each_class_has_a_row_of_its_own() -> None:
    table = compiled(RULES, **KINDS)
    assert (len(table.kinds), len(table.weight), len(table.decision)) == (6, 24, 24)
    assert [table.row(class_id, kind) for class_id in range(4) for kind in range(6)] == list(range(24))
    assert [list(table.rows_of(class_id)) for class_id in (0, 3)] == [list(range(6)), list(range(18, 24))]
    assert table.row(2) == 12
    assert table.row_names[18] == ("f", "low, trust unmeasured")
    assert table.bands[-1] == "high, trust good"
    assert table.band_names == ("low", "high")
    assert table.route(3, 0, 0) == (0.5, 0.5)
    assert table.route(3, 9, 5) == (1.0, 1.0)
    assert table.routes[table.route_id(3, 0, 5)] == (1.0, 1.0)
    for kind in (-1, 6):
        with pytest.raises(PolicyError, match=rf"^Rows of f are of kind {kind}, and the policy has 6: low, trust"):
            table.row(3, kind)


def test_all_rows_of_a_class_are_one_kind_where_a_policy_tells_none_apart() -> None:
    table = compiled([{"class": "f", "weight": 1}])
    assert [table.row(3, kind) for kind in (-1, 0, 7)] == [3, 3, 3]
    assert (table.bands, table.band_names, table.kinds, list(table.rows_of(3))) == (("",), ("",), (RowKind(),), [3])
    assert [table.find_kind(band, {"trust": "zz"}) for band in (-1, 0, 9)] == [0, 0, 0]
    with pytest.raises(PolicyError, match=r"^There's no class 4: ids go from 0 to 3\. Rows need a class\.$"):
        table.row(4)


@pytest.mark.parametrize(
    ("band", "grades", "kind"),
    [
        (0, {}, 0),
        (1, {}, 3),
        (1, {"trust": "good"}, 5),
        (0, {"trust": "poor", "age": "old"}, 1),
        (0, {"trust": "zz"}, None),
        (2, {}, None),
        (-1, {}, None),
    ],
)
def test_a_kind_is_found_by_band_and_grades(band: int, grades: dict[str, str], kind: int | None) -> None:
    table = compiled(RULES, **KINDS)
    assert table.find_kind(band, grades) == kind
    if kind is not None:
        assert table.kind_of(band, grades) == kind
        return
    said = (
        r"^Rows say trust 'zz', and the policy has the grades good, poor\."
        if band == 0
        else rf"^Rows say band {band}, and the policy has 2: low, high\."
    )
    with pytest.raises(PolicyError, match=said):
        table.kind_of(band, grades)
    with pytest.raises(PolicyError, match=r"^Shard 7 say "):
        table.kind_of(band, grades, "Shard 7")


def test_a_class_is_ever_admitted_where_some_kind_of_it_is_in_some_phase() -> None:
    late: list[dict[str, object]] = [{"class": "f", "phase": "late", "band": "high", "weight": 0.5}]
    table = compiled(late, **KINDS)
    assert [table.ever_admits(class_id) for class_id in range(4)] == [False, False, False, True]
    full = compiled([{"class": "a/e", "weight": 1}])
    assert [full.ever_admits(class_id) for class_id in range(4)] == [False, False, True, False]


def test_a_phase_begins_at_its_first_step_and_ends_before_the_next() -> None:
    table = compiled([])
    assert table.phases == (Phase("early", 0, 5), Phase("late", 5, 10))
    assert [table.phase_at(step) for step in (0, 4, 5, 9)] == [0, 0, 1, 1]
    with pytest.raises(PolicyError, match=r"^Step 10 isn't in the run that the policy is for, 0 to 9\.$"):
        table.phase_at(10)
    with pytest.raises(PolicyError, match=r"^There's no phase 2: the policy has 2\.$"):
        table.route_id(0, 2)


@pytest.mark.parametrize(
    ("text", "step"),
    [("7ba", 7), (" 7ba ", 7), ("0.29dur", 29), ("1dur", 100), ("1.5ep", 10), ("0ep", 0), ("007ba", 7)],
)
def test_a_time_is_rounded_down_to_a_step(text: str, step: int) -> None:
    assert resolve_time(text, num_steps=100, steps_per_epoch=7) == step


@pytest.mark.parametrize("text", ["7", "ba", "7.5ba", "-1ba", "1 ba", ".5dur", "1e2ba", "7bax"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match=f"^{re.escape(repr(text))} isn't a time"):
        resolve_time(text, num_steps=100, steps_per_epoch=7)


def test_epochs_of_unknown_length_are_refused_and_nothing_else_needs_them() -> None:
    with pytest.raises(PolicyError, match=r"'2ep' can't be placed: the number of steps in an epoch isn't known"):
        resolve_time("2ep", num_steps=100)
    assert [resolve_time(text, num_steps=100) for text in ("2ba", "0.5dur")] == [2, 50]


@pytest.mark.parametrize("error", [PolicyError, PlanError])
def test_a_phase_that_cannot_be_placed_is_told_with_its_line(error: type[Exception]) -> None:
    def resolve(text: str) -> int:
        raise error(f"{text} is odd")

    text = "version: 1\ntaxonomy: t\nphases:\n  - {name: one, until: 1ba}\n  - {name: two}\nrules: []\n"
    regions = PARTITION.__class__(("all",), (("t",),), (("all",),))
    policy = load_policy(text)
    with pytest.raises(PolicyError, match=r"^Phase one \(line 4\): 1ba is odd$"):
        compile_policy(policy, taxonomy=TAXONOMY, regions=regions, num_steps=9, resolve=resolve)
    for step in (0, 9, 10):
        with pytest.raises(PolicyError, match=r"has phases out of order:\n  - phase \w+ \(line \d\) would go from"):
            compile_policy(policy, taxonomy=TAXONOMY, regions=regions, num_steps=9, resolve=lambda _, at=step: at)
    found = compile_policy(policy, taxonomy=TAXONOMY, regions=regions, num_steps=2, resolve=lambda _: 1)
    assert found.phases == (Phase("one", 0, 1), Phase("two", 1, 2))
    with pytest.raises(PolicyError, match="at least one step, not 0"):
        compile_policy(policy, taxonomy=TAXONOMY, regions=regions, num_steps=0)


def test_joint_classes_follow_the_taxonomys_in_order_and_each_once() -> None:
    policy = policy_of([{"class": "**", "weight": 1}])
    names = ["f&a/e", "a/e&f", "a/b/c&f"]
    found = compile_policy(policy, taxonomy=TAXONOMY, regions=PARTITION, num_steps=10, joint=names)
    assert found.classes == (*CLASSES, "a/b/c&f", "a/e&f")
    assert len(found.weight) == len(found.decision) == 6


def test_rules_are_checked_without_a_model_and_without_a_run() -> None:
    phases = [{"name": "one", "until": "900ba"}, {"name": "two", "until": "3ep"}, {"name": "three"}]
    check_rules(policy_of([{"class": "f", "weight": 1}], phases=phases), taxonomy=TAXONOMY)
    check_rules(policy_of([], regions={}, phases=[]), taxonomy=TAXONOMY)
    with pytest.raises(PolicyError, match="no region 'heap'; did you mean head"):
        check_rules(policy_of([{"class": "f", "region": "heap", "weight": 1}]), taxonomy=TAXONOMY)
    with pytest.raises(PolicyError, match="deferred"):
        check_rules(policy_of([{"class": "f", "decision": "defer"}], phases=phases), taxonomy=TAXONOMY)


def test_regions_that_do_not_fit_a_model_are_told_with_their_lines() -> None:
    text = "version: 1\ntaxonomy: t\nregions:\n  head: {params: zz.*}\n  tail: {params: '*'}\nrules: []\n"
    with pytest.raises(PolicyError) as caught:
        partition_by(load_policy(text), nn.Linear(1, 1))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("The regions (line 3) don't partition")
    assert any("region 'head' (line 4)" in line for line in lines[1:])
    assert partition_by(load_policy(text.replace("zz.*", "weight").replace("'*'", "bias")), nn.Linear(1, 1)).names == (
        "head",
        "tail",
    )
