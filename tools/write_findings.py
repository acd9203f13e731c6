"""Write what the committed studies say into docs/findings.md: `python tools/write_findings.py`.

Each study's block lies between two marks, and is read off its record by the rules of `study report`. With `--check`
nothing is written, and an error is a block that the record doesn't bear out, and a claim by hand: outside of the
blocks, a paragraph that has the name of a study's arm and one of `CLAIM_WORDS`. What was claimed once may stand in a
section with "withdrawn" in its heading, with the reason.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cosmati.explorer.wording import (
    AXIS_NAMES,
    claims_of,
    estimate_text,
    interval_text,
    noise_sentences,
    number,
    prediction_rows,
    ratio_interval_text,
    ratio_text,
)
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import (
    SCREENING_LEVEL,
    Comparison,
    NotReached,
    SpeedUp,
    comparisons,
    difference_at_equal,
)
from cosmati.study.composition import Together, joint_effects
from cosmati.study.curves import Axis
from cosmati.study.noise import compared_arms
from cosmati.study.statistics import Estimate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "findings.md"
NUM_SENTENCES = 4
"""Of so many arms each has a sentence."""
NO_FIGURE = "—"
"""Of a claim whose difference isn't shown."""
CLAIM_WORDS = ("shown", "faster", "slower", "as fast", "better", "worse")
WITHDRAWN = "withdrawn"


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a study's block lies."""
    return f"<!-- study {name}: written by tools/write_findings.py -->", f"<!-- end of study {name} -->"


def read_studies(results: Path) -> dict[str, StudyRecord]:
    """Return the committed studies by folder: `evidence/language`."""
    paths = sorted(results.glob("*/*/study.json"))
    return {str(path.parent.relative_to(results)): StudyRecord.from_json(path.read_text("utf-8")) for path in paths}


def block(name: str, study: StudyRecord) -> str:
    """Return a study's block as Markdown: how it was made, what was predicted, what it says, what noise does."""
    start, end = marks(name)
    seeds = {run.seed for run in study.runs if run.arm == study.baseline_arm}
    budgets = ", ".join(f"{budget:g}" for budget in sorted({run.budget for run in study.runs}))
    turns = len({cost.turn for cost in study.costs})
    made = f"`{study.command}`; {study.hardware}; n = {len(seeds)} seeds, budgets {budgets}; "
    made += f"costs profiled in {turns} turns." if turns else "no costs were profiled, so nothing is said by time."
    lines = [made, *([study.notes] if study.notes else []), ""]
    for who, predicted, came, verdict in prediction_rows(study):
        lines.append(f"- Predicted of {who}: {predicted}; came {came}: **{verdict}**.")
    for axis in axes_of(study):
        lines += [*_said(study, axis), *_together(study, axis)]
    lines += [*_sums(study), "", *noise_sentences(study, axis=axes_of(study)[0])]
    return "\n".join([start, "", *lines, "", end]).replace("\u00a0", " ")


def axes_of(study: StudyRecord) -> tuple[Axis, ...]:
    """Return the axes that a block tells of: time if costs were profiled, and steps, or rows if arms' steps differ.

    Without profiles time is that of runs beside whatever else the machine did.
    """
    steps: dict[float, set[int]] = {}
    for run in study.runs:
        if math.isfinite(run.final.quality):
            steps.setdefault(run.budget, set()).add(run.final.step)
    work: Axis = "step" if all(len(found) == 1 for found in steps.values()) else "rows"
    return ("seconds", work) if study.costs else (work,)


def _said(study: StudyRecord, axis: Axis) -> Iterator[str]:
    """Give a line for each arm, or where these are many one for each verdict with the arms that have it."""
    compared = {one.arm: one for one in comparisons(study, axis=axis)}
    claims = claims_of(study, axis=axis)
    if len(claims) <= NUM_SENTENCES:
        yield from (f"- {one.arm} by {AXIS_NAMES[axis]}, **{one.verdict}**: {one.sentence}" for one in claims)
        if axis != "seconds":
            gaps = [f"{one} {estimate_text(difference_at_equal(study, one, axis=axis))}" for one in compared]
            what = f"{study.quality_name} gained at the baseline's largest budget (95 %, each by itself)"
            yield f"- At equal {AXIS_NAMES[axis]}, {what}: {'; '.join(gaps)}."
        return
    kinds: dict[tuple[str, float], list[str]] = {}
    # What is shown comes first.
    for claim in sorted(claims, key=lambda one: one.figure == NO_FIGURE):
        one = compared[claim.arm]
        kinds.setdefault((claim.verdict, one.level), []).append(_figures(one))
    for (verdict, level), arms in kinds.items():
        tests = f"p adjusted for {len(claims)} comparisons, level {level:g}"
        yield f"- By {AXIS_NAMES[axis]}, **{verdict}** ({tests}): {'; '.join(arms)}."


