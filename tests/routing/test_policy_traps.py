"""What a policy file or a run under one gets wrong without meaning it: each is refused by name, never guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cosmati import InMemory, RunConfig, Trainer, load_policy
from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Classification
from cosmati.errors import PlanError, PolicyError
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy, partition_by

HEAD = "version: 1\ntaxonomy: t\n"
TAXONOMY = Taxonomy("t", "1", (("no", ""), ("open/psf", ""), ("yes", "")))
REGIONS = "regions:\n  near: {params: ['0.*']}\n  far: {params: ['2.*']}\n"


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def compiled(text: str) -> CompiledPolicy:
    policy = load_policy(HEAD + text)
    return compile_policy(policy, taxonomy=TAXONOMY, regions=partition_by(policy, model()), num_steps=10)


def test_words_that_yaml_turns_into_booleans_are_classes() -> None:
    table = compiled("rules:\n- {class: no, weight: 1}\n- {class: yes, weight: 0.5}\n")
    assert dict(zip(table.classes, table.weight, strict=True)) == {
        "no": ((1.0,),),
        "open/psf": ((0.0,),),
        "yes": ((0.5,),),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rules:\n- class: no\n  weight: 1\n  weight: 0\n", "line 6: key 'weight' is given twice"),
        ("rules:\n- &free {class: no, weight: 1}\n- *free\n", "line 4: anchors and aliases aren't allowed"),
        ("rules:\n- !!map {class: no, weight: 1}\n", "line 4: tags aren't allowed"),
        ("rules:\n- {class: false, weight: 1}\n", "line 4, rules.1.class: give a name"),
        ("rules:\n- {class: оpen/psf, weight: 1}\n", "U+043E CYRILLIC SMALL LETTER O"),  # noqa: RUF001
        ("rules:\n- {class: open\u2215psf, weight: 1}\n", "U+2215 DIVISION SLASH"),
        ("rules:\n- {class: open/psf\u200b, weight: 1}\n", "U+200B ZERO WIDTH SPACE"),
        ("rules:\n- {сlass: no, weight: 1}\n", "U+0441 CYRILLIC SMALL LETTER ES); did you mean class"),  # noqa: RUF001
        (f"{REGIONS}rules:\n- {{class: no, region: nеar, weight: 1}}\n", "CYRILLIC SMALL LETTER IE"),  # noqa: RUF001
        ("rules:\n- {class: opne/**, weight: 1}\n", "rule 1 (line 4): no class 'opne/**'"),
        (REGIONS.replace("'2.*'", "'2.*', '3.*'") + "rules: []", "region 'far' (line 5): params '3.*' matches nothing"),
        (
            REGIONS.replace("['2.*']", "'*', exclude: ['0.*', 'O.*']") + "rules: []",
            "region 'far' (line 5): exclude 'O.*' matches nothing",
        ),
        (REGIONS.replace("['2.*']", "'2.*', tag: norm") + "rules: []", "tag norm matches nothing"),
        (REGIONS.replace("'2.*'", "'2.w*'") + "rules: []", "The regions (line 3) don't partition"),
        ("phases: [{name: a, until: 3ba}, {name: b}]\nrules: [{class: no, phase: c, weight: 1}]", "no phase 'c'"),
        ("phases:\n- {name: a, until: 30ba}\n- {name: b}\nrules: []", "phase a (line 4) would go from step 0 to 30"),
        ("rules:\n- {class: no, weight: 1}\n- {class: no, weight: 0.5}\n", "(line 4) and rule 2"),
        ("rules:\n- {class: no, weight: 0}\n", "with weight 0 for every region (line 4), and would run"),
        ("rules:\n- {class: no, weight: 1}\n- {class: yes, weight: 1.5}", "line 5, policy: rule 2 amplifies"),
        (
            f"regions: {{a: {{blocks: {{container: b, to: {2**53}}}}}}}\nrules: []",
            "less than or equal to 9007199254740991",
        ),
    ],
)
def test_slips_in_a_file_are_told_with_their_line(text: str, why: str) -> None:
    with pytest.raises(PolicyError) as caught:
        compiled(text)
    assert why in str(caught.value)
    assert "line " in str(caught.value)


MEASURED = "rules: [{class: no, weight: 1}]\nmeasures: {m: {grades: [no, yes]}}\n"
DEEP = "rules: [{class: no, weight: 1}]\nphases: [{name: a, until: 2ba}, {name: b}]\n"
BLOCKS = "depth: {container: blocks, ranges: [0-0, 1-], open: [%s]}\n"


def test_words_that_yaml_turns_into_booleans_are_grades_and_numbers_are_none() -> None:
    table = compiled(MEASURED + "attenuate: [{class: no, measure: m, grade: no, factor: 0.5}]")
    assert [table.route(0, 0, kind) for kind in range(3)] == [(0.5,), (0.5,), (1.0,)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MEASURED + "attenuate: [{class: no, measure: m, grade: no, factor: 0.5, factor: 1}]", "line 5: key 'factor'"),
        (MEASURED.replace("}}", "}, m: {grades: [a]}}"), "line 4: key 'm' is given twice"),
        (MEASURED + "attenuate: &a [{class: no, measure: m, grade: no, factor: 0.5}]", "line 5: anchors and aliases"),
        (
            MEASURED + "attenuate: [{class: no, measure: m, grade: false, factor: 0.5}]",
            "line 5, attenuate.1.grade: give",
        ),
        (MEASURED + "attenuate: [{class: no, measure: m, grade: 1, factor: 0.5}]", "quote what reads as a number"),
        (MEASURED + "attenuate: [{class: no, measure: m, grade: no, factor: '0.5'}]", "line 5, attenuate.1.factor"),
        ("rules: []\nmeasures: {m: {grades: [lоw]}}\n", "U+043E CYRILLIC SMALL LETTER O"),  # noqa: RUF001
        (MEASURED + "attenuate: [{class: no, measure: m, grade: no, factor: 1e-1}]\nfloor: []", "did you mean floors"),
        (MEASURED.replace("[no, yes]", "[no, false]"), "line 4, measures.m.grades.2"),
        (MEASURED.replace("[no, yes]", "[1, 2]"), "line 4, measures.m.grades.1"),
        (MEASURED.replace("[no, yes]", "[no, y\u0435s]"), "line 4, measures.m.grades.2"),
        (MEASURED.replace("{m:", "{\u043c:"), "line 4, measures"),
        (MEASURED + "attenuate: [{class: n\u043e, measure: m, grade: no, factor: 1}]", "CYRILLIC SMALL LETTER O"),
        (MEASURED + "attenuate: [{class: no, measure: m, grade: n\u043e, factor: 1}]", "CYRILLIC SMALL LETTER O"),
        (MEASURED + "attenuate: {class: no, measure: m, grade: no, factor: 1}", "line 5, attenuate"),
        ("rules: [{class: no&yes, weight: 1}]", "line 3): no class 'no&yes'"),
        (
            DEEP + BLOCKS % "{phase: a, blocks: 1-}, {phase: a, phase: b, blocks: 1-}",
            "line 5: key 'phase' is given twice",
        ),
        (DEEP + BLOCKS % "{phase: a, blocks: 1}", "quote what reads as a number"),
        (DEEP + BLOCKS.replace("0-0", "0\u20110") % "{phase: a, blocks: 1-}", "is no range of blocks"),
        (DEEP + BLOCKS % "{phase: a, blocks: 1-, weight: 1}", "there's no such field"),
        (DEEP + BLOCKS.replace("0-0, 1-", "true, 1-") % "{phase: a, blocks: 1-}", "line 5, depth.ranges.1"),
    ],
)
def test_slips_in_the_newer_words_are_told_with_their_line(text: str, why: str) -> None:
    with pytest.raises(PolicyError) as caught:
        compiled(text)
    assert why in str(caught.value)
    assert "line " in str(caught.value)


def test_lines_and_comments_make_no_other_policy() -> None:
    one = load_policy(f"{HEAD}rules: [{{class: no, weight: 1}}]")
    other = load_policy(f"# A comment.\n\n{HEAD}rules:\n- class: no\n  weight: 1.0")
    assert one == other
    assert one.canonical == other.canonical
    assert one != load_policy(f"{HEAD}rules: [{{class: no, weight: 0.5}}]")
    two, more = "{class: no, weight: 1}", "{class: yes, weight: 1}"
    assert load_policy(f"{HEAD}rules: [{two}, {more}]") == load_policy(f"{HEAD}rules: [{more}, {two}]")
    assert one != "a policy"


ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def trainer(net: nn.Module) -> Trainer:
    text = f"{HEAD}{REGIONS}rules:\n- {{class: no, weight: 1}}\n- {{class: no, region: near, weight: 0}}\n"
    data = InMemory(ROWS, 16, torch.zeros(16, dtype=torch.long), ("no",))
    config = RunConfig(budget="4ba", num_threads=1, num_microbatches=2)
    given = {"optimizers": SGD(lr=0.1), "policy": load_policy(text), "taxonomy": TAXONOMY, "config": config}
    return Trainer(net, Classification(3), data, **given)  # type: ignore[arg-type]


def batch() -> Batch:
    return Batch(ROWS, Lineage(torch.arange(16), torch.zeros(16, dtype=torch.long)))


def _grow(net: nn.Sequential) -> None:
    net.append(nn.Linear(3, 3))


def _exchange(net: nn.Sequential) -> None:
    net[0] = nn.Linear(4, 8)


@pytest.mark.long
@pytest.mark.parametrize("surgery", [_grow, _exchange])
def test_parameters_that_appear_after_the_plan_are_refused(surgery: Callable[[nn.Sequential], None]) -> None:
    net = model()
    run = trainer(net)
    run.step(batch())
    surgery(net)
    with pytest.raises(PlanError, match="isn't what was planned"):
        run.step(batch())


def test_rows_without_a_class_are_refused() -> None:
    with pytest.raises(PlanError, match=r"have no lineage.*no class 'unknown'"), trainer(model()) as run:
        run.step(ROWS)
