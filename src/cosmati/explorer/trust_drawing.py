"""The chain of a governed run as a picture: who vouched, who decided, what was trained.

Each class is a ribbon from the keys that have signed it to the policy, and from there to the regions that it taught.
The template draws what is laid out here, once for wide and once for narrow screens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cosmati.explorer.class_marks import ClassMark
from cosmati.explorer.run_figures import elided
from cosmati.explorer.trust import Trust
from cosmati.records.governance import GovernanceFacts

MAX_RIBBONS, MAX_REGIONS = 16, 12
_KEY = 12
_TOP, _HEAD, _LABEL, _GAP = 84.0, 40.0, 19.0, 13.0
_BAR, _WIDEST, _LEAST = 9.0, 34.0, 3.0
"""Pixels: of a bar, of the ribbon of the largest class, and of the smallest."""


class Text(NamedTuple):
    """Words at a place."""

    x: float
    y: float
    words: str
    style: str = ""
    anchor: str = "start"


class Bar(NamedTuple):
    """A bar that ribbons leave or reach."""

    x: float
    y: float
    width: float
    height: float
    style: str


class Ribbon(NamedTuple):
    """A band of a class; where it's cut off, the policy lets nothing of it through."""

    path: str
    class_name: str
    words: str
    is_cut: bool = False


@dataclass(frozen=True)
class TrustDrawing:
    """What is drawn, in pixels.

    Attributes:
        width: of the picture.
        height: of the picture.
        texts: on it.
        bars: of signers, policy and regions.
        ribbons: of classes.
        left_out: classes and regions that there was no room for.
    """

    width: float
    height: float
    texts: tuple[Text, ...]
    bars: tuple[Bar, ...]
    ribbons: tuple[Ribbon, ...]
    left_out: tuple[str, ...]


class _Part(NamedTuple):
    """What one group of signers vouches for of a class."""

    class_name: str
    num_signed: int | None
    share: float


def trust_drawing(
    trust: Trust, facts: GovernanceFacts, marks: Mapping[str, ClassMark], *, is_narrow: bool = False
) -> TrustDrawing:
    """Lay the picture out.

    Args:
        trust: who vouched and who decided.
        facts: what was allowed, and what was taught.
        marks: of the classes, whose order is the picture's.
        is_narrow: for a phone.
    """
    return _Layout(trust, facts, tuple(marks) or facts.classes, is_narrow).drawing()


