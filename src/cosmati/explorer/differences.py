"""Two runs fact by fact: what is equal, what differs, and the first thing in which they do. Pure: no file is opened."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NamedFacts = Mapping[str, str]
DiffKind = Literal["same", "added", "removed", "place"]
_SHORT = 72
_CONTEXT = 3
_MAX_DIFF_LINES = 4000


@dataclass(frozen=True)
class FactRow:
    """One fact of both runs; None where a run hasn't it.

    `is_strict` says that a fact which one run lacks is a difference, and no lack of its kind of record.
    """

    name: str
    a: str | None
    b: str | None
    is_strict: bool = True

    @property
    def differs(self) -> bool:
        """Whether the runs say different things."""
        return self.a != self.b and (self.is_strict or (self.a is not None and self.b is not None))


@dataclass(frozen=True)
class FactGroup:
    """The facts of one kind.

    Attributes:
        name: Of the kind.
        rows: Those that either run has, in the order of the first.
        missing: `a`, `b` or `both` where a run has nothing of this kind, so that it isn't compared.
    """

    name: str
    rows: tuple[FactRow, ...]
    missing: str = ""

    @property
    def different(self) -> tuple[FactRow, ...]:
        """The facts that differ, none where they can't be compared."""
        return () if self.missing else tuple(row for row in self.rows if row.differs)

    @property
    def equal(self) -> tuple[FactRow, ...]:
        """The facts that both have, and that are equal."""
        return tuple(row for row in self.rows if row.a == row.b)

    @property
    def alone(self) -> tuple[FactRow, ...]:
        """The facts that one has and the other's record doesn't keep."""
        return tuple(row for row in self.rows if row.a != row.b and (self.missing or not row.differs))


def groups_of(
    a: Mapping[str, NamedFacts], b: Mapping[str, NamedFacts], *, is_strict: bool = True
) -> tuple[FactGroup, ...]:
    """Return the facts by kind, in the order of `a`'s kinds: what causes comes before what follows from it.

    Args:
        a: of one run, by kind and name.
        b: of the other.
        is_strict: whether a fact that one run lacks is a difference; not between records of two kinds.
    """
    found = []
    for name in dict.fromkeys((*a, *b)):
        ours, theirs = a.get(name, {}), b.get(name, {})
        names = dict.fromkeys((*ours, *theirs))
        rows = tuple(FactRow(one, ours.get(one), theirs.get(one), is_strict) for one in names)
        missing = "" if ours and theirs else "both" if not (ours or theirs) else "b" if ours else "a"
        found.append(FactGroup(name, rows, missing))
    return tuple(found)


def first_difference(groups: Sequence[FactGroup]) -> str:
    """Say in one sentence in what two runs differ first, and what else does."""
    different = [(group, row) for group in groups for row in group.different]
    compared = [group.name.lower() for group in groups if not group.missing]
    if not different:
        if not compared:
            return "Nothing was recorded of both runs, so nothing can be compared."
        return f"No recorded fact differs: {joined(compared)} are equal."
    group, row = different[0]
    ours, theirs = parted(row.a, row.b)
    more = len(different) - 1
    rest = ""
    if more:
        names = dict.fromkeys(one.name.lower() for one, _ in different)
        rest = f" {more} further {'fact differs' if more == 1 else 'facts differ'}, in {joined(list(names))}."
    return f"They differ first in {group.name.lower()}, {row.name}: {ours} in A, {theirs} in B.{rest}"


def joined(names: Sequence[str]) -> str:
    """Return names as a list in words."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def parted(a: str | None, b: str | None) -> tuple[str, str]:
    """Return two values short enough for a sentence, cut so that the place where they part is in sight."""
    if a is None or b is None:
        ours, theirs = (_cut(one, 0) if one is not None else "absent" for one in (a, b))
        return ours, theirs
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return _cut(a, start), _cut(b, start)


def _cut(text: str, place: int) -> str:
    text = text.replace("\n", " ")
    if len(text) <= _SHORT:
        return text or "empty"
    start = max(0, min(place - _SHORT // 3, len(text) - _SHORT))
    return f"{'…' if start else ''}{text[start : start + _SHORT]}{'…' if start + _SHORT < len(text) else ''}"


def diff_lines(a: str, b: str) -> list[tuple[DiffKind, str]]:
    """Return a unified diff of two texts, each line with what it is; empty where they're equal."""
    ours, theirs = (text.splitlines()[:_MAX_DIFF_LINES] for text in (a, b))
    kinds: dict[str, DiffKind] = {"+": "added", "-": "removed", "@": "place", " ": "same"}
    found = list(difflib.unified_diff(ours, theirs, "A", "B", lineterm="", n=_CONTEXT))
    return [(kinds[line[0]], line) for line in found[2:] if line]


@dataclass(frozen=True)
class Agreement:
    """How far values that both runs recorded by step are equal, to the last bit.

    Attributes:
        num_shared: Steps of which both have one.
        last_equal: The last step before the first difference, None where the first one differs.
        first_different: None where all agree.
    """

    num_shared: int
    last_equal: int | None
    first_different: int | None


def agreement(a: Mapping[int, object], b: Mapping[int, object]) -> Agreement:
    """Compare what two runs recorded by step."""
    last = None
    shared = sorted(a.keys() & b.keys())
    for step in shared:
        if a[step] != b[step]:
            return Agreement(len(shared), last, step)
        last = step
    return Agreement(len(shared), last, None)


def bits_sentence(what: str, found: Agreement) -> str:
    """Say of digests whether two runs are the same to the last bit."""
    if not found.num_shared:
        return ""
    steps = f"{found.num_shared:,} {'step' if found.num_shared == 1 else 'steps'}"
    if found.first_different is None:
        return f"Same bits: {what} agree at all {steps} that both have, the last one {found.last_equal:,}."
    until = (
        "at the first one that both have" if found.last_equal is None else f"after agreeing up to {found.last_equal:,}"
    )
    return f"Not the same bits: {what} differ at step {found.first_different:,}, {until}."


def values_sentence(what: str, found: Agreement) -> str:
    """Say of logged values how far they are equal."""
    if not found.num_shared:
        return ""
    if found.first_different is None:
        return f"{what} are equal to the last digit at all {found.num_shared:,} steps that both logged."
    if found.last_equal is None:
        return f"{what} differ from the first step on that both logged, {found.first_different:,}."
    return f"{what} are equal up to step {found.last_equal:,}, and first differ at step {found.first_different:,}."
