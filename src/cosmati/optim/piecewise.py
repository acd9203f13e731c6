"""Which parameters an optimizer lets be cut, and which it needs together: ranks then step pieces of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.stepping import GroupedOptimizer

_BY_ELEMENT = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Rprop")
)
_BY_PARAMETER = frozenset((torch.optim.Adafactor, torch.optim.Muon))


class Demands(NamedTuple):
    """What an optimizer needs of a cut.

    Attributes:
        divisible: parameters that may be cut: it steps them element by element.
        together: parameters that one rank has to step together, where its bits follow from all of them.
    """

    divisible: list[Tensor]
    together: list[list[Tensor]]


def demands_of(optimizer: torch.optim.Optimizer) -> Demands:
    """Return what an optimizer needs of a cut.

    Raises:
        PlanError: it can't step pieces alone, or nobody knows whether it can, or it has begun.
    """
    name = type(optimizer).__name__
    mend = "Give a configuration of cosmati.optim (AdamW(lr=1e-3)), or train with RunConfig(sharding='replicated')."
    if optimizer.state:
        msg = f"{name} has state already, of whole parameters, and sharding='optimizer' gives each rank pieces. {mend}"
        raise PlanError(msg)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer) in _BY_ELEMENT:
        together = [unit for unit in map(bound_to_list, optimizer.param_groups) if unit]
        bound = {id(parameter) for unit in together for parameter in unit}
        return Demands([parameter for parameter in parameters if id(parameter) not in bound], together)
    if type(optimizer) in _BY_PARAMETER:
        return Demands([], [])
    if isinstance(optimizer, GroupedOptimizer) and _is_known(optimizer):
        elements = [group["params"] for group in optimizer.param_groups if optimizer.steps_elements(group)]
        together = [unit for group in optimizer.param_groups for unit in optimizer.kept_together(group)]
        return Demands([parameter for own in elements for parameter in own], together)
    msg = (
        f"sharding='optimizer' lets each rank step its own parameters, and nobody says whether {name} steps each by "
        f"itself. {mend} An optimizer of your own says so as a GroupedOptimizer with couples = frozenset()."
    )
    raise PlanError(msg)


def bound_to_list(group: dict[str, Any]) -> list[Tensor]:
    """Return those of a group's parameters whose bits follow from which others PyTorch's foreach steps with them.

    SGD's momentum takes another road while a parameter of the list has none yet, and on a processor foreach rounds it
    to a narrow type, which that road doesn't.
    """
    if not (group.get("momentum") and group.get("foreach")):
        return []
    return [p for p in group["params"] if p.is_cpu and p.dtype in (torch.bfloat16, torch.float16)]


def _is_known(optimizer: GroupedOptimizer) -> bool:
    if type(optimizer).__module__.startswith("cosmati."):
        return True
    declared = getattr(optimizer, "couples", None)
    return declared is not None and "regions" not in declared
