"""What a policy does, for people: why a cell has its weight, what a version changes, tables, heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from typing import Literal, NamedTuple

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy, closest
from cosmati.records.joint_classes import is_joint, members_of
from cosmati.routing.cells import Decision, Lowering
from cosmati.routing.measures import Grades, RowKind
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.rules import disagreement, front, lowest_band, matching_rules

_ANY_OTHER = "any other"
"""No grade can be called so."""
_RANK: dict[Decision, int] = {"reject": 0, "defer": 1, "gate": 2, "admit": 2}


@dataclass(frozen=True)
class Explanation:
    """Why a cell is as it is.

    Args:
        class_path: the class.
        region: the region, as declared in the policy.
        phase: the phase.
        considered: the rules that cover the cell, in words, the most specific first.
        winner: the one that decides; the first in the file where several say the same; None where the default
            holds.
        result: `weight`, `reject` or `defer`.
        weight: the cell's weight, 0 unless the result is `weight`.
        why: a sentence.
        lowered: the attenuations that cover the cell, in words; the least factor of them counts.
    """

    class_path: str
    region: str
    phase: str
    considered: tuple[str, ...]
    winner: str | None
    result: Literal["weight", "reject", "defer"]
    weight: float
    why: str
    lowered: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellChange:
    """What changes between two policies for one class and band, in steps `start_step` to `end_step` (not included).

    The regions are those that hold the same parameters before and after; None where they weren't, or aren't,
    trained. Without bands on both sides there's no number of a band. The grades are those that one of them tells apart.
    """

    class_path: str
    old_region: str | None
    new_region: str | None
    start_step: int
    end_step: int
    old_weight: float
    new_weight: float
    old_decision: Decision
    new_decision: Decision
    band: str = ""
    band_number: int | None = None
    grades: Grades = ()

    @property
    def direction(self) -> Literal["tightens", "loosens"]:
        """Whether the class may now teach less or more; by weight, and where that's equal by decision."""
        before, after = (
            (self.old_weight, _RANK[self.old_decision]),
            (self.new_weight, _RANK[self.new_decision]),
        )
        return "tightens" if after < before else "loosens"

    @property
    def region(self) -> str:
        """The region; both names where they differ."""
        return str(self.new_region) if self.old_region == self.new_region else f"{self.old_region} -> {self.new_region}"

    @property
    def name(self) -> str:
        """The class, and its band and grades where there are some."""
        return ", ".join(filter(None, (self.class_path, str(RowKind(self.band, self.grades)))))

    @property
    def cell(self) -> str:
        """Class, kind and region."""
        return f"{self.name}, {self.region}"

    @property
    def result(self) -> str:
        """Weight and decision, before and after."""
        return f"{self.old_weight:g} ({self.old_decision}) -> {self.new_weight:g} ({self.new_decision})"

    def __str__(self) -> str:
        return f"{self.direction}: {self.cell}, steps {self.start_step} to {self.end_step}: {self.result}"


def explain(
    policy: PolicyFile,
    class_path: str,
    region: str,
    phase: str,
    band: str = "",
    *,
    taxonomy: Taxonomy,
    grades: Mapping[str, str] | None = None,
) -> Explanation:
    """Say which rule decides a cell, against which others, and what lowers its weight.

    Raises:
        PolicyError: no such class, region, phase, band or grade; or rules that disagree on the cell.
    """
    kind = _kind(policy, band, grades or {})
    if is_joint(class_path):
        every = [
            explain(policy, one, region, phase, band, taxonomy=taxonomy, grades=grades)
            for one in members_of(class_path)
        ]
        order = ("reject", "defer", "weight")
        least = min(every, key=lambda one: (order.index(one.result), one.weight))
        why = (
            f"rows of several classes teach by the least of their weights, and that's {least.class_path}'s: {least.why}"
        )
        return replace(least, class_path=class_path, why=why)
    found = _ruled(policy, class_path, region, phase, band, taxonomy)
    lowering = Lowering(policy)
    if found.result == "defer":
        found = _coming_again(policy, found, kind, lowering)
    factor = lowering.factor(class_path, kind, phase, region)
    covering = lowering.covering(class_path, kind, phase, region)
    words = tuple(f"attenuation {number} ({one})" for number, one in covering)
    words += tuple(f"opening {number} ({one})" for number, one in lowering.closing(class_path, phase, region))
    if not words or found.result != "weight":
        return replace(found, lowered=words)
    told = f"{found.why}; times {factor:g}, for {str(kind) or 'all rows'}: the least factor of {len(words)}"
    return replace(found, weight=found.weight * factor, why=told, lowered=words)


