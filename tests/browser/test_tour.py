"""What a reader does with the pages: filter, sort, hover, click through, drag, export, keyboard, deep links."""

from __future__ import annotations

import csv
import json
import math
import re
import struct
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any

import pytest

from cosmati.store.summary import key_of
from tests.browser.pages import drawn, figure, place_of, saved

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

KNOWN = "Known speed-up"
STUDY = "/?study=Known+speed-up"


@pytest.fixture(scope="module")
def runs(store: Path) -> list[dict[str, Any]]:
    """The runs of the known study, read from its file by nobody of ours."""
    found: list[dict[str, Any]] = json.loads((store / "known" / "study.json").read_text())["runs"]
    return found


def expect(what: Any) -> Any:
    from playwright.sync_api import expect

    return expect(what)


def column(page: Page, name: str) -> list[str]:
    """Return the texts of a column of the table of runs."""
    table = page.get_by_role("region", name="Runs").get_by_role("table")
    heads = [text.strip() for text in table.get_by_role("columnheader").all_inner_texts()]
    place = next(n for n, text in enumerate(heads, 1) if re.match(rf"{name}\b", text, re.IGNORECASE))
    return [text.strip() for text in table.locator(f"tbody tr > :nth-child({place})").all_inner_texts()]


def chooser(page: Page, name: str) -> Locator:
    return page.get_by_role("combobox", name=re.compile(rf"^{name}\b")).first


def num_runs(page: Page) -> Any:
    return page.get_by_role("status").filter(has_text="run").first


def test_a_filter_keeps_what_it_says_and_has_an_address(
    page: Page, fresh: Callable[..., Page], runs: list[Any]
) -> None:
    page.goto("/runs?study=Known+speed-up")
    expect(num_runs(page)).to_contain_text(f"{len(runs)} runs")
    chooser(page, "Arm").select_option("twice")
    wanted = [one for one in runs if one["arm"] == "twice"]
    expect(num_runs(page)).to_contain_text(f"{len(wanted)} runs")
    assert set(column(page, "arm")) == {"twice"}
    expect(page).to_have_url(re.compile("arm=twice"))
    # The address alone gives the same, in a browser that has never been here.
    other = fresh(page.url)
    expect(num_runs(other)).to_contain_text(f"{len(wanted)} runs")
    assert chooser(other, "Arm").input_value() == "twice"
    assert column(other, "seed") == column(page, "seed")


def test_a_search_follows_the_keys(page: Page, runs: list[Any]) -> None:
    page.goto("/runs")
    box = page.get_by_role("searchbox", name="Search")
    box.click()
    page.keyboard.type("known TWICE", delay=5)
    expect(num_runs(page)).to_contain_text(f"{sum(one['arm'] == 'twice' for one in runs)} runs")
    expect(box).to_be_focused()
    assert box.input_value() == "known TWICE"


def test_a_click_on_a_heading_sorts_and_the_back_button_goes_back(page: Page, runs: list[Any]) -> None:
    page.goto("/runs?study=Known+speed-up&arm=twice")
    head = page.get_by_role("columnheader", name=re.compile("^quality", re.IGNORECASE))
    head.get_by_role("link").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    wanted = sorted((one["final"]["quality"] for one in runs if one["arm"] == "twice"), reverse=True)
    shown = [float(text.replace(",", "")) for text in column(page, "quality")]
    assert shown == pytest.approx(wanted, abs=6e-5)
    head.get_by_role("link").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert [float(text.replace(",", "")) for text in column(page, "quality")] == pytest.approx(wanted[::-1], abs=6e-5)
    page.go_back()
    expect(head).to_have_attribute("aria-sort", "descending")
    assert shown == [float(text.replace(",", "")) for text in column(page, "quality")]


def test_a_filter_is_undone_by_the_back_button(page: Page, runs: list[Any]) -> None:
    page.goto(STUDY)
    expect(num_runs(page)).to_contain_text(f"{len(runs)} runs")
    chooser(page, "Arm").select_option("twice")
    expect(num_runs(page)).to_contain_text(f"{sum(one['arm'] == 'twice' for one in runs)} runs")
    page.go_back()
    expect(num_runs(page)).to_contain_text(f"{len(runs)} runs")
    expect(chooser(page, "Arm")).to_have_value("")
    drawn(page)
    page.go_forward()
    expect(chooser(page, "Arm")).to_have_value("twice")
    drawn(page)


