"""The cloud: what is drawn of many points, in which colours, and what stands in a hover text."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

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


def drawn(points: list[TradeoffPoint], look: CloudLook) -> list[dict[str, Any]]:
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
    assert sum(len(one["x"]) for one in traces) == 60
    colours = [one["marker"]["color"] for one in traces]
    assert len(set(colours)) == len(colours) == {"study": 3, "arm": 6, "hardware": 1, "method": 2}[grouping]
    if grouping == "arm":
        assert traces[0]["name"] == "4 others"
        assert traces[1]["name"] == "arm 8", "who is on the frontier comes first"


def test_hover_says_all_and_is_escaped() -> None:
    one = point(1, arm=EVIL, study=EVIL, hardware=EVIL, methods=(EVIL,), is_baseline=True)
    (trace,) = drawn([one], CloudLook(quality=EVIL, recipes={"r": f"lr={EVIL}"}))
    (text,) = trace["text"]
    assert "<b onclick" not in text
    assert text.count("&lt;b onclick=x&gt;&amp;") == 6
    for words in ("± 0.010", "n = 3", "budget 0.25", ": the baseline", "11.0\u00a0s", "lr="):
        assert words in text
    assert trace["marker"]["symbol"] == ["square"]


def test_the_axis_has_its_unit() -> None:
    points = [point(n, position=3600.0 * (2 + n)) for n in range(5)]
    assert cloud_scale(points, "seconds") == ("training time (h)", 3600.0)
    layout = cloud_figure(points, PAGE, CloudLook(quality="accuracy")).plot["layout"]
    assert layout["xaxis"]["title"]["text"] == "training time (h)"
    assert layout["yaxis"]["title"]["text"] == "accuracy (higher is better)"
    assert min(layout["xaxis"]["tickvals"]) >= 1.0
    assert cloud_scale(points, "cost")[0] == "cost ($)"
    assert cloud_figure([], PAGE, CloudLook(quality="")).plot["data"]


def test_bars_are_one_standard_error_long() -> None:
    points = [point(n, error=None if n == 2 else 0.01 * n) for n in range(6)]
    (trace,) = drawn(points, CloudLook(quality="accuracy", grouping="hardware"))
    assert trace["error_y"]["array"] == [0.0, 0.01, 0.0, 0.03, 0.04, 0.05]
    assert trace["error_y"]["type"] == "data", "lengths, and no shares"
    assert trace["y"] == [one.quality for one in points]


def test_the_frontier_goes_on_until_a_better_point_and_the_line_is_level() -> None:
    points = [point(n, is_on_frontier=n in (1, 4)) for n in range(6)]
    plot = cloud_figure(points, PAGE, CloudLook(quality="accuracy", axis="steps", line=0.5)).plot
    (line,) = [one for one in plot["data"] if one["mode"] == "lines"]
    # First along, at the quality that one had, then up: no point between has the better one's quality.
    assert line["line"]["shape"] == "hv"
    assert (line["x"], line["y"]) == ([11.0, 14.0], [points[1].quality, points[4].quality])
    (shape,) = plot["layout"]["shapes"]
    assert (shape["y0"], shape["y1"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("look", "names"),
    [
        (CloudLook(quality="q"), ["Pareto frontier: CPU", "Pareto frontier: unknown hardware"]),
        (
            CloudLook(quality="q", axis="cost", is_priced=True),
            ["Pareto frontier: CPU", "Pareto frontier: unknown hardware"],
        ),
        (CloudLook(quality="q", axis="cost"), ["Pareto frontier"]),
        (CloudLook(quality="q", axis="steps"), ["Pareto frontier"]),
    ],
)
def test_time_has_a_line_for_each_hardware(look: CloudLook, names: list[str]) -> None:
    points = [point(n, hardware="" if n == 3 else "CPU", is_on_frontier=n in (0, 3, 4)) for n in range(6)]
    lines = [one for one in cloud_figure(points, PAGE, look).plot["data"] if one["mode"] == "lines"]
    assert [one["name"] for one in lines] == names
    assert [one["y"] for one in lines] == (
        [[points[0].quality, points[4].quality], [points[3].quality]]
        if len(names) > 1
        else [[points[n].quality for n in (0, 3, 4)]]
    )
    assert len({one["line"]["dash"] for one in lines}) == len(lines)


def test_lost_runs_are_told() -> None:
    one = point(1, losses=((0.25, 2, 5), (0.5, 1, 5)))
    (trace,) = drawn([one], CloudLook(quality="accuracy"))
    assert "2 of 5 runs diverged or failed" in trace["text"][0]
    (row,) = csv.DictReader(io.StringIO(cloud_csv([one], CloudLook(quality="accuracy"))))
    assert row["diverged_or_failed"] == "2"


def test_names_that_end_differently_are_told_apart() -> None:
    names = {f"s{n}": f"A study with a rather long name (folder/{n})" for n in range(3)}
    points = [point(n, study="A study with a rather long name") for n in range(3)]
    traces = drawn(points, CloudLook(quality="accuracy", grouping="study", names=names))
    assert len({one["name"] for one in traces}) == 3
    assert all(len(one["name"]) <= 32 for one in traces)
