"""Images come in the size that a step wants: from the decoder, the same whoever reads and whenever."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.method import Method, Position, Stage
from cosmati.data.image_rows import DecodeImages
from cosmati.data.ingest import decode_image
from cosmati.data.loader import StreamingLoader
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.methods import ProgressiveResizing
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` isn't installed")
ImageOps = pytest.importorskip("PIL.ImageOps")

pytestmark = pytest.mark.long
FULL = (32, 48)
STEPS = 12
RESIZING = ProgressiveResizing(initial_scale=0.5, delay_fraction=0.25, finetune_fraction=0.25, size_increment=4)


def jpeg(number: int, height: int = 128, width: int = 192) -> bytes:
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows + number, columns, rows * columns // 64], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    columns = {"image": "bytes", "label": "int"}
    with ShardWriter(path, columns, class_path="open/cc0", source="drawn", size_limit=1 << 14) as writer:
        for number in range(24):
            writer.write({"image": jpeg(number), "label": number % 3})
    return path


def source(folder: Path, **options: Any) -> StreamingSource:
    transform = DecodeImages(image_size=FULL)
    return StreamingSource(StreamingDataset(folder, transform=transform), 4, **options)


class Pooled(nn.Module):
    """Notes the size of the images that it's given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 3)
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(tuple(images.shape[2:]))
        found: Tensor = self.head(self.body(images).mean((2, 3)))
        return found


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def trainer(data: Any, methods: Sequence[Method] = (RESIZING,), **config: Any) -> Trainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {"budget": f"{STEPS}ba", "seed": 3} | config
    return Trainer(Pooled(), loss, data, optimizers=[SGD(lr=0.1)], methods=list(methods), config=RunConfig(**options))


def weights(trained: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


def sizes_of(trained: Trainer) -> list[tuple[int, ...]]:
    assert isinstance(trained.model, Pooled)
    return trained.model.sizes


def expected_sizes() -> list[tuple[int, int]]:
    return [RESIZING.size(*FULL, RESIZING.scale(step / STEPS)) for step in range(STEPS)]


def test_a_size_is_the_middle_scaled_with_antialiasing() -> None:
    data = jpeg(3, 256, 256)
    found = decode_image(data, size=(32, 64))
    assert found.shape == (3, 32, 64)
    # By another library's filter, from the whole image: the middle 128 rows of 256, each 4 x 4 pixels averaged.
    whole = decode_image(data).double()[:, 64:192]
    averaged = nn.functional.interpolate(whole[None], (32, 64), mode="bilinear", antialias=True)[0]
    assert (found.double() - averaged).abs().mean() < 2
    assert torch.equal(decode_image(data, size=(256, 256)), decode_image(data))


@pytest.mark.parametrize("size", [(0, 4), (4, -1)])
def test_sizes_without_pixels_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="each 1 or more"):
        DecodeImages(image_size=size)
    with pytest.raises(DataError, match="1 or more"):
        decode_image(jpeg(0), size=size)


def test_a_batch_is_each_image_decoded_by_itself(folder: Path) -> None:
    data = StreamingDataset(folder, shuffle=False)
    rows, row = data.read(data.locate([5, 1, 2])), data.read(data.locate([5]))
    images, labels = DecodeImages(image_size=FULL)(rows)
    assert (images.dtype, labels.tolist()) == (torch.float32, [2, 1, 2])
    for image, number in zip(images, (5, 1, 2), strict=True):
        assert torch.equal(image, decode_image(jpeg(number), size=FULL).float() / 255)
    alone = DecodeImages(image_size=FULL, label=None)(row)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, images[:1])
    with pytest.raises(DataError, match=r"no column 'picture'; the rows have image, label"):
        DecodeImages(image_size=FULL, image="picture")(row)


def decoded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list in which the codec's own sizes will be noted: height and width of what it has decoded."""
    found: list[tuple[int, int]] = []
    plain = Image.Image.convert
    # A run of seconds ends with images asked for ahead, and its threads may decode them yet.
    others = set(threading.enumerate()) - {threading.current_thread()}

    def convert(image: Any, *given: Any, **options: Any) -> Any:
        if threading.current_thread() not in others:
            found.append((image.height, image.width))
        return plain(image, *given, **options)

    monkeypatch.setattr(Image.Image, "convert", convert)
    return found


def test_small_steps_are_decoded_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decoded_sizes(monkeypatch)
    run = trainer(source(folder, steps_ahead=0))
    run.fit()
    assert sizes_of(run)[-STEPS:] == expected_sizes()
    assert expected_sizes()[0] == (16, 24)
    # 128 x 192 images: an eighth is 16 x 24, a quarter 32 x 48. The longer side of the size decides.
    assert decoded[-4 * STEPS :] == [(32, 48) if w > 24 else (16, 24) for _, w in expected_sizes() for _ in range(4)]