def point_address(runs: list[Any], arm: str, budget: float) -> str:
    seeds = [one["seed"] for one in runs if (one["arm"], one["budget"]) == (arm, budget)]
    return f"/runs/{min(key_of('known', arm, budget, seed) for seed in seeds)}"


def test_a_point_tells_what_it_is_and_leads_to_its_run(page: Page, runs: list[Any]) -> None:
    page.goto(STUDY)
    drawn(page)
    address = point_address(runs, "twice", 0.5)
    x, y = place_of(page, "cloud", address)
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y)
    hover = figure(page, "cloud").locator(".hoverlayer .hovertext").first
    expect(hover).to_contain_text("twice")
    mean = fmean(one["final"]["quality"] for one in runs if (one["arm"], one["budget"]) == ("twice", 0.5))
    words = hover.text_content() or ""
    assert f"{mean:.4g}"[:6] in words
    assert "0.5" in words
    assert re.search(r"n\s*=\s*3", words)
    page.mouse.click(x, y)
    page.wait_for_url(f"**{address}")
    expect(page.get_by_role("heading", level=1)).to_contain_text("twice")


def needed(runs: list[Any], arm: str, quality: float) -> float | None:
    """Return the seconds that an arm needs for a quality: its points' means, and straight lines over log time."""
    points = []
    for budget in sorted({one["budget"] for one in runs}):
        finals = [one["final"] for one in runs if (one["arm"], one["budget"]) == (arm, budget)]
        points.append((math.log(geometric_mean(f["seconds"] for f in finals)), fmean(f["quality"] for f in finals)))
    for (x, low), (next_x, high) in pairwise(points):
        if low <= quality <= high:
            return math.exp(x + (next_x - x) * (quality - low) / (high - low))
    return None


def speed_row(page: Page, arm: str) -> list[str]:
    table = page.get_by_role("region", name="Speed-up at equal quality").get_by_role("table")
    row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=arm, exact=True))
    return [text.strip() for text in row.get_by_role("cell").all_inner_texts()]


def level_of(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text.partition(",")[0]))


def assert_speed_ups(page: Page, runs: list[Any], quality: float) -> None:
    """The table says at a quality what brute force says, and what the study was made to be."""
    need, speed_up, _ = speed_row(page, "twice")
    of_baseline, of_arm = needed(runs, "baseline", quality), needed(runs, "twice", quality)
    if of_baseline is None or of_arm is None:
        assert not re.match(r"2[.0]*×$", speed_up), "no curve reaches it, so nothing can be said"
        return
    assert of_baseline / of_arm == pytest.approx(2, rel=0.02)
    assert float(speed_up.strip("≤≥× ")) == pytest.approx(of_baseline / of_arm, rel=0.02)
    number = re.search(r"[\d.]+", need)
    assert number is not None
    shown = float(number[0]) * {"s": 1, "min": 60, "h": 3600}[need[number.end() :].split(",")[0].strip()]
    assert shown == pytest.approx(of_arm, rel=0.02)


def test_the_quality_line_is_dragged_by_the_mouse_and_each_speed_up_follows(page: Page, runs: list[Any]) -> None:
    page.goto("/studies/known")
    drawn(page)
    slider = page.get_by_role("slider", name="accuracy")
    before = slider.get_attribute("aria-valuetext")
    canvas = figure(page, "study-1-tradeoff-seconds").locator(".canvas")
    canvas.scroll_into_view_if_needed()
    drawn(page)
    line = canvas.locator(".shapelayer path").first.bounding_box()
    assert line is not None
    x, y = line["x"] + line["width"] / 3, line["y"] + line["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + 30, steps=4)
    expect(slider).not_to_have_attribute("aria-valuetext", before or "")  # it follows before it's let go
    page.mouse.move(x, y + 60, steps=4)
    page.mouse.up()
    after = slider.get_attribute("aria-valuetext") or ""
    page.mouse.move(x, y + 120, steps=2)
    assert slider.get_attribute("aria-valuetext") == after, "what was let go stays"
    quality = level_of(after)
    assert quality < level_of(before or ""), "down is worse"
    assert_speed_ups(page, runs, quality)


def test_the_quality_line_is_moved_by_keys(page: Page, runs: list[Any]) -> None:
    page.goto("/studies/known")
    drawn(page)
    slider = page.get_by_role("slider", name="accuracy")
    slider.focus()
    said = set()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "PageDown", "End", "Home"):
        page.keyboard.press(key)
        text = slider.get_attribute("aria-valuetext") or ""
        said.add(text)
        assert_speed_ups(page, runs, level_of(text))
    assert len(said) >= 5
    page.get_by_role("radio", name="steps").check()
    expect(figure(page, "study-1-tradeoff-step")).to_be_visible()
    drawn(page)