def _kind(policy: PolicyFile, band: str, grades: Mapping[str, str]) -> RowKind:
    """Return the kind of rows of a band and of some grades; what isn't named wasn't measured."""
    for name, grade in grades.items():
        if name not in policy.measures:
            msg = f"There's no measure {name!r}{closest(name, tuple(sorted(policy.measures)))}"
            raise PolicyError(msg)
        if grade not in ("", *policy.measures[name].grades):
            msg = f"There's no grade {grade!r} of {name}{closest(grade, policy.measures[name].grades)}"
            raise PolicyError(msg)
    return RowKind(band, tuple((name, grades.get(name, "")) for name in sorted(policy.measures)))


def _ruled(policy: PolicyFile, class_path: str, region: str, phase: str, band: str, taxonomy: Taxonomy) -> Explanation:
    """Return what the rules say of a cell."""
    regions = tuple(sorted(policy.selectors)) or ("all",)
    for axis, name, known in (
        ("class", class_path, taxonomy.classes),
        ("region", region, regions),
        ("phase", phase, policy.phase_names),
        ("band", band, policy.band_names),
    ):
        if name not in known:
            mend = ". It's the minimum of its members: ask for each" if "&" in name else closest(name, known)
            msg = f"There's no {axis} {name!r}{mend}"
            raise PolicyError(msg)
    if policy.band_names.index(band) < lowest_band(policy, class_path):
        why = "the band is below a floor of the class"
        return Explanation(class_path, region, phase, (), None, "reject", 0.0, why)
    matches = matching_rules(policy.rules, class_path, region, phase, band)
    ahead = front(matches)
    pair = disagreement(ahead)
    if pair:
        cell = f"({', '.join(filter(None, (class_path, region, phase, band)))})"
        msg = f"{pair[0]} and {pair[1]} disagree on {cell}. Add a rule for this cell."
        raise PolicyError(msg)
    considered = tuple(str(match) for match in sorted(matches, key=lambda match: match.specificity, reverse=True))
    if not ahead:
        why = "no rule covers the cell, and the default is reject"
        return Explanation(class_path, region, phase, considered, None, "reject", 0.0, why)
    if len(matches) == 1:
        why = "it's the only rule that covers the cell"
    elif len(ahead) == 1:
        why = "on class, region and phase it's at least as specific as each of the others"
    else:
        others = ", ".join(str(match.number) for match in ahead[1:])
        why = f"no rule beats it, and what else isn't beaten (rule {others}) says the same"
    return Explanation(class_path, region, phase, considered, str(ahead[0]), *ahead[0].outcome, why)


def _coming_again(policy: PolicyFile, found: Explanation, kind: RowKind, lowering: Lowering) -> Explanation:
    """Say in which phase the rows of a deferred cell come again: where any region takes some."""
    regions = tuple(sorted(policy.selectors)) or ("all",)

    def offers(phase: str, *, is_lowered: bool = True) -> bool:
        for region in regions:
            ahead = front(matching_rules(policy.rules, found.class_path, region, phase, kind.band))
            factor = lowering.factor(found.class_path, kind, phase, region) if is_lowered else 1.0
            if ahead and ahead[0].outcome[1] * factor:
                return True
        return False

    later = policy.phase_names[policy.phase_names.index(found.phase) + 1 :]
    if again := next(filter(offers, later), None):
        return replace(found, why=f"{found.why}; its rows come again in phase {again}")
    why = f"{found.why}; no later phase offers its rows"
    if any(offers(phase, is_lowered=False) for phase in later):
        return replace(found, result="reject", why=f"{why} once they're lowered")
    return replace(found, why=why)


def diff(old: CompiledPolicy, new: CompiledPolicy) -> tuple[CellChange, ...]:
    """Return what changes, step by step and parameter by parameter, whatever regions and phases are called.

    A class that one of the taxonomies lacks counts as rejected there, and so does a band or a grade that one of them
    lacks. Bands are compared by their numbers and grades by their names, which is what shards say.

    Raises:
        PolicyError: the policies were compiled for runs of different lengths.
    """
    if old.phases[-1].end_step != new.phases[-1].end_step:
        msg = (
            f"The policies are for runs of {old.phases[-1].end_step} and {new.phases[-1].end_step} steps. "
            "Compile both for the same number of steps."
        )
        raise PolicyError(msg)
    bounds = sorted({0} | {phase.end_step for phase in (*old.phases, *new.phases)})
    spans = list(pairwise(bounds))
    return tuple(
        change
        for path in dict.fromkeys([*old.classes, *new.classes])
        for band, grades in _kinds(old, new)
        for before, after in _shared_regions(old, new)
        for change in _changes(_Side(old, path, band, grades, before), _Side(new, path, band, grades, after), spans)
    )


