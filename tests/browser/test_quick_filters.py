"""What stays and what follows when a filter changes the page: the cloud's drawing, the study's section, the ledger."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cosmati.store.summary import key_of
from tests.browser.conftest import NOTICE
from tests.browser.pages import drawn, figure, place_of
from tests.browser.test_tour import KNOWN, STUDY, chooser, expect, num_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.explorer.serving import ExploreServer

pytestmark = pytest.mark.browser

POINTS = """(canvas) => canvas._fullData.flatMap((trace) => trace.customdata ?? []).length"""
MARKS = """(canvas) => [...canvas.querySelectorAll(".scatterlayer .trace")]
    .filter((trace) => trace.__data__[0].trace.customdata)
    .flatMap((trace) => [...trace.querySelectorAll(".points path")]).length"""


def points_of(page: Page) -> int:
    """Return how many points the cloud draws: as Plotly counts them, and as they stand in the picture."""
    canvas = figure(page, "cloud").locator(".canvas")
    found = canvas.evaluate(POINTS)
    assert canvas.evaluate(MARKS) == found
    return int(found)


def cells(store: Path, **wanted: Any) -> set[tuple[str, float]]:
    """Return the arms and budgets of the known study's runs that have these, read by nobody of ours."""
    runs = json.loads((store / "known" / "study.json").read_text())["runs"]
    return {(run["arm"], run["budget"]) for run in runs if all(run[name] == value for name, value in wanted.items())}


def test_the_clouds_canvas_outlives_a_filter_and_draws_what_it_leaves(page: Page, store: Path) -> None:
    page.goto("/?task=*most*&min_budget=0")
    drawn(page)
    canvas = figure(page, "cloud").locator(".canvas")
    canvas.evaluate("(one) => { one.isOurs = true; }")
    before, label = points_of(page), canvas.get_attribute("aria-label")
    chooser(page, "Arm").select_option("twice")
    expect(page.locator(".chips")).to_contain_text("arm: twice")
    drawn(page)
    assert canvas.evaluate("(one) => one.isOurs"), "it's the same canvas"
    assert 0 < points_of(page) == len(cells(store, arm="twice")) < before
    said = canvas.get_attribute("aria-label")
    assert said != label
    assert f"{points_of(page)} points" in (said or "")
    page.go_back()
    expect(page.locator(".chips")).not_to_contain_text("arm: twice")
    page.wait_for_function("document.querySelector('figure[data-figure=cloud] .main-svg')")
    page.wait_for_function(f"({POINTS})(document.querySelector('figure[data-figure=cloud] .canvas')) === {before}")
    assert points_of(page) == before


