"""What each microbatch of a step tells beside its gradients, and the table that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.errors import BatchError

SHORT, ALONE = 1.0, 2.0


class LeafFacts(NamedTuple):
    """What a microbatch tells beside its leaf.

    Attributes:
        loss: summed, or the scalar that the user's loss gave.
        weight: of it.
        num_rows: how many took part.
        num_labels: what a scalar may be the mean of.
        label_key: the same in microbatches with equally many labels (`LabelCount.key`); 0 where the loss tells its own
            weight.
        failure: `SHORT` where memory was, `ALONE` where it would have waited for ranks that don't run it; 0 otherwise.
        labels: of packs, by the source's class, float64 [classes]; None otherwise.
    """

    loss: Tensor | float
    weight: Tensor | float
    num_rows: float
    num_labels: Tensor | float
    label_key: Tensor | float
    failure: float = 0.0
    labels: Tensor | None = None


NO_LEAF = LeafFacts(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a microbatch that isn't offered."""


def even_loss(loss: Tensor, num_labels: Tensor, keys: Tensor) -> Tensor:
    """Return the loss if its microbatches' scalars are means over equally many labels, as their plain mean takes them.

    On an accelerator, nobody looks: it's NaN otherwise, and isn't committed.

    Args:
        loss: of the step.
        num_labels: of each microbatch, float64 [V].
        keys: likewise, equal where each of their tensors has equally many; 0 where it doesn't matter.

    Raises:
        BatchError: they aren't.
    """
    is_uneven = keys.max() > torch.where(keys > 0, keys, torch.inf).min()
    if not num_labels.is_cpu:
        return torch.where(is_uneven, torch.nan, loss)
    if is_uneven:
        counts = num_labels.int().tolist()
        found = ", ".join("all" if key == 1 else str(n) for n, key in zip(counts, keys.tolist(), strict=True))
        where = "" if len(set(counts)) > 1 else ", and not equally many in each of the batch's tensors"
        msg = (
            f"The loss is a bare scalar, and its microbatches have [{found}] labels that aren't ignored (-100){where}: "
            "a mean of their means would weigh labels unequally. Return Loss(sum, weight): for a Hugging Face model "
            "cosmati.huggingface_loss, else Loss(mean * num_labels, num_labels)."
        )
        raise BatchError(msg)
    return loss


def table_of(seen: Sequence[LeafFacts], norms: Sequence[Tensor], num_classes: int, device: torch.device) -> Tensor:
    """Return labels by class, other facts and norms of each microbatch: [n, classes + 6 + regions]."""
    columns: list[Tensor] = []
    if num_classes:
        none = torch.zeros(num_classes, dtype=torch.float64, device=device)
        columns += torch.stack([none if one.labels is None else one.labels for one in seen]).unbind(1)
    columns += [_column([getattr(one, field) for one in seen], device) for field in LeafFacts._fields[:-1]]
    if norms:
        columns += torch.stack(list(norms)).view(len(seen), -1).unbind(1)
    return torch.stack(columns, dim=1)


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device).detach().reshape(()) for v in values]
        )
    return torch.tensor(values, dtype=torch.float64, device=device)
