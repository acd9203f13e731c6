"""(f) Images a second of the methods that change images: batched on tensors, and Pillow image by image.

Pillow's arms draw the same distribution of operations and strengths, on images that are decoded already; making a
tensor of them, which a loader still has to do, isn't counted. One thread, bytes unless the arm says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from benchmarks.measure import Row, in_turns, write
from cosmati import methods as m
from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Method, Position
from cosmati.methods.building_blocks.image_operations import operation_names

NUM_IMAGES = {32: 256, 224: 32}
Pass = Callable[[], object]


def warped(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def operated(image: Image.Image, name: str, strength: float, sign: int) -> Image.Image:
    """Apply one operation with Pillow, at a strength in [0, 1]."""
    factor = 1.9 ** (strength * sign)
    # As the tensors' operations, around the middle: Pillow's matrices are written from the corner.
    shear, middle_x, middle_y = 0.3 * strength * sign, image.width / 2, image.height / 2
    operations: dict[str, Callable[[], Image.Image]] = {
        "rotate": lambda: image.rotate(sign * math.floor(30 * strength), Image.Resampling.BILINEAR),
        "shear_x": lambda: warped(image, (1, shear, -shear * middle_y, 0, 1, 0)),
        "shear_y": lambda: warped(image, (1, 0, 0, shear, 1, -shear * middle_x)),
        "translate_x": lambda: warped(image, (1, 0, sign * math.floor(image.width / 3 * strength), 0, 1, 0)),
        "translate_y": lambda: warped(image, (1, 0, 0, 0, 1, sign * math.floor(image.height / 3 * strength))),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "posterize": lambda: ImageOps.posterize(image, 4 - math.floor(4 * strength)),
        "solarize": lambda: ImageOps.solarize(image, 256 - math.floor(256 * strength)),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "colour": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
    }
    return operations[name]()


def chain(image: Image.Image, severity: float, depth: int, random: np.random.Generator) -> Image.Image:
    names = operation_names("all")
    for _ in range(depth):
        strength = random.uniform(0.1, severity) / 10
        image = operated(image, names[random.integers(len(names))], strength, int(random.choice((-1, 1))))
    return image


def pillow_randaugment(images: list[Image.Image], random: np.random.Generator) -> list[Image.Image]:
    return [chain(image, 9, 2, random) for image in images]


def pillow_augmix(images: list[Image.Image], random: np.random.Generator) -> list[Image.Image]:
    mixed = []
    for image in images:
        share, own = random.beta(1, 1), np.asarray(image, dtype=np.float32)
        total = (1 - share) * own
        for weight in random.dirichlet((1, 1, 1)):
            total += np.float32(share * weight) * np.asarray(chain(image, 3, int(random.integers(1, 4)), random))
        mixed.append(Image.fromarray(total.round().astype(np.uint8)))
    return mixed


def photographs(num: int, size: int) -> Tensor:
    """Return smooth noise with some grain, which has edges and about all levels: uint8 [num, 3, size, size]."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.rand(num, 3, size // 8, size // 8, generator=generator)
    images = torch.nn.functional.interpolate(smooth, size=(size, size), mode="bicubic").clamp(0, 1)
    return ((0.9 * images + 0.1 * torch.rand(images.shape, generator=generator)) * 255).byte()


def applied(method: Method, images: Tensor) -> Pass:
    """Return a pass of a method over a microbatch, each time at another step."""
    batch = Batch((images, torch.arange(len(images)) % 10), Lineage.of_rows(0, len(images)))
    budget, loss, model = Budget(Time.parse("1ep")), Classification(10), torch.nn.Identity()
    steps = iter(range(1 << 30))

    def run() -> Batch:
        # Draws that belong to rows differ from epoch to epoch.
        step = next(steps)
        return method.batch(batch, Position(Clock(step=step, epoch=step), budget, 0, 0, model, loss))

    return run


def timed(run: Pass, num_images: int, repeats: int) -> Callable[[], float]:
    """Return a function that measures seconds an image."""

    def seconds() -> float:
        start = perf_counter()
        for _ in range(repeats):
            run()
        return (perf_counter() - start) / (repeats * num_images)

    return seconds


def groups(size: int) -> dict[str, dict[str, Pass]]:
    """Return arms by method, each group with its baseline first and a second time (A/A)."""
    images = photographs(NUM_IMAGES[size], size)
    files = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    floats, random = images.float() / 255, np.random.default_rng(0)
    found: dict[str, dict[str, Pass]] = {}
    for method, pillow in ((m.RandAugment(), pillow_randaugment), (m.AugMix(), pillow_augmix)):
        found[type(method).__name__] = {
            "Pillow, one by one": partial(pillow, files, random),
            "Pillow again (A/A)": partial(pillow, files, random),
            "batched": applied(method, images),
            "batched, float32": applied(method, floats),
            "batched, float32, channels last": applied(method, floats.to(memory_format=torch.channels_last)),
        }
    others = {
        "CutOut": m.CutOut(),
        "ColOut": m.ColOut(),
        "ColOut, per image": m.ColOut(per_image=True),
        "MixUp": m.MixUp(),
        "CutMix": m.CutMix(),
    }
    found["others, float32"] = {"copying the batch": floats.clone, "copying again (A/A)": floats.clone}
    found["others, float32"] |= {name: applied(method, floats) for name, method in others.items()}
    return found


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the tables."""
    torch.set_num_threads(1)
    suffix, tables = "_quick" if quick else "", []
    for size, num_images in NUM_IMAGES.items():
        rows: list[Row] = []
        for method, arms in groups(size).items():
            # Cheap arms need many repeats for the clock, and dear ones are long enough by themselves.
            repeats = 1 if quick else 20 if method.startswith("others") else 2
            measured = {f"{method}: {arm}": timed(one, num_images, repeats) for arm, one in arms.items()}
            rows += in_turns(measured, 2 if quick else 15)
        notes = {
            "what": f"a step is an image here: 3 x {size} x {size}; batches of {num_images}",
            "ratio": "to the first arm of the same method: time, so that below 1 is faster",
            "images a second": ", ".join(f"{row.arm} {1e6 / row.median_us:,.0f}" for row in rows),
        }
        tables.append(write(f"augmentations_{size}{suffix}", rows, notes))
    return "\n".join(tables)
