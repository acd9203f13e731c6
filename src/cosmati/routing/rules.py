"""Which rule of a policy wins a cell (class, region, phase): the most specific one on every axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cosmati.provenance.taxonomy import Taxonomy, closest
from cosmati.routing.bands import Floor
from cosmati.routing.measures import Attenuation
from cosmati.routing.policy_file import PolicyFile, Rule
from cosmati.routing.regions import Regions
from cosmati.routing.selectors import odd_letters

Outcome = tuple[Literal["weight", "reject", "defer"], float]
"""What a rule says about a cell: a weight, or a decision with weight 0."""


@dataclass(frozen=True)
class Match:
    """A rule that covers a cell.

    Args:
        number: place in the file, from 1.
        rule: the rule.
        specificity: on the axes class (segments that the pattern fixes), region, phase and band (1 for a name,
            0 for `*`).
    """

    number: int
    rule: Rule
    specificity: tuple[int, int, int, int]

    @property
    def outcome(self) -> Outcome:
        """What the rule says."""
        return self.rule.decision or "weight", (self.rule.weight or 0.0) + 0.0

    def beats(self, other: Match) -> bool:
        """Return whether the rule is at least as specific on each axis, and more so on one."""
        pairs = list(zip(self.specificity, other.specificity, strict=True))
        return all(mine >= theirs for mine, theirs in pairs) and self.specificity != other.specificity

    def __str__(self) -> str:
        return f"rule {self.number} ({rule_text(self.rule)})"


def rule_text(rule: Rule) -> str:
    """Return a rule in words, axes that it leaves open left out."""
    axes = [("class", rule.classes), ("region", rule.region), ("phase", rule.phase), ("band", rule.band)]
    parts = [f"{axis} {' | '.join(names)}" for axis, names in axes if names != ("*",)]
    result = rule.decision or f"weight {rule.weight:g}"
    return f"{', '.join(parts)}: {result}"


def matching_rules(rules: Sequence[Rule], class_path: str, region: str, phase: str, band: str = "") -> list[Match]:
    """Return the rules that cover a cell, in the file's order."""
    return cell_matches(class_matches(rules, class_path), region, phase, band)


def class_matches(rules: Sequence[Rule], class_path: str) -> list[tuple[int, Rule, int]]:
    """Return the rules that cover a class: place in the file from 1, rule, and how specific they are about it."""
    ranked = [
        (number, rule, max((_class_specificity(pattern, class_path) for pattern in rule.classes), default=-1))
        for number, rule in enumerate(rules, 1)
    ]
    return [one for one in ranked if one[2] >= 0]


def cell_matches(covering: Iterable[tuple[int, Rule, int]], region: str, phase: str, band: str) -> list[Match]:
    """Return which of the rules that cover a class cover a cell of it."""
    found = []
    for number, rule, specificity in covering:
        axes = (
            specificity,
            1 if region in rule.region else 0 if "*" in rule.region else -1,
            1 if phase in rule.phase else 0 if "*" in rule.phase else -1,
            1 if band in rule.band else 0 if "*" in rule.band else -1,
        )
        if min(axes) >= 0:
            found.append(Match(number, rule, axes))
    return found


def front(matches: Sequence[Match]) -> list[Match]:
    """Return the matches that no other one beats; where they agree they decide the cell."""
    return [match for match in matches if not any(other.beats(match) for other in matches)]


def disagreement(ahead: Sequence[Match]) -> tuple[Match, Match] | None:
    """Return two matches of a front that say different things, if there are any."""
    return next(((ahead[0], other) for other in ahead if other.outcome != ahead[0].outcome), None)


