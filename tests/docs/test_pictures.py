"""The cards' pictures: whole, small, of both themes, and of what the methods do."""

from __future__ import annotations

import base64
import importlib.util
import io
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cosmati import methods

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from cards.drawing import STONES, WIDTH, Canvas, floors, png  # noqa: E402  (the docs' own folder)
from cards.pictures import PICTURES  # noqa: E402  (the docs' own folder)

MOST_BYTES = 24_000
each_picture = pytest.mark.parametrize("name", sorted(PICTURES))


@cache
def drawn(name: str) -> tuple[str, str]:
    canvas, caption = PICTURES[name]()
    return canvas.svg(), caption


def parts(svg: str, kind: str) -> list[ET.Element]:
    return [part for part in ET.fromstring(svg).iter() if part.tag.endswith(kind)]


def images(svg: str) -> list[Tensor]:
    """Return the images of a picture, [3, height, width], as another decoder reads them."""
    codes = [part.attrib["href"].removeprefix("data:image/png;base64,") for part in parts(svg, "image")]
    read = (np.asarray(Image.open(io.BytesIO(base64.b64decode(code)))) for code in codes)
    return [torch.tensor(pixels).permute(2, 0, 1) / 255 for pixels in read]


def curves(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Return the points of all lines of a colour."""
    lines = [part for part in parts(svg, "polyline") if part.attrib["stroke"] == colour]
    pairs = [part.attrib["points"].split() for part in lines]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in points)] for points in pairs]


def test_every_method_but_the_control_has_a_picture() -> None:
    assert set(PICTURES) == {kind.__name__ for kind in methods.ALL} - {"NoOpModel"}


@each_picture
def test_a_picture_is_whole_and_small_and_stays_the_same(name: str) -> None:
    svg, caption = drawn(name)
    root = ET.fromstring(svg)
    assert len(svg) < MOST_BYTES
    assert root.attrib["role"] == "img"
    assert len(root.attrib["aria-label"]) > 15
    assert len(caption) > 20
    assert caption.endswith(".")
    assert len(list(root)) > 3
    assert PICTURES[name]()[0].svg() == svg, "it's drawn otherwise each time"


@each_picture
def test_a_picture_takes_the_colours_of_its_theme(name: str) -> None:
    for colour in re.findall(r'(?:fill|stroke)="([^"]+)"', drawn(name)[0]):
        assert colour in {"none", "currentColor"} or re.fullmatch(r"var\(--[\w-]+\)", colour)


@each_picture
def test_what_is_written_and_drawn_lies_inside(name: str) -> None:
    svg, _ = drawn(name)
    height = float(ET.fromstring(svg).attrib["viewBox"].split()[3])
    for text in parts(svg, "text"):
        # About half as wide as high, a letter.
        length = 0.52 * float(text.attrib["font-size"]) * len(text.text or "")
        start = float(text.attrib["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]] * length
        assert start > -6, text.text
        assert start + length < WIDTH + 8, text.text
        assert 8 < float(text.attrib["y"]) <= height, text.text
    for part in (*parts(svg, "image"), *parts(svg, "rect")):
        x, y, wide, high = (float(part.attrib[key]) for key in ("x", "y", "width", "height"))
        assert -0.5 <= x <= x + wide <= WIDTH + 0.5
        assert -0.5 <= y <= y + high <= height + 0.5
    for part in parts(svg, "polyline"):
        for x, y in (map(float, point.split(",")) for point in part.attrib["points"].split()):
            assert -0.5 <= x <= WIDTH + 0.5
            assert -0.5 <= y <= height + 0.5


def test_a_png_is_read_back_by_another_decoder() -> None:
    pixels = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(png(pixels)))))
    assert (torch.tensor(read).permute(2, 0, 1) / 255 - pixels).abs().max() <= 0.5 / 255 + 1e-6


def test_words_are_escaped() -> None:
    canvas = Canvas('"<a>" & so on', 10)
    canvas.text(0, 9, "<b> & so on")
    root = ET.fromstring(canvas.svg())
    assert root.attrib["aria-label"] == '"<a>" & so on'
    assert root[0].text == "<b> & so on"


def test_mixed_images_are_mixed() -> None:
    roundel, lozenge = floors()
    row, partner, mixed = images(drawn("MixUp")[0])
    assert (row - roundel).abs().max() < 0.01
    assert (partner - lozenge).abs().max() < 0.01
    assert (mixed - (0.65 * roundel + 0.35 * lozenge)).abs().max() < 0.01
    row, partner, mixed = images(drawn("CutMix")[0])
    from_partner = (mixed != row).any(0)
    assert 0.05 < from_partner.float().mean() < 0.4
    assert torch.equal(mixed[:, from_partner], partner[:, from_partner])


def test_blurred_rings_have_no_aliases() -> None:
    plate, plain, blurred = images(drawn("BlurPool")[0])
    assert torch.equal(plain, plate[:, ::2, ::2])
    corner = (slice(None), slice(0, 6), slice(0, 6))
    assert blurred[corner].std() < plain[corner].std() / 3


def test_smaller_images_are_smaller() -> None:
    whole, without, *_ = images(drawn("ColOut")[0])
    assert without.shape[1] == without.shape[2] == 32 < whole.shape[1]
    small, middle, full = images(drawn("ProgressiveResizing")[0])
    assert small.shape[1] < middle.shape[1] < full.shape[1] == 40


def test_holes_are_of_one_value() -> None:
    row, *others = images(drawn("CutOut")[0])
    assert torch.equal(row, images(drawn("MixUp")[0])[0])
    assert all((image == 0).all(0).float().mean() > 0.04 for image in others)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LabelSmoothing", {"0.84", "0.04"}),  # 1 - 0.2 + 0.2 / 5, and 0.2 / 5
        ("StochasticDepth", {f"{100 - 4 * place}%" for place in range(1, 11)}),
        ("Factorize", {"512 × 512: 262,144 weights", "two of rank 128: 131,072 weights"}),
        ("MixUp", {"roundel 0.65", "lozenge 0.35"}),
        ("LowPrecisionLayerNorm", {"2 bytes a value for 4"}),
    ],
)
def test_figures_are_those_of_the_formula(name: str, words: set[str]) -> None:
    assert words <= {part.text for part in parts(drawn(name)[0], "text")}


def columns(svg: str) -> list[dict[float, frozenset[float]]]:
    """Return, for each matrix of cells, which rows are filled in each column."""
    found = []
    for path in parts(svg, "path"):
        if path.attrib["fill-opacity"] == "1.00":
            filled: dict[float, set[float]] = {}
            for x, y in re.findall(r"M(\S+) ([\d.]+)h", path.attrib["d"]):
                filled.setdefault(float(x), set()).add(float(y))
            found.append({x: frozenset(ys) for x, ys in sorted(filled.items())})
    return found


def test_subnetworks_come_back() -> None:
    dropout, gyro = columns(drawn("GyroDropout")[0])
    assert len(set(gyro.values())) <= 4 < len(set(dropout.values()))
    taken = list(gyro.values())
    assert all(taken[3 * turn] == taken[3 * turn + 1] == taken[3 * turn + 2] for turn in range(8))


def test_layers_freeze_from_the_input_on_and_the_last_one_never() -> None:
    (learning,) = columns(drawn("LayerFreezing")[0])
    counts = [len(rows) for rows in learning.values()]
    assert len(counts) == 40
    assert counts[:20] == [10] * 20
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert learning[max(learning)] == {min(learning[min(learning)])}


def test_channels_last_puts_a_pixel_s_channels_side_by_side() -> None:
    colours = [part.attrib["fill"] for part in parts(drawn("ChannelsLast")[0], "rect")]
    assert colours[:36] == [STONES[channel] for channel in range(3) for _ in range(12)]
    assert colours[36:] == list(STONES[:3]) * 12


@pytest.mark.parametrize("name", ["EMA", "SWA"])
def test_averages_are_smoother_than_the_weights(name: str) -> None:
    def steps_of(points: list[tuple[float, float]]) -> float:
        ends = [y for x, y in points if x > 320]
        return max(abs(a - b) for a, b in pairwise(ends))

    _, noisy = sorted(curves(drawn(name)[0], "var(--muted)"), key=len)[-2:]
    smooth = max(curves(drawn(name)[0], STONES[0]), key=len)
    assert steps_of(smooth) < steps_of(noisy) / 3


def test_a_dilated_run_ends_at_half() -> None:
    (written,) = [line for line in curves(drawn("ScaleSchedule")[0], "var(--muted)") if len(line) > 50]
    (dilated,) = [line for line in curves(drawn("ScaleSchedule")[0], STONES[0]) if len(line) > 30]
    assert len(dilated) == len(written) / 2
    assert max(dilated)[0] < (max(written)[0] + min(written)[0]) / 2 + 5


def test_pages_show_one_picture_a_theme() -> None:
    """Sphinx copies pictures that it knows of, and the theme's own switch is not the system's."""
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    pages = [page for page in DOCS.glob("*.md") if "<picture>" in page.read_text("utf-8")]
    assert {"index.md", "data.md", "optim.md", "store.md"} <= {page.name for page in pages}
    for page in pages:
        source = [page.read_text("utf-8")]
        count = source[0].count("<picture>")
        conf.show_one_picture_a_theme(None, page.stem, source)
        assert "<picture>" not in source[0]
        for theme in ("light", "dark"):
            shown = re.findall(rf"```{{image}} (\S+-{theme}\.\w+)\n:class: only-{theme}\n:alt: .+\n", source[0])
            assert len(shown) == count
            assert all((DOCS / path).exists() for path in shown)
