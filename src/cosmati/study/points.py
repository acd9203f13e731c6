"""Points of a search: what is searched, where an optimum is at an edge, how that widens it, and the points drawn."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cosmati.errors import MissingExtraError, PlanError
from cosmati.records.study import DimensionRecord, SearchRecord, Setting

EDGE = 0.05
"""An optimum within this share of a range, in its scale, lies at its edge."""

PointSettings = Mapping[str, Setting]
Side = Literal["below", "above"]
Edge = tuple[str, Side]


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a search: a range, or ordered choices.

    Args:
        name: of the setting.
        low: lower end of the range.
        high: upper end.
        is_log: whether points are even in its logarithm.
        choices: in order, in place of a range.
        widest: the ends beyond which the range isn't widened, where there are such.
        wider: choices before and after the ordered ones, to which an optimum at an edge widens them.

    Raises:
        PlanError: there is nothing to search, or a range that doesn't lie inside of the widest.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = True
    choices: Sequence[Setting] = ()
    widest: tuple[float, float] = (0.0, float("inf"))
    wider: tuple[Sequence[Setting], Sequence[Setting]] = ((), ())

    def __post_init__(self) -> None:
        """Refuse what can't be searched."""
        strange = [one for one in (*self.wider[0], *self.choices, *self.wider[1]) if not _is_setting(one)]
        if strange:
            msg = (
                f"{self.name!r} has the choice {strange[0]!r}, which no file could give back: choices are bool, int, "
                "finite float or str. Name it by a word, and look that up where the run is made."
            )
            raise PlanError(msg)
        if self.choices:
            if len(self.choices) + len(self.wider[0]) + len(self.wider[1]) == 1:
                msg = (
                    f"{self.name!r} has one choice, {self.choices[0]!r}, so there is nothing to search: set it in the "
                    "recipe, or give two."
                )
                raise PlanError(msg)
            every = [*self.wider[0], *self.choices, *self.wider[1]]
            if len(set(every)) != len(every):  # 1, 1.0 and True are the same
                msg = f"The choices of {self.name!r} repeat one: {', '.join(map(repr, every))}."
                raise PlanError(msg)
        elif not (self.low < self.high < math.inf) or (self.is_log and self.low <= 0):
            msg = (
                f"The range of {self.name!r} is {self.low:g} to {self.high:g}: let it grow, from above 0 where "
                "is_log, or give choices."
            )
            raise PlanError(msg)
        elif not self.widest[0] <= self.low <= self.high <= self.widest[1]:
            msg = (
                f"The range of {self.name!r}, {self.low:g} to {self.high:g}, isn't inside of its widest {self.widest}."
            )
            raise PlanError(msg)

    def value(self, unit: float) -> Setting:
        """Return the setting at a place between 0 and 1."""
        if self.choices:
            return self.choices[min(int(unit * len(self.choices)), len(self.choices) - 1)]
        start, end = self._scaled(self.low), self._scaled(self.high)
        at = start + unit * (end - start)
        return min(max(math.exp(at) if self.is_log else at, self.low), self.high)

    def place(self, value: Setting) -> float:
        """Return where a setting lies, 0 to 1; of a choice the middle of its part.

        Raises:
            PlanError: it isn't inside.
        """
        if self.choices:
            if value not in self.choices:
                msg = f"{self.name!r} has no choice {value!r}; it has {', '.join(map(repr, self.choices))}."
                raise PlanError(msg)
            return (list(self.choices).index(value) + 0.5) / len(self.choices)
        if isinstance(value, str | bool) or not self.low <= value <= self.high:
            msg = f"{self.name!r} is {value!r}, which isn't from {self.low:g} to {self.high:g}."
            raise PlanError(msg)
        start, end = self._scaled(self.low), self._scaled(self.high)
        return (self._scaled(float(value)) - start) / (end - start)

    def as_setting(self, value: Setting) -> Setting:
        """Return a setting as points have it: the choice that equals it, or a float."""
        return next(one for one in self.choices if one == value) if self.choices else float(value)

    def is_at(self, side: Side, value: Setting) -> bool:
        """Return whether a setting lies at an edge: at the first or last choice, or close to the range's end."""
        reach = 0.5 / len(self.choices) if self.choices else EDGE
        place = self.place(value)
        return (place if side == "below" else 1 - place) <= reach + 1e-9

    def ends(self, side: Side) -> bool:
        """Return whether there's nothing beyond that side to widen it to."""
        if self.choices:
            return not self.wider[0 if side == "below" else 1]
        return self.low <= self.widest[0] if side == "below" else self.high >= self.widest[1]

    def near(self, value: Setting, unit: float, share: float) -> Setting:
        """Return a setting at most a share of the range from another one: `unit` 0 is below, 1 above.

        Of choices it's the one before, the same or the next one, a half of the draws the same.
        """
        if self.choices:
            at = list(self.choices).index(value) + (unit >= 0.75) - (unit < 0.25)
            return self.choices[min(max(at, 0), len(self.choices) - 1)]
        return self.value(min(max(self.place(value) + (2 * unit - 1) * share, 0.0), 1.0))

    def widened(self, side: Side) -> Dimension:
        """Return it longer on one side: a range by its own length in its scale, choices by the next one."""
        if self.choices:
            before, after = self.wider
            if side == "below":
                return replace(self, choices=(before[-1], *self.choices), wider=(before[:-1], after))
            return replace(self, choices=(*self.choices, after[0]), wider=(before, after[1:]))
        start, end = self._scaled(self.low), self._scaled(self.high)
        at = 2 * start - end if side == "below" else 2 * end - start
        reached = math.exp(at) if self.is_log else at
        if side == "below":
            return replace(self, low=max(reached, self.widest[0]))
        return replace(self, high=min(reached, self.widest[1]))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def _is_setting(value: object) -> bool:
    return type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


