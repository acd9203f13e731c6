"""Image operations against Pillow, and laws that Pillow doesn't state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from cosmati.errors import BatchError
from cosmati.methods.building_blocks import image_operations as ops

SETTINGS = settings(deadline=None, max_examples=25)


def pixels(seed: int, *, channels: int = 3, height: int = 9, width: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.rand(1, channels, 3, 4, generator=generator)
    image = torch.nn.functional.interpolate(smooth, size=(height, width), mode="bilinear")
    return (image * 255).round() / 255


def to_pil(image: Tensor) -> Image.Image:
    array = (image[0] * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def of_pil(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image)).float()
    return (array[None] if array.ndim == 2 else array.permute(2, 0, 1))[None] / 255


def operation(name: str, image: Tensor, amount: float) -> Tensor:
    return ops._OPERATIONS[name](image, torch.tensor(amount).view(1, 1, 1, 1))


POINTWISE: dict[str, Any] = {
    "autocontrast": (lambda i, a: ImageOps.autocontrast(i), 1),
    "equalize": (lambda i, a: ImageOps.equalize(i), 0),
    "posterize": (lambda i, a: ImageOps.posterize(i, int(a)), 0),
    "solarize": (lambda i, a: ImageOps.solarize(i, round(a * 255)), 0),
    "brightness": (lambda i, a: ImageEnhance.Brightness(i).enhance(a), 1),
    "colour": (lambda i, a: ImageEnhance.Color(i).enhance(a), 1),
    "contrast": (lambda i, a: ImageEnhance.Contrast(i).enhance(a), 1),
    "sharpness": (lambda i, a: ImageEnhance.Sharpness(i).enhance(a), 1),
}
AMOUNTS = {"posterize": [1.0, 2.0, 4.0], "solarize": [0.0, 100 / 255, 256 / 255]}


@SETTINGS
@given(name=st.sampled_from(list(POINTWISE)), seed=st.integers(0, 99), channels=st.sampled_from([1, 3]), data=st.data())
def test_pointwise_operations_are_pillows(name: str, seed: int, channels: int, data: Any) -> None:
    """Within Pillow's own rounding: it rounds to whole levels once or twice on the way."""
    amount = data.draw(st.sampled_from(AMOUNTS.get(name, [0.1, 0.7, 1.0, 1.9])))
    image = pixels(seed, channels=channels)
    theirs, levels = POINTWISE[name]
    expected = of_pil(theirs(to_pil(image), amount))
    torch.testing.assert_close(operation(name, image, amount), expected, rtol=0, atol=(levels + 0.51) / 255)


def draws_of(name: str, strength: float, sign: int) -> Tensor:
    names = ops.operation_names("all")
    return torch.tensor([[(names.index(name) + 0.5) / len(names), strength, 0.25 if sign < 0 else 0.75]]).double()


@SETTINGS
@given(
    name=st.sampled_from(ops.GEOMETRIC),
    strength=st.floats(0.05, 0.999),
    sign=st.sampled_from([-1, 1]),
    seed=st.integers(0, 9),
)
def test_geometric_operations_are_pillows(name: str, strength: float, sign: int, seed: int) -> None:
    """Pillow maps output pixels to input ones by the same matrix, written from the corner; edges are cut otherwise."""
    image = pixels(seed, height=15, width=18)
    draws = draws_of(name, strength, sign)
    found = ops.augment(image.clone(), draws, 10, "all")
    amount = (0.1 + strength * 9.9) / 10
    matrix = ops._matrices(torch.tensor([ops.GEOMETRIC.index(name)]), torch.tensor([amount * sign]), image)[0]
    (a, b, c), (d, e, f) = matrix.tolist()
    # Around the middle of the image, in Pillow's coordinates, where a pixel's middle is at a half.
    mx, my = 18 / 2, 15 / 2
    corner = (a, b, c + mx - a * mx - b * my, d, e, f + my - d * mx - e * my)
    expected = of_pil(to_pil(image).transform((18, 15), Image.Transform.AFFINE, corner, Image.Resampling.BILINEAR))
    inside = expected.min(1, keepdim=True).values > 0
    core = torch.nn.functional.avg_pool2d(inside.float(), 3, 1, 1) == 1
    gap = ((found - expected).abs() * core).max()
    assert float(gap) <= 3 / 255


