"""What holds for each cell (class, kind of rows, phase, region) of a policy: the rules' outcome, and what lowers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from cosmati.errors import PolicyError
from cosmati.routing.depth import OpenBlocks
from cosmati.routing.measures import Attenuation, RowKind
from cosmati.routing.policy_file import PolicyFile, Rule
from cosmati.routing.regions import Regions
from cosmati.routing.rules import (
    Match,
    Outcome,
    cell_matches,
    class_matches,
    covers,
    disagreement,
    front,
    lowest_band,
)

Decision = Literal["admit", "gate", "defer", "reject"]
RegionWeights = tuple[float, ...]
_Place = tuple[str, ...]
_UNDECIDED: Outcome = ("reject", 0.0)


class Cells:
    """Which rules are ahead in each cell, found once for all cells that no rule of the class tells apart.

    Args:
        policy: as written.
        declared: its regions.
    """

    def __init__(self, policy: PolicyFile, declared: Sequence[str]) -> None:
        self.policy, self.declared = policy, declared
        self._of_class: dict[str, tuple[list[tuple[int, Rule, int]], frozenset[str]]] = {}
        self._fronts: dict[_Place, list[Match]] = {}

    def front(self, path: str, region: str, phase: str, band: str) -> list[Match]:
        """Return the rules that none beats in a cell."""
        if path not in self._of_class:
            covering = class_matches(self.policy.rules, path)
            # A name of another axis tells more cells apart than need be, and no fewer.
            named = frozenset(name for _, rule, _ in covering for name in (*rule.region, *rule.phase, *rule.band))
            self._of_class[path] = covering, named
        covering, named = self._of_class[path]
        place = (path, *(name if name in named else "" for name in (region, phase, band)))
        if place not in self._fronts:
            self._fronts[place] = front(cell_matches(covering, *place[1:]))
        return self._fronts[place]

    def outcome(self, path: str, region: str, phase: str, band: str) -> Outcome:
        """Return what holds for a cell."""
        ahead = self.front(path, region, phase, band)
        return ahead[0].outcome if ahead else _UNDECIDED

    def where(self, path: str, phase: str, band: str, kind: str) -> str:
        """Return the line of a rule that says something of a class in a phase, in words."""
        ahead = [self.front(path, region, phase, band)[:1] for region in self.declared]
        numbers = [match.number for matches in ahead for match in matches if match.outcome[0] == kind]
        return self.policy.at(f"rules.{min(numbers)}") if numbers else ""

    def decide(self, path: str, phase: str, band: str, route: RegionWeights, problems: list[str]) -> Decision:
        """Return the decision that a class's cells in a phase come to, and note what's wrong with them."""
        kinds = {self.outcome(path, region, phase, band)[0] for region in self.declared}
        if "defer" in kinds and len(kinds) > 1:
            problems.append(
                f"{path}{of_band(band)} is deferred in phase {phase}{self.where(path, phase, band, 'defer')}, but "
                "rules for single regions say otherwise; a class is deferred for all regions or none"
            )
        if "defer" in kinds:
            return "defer"
        if not any(route) and "weight" in kinds:
            problems.append(
                f"{path}{of_band(band)} is admitted in phase {phase} with weight 0 for every region"
                f"{self.where(path, phase, band, 'weight')}, "
                "and would run and teach nothing: use decision: reject"
            )
        return decision_of(route)


class Lowering:
    """What lowers the weights that the rules give: never a weight above theirs.

    Args:
        policy: as written.
    """

    def __init__(self, policy: PolicyFile) -> None:
        self._policy, depth = policy, policy.depth
        self._ranges = {depth.name_of(text): text for text in depth.ranges} if depth else {}
        self._of_class: dict[str, list[tuple[int, Attenuation]]] = {}
        self._openings: dict[tuple[str, str], list[tuple[int, OpenBlocks]]] = {}

    def of_class(self, path: str) -> list[tuple[int, Attenuation]]:
        """Return the attenuations that cover a class, with their places in the file from 1."""
        if path not in self._of_class:
            self._of_class[path] = [(n, one) for n, one in enumerate(self._policy.attenuate, 1) if covers(one, path)]
        return self._of_class[path]

    def covering_kind(self, path: str, kind: RowKind) -> tuple[int, ...]:
        """Return which attenuations cover rows of a kind, in some region and phase."""
        own = dict(kind.grades)
        return tuple(number for number, one in self.of_class(path) if own[one.measure] in ("", *one.grade))

    def covering(self, path: str, kind: RowKind, phase: str, region: str) -> list[tuple[int, Attenuation]]:
        """Return the attenuations of a cell; where something wasn't measured, those of each of its grades."""
        own = self.covering_kind(path, kind)
        return [
            (number, one)
            for number, one in self.of_class(path)
            if number in own and not {region, "*"}.isdisjoint(one.region) and not {phase, "*"}.isdisjoint(one.phase)
        ]

    def closing(self, path: str, phase: str, region: str) -> list[tuple[int, OpenBlocks]]:
        """Return the openings of depth that leave a region closed for a class in a phase."""
        depth = self._policy.depth
        if depth is None or region not in self._ranges:
            return []
        if (path, phase) not in self._openings:
            own = [(n, one) for n, one in enumerate(depth.open, 1) if covers(one, path)]
            self._openings[path, phase] = [(n, one) for n, one in own if not {phase, "*"}.isdisjoint(one.phase)]
        return [(n, one) for n, one in self._openings[path, phase] if self._ranges[region] not in one.blocks]

    def concerns(self, path: str) -> bool:
        """Return whether anything lowers a weight of a class."""
        depth = self._policy.depth
        return bool(self.of_class(path)) or (depth is not None and any(covers(one, path) for one in depth.open))

    def factor(self, path: str, kind: RowKind, phase: str, region: str) -> float:
        """Return what a cell's weight is multiplied with, from 0 to 1."""
        if self.closing(path, phase, region):
            return 0.0
        return min((one.factor for _, one in self.covering(path, kind, phase, region)), default=1.0)


