"""What an objective's graph leads to."""

from __future__ import annotations

from torch import Tensor


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
