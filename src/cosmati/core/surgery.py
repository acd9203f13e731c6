"""What methods that rebuild models have in common: new weights find their optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def join_groups(optimizers: Optimizers, beside: Tensor, new: Mapping[str, nn.Parameter]) -> None:
    """Put new parameters into every parameter group that holds another one, with its options.

    Args:
        optimizers: one, several or none.
        beside: the parameter whose groups they join.
        new: new parameters by name; the names are kept where the group keeps names.
    """
    for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or ():
        for group in optimizer.param_groups:
            if any(parameter is beside for parameter in group["params"]):
                group["params"] += new.values()
                if "param_names" in group:
                    group["param_names"] += new
