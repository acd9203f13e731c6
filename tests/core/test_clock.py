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


def test_a_span_is_scaled_in_its_own_unit_and_a_fraction_stays() -> None:
    assert Time.parse("10ba").scaled(1.5) == Time(15.0, Unit.STEP)
    assert Time.parse("0.3dur").scaled(1.5) == Time(0.3, Unit.FRACTION)


def test_the_clock_counts_each_unit_by_itself() -> None:
    clock = Clock(step=7, epoch=2, step_in_epoch=1, rows=112, tokens=896, seconds=3.5)
    amounts = {unit: clock.amount(unit) for unit in Unit if unit is not Unit.FRACTION}
    assert amounts == {Unit.STEP: 7, Unit.EPOCH: 2, Unit.ROW: 112, Unit.TOKEN: 896, Unit.SECOND: 3.5}
    assert all(type(amount) is float for amount in amounts.values())
    assert Clock() == (0, 0, 0, 0, 0, 0.0)


def test_without_more_a_step_is_a_row_and_a_row_is_a_token() -> None:
    assert Budget(Time.parse("64sp")).num_steps == Budget(Time.parse("64tok")).num_steps == 64
    assert Budget(Time.parse("64ba")).ratio == 1


def test_a_run_has_a_step_at_least() -> None:
    assert Budget(Time.parse("0.2ba")).num_steps == 1
    assert Budget(Time.parse("3ba"), ratio=0.1).num_steps == 1
    assert Budget(Time.parse("0.001ba")).fraction_of("0.0005ba") == 0.5, "any length over 0 is one"


def test_epochs_of_data_without_length_are_placed_among_themselves() -> None:
    budget = Budget(Time.parse("4ep"))
    assert budget.num_steps is None
    assert budget.fraction_of("1ep") == 0.25
    assert budget.fraction_of("0ba") == 0, "nothing is nothing in any unit"
    assert budget.fraction_of(Time.parse("0.5dur")) == 0.5
    assert (budget.elapsed(Clock(epoch=1)), budget.elapsed(Clock(epoch=9))) == (0.25, 1)
    assert [budget.is_over(Clock(epoch=n)) for n in (3, 4, 5)] == [False, True, True]
    with pytest.raises(PlanError, match="can't be placed"):
        budget.fraction_of("10ba")


def test_dilated_seconds_are_longer() -> None:
    budget = Budget(Time.parse("90sec"), ratio=2.0)
    assert budget.elapsed(Clock(seconds=45.0)) == 0.25
    assert [budget.is_over(Clock(seconds=s)) for s in (179.0, 180.0)] == [False, True]


def test_a_dilated_run_places_its_steps_in_itself() -> None:
    budget = Budget(Time.parse("100ba"), ratio=3.0)
    assert (budget.step_of("0.5dur"), budget.step_of("10ba")) == (150, 30)
