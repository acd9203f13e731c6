"""(i) Decoding JPEGs in the size that a step wants: `decode_image(size=...)` and Pillow, image by image, CPU time.

An image has 500 x 375 pixels (ImageNet's usual size); wanted is its middle, 224 x 224, and the smaller ones that
ProgressiveResizing asks for until its images are whole. Pillow's arm is the usual way: decode it whole, convert, crop
and scale with antialiasing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from time import process_time

import torch
from PIL import Image, ImageOps

from benchmarks.augmentations import photographs
from benchmarks.measure import in_turns, write
from cosmati.data.ingest import decode_image

NUM_IMAGES = 16


def files() -> list[bytes]:
    """Return JPEGs of 500 x 375."""
    found = []
    for image in photographs(NUM_IMAGES, 504):
        stream = io.BytesIO()
        Image.fromarray(image[:, :375, :500].permute(1, 2, 0).numpy()).save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


def by_pillow(data: bytes) -> object:
    """Decode whole, then crop and scale."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.fit(image.convert("RGB"), (224, 224), method=Image.Resampling.BILINEAR).tobytes()


def run(*, quick: bool = False) -> str:
    """Measure, write the results and return the table."""
    torch.set_num_threads(1)
    images = files()

    def timed(decode: Callable[[bytes], object]) -> Callable[[], float]:
        def seconds() -> float:
            start = process_time()
            for data in images:
                decode(data)
            return (process_time() - start) / len(images)

        return seconds

    arms = {
        "Pillow, whole, to 224 x 224": timed(by_pillow),
        "the same again (A/A)": timed(by_pillow),
        **{
            f"decode_image(size=({size}, {size}))": timed(lambda data, size=size: decode_image(data, size=(size, size)))
            for size in (224, 184, 144, 112)
        },
    }
    notes = {"what": f"a step is an image here: {NUM_IMAGES} JPEGs of 500 x 375, quality 90; CPU time of the process"}
    return write("decoding", in_turns(arms, 5 if quick else 31), notes)
