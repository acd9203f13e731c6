"""Sees whether rows read what is another class's own: its parameters are exchanged, and no loss may move.

A penalty on all weights, or a model that calls its parts by itself, reads them whoever's rows run, also where no
gradient leads there. It costs two forward passes and a copy of what they change, so only the steps are looked at that
`ForwardWatch` looks at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, map_tensors
from cosmati.core.isolated import isolated_modules
from cosmati.core.loss import Loss, LossFunction
from cosmati.train.cutting import shortage
from cosmati.train.forward_watch import loss_roots
from cosmati.train.held import remember
from cosmati.train.layout.layout import Layout


def foreign_read(
    model: nn.Module, loss: LossFunction, layout: Layout, forward: Callable[[Batch], Tensor | Loss], batch: Batch
) -> str:
    """Say whose own parameters a microbatch of other rows reads, in words; empty where it reads none.

    Args:
        model: whose isolated modules of the microbatch's class are enabled.
        loss: that may hold state.
        layout: of the model's parameters.
        forward: runs a microbatch forward, always with the same draws.
        batch: the microbatch; it isn't touched.
    """
    modules = isolated_modules(model)
    if not modules:
        return ""
    foreign = {path: module for path, module in modules.items() if not module.is_enabled}
    weights = layout.weights().tensors
    other = {
        name: _other(weights[name].detach())
        for path, module in foreign.items()
        for name, _ in module.named_parameters(path)
        if name in weights
    }
    put_back = remember({"": model, **loss_roots([loss])})

    def value() -> Tensor:
        result = forward(dataclasses.replace(batch, data=map_tensors(torch.clone, batch.data)))
        parts = [result.sum, *result.aux.values()] if isinstance(result, Loss) else [result]
        return torch.stack([part.detach().reshape(()) for part in parts])

    try:  # Also where nothing is another's: the model may wait for other ranks, where something is.
        before = value()
        put_back()
        with layout.replaced(other):
            after = value()
        put_back()
        is_read = not _same(before, after)
        is_steady = not is_read or _same(before, value())
    except (RuntimeError, MemoryError) as error:
        if not (why := shortage(error)):
            raise
        return f"memory was too short to see who reads what is a class's own ({why})"
    finally:
        put_back()
    if not (is_read and other):
        return ""
    if not is_steady:
        return "the loss isn't the same twice, so that nobody sees whether it reads what is a class's own"
    names = sorted({module.class_name for module in foreign.values()})
    return f"the loss of other rows reads what is {' or '.join(names)}'s own: leave it out of penalties and norms"


def _same(one: Tensor, two: Tensor) -> bool:
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def _other(weight: Tensor) -> Tensor:
    """Return a weight of another mean, spread and size, with other signs."""
    return torch.linspace(1, 2, weight.numel(), device=weight.device).view(weight.shape).to(weight) - weight
