"""Pictures of the methods that change a batch, each made by the method's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import cosmati.methods.functional as cf
from cards.drawing import INK, MUTED, STONES, WIDTH, Canvas, Frame, floors
from cosmati.methods import ProgressiveResizing, SeqLengthWarmup
from cosmati.methods.layers import BlurPool2d

ROUNDEL, LOZENGE = floors()
_SIZE = 82
"""Of an image in a row of five, in the picture's units."""
Drawn = tuple[Canvas, str]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _row(words: str, images: Sequence[tuple[str, Tensor]]) -> Canvas:
    """Draw images of one size side by side, each with its name."""
    canvas = Canvas(words, _SIZE + 24)
    step = (WIDTH - _SIZE) / max(4, len(images) - 1)
    for place, (name, pixels) in enumerate(images):
        canvas.image(place * step, 2, _SIZE / pixels.shape[2], pixels)
        canvas.text(place * step + _SIZE / 2, _SIZE + 18, name, anchor="middle", colour=MUTED)
    return canvas


def _variants(words: str, change: Callable[[Tensor], Tensor]) -> Canvas:
    changed = change(torch.stack([ROUNDEL, ROUNDEL, LOZENGE, LOZENGE]))
    first, second, third, fourth = changed
    return _row(words, [("a row", ROUNDEL), ("", first), ("", second), ("", third), ("", fourth)])


def augmix() -> Drawn:
    """Draw four rows changed."""
    canvas = _variants("An image, and four that AugMix made", lambda x: cf.augmix_image(x, 8, generator=_seeded(3)))
    return canvas, "The first image is a row as it comes; the others are rows after `AugMix(severity=8)`."


def randaugment() -> Drawn:
    """Draw four rows changed."""
    canvas = _variants(
        "An image, and four that RandAugment made", lambda x: cf.randaugment_image(x, 9, 2, generator=_seeded(5))
    )
    return canvas, "The first image is a row as it comes; the others are rows after `RandAugment(severity=9, depth=2)`."


def crop_and_flip() -> Drawn:
    """Draw four rows changed."""
    canvas = _variants(
        "An image, and four crops, some of them mirrored", lambda x: cf.crop_and_flip_batch(x, 6, generator=_seeded(1))
    )
    return canvas, "The first image is a row as it comes; the others are rows after `CropAndFlip(padding=6)`."


def cutout() -> Drawn:
    """Draw four rows with holes."""
    canvas = _variants("An image, and four with a hole", lambda x: cf.cutout_batch(x, 1, 0.5, generator=_seeded(4)))
    return canvas, "The first image is a row as it comes; the others are rows after `CutOut(num_holes=1, length=0.5)`."


def colout() -> Drawn:
    """Draw an image before and after, pixel by pixel."""
    batch = torch.stack([ROUNDEL, LOZENGE])
    smaller = cf.colout_batch(batch, 0.2, 0.2, generator=_seeded(0))
    assert isinstance(smaller, Tensor)
    canvas, scale, x = Canvas("Two images, and the same two with rows and columns left out", 112), 2.2, 0.0
    for place, pixels in enumerate((batch[0], smaller[0], batch[1], smaller[1])):
        canvas.image(x, 2, scale, pixels)
        name = f"{pixels.shape[1]} × {pixels.shape[2]}"
        canvas.text(x + pixels.shape[2] * scale / 2, 108, name, anchor="middle", colour=MUTED)
        x += pixels.shape[2] * scale + (16 if place % 2 == 0 else 100)
    return (
        canvas,
        "Left of each pair a row as it comes, right of it after `ColOut(p_row=0.2, p_col=0.2)`: fewer pixels.",
    )


def _target(canvas: Canvas, left: float, shares: Sequence[float]) -> None:
    """Draw the shares of the two classes of a mixed row."""
    for place, (name, share, colour) in enumerate(zip(("roundel", "lozenge"), shares, STONES, strict=False)):
        y = 30 + 34 * place
        canvas.text(left, y - 4, f"{name} {share:.2f}", colour=INK)
        canvas.rect(left, y, 84, 9, MUTED, opacity=0.2)
        canvas.rect(left, y, 84 * share, 9, colour)


def mixup() -> Drawn:
    """Draw two rows, their mixture and its target."""
    mixed, _, share = cf.mixup_batch(
        torch.stack([ROUNDEL, LOZENGE]), torch.tensor([0, 1]), 0.35, indices=torch.tensor([1, 0])
    )
    canvas = _row(
        "Two images, their mixture, and the mixture's target",
        [("row", ROUNDEL), ("partner", LOZENGE), ("mixed", mixed[0])],
    )
    _target(canvas, 330, (1 - share, share))
    return canvas, "A row, its partner, and what the model sees with a weight of 0.35; the target is mixed alike."


def cutmix() -> Drawn:
    """Draw two rows, one with a box of the other, and its target."""
    images, labels = torch.stack([ROUNDEL, LOZENGE]), torch.tensor([0, 1])
    mixed, _, share, _ = cf.cutmix_batch(images, labels, length=0.6, indices=torch.tensor([1, 0]), generator=_seeded(2))
    canvas = _row(
        "Two images, one with a box of the other, and its target",
        [("row", ROUNDEL), ("partner", LOZENGE), ("mixed", mixed[0])],
    )
    _target(canvas, 330, (share, 1 - share))
    return canvas, "A row, its partner, and what the model sees; the target's shares are those of the pixels."


