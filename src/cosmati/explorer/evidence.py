"""The project's own evidence, as it was committed with the source: headline claims and the studies behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import cast

from cosmati.explorer.wording import AXIS_NAMES, interval_text, number
from cosmati.records.headline import HeadlineClaim, headline_from_json
from cosmati.records.study import StudyRecord
from cosmati.study.curves import Axis

FOLDER = "evidence"
HEADLINE_FILE = "headline.json"
_OPPONENTS = {
    "tuned": "a tuned baseline, searched with as many trials",
    "plain": "a plain public recipe",
}


@dataclass(frozen=True)
class Evidence:
    """Claims by time, and the studies that they were read off, by task."""

    claims: tuple[HeadlineClaim, ...]
    studies: tuple[tuple[str, StudyRecord], ...]


@dataclass(frozen=True)
class ShownClaim:
    """A headline claim as pages show it: a title, a figure to show large where a difference is shown, a sentence."""

    title: str
    figure: str
    sentence: str
    is_shown: bool


def committed_evidence() -> Evidence | None:
    """Return what this release claims of itself, None where it claims nothing."""
    folder = files("cosmati.explorer").joinpath(FOLDER)
    headline = folder.joinpath(HEADLINE_FILE)
    if not headline.is_file():
        return None
    claims = tuple(one for one in headline_from_json(headline.read_text(encoding="utf-8")) if one.axis == "seconds")
    tasks = dict.fromkeys(one.task for one in claims)
    studies = [(task, folder.joinpath(f"{task}.json").read_text(encoding="utf-8")) for task in tasks]
    return Evidence(claims, tuple((task, StudyRecord.from_json(text)) for task, text in studies))


def shown_claims(claims: Sequence[HeadlineClaim]) -> tuple[ShownClaim, ...]:
    """Return claims as they're shown, with all that each rests on."""
    return tuple(_shown(claim) for claim in claims)


def _shown(claim: HeadlineClaim) -> ShownClaim:
    title = f"{claim.task.capitalize()}, over {_OPPONENTS[claim.opponent]}"
    quality = f"{claim.metric} {number(claim.quality, 4)}"
    if claim.speed_up is None:
        return ShownClaim(title, "", f"{claim.arm} never reaches {quality}, the opponent's mean.", is_shown=False)
    # Only where the arm's smallest budget is already better is an upper end open: the opponent reaches its own mean.
    at_least, at_most = ("≥ ", "at most ") if claim.high is None else ("", "")
    ratio = f"{at_least}{number(claim.speed_up)}×"
    what = (
        f"{claim.arm.capitalize()} reaches {quality}, the opponent's mean at its largest budget, in {at_most}"
        f"{number(100 / claim.speed_up)} % of its {AXIS_NAMES[cast('Axis', claim.axis)]}"
    )
    figures = f"{ratio}, 95 % interval {claim_interval(claim)}{_p_text(claim)}"
    verdict = "" if claim.is_shown else " No difference is shown."
    trials = f" The arm had {claim.arm_trials} trials, the opponent {claim.baseline_trials}."
    return ShownClaim(
        title,
        ratio if claim.is_shown else "",
        f"{what} ({figures}).{verdict}{trials if claim.opponent == 'tuned' else ''}",
        is_shown=claim.is_shown,
    )


def claim_interval(claim: HeadlineClaim) -> str:
    """Return the interval and n of a claim in words; an end that isn't there is open."""
    low = float("-inf") if claim.low is None else claim.low
    high = float("inf") if claim.high is None else claim.high
    return interval_text(low, high, claim.n)


def _p_text(claim: HeadlineClaim) -> str:
    if claim.p is None:
        return ""
    return f", adjusted p {'< 0.001' if claim.p < 0.001 else '= ' + number(claim.p, 2)}"