def test_each_step_is_the_transform_at_its_size(folder: Path) -> None:
    """The oracle: the same rows, decoded by hand in the size of the step, given as a list."""
    rows = StreamingDataset(folder)
    order = StreamingSource(StreamingDataset(folder, columns=("label",)), 4).order(
        seed=3, num_microbatches=1, route_pure=False
    )
    batches = []
    for step, size in enumerate(expected_sizes()):
        ids = order.microbatch(step, 0).lineage.row_ids
        shard_of = [rows.where(int(row)) for row in ids]
        numbers = [number for _, number in shard_of]
        images = torch.stack([decode_image(jpeg(number), size=size) for number in numbers]).float() / 255
        batches.append((images, torch.tensor([number % 3 for number in numbers])))
    run, by_hand = trainer(source(folder)), trainer(batches, methods=())
    run.fit()
    by_hand.fit()
    assert all(map(torch.equal, weights(run), weights(by_hand)))


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"steps_ahead": 0}, {"steps_ahead": 5}])
def test_whoever_reads_the_bits_are_the_same(folder: Path, options: dict[str, int]) -> None:
    first, other = trainer(source(folder)), trainer(source(folder, **options))
    first.fit()
    other.fit()
    assert all(map(torch.equal, weights(first), weights(other)))


def test_a_resumed_run_has_the_same_sizes_and_bits(folder: Path, tmp_path: Path) -> None:
    whole = trainer(source(folder))
    whole.fit()
    begun = trainer(source(folder), run_folder=tmp_path / "run", checkpoint_every="1ba")
    stopping = begun.model.register_forward_hook(lambda *_: begun.stop() if begun.clock.step == 4 else None)
    begun.fit()
    stopping.remove()
    assert begun.clock.step == 5
    resumed = trainer(source(folder), run_folder=tmp_path / "run", checkpoint_every="1ba")
    resumed.fit()
    assert sizes_of(resumed)[-7:] == expected_sizes()[5:]
    assert all(map(torch.equal, weights(whole), weights(resumed)))


@dataclass(frozen=True, kw_only=True)
class Doubled(Method):
    """Acts on images before they're resized."""

    stage: ClassVar[Stage] = Stage.SHAPE

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.replace(input=batch.input * 2)


@dataclass(frozen=True, kw_only=True)
class Selected(Doubled):
    stage: ClassVar[Stage] = Stage.SELECT


@pytest.mark.parametrize(
    "methods",
    [
        [ProgressiveResizing(mode="crop")],
        [Doubled(), RESIZING],
        [Selected(), RESIZING],
        [RESIZING, ProgressiveResizing(initial_scale=0.75)],
        [],
    ],
    ids=["crop", "another shape first", "another stage first", "two", "none"],
)
def test_who_needs_whole_images_gets_them(folder: Path, monkeypatch: pytest.MonkeyPatch, methods: list[Method]) -> None:
    decoded = decoded_sizes(monkeypatch)
    run = trainer(source(folder, steps_ahead=0), methods)
    run.fit()
    assert set(decoded) == {(32, 48)}


def test_an_image_on_its_side_is_decoded_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decoded_sizes(monkeypatch)
    with Image.open(io.BytesIO(jpeg(1, 128, 192))) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue(), size=(48, 32)).shape == (3, 48, 32)
    assert decode_image(buffer.getvalue(), size=(32, 48)).shape == (3, 32, 48)
    # Upright it's 192 x 128: a quarter is 48 x 32; 48 wide takes a half.
    assert decoded == [(48, 32), (96, 64)]


def test_a_transform_of_ones_own_is_resized_by_the_method(folder: Path) -> None:
    plain = DecodeImages(image_size=FULL)
    data = StreamingDataset(folder, transform=lambda rows: plain(rows))  # noqa: PLW0108  (not a DecodeImages)
    run = trainer(StreamingSource(data, 4))
    run.fit()
    assert sizes_of(run)[-STEPS:] == expected_sizes()


def test_a_run_of_seconds_is_resized_by_the_method(folder: Path) -> None:
    resizing = ProgressiveResizing(initial_scale=0.5, image_width=48)
    run = trainer(source(folder), [resizing], budget="0.3sec")
    run.fit()
    assert sizes_of(run)[0] == (16, 24)


@pytest.mark.parametrize("kind", ["jpeg", "png", "pil"])
def test_images_that_are_decoded_as_they_are_read(tmp_path: Path, kind: str) -> None:
    rows = [Image.open(io.BytesIO(jpeg(number))) for number in range(6)]
    with ShardWriter(tmp_path, {"image": kind, "label": "int"}, class_path="open/cc0", source="drawn") as writer:
        for number, image in enumerate(rows):
            writer.write({"image": image, "label": number})
    data = StreamingDataset(tmp_path, transform=DecodeImages(image_size=FULL), shuffle=False, on_bad_row="skip")
    (batch,) = StreamingLoader(data, 6)
    assert batch.data[1].tolist() == list(range(6))
    for found, written in zip(batch.data[0], rows, strict=True):
        wanted = ImageOps.fit(written.convert("RGB"), FULL[::-1], method=Image.Resampling.BILINEAR)
        difference = (found * 255 - torch.from_numpy(np.array(wanted)).permute(2, 0, 1)).abs().max()
        assert difference <= (0.01 if kind != "jpeg" else 24), "jpeg is coded once more where no file is given"


def test_an_array_is_an_image_too() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    assert torch.equal(decode_image(pixels), torch.from_numpy(pixels).permute(2, 0, 1))
    assert decode_image(pixels, size=(20, 30)).shape == (3, 20, 30)


@pytest.mark.parametrize("size", [32, (32,), (32.0, 32), (0, 4), (1, 2, 3), "ab"])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(DataError, match="height and width in pixels, whole numbers"):
        DecodeImages(image_size=size)
