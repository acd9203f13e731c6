"""Thousands of mutated policy files: each compiles to a total table, or is refused with a line number.

And none admits a row that its original refused without saying so in `diff`.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from torch import nn

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy, partition_by
from cosmati.routing.policy_analysis import diff
from cosmati.routing.policy_file import load_policy

pytestmark = pytest.mark.long

NUM_STEPS = 10
TAXONOMY = Taxonomy("t", "1", (("no", ""), ("open/copyleft", ""), ("open/psf", ""), ("public-domain", "")))
ORIGINALS = (
    """version: 1
taxonomy: t
# Which parameters a region takes.
regions:
  embedding:   {tag: embedding}
  near_input:  {blocks: {container: blocks, from: 0, to: 2}}
  near_output:
    blocks: {container: blocks, from: 2}
    params: ["ln_f.*"]
  head: {tag: head}
phases:
  - {name: warm, until: 0.2dur}
  - {name: middle, until: 6ba}
  - {name: main}
rules:
  - {class: "open/**", weight: 1}
  - {class: open/copyleft, region: [embedding, near_input], weight: 0}
  - {class: open/copyleft, region: [embedding, near_input], phase: warm, weight: 0}
  - {class: open/copyleft, phase: warm, weight: 0.5}
  - {class: public-domain, weight: 1}
  - {class: public-domain, phase: warm, decision: defer}
  - class: no
    decision: reject
default: reject
allow: {amplify: false, tied: false}
""",
    """version: 1
taxonomy: t
rules:
- class: ["open/psf", public-domain]
  weight: 2.5
- class: "**"
  weight: 0.25
default: reject
allow:
  amplify: true
  tied: true
""",
    """version: 1
taxonomy: t
bands:
  measure: readability
  names: [low, middle, high]
  thresholds: [0.3, 0.7]
floors:
  - {class: open/psf, band: middle}
phases: [{name: warm, until: 3ba}, {name: main}]
rules:
  - {class: "open/**", weight: 0.5}
  - {class: "open/**", band: high, weight: 1}
  - {class: open/copyleft, band: low, decision: reject}
  - {class: no, band: [low, middle], phase: warm, decision: defer}
  - {class: no, weight: 0.75}
""",
    """version: 1
taxonomy: t
phases:
  - {name: warm, until: 3ba}
  - {name: middle, until: 6ba}
  - {name: main}
bands: {measure: readability, names: [low, high], thresholds: [0.3]}
measures:
  evidence: {grades: [report, trial, review]}
  trust: {grades: [poor, good], thresholds: [0.5]}
attenuate:
  - {class: "open/**", measure: evidence, grade: [report, trial], factor: 0.5}
  - {class: "**", measure: trust, grade: poor, phase: main, factor: 0.25}
  - {class: no, measure: trust, grade: poor, region: rest, factor: 0}
depth:
  container: blocks
  ranges: [0-0, 1-1, 2-]
  open:
    - {phase: warm, blocks: 2-}
    - {class: open/psf, phase: middle, blocks: [1-1, 2-]}
rules:
  - {class: "open/**", weight: 1}
  - {class: open/psf, region: blocks.1-1, weight: 0.5}
  - {class: no, band: high, phase: [middle, main], weight: 1}
  - {class: no, phase: warm, decision: defer}
  - {class: no, weight: 0.5}
grace: {expiry: {finish: 2ba}, revocation: reject}
starvation: stop
""",
)
JOINT = ("no&public-domain", "open/copyleft&open/psf")
WORDS = (
    "open/psf open/** ** no yes true null 0 1 0.5 2 -1 1e9 .inf 0.3 3ba 0.2dur 0.9dur 2ep warm main early head low "
    "embedding near_input * reject defer admit gate class weight region phase decision until name tag params band "
    "rules default allow amplify tied blocks container from to exclude version taxonomy bands floors thresholds "
    "measures measure grades grade attenuate factor evidence trust report trial review poor good depth open ranges "
    "0-0 1-1 2- 0- 1-2 rest blocks.2- grace expiry finish revocation licence starvation alarm stop "
    "names high \u043epen/psf open\u2215psf &a *a !!str 1:30 2024-01-01 [] {}"
)
SIGNS = "{}[]:,-#&*!|>'\"%@` \t\u00a0\u200b\u0430\x07\ufeff"


class Model(nn.Module):
    """Something of each tag, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.ln_f = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)


MODEL = Model()


def compiled(text: str) -> CompiledPolicy:
    policy = load_policy(text)
    regions = partition_by(policy, MODEL)
    return compile_policy(policy, taxonomy=TAXONOMY, regions=regions, num_steps=NUM_STEPS, joint=JOINT)


