"""The contract of a loss, and the losses that most tasks need.

A loss is called with the model and the batch's data, and returns a scalar, or `Loss(sum, weight)`. The mean is then
taken once, over the whole step, whatever the number of microbatches and ranks. What has a `loss` (a dictionary, a
Hugging Face model's output) is taken for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Data, input_of, target_of
from cosmati.core.labels import count_own_labels
from cosmati.core.out_of_range import look_once, refuse_index
from cosmati.core.own_loss import are_probabilities, own_mixed_logits, own_rows, own_soft_logits
from cosmati.errors import BatchError

LossFunction = Callable[[nn.Module, Data], "Tensor | Loss"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that knows what its mean divides by.

    Attributes:
        sum: scalar with a graph.
        weight: what the mean divides by: rows, tokens or positives; a number or a scalar tensor.
        per_row: each row's part of `sum`, [rows]. Methods that choose among rows need it.
        per_row_weight: each row's part of `weight`, [rows]; None means 1 each.
        aux: named scalars that are added (balancing losses and the like), each averaged over the step's microbatches by
            their `weight`, so that it counts as much as the mean that it stands beside.
    """

    sum: Tensor
    weight: Tensor | float
    per_row: Tensor | None = None
    per_row_weight: Tensor | None = None
    aux: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self) -> Tensor:
        """Return sum / weight, with the auxiliary terms added."""
        value = self.sum / self.weight
        for term in self.aux.values():
            value = value + term
        return value


def as_loss(result: object) -> Tensor | Loss:
    """Take what a loss function has returned for a scalar or a `Loss`.

    On an accelerator a weight isn't looked at, which would wait for it: the sum becomes NaN where the weight is wrong,
    and the check of finite losses finds that before the commit.

    Raises:
        BatchError: it is neither, has several values, no fractions or no graph, or its weight is negative or NaN.
    """
    if type(result) is Tensor and result.dtype is torch.float32 and result.numel() == 1 and result.requires_grad:
        return result  # The usual case, first.
    if not isinstance(result, Tensor | Loss):
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if not isinstance(found, Tensor | Loss):
            keys = f" of {', '.join(map(repr, result))}" if isinstance(result, Mapping) else ""
            msg = (
                f"The loss function returned a {type(result).__name__}{keys}, and not a scalar tensor. Return one, "
                "Loss(sum, weight), or a dictionary with the term to train on as 'loss'; add several terms up, or "
                "give them as Loss(..., aux={name: term})."
            )
            raise BatchError(msg)
        result = found
    scalar = result.sum if isinstance(result, Loss) else result
    if scalar.numel() != 1:
        msg = (
            f"The loss has shape {tuple(scalar.shape)}, and a loss is a scalar. Return its mean, or "
            "Loss(values.sum(), float(len(values)), per_row=values)."
        )
        raise BatchError(msg)
    if not scalar.is_floating_point():
        msg = f"The loss is of type {scalar.dtype}, which has no gradient. Return a loss of floating point, no count."
        raise BatchError(msg)
    if isinstance(result, Loss):
        result = _with_sound_weight(result)
    if not scalar.requires_grad and not (isinstance(result, Loss) and _weighs_nothing(result.weight)):
        msg = (
            "The loss has no graph, so nothing could learn from it: it was computed under torch.no_grad(), from "
            ".detach() or .item(), or reads no trainable parameter. Compute it from the model's output."
        )
        raise BatchError(msg)
    return result


def _with_sound_weight(loss: Loss) -> Loss:
    weight = loss.weight
    if isinstance(weight, Tensor) and not weight.is_cpu:
        is_sound = (weight >= 0) & (weight < math.inf)
        return replace(loss, sum=torch.where(is_sound, loss.sum, math.nan))
    value = weight.item() if isinstance(weight, Tensor) else float(weight)
    if not 0 <= value < math.inf:
        msg = (
            f"The loss has weight {value}. A weight is what the mean divides by: rows, tokens or positives, 0 "
            "or more. To learn away from something, negate the sum."
        )
        raise BatchError(msg)
    return loss


def _weighs_nothing(weight: Tensor | float) -> bool:
    return (isinstance(weight, Tensor) and not weight.is_cpu) or bool(weight == 0)


