"""Which regions a microbatch may teach: its class, looked up in the policy at the step's phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cosmati.core.batch import Batch
from cosmati.errors import PlanError
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.regions import Regions


class Route(NamedTuple):
    """What one microbatch may teach.

    Attributes:
        id: index into the policy's routes; 0 without a policy.
        phase: index of the policy's phase.
        weights: one for each region.
        offered: False where the decision is to reject or defer, or all rows are tombstones: no forward pass.
    """

    id: int
    phase: int
    class_id: int
    weights: tuple[float, ...]
    offered: bool


class Router:
    """Looks routes up; without a policy every region learns from every microbatch.

    Args:
        policy: compiled, or None.
        regions: of the model.
        class_map: policy's class of each of the source's classes.
    """

    def __init__(self, policy: CompiledPolicy | None, regions: Regions, class_map: Sequence[int]) -> None:
        self._policy = policy
        self._regions = regions
        self._class_map = class_map

    def tighten(self, policy: CompiledPolicy) -> None:
        """Go by a policy that takes more away than the one before, over the same classes and regions."""
        self._policy = policy

    def route_of(self, class_id: int | None, step: int, band: int = 0, *, is_empty: bool = False) -> Route:
        """Look up what a microbatch of a class and a band may teach at a step."""
        policy = self._policy
        if policy is None:
            return Route(0, 0, 0, (1.0,) * len(self._regions.names), not is_empty)
        assert class_id is not None, "a governed source is route-pure"
        own = self._class_map[class_id]
        phase = policy.phase_at(step)
        offered = policy.decision[policy.row(own, band)][phase] in ("admit", "gate") and not is_empty
        return Route(policy.route_id(own, phase, band), phase, own, policy.route(own, step, band), offered)

    def class_of(self, batch: Batch) -> int | None:
        """Return the class of a microbatch that the user has made; rows without lineage are of class `unknown`.

        Raises:
            PlanError: a governed run, and rows of several classes, of none that exists, or of another than
                `Batch.class_id` says.
        """
        if self._policy is None:
            return batch.class_id
        found = self._classes_in(batch) if batch.lineage.is_known else []
        if batch.class_id is not None:
            found = sorted({*found, batch.class_id})
        if not found:
            return self._unknown()
        if len(found) > 1:
            says = f" (class_id = {batch.class_id} is one of them)" if batch.class_id is not None else ""
            msg = (
                f"A microbatch holds rows of classes {found}{says}, and a governed microbatch holds rows of one. Order "
                "the rows by class so that each of the V microbatches is pure, or use a Source."
            )
            raise PlanError(msg)
        if not 0 <= found[0] < len(self._class_map):
            msg = (
                f"Class id {found[0]} names no class: ids go from 0 to {len(self._class_map) - 1}, and -1 doesn't wrap."
            )
            raise PlanError(msg)
        return found[0]

    def check(self, batch: Batch, class_id: int | None) -> None:
        """Compare a microbatch's lineage with the class under which a source has announced it.

        Raises:
            PlanError: they contradict each other.
        """
        if self._policy is None or not batch.lineage.is_known:
            return
        if (found := self._classes_in(batch)) and found != [class_id]:
            msg = (
                f"The source announces a microbatch of class {class_id}, and its rows' lineage says {found}. One of "
                "them is wrong, and rows would teach what they may not: mend the source."
            )
            raise PlanError(msg)

    def _classes_in(self, batch: Batch) -> list[int]:
        ids, present = batch.lineage.class_ids, batch.present
        return [int(found) for found in (ids if present is None else ids[present]).unique().tolist()]

    def _unknown(self) -> int:
        assert self._policy is not None, "a governed run"
        own = self._policy.classes.index("unknown") if "unknown" in self._policy.classes else -1
        if own not in self._class_map:
            msg = (
                "The rows of a governed run have no lineage, so that their class isn't known, and the taxonomy has no "
                "class 'unknown' for such rows. Give step() a Batch with a Lineage, or a class_id."
            )
            raise PlanError(msg)
        return self._class_map.index(own)

    def teaches(self, route: Route, layer: str) -> bool:
        """Say whether a microbatch may move the statistics of a BatchNorm layer."""
        region = self._regions.region_of_buffer(f"{layer}.running_mean")
        return route.offered and (region is None or route.weights[region] != 0)


def empty_flags(mine: Sequence[Batch], device: torch.device) -> torch.Tensor:
    """Flag microbatches that hold nothing but tombstones, and say their bands: [V / W, 2]."""
    told = [[float(bool((batch.lineage.row_ids < 0).all())), float(batch.band)] for batch in mine]
    return torch.tensor(told, device=device)