PolicyRow = tuple[tuple[RegionWeights, ...], tuple[Decision, ...]]
"""Of one kind of a class's rows: weights and decision by phase."""


class Decider:
    """Decides all cells of a policy.

    Args:
        policy: as written.
        classes: of the taxonomy.
        regions: cut by the policy's selectors.
        phases: their names.

    Attributes:
        problems: what isn't sound about what was decided so far.

    Raises:
        PolicyError: rules disagree.
    """

    def __init__(self, policy: PolicyFile, classes: Sequence[str], regions: Regions, phases: Sequence[str]) -> None:
        self._policy, self._regions, self._phases = policy, regions, phases
        self._cells, self._lowering = decide_cells(policy, classes, regions.declared), Lowering(policy)
        self.problems: list[str] = []

    def rows(self, path: str) -> list[PolicyRow]:
        """Return the rows of a class, one for each kind; those that the same attenuations cover are one."""
        ruled = {band: self._ruled(path, band) for band in self._policy.band_names}
        found: dict[tuple[str, tuple[int, ...]], PolicyRow] = {}
        places = [(kind.band, self._lowering.covering_kind(path, kind)) for kind in self._policy.kinds]
        for place, kind in zip(places, self._policy.kinds, strict=True):
            if place not in found:
                found[place] = self._lowered(path, kind, ruled[kind.band])
        return [found[place] for place in places]

    def _ruled(self, path: str, band: str) -> PolicyRow:
        """Return what the rules say of a class's band."""
        policy, cells = self._policy, self._cells
        if policy.band_names.index(band) < lowest_band(policy, path):
            nothing = (0.0,) * len(self._regions.names)
            return (nothing,) * len(self._phases), tuple["Decision", ...]("reject" for _ in self._phases)
        routes = tuple(self._route(path, phase, RowKind(band), is_lowered=False) for phase in self._phases)
        decisions = [
            cells.decide(path, phase, band, route, self.problems)
            for phase, route in zip(self._phases, routes, strict=True)
        ]
        for index, one in enumerate(decisions):
            if one == "defer" and not {"admit", "gate"} & set(decisions[index:]):
                self.problems.append(
                    f"{path}{of_band(band)} is deferred in phase {self._phases[index]}"
                    f"{cells.where(path, self._phases[index], band, 'defer')}, and no later phase admits it: "
                    "give it a weight there, or reject it"
                )
        return routes, tuple(decisions)

    def _route(self, path: str, phase: str, kind: RowKind, *, is_lowered: bool) -> RegionWeights:
        """Return a weight for each region; tied ones learn as little as the least of them may."""

        def weight(name: str) -> float:
            ruled = self._cells.outcome(path, name, phase, kind.band)[1]
            return ruled * self._lowering.factor(path, kind, phase, name) if is_lowered else ruled

        return tuple(min(map(weight, names)) for names in self._regions.members)

    def _lowered(self, path: str, kind: RowKind, ruled: PolicyRow) -> PolicyRow:
        """Return what is left of a band's row for one kind of its rows: what has no weight left is rejected."""
        if not self._lowering.concerns(path) or not any(map(any, ruled[0])):
            return ruled
        routes = tuple(self._route(path, phase, kind, is_lowered=True) for phase in self._phases)
        decisions: list[Decision] = []
        for index, (was, route) in enumerate(zip(ruled[1], routes, strict=True)):
            waits = was == "defer" and any(map(any, routes[index:]))
            decisions.append("defer" if waits else decision_of(route))
        return routes, tuple(decisions)


