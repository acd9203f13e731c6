"""What a loss holds of its own: buffers, which a checkpoint keeps, and parameters, which nothing would train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cosmati.core.loss import LossFunction
from cosmati.errors import PlanError
from cosmati.train.held import Place, places_in


def loss_module(loss: object) -> nn.Module | None:
    """Return the module that a loss is, or whose method it is; None for another function."""
    while isinstance(loss, partial):
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    return owner if isinstance(owner, nn.Module) else None


def loss_buffers(losses: Sequence[LossFunction], model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers that losses reach, by name, without those of the model."""
    return {name: place.value for name, place in _buffers(losses, model) if isinstance(place.value, Tensor)}


def restore_loss_buffers(
    losses: Sequence[LossFunction], model: nn.Module, saved: Mapping[str, Tensor], device: torch.device
) -> None:
    """Put back what `loss_buffers` gave. A buffer that has grown since, or was None, takes the saved tensor.

    Args:
        losses: of the run.
        model: in training.
        saved: by name, other things among it.
        device: of buffers that are None as yet.
    """
    with torch.no_grad():
        for name, place in _buffers(losses, model):
            if name in saved:
                own, value = place.value, saved[name]
                if isinstance(own, Tensor) and (own.dtype, own.shape) == (value.dtype, value.shape):
                    own.copy_(value)
                elif place.put is not None:
                    place.put(value.to(own.device if isinstance(own, Tensor) else device, copy=True))


def _buffers(losses: Sequence[LossFunction], model: nn.Module) -> Iterator[tuple[str, Place]]:
    known = {id(module) for module in model.modules()}
    for place in places_in({str(index): loss for index, loss in enumerate(losses)}):
        if place.is_persistent and id(place.owner) not in known:
            yield f"loss/{place.name}", place


def refuse_untrained(losses: Sequence[LossFunction], model: nn.Module) -> None:
    """Refuse parameters of a loss: optimizers hold the model's, so these would never learn.

    Raises:
        PlanError: there are some that require a gradient; the message names them.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for loss in losses:
        module = loss_module(loss)
        named = module.named_parameters() if module is not None else ()
        lost = [name for name, p in named if p.requires_grad and id(p) not in known]
        if lost:
            msg = (
                f"The loss {type(module).__name__} has parameters of its own ({', '.join(lost[:5])}), and nothing "
                "trains them: the optimizers hold the model's. Put the loss's module into the model, or freeze it "
                "with requires_grad_(False)."
            )
            raise PlanError(msg)
