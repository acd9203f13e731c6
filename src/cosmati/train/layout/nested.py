"""Finds backward passes that run within a backward pass: reentrant checkpoints, reversible layers.

Their parameters aren't in the outer graph. A pass that asks for some gradients alone passes them over without a word.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from cosmati.core.function_code import names_read

_OF_A_PASS = frozenset({"backward", "enable_grad", "set_grad_enabled"})
"""What a function's own backward says where it differentiates: a graph isn't made there without the latter two."""


def runs_within(objective: Tensor) -> bool:
    """Say whether a function among what an objective was computed by runs a backward pass in its own one.

    Told by the names in its code, and in the code of functions within it; what that calls isn't read.
    """
    nodes, left, kinds = set[Any](), [objective.grad_fn], set[type]()
    while left:
        node = left.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        kinds.add(type(node))
        left += [following for following, _ in node.next_functions]
    return any(_differentiates(kind) for kind in kinds)


def _differentiates(kind: type) -> bool:
    """Say it of a kind of node; those of PyTorch's own have no Python."""
    function = getattr(getattr(kind, "_forward_cls", None), "backward", None)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return code is not None and not _OF_A_PASS.isdisjoint(names_read(code))
