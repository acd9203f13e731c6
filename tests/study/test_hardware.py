"""The catalogue of hardware, and times on other hardware."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.records.study import CostProfile, ProfileRecord
from cosmati.study.comparison import SpeedUp, speed_up_at_equal_quality
from cosmati.study.hardware import extrapolated, price_of, priced, read_catalogue
from tests.study.oracles import log_quality, study


def test_the_catalogue_is_dated_and_priced() -> None:
    entries = read_catalogue()
    assert len({entry.name for entry in entries}) == len(entries) >= 3
    assert all(entry.price_per_hour > 0 and entry.date[:2] == "20" and entry.source for entry in entries)
    assert price_of("nvidia h100 sxm5", entries).price_per_hour == 3.0


def test_a_users_own_catalogue_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[hardware]]\nname = "ours"\nprice_per_hour = 2\ndate = "2026-11"\nsource = "invoice"\n')
    (entry,) = read_catalogue(path)
    assert (entry.name, entry.price_per_hour) == ("ours", 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[hardware]]\nname = 3\n",
        "not toml",
        '[[hardware]]\nname = "x"\nprice_per_hour = 0\ndate = ""\nsource = ""\n',
        '[[hardware]]\nname = "x"\nprice_per_hour = nan\ndate = ""\nsource = ""\n',
    ],
)
def test_what_is_no_catalogue_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(RunError, match=r"own\.toml"):
        read_catalogue(path)
    with pytest.raises(RunError, match="absent"):
        read_catalogue(tmp_path / "absent.toml")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(RunError, match="Did you mean 'NVIDIA H100 SXM5'"):
        price_of("H100", read_catalogue())


def test_extrapolation_needs_every_arm_and_says_what_it_is() -> None:
    record = study({"baseline": log_quality(), "fast": log_quality(0.1 * math.log(1.5))})
    here = speed_up_at_equal_quality(record, "fast")
    paces = {"baseline": 0.5, "fast": 0.25}
    costs = tuple(CostProfile(arm, turn, 10, pace) for arm, pace in paces.items() for turn in range(3))
    profile = ProfileRecord(study=record.name, hardware="another machine", costs=costs)
    assert ProfileRecord.from_json(profile.to_json()) == profile
    there = extrapolated(record, profile)
    assert there.runs == record.runs
    assert there.price_per_hour is None
    assert there.hardware == "another machine (extrapolated)"
    assert record.hardware in there.notes
    found = speed_up_at_equal_quality(there, "fast")
    assert isinstance(here, SpeedUp)
    assert isinstance(found, SpeedUp)
    assert found.ratio == pytest.approx(2 * here.ratio)
    with pytest.raises(RunError, match="no profiles of fast"):
        extrapolated(record, replace(profile, costs=costs[:3]))


def test_a_price_names_its_date_and_source() -> None:
    price = price_of("NVIDIA H200 SXM5", read_catalogue())
    record = priced(study({"baseline": log_quality()}), price)
    assert record.price_per_hour == 4.0
    assert price.date in record.notes
    assert price.source in record.notes
