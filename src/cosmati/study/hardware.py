"""What hardware costs, from a dated file that users edit, and what a study would cost on other hardware."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cosmati.errors import RunError
from cosmati.records.study import ProfileRecord, StudyRecord

CATALOGUE_FILE = "hardware.toml"


@dataclass(frozen=True, kw_only=True)
class HardwarePrice:
    """One entry of the catalogue.

    Attributes:
        name: Of the hardware.
        price_per_hour: In US dollars.
        date: Of the price, such as `2026-05`.
        source: Where the price comes from.
    """

    name: str
    price_per_hour: float
    date: str
    source: str


def read_catalogue(path: str | Path | None = None) -> tuple[HardwarePrice, ...]:
    """Read a catalogue, by default the one that comes along.

    Raises:
        RunError: the file isn't there, or isn't a catalogue.
    """
    try:
        given = Path(path).read_text(encoding="utf-8") if path else None
        text = given if given is not None else files("cosmati.study").joinpath(CATALOGUE_FILE).read_text("utf-8")
        entries = TypeAdapter(tuple[HardwarePrice, ...]).validate_python(tomllib.loads(text).get("hardware", ()))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        msg = (
            f"{path or CATALOGUE_FILE} is no catalogue of hardware: {error}. "
            "Each [[hardware]] has name, price_per_hour, date and source."
        )
        raise RunError(msg) from error
    if not entries or any(not entry.price_per_hour > 0 for entry in entries):
        msg = f"{path or CATALOGUE_FILE} names no hardware, or a price that isn't positive. Mend its [[hardware]]."
        raise RunError(msg)
    return entries


def price_of(name: str, catalogue: Sequence[HardwarePrice]) -> HardwarePrice:
    """Return the entry of that name.

    Raises:
        RunError: there is none.
    """
    for entry in catalogue:
        if entry.name.lower() == name.lower():
            return entry
    near = difflib.get_close_matches(name, [entry.name for entry in catalogue], n=1, cutoff=0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    msg = f"The catalogue has no {name!r}.{hint} It has {', '.join(entry.name for entry in catalogue)}."
    raise RunError(msg)


def priced(study: StudyRecord, price: HardwarePrice) -> StudyRecord:
    """Return the study with a price for its hardware, whose date and source it then names."""
    note = f"Priced as {price.name}: {price.price_per_hour:g} US dollars an hour as of {price.date} ({price.source})."
    return replace(study, price_per_hour=price.price_per_hour, notes=f"{study.notes} {note}".strip())


def extrapolated(study: StudyRecord, profile: ProfileRecord) -> StudyRecord:
    """Return the study as it would be on other hardware: the same qualities, times by profiles made there.

    A profile is a whole run with its schedule dilated, so it has every point where the schedule changes the work, each
    with the share that it has in a long run. What it can't show is work that grows with a run's length.

    Args:
        study: the finished study.
        profile: of all its arms, made on the other hardware.

    Raises:
        RunError: an arm has no profile.
    """
    missing = sorted({arm.name for arm in study.arms} - {one.arm for one in profile.costs})
    if missing:
        msg = (
            f"There are no profiles of {', '.join(missing)} on {profile.hardware}. Profile all arms of the study there."
        )
        raise RunError(msg)
    note = (
        f"Times are extrapolated to {profile.hardware} from profiles made there; the runs themselves were made on "
        f"{study.hardware}."
    )
    return replace(
        study,
        hardware=f"{profile.hardware} (extrapolated)",
        price_per_hour=None,
        costs=profile.costs,
        notes=f"{study.notes} {note}".strip(),
    )
