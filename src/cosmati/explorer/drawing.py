"""Static SVG pictures for papers and front pages, without a browser: tradeoff curve, policy heat map, chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from cosmati.explorer.class_marks import ClassMark
from cosmati.explorer.figures import arm_colours, arm_markers, axis_scale, log_ticks
from cosmati.explorer.palette import DARK, LIGHT, Palette
from cosmati.explorer.trust_drawing import TrustDrawing
from cosmati.explorer.wording import AXIS_NAMES, number, weight_text
from cosmati.records.governance import GovernanceFacts
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import SpeedUp, speed_up_at_equal_quality
from cosmati.study.curves import Axis, Curve, tradeoff_curve
from cosmati.study.noise import noise_arm

Theme = Literal["light", "dark"]
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
_WIDTH, _HEIGHT = 820, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 178, 64, 62
_LABEL_GAP = 30
_MARGIN = 20


@dataclass(frozen=True)
class _Frame:
    """Maps a position (logarithmic) and a quality (linear) to pixels."""

    low: float
    high: float
    bottom: float
    top: float

    def x(self, position: float) -> float:
        share = np.log(position / self.low) / np.log(self.high / self.low)
        return _LEFT + float(share) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, quality: float) -> float:
        share = (quality - self.bottom) / (self.top - self.bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _palette(theme: Theme) -> Palette:
    return DARK if theme == "dark" else LIGHT


def _text(x: float, y: float, text: str, colour: str, *, size: int = 14, anchor: str = "start", more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {place} {more}>{escape(text)}</text>"


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, *, width: float = 1, more: str = "") -> str:
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" {more}/>'


def _document(width: float, height: float, title: str, palette: Palette, body: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    look = f'role="img" font-family="{_FONT}" aria-label={quoteattr(title)}'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>'
    ground = f'<rect width="100%" height="100%" rx="10" fill="{palette.paper}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *body, "</svg>"]) + "\n"


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about three to seven round values between `low` and `high`."""
    raw = (high - low) / 5
    magnitude = 10.0 ** np.floor(np.log10(raw))
    step = float(magnitude * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999))
    return [float(tick) for tick in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def tradeoff_svg(study: StudyRecord, theme: Theme = "light", *, axis: Axis = "seconds") -> str:
    """Return the study's tradeoff curves as SVG, with intervals and the largest speed-up at equal quality."""
    palette = _palette(theme)
    curves = [tradeoff_curve(study, arm.name, axis=axis) for arm in study.arms]
    curves = [curve for curve in curves if curve.points]
    title, unit = axis_scale(study, axis)
    heading = f"{study.quality_name.capitalize()} against {AXIS_NAMES[axis]}"
    if not curves:
        return _document(_WIDTH, 120, heading, palette, [_text(24, 64, "No finished runs.", palette.muted)])
    frame = _frame_of(curves)
    body = [_text(24, 34, heading, palette.ink, size=19, more='font-weight="600"')]
    body += _axes(study, palette, frame, title, unit)
    colours, markers = arm_colours(study, palette), arm_markers(study)
    ordered = sorted(curves, key=lambda curve: curve.arm == study.baseline_arm)
    for curve in ordered:
        width = 4.0 if curve.arm == study.baseline_arm else 2.4
        body += _curve(curve, frame, colours[curve.arm], markers[curve.arm], width, palette)
    body += _speed_up_mark(study, palette, frame, axis)
    return _document(
        _WIDTH,
        _HEIGHT,
        f"{heading}: {study.name}",
        palette,
        body + _end_labels(study, curves, frame, colours, palette),
    )


def _frame_of(curves: list[Curve]) -> _Frame:
    points = [point for curve in curves for point in curve.points]
    positions = [point.position.value for point in points]
    ends = [(p.quality.low, p.quality.high) if p.n > 1 else (p.quality.value,) * 2 for p in points]
    low, high = min(e[0] or 0.0 for e in ends), max(e[1] or 0.0 for e in ends)
    pad = (high - low) * 0.06 or 0.01
    return _Frame(min(positions) * 0.9, max(positions) * 1.06, low - pad, high + pad)


def _axes(study: StudyRecord, palette: Palette, frame: _Frame, title: str, unit: float) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    body = []
    for tick in linear_ticks(frame.bottom, frame.top):
        body.append(_line(_LEFT, frame.y(tick), right, frame.y(tick), palette.rule))
        body.append(_text(_LEFT - 10, frame.y(tick) + 5, number(tick, 3), palette.muted, anchor="end"))
    for tick in log_ticks(frame.low / unit, frame.high / unit):
        x = frame.x(tick * unit)
        body.append(_line(x, bottom, x, bottom + 6, palette.muted))
        body.append(_text(x, bottom + 24, f"{tick:.4g}", palette.muted, anchor="middle"))
    body.append(_line(_LEFT, bottom, right, bottom, palette.muted))
    body.append(_text((_LEFT + right) / 2, _HEIGHT - 14, title, palette.muted, anchor="middle"))
    name = f"{study.quality_name} {study.unit}".strip()
    middle = (_TOP + bottom) / 2
    turn = f'transform="rotate(-90 22 {middle:.1f})"'
    return [*body, _text(22, middle, name, palette.muted, anchor="middle", more=turn)]


def _curve(curve: Curve, frame: _Frame, colour: str, marker: str, width: float, palette: Palette) -> list[str]:
    places = [(frame.x(point.position.value), frame.y(point.quality.value)) for point in curve.points]
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(*curve.line(), strict=True))
    body = []
    for (x, _), point in zip(places, curve.points, strict=True):
        if point.quality.low is not None and point.quality.high is not None:
            body.append(_line(x, frame.y(point.quality.low), x, frame.y(point.quality.high), colour, width=1.5))
    pen = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
    body.append(f'<polyline points="{path}" {pen}/>')
    return body + [_marker(x, y, marker, colour, palette.paper) for x, y in places]


