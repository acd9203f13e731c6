"""A policy, compiled: one weight for each class, phase and region, and one decision for each class and phase.

`policy_file` says what a policy file looks like and which rule wins a cell. Compiling enumerates every cell,
so that nothing is decided in a run that wasn't there to be read before it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

from torch import nn

from cosmati.errors import PlanError, PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.cells import Decider, Decision, RegionWeights, refuse
from cosmati.routing.measures import RowKind
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.rules import check_names

_TIME = re.compile(r"([0-9]+)(ba)|([0-9]+(?:\.[0-9]+)?)(dur|ep)")


@dataclass(frozen=True)
class Phase:
    """Steps `start_step` to `end_step` of the run, the end not included."""

    name: str
    start_step: int
    end_step: int


@dataclass(frozen=True)
class CompiledPolicy:
    """What each class may teach each region in each phase. Total: every cell has a value.

    A policy with bands or measures has as many rows for each class as there are kinds of its rows: see `row`.

    Args:
        classes: the taxonomy's classes; the index is the class id.
        partition: the regions that weights are for.
        phases: contiguous spans from step 0 to the end of the run.
        weight: by row, phase and region; 0 wherever the decision is `reject` or `defer`.
        decision: by row and phase.
        policy_digest: SHA-256 of the policy file's canonical JSON; 32 bytes.
        taxonomy_digest: SHA-256 of the taxonomy's canonical JSON; 32 bytes.
        kinds: the kinds of rows that it tells apart in each class.
    """

    classes: tuple[str, ...]
    partition: Regions
    phases: tuple[Phase, ...]
    weight: tuple[tuple[RegionWeights, ...], ...]
    decision: tuple[tuple[Decision, ...], ...]
    policy_digest: bytes
    taxonomy_digest: bytes
    kinds: tuple[RowKind, ...] = (RowKind(),)

    def row(self, class_id: int, kind: int = 0) -> int:
        """Return the index in `weight` and `decision` of a class's kind; all kinds are one where there are no others.

        Raises:
            PolicyError: no such class id or kind.
        """
        if not 0 <= class_id < len(self.classes):
            msg = f"There's no class {class_id}: ids go from 0 to {len(self.classes) - 1}. Rows need a class."
            raise PolicyError(msg)
        if len(self.kinds) == 1:
            return class_id
        if not 0 <= kind < len(self.kinds):
            known = f"{len(self.kinds)}: {', '.join(map(str, self.kinds))}"
            msg = f"Rows of {self.classes[class_id]} are of kind {kind}, and the policy has {known}."
            raise PolicyError(msg)
        return class_id * len(self.kinds) + kind

    @cached_property
    def bands(self) -> tuple[str, ...]:
        """Names of the kinds; one without a name where all rows of a class are alike."""
        return tuple(map(str, self.kinds))

    @cached_property
    def band_names(self) -> tuple[str, ...]:
        """Names of the bands from the lowest; one without a name where there are none."""
        return tuple(dict.fromkeys(kind.band for kind in self.kinds))

    def find_kind(self, band: int, grades: Mapping[str, str]) -> int | None:
        """Return the index in `kinds` of rows as their shard describes them; None for a band or a grade that it lacks.

        Args:
            band: number of the band; means nothing where the policy has none.
            grades: by measure; one that isn't there wasn't measured, and those that the policy lacks don't count.
        """
        names = self.band_names
        if names != ("",) and not 0 <= band < len(names):
            return None
        wanted = tuple((name, grades.get(name, "")) for name, _ in self.kinds[0].grades)
        return self._index_of.get(RowKind(names[band] if names != ("",) else "", wanted))

    def kind_of(self, band: int, grades: Mapping[str, str], what: str = "Rows") -> int:
        """Return the same, or refuse what the policy lacks.

        Raises:
            PolicyError: a band or a grade that the policy doesn't have; `what` says of which rows.
        """
        found = self.find_kind(band, grades)
        if found is not None:
            return found
        names = self.band_names
        if names != ("",) and not 0 <= band < len(names):
            msg = (
                f"{what} say band {band}, and the policy has {len(names)}: {', '.join(names)}. Write them with bands "
                "of the policy's thresholds (`Bands.band_of`)."
            )
            raise PolicyError(msg)
        for measure in dict(self.kinds[0].grades):
            known = sorted({dict(kind.grades)[measure] for kind in self.kinds} - {""})
            if (grade := grades.get(measure, "")) not in ("", *known):
                msg = (
                    f"{what} say {measure} {grade!r}, and the policy has the grades {', '.join(known)}. Add it to the "
                    "measure, or write the rows with grades that the policy has."
                )
                raise PolicyError(msg)
        raise AssertionError("a kind that isn't there lacks its band or a grade")

    @cached_property
    def _index_of(self) -> dict[RowKind, int]:
        return {kind: index for index, kind in enumerate(self.kinds)}

    def rows_of(self, class_id: int) -> range:
        """Return the rows of a class: one for each kind."""
        return range(self.row(class_id), self.row(class_id) + len(self.kinds))

    def ever_admits(self, class_id: int) -> bool:
        """Return whether some kind of a class's rows teaches something in some phase."""
        return any({"admit", "gate"} & {*self.decision[row]} for row in self.rows_of(class_id))

    @cached_property
    def row_names(self) -> tuple[tuple[str, str], ...]:
        """Class and kind of each row, in words."""
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

    def route(self, class_id: int, step: int, kind: int = 0) -> RegionWeights:
        """Return a class's weight for each region at a step.

        Raises:
            PolicyError: no such class id, kind or step.
        """
        return self.weight[self.row(class_id, kind)][self.phase_at(step)]

    @cached_property
    def routes(self) -> tuple[RegionWeights, ...]:
        """All different routes, from the one that denies most; the index is the route id."""
        return tuple(sorted({route for phases in self.weight for route in phases}))

    def route_id(self, class_id: int, phase: int, kind: int = 0) -> int:
        """Return the index in `routes` of a class's route in a phase (an index).

        Raises:
            PolicyError: no such class id, kind or phase.
        """
        if not 0 <= phase < len(self.phases):
            msg = f"There's no phase {phase}: the policy has {len(self.phases)}."
            raise PolicyError(msg)
        return self._route_ids[self.weight[self.row(class_id, kind)][phase]]

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
    refuse(check_names(policy, taxonomy, regions), "names what isn't there")
    phases = _resolve_phases(policy, num_steps, resolve or (lambda text: resolve_time(text, num_steps=num_steps)))
    decider = Decider(policy, taxonomy.classes, regions, [phase.name for phase in phases])
    rows = [row for path in taxonomy.classes for row in decider.rows(path)]
    refuse(decider.problems, "isn't sound")
    return CompiledPolicy(
        taxonomy.classes,
        regions,
        phases,
        tuple(routes for routes, _ in rows),
        tuple(decisions for _, decisions in rows),
        policy.digest,
        taxonomy.digest,
        policy.kinds,
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
    refuse(
        [
            f"phase {phase.name}{policy.at(f'phases.{number}')} would go from step {phase.start_step} to "
            f"{phase.end_step} of {num_steps}; put its `until` after the phase before and before the end of the run"
            for number, phase in enumerate(phases, 1)
            if not phase.start_step < phase.end_step <= num_steps
        ],
        "has phases out of order",
    )
    return phases
