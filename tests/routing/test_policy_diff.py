"""What `cosmati policy diff` says: the summary, each cell, and what programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.routing.policy_diff import PolicyDiff, other_changes
from cosmati.routing.policy_file import PolicyFile
from tests.routing.test_policy_analysis import POLICIES, REGIONS, compiled, policy_of

OLD: list[dict[str, object]] = [{"class": "a/b", "weight": 0.5}, {"class": "a/c", "weight": 1}]
NEW: list[dict[str, object]] = [
    {"class": "a/b", "weight": 0.5},
    {"class": "a/b", "region": "tail", "weight": 1},
    {"class": "a/b", "region": "tail", "phase": "early", "weight": 0.25},
    {"class": "d", "phase": "late", "weight": 1},
]


def test_the_summary_comes_first_then_each_cell_then_a_map() -> None:
    found = PolicyDiff(compiled(policy_of(OLD)), compiled(policy_of(NEW)))
    assert str(found).splitlines() == [
        "Newly admitted: d",
        "No longer admitted: a/c",
        "Gain: a/b, d",
        "Lose: a/b, a/c",
        "3 of the changes loosen, 3 of the changes tighten",
        "",
        "tightens a/b, tail, phase early (steps 0 to 5): 0.5 (gate) -> 0.25 (gate)",
        "loosens  a/b, tail, phase late (steps 5 to 10): 0.5 (gate) -> 1 (gate)",
        "tightens a/c, tail, phases early to late (steps 0 to 10): 1 (admit) -> 0 (reject)",
        "tightens a/c, head, phases early to late (steps 0 to 10): 1 (admit) -> 0 (reject)",
        "loosens  d, tail, phase late (steps 5 to 10): 0 (reject) -> 1 (admit)",
        "loosens  d, head, phase late (steps 5 to 10): 0 (reject) -> 1 (admit)",
        "",
        "steps 0 to 5",
        "class  tail          head",
        "a/b    ▼ 0.5 → 0.25  ·",
        "",
        "steps 0 to 10",
        "class  tail     head",
        "a/c    ▼ 1 → 0  ▼ 1 → 0",
        "",
        "steps 5 to 10",
        "class  tail       head",
        "a/b    ▲ 0.5 → 1  ·",
        "d      ▲ 0 → 1    ▲ 0 → 1",
    ]


def test_a_phase_of_one_step_is_named() -> None:
    late: list[dict[str, object]] = [*OLD, {"class": "d", "phase": "late", "weight": 1}]
    found = PolicyDiff(compiled(policy_of(OLD, "9ba")), compiled(policy_of(late, "9ba")))
    assert [line for line in str(found).splitlines() if "phase" in line] == [
        f"loosens  d, {region}, phase late (steps 9 to 10): 0 (reject) -> 1 (admit)" for region in ("tail", "head")
    ]
    whole: list[dict[str, object]] = [*OLD, {"class": "d", "weight": 1}]
    found = PolicyDiff(compiled(policy_of(OLD, "9ba")), compiled(policy_of(whole, "9ba")))
    assert "phases early to late (steps 0 to 10)" in str(found)


def test_what_no_weight_tells_is_told_too() -> None:
    bands = {"measure": "m", "names": ["low", "high"], "thresholds": [0.5]}
    old = policy_of(OLD, bands=bands)
    new = policy_of(OLD, bands=bands | {"thresholds": [0.6]}, starvation="stop", grace={"revocation": "reject"})
    others = other_changes(old, new)
    assert [line.partition(":")[0] for line in others] == ["grace", "starvation", "bands"]
    found = PolicyDiff(compiled(old), compiled(new), others)
    assert bool(found)
    assert str(found).splitlines() == [
        "No weight changes: each class may teach each region what it might before.",
        *others,
    ]
    assert found.to_mapping()["equal"] is False
    assert other_changes(policy_of(OLD), old) == other_changes(policy_of(OLD), policy_of(NEW)) == ()


def test_equal_policies_change_nothing() -> None:
    same = compiled(policy_of(OLD))
    assert "Nothing changes" in str(PolicyDiff(same, compiled(policy_of(list(reversed(OLD))))))
    assert PolicyDiff(same, same).to_mapping()["equal"] is True


@pytest.mark.long
@given(POLICIES, POLICIES)
def test_what_programs_read_is_what_people_read(old: PolicyFile, new: PolicyFile) -> None:
    found = PolicyDiff(compiled(old), compiled(new))
    told = json.loads(json.dumps(found.to_mapping()))
    assert told["equal"] == (compiled(old).weight == compiled(new).weight and _steps(old) == _steps(new))
    assert len(told["changes"]) == len(found.changes)
    assert {one["class_path"] for one in told["changes"]} == {*told["gain"], *told["lose"]}
    back = PolicyDiff(compiled(new), compiled(old))
    assert (back.newly_admitted, back.no_longer_admitted) == (found.no_longer_admitted, found.newly_admitted)
    assert back.classes_that("loosens") == found.classes_that("tightens")


def _steps(policy: PolicyFile) -> list[tuple[tuple[float, ...], ...]]:
    table = compiled(policy)
    return [tuple(table.route(c, step) for c in range(len(table.classes))) for step in range(10)]


RECIPE = """
import torch
from cosmati import InMemory, Taxonomy
from cosmati.core.loss import Classification
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

def recipe():
    return Recipe(
        name="two",
        model=lambda: torch.nn.ModuleDict({"h": torch.nn.Linear(2, 2), "t": torch.nn.Linear(2, 2)}),
        loss=Classification(2),
        data=lambda: None,
        optimizers=(SGD(lr=0.01),),
        taxonomy=Taxonomy("t", "1", (("a", ""), ("b", ""))),
    )
"""
TEXT = "version: 1\ntaxonomy: t\nrules: [{class: a, weight: %s}]"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    for name, weight in (("old", "0.5"), ("new", "1"), ("wrong", "-1")):
        (tmp_path / f"{name}.yaml").write_text(TEXT % weight)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("old", "old", 0, "Nothing changes"),
        ("old", "new", 1, "loosens  a, all, phase main (steps 0 to 50): 0.5 (gate) -> 1 (admit)"),
        ("new", "old", 1, "tightens a, all"),
        ("old", "wrong", 2, "greater than or equal to 0"),
        ("old", "missing", 2, "can't be read"),
    ],
)
def test_the_exit_code_is_the_answer(files: Path, old: str, new: str, code: int, said: str) -> None:
    words = ["policy", "diff", f"{files}/{old}.yaml", f"{files}/{new}.yaml", "--recipe", f"{files}/recipe.py"]
    result = CliRunner().invoke(app, [*words, "--steps", "50"])
    assert (result.exit_code, said in result.output) == (code, True), result.output
    if code < 2:
        told = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
        assert told["equal"] == (code == 0)


def test_regions_of_other_names_are_compared_by_their_parameters() -> None:
    other = compiled(policy_of(OLD), REGIONS)
    renamed = compiled(policy_of(OLD, regions={"low": {"params": "t"}, "high": {"params": ["h", "i"]}}), _renamed())
    assert not PolicyDiff(other, renamed).changes


def _renamed() -> type(REGIONS):  # type: ignore[valid-type]
    return type(REGIONS)(("low", "high"), REGIONS.parameters, (("low",), ("high",)), (), ("high", "low"))
