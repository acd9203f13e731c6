"""What changes between two versions of a policy, for people and for programs: classes that gain or lose, and cells."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_analysis import CellChange, diff, table_text
from cosmati.routing.policy_file import PolicyFile

_WEIGHED = frozenset(
    "version taxonomy regions phases bands floors measures attenuate rules default allow".split()  # noqa: SIM905
)
"""Fields that come to weights and decisions."""
_MEASURED = ("bands", "measures")
"""Those of them whose thresholds say which rows are meant."""


@dataclass(frozen=True)
class PolicyDiff:
    """The difference of two policies that were compiled for the same model and length of the run.

    Args:
        old: the one before.
        new: the one after.
        others: what else they say differently (`other_changes`).

    Raises:
        PolicyError: on first use, where they are for runs of different lengths.
    """

    old: CompiledPolicy
    new: CompiledPolicy
    others: tuple[str, ...] = ()

    @cached_property
    def changes(self) -> tuple[CellChange, ...]:
        """The cells that differ."""
        return diff(self.old, self.new)

    @property
    def newly_admitted(self) -> tuple[str, ...]:
        """Classes that taught nothing in any phase and now teach something."""
        return tuple(name for name in _admitted(self.new) if name not in _admitted(self.old))

    @property
    def no_longer_admitted(self) -> tuple[str, ...]:
        """Classes that taught something and now teach nothing in any phase."""
        return tuple(name for name in _admitted(self.old) if name not in _admitted(self.new))

    def classes_that(self, direction: str) -> tuple[str, ...]:
        """Return the classes of which some cell `tightens` or `loosens`."""
        return tuple(dict.fromkeys(one.class_path for one in self.changes if one.direction == direction))

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain form, for programs."""
        return {
            "equal": not self,
            "old": self.old.policy_digest.hex(),
            "new": self.new.policy_digest.hex(),
            "newly_admitted": list(self.newly_admitted),
            "no_longer_admitted": list(self.no_longer_admitted),
            "gain": list(self.classes_that("loosens")),
            "lose": list(self.classes_that("tightens")),
            "others": list(self.others),
            "changes": [dataclasses.asdict(one) | {"direction": one.direction} for one in self.changes],
        }

    def __bool__(self) -> bool:
        """Whether anything changes."""
        return bool(self.changes or self.others)

    def __str__(self) -> str:
        """The summary first, then a line a cell, then a heat map of each span of steps."""
        if not self.changes:
            weights = "each class may teach each region what it might before."
            return "\n".join(
                [f"No weight changes: {weights}", *self.others] if self.others else [f"Nothing changes: {weights}"]
            )
        counts = [(sum(one.direction == word for one in self.changes), word) for word in ("loosens", "tightens")]
        lines = [
            f"Newly admitted: {_listed(self.newly_admitted)}",
            f"No longer admitted: {_listed(self.no_longer_admitted)}",
            f"Gain: {_listed(self.classes_that('loosens'))}",
            f"Lose: {_listed(self.classes_that('tightens'))}",
            ", ".join(f"{number} of the changes {word.removesuffix('s')}" for number, word in counts),
            *self.others,
            "",
            *(self._line(one) for one in self.changes),
        ]
        return "\n".join([*lines, *(f"\n{table}" for table in self._tables())])

    def _line(self, one: CellChange) -> str:
        first, last = (self.new.phases[self.new.phase_at(step)].name for step in (one.start_step, one.end_step - 1))
        phase = f"phase {first}" if first == last else f"phases {first} to {last}"
        return f"{one.direction:<8} {one.cell}, {phase} (steps {one.start_step} to {one.end_step}): {one.result}"

    def _tables(self) -> list[str]:
        """Return a heat map of each span: classes down, regions across; what doesn't change is a dot."""
        tables = []
        regions = list(dict.fromkeys(one.region for one in self.changes))
        for span in sorted({(one.start_step, one.end_step) for one in self.changes}):
            cells = {
                (one.name, one.region): f"{'▲' if one.direction == 'loosens' else '▼'} "
                f"{one.old_weight:g} → {one.new_weight:g}"
                for one in self.changes
                if (one.start_step, one.end_step) == span
            }
            names = dict.fromkeys(name for name, _ in cells)
            rows = [[name, *(cells.get((name, region), "·") for region in regions)] for name in names]
            tables.append(f"steps {span[0]} to {span[1]}\n{table_text([['class', *regions], *rows])}")
        return tables


def other_changes(old: PolicyFile, new: PolicyFile) -> tuple[str, ...]:
    """Return what two policies say differently that no weight tells, a line each: what a run does where data lack."""
    was, now = old.to_mapping(), new.to_mapping()
    names = sorted({*was, *now} - _WEIGHED)
    names += [name for name in _MEASURED if was.get(name) and now.get(name)]
    return tuple(
        f"{name}: {was.get(name, 'the usual')} -> {now.get(name, 'the usual')}"
        for name in names
        if was.get(name) != now.get(name)
    )


def _admitted(policy: CompiledPolicy) -> tuple[str, ...]:
    named = zip(policy.row_names, policy.weight, strict=True)
    return tuple(dict.fromkeys(name for (name, _), phases in named if any(map(any, phases))))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
