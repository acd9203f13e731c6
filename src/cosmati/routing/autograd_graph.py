"""What an objective's graph leads to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmati.routing.split_forward import GATE

GraphNode = Any
"""A node of a graph, which PyTorch gives no type that says all."""


def parameters_reached(objective: Tensor) -> set[int]:
    """Return the `id` of each parameter to which the graph of an objective leads."""
    waiting, found = [objective.grad_fn], set[int]()
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for child, _ in () if node is None else node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
                if (variable := getattr(child, "variable", None)) is not None:
                    found.add(id(variable))
    return found


class RunSpan(NamedTuple):
    """One run of a module that runs once for each route, by the numbers that nodes get in the order they're made in.

    Attributes:
        first: nodes of the run come after it.
        last: and before this one.
        merging: after it come those that take each token's part of what the runs gave.
        merged: and before this one.
    """

    first: int
    last: int
    merging: int
    merged: int

    def may_lead_in(self, node: GraphNode) -> bool:
        """Say whether a node may lead to those of the run: it was made there, or takes tokens' parts."""
        number: int = node._sequence_nr()  # noqa: SLF001
        return self.first < number < self.last or self.merging < number < self.merged


def next_number() -> int:
    """Return the number of a node that is made now."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():  # noqa: SLF001
        node: GraphNode = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    return int(node._sequence_nr())  # noqa: SLF001


def made_by(node: GraphNode, runs: Sequence[RunSpan]) -> RunSpan | None:
    """Return which of some runs, in their order, made a node; None where none did."""
    if node is None or not runs:
        return None
    number = node._sequence_nr()  # noqa: SLF001
    before = bisect_left(runs, (number,)) - 1
    return runs[before] if before >= 0 and number < runs[before].last else None


def gated_behind(entrance: GraphNode, runs: Sequence[RunSpan]) -> set[int]:
    """Return the `id` of each parameter to whose gate a run leads from one of its nodes, within that run."""
    run, found = made_by(entrance, runs), set[int]()
    waiting, seen = [(entrance, False)], {entrance}
    while waiting:
        node, is_gated = waiting.pop()
        is_gated |= isinstance(node, GATE)
        for child, _ in node.next_functions:
            if child is None or child in seen or not (is_gated or made_by(child, runs) is run):
                continue
            seen.add(child)
            if is_gated and (variable := getattr(child, "variable", None)) is not None:
                found.add(id(variable))
            waiting.append((child, is_gated))
    return found
