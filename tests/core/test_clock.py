"""Time strings and budgets: laws, and every refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.clock import Budget, Clock, Time, Unit
from cosmati.errors import PlanError

times = st.builds(Time, st.floats(0.001, 1e9), st.sampled_from(list(Unit)))


@given(times)
def test_parse_inverts_str(time: Time) -> None:
    assert Time.parse(str(time)) == time


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10ep", (10, "ep")), ("1e9tok", (1e9, "tok")), (".3dur", (0.3, "dur")), (" 90 sec ", (90, "sec"))],
)
def test_parse_reads_the_documented_forms(text: str, expected: tuple[float, str]) -> None:
    assert Time.parse(text) == expected


@pytest.mark.parametrize("text", ["", "10", "ep", "-1ba", "1e", "10 epochs", "nanba", "infba"])
def test_parse_refuses_what_is_not_a_time(text: str) -> None:
    with pytest.raises(PlanError, match="is not a time"):
        Time.parse(text)


@pytest.mark.parametrize("span", ["0ba", "0.5dur"])
def test_budget_refuses_a_run_without_end(span: str) -> None:
    with pytest.raises(PlanError, match="has no end"):
        Budget(Time.parse(span))


@pytest.mark.parametrize("span", ["4ep", "40ba", "640sp", "5120tok"])
def test_spans_of_one_length_give_equal_steps(span: str) -> None:
    budget = Budget(Time.parse(span), steps_per_epoch=10, rows_per_step=16, tokens_per_row=8)
    assert budget.num_steps == 40
    assert budget.fraction_of("10ba") == budget.fraction_of("1ep") == budget.fraction_of("160sp") == 0.25
    assert budget.step_of("0.5dur") == 20


@given(st.floats(0.1, 4.0), st.integers(1, 400))
def test_dilation_keeps_every_fraction(ratio: float, warmup: int) -> None:
    plain, dilated = Budget(Time.parse("400ba")), Budget(Time.parse("400ba"), ratio=ratio)
    assert plain.fraction_of(f"{warmup}ba") == dilated.fraction_of(f"{warmup}ba")
    assert dilated.num_steps == max(1, round(400 * ratio))


@given(st.integers(1, 1000), st.integers(0, 2000))
def test_a_run_is_over_exactly_at_its_last_step(num_steps: int, step: int) -> None:
    budget, clock = Budget(Time.parse(f"{num_steps}ba")), Clock(step=step)
    assert budget.is_over(clock) == (step >= num_steps)
    assert budget.elapsed(clock) == min(1.0, step / num_steps)


def test_seconds_follow_the_clock_and_have_no_steps() -> None:
    budget = Budget(Time.parse("90sec"))
    assert budget.num_steps is None
    assert budget.elapsed(Clock(seconds=45.0)) == 0.5
    assert budget.is_over(Clock(seconds=90.0))
    with pytest.raises(PlanError, match="no step number"):
        budget.step_of("0.5dur")
    with pytest.raises(PlanError, match="can't be placed"):
        budget.fraction_of("3ba")