def _lines(change: Callable[[random.Random, list[str]], object]) -> Callable[[random.Random, str], str]:
    def changed(draw: random.Random, text: str) -> str:
        lines = text.splitlines(keepends=True)
        change(draw, lines)
        return "".join(lines)

    return changed


def _swap(draw: random.Random, lines: list[str]) -> None:
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]


def _word(draw: random.Random, text: str) -> str:
    found = draw.choice(list(re.finditer(r"[\w./*-]+", text)))
    return text[: found.start()] + draw.choice(WORDS.split()) + text[found.end() :]


def _number(draw: random.Random, text: str) -> str:
    found = draw.choice(list(re.finditer(r"[0-9.]+", text)))
    return (
        text[: found.start()] + draw.choice(("0", "1", "0.1", "0.7", "5", "-1", "1.0", "9" * 30)) + text[found.end() :]
    )


def _named(pattern: str, *others: str) -> Callable[[random.Random, str], str]:
    """Return a mutation that puts something of the same kind in a part's place."""

    def changed(draw: random.Random, text: str) -> str:
        found = draw.choice(list(re.finditer(pattern, text)) or [None])
        return text if found is None else text[: found.start()] + draw.choice(others) + text[found.end() :]

    return changed


def _sign(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text))
    return text[:at] + draw.choice(SIGNS) + text[at + draw.randrange(2) :]


def _indent(draw: random.Random, lines: list[str]) -> None:
    at = draw.randrange(len(lines))
    lines[at] = draw.choice((f"  {lines[at]}", lines[at].lstrip()))


def _rule(draw: random.Random, lines: list[str]) -> None:
    at = next((i + 1 for i, line in enumerate(lines[:-1]) if line.startswith("rules")), 0)
    indent = re.match(" *", lines[at])
    name, weight = draw.choice((*TAXONOMY.classes, "open/**", "**")), draw.choice(("0", "0.5", "1"))
    if any(line.startswith("attenuate") for line in lines) and draw.randrange(2):
        at = next(i + 1 for i, line in enumerate(lines) if line.startswith("attenuate"))
        grade = draw.choice(("evidence, grade: report", "trust, grade: [poor, good]", "trust, grade: poor"))
        lines.insert(at, f"  - {{class: '{name}', measure: {grade}, factor: {weight}}}\n")
        return
    region = draw.choice(("", "", ", region: head", ", phase: warm", ", region: '*'"))
    lines.insert(at, f"{indent[0] if indent else ''}- {{class: '{name}', weight: {weight}{region}}}\n")


MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (
    _lines(lambda draw, lines: lines.pop(draw.randrange(len(lines)))),
    _lines(lambda draw, lines: lines.insert(draw.randrange(len(lines)), draw.choice(lines))),
    _lines(_swap),
    _lines(_indent),
    _lines(_rule),
    *2 * (_named(r"(?<=weight: )[0-9.]+", "0", "0.1", "0.75", "1"),),
    _named(r"open/copyleft|public-domain|open/psf|(?<=class: )no", *TAXONOMY.classes),
    _named(r"(?<=phase: )\w+", "warm", "middle", "main"),
    _named(r"(?<=until: )\w+", "1ba", "3ba", "0.5dur", "0.61dur"),
    _named(r"(?<=to: )2|(?<=from: )2", "1", "2", "3"),
    *2 * (_named(r"(?<=factor: )[0-9.]+", "0", "0.1", "0.75", "1", "1.5"),),
    _named(r"(?<=grade: )\w+|(?<=grades: \[)\w+", "report", "trial", "poor", "good"),
    _named(r"(?<=blocks: )2-|(?<=ranges: \[)0-0, 1-1", "2-", "1-1", "0-1", "0-0, 1-1"),
    _word,
    _number,
    _sign,
    lambda draw, text: text[: draw.randrange(len(text))],
)


def mutated(draw: random.Random, text: str) -> str:
    for _ in range(draw.choice((1, 1, 1, 1, 2, 4))):
        text = draw.choice(MUTATIONS)(draw, text) if len(text) > 100 else text
    return text


