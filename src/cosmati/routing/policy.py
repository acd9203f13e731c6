"""A policy, compiled: one weight for each class, phase and region, and one decision for each class and phase.

`policy_file` says what a policy file looks like and which rule wins a cell. Compiling enumerates every cell,
so that nothing is decided in a run that wasn't there to be read before it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Literal

from torch import nn

from cosmati.errors import PlanError, PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, Rule
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.rules import (
    Match,
    Outcome,
    cell_matches,
    check_names,
    class_matches,
    disagreement,
    front,
    lowest_band,
)

Decision = Literal["admit", "gate", "defer", "reject"]
RegionWeights = tuple[float, ...]
_Place = tuple[str, ...]

_TIME = re.compile(r"([0-9]+)(ba)|([0-9]+(?:\.[0-9]+)?)(dur|ep)")
_UNDECIDED: Outcome = ("reject", 0.0)


class _Cells:
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


@dataclass(frozen=True)
class Phase:
    """Steps `start_step` to `end_step` of the run, the end not included."""

    name: str
    start_step: int
    end_step: int


@dataclass(frozen=True)
class CompiledPolicy:
    """What each class may teach each region in each phase. Total: every cell has a value.

    A policy with bands has as many rows for each class as there are bands: see `row`.

    Args:
        classes: the taxonomy's classes; the index is the class id.
        partition: the regions that weights are for.
        phases: contiguous spans from step 0 to the end of the run.
        weight: by row, phase and region; 0 wherever the decision is `reject` or `defer`.
        decision: by row and phase.
        policy_digest: SHA-256 of the policy file's canonical JSON; 32 bytes.
        taxonomy_digest: SHA-256 of the taxonomy's canonical JSON; 32 bytes.
    """

    classes: tuple[str, ...]
    partition: Regions
    phases: tuple[Phase, ...]
    weight: tuple[tuple[RegionWeights, ...], ...]
    decision: tuple[tuple[Decision, ...], ...]
    policy_digest: bytes
    taxonomy_digest: bytes
    bands: tuple[str, ...] = ("",)

    def row(self, class_id: int, band: int = 0) -> int:
        """Return the index in `weight` and `decision` of a class's band; all bands are one where there are none.

        Raises:
            PolicyError: no such class id or band.
        """
        if not 0 <= class_id < len(self.classes):
            msg = f"There's no class {class_id}: ids go from 0 to {len(self.classes) - 1}. Rows need a class."
            raise PolicyError(msg)
        if self.bands == ("",):
            return class_id
        if not 0 <= band < len(self.bands):
            msg = (
                f"Rows of {self.classes[class_id]} say band {band}, and the policy has {len(self.bands)}: "
                f"{', '.join(self.bands)}. Write them with bands of the policy's thresholds (`Bands.band_of`)."
            )
            raise PolicyError(msg)
        return class_id * len(self.bands) + band

    def rows_of(self, class_id: int) -> range:
        """Return the rows of a class: one for each band."""
        return range(self.row(class_id), self.row(class_id) + len(self.bands))

    def ever_admits(self, class_id: int) -> bool:
        """Return whether some band of a class teaches something in some phase."""
        return any({"admit", "gate"} & {*self.decision[row]} for row in self.rows_of(class_id))

    @cached_property
    def row_names(self) -> tuple[tuple[str, str], ...]:
        """Class and band of each row."""
        return tuple(product(self.classes, self.bands))

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in the order of a route's weights."""
        return self.partition.names

    def phase_at(self, step: int) -> int:
        """Return the index of the phase that a step is in.

        Raises:
            PolicyError: the step isn't in the run that the policy was compiled for.
        """
        if not 0 <= step < self.phases[-1].end_step:
            msg = f"Step {step} isn't in the run that the policy is for, 0 to {self.phases[-1].end_step - 1}."
            raise PolicyError(msg)
        return bisect_right(self._starts, step) - 1

    def route(self, class_id: int, step: int, band: int = 0) -> RegionWeights:
        """Return a class's weight for each region at a step.

        Raises:
            PolicyError: no such class id, band or step.
        """
        return self.weight[self.row(class_id, band)][self.phase_at(step)]

    @cached_property
    def routes(self) -> tuple[RegionWeights, ...]:
        """All different routes, from the one that denies most; the index is the route id."""
        return tuple(sorted({route for phases in self.weight for route in phases}))

    def route_id(self, class_id: int, phase: int, band: int = 0) -> int:
        """Return the index in `routes` of a class's route in a phase (an index).

        Raises:
            PolicyError: no such class id, band or phase.
        """
        if not 0 <= phase < len(self.phases):
            msg = f"There's no phase {phase}: the policy has {len(self.phases)}."
            raise PolicyError(msg)
        return self._route_ids[self.weight[self.row(class_id, band)][phase]]

    @cached_property
    def _starts(self) -> list[int]:
        return [phase.start_step for phase in self.phases]

    @cached_property
    def _route_ids(self) -> dict[RegionWeights, int]:
        return {route: index for index, route in enumerate(self.routes)}


