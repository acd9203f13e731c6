"""The gradients of one step: microbatch by microbatch into the tree, whatever the number of ranks.

This is the road of every run with several microbatches, ranks, routes or passes; a plain run takes the short one in
`trainer.py`. Both give the same bits where both can go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.loss import Loss, without_tombstones
from cosmati.core.method import Position
from cosmati.core.rng import position_key
from cosmati.train.assembly import Assembly, Turn
from cosmati.train.ranks import GradientSum
from cosmati.train.routes import Route
from cosmati.train.timing import Stopwatch
from cosmati.train.tree import Leaf, leaf_of, present

Trace = Callable[[str], None]


class StepGradients(NamedTuple):
    """What one pass over a step's microbatches gave, the same on every rank.

    Attributes:
        root: mean gradients, None where absent.
        losses: summed loss of each microbatch, float64 [V].
        weights: weight of each microbatch, float64 [V].
        norms: each microbatch's norm by region as it enters the mean, float64 [V, regions], NaN where absent; None
            where not asked for.
        num_rows: rows of each microbatch that took part, int64 [V].
        statistics: what BatchNorm saw in each of this rank's microbatches.
    """

    root: Leaf
    losses: Tensor
    weights: Tensor
    norms: Tensor | None
    num_rows: Tensor
    statistics: list[Tensor]


class StepGradientsFunction:
    """Computes `StepGradients`; keeps caches only.

    Args:
        assembly: of the run.
        stopwatch: charged with forward and backward.
        tell: told of each event.
    """

    def __init__(self, assembly: Assembly, stopwatch: Stopwatch, tell: Trace) -> None:
        self._a = assembly
        self._stopwatch = stopwatch
        self._admitted: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._members = [
            [i for i, region in enumerate(assembly.region_of) if region == r]
            for r in range(len(assembly.regions.names))
        ]
        self._tell = tell

    def __call__(
        self,
        batches: Sequence[Batch],
        positions: Sequence[Position],
        routes: Sequence[Route],
        turn: Turn,
        *,
        frozen: frozenset[str] = frozenset(),
        with_norms: bool = False,
    ) -> StepGradients:
        """Run this rank's microbatches forward and backward, and sum over all ranks.

        Args:
            batches: this rank's microbatches, as the methods have left them.
            positions: their positions.
            routes: of all V microbatches.
            turn: the loss and who learns from it.
            frozen: names of parameters that don't learn in this step.
            with_norms: measure each leaf.
        """
        a = self._a
        scale = self._scale(batches)
        total = GradientSum(a.ranks, a.parameters)
        rows: list[Tensor] = []
        statistics: list[Tensor] = []
        for batch, position in zip(batches, positions, strict=True):
            route = routes[position.microbatch]
            mark = a.statistics.clear()
            leaf, loss, weight = self._leaf(batch, position, route, turn, frozen, scale)
            if a.statistics.layers:
                statistics.append(a.statistics.read(mark))
            norms = self._norms(leaf) if with_norms else []
            num_rows = _scalar(float(_num_present(batch) if route.offered else 0), a.device)
            rows.append(torch.stack([loss, weight, num_rows, *norms]))
            self._tell("leaf")
            total.push(leaf)
            self._stopwatch.lap("backward")
        facts = a.ranks.gather(torch.stack(rows))
        self._tell("tree")
        root = self._divide(total.root(), facts[:, 1], routes, scale)
        measured = facts[:, 3:] / self._denominators(facts[:, 1], routes, scale) if with_norms else None
        self._stopwatch.lap("backward")
        return StepGradients(root, facts[:, 0], facts[:, 1], measured, facts[:, 2], statistics)

    def _leaf(
        self,
        batch: Batch,
        position: Position,
        route: Route,
        turn: Turn,
        frozen: frozenset[str],
        scale: float | None,
    ) -> tuple[Leaf, Tensor, Tensor]:
        a = self._a
        absent: Leaf = [None] * len(a.parameters)
        if not route.offered:
            zero = _scalar(0.0, a.device)
            return absent, zero, zero
        a.generators.seed(position_key(a.config.seed, "forward", position.clock.step, position.microbatch))
        with a.config.autocast(a.device):
            result = without_tombstones(turn.loss(a.model, batch.data), batch)
        self._tell("forward")
        self._stopwatch.lap("forward")
        objective, loss, weight = _objective(result, scale)
        leaf = leaf_of(objective, a.parameters, self._admitted_by(route, frozen, turn))
        for region, rho in enumerate(route.weights):
            attenuated = present(leaf, self._members[region]) if rho not in (0.0, 1.0) else []
            if attenuated:
                torch._foreach_mul_(attenuated, rho)
        return leaf, _scalar(loss, a.device), _scalar(weight, a.device)

    def _scale(self, batches: Sequence[Batch]) -> float | None:
        """Return the power of two near 1 / (weight of a step); None where the user's scalar is taken as it is.

        It follows from shapes alone, so every rank has it before the first backward. A power of two is exact, so its
        choice doesn't change the result.
        """
        if self._a.num_microbatches == 1 and self._a.policy is None:
            return None
        size = max(1, batches[0].num_tokens * self._a.num_microbatches)
        return 2.0 ** -(size.bit_length() - 1)

    def _admitted_by(self, route: Route, frozen: frozenset[str], turn: Turn) -> tuple[int, ...]:
        key = (route.weights, frozen, turn.name)
        if key not in self._admitted:
            self._admitted[key] = tuple(
                i
                for i, name in enumerate(self._a.names)
                if i in turn.parameters and name not in frozen and route.weights[self._a.region_of[i]] != 0
            )
        return self._admitted[key]

    def _norms(self, leaf: Leaf) -> list[Tensor]:
        """Return the norm of the leaf in each region, NaN where it's absent; float64 scalars."""
        norms: list[Tensor] = []
        for members in self._members:
            if gradients := present(leaf, members):
                # Whole logical parameters, in the model's order: the same on any number of ranks.
                norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double())  # noqa: SLF001
            else:
                norms.append(_scalar(torch.nan, self._a.device))
        return norms

    def _denominators(self, weights: Tensor, routes: Sequence[Route], scale: float | None) -> Tensor:
        """Return for each region the weight of the rows that may teach it, times the scale: float64 [regions]."""
        if scale is None:
            return weights.new_ones(len(self._members))
        teaches = torch.tensor([[float(rho != 0) for rho in route.weights] for route in routes], dtype=torch.float64)
        return (weights[:, None] * teaches.to(weights.device)).sum(0) * scale

    def _divide(self, root: Leaf, weights: Tensor, routes: Sequence[Route], scale: float | None) -> Leaf:
        if scale is None:
            return root
        denominators = self._denominators(weights, routes, scale).float()
        groups: dict[tuple[bool, ...], list[int]] = {}
        for region, members in enumerate(self._members):
            teachers = tuple(route.weights[region] != 0 for route in routes)
            groups.setdefault(teachers, []).extend(members)
        for members in groups.values():
            if gradients := present(root, members):
                torch._foreach_div_(gradients, denominators[self._a.region_of[members[0]]])
        return root


