"""Where a run stands, and spans of it as time strings.

A time string is a number and a unit: `10ep` epochs, `100ba` steps (batches), `4096sp` rows (samples), `1e9tok`
tokens, `0.3dur` a fraction of the run, `90sec` seconds of training on the host's clock. Seconds may be written
`1h20m40s`, and digits in groups: `4_000tok`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from cosmati.errors import PlanError


class Unit(StrEnum):
    """Unit of a time string."""

    EPOCH = "ep"
    STEP = "ba"
    ROW = "sp"
    TOKEN = "tok"
    FRACTION = "dur"
    SECOND = "sec"


_TIME = re.compile(r"^\s*(\d+(?:_\d+)*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*(ep|ba|sp|tok|dur|sec)\s*$")
_HOURS = re.compile(r"^\s*(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\s*$")
_SECONDS = (86400, 3600, 60, 1)


class Time(NamedTuple):
    """A span of a run: `Time.parse("0.3dur")`. `str` and `parse` are inverse."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: str | Time) -> Time:
        """Read a time string.

        Raises:
            PlanError: the text isn't a number followed by ep, ba, sp, tok, dur or sec, or days, hours, minutes and
                seconds as in 1h20m40s.
        """
        if isinstance(text, Time):
            return text
        if not isinstance(text, str):
            steps, epochs = (f"'{text}{unit}'" for unit in (Unit.STEP, Unit.EPOCH))
            msg = f"{text!r} has no unit. A time is a number with one: {steps} for steps, {epochs} for epochs."
            raise PlanError(msg)
        if (hours := _HOURS.match(text)) is not None:
            amounts = [int(digits or 0) for digits in hours.groups()]
            return cls(float(sum(n * s for n, s in zip(amounts, _SECONDS, strict=True))), Unit.SECOND)
        match = _TIME.match(text)
        if match is None:
            msg = (
                f"{text!r} is not a time. Write a number and a unit: '10ep' epochs, '100ba' steps, '4096sp' rows, "
                "'1e9tok' tokens, '0.3dur' a fraction of the run, '90sec' or '1h20m40s' seconds."
            )
            if text.strip().endswith("iter"):
                msg += " An iteration has no length here: say which steps ('ba') or epochs ('ep') you mean."
            raise PlanError(msg)
        return cls(float(match[1]), Unit(match[2]))

    def __str__(self) -> str:
        return f"{self.value!r}".removesuffix(".0") + self.unit.value

    def scaled(self, ratio: float) -> Time:
        """Return the span dilated by a ratio; fractions of the run stay as they are."""
        return self if self.unit is Unit.FRACTION else Time(self.value * ratio, self.unit)


class Clock(NamedTuple):
    """What has been committed so far. With the seed, it is all the state that randomness has."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def amount(self, unit: Unit) -> float:
        """Return how much of a unit has passed. Epochs are counted whole."""
        return float(
            {"ep": self.epoch, "ba": self.step, "sp": self.rows, "tok": self.tokens, "sec": self.seconds}[unit.value]
        )

    def advanced(self, rows: int, tokens: int, steps_per_epoch: int | None, seconds: float) -> Clock:
        """Return the clock after one more step.

        Args:
            rows: of the step.
            tokens: of the step.
            steps_per_epoch: None where the data has no length.
            seconds: of training so far.
        """
        step = self.step + 1
        epoch, in_epoch = divmod(step, steps_per_epoch) if steps_per_epoch else (self.epoch, self.step_in_epoch + 1)
        return Clock(step, epoch, in_epoch, self.rows + rows, self.tokens + tokens, seconds)


@dataclass(frozen=True)
class Budget:
    """How long a run is, and what a fraction of it means.

    Args:
        span: the undilated length of the run.
        steps_per_epoch: None where the data has no length.
        rows_per_step: rows in a full step.
        tokens_per_row: 1 where rows aren't sequences.
        ratio: dilation of everything: budget, schedules, warm-up (ScaleSchedule).
        knows_rows: False where nobody says ahead how many rows a step has; the clock then counts them.
    """

    span: Time
    steps_per_epoch: int | None = None
    rows_per_step: int = 1
    tokens_per_row: int = 1
    ratio: float = 1.0
    knows_rows: bool = True

    def __post_init__(self) -> None:
        if self.span.unit is Unit.FRACTION or self.span.value <= 0:
            msg = f"A budget of {str(self.span)!r} has no end. Give a positive number of ep, ba, sp, tok or sec."
            raise PlanError(msg)

    @cached_property
    def num_steps(self) -> int | None:
        """Steps of the whole run, or None where that isn't known ahead."""
        steps = self._steps(self.span)
        return None if steps is None else max(1, round(steps * self.ratio))

    @property
    def goes_by_epochs(self) -> bool:
        """Whether how far the run is shows at the end of an epoch only: its length is in epochs, theirs isn't known."""
        return self.span.unit is Unit.EPOCH and self.steps_per_epoch is None

    def _steps(self, time: Time) -> float | None:
        rows = float(self.rows_per_step)
        match time.unit:
            case Unit.STEP:
                return time.value
            case Unit.EPOCH:
                return None if self.steps_per_epoch is None else time.value * self.steps_per_epoch
            case Unit.ROW if self.knows_rows:
                return time.value / rows
            case Unit.TOKEN if self.knows_rows:
                return time.value / (rows * self.tokens_per_row)
            case _:
                return None

    def fraction_of(self, time: str | Time) -> float:
        """Return a span as a fraction of the run.

        The fraction is of the undilated run: a dilated budget dilates warm-up and every other span with it.

        Raises:
            PlanError: the span can't be compared with the budget (epochs of data without length, say).
        """
        time = Time.parse(time)
        if time.unit is Unit.FRACTION or time.value == 0:
            return time.value
        if time.unit is self.span.unit:
            return time.value / self.span.value
        part, whole = self._steps(time), self._steps(self.span)
        if part is None or whole is None:
            msg = f"{str(time)!r} can't be placed in a run of {str(self.span)!r}. Use the same unit, 'dur' or 'ba'."
            raise PlanError(msg)
        return part / whole

    def step_of(self, time: str | Time) -> int:
        """Return the step at which a span of the (dilated) run ends.

        Raises:
            PlanError: the run's number of steps isn't known ahead.
        """
        if self.num_steps is None:
            msg = (
                f"{str(time)!r} has no step number in a run of {str(self.span)!r}: its steps aren't known ahead. Give "
                "both in 'ba'."
            )
            raise PlanError(msg)
        return round(self.fraction_of(time) * self.num_steps)

    def elapsed(self, clock: Clock) -> float:
        """Return the fraction of the run that the clock has passed, in [0, 1]."""
        num_steps = self.num_steps
        if num_steps is not None:
            return min(1.0, clock.step / num_steps)
        return min(1.0, clock.amount(self.span.unit) / (self.span.value * self.ratio))

    def is_over(self, clock: Clock) -> bool:
        """Say whether the run has reached its end."""
        num_steps = self.num_steps
        if num_steps is not None:
            return clock.step >= num_steps
        return clock.amount(self.span.unit) >= self.span.value * self.ratio