def _kinds(old: CompiledPolicy, new: CompiledPolicy) -> Iterator[tuple[int, Grades]]:
    """Yield the kinds of rows to compare, as shards describe them: number of the band, and grades.

    Where only one side has bands, one more stands for all above them, and one more grade for all others of a measure
    that only one side has: that side refuses such rows, and they mean nothing to the other.
    """
    before, after = old.band_names, new.band_names
    num_bands = max(len(before), len(after)) + ((before == ("",)) != (after == ("",)))
    measures = [{name for name, _ in one.kinds[0].grades} for one in (old, new)]
    names = sorted(measures[0] | measures[1])
    all_kinds = (*old.kinds, *new.kinds)
    known = [dict.fromkeys(grade for kind in all_kinds for own, grade in kind.grades if own == name) for name in names]
    for name, grades_of in zip(names, known, strict=True):
        if name not in measures[0] & measures[1]:
            grades_of[_ANY_OTHER] = None
    for band, *grades in product(range(num_bands), *known):
        yield band, tuple(zip(names, grades, strict=True))


def heat_map_text(compiled: CompiledPolicy, phase: str) -> str:
    """Draw a phase: classes down, regions across, a shade and the weight in each cell; `·` is weight 0.

    A class whose kinds of rows are all treated alike has one line.

    Raises:
        PolicyError: no such phase.
    """
    names = tuple(entry.name for entry in compiled.phases)
    if phase not in names:
        msg = f"There's no phase {phase!r}{closest(phase, names)}"
        raise PolicyError(msg)
    index = names.index(phase)
    span = compiled.phases[index]
    rows = [["class", "decision", *compiled.regions]]
    cells = [
        [of_row[index], *(f"{_shade(weight)} {weight:g}" if weight else "·" for weight in weights[index])]
        for weights, of_row in zip(compiled.weight, compiled.decision, strict=True)
    ]
    for class_name, own in groupby(zip(compiled.row_names, cells, strict=True), key=lambda row: row[0][0]):
        kinds = [(", ".join(filter(None, name)), drawn) for name, drawn in own]
        are_alike = all(drawn == kinds[0][1] for _, drawn in kinds)
        rows += [[class_name, *kinds[0][1]]] if are_alike else [[name, *drawn] for name, drawn in kinds]
    return f"phase {phase}, steps {span.start_step} to {span.end_step}\n{table_text(rows)}"


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines, its columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _shade(weight: float) -> str:
    return "▲" if weight > 1 else "█" if weight == 1 else "░▒▓"[int(weight * 3)]


def _shared_regions(old: CompiledPolicy, new: CompiledPolicy) -> list[tuple[str | None, str | None]]:
    """Return the pairs of an old and a new region that have parameters in common."""
    before, after = old.partition.region_of, new.partition.region_of
    return list(
        dict.fromkeys(
            (
                old.regions[before[name]] if name in before else None,
                new.regions[after[name]] if name in after else None,
            )
            for name in [*before, *after]
        )
    )


class _Side(NamedTuple):
    compiled: CompiledPolicy
    class_path: str
    band: int
    grades: Grades
    region: str | None

    @property
    def has_bands(self) -> bool:
        return self.compiled.band_names != ("",)

    @property
    def band_name(self) -> str:
        bands = self.compiled.band_names
        return bands[self.band] if self.band < len(bands) else ""

    def at(self, step: int) -> tuple[float, Decision]:
        compiled = self.compiled
        kind = compiled.find_kind(self.band, dict(self.grades))
        if self.class_path not in compiled.classes or kind is None or self.region is None:
            return 0.0, "reject"
        row, phase = compiled.row(compiled.classes.index(self.class_path), kind), compiled.phase_at(step)
        return compiled.weight[row][phase][compiled.regions.index(self.region)], compiled.decision[row][phase]


def _changes(old: _Side, new: _Side, spans: Sequence[tuple[int, int]]) -> Iterator[CellChange]:
    for (before, after), group in groupby(spans, key=lambda span: (old.at(span[0]), new.at(span[0]))):
        run = list(group)
        if before[0] != after[0] or _RANK[before[1]] != _RANK[after[1]]:
            yield CellChange(
                new.class_path,
                old.region,
                new.region,
                run[0][0],
                run[-1][1],
                before[0],
                after[0],
                before[1],
                after[1],
                new.band_name or old.band_name or ("above" if new.has_bands or old.has_bands else ""),
                new.band if new.has_bands or old.has_bands else None,
                new.grades,
            )