def _together(study: StudyRecord, axis: Axis) -> Iterator[str]:
    """Give a line for each verdict on arms of several parts, and one that counts those without, if any has one."""
    found = joint_effects(study, axis=axis)
    measured = [
        (one.ratio.value > 1, one.is_shown, f"{one.arm} {_factor(one.ratio, one.p_value)}{_others(one)}")
        for one in found
        if not isinstance(one.ratio, NotReached)
    ]
    what = f"Parts together by {AXIS_NAMES[axis]}, times the product of what each gives alone"
    yield from _by_interaction(what, measured, max((one.num_tests for one in found), default=0))
    if measured and len(measured) < len(found):
        arms = f"{len(found) - len(measured)} of {len(found)} arms of several parts"
        why = "some curve doesn't cross the baseline's best, or a part has no arm alone"
        yield f"- {what}: not measured for {arms}, since {why}."


def _sums(study: StudyRecord) -> Iterator[str]:
    """Give a line for each verdict on what arms of several parts gain at the full budget, over the sum of the parts'.

    Unlike a ratio at equal quality it's there for every arm that has runs.
    """
    work = axes_of(study)[-1]
    found = joint_effects(study, axis=work, measure="difference")
    measured = [
        (one.ratio.value > 0, one.is_shown, f"{one.arm} {_factor(one.ratio, one.p_value)}{_others(one)}")
        for one in found
        if isinstance(one.ratio, Estimate)
    ]
    what = f"Parts together at the full budget's {AXIS_NAMES[work]}, {study.quality_name} gained beyond the sum of"
    yield from _by_interaction(
        f"{what} what each gains alone", measured, max((one.num_tests for one in found), default=0)
    )


def _by_interaction(what: str, measured: Iterable[tuple[bool, bool, str]], num_tests: int) -> Iterator[str]:
    """Give a line for each verdict on arms, of which it's said whether they gain, whether that's shown, and figures."""
    kinds: dict[str, list[str]] = {}
    arms = "arm of several parts" if num_tests == 1 else "arms of several parts"
    for is_more, is_shown, text in sorted(measured, key=lambda one: not one[1]):
        kind = "no interaction shown"
        if is_shown:
            kind = "they help each other" if is_more else "they get in each other's way"
        kinds.setdefault(kind, []).append(text)
    for kind, texts in kinds.items():
        tests = f"p adjusted for {num_tests} {arms}, level {SCREENING_LEVEL:g}"
        yield f"- {what}, **{kind}** ({tests}): {'; '.join(texts)}."


def _others(one: Together) -> str:
    others = ", ".join(one.with_other_settings)
    return f", though alone {others} had other settings" if others else ""


def _factor(found: Estimate, p_value: float | None) -> str:
    low = -math.inf if found.low == 0.0 else found.low
    return f"{number(found.value)} ({interval_text(low, found.high, found.n)}{_p_text(p_value)})"


def _p_text(p_value: float | None) -> str:
    return "" if p_value is None else "; p < 0.001" if p_value < 0.001 else f"; p = {p_value:.2g}"


def _figures(one: Comparison) -> str:
    if not isinstance(one.found, SpeedUp):
        return one.arm
    return f"{one.arm} {ratio_text(one.found)} ({ratio_interval_text(one.found)}{_p_text(one.p_value)})"


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """Return the page with all blocks replaced.

    Raises:
        ValueError: a study's marks aren't there once each, in order.
    """
    for name, text in blocks.items():
        start, end = marks(name)
        before, _, rest = page.partition(start)
        after = rest.partition(end)[2]
        if (page.count(start), page.count(end), rest.count(end)) != (1, 1, 1):
            msg = f"{PAGE.name} has to hold these two lines once each, in this order:\n{start}\n{end}"
            raise ValueError(msg)
        page = before + text + after
    return page


def claims_by_hand(page: str, names: Iterable[str]) -> list[str]:
    """Return the paragraphs outside of blocks and of withdrawn sections that claim something of an arm."""
    outside = re.sub(r"<!-- study (\S+?): .*?<!-- end of study \1 -->", "", page, flags=re.DOTALL)
    arm = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(names)))})(?!\w)", re.IGNORECASE)
    claim = re.compile(rf"\b({'|'.join(CLAIM_WORDS)})\b", re.IGNORECASE)
    found = []
    for section in re.split(r"^(?=## )", outside, flags=re.MULTILINE):
        if WITHDRAWN not in section.partition("\n")[0].lower():
            # A table's row and a list's item are paragraphs of their own.
            paragraphs = re.split(r"\n\s*\n|\n(?=\s*[-|])", section)
            found += [one.strip() for one in paragraphs if arm.search(one) and claim.search(one)]
    return found


def arm_names(studies: Iterable[StudyRecord]) -> set[str]:
    """Return the names of all arms that are compared with a baseline."""
    return {arm.name for one in studies for arm in compared_arms(one)}


def main(arguments: list[str]) -> int:
    """Write or check the page; return the exit status."""
    studies = read_studies(RESULTS)
    page = PAGE.read_text("utf-8")
    try:
        new = with_blocks(page, {name: block(name, study) for name, study in studies.items()})
    except ValueError as error:
        print(error)
        return 1
    by_hand = claims_by_hand(page, arm_names(studies.values()))
    for paragraph in by_hand:
        print(f"{PAGE.name} claims by hand, where the studies' blocks say what is shown:\n  {paragraph}\n")
    if arguments != ["--check"]:
        PAGE.write_text(new, "utf-8")
    elif new != page:
        print(f"{PAGE.name} doesn't say what the studies say. Run: python tools/write_findings.py")
        return 1
    return int(bool(by_hand))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
