"""Targets with a value for each pixel: what moves the pixels of the images alone would teach wrong ones."""

from __future__ import annotations

from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.loss import MixedTarget
from cosmati.core.source import ImageSize
from cosmati.errors import BatchError, PlanError

_FEWEST_DIMENSIONS = 3
"""Class probabilities [rows, classes] may happen to have the images' size: a map has a third dimension."""


def refuse_target_map(batch: Batch, does: str, mend: str, *, size: ImageSize | None = None) -> None:
    """Refuse a batch whose target is a map of its images.

    Args:
        batch: of images [rows, channels, height, width].
        does: the method, and what it does to images that the targets don't follow.
        mend: what to do.
        size: of the targets where it isn't that of the images.

    Raises:
        PlanError: the target's last two dimensions are those of the images.
    """
    if isinstance(batch.data, Tensor):
        return  # what is changed is the target, too
    try:
        target = batch.target
    except BatchError:
        return  # nothing to compare with is no map
    target = target.first if isinstance(target, MixedTarget) else target
    images = batch.input
    if not isinstance(target, Tensor) or target.ndim < _FEWEST_DIMENSIONS or not isinstance(images, Tensor):
        return
    if tuple(target.shape[-2:]) == (size or tuple(images.shape[-2:])):
        msg = f"{does}, and the target {tuple(target.shape)} has a value for each of their pixels. {mend}"
        raise PlanError(msg)