def _marker(x: float, y: float, marker: str, fill: str, rim: str) -> str:
    if marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{fill}" stroke="{rim}" stroke-width="1.5"/>'
    shapes = {
        "square": ((-5, -5), (5, -5), (5, 5), (-5, 5)),
        "diamond": ((0, -7), (7, 0), (0, 7), (-7, 0)),
        "triangle-up": ((0, -7), (6.5, 5), (-6.5, 5)),
        "triangle-down": ((0, 7), (6.5, -5), (-6.5, -5)),
        "cross": (
            (-2, -6),
            (2, -6),
            (2, -2),
            (6, -2),
            (6, 2),
            (2, 2),
            (2, 6),
            (-2, 6),
            (-2, 2),
            (-6, 2),
            (-6, -2),
            (-2, -2),
        ),
        "star": tuple(
            (r * np.sin(a), -r * np.cos(a)) for a, r in zip(np.arange(10) * np.pi / 5, (8, 3.5) * 5, strict=True)
        ),
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[marker])
    return f'<polygon points="{points}" fill="{fill}" stroke="{rim}" stroke-width="1.5"/>'


def _end_labels(
    study: StudyRecord, curves: list[Curve], frame: _Frame, colours: dict[str, str], palette: Palette
) -> list[str]:
    """Names right of the curves, each with its marker, pushed apart so that none covers another."""
    wanted = sorted((frame.y(curve.points[-1].quality.value), curve.arm) for curve in curves)
    markers, floor, body = arm_markers(study), float(_TOP), []
    for index, (end, arm) in enumerate(wanted):
        room = _HEIGHT - _BOTTOM - (len(wanted) - 1 - index) * _LABEL_GAP
        y = min(max(end, floor), max(room, floor))
        floor = y + _LABEL_GAP
        x = _WIDTH - _RIGHT + 18
        body.append(_marker(x, y, markers[arm], colours[arm], palette.paper))
        name = arm if len(arm) < 18 else arm[:17] + "…"
        body.append(_text(x + 14, y + 5, name, palette.ink, more='font-weight="600"'))
        if arm == study.baseline_arm != "baseline":
            body.append(_text(x + 14, y + 19, "baseline", palette.muted, size=12))
    return body


def _speed_up_mark(study: StudyRecord, palette: Palette, frame: _Frame, axis: Axis) -> list[str]:
    """The baseline's best quality as a dashed line, and the largest speed-up on it as an arrow."""
    found = {arm.name: speed_up_at_equal_quality(study, arm.name, axis=axis) for arm in study.arms}
    reached = {
        n: f for n, f in found.items() if isinstance(f, SpeedUp) and n not in (study.baseline_arm, noise_arm(study))
    }
    if not reached:
        return []
    best = max(reached.values(), key=lambda one: one.ratio)
    y, x0, x1 = frame.y(best.quality), frame.x(best.arm_needs), frame.x(best.baseline_needs)
    dashed = 'stroke-dasharray="5 5"'
    body = [_line(_LEFT, y, _WIDTH - _RIGHT, y, palette.accent, width=1.5, more=dashed)]
    if best.ratio <= 1.02:
        return body
    head = f"{x0 + 9:.1f},{y - 5:.1f} {x0 + 1:.1f},{y:.1f} {x0 + 9:.1f},{y + 5:.1f}"
    body.append(_line(x0 + 8, y, x1 - 6, y, palette.accent, width=3))
    body.append(f'<polygon points="{head}" fill="{palette.accent}"/>')
    lines = [
        f"{'at least ' if best.is_at_least else ''}{number(best.ratio)} times as fast",
        "at equal quality, one seed",
    ]
    if best.low is not None and best.high is not None:
        ends = (
            number(best.low) if best.low else "open",
            number(best.high) if np.isfinite(best.high) else "open",
        )
        lines[1] = f"95 % interval {ends[0]} to {ends[1]}, n = {best.n}"
    # The arm's curve crosses from the worse side to the better one: free are the better side left of the crossing, and
    # the worse side right of it. The halo is for the curves of other arms.
    is_left = x0 > _LEFT + 240
    place, anchor = (x0 - 8, "end") if is_left else ((x0 + x1) / 2, "middle")
    first = y - 26 if study.higher_is_better == is_left else y + 22
    halo = f'stroke="{palette.paper}" stroke-width="4" paint-order="stroke"'
    bold = f'font-weight="600" {halo}'
    body.append(_text(place, first, lines[0], palette.accent, size=15, anchor=anchor, more=bold))
    return [*body, _text(place, first + 17, lines[1], palette.muted, size=12, anchor=anchor, more=halo)]


