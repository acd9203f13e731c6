"""A picture of what failures leave of a run's time, by the number of nodes: a line for each number of spares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from cosmati.explorer.drawing import Theme
from cosmati.explorer.palette import DARK, LIGHT, Palette

GoodputPoint = tuple[int, float, float, float]
"""Nodes, and the share of time that counts: mean, and its interval's ends."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 600, 250, 56, 104, 78, 46
_APART = 15
"""Between the feet of two labels."""


def goodput_svg(
    title: str,
    subtitle: str,
    series: Mapping[str, Sequence[GoodputPoint]],
    limit: Sequence[tuple[int, float]] = (),
    theme: Theme = "light",
) -> str:
    """Draw goodput against nodes, on an axis of powers of two.

    Args:
        title: above the picture.
        subtitle: below the title.
        series: points by the name that stands at the line's end.
        limit: nodes and share of a dashed line, the limit of them all; empty for none.
        theme: colours.
    """
    palette = DARK if theme == "dark" else LIGHT
    nodes = sorted({point[0] for points in series.values() for point in points})
    lowest = min(point[2] for points in series.values() for point in points)
    floor = math.floor(lowest * 10) / 10
    total_width, total_height = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

    def x(num: float) -> float:
        first, last = math.log2(nodes[0]), math.log2(nodes[-1])
        return _LEFT + _WIDTH * (math.log2(num) - first) / max(1e-9, last - first)

    def y(share: float) -> float:
        return _TOP + _HEIGHT * (1 - share) / (1 - floor)

    body = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
            f'width="{total_width}" height="{total_height}" role="img" font-family="{font}" '
            f'aria-label="{escape(title)}">'
        ),
        f'<rect width="100%" height="100%" rx="10" fill="{palette.paper}"/>',
        f'<text x="24" y="30" font-size="17" font-weight="600" fill="{palette.ink}">{escape(title)}</text>',
        f'<text x="24" y="49" font-size="12" fill="{palette.muted}">{escape(subtitle)}</text>',
    ]
    for tenth in range(round(floor * 10), 11):
        height = y(tenth / 10)
        body += [
            _line([(_LEFT, height), (_LEFT + _WIDTH, height)], palette.rule, 1),
            _text(_LEFT - 8, height + 4, f"{tenth * 10} %", palette.muted, "end"),
        ]
    body += [_text(x(num), _TOP + _HEIGHT + 19, f"{num:,}", palette.muted, "middle") for num in nodes]
    body.append(_text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 38, "nodes that compute", palette.muted, "middle"))
    feet = _spread([y(points[-1][1]) + 4 for points in series.values()])
    for (name, points), colour, foot in zip(series.items(), palette.series, feet, strict=False):
        body += _curve([(x(num), y(mean), y(low), y(high)) for num, mean, low, high in points], colour, palette)
        body.append(_text(_LEFT + _WIDTH + 12, foot, name, palette.ink, "start"))
    if limit:
        body.append(_line([(x(num), y(share)) for num, share in limit], palette.ink, 1.2, 'stroke-dasharray="2 5"'))
    return "\n".join([*body, "</svg>"]) + "\n"


def _curve(points: Sequence[tuple[float, float, float, float]], colour: str, palette: Palette) -> list[str]:
    """Draw the mean, and its interval around it where it can be seen."""
    edge = [(x, high) for x, _, _, high in points] + [(x, low) for x, _, low, _ in reversed(points)]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
    return [
        f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.18"/>',
        _line([(x, mean) for x, mean, _, _ in points], colour, 2),
        *(
            f'<circle cx="{x:.1f}" cy="{mean:.1f}" r="3" fill="{colour}" stroke="{palette.paper}"/>'
            for x, mean, _, _ in points
        ),
    ]


def _spread(feet: Sequence[float]) -> list[float]:
    """Return the feet of labels, moved apart downwards where they'd lie on one another."""
    found = dict.fromkeys(range(len(feet)), 0.0)
    above = -math.inf
    for index in sorted(found, key=lambda i: feet[i]):
        above = found[index] = max(feet[index], above + _APART)
    return [found[index] for index in range(len(feet))]


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    pen = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
    return f'<polyline points="{path}" {pen} {more}/>'.replace(" />", "/>")


def _text(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'