def without_tombstones(loss: Tensor | Loss, present: Tensor | None) -> Tensor | Loss:
    """Leave the rows that aren't there out of a loss.

    The rows are dropped by `where`, since 0 x inf is NaN.

    Args:
        loss: of the batch.
        present: mask of the rows that are there, bool [rows]; None where all are (see `Batch.present`).

    Raises:
        BatchError: the batch has tombstones, and the loss doesn't tell its rows apart.
    """
    if present is None:
        return loss
    if not isinstance(loss, Loss) or loss.per_row is None:
        msg = (
            "The batch has tombstone rows, and the loss doesn't tell rows apart. Return Loss(sum, "
            "weight, per_row=...), "
            "or use a source with tail='drop'."
        )
        raise BatchError(msg)
    present = present.to(loss.per_row.device)
    row_weight = torch.ones_like(loss.per_row) if loss.per_row_weight is None else loss.per_row_weight
    per_row = torch.where(present, loss.per_row, 0.0)
    row_weight = torch.where(present, row_weight, 0.0)
    return Loss(per_row.sum(), row_weight.sum(), per_row, row_weight, loss.aux)


class MixedTarget(NamedTuple):
    """Two targets and the share of the first: the loss is interpolated, not the target."""

    first: Tensor
    second: Tensor
    mixing: Tensor


@dataclass(frozen=True)
class Classification:
    """Cross-entropy over rows, or over positions.

    Reads `(input, target)`: logits [rows, classes, ...]; targets of class indices [rows, ...] or of probabilities,
    the logits' shape, which may be integers (one-hot). With a probability target, the loss is that of soft
    cross-entropy.

    Args:
        num_classes: what target methods (label smoothing, MixUp) need to know of integer targets.
        ignore_index: target that has no weight.
    """

    num_classes: int
    ignore_index: int = -100

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        """Return the summed cross-entropy, weighted by rows.

        Raises:
            BatchError: targets don't fit the logits. Labels on an accelerator are looked at in the first batch only.
        """
        logits, target = model(input_of(data)), target_of(data)
        is_ours = type(self).compare is Classification.compare  # else labels may mean something else
        if is_ours and isinstance(target, Tensor) and not target.is_cpu and not target.is_floating_point():
            look_once(model, logits, target, self.ignore_index)
        return self.compare(logits, target)

    def compare(self, logits: Tensor, target: Tensor | MixedTarget) -> Loss:
        """Return the loss of logits [rows, classes, ...] against a target."""
        if isinstance(target, MixedTarget):
            return _interpolate(self.compare(logits, target.first), self.compare(logits, target.second), target.mixing)
        logits = logits.float()
        if target.shape == logits.shape and not target.is_floating_point():
            target = target.to(logits.dtype)
        if target.is_floating_point():
            if target.shape != logits.shape:
                msg = (
                    f"Targets as probabilities {tuple(target.shape)} don't fit logits {tuple(logits.shape)}. Give "
                    f"Classification(num_classes=...) the number of the model's outputs, here {logits.shape[1]}."
                )
                raise BatchError(msg)
            per_row = F.cross_entropy(logits, target, reduction="none")
            # A position without any probability is an ignored one.
            return _from_positions(per_row, (target != 0).any(dim=1).to(per_row.dtype))
        target = target.long()  # -100 would be 156 among bytes
        positions = logits.shape[:1] + logits.shape[2:]
        if logits.ndim > 1 and target.shape != positions:
            msg = (
                f"Labels {tuple(target.shape)} don't fit logits {tuple(logits.shape)}, [rows, classes, ...]: give one "
                f"for each row or position, {tuple(positions)}."
            )
            raise BatchError(msg)
        try:
            per_row = F.cross_entropy(logits, target, reduction="none", ignore_index=self.ignore_index)
        except IndexError as error:
            refuse_index(error)
            raise
        return _from_positions(per_row, (target != self.ignore_index).to(per_row.dtype))