@dataclass(frozen=True)
class SearchSpace:
    """The dimensions of one arm as they are in a round.

    Attributes:
        dimensions: Of the arm.
        times: How many times each was widened, by name.
        added: What the last widening added: parts of the way from 0 to 1, by name.
    """

    dimensions: tuple[Dimension, ...]
    times: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def as_settings(self, given: PointSettings) -> dict[str, Setting]:
        """Return settings that somebody gives in the dimensions' order.

        Raises:
            PlanError: they don't name all dimensions, or lie outside of one.
        """
        if set(given) != {one.name for one in self.dimensions}:
            msg = f"Known settings name {sorted(given)}, and the search {sorted(one.name for one in self.dimensions)}."
            raise PlanError(msg)
        for one in self.dimensions:
            one.place(given[one.name])
        return {one.name: one.as_setting(given[one.name]) for one in self.dimensions}

    def edges(self, settings: PointSettings) -> set[Edge]:
        """Return the edges at which settings lie, where there is something beyond."""
        sides: tuple[Side, Side] = ("below", "above")
        return {
            (one.name, side)
            for one in self.dimensions
            for side in sides
            if one.is_at(side, settings[one.name]) and not one.ends(side)
        }

    def widened(self, edges: Collection[Edge]) -> SearchSpace:
        """Return it longer at these edges."""
        dimensions, added, times = [], {}, dict(self.times)
        for one in self.dimensions:
            wide = one
            for name, side in sorted(edges):
                wide = _grown(wide, one, side) if name == one.name else wide
            dimensions.append(wide)
            if wide != one:
                times[one.name] = times.get(one.name, 0) + 1
                added[one.name] = _added(one, wide)
        return SearchSpace(tuple(dimensions), times, added)

    def points(self, units: Sequence[Sequence[float]], around: PointSettings | None) -> list[dict[str, Setting]]:
        """Return a point for each row of `units`, in what was added last where something was.

        The first points, up to half of them, are the settings `around` which it was widened, with one dimension each
        moved into what was added to it. The others have one dimension after another in it.
        """
        new = [one for one in self.dimensions if self.added.get(one.name)]
        found = []
        for index, row in enumerate(units):
            point = {one.name: one.value(unit) for one, unit in zip(self.dimensions, row, strict=True)}
            if new:
                one = new[index % len(new)]
                parts = self.added[one.name]
                if around is not None and index < min(len(new), len(units) // 2):
                    at = one.place(around[one.name])
                    start, end = min(parts, key=lambda part: abs(sum(part) / 2 - at))
                    point = {**around, one.name: one.value((start + end) / 2)}
                else:
                    unit = row[[same.name for same in self.dimensions].index(one.name)]
                    point[one.name] = one.value(_inside(parts, unit))
            found.append(point)
        return found

    def near(self, units: Sequence[Sequence[float]], settings: PointSettings, share: float) -> list[dict[str, Setting]]:
        """Return a point for each row of `units`, at most a share of each range from `settings`."""
        return [
            {
                one.name: one.near(settings[one.name], unit, share)
                for one, unit in zip(self.dimensions, row, strict=True)
            }
            for row in units
        ]

    def records(self) -> tuple[DimensionRecord, ...]:
        """Return the dimensions as a search's record keeps them."""
        return tuple(
            DimensionRecord(
                name=one.name,
                low=0.0 if one.choices else one.low,
                high=0.0 if one.choices else one.high,
                is_log=not one.choices and one.is_log,
                choices=tuple(str(choice) for choice in one.choices),
                widened=self.times.get(one.name, 0),
                ends_below=one.ends("below"),
                ends_above=one.ends("above"),
            )
            for one in self.dimensions
        )


def _grown(wide: Dimension, before: Dimension, side: Side) -> Dimension:
    """Return `wide` with the end that widening `before` on a side gives it: two sides grow by the same length."""
    if wide.choices:
        return wide.widened(side)
    grown = before.widened(side)
    return replace(wide, low=grown.low) if side == "below" else replace(wide, high=grown.high)


def _added(before: Dimension, wide: Dimension) -> tuple[tuple[float, float], ...]:
    if wide.choices:
        size = 1 / len(wide.choices)
        return tuple(
            (index * size, (index + 1) * size)
            for index, choice in enumerate(wide.choices)
            if choice not in before.choices
        )
    parts = ((0.0, wide.place(before.low)), (wide.place(before.high), 1.0))
    return tuple((start, end) for start, end in parts if end > start)


def _inside(parts: Sequence[tuple[float, float]], unit: float) -> float:
    """Return the place in several parts that is at `unit` of their whole length."""
    left = unit * sum(end - start for start, end in parts)
    for start, end in parts:
        if left <= end - start:
            return start + left
        left -= end - start
    return parts[-1][1]


def quasi_random(num_dimensions: int, num_points: int, seed: int) -> list[list[float]]:
    """Return the first points of a scrambled Sobol sequence; more of them begin with the same ones.

    They are those that Optuna's `QMCSampler` gives.

    Raises:
        MissingExtraError: SciPy isn't installed.
    """
    try:
        from scipy.stats import qmc  # an extra, and slow to import
    except ImportError as error:
        msg = "A search needs SciPy, which isn't installed. Run: pip install 'cosmati[study]'"
        raise MissingExtraError(msg) from error
    power = max(0, math.ceil(math.log2(num_points)))  # SciPy warns of another number, whose balance is worse
    drawn = qmc.Sobol(num_dimensions, scramble=True, seed=seed).random_base2(power)
    return [[float(unit) for unit in row] for row in drawn[:num_points]]


def chosen_settings(record: SearchRecord) -> dict[str, Setting]:
    """Return the settings of the point that a search chose."""
    return dict(next(trial.settings for trial in record.trials if trial.point == record.chosen))
