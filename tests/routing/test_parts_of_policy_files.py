"""A policy file knows its lines, its kinds of rows and its names; what is the default is in no digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import PolicyError
from cosmati.records.grace import REASONS
from cosmati.routing import policy_file
from cosmati.routing.grace import Grace
from cosmati.routing.policy_file import PolicyFile, _named, load_policy

HEAD = "version: 1\ntaxonomy: t\n"
MANY = """\
version: 1
taxonomy: t
regions:
  head: {params: h}
  tail:
    params: t
phases:
  - {name: early, until: 1ba}
  - {name: late}
measures:
  trust: {grades: [low]}
bands: {measure: quality, names: [low, high], thresholds: [0.5]}
floors:
  - {class: a, band: high}
attenuate:
  - {class: a, measure: trust, grade: low, factor: 0.5}
rules:
  - {class: a, weight: 1}
  - class: b
    weight: 1
"""
DEEP = """\
version: 1
taxonomy: t
depth:
  container: blocks
  ranges: ["0-1", "2-"]
  open:
    - {class: a, blocks: 2-, phase: main}
    - {class: b, blocks: 2-, phase: main}
rules: []
"""
LINES = {
    "taxonomy": 2,
    "regions": 3,
    "regions.head": 4,
    "regions.tail": 5,
    "phases.1": 8,
    "phases.2": 9,
    "floors.1": 14,
    "attenuate.1": 16,
    "rules.1": 18,
    "rules.2": 19,
}


def refusal(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(text)
    return str(caught.value)


def policy_of(**fields: Any) -> PolicyFile:
    return PolicyFile.model_validate({"version": 1, "taxonomy": "t", "rules": []} | fields)


def test_each_part_has_its_line() -> None:
    policy = load_policy(MANY)
    assert {place: policy.at(place) for place in LINES} == {place: f" (line {line})" for place, line in LINES.items()}
    for place in ("rules.0", "rules.3", "phases.3", "floors.2", "regions.body", "attenuate.2"):
        assert policy.at(place) == ""
    assert [load_policy(DEEP).at(f"depth.open.{number}") for number in (1, 2, 3)] == [" (line 7)", " (line 8)", ""]
    assert load_policy(DEEP).at("depth") == " (line 3)"
    assert policy_of().at("taxonomy") == ""


def test_numbers_in_a_place_begin_with_1() -> None:
    assert _named(("rules", 0, "class", 2)) == "rules.1.class.3"
    assert _named(()) == ""


def test_policies_are_equal_by_what_they_say() -> None:
    one = load_policy(MANY)
    assert one == load_policy(MANY.replace("weight: 1\n", "weight: 1.0  # the same\n"))
    assert one != load_policy(MANY.replace("factor: 0.5", "factor: 0.25"))
    assert one != MANY
    assert (one == MANY) is False
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_nobody_vouches_for_a_policy_that_was_only_written() -> None:
    assert policy_of().vouched is None
    assert policy_of().signed_root == ""


def test_names_and_kinds_are_one_without_a_name_where_the_file_has_none() -> None:
    plain, many = policy_of(), load_policy(MANY)
    assert (plain.phase_names, plain.band_names, plain.kinds) == (("main",), ("",), (("", ()),))
    assert (many.phase_names, many.band_names) == (("early", "late"), ("low", "high"))
    assert many.kinds == tuple((band, (("trust", grade),)) for band in ("low", "high") for grade in ("", "low"))


def test_regions_are_those_of_the_file_and_of_depth() -> None:
    assert policy_of().selectors == {}
    assert sorted(load_policy(MANY).selectors) == ["head", "tail"]
    assert list(load_policy(DEEP).selectors) == ["rest", "blocks.0-1", "blocks.2-"]
    beside = load_policy(DEEP.replace("depth:", "regions: {first: {params: f}}\ndepth:"))
    assert "first" in beside.selectors
    assert len(beside.selectors) == 3


def test_what_follows_for_each_reason_is_that_of_the_file_or_the_default() -> None:
    usual = {reason: getattr(Grace(), reason) for reason in REASONS}
    assert dict(policy_of().graces) == usual
    assert dict(policy_of(grace={"revocation": "reject"}).graces) == usual | {"revocation": "reject"}


def test_what_is_the_default_is_in_no_digest_and_the_order_of_lists_is_none() -> None:
    plain = policy_of().to_mapping()
    assert plain.keys().isdisjoint({"floors", "measures", "attenuate", "starvation", "depth", "bands", "grace"})
    assert policy_of(starvation="stop").to_mapping()["starvation"] == "stop"
    floors = [{"class": name, "band": "high"} for name in "ba"]
    less = [{"class": name, "measure": "trust", "grade": "low", "factor": 0.5} for name in "ba"]
    rules = [{"class": name, "band": "low", "weight": 1} for name in "ba"]
    own = {
        "bands": {"measure": "q", "names": ["low", "high"], "thresholds": [0.5]},
        "measures": {"trust": {"grades": ["low"]}},
    }
    found = policy_of(**own, floors=floors, attenuate=less, rules=rules).to_mapping()
    for name in ("floors", "attenuate", "rules"):
        assert [one["class"] for one in found[name]] == [["a"], ["b"]]
    assert [one["band"] for one in found["rules"]] == [["low"]] * 2
    assert "band" not in policy_of(rules=[{"class": "a", "weight": 1}]).to_mapping()["rules"][0]
    opened = load_policy(DEEP.replace("class: a,", "class: c,")).to_mapping()["depth"]["open"]
    assert [one["class"] for one in opened] == [["b"], ["c"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEAD}rules:\n  - {{class: a, weight: 1}}\n  - {{class: a, weight: 1.5}}\n", "line 5, policy: rule 2 amp"),
        (f"{HEAD}phases:\n  - {{name: a}}\n  - {{name: b}}\nrules: []\n", "line 3, policy: phase 'a' needs"),
        (f"{HEAD}rules:\n  - {{class: a, weight: 1}}\n  - {{class: a}}\n", "line 5, rules.2: a rule gives either"),
        (
            f"{HEAD}rules:\n  - {{class: a,\n     wieght: 1}}\n",
            "line 5, rules.1.wieght: there's no such field; did you",
        ),
        (f"{HEAD}rules: []\nzzzzzzzz: 1\n", "line 4, zzzzzzzz: there's no such field"),
        ("version: 3\ntaxonomy: t\nrules: []\n", "line 1, version: Input should be less than or equal to 1, not 3"),
        ("version: 0\ntaxonomy: t\nrules: []\n", "line 1, version: Input should be greater than or equal to 1, not 0"),
        ("taxonomy: t\nrules: []\n", "line 1, version: Field required"),
        (f"{HEAD}rules: []\ntaxonomie: t\n", "did you mean taxonomy?"),
    ],
)
def test_a_problem_names_its_line_and_its_place(text: str, said: str) -> None:
    assert said in refusal(text)
    assert refusal(text).startswith("The policy isn't valid:\n  - line ")


def test_a_far_name_is_no_slip_of_the_pen() -> None:
    assert refusal(f"{HEAD}rules: []\nzzzzzzzz: 1\n").endswith("there's no such field")


def test_every_phase_but_the_last_ends_and_each_name_is_told_once() -> None:
    phases = [{"name": "b"}, {"name": "b"}, {"name": "a", "until": "1ba"}, {"name": "a", "until": "2ba"}]
    with pytest.raises(ValueError, match="phase") as caught:
        policy_of(phases=phases)
    (said,) = (line for line in str(caught.value).splitlines() if "given twice" in line)
    parts = [part.strip().removeprefix("Value error, ").partition(" [type")[0] for part in said.split(";")]
    assert parts == [
        "phase 'a' is given twice",
        "phase 'b' is given twice",
        "phase 'b' needs `until`",
        "phase 'b' needs `until`",
        "phase 'a' is the last one and lasts to the end of the run: leave out `until`",
    ]
    assert policy_of(phases=[{"name": "a"}]).phase_names == ("a",)


def test_weights_above_1_are_amplifications_and_1_is_none() -> None:
    assert policy_of(rules=[{"class": "a", "weight": 1.0}]).rules[0].weight == 1
    with pytest.raises(ValueError, match=r"rule 1 amplifies \(weight 1\.001\)"):
        policy_of(rules=[{"class": "a", "weight": 1.001}])
    assert policy_of(rules=[{"class": "a", "weight": 3}], allow={"amplify": True}).rules[0].weight == 3


def test_a_text_may_be_as_long_as_the_limit_and_no_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"{HEAD}rules: []\n"
    monkeypatch.setattr(policy_file, "_MAX_CHARACTERS", len(text))
    assert load_policy(text).rules == ()
    assert refusal(text + "#") == f"The policy has {len(text) + 1} characters; policies have at most {len(text)}."
    path = tmp_path / "long.yml"
    path.write_text(text + "#")
    for source in (path, str(path)):
        with pytest.raises(PolicyError, match=r"^Policy '.*long\.yml' has "):
            load_policy(source)


def test_what_is_no_mapping_is_told_with_its_line() -> None:
    assert refusal("\n\n[1, 2]") == ("The policy is [1, 2] (line 3), not a mapping with version, taxonomy and rules.")
    assert refusal("a name").endswith("A file's name ends in .yaml or .yml, or is a Path.")
    assert refusal("x: 1\n.yaml").startswith("The policy can't be read: ")
