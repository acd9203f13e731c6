"""Operations that augment images, batched: each row has its own operation and strength.

Images are float [rows, channels, height, width] in [0, 1], of one channel or three. Pointwise operations are those of
Pillow on 256 levels; geometric ones interpolate bilinearly, with black from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.errors import BatchError, CosmatiError

if TYPE_CHECKING:
    from PIL.Image import Image

AugmentationSet = Literal["all", "safe", "original"]

MAX_SEVERITY = 10
_LEVELS = 255
_GREY = (0.299, 0.587, 0.114)
"""Luma of ITU-R 601."""

GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
POINTWISE = ("autocontrast", "equalize", "posterize", "solarize")
ENHANCEMENTS = ("brightness", "colour", "contrast", "sharpness")

_BLOCK_SIZE = 1 << 20
"""Values in a block of images: 6 of 3 x 224 x 224."""

NUM_DRAWS = 3
"""Uniforms that one operation of one row takes: which, how strong, which direction."""


def operation_names(augmentation_set: AugmentationSet, error: type[CosmatiError] = BatchError) -> tuple[str, ...]:
    """Return the operations of a set.

    "safe" leaves out those that change brightness, colour, contrast and sharpness, which others' corruption benchmarks
    hold. "all" has them with factors from 1/1.9 to 1.9, "original" as AugMix had them, from 0.1 to 1.9, where a low
    severity nearly blackens the image.
    """
    if augmentation_set not in get_args(AugmentationSet):
        msg = f"augmentation_set={augmentation_set!r} is unknown. Use one of {get_args(AugmentationSet)}."
        raise error(msg)
    return GEOMETRIC + POINTWISE + (() if augmentation_set == "safe" else ENHANCEMENTS)


def augment(images: Tensor, draws: Tensor, severity: float, augmentation_set: AugmentationSet) -> Tensor:
    """Apply one operation to each row, in place: a copy of a batch of large images takes as long as an operation.

    Args:
        images: float32 [rows, channels, height, width] in [0, 1].
        draws: uniforms in [0, 1), float64 [rows, 3] on CPU: which operation, how strong (from 0.1 to `severity`),
            which direction.
        severity: at most 10.
        augmentation_set: which operations there are.

    Returns:
        The same images.
    """
    names = operation_names(augmentation_set)
    chosen = (draws[:, 0] * len(names)).long()
    least = min(0.1, severity)
    strength = (least + draws[:, 1] * (severity - least)) / MAX_SEVERITY
    sign = torch.where(draws[:, 2] < 0.5, -1.0, 1.0)
    geometric = torch.nonzero(chosen < len(GEOMETRIC)).flatten()
    if len(geometric):
        angles = _matrices(chosen[geometric], strength[geometric] * sign[geometric], images)
        rows = geometric.to(images.device, non_blocking=True)
        images[rows] = _warp(images[rows], angles)
    for index, name in enumerate(names[len(GEOMETRIC) :], len(GEOMETRIC)):
        mine = torch.nonzero(chosen == index).flatten()
        if len(mine):
            amount = _amount(name, strength[mine], sign[mine], augmentation_set)
            amount = amount.float().to(images.device, non_blocking=True).view(-1, 1, 1, 1)
            rows = mine.to(images.device, non_blocking=True)
            images[rows] = _OPERATIONS[name](images[rows], amount)
    return images


def change_images(
    images: Tensor,
    draws: Tensor,
    change: Callable[[Tensor, Tensor], Tensor],
    method: str,
    value_range: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Change images each by its draws; on CPU in blocks of rows, so that what's computed on the way stays in the cache.

    Args:
        images: [rows, channels, height, width], bytes, or floating point in the range.
        draws: [rows, ...].
        change: from float32 in [0, 1] and draws to new values in [0, 1]; is given values barely outside, too, and
            mustn't change them in place.
        method: the name of whoever asks.
        value_range: of the pixels, black to white; bytes have their own.

    Returns:
        New images of the same shape and type.

    Raises:
        BatchError: values outside of the range, on CPU.
    """
    low, high = (0.0, _LEVELS) if _is_bytes(images) else value_range
    if not _is_bytes(images):
        check_range(images, low, high, method)
    is_scaled = (low, high) != (0.0, 1.0)
    is_on_cpu = images.device.type == "cpu"
    num = max(1, _BLOCK_SIZE // max(1, images.shape[1:].numel()) if is_on_cpu else len(images))
    output = torch.empty_like(images)
    for before, after, own in zip(images.split(num), output.split(num), draws.split(num), strict=True):
        values = before.float()
        if is_scaled:
            values = change((values - low).div_(high - low), own).mul_(high - low).add_(low)
        else:
            values = change(values, own)
        after.copy_(values.round_() if _is_bytes(images) else values)
    return output


def as_batch(image: Tensor | Image, method: str) -> tuple[Tensor, Callable[[Tensor], Tensor | Image]]:
    """Return an image, or several, as [rows, channels, height, width], and the way back.

    Args:
        image: a PIL image, or a tensor [channels, height, width] or [rows, channels, height, width]: bytes, or floating
            point in [0, 1].
        method: the name of whoever asks.

    Raises:
        BatchError: it's none of these.
    """
    if not isinstance(image, Tensor):
        return _from_pil(image, method)
    if image.ndim not in (3, 4) or image.shape[-3] not in (1, 3) or not (image.is_floating_point() or _is_bytes(image)):
        msg = (
            f"{method} changes images [rows, channels, height, width] of 1 or 3 channels, bytes or floating point; the "
            f"input is {tuple(image.shape)} {image.dtype}."
        )
        raise BatchError(msg)
    return (image, lambda result: result) if image.ndim == 4 else (image[None], lambda result: result[0])


def check_range(images: Tensor, low: float, high: float, method: str) -> None:
    """Refuse values outside of a range. Not looked at on an accelerator, which would have to be waited for."""
    if images.device.type != "cpu" or not images.numel():
        return
    least, most = (float(v) for v in images.aminmax())
    slack = 1e-3 * (high - low)
    if not (least >= low - slack and most <= high + slack):
        msg = (
            f"{method} needs pixels from {low:g} to {high:g}; this batch has {least:.4g} to {most:.4g}. Give the range "
            "of your pixels, black to white, as value_range=(low, high), or normalise later, in the model."
        )
        raise BatchError(msg)


def _is_bytes(image: Tensor) -> bool:
    return image.dtype is torch.uint8


def _from_pil(image: Image, method: str) -> tuple[Tensor, Callable[[Tensor], Tensor | Image]]:
    import numpy as np
    import PIL.Image

    mode = getattr(image, "mode", None)
    if mode not in ("L", "RGB"):
        msg = f"{method} changes PIL images of mode L or RGB; this is {mode or type(image).__name__}. Convert it first."
        raise BatchError(msg)
    pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)[None]

    def back(result: Tensor) -> Image:
        pixels = result[0].permute(1, 2, 0).numpy()
        return PIL.Image.fromarray(pixels[:, :, 0] if mode == "L" else pixels, mode)

    return pixels, back