def blurpool() -> Drawn:
    """Draw fine rings, sampled plainly and after the blur."""
    axis = torch.linspace(-1, 1, 64)
    radius = axis[:, None] ** 2 + axis**2
    plate = (0.5 + 0.5 * torch.cos(42 * radius)).expand(3, 64, 64)
    blurred = BlurPool2d(2)(plate[None])[0]
    return (
        _row(
            "Fine rings, sampled plainly with false rings, and blurred first without them",
            [("64 × 64", plate), ("every second pixel", plate[:, ::2, ::2]), ("blurred first", blurred)],
        ),
        "Fine rings, halved by taking every second pixel and by `BlurPool2d`: false rings at the edges are aliases.",
    )


def progressive_resizing() -> Drawn:
    """Draw the width over a run, with images of three moments."""
    method, full = ProgressiveResizing(), 224
    canvas = Canvas("The width of the images over a run, in steps up to the full one", 178)
    frame = Frame(canvas, (0, 100), (0, 240))
    moments = [step / 2 for step in range(200)]
    widths = [float(method.size(full, full, method.scale(moment / 100))[1]) for moment in moments]
    frame.curve(moments, widths, STONES[0])
    frame.axes("per cent of the run", "pixels", [(112, "112"), (224, "224")])
    for moment, scale in ((12, 0.5), (70, 0.83), (90, 1.0)):
        small, _ = cf.resize_batch(ROUNDEL[None], torch.zeros(1), scale)
        side = 60 * scale
        x, y = frame.at(moment, 5)
        canvas.image(x - side / 2, y - side, side / small.shape[3], small[0])
    return (
        canvas,
        "Width of images of 224 pixels with the defaults, and how much a network sees of one at three moments.",
    )


def label_smoothing() -> Drawn:
    """Draw a target before and after."""
    smooth = cf.smooth_labels(torch.zeros(1, 5), torch.tensor([2]), smoothing=0.2)[0].tolist()
    canvas = Canvas("The target of a row of class 2 of 5, before and after smoothing", 128)
    hard = F.one_hot(torch.tensor(2), 5).tolist()
    for left, name, shares in ((10, "the label", hard), (250, "smoothed by 0.2", smooth)):
        canvas.text(left, 14, name)
        for place, share in enumerate(shares):
            x = left + place * 40
            canvas.rect(x, 106 - 66 * share, 30, max(1.0, 66 * share), STONES[0 if place == 2 else 3])
            canvas.text(x + 15, 122, str(place), anchor="middle", colour=MUTED)
            canvas.text(
                x + 15, 101 - 66 * share, f"{share:.2f}".rstrip("0").rstrip("."), anchor="middle", colour=MUTED, size=12
            )
    return canvas, "The target of a row of class 2, with five classes: what is taken from the label is spread over all."


def seq_length_warmup() -> Drawn:
    """Draw the length over a run."""
    method = SeqLengthWarmup(max_seq_length=128, step_size=16)
    canvas = Canvas("The length of sequences over a run, in steps up to the full one", 178)
    frame = Frame(canvas, (0, 100), (0, 140))
    moments = [step / 4 for step in range(401)]
    frame.curve(moments, [float(method.length(moment / 100)) for moment in moments], STONES[0])
    frame.axes("per cent of the run", "tokens in a row", [(8, "8"), (128, "128")])
    x, y = frame.at(32, 64)
    canvas.text(x, y, "full length from 30 % on", colour=MUTED)
    return canvas, "Length with `SeqLengthWarmup(max_seq_length=128, step_size=16)`."


def selective_backprop() -> Drawn:
    """Draw which rows of a batch are kept, by loss."""
    losses = -torch.rand(40, generator=_seeded(1)).log()
    losses, _ = losses.sort()
    kept, _ = cf.select_using_loss(
        torch.arange(40.0)[:, None],
        torch.zeros(40),
        lambda _: losses,
        lambda out, _target, **_kwargs: out,
        generator=_seeded(2),
    )
    chosen = set(kept.flatten().int().tolist())
    canvas = Canvas("Forty rows by their loss; most that are kept have a high one", 150)
    frame = Frame(canvas, (0, 40), (0, float(losses.max())), height=100)
    frame.axes("40 rows, by loss", "loss")
    for place, loss in enumerate(losses.tolist()):
        x, y = frame.at(place + 0.15, loss)
        bar = (x, y, 7.0, frame.top + frame.height - y)
        canvas.rect(*bar, STONES[0]) if place in chosen else canvas.rect(*bar, MUTED, opacity=0.3)
    canvas.rect(60, 30, 9, 9, STONES[0])
    canvas.text(
        74, 39, f"kept: {len(chosen)} rows, {float(losses[sorted(chosen)].sum() / losses.sum()):.0%} of the loss"
    )
    return canvas, "A batch of 40 rows, and the half of them that one draw keeps."


PICTURES: dict[str, Callable[[], Drawn]] = {
    "AugMix": augmix,
    "BlurPool": blurpool,
    "ColOut": colout,
    "CropAndFlip": crop_and_flip,
    "CutMix": cutmix,
    "CutOut": cutout,
    "LabelSmoothing": label_smoothing,
    "MixUp": mixup,
    "ProgressiveResizing": progressive_resizing,
    "RandAugment": randaugment,
    "SelectiveBackprop": selective_backprop,
    "SeqLengthWarmup": seq_length_warmup,
}
