"""Policy files: YAML's traps, the schema's refusals, digests."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.routing import policy_file
from cosmati.routing.policy_file import PolicyFile, load_policy

HEAD = "version: 1\ntaxonomy: t\n"


def documented_example() -> str:
    text = policy_file.__doc__ or ""
    return dedent(text[text.index("    version") : text.index("*Rules.*")])


def rule(text: str) -> str:
    return f"{HEAD}rules: [{{{text}}}]"


def refusal(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(text)
    return str(caught.value)


def test_the_documented_example_loads() -> None:
    policy = load_policy(documented_example())
    assert policy.phase_names == ("warm", "main")
    assert set(policy.regions) == {"embedding", "near_input", "near_output", "head"}
    assert policy.rules[1].region == ("embedding", "near_input")
    assert policy.rules[5].decision == "defer"


def test_a_path_is_a_file_and_a_string_its_name_or_the_text(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(documented_example(), encoding="utf-8")
    assert load_policy(file) == load_policy(str(file)) == load_policy(documented_example())
    assert "A file's name ends in .yaml or .yml" in refusal("policy.txt")
    with pytest.raises(PolicyError, match=r"missing\.yaml.*can't be read"):
        load_policy(tmp_path / "missing.yaml")
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PolicyError, match="can't be read"):
        load_policy(file)


@pytest.mark.parametrize(
    "word", ["no", "on", "yes", "off", "y", "True", "NO", "2024-01-01", "1:30", "0x1F", "0o7", "1_0", ".nan"]
)
def test_words_stay_strings(word: str) -> None:
    policy = load_policy(f"{HEAD}rules: [{{class: {word}, region: {word}, weight: 1}}]")
    assert policy.rules[0].classes == policy.rules[0].region == (word,)


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000.0), ("1", 1.0), ("0.5", 0.5), ("5E-1", 0.5), ("0", 0.0)])
def test_numbers_are_json_numbers(text: str, value: float) -> None:
    policy = load_policy(f"{rule(f'class: a, weight: {text}')}\nallow: {{amplify: true}}")
    assert policy.rules[0].weight == value


@pytest.mark.parametrize(
    "text", ["yes", "true", "'1'", ".5", "1.", "+1", "01", "1_0", "null", ".inf", ".nan", "NaN", "[1]"]
)
def test_weights_that_are_no_numbers_are_refused(text: str) -> None:
    assert "rules.1" in refusal(rule(f"class: a, weight: {text}"))


@pytest.mark.parametrize(
    ("text", "why"), [("-1", "greater than or equal to 0"), ("-1e-9", "greater"), ("1e999", "finite")]
)
def test_weights_out_of_range_are_refused(text: str, why: str) -> None:
    assert why in refusal(rule(f"class: a, weight: {text}"))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -0.5])
def test_weights_out_of_range_are_refused_from_python(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        PolicyFile.model_validate({"version": 1, "taxonomy": "t", "rules": [{"class": "a", "weight": weight}]})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\na: 2", "key 'a' is given twice"),
        ("rules: [{class: a, class: b}]", "key 'class' is given twice"),
        ("x: &a 1\ny: *a", "anchors and aliases"),
        ("x: &a [1]", "anchors and aliases"),
        ("x: !!str 1", "tags aren't allowed"),
        ("!!python/object/apply:os.getcwd []", "tags aren't allowed"),
        ("1: 2", "key 1 isn't a string"),
        ("? [a]\n: b", "isn't a string"),
        ("a: 1\n---\na: 1", "single document"),
        ("[" * 3000, "nested deeper than 20"),
        ("a: " + "1" * 5000, "can't be read"),
        ("a: \x00", "can't be read"),
        ("a: [", "can't be read"),
        ("", "is None"),
        ("- a", "not a mapping"),
        ("a" * 1_000_001, "at most 1000000"),
    ],
)
def test_yaml_that_is_refused(text: str, why: str) -> None:
    assert why in refusal(text)


def test_merge_keys_are_an_unknown_field() -> None:
    assert "<<: there's no such field" in refusal(f"<<: {{version: 1}}\n{HEAD}rules: []")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("taxonomy: t\nrules: []", "version: Field required"),
        ("version: 2\ntaxonomy: t\nrules: []", "version: Input should be less"),
        ("version: true\ntaxonomy: t\nrules: []", "version: Input should be a valid integer"),
        ("version: 1\ntaxonomy: 1\nrules: []", "taxonomy: Input should be a valid string"),
        (HEAD, "rules: Field required"),
        (f"{HEAD}rules:", "rules: Input should be a valid tuple, not None"),
        (f"{HEAD}rules: []\ndefault: admit", "default: Input should be 'reject'"),
        (
            f"{HEAD}rules: []\nallow: {{amplify: yes}}",
            "allow.amplify: Input should be a valid boolean, not 'yes'",
        ),
        (rule("class: a, wieght: 1"), "rules.1.wieght: there's no such field; did you mean weight?"),
        (rule("class: a"), "either a weight or a decision"),
        (rule("class: a, weight: 1, decision: reject"), "either a weight or a decision"),
        (rule("class: a, decision: admit"), "'reject' or 'defer'"),
        (rule("class: a, region: r, decision: defer"), "holds for all regions"),
        (rule("class: [], weight: 1"), "rules.1.class: Value should have at least 1 item"),
        (rule("class: 2024, weight: 1"), "quote what reads as a number"),
        (rule("class: a, region: null, weight: 1"), "rules.1.region: give a name"),
        (rule("weight: 1"), "rules.1.class: Field required"),
        (rule("class: a, weight: 1.5"), "rule 1 amplifies (weight 1.5), and allow.amplify is false"),
        (f"{HEAD}rules: []\nregions: {{a&b: {{tag: head}}}}", "String should match pattern"),
        (f"{HEAD}rules: []\nregions: {{a: {{tag: foot}}}}", "'embedding', 'head' or 'norm'"),
        (f"{HEAD}rules: []\nregions: {{a: {{exclude: x}}}}", "needs params, blocks or tag"),
        (
            f"{HEAD}rules: []\nregions: {{a: {{blocks: {{container: x, from: -1}}}}}}",
            "greater than or equal to 0",
        ),
        (
            f"{HEAD}rules: []\nregions: {{a: {{blocks: {{container: x, to: 0}}}}}}",
            "greater than or equal to 1",
        ),
        (f"{HEAD}rules: []\nphases: [{{name: a}}, {{name: b}}]", "phase 'a' needs `until`"),
        (f"{HEAD}rules: []\nphases: [{{name: a, until: 1ba}}]", "leave out `until`"),
        (f"{HEAD}rules: []\nphases: [{{name: a, until: 0.3}}, {{name: b}}]", "until: 0.3 has no unit: write 0.3dur"),
        (f"{HEAD}rules: []\nphases: [{{name: a, until: 300}}, {{name: b}}]", "until: 300 has no unit"),
        (f"{HEAD}rules: []\nphases: [{{name: a, until: true}}, {{name: b}}]", "until: Input should be a valid string"),
        (f"{HEAD}rules: []\nphases: [{{name: a, until: 1ba}}, {{name: a}}]", "phase 'a' is given twice"),
    ],
)
def test_schema_refusals(text: str, why: str) -> None:
    assert why in refusal(text)


def test_all_problems_are_listed() -> None:
    text = refusal(f"{HEAD}rules: [{{class: a, weight: -1}}, {{class: b, weight: x}}]\nextra: 1")
    assert text.count("\n  - ") == 3


def test_digest_is_sha256_of_canonical_json() -> None:
    text = """
        # a comment
        taxonomy: t
        version: 1
        rules:
          - {class: z, weight: 1.0}
          - {class: [y, x, y], phase: late, weight: 5e-1}
          - {class: w, decision: reject}
        phases: [{name: early, until: 0.5dur}, {name: late}]
        regions: {r: {blocks: {container: h, from: 1}, tag: head}}
    """
    canonical = (
        '{"allow":{"amplify":false,"tied":false},"default":"reject",'
        '"phases":[{"name":"early","until":"0.5dur"},{"name":"late"}],'
        '"regions":{"r":{"blocks":{"container":"h","from":1},"exclude":[],"params":[],"tag":["head"]}},'
        '"rules":[{"class":["w"],"decision":"reject","phase":["*"],"region":["*"]},'
        '{"class":["x","y"],"phase":["late"],"region":["*"],"weight":0.5},'
        '{"class":["z"],"phase":["*"],"region":["*"],"weight":1}],'
        '"taxonomy":"t","version":1}'
    )
    assert load_policy(text).digest == hashlib.sha256(canonical.encode()).digest()


def test_example_digest_is_golden() -> None:
    example = documented_example()
    assert load_policy(example).digest.hex() == "fb71bb8c8e687e6c50b555d1f13b0d52cf7bdf703c07139632edd2ba7141e91b"
    without = re.sub(r"grace:.*\n|starvation:.*\n", "", example)
    assert load_policy(without).digest.hex() == "31e630001fd9ce66ce443daefcedbbed876560ac674f796e86c226fd2bb2bac1"


@pytest.mark.long
@given(st.permutations(range(6)))
def test_order_of_rules_means_nothing(order: list[int]) -> None:
    document = yaml.safe_load(documented_example())
    again = document | {"rules": [document["rules"][i] for i in order]}
    assert PolicyFile.model_validate(again).digest == PolicyFile.model_validate(document).digest


def test_a_changed_weight_changes_the_digest() -> None:
    one, other = (load_policy(rule(f"class: a, weight: {weight}")) for weight in ("0.5", "0.25"))
    assert one.digest != other.digest


def test_mapping_round_trip() -> None:
    policy = load_policy(documented_example())
    assert PolicyFile.model_validate(policy.to_mapping()).digest == policy.digest


@given(st.text(max_size=60))
def test_any_text_loads_or_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        load_policy(text)


def test_policy_files_need_no_torch() -> None:
    code = "import sys, cosmati.routing.policy_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_amplified_or_tied_unless_it_is_allowed() -> None:
    policy = load_policy(rule("class: a, weight: 1"))
    assert (policy.allow.amplify, policy.allow.tied) == (False, False)
    assert load_policy(f"{rule('class: a, weight: 1')}\nallow: {{tied: true}}").allow.tied


def test_a_field_that_belongs_elsewhere_isnt_proposed_again() -> None:
    """A taxonomy given as a policy: `name` is a field of phases."""
    with pytest.raises(PolicyError, match=r"name: there's no such field(\n|$)"):
        load_policy("version: 1\ntaxonomy: t\nrules: []\nname: t\n")