def combined(members: Sequence[Sequence[PolicyRow]]) -> list[PolicyRow]:
    """Return the rows of a class whose rows belong to several, kind by kind: the least of their weights.

    Args:
        members: the rows of each of them.
    """
    found = []
    for kind in zip(*members, strict=True):
        routes = tuple(
            tuple(map(min, zip(*regions, strict=True))) for regions in zip(*(routes for routes, _ in kind), strict=True)
        )
        decisions: list[Decision] = []
        for index, said in enumerate(zip(*(decisions for _, decisions in kind), strict=True)):
            waits = "defer" in said and "reject" not in said and any(map(any, routes[index:]))
            decisions.append("defer" if waits else decision_of(routes[index]))
        found.append((routes, tuple(decisions)))
    return found


def decision_of(route: RegionWeights) -> Decision:
    """Return the decision of a class that isn't deferred, by its weights."""
    if not any(route):
        return "reject"
    return "gate" if any(0 < weight < 1 for weight in route) else "admit"


def of_band(band: str) -> str:
    """Return a band in words, within a sentence."""
    return f", band {band}," if band else ""


def decide_cells(policy: PolicyFile, classes: Iterable[str], declared: Sequence[str]) -> Cells:
    """Return which rule wins each cell (class, region, phase, band).

    Raises:
        PolicyError: rules disagree.
    """
    decided = Cells(policy, declared)
    conflicts: dict[tuple[str, str, str], list[str]] = {}
    for cell in product(classes, declared, policy.phase_names, policy.band_names):
        pair = disagreement(decided.front(*cell))
        if pair:
            # A class is deferred as a whole, so that no rule can decide single regions of these cells.
            is_deferred = "defer" in (pair[0].outcome[0], pair[1].outcome[0])
            mend = "Name the phases that the other rule is for" if is_deferred else "Add a rule for these cells"
            one, other = (f"{match}{policy.at(f'rules.{match.number}')}" for match in pair)
            conflicts.setdefault((one, other, mend), []).append(f"({', '.join(filter(None, cell))})")
    refuse(
        [
            f"{one} and {other} disagree on {cells[0]}"
            + (f" and {len(cells) - 1} more cells" if len(cells) > 1 else "")
            + f": neither is more specific. {mend}"
            for (one, other, mend), cells in conflicts.items()
        ],
        "is ambiguous",
    )
    return decided


def refuse(problems: Iterable[str], why: str) -> None:
    """Refuse a policy for what is wrong with it, each thing once.

    Raises:
        PolicyError: there's something.
    """
    listed = list(dict.fromkeys(problems))
    if listed:
        msg = f"The policy {why}:\n" + "\n".join(f"  - {problem}" for problem in listed)
        raise PolicyError(msg)
