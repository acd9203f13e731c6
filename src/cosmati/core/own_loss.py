"""A Hugging Face model's own loss taken apart: its classes, each row's part, probabilities in its labels' place.

The loss stays the model's own. What is computed beside it is the cross-entropy of its logits, which is compared with
it once: a model that weighs its classes, or adds terms, isn't taken for one that doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.labels import IGNORED, predicts_next, with_own_labels
from cosmati.errors import BatchError, PlanError

_ONE = "single_label_classification"
_FIT = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far two ways to the same mean may differ, as a share of it; 3 % in lower precision."""

_agreed: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models whose own loss was compared with their logits' cross-entropy, and whether it's that."""


def num_own_classes(model: nn.Module, target: Tensor) -> int | None:
    """Return how many classes a Hugging Face model has; None where there's no such model inside.

    A classifier of rows learns from its first labels what it's asked, and keeps that in `config.problem_type`: integers
    for one class a row, fractions for several. It's told here of its integers, as it gets probabilities in their place.

    Args:
        model: the model, or what wraps it.
        target: class indices, before anything makes probabilities of them.

    Raises:
        PlanError: the model is set to labels of another kind.
    """
    own = with_own_labels(model)
    if own is None or not hasattr(own, "config"):
        return None
    if target.ndim == 1:
        if own.config.problem_type not in (None, _ONE):
            msg = (
                f"The {type(own).__name__} is set to {own.config.problem_type!r}, and its labels are class indices. "
                f"Set model.config.problem_type = {_ONE!r}, or leave out the method that makes probabilities of them."
            )
            raise PlanError(msg)
        own.config.problem_type = _ONE
    return _num_classes(own)


def _num_classes(own: Any) -> int:  # noqa: ANN401  (a model of transformers, which nothing here imports)
    head = own.get_output_embeddings()
    return int(own.config.num_labels if head is None else head.weight.shape[0])


def are_probabilities(model: nn.Module, labels: Tensor) -> bool:
    """Say whether labels are probabilities of classes: [rows, classes], or [rows, classes, length] of tokens.

    Fractions are otherwise what the model takes them for: one yes or no for each of several labels, or numbers.
    """
    own = with_own_labels(model) if labels.is_floating_point() else None
    if own is None or labels.ndim not in (2, 3) or labels.shape[1] != _num_classes(own):
        return False
    if labels.ndim == 2:
        return bool(own.config.problem_type == _ONE)
    return own.get_output_embeddings() is not None or type(own).__name__.endswith("ForTokenClassification")


def own_rows(model: nn.Module, output: Any, labels: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ANN401
    """Return each label's cross-entropy, [rows] or [rows, length], 0 where one is ignored; and which ones count.

    Args:
        model: the model, or what wraps it.
        output: of the model, for these labels.
        labels: class indices [rows] or [rows, length].

    Returns:
        None where the model's own loss is another one, or can't be told apart at the price of a few numbers: those of
        every token are computed where no graph is kept, as when rows are scored.
    """
    if not isinstance(output.get("logits") if isinstance(output, Mapping) else None, Tensor):
        return None
    if labels.is_floating_point() or (labels.ndim > 1 and torch.is_grad_enabled()) or _agreed.get(model) is False:
        return None
    logits, target = _aligned(model, output["logits"], labels)
    if logits.shape[:1] + logits.shape[2:] != target.shape or logits.shape[1] < 2:
        return None
    values = F.cross_entropy(logits.float(), target, reduction="none", ignore_index=IGNORED)
    counts = target != IGNORED
    return (values, counts) if _agrees(model, output, values, counts) else None


def own_soft_logits(model: nn.Module, data: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the probabilities to compare them with, each [rows, classes, ...].

    The model gets the likeliest classes as its labels: some make their decoder's input of them.

    Raises:
        BatchError: its own loss isn't the cross-entropy of its logits, so that of probabilities isn't known.
    """
    has_any = (labels != 0).any(1)
    likeliest = labels.argmax(1).where(has_any, IGNORED)
    output = model(**{**data, "labels": likeliest.where(has_any.any(), 0)})
    logits, target = _aligned(model, output["logits"], likeliest)
    values = None if model in _agreed else F.cross_entropy(logits.detach().float(), target, reduction="none")
    if not _agrees(model, output, values, target != IGNORED):
        msg = (
            f"The {type(model).__name__}'s own loss isn't the mean cross-entropy of its logits, so what it is for "
            "probabilities isn't known. Leave out the methods that smooth or mix labels, or write a loss function that "
            "reads `labels` as probabilities and returns Loss(sum, weight, per_row=...)."
        )
        raise BatchError(msg)
    if predicts_next(model) and labels.ndim == 3:
        labels = labels[..., 1:]
    return logits, labels


def own_mixed_logits(model: nn.Module, data: Mapping[str, Any], first: Tensor) -> Tensor:
    """Return the logits [rows, classes] of rows that are mixed, whose labels are two of each.

    Args:
        model: the model, or what wraps it.
        data: the batch.
        first: one of its two labels, class indices or probabilities.

    Raises:
        BatchError: there's no such model, or its own loss isn't the cross-entropy of its logits.
    """
    own = with_own_labels(model)
    if own is None:
        msg = f"The {type(model).__name__} isn't a Hugging Face model with a loss of its own. Write a loss function."
        raise BatchError(msg)
    if not first.is_floating_point():
        whole = F.one_hot(first.clamp(min=0), _num_classes(own)).movedim(-1, 1)
        first = (whole * (first != IGNORED).unsqueeze(1)).float()
    return own_soft_logits(model, data, first)[0]


def own_logits(model: nn.Module, data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a Hugging Face model's logits [rows, classes, ...], and the label that each is of, -100 where none is.

    Raises:
        BatchError: the model gives no logits, or others than one set for each label.
    """
    output, labels = model(**data), data["labels"]
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(logits, Tensor) and isinstance(labels, Tensor) and logits.ndim in (2, 3):
        logits, target = _aligned(model, logits, labels)
        if logits.shape[:1] + logits.shape[2:] == target.shape:
            return logits, target
    msg = (
        f"The {type(model).__name__} doesn't give class scores for each of its labels. Write a metric of your own: a "
        "function of model and batch that returns Loss(sum, weight)."
    )
    raise BatchError(msg)


def _aligned(model: nn.Module, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [rows, classes, ...], and the label that each of them is of."""
    if logits.ndim == 2:
        return logits, labels.reshape(-1)
    if logits.ndim == 3 and labels.ndim == 2 and predicts_next(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.movedim(-1, 1), labels


def _agrees(model: nn.Module, output: Any, values: Tensor | None, counts: Tensor) -> bool:  # noqa: ANN401
    """Say whether the model's own loss is the mean of these; found out the first time that some count, and kept."""
    if model not in _agreed and values is not None:
        num = int(counts.sum())
        if not num:
            return True
        own, mean = float(output["loss"].detach()), float(values.detach().sum()) / num
        is_near = abs(own - mean) <= _FIT.get(output["logits"].dtype, 0.03) * abs(mean) + 1e-6
        # A balancing loss of experts may be small.
        _agreed[model] = is_near and "aux_loss" not in output
    return _agreed.get(model, True)