def partition_by(policy: PolicyFile, model: nn.Module) -> Regions:
    """Divide a model's parameters among a policy's regions: see `partition_parameters`.

    Raises:
        PolicyError: they don't partition them; with the lines of the regions that it names.
    """
    try:
        return partition_parameters(model, policy.regions, allow_tied=policy.allow.tied)
    except PolicyError as error:
        text = str(error).replace("The regions", f"The regions{policy.at('regions')}", 1)
        for name in policy.regions:
            text = text.replace(f"region {name!r}", f"region {name!r}{policy.at(f'regions.{name}')}")
        raise PolicyError(text) from error


def compile_policy(
    policy: PolicyFile,
    *,
    taxonomy: Taxonomy,
    regions: Regions,
    num_steps: int,
    resolve: Callable[[str], int] | None = None,
) -> CompiledPolicy:
    """Decide every cell of a policy.

    Args:
        policy: the policy as written.
        taxonomy: the classes; its name must be the policy's.
        regions: `partition_by(policy, model)`.
        num_steps: length of the run.
        resolve: step number of a time string, for phases; by default `resolve_time` without epochs.

    Raises:
        PolicyError: a name that isn't there, rules that disagree, a class that's admitted without any weight,
            or deferred without a later phase that admits it; phases that are empty or out of order. All are
            listed.
    """
    _refuse(check_names(policy, taxonomy, regions), "names what isn't there")
    phases = _resolve_phases(policy, num_steps, resolve or (lambda text: resolve_time(text, num_steps=num_steps)))
    decided = _decide_cells(policy, taxonomy.classes, regions.declared)
    problems: list[str] = []
    weight, decision = list[tuple[RegionWeights, ...]](), list[tuple[Decision, ...]]()
    for path, band in product(taxonomy.classes, policy.band_names):
        if policy.band_names.index(band) < lowest_band(policy, path):
            weight.append(((0.0,) * len(regions.names),) * len(phases))
            decision.append(tuple[Decision, ...]("reject" for _ in phases))
            continue
        routes = tuple(_route(decided, path, phase.name, band, regions) for phase in phases)
        decisions = [
            _decide(decided, path, phase.name, band, regions.declared, route, problems)
            for phase, route in zip(phases, routes, strict=True)
        ]
        weight.append(routes)
        decision.append(tuple(decisions))
        for index, one in enumerate(decisions):
            if one == "defer" and not {"admit", "gate"} & set(decisions[index:]):
                problems.append(
                    f"{path}{_of(band)} is deferred in phase {phases[index].name}"
                    f"{decided.where(path, phases[index].name, band, 'defer')}, and no later phase admits it: "
                    "give it a weight there, or reject it"
                )
    _refuse(problems, "isn't sound")
    return CompiledPolicy(
        taxonomy.classes,
        regions,
        phases,
        tuple(weight),
        tuple(decision),
        policy.digest,
        taxonomy.digest,
        policy.band_names,
    )


def check_rules(policy: PolicyFile, *, taxonomy: Taxonomy) -> None:
    """Refuse a policy that no model and no length of the run would make sound.

    Raises:
        PolicyError: as `compile_policy`, but for what only the model or the run tells: the parameters of regions, the
            steps at which phases end.
    """
    names = tuple(sorted(policy.regions)) or ("all",)
    regions = Regions(names, ((),) * len(names), tuple((name,) for name in names), declared=names)
    ends = iter(range(1, 1 + len(policy.phases)))
    compile_policy(
        policy, taxonomy=taxonomy, regions=regions, num_steps=1 + len(policy.phases), resolve=lambda _: next(ends)
    )


