"""Label smoothing: targets shrunk towards uniform ones (Szegedy et al., 2015, arXiv 1512.00567)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cosmati.core.batch import Batch, Data
from cosmati.core.loss import LanguageModel, MixedTarget, Regression
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.mixing import is_one_hot, known_classes

__all__ = ["LabelSmoothing", "smooth_labels"]

_IGNORE_INDEX = -100


def smooth_labels(
    logits: Tensor, target: Tensor, smoothing: float = 0.1, *, ignore_index: int = _IGNORE_INDEX
) -> Tensor:
    """Return `(1 - smoothing) * target + smoothing / num_classes`.

    Args:
        logits: [rows, classes, ...]; only the shape is read.
        target: class indices [rows, ...], or probabilities of the logits' shape.
        smoothing: in [0, 1]; 0 changes nothing, 1 forgets the target.
        ignore_index: class index of a position that isn't to be learnt. All its probabilities are zero, so
            that it has neither loss nor gradient. (Raising instead would make the host wait for the device.)

    Returns:
        Probabilities of the logits' shape: float32 for integer targets, else the target's own type.

    Raises:
        BatchError: the shapes don't fit.
    """
    if target.shape != logits.shape and target.shape != logits.shape[:1] + logits.shape[2:]:
        msg = (
            f"Targets {tuple(target.shape)} don't fit logits {tuple(logits.shape)}. Give class indices "
            "[rows, ...], or probabilities [rows, classes, ...] of the logits' shape."
        )
        raise BatchError(msg)
    num_classes = logits.shape[1]
    if target.shape == logits.shape:
        soft = target if target.is_floating_point() else target.float()
        return soft * (1 - smoothing) + smoothing / num_classes
    return _smooth_indices(target, num_classes, smoothing, ignore_index)


@dataclass(frozen=True, kw_only=True)
class LabelSmoothing(Method):
    """Smooth the targets, also those that MixUp or CutMix have mixed.

    The soft target has one probability a class: for a language model that is [rows, classes, length], which a
    large vocabulary makes dear. Positions of the loss's `ignore_index` keep no probability, so no loss and no
    gradient.

    Args:
        smoothing: share of the uniform distribution, in [0, 1]; 0 is off.
    """

    stage: ClassVar[Stage] = Stage.LABEL

    smoothing: float = 0.1

    def __post_init__(self) -> None:
        """Check the share."""
        if not 0 <= self.smoothing <= 1:
            msg = f"smoothing={self.smoothing} is not a share. Give a number from 0 (off) to 1 (uniform targets)."
            raise PlanError(msg)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with soft targets."""
        if self.smoothing == 0:
            return batch
        if isinstance(batch.data, Tensor) and isinstance(at.loss, LanguageModel):
            tokens = batch.data
            data = (tokens[:, :-1], self._smooth(tokens[:, 1:], at))
            return dataclasses.replace(batch, data=data, lineage=batch.lineage.cut(lambda ids: ids[:, :-1]))
        target = batch.target
        if isinstance(target, MixedTarget):
            mixed = MixedTarget(self._smooth(target.first, at), self._smooth(target.second, at), target.mixing)
            return batch.replace(target=mixed)
        return batch.replace(target=self._smooth(target, at))

    def _smooth(self, target: Data, at: Position) -> Tensor:
        if not isinstance(target, Tensor) or isinstance(at.loss, Regression):
            msg = (
                f"LabelSmoothing has no classes to smooth: the target is a {type(target).__name__}, the loss "
                f"a {type(at.loss).__name__}. Use it with one tensor of class indices or probabilities."
            )
            raise BatchError(msg)
        if not target.is_floating_point():
            num_classes = at.num_classes(target, "LabelSmoothing")
            if isinstance(at.loss, LanguageModel) or not is_one_hot(target, num_classes):
                ignored = getattr(at.loss, "ignore_index", _IGNORE_INDEX)
                return _smooth_indices(target, num_classes, self.smoothing, ignored)
            target = target.float()
        if target.ndim < 2:
            msg = f"Targets {tuple(target.shape)} have no class dimension. Give probabilities [rows, classes, ...]."
            raise BatchError(msg)
        smoothed = smooth_labels(target, target, self.smoothing)
        # A position without probability was ignored before it was mixed; elsewhere it's a row without labels.
        return smoothed * target.any(dim=1, keepdim=True) if hasattr(at.loss, "ignore_index") else smoothed


def _smooth_indices(target: Tensor, num_classes: int, smoothing: float, ignore_index: int) -> Tensor:
    learnt = known_classes(target, num_classes, ignore_index).unsqueeze(1)
    target = target.long().unsqueeze(1)
    low, high = smoothing / num_classes, 1 - smoothing + smoothing / num_classes
    soft = (learnt * low).expand(target.shape[0], num_classes, *target.shape[2:]).contiguous()
    return soft.scatter_(1, target.where(learnt, 0), learnt * high)