def _objective(result: Tensor | Loss, scale: float | None) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return what is differentiated, the loss for the record, and its weight."""
    if not isinstance(result, Loss):
        # A bare scalar is the mean of its microbatch, and microbatches weigh the same.
        return (result if scale is None else result * scale), result.detach(), 1.0
    if scale is None:
        value = result.mean()
        return value, value.detach() * result.weight, result.weight
    summed = result.sum
    for term in result.aux.values():
        summed = summed + term * result.weight
    return summed * scale, summed.detach(), result.weight


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.tensor(value, dtype=torch.float64, device=device)


def _num_present(batch: Batch) -> int:
    present = batch.present
    return batch.num_rows if present is None else int(present.sum())


def snapshot(assembly: Assembly) -> list[Tensor]:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in assembly.parameters]


def update_norms_since(assembly: Assembly, before: Sequence[Tensor]) -> Tensor:
    """Return the norm of the parameters' change by region: [regions]."""
    norms = torch.stack(
        [torch.linalg.vector_norm(p.detach() - b) for p, b in zip(assembly.parameters, before, strict=True)]
    )
    members = [
        torch.tensor([i for i, r in enumerate(assembly.region_of) if r == region], device=norms.device)
        for region in range(len(assembly.regions.names))
    ]
    return torch.stack([torch.linalg.vector_norm(norms[index]) for index in members])
