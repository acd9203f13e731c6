"""What docs/findings.md says of a study's arms is what the rule says, and nothing else is said of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cosmati.explorer.wording import number
from cosmati.records.study import CostProfile, StudyRecord
from tests.study.oracles import log_quality, study
from tools import write_findings
from tools.write_findings import block, claims_by_hand, marks, with_blocks


def wobbly(ratio: float, phase: float) -> Callable[[float, int], float]:
    """Quality of an arm so many times as fast, with noise of its own."""
    base = log_quality(0.1 * math.log(ratio))
    return lambda budget, seed: base(budget, seed) + 0.002 * math.sin(37 * budget * (seed + 1) + phase)


def profiled(record: StudyRecord) -> StudyRecord:
    """The same with a step's cost in three turns, all arms' alike."""
    costs = [CostProfile(arm.name, turn, 10, 1.0 + turn / 100) for arm in record.arms for turn in range(3)]
    return replace(record, costs=tuple(costs))


@pytest.fixture
def record() -> StudyRecord:
    return profiled(study({"baseline": wobbly(1, 0), "Fast": wobbly(2, 1), "Idle one": wobbly(1, 2)}))


@pytest.fixture
def house(tmp_path: Path, record: StudyRecord, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one committed study and a page that has its block."""
    folder = tmp_path / "results" / "evidence" / "text"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(record.to_json())
    page = tmp_path / "findings.md"
    page.write_text("# Findings\n\n## 2026-11-22\n\n" + "\n".join(marks("evidence/text")) + "\n")
    monkeypatch.setattr(write_findings, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(write_findings, "PAGE", page)
    assert write_findings.main([]) == 0
    assert write_findings.main(["--check"]) == 0
    return page


def test_a_block_has_the_verdicts(record: StudyRecord) -> None:
    text = block("evidence/text", record)
    assert "- Fast by training time, **faster**: Fast reached" in text
    assert "- Idle one by training time, **no difference shown**:" in text
    # Both at equal steps: twice as fast is log(2) of a slope of 0.1.
    gains = re.search(r"- At equal steps, accuracy gained .*: Fast (\S+) \(.*; Idle one (\S+) \(", text)
    assert gains is not None
    assert float(gains[1]) == pytest.approx(0.1 * math.log(2), abs=0.003)
    assert "n = 5 seeds" in text
    assert record.hardware in text


def test_without_profiles_nothing_is_said_by_time(record: StudyRecord) -> None:
    text = block("evidence/text", replace(record, costs=()))
    assert "no costs were profiled, so nothing is said by time." in text
    assert "training time" not in text
    assert "- Fast by steps, **faster**: Fast reached" in text
    assert "Of 2 arms that do nothing the best would show about 1.01× by steps here." in text


def test_many_arms_are_listed_by_verdict_shown_ones_first() -> None:
    arms = {f"idle{i}": wobbly(1, 2 + i) for i in range(5)}
    text = block("evidence/text", profiled(study({"baseline": wobbly(1, 0), **arms, "Fast": wobbly(2, 1)})))
    first, *others = (line for line in text.splitlines() if line.startswith("- By training time"))
    assert first.startswith("- By training time, **faster** (p adjusted for 6 comparisons, level 0.05): Fast ")
    assert "; idle" not in first
    assert all("Fast" not in line and "**faster**" not in line for line in others)
    assert sum(f"idle{i} " in line for i in range(5) for line in others) == 5


def of_parts(together: float, sign: float = 1.0) -> StudyRecord:
    """Two parts that gain 0.04 and 0.05 alone and so much together, with a seed's own noise in each arm."""
    gains = {"baseline": 0.0, "a": 0.04, "b": 0.05, "a + b": together}

    def quality(gain: float, phase: int) -> Callable[[float, int], float]:
        base = log_quality(gain)
        return lambda budget, seed: sign * (base(budget, seed) + 1e-3 * math.sin(7 * seed + phase))

    made = study({name: quality(gain, phase) for phase, (name, gain) in enumerate(gains.items())})
    arms = tuple(replace(arm, methods=tuple(arm.name.split(" + ")) if arm.name in gains else ()) for arm in made.arms)
    return replace(made, arms=arms, higher_is_better=sign > 0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("together", "verdict"),
    [(0.09, "no interaction shown"), (0.12, "they help each other"), (0.05, "they get in each other's way")],
)
def test_parts_together_are_compared_with_their_sum(sign: float, together: float, verdict: str) -> None:
    made = of_parts(together, sign)
    text = block("evidence/text", made)
    (line,) = [one for one in text.splitlines() if "at the full budget" in one]
    assert f"**{verdict}** (p adjusted for 1 arm of several parts, level 0.05): a + b " in line
    best = {(run.arm, run.seed): sign * run.final.quality for run in made.runs if run.budget == 1.0}
    arms = ("a + b", "baseline", "a", "b")
    found = [best[arms[0], k] + best[arms[1], k] - best[arms[2], k] - best[arms[3], k] for k in range(5)]
    # By hand: what is left of the noise is that of four runs of a seed.
    noise = [
        math.sin(7 * seed + 3) + math.sin(7 * seed) - math.sin(7 * seed + 1) - math.sin(7 * seed + 2)
        for seed in range(5)
    ]
    assert found == pytest.approx([together - 0.09 + 1e-3 * one for one in noise])
    low, high = stats.t.interval(0.95, 4, np.mean(found), np.std(found, ddof=1) / math.sqrt(5))
    assert f"({number(low)} to {number(high)}, n = 5" in line.replace("\u00a0", " ")


def test_parts_with_other_settings_are_named() -> None:
    made = of_parts(0.12)
    others = tuple(replace(arm, methods=("a(1)", "b(2)")) if arm.name == "a + b" else arm for arm in made.arms)
    text = block("evidence/text", replace(made, arms=others))
    lines = [one for one in text.splitlines() if one.startswith("- Parts together")]
    assert any("at the full budget" in one for one in lines)
    assert all(one.endswith(", though alone a, b had other settings.") for one in lines)


def test_notes_are_told(record: StudyRecord) -> None:
    assert "\nNothing was tuned.\n" in block("evidence/text", replace(record, notes="Nothing was tuned."))


@pytest.mark.parametrize(
    "planted",
    [
        "Idle one is shown to be faster.",
        "- **idle one**\n  is worse than AdamW.",
        "| Idle one | 1.9 times as fast |",
    ],
)
def test_a_claim_by_hand_fails_the_check(house: Path, planted: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = house.read_text()
    house.write_text(f"{before}\n{planted}\n")
    assert write_findings.main(["--check"]) == 1
    assert planted in capsys.readouterr().out
    house.write_text(f"{before}\n## 2026-11-23, withdrawn\n\n{planted}\n")
    assert write_findings.main(["--check"]) == 0


def test_a_figure_that_is_changed_by_hand_fails_the_check(house: Path) -> None:
    house.write_text(house.read_text().replace("no difference shown", "faster", 1))
    assert write_findings.main(["--check"]) == 1
    assert write_findings.main([]) == 0
    assert write_findings.main(["--check"]) == 0


def test_names_in_other_words_and_sentences_without_a_claim_are_let_be() -> None:
    page = "## A section\n\nFaster fasting is shown.\n\nFast has 3.1 bits.\n\n- Fast\n- slower drives\n"
    assert claims_by_hand(page, ["Fast"]) == []


@pytest.mark.parametrize("page", ["", "{1}{0}", "{0}{0}{1}", "{0}{1}{1}"])
def test_marks_stand_once_each_in_order(page: str) -> None:
    with pytest.raises(ValueError, match="once each, in this order"):
        with_blocks(page.format(*marks("evidence/text")), {"evidence/text": "new"})
