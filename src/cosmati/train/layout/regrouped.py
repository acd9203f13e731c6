"""Finds sums of an input's gradients that FSDP2 groups otherwise than a plain backward pass.

FSDP2 hands a block its inputs through a node of its own. What the block reads several times is then summed within
before it's added to what others read of it; a plain pass adds one after the other. With two terms that's the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor


def is_node_of_fsdp(tensor: Tensor) -> bool:
    """Say whether a tensor comes from the node through which FSDP2 hands a block its inputs."""
    return type(tensor.grad_fn).__name__.startswith("RegisterPostBackward")


def regrouped(objective: Tensor, inputs: list[tuple[int, Tensor]]) -> set[int]:
    """Return the groups of which an input's gradient has other sums than in a plain pass.

    Args:
        objective: that is about to be differentiated.
        inputs: number of a group, and a tensor that it was given; of each call.
    """
    uses, nodes, left = Counter[tuple[Any, int]](), set[Any](), [objective.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        uses.update(node.next_functions)
        left += [following for following, _ in node.next_functions]
    return {
        number
        for number, tensor in inputs
        if tensor.grad_fn is not None
        and uses[tensor.grad_fn, tensor.output_nr] > 1
        and uses[tensor.grad_fn.next_functions[tensor.output_nr]] > 1
    }