class _Layout:
    """The picture as it's put together, from the top down."""

    def __init__(self, trust: Trust, facts: GovernanceFacts, order: Sequence[str], is_narrow: bool) -> None:
        self._trust, self._facts = trust, facts
        self._width = 350.0 if is_narrow else 960.0
        self._policy_x = 196.0 if is_narrow else 470.0
        self._end_x = self._width - _BAR
        self._limits = (23, 17) if is_narrow else (28, 40)
        self._rows = {(one.class_name, one.region): one.num_rows for one in facts.totals}
        self._regions = [name for name in facts.regions if any(self._rows.get((c, name)) for c in facts.classes)]
        groups = _groups(trust, facts)
        place = {name: index for index, name in enumerate(order)}
        parts = [(keys, one) for keys, own in groups.items() for one in own]
        parts.sort(key=lambda pair: place.get(pair[1].class_name, len(place)))
        kept = parts[:MAX_RIBBONS]
        self._groups = {
            keys: [one for other, one in kept if other == keys] for keys in dict.fromkeys(k for k, _ in kept)
        }
        left = [one.class_name for _, one in parts[MAX_RIBBONS:]] + self._regions[MAX_REGIONS:]
        self._left_out = tuple(dict.fromkeys(left))
        self._regions = self._regions[:MAX_REGIONS]
        self._most = max([1, *(self._taught(name) for name in facts.classes)])
        self._texts, self._bars, self._ribbons = list[Text](), list[Bar](), list[Ribbon]()

    def _taught(self, class_name: str) -> int:
        return max([0, *(self._rows.get((class_name, region), 0) for region in self._regions)])

    def _is_refused(self, class_name: str) -> bool:
        decisions = self._facts.decision.get(class_name, {})
        return all(one in ("reject", "defer") for one in decisions.values())

    def drawing(self) -> TrustDrawing:
        y, leaving = _TOP, defaultdict[str, list[tuple[float, float, str]]](list)
        for keys, parts in self._groups.items():
            y = self._group(keys, parts, y, leaving)
        bottom = self._taught_regions(leaving, y)
        self._heads(bottom)
        height = bottom + 8
        return TrustDrawing(
            self._width, height, tuple(self._texts), tuple(self._bars), tuple(self._ribbons), self._left_out
        )

    def _group(
        self,
        keys: tuple[str, ...],
        parts: Sequence[_Part],
        y: float,
        leaving: dict[str, list[tuple[float, float, str]]],
    ) -> float:
        """Put what one group of signers vouches for; return where the next one begins."""
        start, inner = y, _BAR + 8
        self._texts.append(Text(inner, y + 13, self._signers(keys), "key" if keys else "declared"))
        y += 24
        for part in parts:
            taught = self._taught(part.class_name)
            label = elided(part.class_name, self._limits[0])
            self._texts.append(Text(inner, y + 13, label))
            said = [f"{part.num_signed:,} rows signed"] if part.num_signed is not None else []
            said += [] if taught else ["none let through" if self._is_refused(part.class_name) else "none came"]
            says = ", ".join(said)
            if self._width > 500 and says:
                self._texts.append(Text(self._policy_x - 10, y + 13, says, "small", "end"))
            y += _LABEL
            width = max(_LEAST, _WIDEST * math.sqrt(taught * part.share / self._most)) if taught else 0.0
            end = self._policy_x
            path = f"M{_BAR:.1f},{y:.1f}H{end:.1f}V{y + width:.1f}H{_BAR:.1f}Z"
            words = f"{part.class_name}: {says or f'{taught:,} rows taught'}"
            self._ribbons.append(Ribbon(path, part.class_name, words, is_cut=not taught))
            leave = y
            for region in self._regions if taught else ():
                rows_there = self._rows.get((part.class_name, region), 0)
                thick = width * rows_there / taught / len(self._regions)
                if thick:
                    leaving[region].append((leave, max(thick, 0.7), part.class_name))
                    leave += thick
            y += width + _GAP
        self._bars.append(Bar(0, start, _BAR, y - start - _GAP + 4, "signer" if keys else "signer declared"))
        return y + 8

    def _taught_regions(self, leaving: Mapping[str, Sequence[tuple[float, float, str]]], bottom: float) -> float:
        """Put the regions, evenly spaced, and the ribbons that reach them; return where the picture ends."""
        begin, end = self._policy_x + _BAR, self._end_x
        heights = {region: max(4.0, sum(one[1] for one in leaving[region])) for region in self._regions}
        needed = sum(heights.values()) + (_LABEL + _GAP) * len(heights)
        room = max(0.0, bottom - _TOP - needed) / max(1, len(heights))
        y, middle = _TOP + room / 2, (begin + end) / 2
        for region, height in heights.items():
            self._texts.append(Text(self._width, y + 13, elided(region, self._limits[1]), "", "end"))
            y += _LABEL
            self._bars.append(Bar(end, y, _BAR, height, "region"))
            arrive = y
            for leave, thick, name in leaving[region]:
                path = (
                    f"M{begin:.1f},{leave:.1f}{_curve(middle, leave, arrive, end)}V{arrive + thick:.1f}"
                    f"{_curve(middle, arrive + thick, leave + thick, begin)}Z"
                )
                self._ribbons.append(Ribbon(path, name, f"{name} → {region}: {self._rows[name, region]:,} rows"))
                arrive += thick
            y += height + _GAP + room
        return max(bottom, y)

    def _heads(self, bottom: float) -> None:
        """Put the three headings, and the bar of the policy."""
        trust, x = self._trust, self._policy_x
        heads = ((0.0, "Who vouched", "start"), (x, "Who decided", "middle"), (self._width, "What was trained", "end"))
        small = self._width < 500
        words = ("vouched", "decided", "trained") if small else tuple(text for _, text, _ in heads)
        for (place, _, anchor), text in zip(heads, words, strict=True):
            middle = place + _BAR / 2 if anchor == "middle" else place
            self._texts.append(Text(middle, 18, text, "head", anchor))
        decided = trust.policy
        names = (elided(decided.target, 22), self._signers(decided.keyids, short=True)) if decided else ("declared",)
        style = "key" if decided else "declared"
        for line, name in enumerate(names):
            self._texts.append(Text(x + _BAR / 2, 40 + 17 * line, name, style if line or not decided else "", "middle"))
        self._bars.append(Bar(x, _TOP - 16, _BAR, bottom - _TOP + 16, "policy" if decided else "policy declared"))

    def _signers(self, keys: Sequence[str], *, short: bool = False) -> str:
        if not keys:
            return "declared: nobody signed" if self._width < 500 else "declared: nobody has signed the classes"
        first = keys[0][: 8 if self._width < 500 else _KEY]
        more = f" +{len(keys) - 1}" if len(keys) > 1 else ""
        return f"key {first}{more}" if short else f"signed by {first}{more}"


def _curve(middle: float, y: float, other_y: float, end: float) -> str:
    return f"C{middle:.1f},{y:.1f} {middle:.1f},{other_y:.1f} {end:.1f},{other_y:.1f}"


def _groups(trust: Trust, facts: GovernanceFacts) -> dict[tuple[str, ...], list[_Part]]:
    """Return what each group of signers vouches for, and under no keys the classes that taught without a signature."""
    signed = defaultdict[str, dict[tuple[str, ...], int]](dict)
    for one in trust.sources:
        by_keys = signed[one.class_name]
        by_keys[one.keyids] = by_keys.get(one.keyids, 0) + (one.num_rows or 0)
    found = defaultdict[tuple[str, ...], list[_Part]](list)
    for name, by_keys in signed.items():
        total = sum(by_keys.values())
        for keys, rows in by_keys.items():
            found[keys].append(_Part(name, rows or None, rows / total if total else 1 / len(by_keys)))
    unsigned = dict.fromkeys(one.class_name for one in facts.totals if one.class_name not in signed)
    found[()] += [_Part(name, None, 1.0) for name in unsigned]
    return {keys: parts for keys, parts in found.items() if parts}
