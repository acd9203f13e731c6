"""The cloud: what is drawn of many points, in which colours, and what stands in a hover text."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from cosmati.explorer.cloud import GROUPINGS, MAX_DRAWN, CloudLook, cloud_csv, cloud_figure, cloud_scale
from cosmati.explorer.palette import PAGE
from cosmati.store.tradeoffs import TradeoffPoint

EVIL = "<b onclick=x>&"


def point(number: int, **changes: object) -> TradeoffPoint:
    one = TradeoffPoint(
        path=f"s{number % 3}",
        study=f"Study {number % 3}",
        arm=f"arm {number % 9}",
        is_baseline=False,
        budget=0.25,
        hardware="machine",
        n=3,
        position=10.0 + number,
        quality=0.5 + number / 1e5,
        error=0.01,
        key=f"{number:016x}",
        methods=("A", "B") if number % 2 else (),
        recipe="r",
        higher_is_better=True,
        is_on_frontier=False,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def drawn(points: list[TradeoffPoint], look: CloudLook) -> list[dict[str, object]]:
    return [one for one in cloud_figure(points, PAGE, look).plot["data"] if one.get("customdata")]


def test_many_points_are_thinned_and_marked_ones_never() -> None:
    points = [point(n, is_on_frontier=n % 1000 == 0, is_baseline=n % 999 == 0) for n in range(20_000)]
    figure = cloud_figure(points, PAGE, CloudLook(quality="accuracy", line=0.6))
    addresses = {a for one in figure.plot["data"] for a in one.get("customdata", ())}
    marked = {f"/runs/{one.key}" for one in points if one.is_on_frontier or one.is_baseline}
    assert marked <= addresses
    assert len(marked) < len(addresses) <= MAX_DRAWN + len(marked)
    assert f"20,000 points of 60,000 runs, {len(addresses):,} of them drawn" in figure.label
    assert figure.csv == "", "numbers have an address of their own"
    assert figure.plot["layout"]["shapes"][0]["y0"] == 0.6
    table = list(csv.DictReader(io.StringIO(cloud_csv(points, CloudLook(quality="accuracy")))))
    assert len(table) == 20_000
    assert float(table[7]["seconds"]) == 17.0


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_each_group_has_a_colour_and_none_is_lost(grouping: str) -> None:
    points = [point(n, is_on_frontier=n == 8) for n in range(60)]
    look = CloudLook(quality="accuracy", grouping=grouping)  # type: ignore[arg-type]
    traces = drawn(points, look)
    assert sum(len(one["x"]) for one in traces) == 60  # type: ignore[arg-type]
    colours = [one["marker"]["color"] for one in traces]  # type: ignore[index]
    assert len(set(colours)) == len(colours) == {"study": 3, "arm": 6, "hardware": 1, "method": 2}[grouping]
    if grouping == "arm":
        assert traces[0]["name"] == "4 others"
        assert traces[1]["name"] == "arm 8", "who is on the frontier comes first"


def test_hover_says_all_and_is_escaped() -> None:
    one = point(1, arm=EVIL, study=EVIL, hardware=EVIL, methods=(EVIL,), is_baseline=True)
    (trace,) = drawn([one], CloudLook(quality=EVIL, recipes={"r": f"lr={EVIL}"}))
    (text,) = trace["text"]  # type: ignore[misc]
    assert "<b onclick" not in text
    assert text.count("&lt;b onclick=x&gt;&amp;") == 6
    for words in ("± 0.010", "n = 3", "budget 0.25", ": the baseline", "11.0\u00a0s", "lr="):
        assert words in text
    assert trace["marker"]["symbol"] == ["square"]  # type: ignore[index]


def test_the_axis_has_its_unit() -> None:
    points = [point(n, position=3600.0 * (2 + n)) for n in range(5)]
    assert cloud_scale(points, "seconds") == ("training time (h)", 3600.0)
    layout = cloud_figure(points, PAGE, CloudLook(quality="accuracy")).plot["layout"]
    assert layout["xaxis"]["title"]["text"] == "training time (h)"
    assert layout["yaxis"]["title"]["text"] == "accuracy (higher is better)"
    assert min(layout["xaxis"]["tickvals"]) >= 1.0
    assert cloud_scale(points, "cost")[0] == "cost ($)"
    assert cloud_figure([], PAGE, CloudLook(quality="")).plot["data"]