def _amount(name: str, strength: Tensor, sign: Tensor, augmentation_set: AugmentationSet) -> Tensor:
    """Return an operation's parameter for strengths in [0, 1]."""
    if name == "posterize":
        return 4 - (strength * 4).floor()
    if name == "solarize":
        return (256 - (strength * 256).floor()) / _LEVELS
    if name in ENHANCEMENTS:
        return 0.1 + 1.8 * strength if augmentation_set == "original" else 1.9 ** (strength * sign)
    return strength


def _matrices(chosen: Tensor, amount: Tensor, images: Tensor) -> Tensor:
    """Return affine maps [rows, 2, 3] from output to input pixels, around the image's middle, in pixels."""
    height, width = images.shape[-2:]
    zeros, ones = torch.zeros_like(amount), torch.ones_like(amount)
    angle = torch.deg2rad((amount.abs() * 30).floor() * amount.sign())
    kinds = [
        (angle.cos(), -angle.sin(), zeros, angle.sin(), angle.cos(), zeros),
        (ones, amount * 0.3, zeros, zeros, ones, zeros),
        (ones, zeros, zeros, amount * 0.3, ones, zeros),
        (ones, zeros, (amount.abs() * (width / 3)).floor() * amount.sign(), zeros, ones, zeros),
        (ones, zeros, zeros, zeros, ones, (amount.abs() * (height / 3)).floor() * amount.sign()),
    ]
    table = torch.stack([torch.stack(kind, dim=-1) for kind in kinds])
    return table[chosen, torch.arange(len(chosen))].view(-1, 2, 3).float()


