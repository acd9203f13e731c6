"""A picture of learning-rate schedules: small panels side by side, all with the same axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from cosmati.explorer.drawing import Theme
from cosmati.explorer.palette import DARK, LIGHT, Palette

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 148, 74, 24, 62, 38
_COLUMNS = 4


def schedules_svg(multipliers: Mapping[str, Sequence[float]], theme: Theme = "light") -> str:
    """Draw schedules.

    Args:
        multipliers: at each step of a run of one length, by the name that's written below the panel.
        theme: colours.
    """
    num_steps = len(next(iter(multipliers.values())))
    palette = DARK if theme == "dark" else LIGHT
    num_rows = math.ceil(len(multipliers) / _COLUMNS)
    width = 2 * _LEFT + _COLUMNS * _WIDTH + (_COLUMNS - 1) * _GAP // 2
    height = _TOP + num_rows * (_HEIGHT + _GAP) + 4
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
    title = f"Learning-rate multipliers over a run of {num_steps} steps"
    body = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{font}" aria-label="{title}">'
        ),
        f'<rect width="100%" height="100%" rx="10" fill="{palette.paper}"/>',
        f'<text x="{_LEFT}" y="30" font-size="17" font-weight="600" fill="{palette.ink}">{title}</text>',
        (
            f'<text x="{_LEFT}" y="48" font-size="12" fill="{palette.muted}">from 0 to 1; a dilated run '
            "stretches all of it, warm-up too</text>"
        ),
    ]
    for index, (name, values) in enumerate(multipliers.items()):
        row, column = divmod(index, _COLUMNS)
        x = _LEFT + column * (_WIDTH + _GAP // 2)
        y = _TOP + row * (_HEIGHT + _GAP)
        body += _panel(x, y, name, values, palette)
    return "\n".join([*body, "</svg>"]) + "\n"


def _panel(x: float, y: float, name: str, values: Sequence[float], palette: Palette) -> list[str]:
    step = _WIDTH / len(values)
    # A step has one rate from its start to its end.
    corners = [
        (x + (i + end) * step, y + _HEIGHT - max(0.0, min(1.0, value)) * (_HEIGHT - 8))
        for i, value in enumerate(values)
        for end in (0, 1)
    ]
    line = " ".join(f"{cx:.1f},{cy:.1f}" for cx, cy in corners)
    floor = y + _HEIGHT
    return [
        (
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{palette.surface}" '
            f'stroke="{palette.rule}"/>'
        ),
        f'<polygon points="{x},{floor} {line} {x + _WIDTH},{floor}" fill="{palette.denied}"/>',
        (
            f'<polyline points="{line}" fill="none" stroke="{palette.series[0]}" stroke-width="2" '
            'stroke-linejoin="round"/>'
        ),
        f'<text x="{x}" y="{y + _HEIGHT + 17}" font-size="13" fill="{palette.ink}">{escape(name)}</text>',
    ]
