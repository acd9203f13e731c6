"""Images: kept as files are; decoded to the pixels that were put in; damaged ones named."""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmati.data.ingest import decode_image, read_image_folder
from cosmati.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` isn't installed")


def pixels(height: int = 5, width: int = 7, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def stored(image: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {}), ("WEBP", {"lossless": True})]
)
def test_lossless_formats_give_the_pixels_that_were_put_in(kind: str, options: dict[str, Any]) -> None:
    given = pixels()
    found = decode_image(stored(Image.fromarray(given), kind, **options))
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (3, 5, 7))
    assert torch.equal(found, torch.from_numpy(given).permute(2, 0, 1))
    assert found.is_contiguous()


def test_jpeg_is_near_and_the_same_each_time() -> None:
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None] * 8, (32, 32, 3)).copy()
    data = stored(Image.fromarray(ramp), "JPEG", quality=95)
    first, second = decode_image(data), decode_image(data)
    assert torch.equal(first, second)
    assert (first.permute(1, 2, 0).int() - torch.from_numpy(ramp).int()).abs().max() <= 6


def test_grey_transparency_palette_and_16_bits() -> None:
    grey = pixels()[:, :, 0]
    expected = torch.from_numpy(grey).expand(3, 5, 7)
    assert torch.equal(decode_image(stored(Image.fromarray(grey), "PNG")), expected)
    wide = grey.astype(np.uint16) * 256 + 17
    assert torch.equal(decode_image(stored(Image.fromarray(wide), "PNG")), expected)
    see_through = pixels(channels=4)
    colours = torch.from_numpy(see_through[:, :, :3].copy()).permute(2, 0, 1)
    assert torch.equal(decode_image(stored(Image.fromarray(see_through), "PNG")), colours)
    palette = Image.fromarray(grey // 64).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    table = torch.tensor([[10, 20, 30], [40, 50, 60], [70, 80, 90], [100, 110, 120]], dtype=torch.uint8)
    found = decode_image(stored(palette, "PNG", transparency=b"\x00\x80\xff\xff"))
    assert torch.equal(found, table[torch.from_numpy(grey // 64).long()].permute(2, 0, 1))


@pytest.mark.parametrize(("orientation", "turn"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_orientation_is_applied(orientation: int, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_image(stored(Image.fromarray(pixels()), "PNG", exif=exif))
    assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(np.rot90(pixels(), turn).copy()))


def bomb() -> bytes:
    """Return a PNG that claims 100,000 x 100,000 pixels."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_damage_is_named() -> None:
    data = stored(Image.fromarray(pixels(64, 64)), "JPEG")
    with pytest.raises(DataError, match=r"cat\.jpg: can't be decoded \(OSError: .*truncated"):
        decode_image(data[: len(data) // 2], name="cat.jpg")
    with pytest.raises(DataError, match=r"image: isn't an image of a known format"):
        decode_image(b"<html>")
    with pytest.raises(DataError, match="can't be decoded"):
        decode_image(bomb())
    with pytest.raises(DataError, match="has 7 x 5 pixels, more than max_pixels=34"):
        decode_image(stored(Image.fromarray(pixels()), "PNG"), max_pixels=34)
    with pytest.raises(DataError, match="pixel format 'F'"):
        decode_image(stored(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


def test_every_cut_is_decoded_or_named() -> None:
    data = stored(Image.fromarray(pixels()), "PNG")
    whole = decode_image(data)
    refused = 0
    for length in range(len(data)):
        try:
            found = decode_image(data[:length])
        except DataError:
            refused += 1
        else:
            # Only what comes after the pixels may be lacking.
            assert torch.equal(found, whole)
    assert refused >= len(data) - 20  # two checksums and the end mark


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("dog/1.png", "cat/deep/2.PNG", "cat/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(stored(Image.fromarray(pixels(len(name))), "PNG"))
    (tmp_path / "dog" / "notes.txt").write_text("none")
    return tmp_path


def test_a_folder_gives_bytes_labels_and_origin(folder: Path) -> None:
    rows = read_image_folder(folder, class_of="open/permissive")
    found = list(rows)
    assert [(row["origin_file"], row["label"]) for row in found] == [
        ("cat/1.png", 0),
        ("cat/deep/2.PNG", 0),
        ("dog/1.png", 1),
    ]
    assert rows.label_names == {"label": ("cat", "dog")}
    assert rows.left_out == {"not named as an image": 1}
    for row in found:
        assert row.keys() == rows.columns.keys()
        assert row["image"] == (folder / row["origin_file"]).read_bytes()
        assert row["origin_sha256"] == hashlib.sha256(row["image"]).digest()
    plain = read_image_folder(folder / "dog", class_of="unknown", with_labels=False)
    assert [row.keys() for row in plain] == [{"image", "origin_file", "origin_place", "origin_sha256"}]


def test_bad_images_are_raised_recorded_or_by_wish_not_looked_at(folder: Path) -> None:
    (folder / "cat" / "1.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cat/1\.png, 1: isn't an image"):
        list(read_image_folder(folder, class_of="unknown"))
    rows = read_image_folder(folder, class_of="unknown", on_error="record")
    assert [row["origin_file"] for row in rows] == ["cat/deep/2.PNG", "dog/1.png"]
    assert [bad.file for bad in rows.skipped] == ["cat/1.png"]
    assert len(list(read_image_folder(folder, class_of="unknown", verify=False))) == 3


def test_images_without_a_folder_and_folders_without_images(folder: Path) -> None:
    with pytest.raises(DataError, match="lies in no folder"):
        read_image_folder(folder / "dog", class_of="unknown")
    (folder / "none").mkdir()
    (folder / "none" / "a.txt").write_text("")
    with pytest.raises(DataError, match="holds no file named"):
        read_image_folder(folder / "none", class_of="unknown")


@pytest.mark.parametrize(
    ("at_least", "size"), [(None, (96, 128)), (96, (96, 128)), (48, (48, 64)), (25, (48, 64)), (1, (12, 16))]
)
def test_a_jpeg_is_decoded_no_larger_than_it_must_be(at_least: int | None, size: tuple[int, int]) -> None:
    smooth = np.add.outer(np.arange(96), np.arange(128)).astype(np.uint8)
    image = Image.fromarray(np.stack([smooth, 255 - smooth, smooth // 2], axis=2))
    found = decode_image(stored(image, "JPEG", quality=95), at_least=at_least)
    assert tuple(found.shape) == (3, *size)
    expected = np.asarray(image.resize(size[::-1], Image.Resampling.BOX), np.float64).transpose(2, 0, 1)
    assert np.abs(found.numpy().astype(np.float64) - expected).mean() < 3, "the same picture, smaller"


def test_other_files_come_whole_and_a_side_of_nothing_is_refused() -> None:
    image = Image.fromarray(np.zeros((40, 60, 3), np.uint8))
    assert tuple(decode_image(stored(image, "PNG"), at_least=10).shape) == (3, 40, 60)
    with pytest.raises(DataError, match="at_least=0"):
        decode_image(stored(image, "JPEG"), at_least=0)
