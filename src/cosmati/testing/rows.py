"""What the rows of a step may teach, each taken alone: the oracle of routes by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.loss import Loss, LossFunction, as_loss
from cosmati.errors import BatchError


def gradients_by_row(
    model: nn.Module, microbatches: Sequence[Batch], weight_of: Callable[[int, str], float], loss: LossFunction
) -> dict[str, Tensor]:
    """Take each row of a step by itself, times its route, summed, over the weight of the rows that may teach.

    It holds for models and losses that don't couple rows, and draw nothing; in float64 a governed run's gradients are
    these up to rounding. What is added to a loss (`Loss.aux`) has to be a mean over rows of equal weight.

    Args:
        model: isn't changed.
        microbatches: of a step, of whatever sizes; their lineage tells each row's class.
        weight_of: class id and name of a parameter.
        loss: a `Loss`, or a scalar that is a mean over rows.

    Returns:
        The gradient of each trainable parameter by name; it's absent where no row may teach it.

    Raises:
        BatchError: a microbatch doesn't tell its rows' classes.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    teachers = dict.fromkeys(named, 0.0)
    for batch in microbatches:
        if not batch.lineage.is_known:
            raise BatchError(
                "The oracle wants batches whose lineage tells each row's class: Batch(data, Lineage(...))."
            )
        for row, class_id in enumerate(batch.lineage.class_ids.tolist()):
            if batch.lineage.row_ids[row] == TOMBSTONE:
                continue
            result = as_loss(loss(model, batch.select(slice(row, row + 1)).data))
            found = result if isinstance(result, Loss) else Loss(result, 1.0)
            value = found.sum + sum(found.aux.values()) * found.weight
            gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, gradients, strict=True):
                rho = weight_of(int(class_id), name)
                teachers[name] += float(found.weight) * (rho != 0)
                if rho and gradient is not None:
                    total[name] += rho * gradient
    return {name: value / teachers[name] for name, value in total.items() if teachers[name]}
