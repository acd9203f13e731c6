"""What packs may teach, taken document by document: the oracle of routes by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.labels import IGNORED
from cosmati.core.loss import Loss, LossFunction, as_loss
from cosmati.errors import BatchError


def gradients_by_document(
    model: nn.Module, microbatches: Sequence[Batch], weight_of: Callable[[int, str], float], loss: LossFunction
) -> dict[str, Tensor]:
    """Take each document of a step by itself, times its route, summed, over the labels that may teach.

    A document stands where it stood: all other tokens are 0, and nobody predicts them. The model is taken in its own
    type; in float64 a governed run's gradients are these up to rounding.

    Args:
        model: isn't changed; without draws, such as dropout's.
        microbatches: of packs, as a `PackedSource` gives them.
        weight_of: class id and name of a parameter.
        loss: a `Loss` whose sum is over labels, or a scalar that is their mean.

    Returns:
        The gradient of each trainable parameter by name; 0 where nothing may teach it.

    Raises:
        BatchError: a microbatch isn't of packs.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    teachers = dict.fromkeys(named, 0.0)
    for batch in microbatches:
        classes = batch.lineage.token_class_ids
        if classes is None or not isinstance(batch.data, Mapping) or "documents" not in batch.data:
            raise BatchError("The oracle wants packs: a mapping with documents, and a lineage with token_class_ids.")
        documents, target = batch.data["documents"], batch.target
        for row, number in ((r, n) for r in range(len(classes)) for n in documents[r].unique().tolist()):
            own = documents[row] == number
            labels = torch.where(own, target[row], IGNORED)[None]
            num_labels = int((labels != IGNORED).sum())
            if not num_labels:
                continue
            alone = {**batch.data, "input": torch.where(own, batch.input[row], 0)[None], "target": labels}
            result = as_loss(loss(model, {**alone, "documents": documents[row][None]}))
            value = result.sum if isinstance(result, Loss) else result * num_labels
            found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                rho = weight_of(int(classes[row][own][0]), name)
                teachers[name] += num_labels * (rho != 0)
                if rho and gradient is not None:
                    total[name] += rho * gradient
    return {name: value / max(1.0, teachers[name]) for name, value in total.items()}
