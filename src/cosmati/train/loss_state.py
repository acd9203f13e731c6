"""What a loss holds of its own: buffers, which a checkpoint keeps, and parameters, which nothing would train."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from cosmati.core.loss import LossFunction
from cosmati.errors import PlanError
from cosmati.train.held import places_in


def loss_module(loss: object) -> nn.Module | None:
    """Return the module that a loss is, or whose method it is; None for another function."""
    while isinstance(loss, partial):
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    return owner if isinstance(owner, nn.Module) else None


def loss_buffers(losses: Sequence[LossFunction], model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers that losses reach, by name, without those of the model."""
    known = {id(module) for module in model.modules()}
    return {
        f"loss/{place.name}": place.value
        for place in places_in({str(index): loss for index, loss in enumerate(losses)})
        if place.is_persistent and isinstance(place.value, Tensor) and id(place.owner) not in known
    }


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
