"""A picture of which methods compose: a triangle of all pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from cosmati.explorer.drawing import Theme
from cosmati.explorer.palette import DARK, LIGHT

# Thirty methods fit the column of text in the docs, which is 736 pixels wide.
_CELL, _LABEL, _RIGHT, _TOP = 16, 152, 100, 124
_GLYPHS = {"trains": "", "refused": "×", "unneeded": "·"}
_MEANINGS = {
    "trains": "trains together",
    "refused": "refused by the plan, with a reason",
    "unneeded": "trains, and one of them has nothing to change there",
}


def matrix_svg(
    names: Sequence[str], cells: Mapping[tuple[str, str], tuple[str, str]], title: str, theme: Theme = "light"
) -> str:
    """Draw a cell for each pair, below the diagonal; the diagonal is a method alone.

    Args:
        names: of the methods, in the order of rows and columns.
        cells: outcome ("trains", "refused" or "unneeded") and reason by pair; the first name comes first in `names`.
        title: of the picture.
        theme: colours.
    """
    palette = DARK if theme == "dark" else LIGHT
    fills = {"trains": palette.good, "refused": palette.bad, "unneeded": palette.denied}
    inks = {"trains": palette.paper, "refused": palette.paper, "unneeded": palette.muted}
    size = len(names) * _CELL
    width, height = _LABEL + size + _RIGHT, _TOP + size + 16
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
    look = f'width="{width}" height="{height}" role="img" font-family="{font}" aria-label="{escape(title)}"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {look}>',
        f'<rect width="100%" height="100%" rx="10" fill="{palette.paper}"/>',
        f'<text x="20" y="30" font-size="17" font-weight="600" fill="{palette.ink}">{escape(title)}</text>',
    ]
    # One below the other, so that a phone shows them without scrolling.
    for place, (outcome, meaning) in enumerate(_MEANINGS.items()):
        y = 46 + 20 * place
        body.append(f'<rect x="20" y="{y}" width="14" height="14" rx="3" fill="{fills[outcome]}"/>')
        body.append(_glyph(27, y + 7, _GLYPHS[outcome], inks[outcome]))
        body.append(f'<text x="42" y="{y + 11}" font-size="12" fill="{palette.muted}">{meaning}</text>')
    for row, name in enumerate(names):
        y = _TOP + row * _CELL
        label = f'<text x="{_LABEL - 6}" y="{y + 12}" font-size="11.5" text-anchor="end" fill="{palette.ink}">'
        body.append(f"{label}{escape(name)}</text>")
        for column in range(row + 1):
            outcome, reason = cells[names[column], name]
            x = _LABEL + column * _CELL
            pair = name if column == row else f"{names[column]} and {name}"
            said = reason or ("trains" if column == row else _MEANINGS[outcome])
            body.append(
                f'<g><rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="3" '
                f'fill="{fills[outcome]}"/>{_glyph(x + _CELL / 2, y + _CELL / 2, _GLYPHS[outcome], inks[outcome])}'
                f"<title>{escape(pair)}: {escape(said)}</title></g>"
            )
        x = _LABEL + (row + 1) * _CELL + 2
        turn = f'transform="rotate(-38 {x} {y + 7})"'
        body.append(f'<text x="{x}" y="{y + 7}" font-size="10" {turn} fill="{palette.muted}">{escape(name)}</text>')
    return "\n".join([*body, "</svg>"]) + "\n"


def _glyph(x: float, y: float, glyph: str, colour: str) -> str:
    if not glyph:
        return ""
    place = f'x="{x}" y="{y}" font-size="12" text-anchor="middle" dominant-baseline="central"'
    return f'<text {place} fill="{colour}">{glyph}</text>'
