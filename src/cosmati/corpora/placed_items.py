"""Segmentation without a download: small images put on larger, noisy ones, each pixel of the kind of what lies there.

The items are Fashion-MNIST's clothes or scikit-learn's digits. Every draw is keyed by the seed and the image's number,
so an image is the same however many others are made. Held-out images are made of items that no other image shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.core.rng import position_generator
from cosmati.corpora.digits import PIXEL_MEAN, PIXEL_STD, ImageRows, load_digits_images
from cosmati.corpora.fashion_mnist import DEBIAN_FOLDER, GREY_MEAN, GREY_STD, load_fashion_mnist
from cosmati.errors import DataError
from cosmati.provenance.taxonomy import software_licences

ItemKind = Literal["fashion", "digits"]
ITEM_SIZE = 14
"""Pixels a side of an item, whatever its source's are."""
NUM_KINDS = 10
BACKGROUND = 0
"""Target where no item lies; an item's pixels have its class and 1."""
INK = 0.2
"""Grey level, of 0 to 1, from which on a pixel is the item's and not what is around it."""
_LEVEL, _SPREAD = 0.1, 0.4
"""About mean and standard deviation of the images' grey levels."""


@dataclass(frozen=True, kw_only=True)
class PlacedItemsPlan:
    """What images are made.

    Args:
        num_train: images to train on.
        num_held_out: images to choose settings on, and as many to report on.
        size: pixels a side.
        max_items: most items in an image; there is one at least, and later ones cover earlier ones.
        noise: standard deviation of the normal noise on every pixel, in grey levels of 0 to 1.
        seed: of all draws.

    Raises:
        DataError: a number isn't positive, an item doesn't fit in, or the noise is negative.
    """

    num_train: int = 2000
    num_held_out: int = 400
    size: int = 32
    max_items: int = 4
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_train, self.num_held_out, self.max_items) < 1 or self.size < ITEM_SIZE or not self.noise >= 0:
            msg = f"{self} makes no images: give positive numbers, a size of {ITEM_SIZE} at least and a noise >= 0."
            raise DataError(msg)


@dataclass(frozen=True, eq=False)
class PlacedItems:
    """Images [rows, 1, size, size] in three parts, with targets int64 [rows, size, size] from 0 to 10.

    Row ids count on from part to part; digests are of an image's pixels and its targets.
    """

    train: ImageRows
    selection: ImageRows
    reported: ImageRows
    class_names: tuple[str, ...]


def items_at_hand() -> ItemKind:
    """Return `fashion` where Debian's package has put its files, else `digits`."""
    return "fashion" if DEBIAN_FOLDER.is_dir() and any(DEBIAN_FOLDER.iterdir()) else "digits"


def load_placed_items(kind: ItemKind, plan: PlacedItemsPlan, *, folder: str | Path | None = None) -> PlacedItems:
    """Make the images.

    Of Fashion-MNIST the training part's last sixth is the selection part's, the test part that of the reported one; of
    the digits the held-out half of each.

    Args:
        kind: what lies in the images.
        plan: how many, and how large.
        folder: of Fashion-MNIST's files; None is where Debian's package puts them.

    Raises:
        DataError: an unknown kind, or files that are missing or damaged.
        MissingExtraError: scikit-learn isn't installed, which the digits come with.
    """
    if kind not in ("fashion", "digits"):
        msg = f"There are no items {kind!r}. Use 'fashion' or 'digits'."
        raise DataError(msg)
    rows, class_names = _fashion_parts(folder) if kind == "fashion" else _digit_parts()
    numbers = {"train": plan.num_train, "selection": plan.num_held_out, "reported": plan.num_held_out}
    made: dict[str, ImageRows] = {}
    for name, number in numbers.items():
        first_row = sum(len(part.targets) for part in made.values())
        made[name] = _as_rows(*place_items(*rows[name], number, plan, name), first_row)
    return PlacedItems(made["train"], made["selection"], made["reported"], class_names)


def place_items(
    levels: Tensor, kinds: Tensor, num_images: int, plan: PlacedItemsPlan, stream: str
) -> tuple[Tensor, Tensor]:
    """Put items at random places of noisy images.

    Args:
        levels: of the items, grey from 0 to 1, [items, side, side].
        kinds: int64 [items].
        num_images: how many images are made.
        plan: their size and noise.
        stream: name of the draws.

    Returns:
        Images float32 [num_images, 1, size, size], about normalised, and targets int64 [num_images, size, size].
    """
    side, room = levels.shape[-1], plan.size - levels.shape[-1] + 1
    images = torch.zeros(num_images, 1, plan.size, plan.size)
    targets = torch.full((num_images, plan.size, plan.size), BACKGROUND)
    for index in range(num_images):
        generator = position_generator(plan.seed, f"placed items, {stream}", index)
        number = int(torch.randint(1, plan.max_items + 1, (), generator=generator))
        which = torch.randint(len(levels), (number,), generator=generator).tolist()
        places = torch.randint(room, (number, 2), generator=generator).tolist()
        for item, (top, left) in zip(which, places, strict=True):
            there = (index, ..., slice(top, top + side), slice(left, left + side))
            ink = levels[item] >= INK
            images[there] = torch.where(ink, levels[item], images[there])
            targets[there] = torch.where(ink, kinds[item] + 1, targets[there])
        images[index, 0] += plan.noise * torch.randn(plan.size, plan.size, generator=generator)
    return (images - _LEVEL) / _SPREAD, targets


def _fashion_parts(folder: str | Path | None) -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[str, ...]]:
    fashion = load_fashion_mnist(folder)
    train, test = fashion.train, fashion.test
    end = len(train.targets) * 5 // 6
    levels = {"train": train.images[:end], "selection": train.images[end:], "reported": test.images}
    kinds = {"train": train.targets[:end], "selection": train.targets[end:], "reported": test.targets}
    parts = {name: (_levels(levels[name], GREY_MEAN, GREY_STD), kinds[name]) for name in levels}
    return parts, fashion.class_names


def _digit_parts() -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[str, ...]]:
    digits = load_digits_images()
    held_out = digits.validation
    rows = {"train": (digits.train, slice(None))}
    rows |= {"selection": (held_out, slice(0, None, 2)), "reported": (held_out, slice(1, None, 2))}
    parts = {
        name: (_levels(part.images[where], PIXEL_MEAN, PIXEL_STD), part.targets[where])
        for name, (part, where) in rows.items()
    }
    return parts, digits.class_names


def _levels(images: Tensor, mean: float, std: float) -> Tensor:
    """Return grey levels [items, 14, 14] from 0 to 1 of normalised images [items, 1, side, side]."""
    return F.interpolate(images * std + mean, (ITEM_SIZE, ITEM_SIZE), mode="area")[:, 0].clamp(0, 1)


def _as_rows(images: Tensor, targets: Tensor, first_row: int) -> ImageRows:
    content = [
        image.numpy().tobytes() + target.numpy().tobytes()
        for image, target in zip(images, targets.to(torch.uint8), strict=True)
    ]
    digests = b"".join(hashlib.sha256(row).digest() for row in content)
    number = len(targets)
    return ImageRows(
        images=images,
        targets=targets,
        class_ids=torch.full((number,), software_licences().id_of("open/permissive")),
        row_ids=torch.arange(first_row, first_row + number),
        row_digests=torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32),
    )
