"""The page that is one file: wide, narrow and dark, nothing is cut off, asked for elsewhere or hard to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cosmati.explorer.report import write_report
from tests.browser.pages import sideways
from tests.browser.test_every_page import NARROW, WIDE, findings
from tests.explorer.samples import demo_study
from tests.explorer.test_about import ABOUT, about_run, measured_run
from tests.explorer.test_price import priced

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]

_CUT = """() => [...document.querySelectorAll(".scroll")].filter((one) => one.querySelector("table"))
    .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.getAttribute("aria-label"))"""
_COLUMNS = """() => [...document.querySelectorAll("table.cards td")].filter((one) => one.getClientRects().length)
    .filter((one) => !getComputedStyle(one, "::before").content.includes(one.dataset.column)).length"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = replace(measured_run(), about=ABOUT, governance=about_run().governance)
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(path, title="Report", studies=[demo_study(3)], run=run, price=priced())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_cut_off_or_hard_to_read(browser: Browser, page_file: Path, theme: str) -> None:
    page = browser.new_page(viewport={"width": WIDE[0], "height": WIDE[1]})
    faults: list[str] = []
    page.on("request", lambda one: faults.append(one.url) if not one.url.startswith(("file:", "data:", "blob:")) else 0)
    page.on("console", lambda one: faults.append(one.text) if one.type in ("error", "warning") else 0)
    page.on("pageerror", lambda one: faults.append(str(one)))
    page.goto(f"{page_file.as_uri()}?theme={theme}")
    for width, height in (WIDE, NARROW):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.wait_for_function("document.querySelectorAll('.main-svg').length > 4")
        assert [one for one in findings(page) if one[0] in ("serious", "critical")] == []
        assert sideways(page) == 0
        assert page.evaluate(_CUT) == []
    assert page.evaluate(_COLUMNS) == 0, "each cell says its column where the head is hidden"
    marks = page.locator(".legend .mark").first.evaluate("(one) => getComputedStyle(one).backgroundColor")
    tick = page.locator('figure[data-figure="policy-1"] .yaxislayer-above tspan').first
    assert tick.evaluate("(one) => getComputedStyle(one).fill") == marks, "the figure's mark is the legend's"
    page.close()
    assert faults == []
