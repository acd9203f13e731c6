"""A picture of a data plan: which class each microbatch of the first steps is of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cosmati.explorer.drawing import Theme, mixed
from cosmati.explorer.palette import DARK, LIGHT

_CELL, _GAP, _LEFT, _TOP = 12, 2, 24, 58
_MAX_STEPS = 64


def class_schedule_svg(
    schedule: Sequence[Sequence[int | None]], class_names: Sequence[str], theme: Theme = "light"
) -> str:
    """Draw a column for each step, a cell for each of its microbatches, coloured by class.

    Args:
        schedule: class of each microbatch of each step; None where rows of several are mixed.
        class_names: of all classes.
        theme: colours.
    """
    palette = DARK if theme == "dark" else LIGHT
    steps = schedule[:_MAX_STEPS]
    colours: dict[int | None, str] = {None: palette.rule}
    # Beyond the palette's own, each further round is a shade nearer to the paper.
    for number in range(len(class_names)):
        around, place = divmod(number, len(palette.series))
        colours[number] = mixed(palette.series[place], palette.paper, min(0.75, 0.3 * around))
    shown = sorted({class_id for step in steps for class_id in step if class_id is not None})
    height_of_cells = max((len(step) for step in steps), default=0) * (_CELL + _GAP)
    names = [class_names[class_id] for class_id in shown]
    width = max(2 * _LEFT + len(steps) * (_CELL + _GAP), 2 * _LEFT + 14 * max([24, *map(len, names)]))
    height = _TOP + height_of_cells + 34 + 22 * len(shown)
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
    subtitle = f"columns are steps 0 to {max(0, len(steps) - 1)}, cells their microbatches"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    look = f'role="img" font-family="{font}" aria-label="Class of each microbatch of the first {len(steps)} steps"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>',
        f'<rect width="100%" height="100%" rx="10" fill="{palette.paper}"/>',
        f'<text x="{_LEFT}" y="30" font-size="17" font-weight="600" fill="{palette.ink}">Which class comes when</text>',
        f'<text x="{_LEFT}" y="48" font-size="12" fill="{palette.muted}">{subtitle}</text>',
    ]
    for column, step in enumerate(steps):
        for row, class_id in enumerate(step):
            x, y = _LEFT + column * (_CELL + _GAP), _TOP + row * (_CELL + _GAP)
            fill = colours[class_id]
            body.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2" fill="{fill}"/>')
    total = sum(len(step) for step in schedule)
    for place, class_id in enumerate(shown):
        y = _TOP + height_of_cells + 24 + 22 * place
        share = sum(one == class_id for step in schedule for one in step) / total
        body.append(
            f'<rect x="{_LEFT}" y="{y - 10}" width="{_CELL}" height="{_CELL}" rx="2" fill="{colours[class_id]}"/>'
        )
        text = f"{escape(class_names[class_id])}, {share:.1%} of {total} microbatches"
        body.append(f'<text x="{_LEFT + 20}" y="{y}" font-size="13" fill="{palette.ink}">{text}</text>')
    return "\n".join([*body, "</svg>"]) + "\n"
