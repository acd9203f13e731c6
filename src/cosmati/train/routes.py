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

    def route_of(self, class_id: int | None, step: int, *, is_empty: bool = False) -> Route:
        """Look up what a microbatch of a class may teach at a step."""
        policy = self._policy
        if policy is None:
            return Route(0, 0, class_id or 0, (1.0,) * len(self._regions.names), not is_empty)
        assert class_id is not None, "a governed source is route-pure"
        own = self._class_map[class_id]
        phase = policy.phase_at(step)
        offered = policy.decision[own][phase] in ("admit", "gate") and not is_empty
        return Route(policy.route_id(own, phase), phase, own, policy.route(own, step), offered)

    def class_of(self, batch: Batch) -> int | None:
        """Return the class of a microbatch that the user has made.

        Raises:
            PlanError: a governed run, and rows of several classes.
        """
        if self._policy is None or batch.class_id is not None:
            return batch.class_id
        classes = batch.lineage.class_ids.unique().tolist()
        if len(classes) != 1:
            msg = (
                f"A microbatch holds rows of classes {classes}, and a governed microbatch holds rows of one. Order the "
                "rows by class so that each of the V microbatches is pure, or use a Source."
            )
            raise PlanError(msg)
        return int(classes[0])

    def teaches(self, route: Route, layer: str) -> bool:
        """Say whether a microbatch may move the statistics of a BatchNorm layer."""
        region = self._regions.region_of_buffer(f"{layer}.running_mean")
        return route.offered and (region is None or route.weights[region] != 0)


def empty_flags(mine: Sequence[Batch], device: torch.device) -> torch.Tensor:
    """Flag microbatches that hold nothing but tombstones: [V / W, 1]."""
    return torch.tensor([[float(bool((batch.lineage.row_ids < 0).all()))] for batch in mine], device=device)
