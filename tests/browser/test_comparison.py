"""Two runs side by side, the whole table as a file, and the way from a method to what speaks for it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cosmati.store.summary import key_of
from tests.browser.pages import drawn, figure, saved
from tests.browser.test_tour import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def cells_of(store: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((store / name / "study.json").read_text())["runs"]
    return found


def test_two_runs_are_chosen_and_compared_down_to_their_numbers(page: Page, store: Path) -> None:
    runs = {(one["arm"], one["budget"], one["seed"]): one["final"] for one in cells_of(store, "known")}
    a, b = runs["twice", 1.0, 0], runs["baseline", 1.0, 0]
    page.goto("/runs?study=Known+speed-up&budget=1.0&seed=0&sort=-arm")
    button = page.get_by_role("button", name=re.compile("^Compare"))
    for arm in ("twice", "baseline"):
        row = page.get_by_role("row").filter(has=page.get_by_role("cell", name=arm, exact=True))
        row.get_by_role("checkbox").check()
    expect(button).to_be_enabled()
    button.click()
    keys = [key_of("known", arm, 1.0, 0) for arm in ("twice", "baseline")]
    page.wait_for_url(re.compile(rf"/compare\?a={keys[0]}&b={keys[1]}"))
    drawn(page)
    table = page.get_by_role("region", name="What came out").get_by_role("table")
    row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=re.compile("accuracy"))).first
    shown = [float(text.replace("−", "-")) for text in row.get_by_role("cell").all_inner_texts()[:3]]
    assert shown == pytest.approx([a["quality"], b["quality"], b["quality"] - a["quality"]], abs=6e-5)
    expect(page.get_by_text("Twice").first).to_be_visible()
    page.get_by_role("link", name=re.compile("Swap")).click()
    page.wait_for_url(re.compile(rf"/compare\?a={keys[1]}&b={keys[0]}"))


def test_runs_are_chosen_by_keys_over_pages(page: Page) -> None:
    page.goto("/runs?study=Known+speed-up&arm=twice&sort=seed")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    chosen = page.get_by_role("rowheader").get_by_role("checkbox", checked=True)
    expect(chosen).to_have_count(1)
    page.goto("/runs?study=Words")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    page.keyboard.press("c")
    page.wait_for_url(re.compile(r"/compare\?a=[0-9a-f]{16}&b=[0-9a-f]{16}"))
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_two_runs_are_compared_without_javascript(fresh: Callable[..., Page]) -> None:
    page = fresh("/runs?study=Known+speed-up&arm=twice", java_script_enabled=False)
    boxes = page.get_by_role("rowheader").get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name=re.compile("^Compare")).click()
    page.wait_for_url(re.compile(r"/compare\?a=[0-9a-f]{16}&b=[0-9a-f]{16}"))
    assert page.get_by_role("heading", level=1).is_visible()


def test_the_table_of_runs_is_saved_as_it_is_filtered_with_columns_of_ones_own(
    page: Page, store: Path, tmp_path: Path
) -> None:
    page.goto("/runs?study=Known+speed-up&arm=twice")
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="lr", exact=True).check()
    page.get_by_role("button", name="Show these").click()
    page.wait_for_url("**column=fact**")
    address = page.url
    with saved(page, page.get_by_role("link", name="CSV", exact=True), tmp_path).open(
        encoding="utf-8", newline=""
    ) as file:
        rows = list(csv.DictReader(file))
    wanted = {(one["budget"], one["seed"]): one["final"] for one in cells_of(store, "known") if one["arm"] == "twice"}
    assert {(float(row["budget"]), int(row["seed"])) for row in rows} == set(wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        final = wanted[float(row["budget"]), int(row["seed"])]
        assert float(row["quality"]) == final["quality"]
        assert float(row["seconds"]) == final["seconds"]
        assert float(row["fact:lr"]) == 0.1
    page.goto(address)
    expect(page.get_by_role("columnheader", name=re.compile("lr"))).to_be_visible()


def test_the_clouds_quality_line_says_who_reaches_it_first(page: Page) -> None:
    page.goto("/?text=Known+speed-up")  # a study that is chosen by name has its own line
    drawn(page)
    cloud = figure(page, "cloud")
    cloud.scroll_into_view_if_needed()
    slider = page.get_by_role("slider", name=re.compile("Quality line"))
    slider.focus()
    before = slider.input_value()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    assert float(slider.input_value()) < float(before)
    table = page.get_by_role("region", name="Who reaches the quality first").get_by_role("table")
    row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name="twice", exact=True))
    expect(row).to_contain_text(re.compile(r"2(\.0+)?×"))
    for _ in range(3):
        page.keyboard.press("PageDown")
    page.keyboard.press("Home")
    expect(row).to_contain_text(re.compile(r"≤ .*≥ "))  # its curve begins above, so there are bounds only


def test_a_method_gathers_its_studies_and_a_composition_its_parts(page: Page) -> None:
    page.goto("/methods")
    page.get_by_role("link", name="Shapes", exact=True).first.click()
    page.wait_for_url("**/methods/Shapes")
    drawn(page)
    page.get_by_role("link", name="Parts and pairs").first.click()
    page.wait_for_url(re.compile("/(studies|composition)/parts"))
    page.goto("/composition")
    page.get_by_role("link", name="Parts and pairs").first.click()
    page.wait_for_url("**/composition/parts**")
    drawn(page)
    text = page.get_by_role("main").inner_text()
    assert re.search(r"1\.5\d*×", text), "each part is half as fast again"
    assert "shapes" in text.lower()
    assert "labels" in text.lower()


def test_governance_shows_who_may_teach_what(page: Page) -> None:
    page.goto("/governance")
    page.get_by_role("main").get_by_role("link").filter(has_text=re.compile("x|governed")).first.click()
    page.wait_for_url(re.compile("/(governance|runs)/[0-9a-f]{16}"))
    drawn(page)
    for word in ("shut/b", "open/a", "low", "high"):
        expect(page.get_by_text(word).first).to_be_attached()
    assert "row id" in page.get_by_role("main").inner_text().lower() or "rows" in page.get_by_role("main").inner_text()
