"""Weights as they travel where `gather_precision` is `bfloat16`: what a step's passes read, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.train.ranks import all_gather


@contextmanager
def rounded(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Round parameters to bfloat16 for a while, in place, and put their own values back from a saved copy."""
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, own in zip(parameters, kept, strict=True):
                parameter.copy_(own)


def gather_weights(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None, *, rounds: bool) -> None:
    """Gather equal pieces of weights.

    Args:
        gathered: [W * n], what is received.
        own: [n], of its type.
        group: of the ranks; None for all.
        rounds: send them in bfloat16.
    """
    if not rounds:
        all_gather(gathered, own, group=group)
        return
    received = torch.empty_like(gathered, dtype=torch.bfloat16)
    all_gather(received, own.bfloat16(), group=group)
    gathered.copy_(received)