def resolve_time(text: str, *, num_steps: int, steps_per_epoch: int | None = None) -> int:
    """Return the step at which a span from the start of the run ends, fractions of a step rounded down.

    Args:
        text: `100ba` steps, `0.2dur` of the run, or `3ep` epochs.
        num_steps: length of the run.
        steps_per_epoch: needed for epochs.

    Raises:
        PolicyError: another text, or epochs of unknown length.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        msg = f"{text!r} isn't a time. Write '100ba' (steps), '0.2dur' (part of the run) or '3ep' (epochs)."
        raise PolicyError(msg)
    if match[2]:
        return int(match[1])
    if match[4] == "ep" and steps_per_epoch is None:
        msg = f"{text!r} can't be placed: the number of steps in an epoch isn't known. Use 'ba' or 'dur'."
        raise PolicyError(msg)
    return math.floor(Fraction(match[3]) * (num_steps if match[4] == "dur" else steps_per_epoch or 0))


def _refuse(problems: Iterable[str], why: str) -> None:
    listed = list(dict.fromkeys(problems))
    if listed:
        msg = f"The policy {why}:\n" + "\n".join(f"  - {problem}" for problem in listed)
        raise PolicyError(msg)


def _resolve_phases(policy: PolicyFile, num_steps: int, resolve: Callable[[str], int]) -> tuple[Phase, ...]:
    if num_steps < 1:
        msg = f"A policy is compiled for a run of at least one step, not {num_steps}."
        raise PolicyError(msg)
    ends = []
    for number, spec in enumerate(policy.phases, 1):
        try:
            ends.append(num_steps if spec.until is None else resolve(spec.until))
        except (PolicyError, PlanError) as error:
            raise PolicyError(f"Phase {spec.name}{policy.at(f'phases.{number}')}: {error}") from error
    ends = ends or [num_steps]
    starts = [0, *ends[:-1]]
    phases = tuple(Phase(*span) for span in zip(policy.phase_names, starts, ends, strict=True))
    _refuse(
        [
            f"phase {phase.name}{policy.at(f'phases.{number}')} would go from step {phase.start_step} to "
            f"{phase.end_step} of {num_steps}; put its `until` after the phase before and before the end of the run"
            for number, phase in enumerate(phases, 1)
            if not phase.start_step < phase.end_step <= num_steps
        ],
        "has phases out of order",
    )
    return phases


def _decide_cells(policy: PolicyFile, classes: Iterable[str], declared: Sequence[str]) -> _Cells:
    """Return which rule wins each cell (class, region, phase, band)."""
    decided = _Cells(policy, declared)
    conflicts: dict[tuple[str, str, str], list[str]] = {}
    for cell in product(classes, declared, policy.phase_names, policy.band_names):
        pair = disagreement(decided.front(*cell))
        if pair:
            # A class is deferred as a whole, so that no rule can decide single regions of these cells.
            is_deferred = "defer" in (pair[0].outcome[0], pair[1].outcome[0])
            mend = "Name the phases that the other rule is for" if is_deferred else "Add a rule for these cells"
            one, other = (f"{match}{policy.at(f'rules.{match.number}')}" for match in pair)
            conflicts.setdefault((one, other, mend), []).append(f"({', '.join(filter(None, cell))})")
    _refuse(
        [
            f"{one} and {other} disagree on {cells[0]}"
            + (f" and {len(cells) - 1} more cells" if len(cells) > 1 else "")
            + f": neither is more specific. {mend}"
            for (one, other, mend), cells in conflicts.items()
        ],
        "is ambiguous",
    )
    return decided


def _of(band: str) -> str:
    return f", band {band}," if band else ""


def _route(decided: _Cells, path: str, phase: str, band: str, regions: Regions) -> RegionWeights:
    return tuple(min(decided.outcome(path, name, phase, band)[1] for name in members) for members in regions.members)


def _decide(
    decided: _Cells,
    path: str,
    phase: str,
    band: str,
    declared: Iterable[str],
    route: RegionWeights,
    problems: list[str],
) -> Decision:
    """Return the decision that a class's cells in a phase come to, and note what's wrong with them."""
    kinds = {decided.outcome(path, region, phase, band)[0] for region in declared}
    if "defer" in kinds and len(kinds) > 1:
        problems.append(
            f"{path}{_of(band)} is deferred in phase {phase}{decided.where(path, phase, band, 'defer')}, but rules "
            "for single regions say otherwise; a class is deferred for all regions or none"
        )
    if "defer" in kinds:
        return "defer"
    if not any(route):
        if "weight" in kinds:
            problems.append(
                f"{path}{_of(band)} is admitted in phase {phase} with weight 0 for every region"
                f"{decided.where(path, phase, band, 'weight')}, "
                "and would run and teach nothing: use decision: reject"
            )
        return "reject"
    return "gate" if any(0 < weight < 1 for weight in route) else "admit"