def heat_map_svg(facts: GovernanceFacts, theme: Theme = "light") -> str:
    """Return the policy as SVG: one table a phase, classes down, regions across, weights in the cells."""
    palette = _palette(theme)
    left = 40 + 8.2 * max(len(name) for name in facts.classes)
    cell_width = max(64.0, 20 + 7.8 * max(len(name) for name in facts.regions))
    cell_height, head = 38.0, 74.0
    block = head + cell_height * len(facts.classes) + 18
    width = left + cell_width * len(facts.regions) + 110
    body = [_text(24, 34, "Which class may teach which region", palette.ink, size=19, more='font-weight="600"')]
    for index, phase in enumerate(facts.phases):
        top = 40 + index * block
        body.append(_text(24, top + 30, f"phase {phase}", palette.muted, size=13))
        for column, region in enumerate(facts.regions):
            x = left + (column + 0.5) * cell_width
            body.append(_text(x, top + head - 12, region, palette.muted, size=13, anchor="middle"))
        for row, name in enumerate(facts.classes):
            y = top + head + row * cell_height
            body.append(_text(left - 14, y + cell_height / 2 + 5, name, palette.ink, anchor="end"))
            body += _cells(facts, name, phase, palette, left, y, cell_width, cell_height)
    return _document(width, 40 + block * len(facts.phases), "Policy heat map", palette, body)


def _cells(
    facts: GovernanceFacts,
    name: str,
    phase: str,
    palette: Palette,
    left: float,
    y: float,
    width: float,
    height: float,
) -> list[str]:
    body = []
    top = max(1.0, *(w for c in facts.weight.values() for p in c.values() for w in p.values()))
    for column, region in enumerate(facts.regions):
        weight = facts.weight[name][phase][region]
        x = left + column * width
        box = f'x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{width - 3:.1f}" height="{height - 3:.1f}" rx="4"'
        fill = mixed(palette.denied, palette.full, weight / top)
        body.append(f'<rect {box} fill="{fill}"/>')
        body.append(_text(x + width / 2, y + height / 2 + 5, weight_text(weight), palette.ink, anchor="middle"))
    end = left + len(facts.regions) * width + 14
    return [*body, _text(end, y + height / 2 + 5, facts.decision[name][phase], palette.muted, size=13)]


def chain_svg(chain: TrustDrawing, marks: Mapping[str, ClassMark], theme: Theme = "light") -> str:
    """Return the picture of who vouched, who decided and what was trained as SVG.

    Args:
        chain: as it's laid out.
        marks: of the classes.
        theme: of the colours.
    """
    palette = _palette(theme)
    body = [f'<g transform="translate({_MARGIN} {_MARGIN})">']
    for ribbon in chain.ribbons:
        place, around = marks.get(ribbon.class_name, (0, 0))
        colour = palette.series[place % len(palette.series)]
        dashes = f'stroke="{colour}" stroke-width="2" stroke-dasharray="5 4"' if ribbon.is_cut else ""
        look = f'fill="{"none" if ribbon.is_cut else colour}" fill-opacity="{(0.62, 0.3, 0.1)[around % 3]}" {dashes}'
        body.append(f'<path d="{ribbon.path}" {look}><title>{escape(ribbon.words)}</title></path>')
    for bar in chain.bars:
        box = f'x="{bar.x:.1f}" y="{bar.y:.1f}" width="{bar.width:.1f}" height="{bar.height:.1f}" rx="2"'
        fill = palette.accent if bar.style == "policy" else palette.ink
        dashed = f'fill="{palette.paper}" stroke="{palette.bad}" stroke-width="1.5" stroke-dasharray="4 3"'
        body.append(f"<rect {box} {dashed if 'declared' in bar.style else f'fill={quoteattr(fill)}'}/>")
    colours = {"": palette.ink, "declared": palette.bad}
    halo = f'stroke="{palette.paper}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    for one in chain.texts:
        size, more = (15, f'font-weight="600" {halo}') if one.style == "head" else (13 - (one.style != ""), halo)
        colour = colours.get(one.style, palette.muted)
        body.append(_text(one.x, one.y, one.words, colour, size=size, anchor=one.anchor, more=more))
    title = "Who vouched, who decided, what was trained"
    return _document(chain.width + 2 * _MARGIN, chain.height + 2 * _MARGIN, title, palette, [*body, "</g>"])


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def mixed(start: str, end: str, share: float) -> str:
    """Return the hex colour `share` of the way from `start` to `end`, in sRGB."""
    pairs = zip(_channels(start), _channels(end), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
