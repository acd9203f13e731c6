"""ColOut: leave out some rows and columns of pixels (MosaicML Composer, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ColOut", "colout_batch"]

ResizeTarget = bool | Literal["auto"]
Sample = TypeVar("Sample", bound="Tensor | Image | tuple[Tensor | Image, Tensor | Image]")

_ROUNDING = 1e-9
"""(1 - 0.9) x 10 is 0.999...: a count that the fraction meant to be whole isn't one less."""


def colout_batch(
    sample: Sample,
    p_row: float = 0.15,
    p_col: float = 0.15,
    resize_target: ResizeTarget = "auto",
    *,
    generator: torch.Generator | None = None,
) -> Sample:
    """Leave out the same random rows and columns of pixels of all images; the others close up.

    Args:
        sample: images [..., height, width], a PIL image, or a pair (input, target) of them. A target that isn't
            resized may be anything.
        p_row: fraction of the rows to leave out, in [0, 1); what's kept is rounded down, to one at least.
        p_col: fraction of the columns to leave out.
        resize_target: leave the same pixels out of the target: "auto" does it where its last two dimensions are
            those of the input.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        What was given, with fewer pixels: an image, or a pair.

    Raises:
        BatchError: the input isn't an image, a fraction is out of range, or the target isn't of the input's size.
    """
    _check(p_row, p_col, BatchError, resize_target)
    input, target = sample if isinstance(sample, tuple) else (sample, None)
    height, width = _size(input)
    rows, columns = (
        _kept(torch.rand(1, size, dtype=torch.float64, generator=generator), fraction)
        for size, fraction in ((height, p_row), (width, p_col))
    )
    smaller = _keep_of_any(input, rows, columns)
    if not isinstance(sample, tuple):
        return cast("Sample", smaller)
    if target is not None and _is_map(input, target, resize_target):
        target = _keep_of_any(target, rows, columns)
    return cast("Sample", (smaller, target))


@dataclass(frozen=True, kw_only=True)
class ColOut(Method):
    """Leave out some rows and columns of pixels of every image.

    Images become smaller in training only, always to the same size.

    Args:
        p_row: fraction of the rows of pixels to leave out, in [0, 1).
        p_col: fraction of the columns. Both 0 is off.
        per_image: draw for each image, which takes longer. False leaves out the same ones in a whole microbatch
            (Composer's `batch=True`; here `batch` is the hook).
        resize_target: do the same to targets that are maps (see `colout_batch`).
    """

    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    p_row: float = 0.15
    p_col: float = 0.15
    per_image: bool = False
    resize_target: ResizeTarget = "auto"

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.p_row, self.p_col, PlanError, self.resize_target)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with smaller images, and targets where they're maps."""
        if self.p_row == 0 and self.p_col == 0:
            return batch
        input, target = batch.input, batch.target
        if not isinstance(input, Tensor) or input.ndim != 4:
            found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            msg = f"ColOut changes images [rows, channels, height, width]; the input is {found}. Leave ColOut out."
            raise BatchError(msg)
        if not self.per_image:
            generator = at.generator("colout")
            sample = (input, target)
            input, target = colout_batch(sample, self.p_row, self.p_col, self.resize_target, generator=generator)
            return batch.replace(input=input, target=target)
        height, width = input.shape[2:]
        draws = at.row_uniform("colout", batch, height + width)
        rows, columns = _kept(draws[:, :height], self.p_row), _kept(draws[:, height:], self.p_col)
        if _is_map(input, target, self.resize_target):
            batch = batch.replace(target=_keep(target, rows, columns))
        return batch.replace(input=_keep(input, rows, columns))


def _check(p_row: float, p_col: float, error: type[BatchError | PlanError], resize_target: ResizeTarget) -> None:
    if resize_target not in (True, False, "auto"):
        msg = f"ColOut knows no resize_target={resize_target!r}. Use True, False or 'auto'."
        raise error(msg)
    if not (0 <= p_row < 1 and 0 <= p_col < 1):
        msg = (
            f"ColOut can't leave out p_row={p_row}, p_col={p_col} of an image. Give fractions from 0 to below 1: an "
            "image needs a pixel."
        )
        raise error(msg)


def _kept(draws: Tensor, fraction: float) -> Tensor:
    """Return the positions that stay, int64 [rows, kept] in order: those of the smallest uniforms [rows, size]."""
    num = max(1, int((1 - fraction) * draws.shape[1] + _ROUNDING))
    return draws.argsort(dim=1)[:, :num].sort(dim=1).values


def _keep(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Keep pixels [..., height, width]: one choice for all images, or one for each [rows, ..., height, width]."""
    rows, columns = (kept.to(images.device, non_blocking=True) for kept in (rows, columns))
    if len(rows) == 1:
        smaller = images.index_select(-2, rows[0]).index_select(-1, columns[0])
    else:
        between = [1] * (images.ndim - 3)
        smaller = images.gather(
            -2, rows.view(-1, *between, rows.shape[1], 1).expand(*images.shape[:-2], -1, images.shape[-1])
        )
        columns = columns.view(-1, *between, 1, columns.shape[1]).expand(*smaller.shape[:-1], -1)
        smaller = smaller.gather(-1, columns)
    last = images.ndim == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
    return smaller.contiguous(memory_format=torch.channels_last) if last else smaller


def _keep_of_any(image: Tensor | Image, rows: Tensor, columns: Tensor) -> Tensor | Image:
    if isinstance(image, Tensor):
        return _keep(image, rows, columns)
    import PIL.Image

    kept = np.asarray(image)[rows[0].numpy()][:, columns[0].numpy()]
    smaller = PIL.Image.fromarray(kept)
    if palette := image.getpalette():
        smaller.putpalette(palette)
    return smaller


def _size(image: object) -> tuple[int, int]:
    """Return height and width."""
    if isinstance(image, Tensor) and image.ndim >= 2:
        return image.shape[-2], image.shape[-1]
    size = None if isinstance(image, Tensor) else getattr(image, "size", None)
    if isinstance(size, tuple):
        return size[1], size[0]
    found = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
    msg = f"ColOut changes images [..., height, width] and PIL images; the input is {found}."
    raise BatchError(msg)


def _is_map(input: object, target: object, resize_target: ResizeTarget) -> bool:
    """Say whether the target's pixels are to be left out too."""
    if resize_target is False:
        return False
    # Class probabilities [rows, classes] may happen to have the images' size: a map has a third dimension.
    is_image = target.ndim >= 3 if isinstance(target, Tensor) else hasattr(target, "getpalette")
    fits = is_image and _size(input) == _size(target)
    if resize_target is True and not fits:
        msg = (
            f"resize_target=True: the target isn't of the input's size {_size(input)}. Give maps of that size, or "
            "resize_target='auto'."
        )
        raise BatchError(msg)
    return fits
