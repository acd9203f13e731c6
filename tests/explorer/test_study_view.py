"""The tables of a study's page have the numbers that hand calculation gives."""

from __future__ import annotations

import math
import re

import pytest

from cosmati.explorer.report import render_report
from cosmati.explorer.views import StudyView, levels_of, study_view
from cosmati.explorer.wording import claims_of
from cosmati.records.study import StudyRecord
from tests.explorer.samples import wobble
from tests.study.oracles import log_quality, study

pytestmark = pytest.mark.long


def sample(**changes: object) -> StudyRecord:
    """`fast` needs half the steps; a step of `dear` takes three times as long."""
    made = {"baseline": log_quality(), "fast": log_quality(0.1 * math.log(2)), "dear": log_quality(0.01)}
    return study(made, pace={"dear": 3.0}, **changes)  # type: ignore[arg-type]


def row(view: StudyView, table: str, arm: str) -> tuple[str, ...]:
    return next(one for one in getattr(view, table) if one[0] == arm)


def test_a_need_has_its_price_and_its_bound() -> None:
    levels, start = levels_of(sample(), "seconds")
    needs = {line[0]: line[1] for line in levels[start].rows}
    # Half of 1,000 seconds at half a dollar an hour.
    assert needs["fast"] == "8.33\u00a0min, 0.0694 $"
    lowest = {line[0]: line for line in levels[0].rows}
    assert lowest["fast"][1].startswith("≤ ")
    assert not needs["fast"].startswith("≤")


def test_equal_time_and_equal_steps_are_different_columns() -> None:
    found = row(study_view(sample(), "s"), "comparisons", "dear")
    at_time, at_steps = (float(text.split()[0].replace("−", "-")) for text in found[1:3])
    # At equal time it has had a third of the steps.
    assert at_time == pytest.approx(0.01 - 0.1 * math.log(3), rel=0.02)
    assert at_steps == pytest.approx(0.01, rel=0.02)


def test_the_most_that_a_part_could_give_leaves_evaluation_out() -> None:
    rows = {one[1]: one for one in study_view(sample(), "s").parts if one[0] == "baseline"}
    # Parts are 0.05, 0.3, 0.5, 0.1 of the time, and evaluation the last 0.05.
    assert rows["backward"][4] == f"{0.95 / 0.45:.2f}×"
    assert rows["data"][4] == f"{0.95 / 0.90:.2f}×"
    assert rows["evaluation"][4] == "—"
    assert rows["forward"][3] == "30.0 %"


def test_many_arms_are_a_screening() -> None:
    record = study({"baseline": wobble(0, 0.0), **{f"a{index}": wobble(index + 1, 0.03) for index in range(8)}})
    claims = claims_of(record)
    assert {one.verdict for one in claims} == {"faster"}
    assert all("run it again by itself" in one.sentence for one in claims)


def test_of_many_arms_without_a_difference_a_dozen_is_named_and_the_rest_counted() -> None:
    names = [f"arm{k:02}" for k in range(30)]
    noisy = {
        name: (lambda b, s, k=k: 0.9 + 0.1 * math.log(b) + 0.01 * math.sin(7 * k * (s + 1)))
        for k, name in enumerate(names)
    }
    page = render_report(title="t", studies=[study({"baseline": log_quality(), **noisy}, seeds=(0, 1, 2))])  # type: ignore[dict-item]
    (summary,) = re.findall(r"<summary>(30 arms without a shown difference: .*?)</summary>", page)
    assert [name for name in names if name in summary] == summary.partition(": ")[2].partition(" and ")[0].split(", ")
    assert summary.endswith(" and 18 more")
    assert sum(name in summary for name in names) == 12
    assert all(f"<strong>{name}: " in page for name in names), "each has its sentence inside"