def is_total(table: CompiledPolicy) -> bool:
    """Every class and step has a decision, and a weight for each of the parameters, that go with each other."""
    parameters = {name for name, _ in MODEL.named_parameters()}
    if {*table.partition.region_of} != parameters or table.classes != (*TAXONOMY.classes, *JOINT):
        return False
    if len(table.weight) != len(table.decision) or len(table.weight) != len(table.classes) * len(table.kinds):
        return False
    for row, step in product(range(len(table.weight)), range(NUM_STEPS)):
        phase = table.phase_at(step)
        route, decision = table.weight[row][phase], table.decision[row][phase]
        offered = decision in {"admit", "gate"}
        if len(route) != len(table.regions) or not all(math.isfinite(one) and one >= 0 for one in route):
            return False
        if any(route) != offered or (decision == "gate") != any(0 < one < 1 for one in route):
            return False
    return True


Place = tuple[str, int, tuple[str, str], int, str]
"""Class, number of the band, grades of evidence and trust, step, parameter."""
NUM_BANDS = 4
GRADES = tuple(product(("", "report", "trial", "review"), ("", "poor", "good")))


def kind_of(table: CompiledPolicy) -> dict[tuple[int, tuple[str, str]], int | None]:
    """Return the kind of each band and grades by the table's own names of its kinds; None for what it doesn't know."""
    bands = list(dict.fromkeys(kind.band for kind in table.kinds))

    def found(band: int, grades: tuple[str, str]) -> int | None:
        told = dict(zip(("evidence", "trust"), grades, strict=True))
        for number, kind in enumerate(table.kinds):
            is_band = bands == [""] or bands.index(kind.band) == band
            if is_band and all(told.get(name, "") == grade for name, grade in kind.grades):
                return number
        return None

    return {(band, grades): found(band, grades) for band, grades in product(range(NUM_BANDS), GRADES)}


def starts(*tables: CompiledPolicy) -> list[int]:
    """Return the steps at which some phase begins: from one to the next, nothing changes."""
    return sorted({phase.start_step for table in tables for phase in table.phases})


def rows_of(table: CompiledPolicy, steps: list[int]) -> dict[Place, float]:
    """Return the weight of each class, band, grades, step and parameter, one by one."""
    kinds, num = kind_of(table), len(table.kinds)
    return {
        (name, band, grades, step, parameter): (
            0.0 if kind is None else table.weight[c * num + kind][table.phase_at(step)][region]
        )
        for c, name in enumerate(table.classes)
        for (band, grades), kind in kinds.items()
        for step in steps
        for parameter, region in table.partition.region_of.items()
    }


def told(old: CompiledPolicy, new: CompiledPolicy, steps: list[int]) -> set[Place]:
    """Return the class, band, grades, step and parameter of whatever `diff` says is loosened."""
    return {
        (one.class_path, band, grades, step, parameter)
        for one in diff(old, new)
        if one.direction == "loosens" and one.new_region is not None
        for band in ([one.band_number] if one.band_number is not None else range(NUM_BANDS))
        for grades in GRADES
        if are_meant(dict(one.grades), grades)
        for step in steps
        if one.start_step <= step < one.end_step
        for parameter in new.partition.parameters[new.regions.index(one.new_region)]
        if old.partition.region_of[parameter] == old.regions.index(str(one.old_region))
    }


def are_meant(said: dict[str, str], grades: tuple[str, str]) -> bool:
    """Return whether rows of some grades, of which nothing else was measured, are those of a change."""
    own = dict(zip(("evidence", "trust"), grades, strict=True))
    return all(own.get(measure, "") == grade for measure, grade in said.items())


def check(number: int, seed: int) -> Counter[str]:
    draw, counts = random.Random(seed), Counter[str]()
    originals = [(text, compiled(text)) for text in ORIGINALS]
    for _ in range(number):
        text, before = draw.choice(originals)
        mutant = mutated(draw, text)
        try:
            after = compiled(mutant)
        except PolicyError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            line = re.search(r"\bline ([0-9]+)", refused)
            assert line, f"{refused}\n---\n{mutant}"
            assert int(line[1]) <= mutant.count("\n") + 2, f"{refused}\n---\n{mutant}"
            counts["refused"] += 1
            continue
        assert is_total(after), mutant
        steps = starts(before, after)
        was, now = rows_of(before, steps), rows_of(after, steps)
        more = {cell for cell in now if now[cell] > was[cell]}
        assert more == {cell for cell in told(before, after, steps) if now[cell] != was[cell]}, mutant
        counts["more" if more else "not more"] += 1
    return counts


def test_hundreds_of_mutants_compile_or_are_refused_with_a_line() -> None:
    counts = check(150, seed=1)
    assert min(counts["refused"], counts["more"], counts["not more"]) >= 10, counts


@pytest.mark.slow
def test_thousands_of_mutants_compile_or_are_refused_with_a_line() -> None:
    counts = check(5000, seed=2)
    assert min(counts["refused"], counts["more"], counts["not more"]) >= 200, counts
