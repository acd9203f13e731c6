"""What the cards' pictures are drawn with: SVG that stands in the page and takes its theme's colours."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import torch
from torch import Tensor

from cosmati.explorer.palette import LIGHT, PAGE

WIDTH = 460
"""Of a picture. A telephone shows it in about three quarters of this, so letters aren't smaller than 11."""
INK, MUTED, STONES = "currentColor", PAGE.muted, PAGE.series


@dataclass
class Canvas:
    """A picture in the making.

    Args:
        words: what it shows, for those who don't see it.
        height: in the units of `WIDTH`.
    """

    words: str
    height: float
    body: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 13) -> None:
        """Write a line; `y` is its foot."""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
        self.body.append(f"<text {place}>{escape(text, quote=False)}</text>")

    def line(
        self, points: Iterable[tuple[float, float]], colour: str = INK, *, width: float = 2, more: str = ""
    ) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        pen = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
        self.body.append(f'<polyline points="{path}" {pen} {more}/>'.replace(" />", "/>"))

    def dashed(self, points: Iterable[tuple[float, float]], colour: str = MUTED) -> None:
        """Draw a dashed line."""
        self.line(points, colour, width=1.2, more='stroke-dasharray="4 4"')

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1, rim: str = "none"
    ) -> None:
        """Draw a filled box."""
        shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        edge = f' stroke="{rim}" stroke-width="1.2"' if rim != "none" else ""
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.body.append(f'<rect {box} fill="{colour}"{shade}{edge}/>')

    def dot(self, x: float, y: float, colour: str = INK, *, radius: float = 3, hollow: bool = False) -> None:
        """Draw a dot, or a ring."""
        look = f'fill="none" stroke="{colour}" stroke-width="1.5"' if hollow else f'fill="{colour}"'
        self.body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {look}/>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str = MUTED, width: float = 2
    ) -> None:
        """Draw an arrow."""
        (x0, y0), (x1, y1) = start, end
        length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        foot_x, foot_y = x1 - 7 * dx, y1 - 7 * dy
        self.line([start, (foot_x, foot_y)], colour, width=width)
        wings = (
            f"{x1:.1f},{y1:.1f} {foot_x - 4 * dy:.1f},{foot_y + 4 * dx:.1f} {foot_x + 4 * dy:.1f},{foot_y - 4 * dx:.1f}"
        )
        self.body.append(f'<polygon points="{wings}" fill="{colour}"/>')

    def image(self, x: float, y: float, scale: float, pixels: Tensor) -> None:
        """Show an image [3, height, width] of values in [0, 1], `scale` units a pixel."""
        height, width = pixels.shape[1:]
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width * scale:.1f}" height="{height * scale:.1f}"'
        look = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
        self.body.append(f'<image {box} {look} href="data:image/png;base64,{png(pixels)}"/>')

    def cells(self, x: float, y: float, size: float, values: Tensor, colour: str = STONES[0]) -> None:
        """Show a matrix of values in [0, 1] as cells of ten shades; a value that isn't finite is left out."""
        shades: dict[int, list[str]] = {}
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                if math.isfinite(value):
                    cell = f"M{x + j * size:.1f} {y + i * size:.1f}h{size - 1:.1f}v{size - 1:.1f}h-{size - 1:.1f}z"
                    shades.setdefault(round(10 * value), []).append(cell)
        for shade, found in sorted(shades.items()):
            self.body.append(f'<path d="{"".join(found)}" fill="{colour}" fill-opacity="{0.08 + 0.092 * shade:.2f}"/>')

    def svg(self) -> str:
        """Return the picture."""
        look = 'width="100%" style="max-width:500px" role="img"'
        words = escape(self.words)
        return f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" {look} aria-label="{words}">{"".join(self.body)}</svg>'


@dataclass(frozen=True)
class Frame:
    """A plot's frame on a canvas: maps values to places.

    Args:
        x: range of values across.
        y: range of values upwards.
        left: place of the frame's left side.
        top: place of its upper side.
        width: of the frame.
        height: of the frame.
    """

    canvas: Canvas
    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 44
    top: float = 22
    width: float = WIDTH - 60
    height: float = 120

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a value."""
        share_x = (x - self.x[0]) / (self.x[1] - self.x[0])
        share_y = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + share_x * self.width, self.top + (1 - share_y) * self.height

    def curve(self, xs: Sequence[float], ys: Sequence[float], colour: str, *, width: float = 2.2) -> None:
        """Draw values as a curve."""
        self.canvas.line([self.at(x, y) for x, y in zip(xs, ys, strict=True)], colour, width=width)

    def axes(self, across: str, upwards: str, marks: Sequence[tuple[float, str]] = ()) -> None:
        """Draw both axes, their names and the marks of the upright one."""
        bottom = self.top + self.height
        self.canvas.line([(self.left, self.top), (self.left, bottom), (self.left + self.width, bottom)], MUTED, width=1)
        self.canvas.text(self.left + self.width, bottom + 16, across, anchor="end", colour=MUTED)
        self.canvas.text(self.left - 36, self.top - 8, upwards, colour=MUTED)
        for value, name in marks:
            self.canvas.text(self.left - 5, self.at(self.x[0], value)[1] + 4, name, anchor="end", colour=MUTED, size=11)


def png(pixels: Tensor) -> str:
    """Return an image [3, height, width] of values in [0, 1] as a PNG in base64."""
    content = (pixels.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    height, width, _ = content.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in content)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _stone(colour: str) -> Tensor:
    return torch.tensor([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]).view(3, 1, 1)


def floors(size: int = 40) -> Tensor:
    """Return two images of a Cosmatesque floor, a roundel and a lozenge: float32 [2, 3, size, size]."""
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    radius, angle = (x**2 + y**2).sqrt(), torch.atan2(y, x)
    porphyry, serpentine, giallo, lapis, _, terracotta = map(_stone, LIGHT.series)
    marble = _stone(LIGHT.rule)
    roundel = torch.where(((x > 0) ^ (y > 0))[None], serpentine, terracotta)
    roundel = torch.where((radius < 0.92)[None], marble, roundel)
    rays = (radius < 0.84) & ((angle * 12 / torch.pi).floor() % 2 == 0)
    roundel = torch.where(rays[None], giallo, roundel)
    roundel = torch.where((radius < 0.5)[None], porphyry, roundel)
    roundel = torch.where((((x + 0.15) ** 2 + (y + 0.15) ** 2) < 0.02)[None], marble, roundel)
    checks = ((x * 4).floor() + (y * 4).floor()) % 2 == 0
    lozenge = torch.where(checks[None], marble, lapis)
    lozenge = torch.where((x.abs() + y.abs() < 0.86)[None], giallo, lozenge)
    lozenge = torch.where((x.abs() + y.abs() < 0.66)[None], serpentine, lozenge)
    lozenge = torch.where((y.abs() + (x + 0.12).abs() < 0.24)[None], terracotta, lozenge)
    return torch.stack([roundel, lozenge])
