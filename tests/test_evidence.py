"""The evidence's own figures: costs by round, differences with their intervals, label smoothing undone."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from benchmarks import evidence_summary
from benchmarks.evidence_as_used import undone, undone_bits
from benchmarks.evidence_summary import differences, read_study, rounds_of, with_profiles
from benchmarks.measure import in_turns
from cosmati.study.curves import mean_costs
from tests.study.oracles import study

pytestmark = pytest.mark.long


def test_rounds_come_back_from_their_quartiles() -> None:
    rng = np.random.default_rng(0)
    seen = {arm: list(rng.uniform(0.03, 0.09, size=4)) for arm in ("baseline", "EMA", "SAM")}
    left = {arm: iter(values) for arm, values in seen.items()}
    rows = [asdict(row) for row in in_turns({arm: left[arm].__next__ for arm in left}, rounds=3)]
    order = np.argsort(seen["baseline"][1:])
    for row in rows:
        expected = 1e6 * np.array(seen[row["arm"]][1:])[order]
        assert rounds_of(row, rows[0]) == pytest.approx(expected, rel=1e-12)


def test_rounds_that_do_not_fit_their_ratios_are_refused() -> None:
    base = {"arm": "a", "lower_quartile_us": 1.0, "median_us": 2.0, "upper_quartile_us": 3.0, "num_rounds": 3}
    ratios = {"ratio_lower_quartile": 0.5, "ratio": 1.0, "ratio_upper_quartile": 1.5}
    with pytest.raises(AssertionError, match="no order of the rounds"):
        rounds_of({**base, **ratios}, base)


def test_profiles_give_the_cost_of_a_step() -> None:
    record = study({"baseline": lambda b, s: b, "EMA": lambda b, s: b})
    values = {"baseline": (1.0, 2.0, 4.0), "EMA": (1.0, 4.0, 2.0)}
    rows = []
    for arm, found in values.items():
        ratios = sorted(own / base for own, base in zip(found, values["baseline"], strict=True))
        parts = ("lower_quartile", "median", "upper_quartile")
        row = {f"{part}_us": 1e6 * value for part, value in zip(parts, sorted(found), strict=True)}
        names = ("ratio_lower_quartile", "ratio", "ratio_upper_quartile")
        rows.append({"arm": arm, "num_rounds": 3, **row, **dict(zip(names, ratios, strict=True))})
    found = with_profiles(record, rows)
    assert mean_costs(found, "seconds") == pytest.approx({"baseline": 2.0, "EMA": 2.0})
    assert [cost.seconds / cost.steps for cost in found.costs if cost.arm == "EMA"] == pytest.approx([1.0, 4.0, 2.0])


@pytest.mark.parametrize("arm", ["Muon", "LabelSmoothing, not undone"])
def test_a_difference_has_students_interval_over_seeds(arm: str) -> None:
    record = read_study("language")
    of = {(run.arm, run.budget, run.seed): run.final.quality for run in record.runs}
    gaps = np.array([[of[arm, b, s] - of["baseline", b, s] for b in (0.25, 0.5, 1.0)] for s in (0, 1, 2)])
    for place, (base, own, found) in enumerate(differences(record, arm)):
        assert own - base == pytest.approx(found.value)
        assert found.value == pytest.approx(gaps[:, place].mean(), rel=1e-9)
        ends = stats.ttest_1samp(gaps[:, place], 0.0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((ends.low, ends.high), rel=1e-6)


def test_results_are_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence_summary.main(["--check"]) == 0, capsys.readouterr().out


def test_every_arm_stands_in_its_table_profiled_or_not() -> None:
    record = study({"baseline": lambda b, s: b, "EMA": lambda b, s: b + 0.001 * s})
    assert "| EMA | 5 | +0.0020 (" in (text := evidence_summary.table("some", evidence_summary.summarize(record)))
    assert "| not profiled |" in text
    assert "by steps (95 %, n)" in text
    assert "by time" not in text, "the runs' own seconds are of a machine that did other work too"


def test_undone_smoothing_gives_the_labels_back() -> None:
    true = torch.tensor([[0.7, 0.2, 0.1, 0.0]], dtype=torch.float64)
    smoothed = 0.9 * true + 0.1 / 4
    assert torch.allclose(undone(smoothed, 0.1, 1e-12), true, atol=1e-11)
    raised = undone(smoothed, 0.1, 0.05)
    assert torch.allclose(raised, torch.tensor([[0.7, 0.2, 0.1, 0.05]], dtype=torch.float64) / 1.05)


def test_bits_are_those_of_the_undone_probabilities() -> None:
    rng = np.random.default_rng(1)
    logits, tokens = rng.normal(size=(2, 3, 8)), rng.integers(0, 8, size=(2, 4))

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (x.numpy() == tokens[:, :-1]).all()
            return torch.from_numpy(logits)

    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    q = np.maximum((p - 0.1 / 8) / 0.9, 1e-5)
    q /= q.sum(axis=-1, keepdims=True)
    expected = -sum(math.log2(q[i, j, tokens[i, j + 1]]) for i in range(2) for j in range(3))
    found = undone_bits(Fixed(), torch.from_numpy(tokens))
    assert float(found.sum) == pytest.approx(expected, rel=1e-12)
    assert found.weight == 6


def test_the_check_names_what_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = evidence_summary.RESULTS
    for file in (*results.glob("evidence*.*"), *results.glob("method_cost_*.json")):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "evidence.md").write_text("Muon is shown to be faster.")
    monkeypatch.setattr(evidence_summary, "RESULTS", tmp_path)
    assert evidence_summary.main(["--check"]) == 1