def check_names(policy: PolicyFile, taxonomy: Taxonomy, regions: Regions) -> list[str]:
    """Return what a policy names and isn't there, and regions that were cut for another policy."""
    problems = []
    if policy.taxonomy != taxonomy.name:
        name = f"{policy.taxonomy!r}{odd_letters(policy.taxonomy)}"
        problems.append(f"the policy is for taxonomy {name}, and this is {taxonomy.name!r}{policy.at('taxonomy')}")
    if regions.declared != (tuple(sorted(policy.regions)) or ("all",)):
        declared = ", ".join(sorted(policy.regions)) or "all"
        problems.append(
            f"the parameters were divided into {', '.join(regions.declared)}, "
            f"but the policy declares {declared}: divide them by its selectors"
        )
    if not policy.allow.tied:
        problems += [
            f"region {name}{policy.at('regions')} merges tied parameters, and allow.tied is false"
            for name in regions.names
            if "&" in name
        ]
    for number, rule in enumerate(policy.rules, 1):
        found = [_class_problem(pattern, taxonomy) for pattern in rule.classes]
        for axis, names, known in (
            ("region", rule.region, regions.declared),
            ("phase", rule.phase, policy.phase_names),
            ("band", rule.band, policy.bands.names if policy.bands else ()),
        ):
            found += [_unknown(axis, name, known) for name in names if name not in {*known, "*"}]
        problems += [f"rule {number}{policy.at(f'rules.{number}')}: {problem}" for problem in found if problem]
    for number, one in enumerate(policy.attenuate, 1):
        found = [_class_problem(pattern, taxonomy) for pattern in one.classes]
        measure = policy.measures.get(one.measure)
        if measure is None:
            found.append(_unknown("measure", one.measure, tuple(sorted(policy.measures))))
        for axis, names, known in (
            ("grade", one.grade, measure.grades if measure else one.grade),
            ("region", one.region, (*regions.declared, "*")),
            ("phase", one.phase, (*policy.phase_names, "*")),
        ):
            found += [_unknown(axis, name, known) for name in names if name not in known]
        problems += [f"attenuation {number}{policy.at(f'attenuate.{number}')}: {what}" for what in found if what]
    for number, floor in enumerate(policy.floors, 1):
        found = [_class_problem(pattern, taxonomy) for pattern in floor.classes]
        if floor.band not in policy.band_names:
            found.append(_unknown("band", floor.band, policy.bands.names if policy.bands else ()))
        problems += [f"floor {number}{policy.at(f'floors.{number}')}: {problem}" for problem in found if problem]
    return problems


def covers(one: Floor | Attenuation, class_path: str) -> bool:
    """Return whether a floor or an attenuation is for a class."""
    return any(_class_specificity(pattern, class_path) >= 0 for pattern in one.classes)


def lowest_band(policy: PolicyFile, class_path: str) -> int:
    """Return the lowest band, by its number, of which a class is admitted at all: the highest of its floors."""
    floors = [one.band for one in policy.floors if covers(one, class_path)]
    return max((policy.band_names.index(name) for name in floors), default=0)


def _unknown(axis: str, name: str, known: tuple[str, ...]) -> str:
    return f"no {axis} {name!r}{odd_letters(name)}{closest(name, tuple(one for one in known if one != '*'))}"


def _class_problem(pattern: str, taxonomy: Taxonomy) -> str:
    branch = pattern.removesuffix("/**")
    if pattern == "**" or (taxonomy.is_branch(branch) if branch != pattern else taxonomy.contains(pattern)):
        return ""
    if branch == pattern and taxonomy.is_branch(pattern):
        return f"{pattern!r} is a branch; write '{pattern}/**' for all classes below it"
    if taxonomy.contains(branch):
        return f"{branch!r} is a class, with none below it; leave out '/**'"
    return f"no class {pattern!r}{odd_letters(pattern)} in taxonomy {taxonomy.name}{closest(branch, taxonomy.classes)}"


def _class_specificity(pattern: str, class_path: str) -> int:
    """Return how many segments of the class a pattern fixes, or -1 where it doesn't cover the class."""
    if pattern == class_path:
        return class_path.count("/") + 1
    if pattern == "**":
        return 0
    branch = pattern.removesuffix("/**")
    return branch.count("/") + 1 if branch != pattern and class_path.startswith(f"{branch}/") else -1
