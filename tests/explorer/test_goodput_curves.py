"""The picture of what failures leave shows what the simulation gives, and the one in the docs is up to date."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from cosmati.explorer.goodput_curves import GoodputPoint, goodput_svg
from cosmati.planning.failures import FailureModel, simulate

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MODEL = FailureModel()
NODES = (8, 16, 32, 64, 128, 256, 512, 1024)
SPARES = {"no spare": 0, "1 spare": 1, "4 spares": 4, "16 spares": 16}
TITLE = "What failures leave of a run's time"
SUBTITLE = "Nodes of 8 ranks, mean time between failures 6,300 h, back after 24 h. Dotted: spares without end (Daly)"


@cache
def shown() -> tuple[dict[str, list[GoodputPoint]], list[tuple[int, float]]]:
    series: dict[str, list[GoodputPoint]] = {}
    limit = []
    for name, spares in SPARES.items():
        found = [simulate(dataclasses.replace(MODEL, spares=spares), 8 * n, 8, 8 * n) for n in NODES]
        series[name] = [(n, one.mean, one.low, one.high) for n, one in zip(NODES, found, strict=True)]
        limit = [(n, one.closed_form) for n, one in zip(NODES, found, strict=True)]
    return series, limit


def drawn(theme: Literal["light", "dark"]) -> str:
    series, limit = shown()
    return goodput_svg(TITLE, SUBTITLE, series, limit, theme)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_docs_show_this_simulation(theme: Literal["light", "dark"]) -> None:
    assert (IMAGES / f"goodput-{theme}.svg").read_text() == drawn(theme)


def test_each_point_has_the_height_of_its_share() -> None:
    svg = ET.fromstring(
        goodput_svg("t", "s", {"a": [(8, 0.55, 0.5, 0.6), (32, 1.0, 1.0, 1.0)]}, [(8, 0.75), (32, 0.5)])
    )
    lines = [part.attrib for part in svg.iter() if part.tag.endswith("polyline")]
    curve, dashed = lines[-2], lines[-1]
    (x0, y0), (x1, y1) = (tuple(map(float, pair.split(","))) for pair in curve["points"].split())
    grid = [float(line["points"].split()[0].split(",")[1]) for line in lines[:-2]]
    assert len(grid) == 6, "from 50 % to 100 %"
    assert [round(one - other) for one, other in pairwise(grid)] == [round((max(grid) - min(grid)) / 5)] * 5
    assert (x1, y1) == (56 + 600, min(grid))
    assert y0 == pytest.approx(max(grid) - 0.1 * (max(grid) - min(grid)), abs=0.2)
    assert x0 == 56
    assert dashed["stroke-dasharray"] == "2 5"
    assert float(dashed["points"].split()[0].split(",")[1]) == pytest.approx(sum(grid[2:4]) / 2, abs=30)


def test_labels_do_not_lie_on_one_another() -> None:
    svg = ET.fromstring(drawn("light"))
    feet = [
        float(p.attrib["y"])
        for p in svg.iter()
        if p.tag.endswith("text") and (p.text or "").endswith(("spare", "spares"))
    ]
    assert len(feet) == len(SPARES)
    assert min(b - a for a, b in pairwise(sorted(feet))) >= 15
    starts = [p for p in svg.iter() if p.tag.endswith("text") and p.attrib.get("text-anchor", "start") == "start"]
    right = max(float(p.attrib["x"]) + float(p.attrib["font-size"]) * 0.56 * len(p.text or "") for p in starts)
    assert right < float(svg.attrib["width"])


if __name__ == "__main__":
    for name in ("light", "dark"):
        (IMAGES / f"goodput-{name}.svg").write_text(drawn(name))  # type: ignore[arg-type]
