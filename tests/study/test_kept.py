"""What is kept of a study is of that very study, and is what would be worked out anew."""

from __future__ import annotations

from dataclasses import replace

from cosmati.records.study import StudyRecord
from cosmati.study.comparison import comparisons
from cosmati.study.divergence import diverges_near
from cosmati.study.kept import kept
from tests.study.oracles import log_quality, study


def sample() -> StudyRecord:
    return study({"baseline": log_quality(), "other": log_quality(0.02)})


def test_an_answer_is_worked_out_once_a_study_and_argument() -> None:
    calls = []

    @kept(4)
    def asked(one: StudyRecord, word: str, *, times: int = 1) -> str:
        calls.append(word)
        return word * times

    first, second = sample(), sample()
    assert first == second
    for one in (first, second):
        assert [asked(one, "a"), asked(one, "a"), asked(one, "a", times=2)] == ["a", "a", "aa"]
    assert calls == ["a", "a", "a", "a"], "equal studies aren't the same one, and arguments count"


def test_a_changed_study_is_compared_anew() -> None:
    one = sample()
    before = comparisons(one)
    turned = replace(one, baseline_arm="other")
    assert {found.arm for found in comparisons(turned)} == {"baseline"}
    assert comparisons(one) == before == comparisons(replace(one))


def test_an_arm_that_never_diverged_does_so_nowhere() -> None:
    one = sample()
    assert not any(diverges_near(one, "other", needs, "seconds") for needs in (1.0, 100.0, 1e6))