def by_pillow(name: str, image: Image.Image, level: float, sign: int) -> Image.Image:
    """Apply an operation at a strength of 0 to 10, its parameter written here once more."""
    factor, shear, (width, height) = 1.9 ** (sign * level / 10), sign * level * 0.03, image.size
    affine: dict[str, tuple[float, ...]] = {
        "shear_x": (1, shear, -shear * height / 2, 0, 1, 0),
        "shear_y": (1, 0, 0, shear, 1, -shear * width / 2),
        "translate_x": (1, 0, sign * int(width / 3 * level / 10), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, sign * int(height / 3 * level / 10)),
    }
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name], Image.Resampling.BILINEAR)
    if name == "rotate":
        return image.rotate(sign * int(level * 3), Image.Resampling.BILINEAR)
    parameters = {"posterize": 4 - int(level * 0.4), "solarize": (256 - int(level * 25.6)) / 255}
    enhanced: Image.Image = POINTWISE[name][0](image, parameters.get(name, factor))
    return enhanced


@SETTINGS
@given(
    name=st.sampled_from(ops.operation_names("all")),
    draw=st.floats(0, 0.999),
    sign=st.sampled_from([-1, 1]),
    severity=st.sampled_from([0.05, 1, 3, 9, 10]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_the_same_draws_give_what_pillow_gives(
    name: str, draw: float, sign: int, severity: float, channels: int, seed: int
) -> None:
    """Exactly where whole pixels move or levels are looked up, else within the roundings of Pillow's steps."""
    image = pixels(seed, channels=channels, height=15, width=18)
    least = min(0.1, severity)
    expected = of_pil(by_pillow(name, to_pil(image), least + draw * (severity - least), sign))
    gap = (ops.augment(image.clone(), draws_of(name, draw, sign), severity, "all") - expected).abs()
    if name in ("rotate", "shear_x", "shear_y"):
        # Pillow cuts at the border where grid_sample fades to black.
        inside = (expected.amin(1, keepdim=True) > 0).float()
        gap = gap * (torch.nn.functional.avg_pool2d(inside, 3, 1, 1) == 1)
        levels = 3.0
    else:
        levels = 0.01 if name in (*ops.GEOMETRIC, "equalize", "posterize", "solarize") else POINTWISE[name][1] + 0.51
    assert float(gap.max()) <= levels / 255


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_of_rows_change_nothing(
    dtype: torch.dtype, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    images = (torch.rand(7, 3, 6, 8, generator=generator) * (255 if dtype is torch.uint8 else 1)).to(dtype)
    images = images.to(memory_format=layout)
    draws, before = torch.rand(7, 3, dtype=torch.float64, generator=generator), images.clone()
    seen: list[int] = []

    def change(rows: Tensor, own: Tensor) -> Tensor:
        seen.append(len(rows))
        return ops.augment(rows.clone(), own, 8, "all")

    whole = ops.change_images(images, draws, change, "Test")
    monkeypatch.setattr(ops, "_BLOCK_SIZE", 3 * 3 * 6 * 8 + 1)
    assert torch.equal(ops.change_images(images, draws, change, "Test"), whole)
    assert seen == [7, 3, 3, 1]
    assert (whole.dtype, whole.stride()) == (images.dtype, images.stride())
    assert torch.equal(images, before)
    assert not torch.equal(whole, before)


def test_rotation_turns_by_degrees_and_translation_moves_pixels() -> None:
    image = torch.zeros(1, 1, 13, 13)
    image[0, 0, 6, 10] = 1.0
    turned = ops.augment(image.clone(), draws_of("rotate", 1.0, 1), 10, "all")
    angle = torch.deg2rad(torch.tensor(30.0))
    row, column = divmod(int(turned.argmax()), 13)
    assert (row, column) == (round(6 - 4 * float(angle.sin())), round(6 + 4 * float(angle.cos())))
    moved = ops.augment(image.clone(), draws_of("translate_x", 1.0, 1), 10, "all")
    assert torch.equal(moved, torch.roll(image, -4, dims=3))


@SETTINGS
@given(severity=st.floats(0.01, 10), seed=st.integers(0, 999), kind=st.sampled_from(["all", "safe", "original"]))
def test_each_row_has_its_own_and_stays_in_range(severity: float, seed: int, kind: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(7, 3, 6, 8, generator=generator)
    draws = torch.rand(7, 3, dtype=torch.float64, generator=generator)
    found = ops.augment(images.clone(), draws, severity, kind)
    assert found.shape == images.shape
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1 + 1e-6
    for row in range(7):
        alone = ops.augment(images[row : row + 1].clone(), draws[row : row + 1], severity, kind)
        assert torch.equal(found[row : row + 1], alone)


@pytest.mark.parametrize("name", [*ops.GEOMETRIC, *ops.ENHANCEMENTS])
def test_weak_operations_change_little_and_strong_ones_more(name: str) -> None:
    image = pixels(3, height=32, width=32)
    gaps = [
        float((ops.augment(image.clone(), draws_of(name, s, 1), 10, "all") - image).abs().mean())
        for s in (0.0, 0.5, 1.0)
    ]
    assert gaps[0] <= gaps[1] <= gaps[2]
    assert gaps[0] < 0.02


def test_sets() -> None:
    assert set(ops.operation_names("all")) - set(ops.operation_names("safe")) == set(ops.ENHANCEMENTS)
    with pytest.raises(BatchError, match="augmentation_set='some' is unknown"):
        ops.operation_names("some")  # type: ignore[arg-type]
    factors = ops._amount("contrast", torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, -1.0]), "all")
    assert factors.tolist() == pytest.approx([1, 1.9, 1 / 1.9])
    original = ops._amount("contrast", torch.tensor([0.0, 1.0]), torch.ones(2), "original")
    assert original.tolist() == pytest.approx([0.1, 1.9])


def test_bytes_and_ranges_of_pixels_come_back_as_they_went() -> None:
    seen: list[tuple[float, float]] = []

    def invert(rows: Tensor, own: Tensor) -> Tensor:
        seen.append((float(rows.min()), float(rows.max())))
        return 1 - rows

    draws = torch.zeros(2, 1)
    levels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3).repeat(2, 1, 1, 1)
    assert ops.change_images(levels, draws, invert, "Test").flatten().tolist() == [255, 204, 0] * 2
    wide = torch.tensor([-2.0, 0.0, 6.0]).view(1, 1, 1, 3).repeat(2, 1, 1, 1)
    assert ops.change_images(wide, draws, invert, "Test", (-2.0, 6.0)).flatten().tolist() == [6, 4, -2] * 2
    unit = torch.tensor([0.0, 0.25, 1.0]).view(1, 1, 1, 3).repeat(2, 1, 1, 1)
    assert ops.change_images(unit, draws, invert, "Test").flatten().tolist() == [1, 0.75, 0] * 2
    assert seen == [(0, 1)] * 3, "each is given black as 0 and white as 1"


def test_pixels_outside_of_the_range_are_refused_but_for_a_thousandth() -> None:
    ops.check_range(torch.tensor([-0.0009, 1.0009]), 0.0, 1.0, "Test")
    ops.check_range(torch.tensor([-2.007, 6.007]), -2.0, 6.0, "Test")
    ops.check_range(torch.empty(0), 0.0, 1.0, "Test")
    for values in ([-0.002, 0.5], [0.5, 1.002], [float("nan"), 0.5]):
        with pytest.raises(BatchError, match="Test needs pixels from 0 to 1"):
            ops.check_range(torch.tensor(values), 0.0, 1.0, "Test")
    images = torch.full((1, 1, 2, 2), 2.0)
    with pytest.raises(BatchError, match="value_range"):
        ops.change_images(images, torch.zeros(1, 1), lambda rows, own: rows, "Test")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pil_images_are_batches_of_one_and_come_back(mode: str) -> None:
    shape = (5, 7) if mode == "L" else (5, 7, 3)
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = Image.fromarray(array)
    batch, back = ops.as_batch(image, "Test")
    assert (batch.shape, batch.dtype) == ((1, 1 if mode == "L" else 3, 5, 7), torch.uint8)
    assert int(batch[0, -1, 2, 4]) == (array[2, 4] if mode == "L" else array[2, 4, 2])
    again = back(batch)
    assert isinstance(again, Image.Image)
    assert (again.mode, np.array(again).tolist()) == (mode, array.tolist())


def test_one_image_is_a_batch_of_one_and_others_are_refused() -> None:
    one = torch.rand(3, 4, 5)
    batch, back = ops.as_batch(one, "Test")
    assert batch.shape == (1, 3, 4, 5)
    assert torch.equal(back(batch), one)  # type: ignore[arg-type]
    many = torch.zeros(2, 1, 4, 5, dtype=torch.uint8)
    same, back = ops.as_batch(many, "Test")
    assert same is many
    assert back(same) is many
    for wrong in (torch.rand(4, 5), torch.rand(1, 2, 3, 4, 5), torch.rand(2, 4, 5), torch.zeros(3, 4, 5).long()):
        with pytest.raises(BatchError, match=r"Test changes images \[rows, channels, height, width\]"):
            ops.as_batch(wrong, "Test")
    with pytest.raises(BatchError, match=r"mode L or RGB; this is P\. Convert"):
        ops.as_batch(Image.new("P", (2, 2)), "Test")
    with pytest.raises(BatchError, match="this is str"):
        ops.as_batch("image", "Test")  # type: ignore[arg-type]


def test_a_flat_image_has_no_contrast_to_stretch_and_no_levels_to_spread() -> None:
    flat = torch.full((1, 1, 3, 3), 0.4)
    for name in ("autocontrast", "equalize", "sharpness"):
        torch.testing.assert_close(operation(name, flat, 1.0), flat)
    for height, width in ((2, 9), (9, 2)):
        image = pixels(1, height=height, width=width)
        assert torch.equal(operation("sharpness", image, 1.9), image), "no pixel has all its neighbours"


def test_original_factors_start_at_a_tenth() -> None:
    image = torch.full((1, 1, 2, 2), 0.5)
    names = ops.operation_names("original")
    assert names == (*ops.GEOMETRIC, *ops.POINTWISE, *ops.ENHANCEMENTS)
    for strength in (0.0, 0.5):
        found = ops.augment(image.clone(), draws_of("brightness", strength, -1), 10, "original")
        level = (0.1 + strength * 9.9) / 10
        torch.testing.assert_close(found, 0.5 * torch.full_like(image, 0.1 + 1.8 * level))


@pytest.mark.parametrize("name", [*ops.GEOMETRIC, "brightness", "colour", "contrast", "sharpness"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_severity_of_0_changes_nothing(name: str, sign: int) -> None:
    image = pixels(4)
    torch.testing.assert_close(ops.augment(image.clone(), draws_of(name, 0.5, sign), 0, "all"), image)


@SETTINGS
@given(seed=st.integers(0, 99), channels=st.sampled_from([1, 3]), height=st.integers(16, 40))
def test_levels_are_spread_as_pillow_spreads_them(seed: int, channels: int, height: int) -> None:
    """With more pixels than levels: a smaller image has too few to spread, and stays."""
    image = pixels(seed, channels=channels, height=height, width=32)
    expected = of_pil(ImageOps.equalize(to_pil(image)))
    assert not torch.equal(expected, image)
    torch.testing.assert_close(operation("equalize", image, 1.0), expected, rtol=0, atol=0.01 / 255)