def test_figures_are_saved_as_images_and_as_the_numbers_in_them(page: Page, runs: list[Any], tmp_path: Path) -> None:
    page.goto(STUDY)
    drawn(page)
    cloud = figure(page, "cloud")
    with saved(page, cloud.get_by_text("CSV", exact=True), tmp_path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["arm"], float(row["budget"])): row for row in rows}
    cells = {(one["arm"], one["budget"]) for one in runs}
    assert set(found) == cells
    assert len(rows) == len(cells)
    for (arm, budget), row in found.items():
        finals = [one["final"] for one in runs if (one["arm"], one["budget"]) == (arm, budget)]
        qualities = [final["quality"] for final in finals]
        spread = sum((one - fmean(qualities)) ** 2 for one in qualities) / (len(qualities) - 1)
        assert float(row["seconds"]) == pytest.approx(geometric_mean(final["seconds"] for final in finals))
        assert float(row["accuracy"]) == pytest.approx(fmean(qualities))
        assert float(row.get("standard_error") or row["error"]) == pytest.approx(
            math.sqrt(spread / len(qualities)), rel=1e-5
        )
        assert int(row["n"]) == len(finals)
    image = saved(page, cloud.get_by_role("button", name="PNG", exact=True), tmp_path).read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", image[16:24])
    assert width > 800
    assert height > 400
    assert len(image) > 5_000, "an empty picture is smaller"
    drawing = ET.parse(saved(page, cloud.get_by_role("button", name="SVG", exact=True), tmp_path)).getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}path"))) >= len(cells)


def theme(page: Page) -> tuple[float, str]:
    """Return how bright the page is, and the ink of a figure's axis."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return fmean(map(float, re.findall(r"[\d.]+", colour)[:3])), colour


def test_the_theme_is_kept_over_pages(page: Page) -> None:
    page.goto("/")
    drawn(page)
    assert theme(page)[0] > 200
    ticks = page.locator('figure[data-figure="cloud"] .xtick text').first
    light = ticks.evaluate("(one) => getComputedStyle(one).fill")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert theme(page)[0] < 60
    expect(ticks).not_to_have_css("fill", light)
    for address in ("/runs", "/studies/known", "/problems"):
        page.goto(address)
        assert theme(page)[0] < 60, address
    page.get_by_role("button", name="Switch between light and dark").click()
    page.goto("/")
    assert theme(page)[0] > 200


def focused(page: Page) -> str:
    found: str = page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
    return found.strip()


def tab_to(page: Page, name: str, limit: int = 60) -> None:
    """Press Tab until something of a name has the focus, and see that it shows."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if focused(page) == name:
            shows = "(one) => one.getClientRects().length > 0 && getComputedStyle(one).outlineStyle !== 'none'"
            assert page.evaluate(f"({shows})(document.activeElement)"), f"the focus on {name} can't be seen"
            return
    pytest.fail(f"{limit} times Tab don't lead to {name!r}")


def test_a_tour_by_keyboard_alone(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the page"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null"), "past the header"
    page.goto("/")
    tab_to(page, "Runs")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs")
    page.get_by_role("searchbox", name="Search").focus()
    page.keyboard.type("known")
    expect(num_runs(page)).to_contain_text("36 runs")
    tab_to(page, "seed")
    page.keyboard.press("Enter")
    page.wait_for_url("**sort=-seed**")
    first = page.get_by_role("rowheader").first.inner_text().strip()
    tab_to(page, first)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/runs/[0-9a-f]{16}"))
    page.go_back()
    page.wait_for_url("**sort=-seed**")
    page.evaluate("document.querySelector('#theme').focus()")
    page.keyboard.press("Enter")
    assert theme(page)[0] < 60


def test_pages_work_without_javascript(fresh: Callable[..., Page], runs: list[Any]) -> None:
    page = fresh("/runs", java_script_enabled=False)
    chooser(page, "Arm").select_option("twice")
    page.get_by_role("button", name=re.compile("Show|Apply")).first.click()
    page.wait_for_url("**arm=twice**")
    assert page.get_by_text(f"{sum(one['arm'] == 'twice' for one in runs)} runs").first.is_visible()
    page.get_by_role("rowheader").first.get_by_role("link").click()
    page.wait_for_url(re.compile(r"/runs/[0-9a-f]{16}"))
    assert page.get_by_role("heading", level=1).is_visible()