def _warp(images: Tensor, matrices: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    matrices = matrices.to(images.device, non_blocking=True)
    # Pixels' middles, counted from the image's.
    y = torch.arange(height, device=images.device) - (height - 1) / 2
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    # Not a product of matrices: its last bits depend on how many there are, and a row's pixels on other rows then.
    of_x, of_y, offset = matrices[..., None, None].unbind(2)
    sources = (of_y * y[:, None] + offset) + of_x * x
    grid = sources.div_(torch.tensor([[[width / 2]], [[height / 2]]], device=images.device)).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _autocontrast(images: Tensor, amount: Tensor) -> Tensor:  # noqa: ARG001  (it has none)
    low, high = (end[..., None, None] for end in torch.aminmax(images.flatten(2), dim=2))
    span = high - low
    return torch.where(span > 0, (images - low) / span.clamp(min=1e-6), images).clamp(0, 1)


def _equalize(images: Tensor, amount: Tensor) -> Tensor:  # noqa: ARG001  (it has none)
    levels = (images * _LEVELS).round().long().flatten(2)
    # torch.bincount would do it on CPU; on a GPU it's waited for, since it reads the smallest and largest level.
    counts = torch.zeros(*levels.shape[:2], _LEVELS + 1, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    # The count of the brightest level that occurs stays out, as in Pillow.
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - last) // _LEVELS
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=_LEVELS)
    equalized = table.gather(2, levels).float() / _LEVELS
    return torch.where(step[..., None] > 0, equalized.view_as(images), images)


def _posterize(images: Tensor, amount: Tensor) -> Tensor:
    grain = 2.0 ** (8 - amount)
    return ((images * _LEVELS).round() / grain).floor() * grain / _LEVELS


def _solarize(images: Tensor, amount: Tensor) -> Tensor:
    return torch.where(images >= amount - 1e-6, 1 - images, images)


def _brightness(images: Tensor, amount: Tensor) -> Tensor:
    return (images * amount).clamp_(0, 1)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(_GREY, device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def _blend(images: Tensor, degenerate: Tensor, amount: Tensor) -> Tensor:
    return (images - degenerate).mul_(amount).add_(degenerate).clamp_(0, 1)


def _colour(images: Tensor, amount: Tensor) -> Tensor:
    return _blend(images, _grey(images), amount)


def _contrast(images: Tensor, amount: Tensor) -> Tensor:
    mean = (_grey(images) * _LEVELS).round().mean((2, 3), keepdim=True)
    return _blend(images, (mean + 0.5).floor() / _LEVELS, amount)


def _sharpness(images: Tensor, amount: Tensor) -> Tensor:
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        # Ones around a five, over 13: sums of neighbours are a tenth of what a convolution of each channel takes.
        columns = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
        boxes = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:]
        smooth[:, :, 1:-1, 1:-1] = (boxes + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return _blend(images, smooth, amount)


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "solarize": _solarize,
    "brightness": _brightness,
    "colour": _colour,
    "contrast": _contrast,
    "sharpness": _sharpness,
}
