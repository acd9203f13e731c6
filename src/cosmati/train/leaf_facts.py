"""What each microbatch of a step tells beside its gradients, and the table that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.errors import BatchError
from cosmati.train.direction_sketch import WIDTH
from cosmati.train.due_details import DueDetails


class LeafFacts(NamedTuple):
    """What a microbatch tells beside its leaf.

    Attributes:
        loss: summed, or the scalar that the user's loss gave.
        weight: of it.
        num_rows: how many took part.
        num_labels: what a scalar may be the mean of.
        label_key: the same in microbatches with equally many labels (`LabelCount.key`); 0 where the loss tells its own
            weight.
        failure: one of those in `failures`; 0 where there's none.
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
    if not num_labels.is_cpu:
        is_uneven = keys.max() > torch.where(keys > 0, keys, torch.inf).min()
        return torch.where(is_uneven, torch.nan, loss)
    if len({key for key in keys.tolist() if key > 0}) > 1:
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


class LeafFigures(NamedTuple):
    """What is measured of leaves by region, on its cadence; a kind that isn't due is None, or has no column.

    Attributes:
        norms: float64 [microbatches, regions].
        sketches: of their directions, float64 [microbatches, regions, 16].
        entropies: of activations, float64 [microbatches, regions].
    """

    norms: Tensor | None = None
    sketches: Tensor | None = None
    entropies: Tensor | None = None

    def joined(self, others: Sequence[LeafFigures]) -> LeafFigures:
        """Return the figures over several sub-steps, each of which has parameters of its own; entropies of this one."""
        norms = [one.norms for one in (self, *others) if one.norms is not None]
        sketches = [one.sketches for one in (self, *others) if one.sketches is not None]
        if len(norms) < 2:
            return self
        squared = _total(torch.stack(norms), torch.Tensor.square)
        return LeafFigures(squared.sqrt(), _total(torch.stack(sketches)) if sketches else None, self.entropies)


def _total(stacked: Tensor, form: Callable[[Tensor], Tensor] = torch.Tensor.clone) -> Tensor:
    """Return the sum over the first dimension, without NaN; NaN where there's nothing else."""
    return torch.where(stacked.isnan().all(0), torch.nan, form(stacked.nan_to_num(nan=0.0)).sum(0))


def table_of(
    seen: Sequence[LeafFacts], figures: Sequence[Sequence[Tensor]], num_classes: int, device: torch.device
) -> Tensor:
    """Return labels by class, other facts and figures of each microbatch: [n, classes + 6 + columns of figures].

    Args:
        seen: of each microbatch.
        figures: norms, sketches and entropies, of each microbatch all regions'; a kind that isn't due is empty.
        num_classes: of the source, where rows are packs; else 0.
        device: of the table.
    """
    parts: list[Tensor] = []
    if num_classes:
        none = torch.zeros(num_classes, dtype=torch.float64, device=device)
        parts.append(torch.stack([none if one.labels is None else one.labels for one in seen]))
    parts.append(_facts([one[:-1] for one in seen], device))
    given = [torch.stack(list(kind)).to(device, torch.float64) for kind in figures if kind]
    parts += [kind.view(len(seen), -1) for kind in given]
    return torch.cat(parts, dim=1)


def figures_in(table: Tensor, due: DueDetails, denominators: Tensor | None, num_regions: int) -> LeafFigures:
    """Return the figures of all microbatches from the last columns of their table, as they enter the mean.

    Args:
        table: columns of `table_of` after the facts.
        due: what has columns.
        denominators: of each region, float64 [regions]; None where nothing is divided.
        num_regions: of the model.
    """
    sizes = [num * num_regions for num, is_due in ((1, due.norms), (WIDTH, due.sketch), (1, due.entropy)) if is_due]
    parts = iter(table.split(sizes, dim=1) if sizes else ())
    norms = next(parts) if due.norms else None
    sketches = next(parts).unflatten(1, (num_regions, WIDTH)) if due.sketch is not None else None
    entropies = next(parts) if due.entropy else None
    if denominators is None:
        return LeafFigures(norms, sketches, entropies)
    norms = None if norms is None else norms / denominators
    return LeafFigures(norms, None if sketches is None else sketches / denominators[:, None], entropies)


def _facts(rows: Sequence[Sequence[Tensor | float]], device: torch.device) -> Tensor:
    if device.type == "cpu":
        numbers = [[value.item() if isinstance(value, Tensor) else value for value in row] for row in rows]
        return torch.tensor(numbers, dtype=torch.float64)
    # An accelerator would be waited for: its numbers stay there.
    return torch.stack([_column(values, device) for values in zip(*rows, strict=True)], dim=1)


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device).detach().reshape(()) for v in values]
        )
    return torch.tensor(values, dtype=torch.float64, device=device)
