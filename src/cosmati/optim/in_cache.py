"""Steps of PyTorch's foreach optimizers on a processor, a few parameters at a time.

foreach runs each of its operators over all parameters before the next one begins. A processor has by then lost what the
operator before has read, and fetches weights, gradients and state from memory a dozen times; and what's between two
operators takes a further copy of all parameters. As many parameters as fit a core's cache, all operators, then the
next ones: that has the same bits, since each element is stepped by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cosmati.optim.piecewise import bound_to_list

_ELEMENTS = 1 << 17
"""Together: with gradient, state and what's between, 2.5 MiB in float32."""
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""These keep all that they know in the state of each parameter, and nothing in a group."""


@contextmanager
def in_cache(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer find its parameter groups cut into smaller ones, for as long as it steps.

    Nobody else may look at its groups meanwhile: what they write there is lost.

    Args:
        optimizer: of any kind; those that gain nothing find what they had.
    """
    groups = optimizer.param_groups
    if type(optimizer) in _ELEMENTWISE and all(map(_gains, groups)):
        optimizer.param_groups = [{**group, "params": few} for group in groups for few in _fews(group["params"])]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _gains(group: dict[str, Any]) -> bool:
    return bool(group.get("foreach")) and all(p.is_cpu for p in group["params"]) and not bound_to_list(group)


def _fews(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return parameters in runs of at most so many elements, or of one parameter."""
    fews, held = [list[Tensor]()], 0
    for parameter in parameters:
        held += parameter.numel()
        if fews[-1] and held > _ELEMENTS:
            fews.append([])
            held = parameter.numel()
        fews[-1].append(parameter)
    return fews
