"""Images that come as a file are stored byte for byte, as long as they're what is in the file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.writer import ShardWriter
from cosmati.errors import DataError
from tests.data.shards.mds_reader import read_source


def picture() -> Image.Image:
    y, x = np.mgrid[0:48, 0:64]
    pixels = np.stack([x * 4, y * 5, (x + y) * 2], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels)


def file_of(kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture().save(stream, format=kind.upper(), **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_image_from_a_file_is_stored_as_the_file_is(kind: str, is_loaded: bool, tmp_path: Path) -> None:
    data = file_of(kind, **({"quality": 98} if kind == "jpeg" else {"compress_level": 1}))
    (tmp_path / "image").write_bytes(data)
    image = Image.open(tmp_path / "image")
    if is_loaded:
        image.load()
    with ShardWriter(tmp_path / "out", {"a": kind, "b": kind}, class_path="open", source="x") as writer:
        writer.write({"a": image, "b": data})
    assert read_source(tmp_path / "out") == [{"a": data, "b": data}]
    assert encoding(kind).encode(Image.open(io.BytesIO(data))) == data
    many = encoding(f"list[{kind}]")
    assert bytes(many.encode([Image.open(tmp_path / "image")] * 2)).count(data) == 2


def test_an_image_that_was_changed_since_isnt_taken_for_its_file(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(file_of("jpeg", quality=98))
    drawn = Image.open(tmp_path / "image.jpg")
    drawn.paste((255, 0, 0), (0, 0, 32, 32))
    small = Image.open(tmp_path / "image.jpg")
    small.thumbnail((16, 16))
    other = Image.open(tmp_path / "image.jpg").convert("L")
    for image in (drawn, small, other):
        stored = Image.open(io.BytesIO(encoding("jpeg").encode(image)))
        assert (stored.size, stored.mode) == (image.size, image.mode)
        assert np.abs(np.asarray(stored).astype(int) - np.asarray(image).astype(int)).mean() < 4


def test_a_jpeg_whose_bytes_are_gone_keeps_its_tables() -> None:
    data = file_of("jpeg", quality=98, subsampling=0)
    image = Image.open(io.BytesIO(data))
    image.load()
    again = Image.open(io.BytesIO(encoding("jpeg").encode(image)))
    assert again.quantization == Image.open(io.BytesIO(data)).quantization
    assert np.abs(np.asarray(again).astype(int) - np.asarray(image).astype(int)).max() <= 4


def ramp(mode: str = "L") -> Image.Image:
    return Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert(mode)


def through(image: Image.Image, kind: str) -> Image.Image:
    return encoding(kind).decode(memoryview(encoding(kind).encode(image)))  # type: ignore[return-value]


def test_a_palette_or_a_transparency_that_was_changed_is_stored(tmp_path: Path) -> None:
    image = ramp("P")
    image.putpalette([value for number in range(256) for value in (number, 0, 0)])
    image.save(tmp_path / "p.png")
    ramp("RGB").save(tmp_path / "rgb.png", transparency=(9, 9, 9))
    same = Image.open(tmp_path / "p.png")
    assert encoding("png").encode(same) == (tmp_path / "p.png").read_bytes()
    green, clear, opaque = (Image.open(tmp_path / name) for name in ("p.png", "p.png", "rgb.png"))
    green.putpalette([value for number in range(256) for value in (0, number, 0)])
    clear.load()
    clear.info["transparency"] = 9
    del opaque.info["transparency"]
    for changed in (green, clear, opaque):
        found = through(changed, "png").convert("RGBA")
        assert np.array_equal(np.asarray(found), np.asarray(changed.convert("RGBA")))
        assert np.asarray(found).tobytes() != np.asarray(Image.open(changed.filename).convert("RGBA")).tobytes()


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_exif_that_was_changed_in_memory_isnt_stored_as_it_was(kind: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010E], exif[0x0131] = "secret", "cosmati"
    exif.get_ifd(0x8825)[1] = "N"
    path = tmp_path / f"e.{kind}"
    picture().save(path, exif=exif)
    data = path.read_bytes()
    looked = Image.open(path)
    assert looked.getexif()[0x010E] == "secret"
    assert looked.getexif().get_ifd(0x8825)
    assert encoding(kind).encode(looked) == data
    cleared, popped, no_place, edited = (Image.open(path) for _ in range(4))
    cleared.getexif().clear()
    popped.info.pop("exif")
    no_place.getexif().get_ifd(0x8825).clear()
    edited.getexif()[0x010E] = "public"
    for image in (cleared, popped, no_place, edited):
        stored = encoding(kind).encode(image)
        assert stored != data
        assert b"secret" not in stored or image is no_place
        assert not Image.open(io.BytesIO(stored)).getexif().get_ifd(0x8825) or image is edited


def test_a_palette_that_the_encoding_pil_has_no_place_for_is_refused() -> None:
    with pytest.raises(DataError, match=r"isn't pil: .*palette.*convert"):
        encoding("pil").encode(ramp("P"))
    with pytest.raises(DataError, match=r"palette"):
        encoding("list[pil]").encode([ramp("P")])
    assert through(ramp("L"), "pil").tobytes() == ramp("L").tobytes()


@pytest.mark.parametrize(
    ("kind", "mode"), [("jpeg", "RGBA"), ("jpeg", "P"), ("jpeg", "F"), ("png", "LAB"), ("png", "F"), ("png", "La")]
)
def test_an_image_of_a_mode_that_the_file_has_not_is_refused(kind: str, mode: str) -> None:
    image = Image.new(mode, (8, 8))
    with pytest.raises(DataError, match=rf"isn't {kind}: .*mode {mode}.*convert"):
        encoding(kind).encode(image)
    with pytest.raises(DataError, match=rf"mode {mode}"):
        encoding(f"list[{kind}]").encode([image])