def test_a_point_and_the_line_do_once_what_they_did_after_many_filters(page: Page, store: Path) -> None:
    page.goto("/?min_budget=0")
    drawn(page)
    for arm in ("twice", "baseline", "twice"):
        chooser(page, "Arm").select_option(arm)
        expect(page.locator(".chips")).to_contain_text(f"arm: {arm}")
    drawn(page)
    moves: list[str] = []
    page.on("request", lambda request: moves.append(request.url) if "/reached" in request.url else None)
    slider = page.get_by_role("slider", name="Quality line")
    slider.focus()
    before = slider.input_value()
    with page.expect_response(re.compile("/reached")):
        page.keyboard.press("ArrowLeft")
    assert slider.input_value() != before
    line = figure(page, "cloud").locator(".canvas").evaluate("(one) => one._fullLayout.shapes[0].y0")
    assert line == pytest.approx(float(slider.input_value()))
    page.wait_for_timeout(300)
    assert len(moves) == 1
    path = figure(page, "cloud").locator(".shapelayer path").first
    path.scroll_into_view_if_needed()
    shape = path.bounding_box()
    assert shape is not None
    x, y = shape["x"] + 0.7 * shape["width"], shape["y"] + shape["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + 25, steps=3)
    page.mouse.up()
    assert float(slider.input_value()) < line, "the line is still held by the mouse"
    address = (
        figure(page, "cloud")
        .locator(".canvas")
        .evaluate("(one) => one._fullData.flatMap((trace) => trace.customdata ?? [])[0]")
    )
    page.mouse.click(*place_of(page, "cloud", address))
    page.wait_for_url(f"**{address}")


def test_a_chosen_studys_section_follows_and_is_that_of_its_address(page: Page, fresh: Callable[..., Page]) -> None:
    page.goto("/")
    drawn(page)
    chooser(page, "Study").select_option(KNOWN)
    expect(num_runs(page)).to_contain_text("36 runs")
    expect(figure(page, "study-1-tradeoff-seconds").locator(".main-svg").first).to_be_visible()
    expect(page.locator(".follows")).to_have_count(0)
    follows = page.locator(".speed").inner_text()
    slider = page.get_by_role("slider", name="accuracy")
    start = slider.get_attribute("aria-valuetext")
    slider.focus()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") != start, "it's alive"
    other = fresh(STUDY)
    drawn(other)
    assert other.locator(".speed").inner_text() == follows
    headings = "[...document.querySelectorAll('main h1, main h2, main h3')].map((one) => one.innerText)"
    assert page.evaluate(headings) == other.evaluate(headings)


def test_a_section_that_cant_come_says_so_and_is_asked_for_no_more(browser: Browser, site: ExploreServer) -> None:
    asked: list[str] = []

    def refused(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=404, body="gone")

    # Not of the watched pages: htmx tells the console of an answer that it didn't get.
    with browser.new_context(base_url=site.address) as context:
        context.add_init_script(NOTICE)
        page = context.new_page()
        page.route("**/chosen-study*", refused)
        page.goto("/")
        drawn(page)
        chooser(page, "Study").select_option(KNOWN)
        expect(page.get_by_role("status").filter(has_text="This part can't be fetched")).to_be_visible()
        expect(num_runs(page)).to_contain_text("36 runs")
        assert len(asked) == 1


def test_a_curves_whole_csv_is_saved_from_its_button(page: Page, store: Path, tmp_path: Path) -> None:
    page.goto(f"/runs/{key_of('runs/failed')}")
    drawn(page)
    with page.expect_download() as coming:
        figure(page, "loss").get_by_text("CSV", exact=True).click()
    assert coming.value.suggested_filename.endswith(".csv")
    coming.value.save_as(tmp_path / "loss.csv")
    lines = (store / "runs" / "failed" / "steps.jsonl").read_text().splitlines()
    header, *rows = (tmp_path / "loss.csv").read_text().splitlines()
    assert header == "step,mean loss"
    assert [(int(step), float(value)) for step, value in (row.split(",") for row in rows)] == [
        (line["step"], line["loss"]) for line in map(json.loads, lines)
    ]


@pytest.mark.parametrize("address", ["/studies/known", "/?path=known"])
def test_a_studys_axis_and_line_are_in_the_address_and_there_after_a_reload(page: Page, address: str) -> None:
    page.goto(address)
    drawn(page)
    usual = page.url
    live = page.locator(".live")
    live.locator("input[value=step]").check()
    expect(live.locator("figure").first).to_have_attribute("data-figure", re.compile("-tradeoff-step$"))
    page.wait_for_url(re.compile(r"[?&]by=step"))
    slider = live.get_by_role("slider")
    start = slider.input_value()
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_url(re.compile(r"[?&]line=\d"))
    place, text = slider.input_value(), slider.get_attribute("aria-valuetext")
    assert int(place) == int(start) - 3
    rows = live.locator(".speed tbody").inner_text()
    page.reload()
    drawn(page)
    expect(slider).to_have_value(place)
    assert slider.get_attribute("aria-valuetext") == text
    assert live.locator("input[value=step]").is_checked()
    assert live.locator(".speed tbody").inner_text() == rows
    page.wait_for_function("document.querySelector('.live .canvas')._fullLayout.xaxis.title.text.startsWith('steps')")
    live.locator("input[value=seconds]").check()
    page.wait_for_url(usual)
    if "path" in address:
        page.goto(f"{address}&by=step&line=0.8")
        drawn(page)
        page.locator("#filter-axis").select_option("rows")
        page.wait_for_url(lambda url: "axis=rows" in url and "by=" not in url and "line=" not in url)