@dataclass(frozen=True)
class LanguageModel:
    """Next-token cross-entropy.

    Reads integer tokens [rows, length + 1] (a tensor, or the input of the batch): the model sees all but the last,
    and predicts all but the first. Reads `(input, target)` as given, where there is a target; `documents` of a mapping
    go to the model by that name. What a model's output has as `aux`, by name, is added (see `Loss.aux`).
    """

    num_classes: int = 256
    ignore_index: int = -100

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        """Return the summed cross-entropy, weighted by tokens."""
        if isinstance(data, Tensor):
            data = (data[:, :-1], data[:, 1:])
        told = {"documents": data["documents"]} if isinstance(data, Mapping) and "documents" in data else {}
        output = model(input_of(data), **told)
        logits = getattr(output, "logits", output).movedim(-1, 1)
        target = target_of(data)
        target = target if target.is_floating_point() else target.long()
        loss = Classification(self.num_classes, self.ignore_index).compare(logits, target)
        aux = getattr(output, "aux", None)
        return replace(loss, aux=aux) if isinstance(aux, Mapping) else loss


@dataclass(frozen=True)
class Regression:
    """Squared error, averaged over rows; each row's error is the mean over its outputs."""

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        """Return the summed squared error, weighted by rows."""
        return self.compare(model(input_of(data)), target_of(data))

    def compare(self, output: Tensor, target: Tensor | MixedTarget) -> Loss:
        """Return the loss of outputs [rows, ...] against targets of the same shape."""
        if isinstance(target, MixedTarget):
            return _interpolate(self.compare(output, target.first), self.compare(output, target.second), target.mixing)
        if output.shape != target.shape:
            msg = (
                f"Regression compares outputs {tuple(output.shape)} with targets {tuple(target.shape)}: the shapes "
                "must be equal, or broadcasting would average the wrong pairs. Reshape one of them."
            )
            raise BatchError(msg)
        per_row = (
            (output.float() - target.float()).square().flatten(1).mean(1)
            if output.ndim > 1
            else (output.float() - target.float()).square()
        )
        return Loss(per_row.sum(), float(per_row.shape[0]), per_row)


def huggingface_loss(model: nn.Module, data: Data) -> Loss:
    """Take the loss from a Hugging Face model, which has averaged it over its labels.

    The weight is the label count, shifted by one position where the model, or the one that it wraps, does that. Where
    the loss is the mean cross-entropy of the logits, rows are told apart: a classifier's always, those of tokens where
    no graph is kept, as when they're scored. Labels that a method has made probabilities of are compared as such.

    Raises:
        BatchError: the batch has no `labels`, over how many the model averages can't be told, or they are probabilities
            and its own loss is no cross-entropy.
    """
    if not isinstance(data, Mapping) or "labels" not in data:
        msg = (
            "A Hugging Face model computes its loss from `labels`; the batch has none. Add "
            "labels=input_ids for a causal model."
        )
        raise BatchError(msg)
    labels = data["labels"]
    if isinstance(labels, MixedTarget):
        logits = own_mixed_logits(model, data, labels.first)
        return Classification(logits.shape[1]).compare(logits, labels)
    if isinstance(labels, Tensor) and are_probabilities(model, labels):
        return Classification(labels.shape[1]).compare(*own_soft_logits(model, data, labels))
    weight = count_own_labels(model, labels)
    # A mean over no labels is NaN, and NaN times 0 too: such rows get any labels, and weigh nothing.
    safe = torch.where(weight > 0, labels, torch.zeros_like(labels))
    output = model(**{**data, "labels": safe})
    total = output.loss * weight
    found = own_rows(model, output, labels)
    if found is None:
        return Loss(total, weight)
    values, counts = found
    rows = _from_positions(values, counts.to(values.dtype))
    return Loss(total, weight, rows.per_row, rows.per_row_weight)


def _from_positions(values: Tensor, weights: Tensor) -> Loss:
    per_row, row_weight = (
        (values.flatten(1).sum(1), weights.flatten(1).sum(1)) if values.ndim > 1 else (values, weights)
    )
    return Loss(per_row.sum(), row_weight.sum(), per_row, row_weight)


def _interpolate(first: Loss, second: Loss, mixing: Tensor) -> Loss:
    return Loss(
        mixing * first.sum + (1 - mixing) * second.sum,
        mixing * first.weight + (1 - mixing) * second.weight,
        _blend(first.per_row, second.per_row, mixing),
        _blend(first.per_row_weight, second.per_row_weight, mixing),
    )


def _blend(first: Tensor | None, second: Tensor | None, mixing: Tensor) -> Tensor | None:
    return None if first is None or second is None else mixing * first + (1 - mixing) * second
