"""A deletion as a picture: the run with the steps that had the content, and the run that goes on without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cosmati.explorer.deletion_view import DeletionView
from cosmati.explorer.trust_drawing import Bar, Text

_FIRST, _SECOND, _BAR, _TICK = 56.0, 140.0, 12.0, 26.0
"""Pixels: middles of the two runs' bars, and heights of a bar and of what marks a step."""
_BOTTOM = 196.0
_SIDE = 8.0
_LEAST = 1.2


class DrawnCheckpoint(NamedTuple):
    """A checkpoint, at its place on the run that wrote it."""

    x: float
    y: float
    style: str
    words: str


@dataclass(frozen=True)
class DeletionDrawing:
    """What is drawn, in pixels.

    Attributes:
        width: of the picture.
        height: of the picture.
        texts: on it.
        bars: of the runs, and of their steps with the content.
        checkpoints: of the run.
        turn: path from the one run to the other.
    """

    width: float
    height: float
    texts: tuple[Text, ...]
    bars: tuple[Bar, ...]
    checkpoints: tuple[DrawnCheckpoint, ...]
    turn: str


def deletion_drawing(view: DeletionView, *, is_narrow: bool = False) -> DeletionDrawing:
    """Lay the picture out of a deletion by replay.

    Args:
        view: of the deletion, whose certificate was checked.
        is_narrow: for a phone.
    """
    width = 350.0 if is_narrow else 960.0
    start, num_steps = view.from_step, max(1, view.num_steps)
    steps = view.about.steps if view.about else (() if view.first_contact is None else (view.first_contact,))

    def x(step: float) -> float:
        return _SIDE + (width - 2 * _SIDE) * step / num_steps

    thick = max(_LEAST, x(1) - x(0) - 0.6)
    first, last = x(0), x(num_steps)
    bars = [
        Bar(first, _FIRST - _BAR / 2, last - first, _BAR, "run"),
        Bar(x(start), _SECOND - _BAR / 2, last - x(start), _BAR, "without"),
        *(Bar(x(one), _FIRST - _TICK / 2, thick, _TICK, "had") for one in steps),
        *(Bar(x(one), _SECOND - _BAR / 2, thick, _BAR, "tombstone") for one in steps if one >= start),
    ]
    kept = tuple(
        DrawnCheckpoint(x(one.step), _FIRST, "clean" if one.is_clean else "learnt", f"{one.path}, step {one.step:,}")
        for one in view.checkpoints
    )
    return DeletionDrawing(
        width,
        _BOTTOM,
        tuple(_texts(view, steps, x(start), width, is_narrow=is_narrow)),
        tuple(bars),
        kept,
        f"M{x(start):.1f},{_FIRST:.1f}V{_SECOND:.1f}",
    )


def _texts(view: DeletionView, steps: tuple[int, ...], turn: float, width: float, *, is_narrow: bool) -> list[Text]:
    """Return the words: what each bar is, over it, and the steps below."""
    start, right, certificate = view.from_step, width - _SIDE, view.certificate
    had = f"the run: {len(steps):,} of {view.num_steps:,} steps had its rows"
    without = f"again from step {start:,}" + (", without them" if is_narrow else ": tombstones in their place")
    # Beside the turn where there's room, else from the left edge.
    left = turn + 8 if width - turn > (240 if is_narrow else 420) else _SIDE
    texts = [
        Text(_SIDE, 24, had, "head"),
        Text(left, _SECOND - 18, without, "head"),
        Text(right, _BOTTOM - 8, f"step {view.num_steps:,}", "small", "end"),
        Text(_SIDE, _BOTTOM - 8, "step 0", "small"),
    ]
    if certificate is not None and not is_narrow:
        texts += [
            Text(right, 24, f"weights {certificate.weights_before[:12]}", "key", "end"),
            Text(right, _SECOND + 28, f"weights {certificate.weights_after[:12]}", "key", "end"),
        ]
    contact = view.first_contact
    place = _SIDE + (width - 2 * _SIDE) * (contact or 0) / max(1, view.num_steps)
    if 70 < place < width - 220:  # where it meets neither end's words
        texts.append(Text(place, _BOTTOM - 8, f"first contact: step {contact:,}", "small"))
    return texts
