"""The page that is one file: wide, narrow and dark, nothing is cut off, asked for elsewhere or hard to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cosmati.cli.deletion_shown import read_deletion
from cosmati.explorer.deletion_view import DeletionView
from cosmati.explorer.report import write_report
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import read_certificate
from cosmati.records.deleted import DELETED_FILE, DeletedRecord, MeasureRecord, TaughtRecord
from tests.browser.pages import sideways
from tests.browser.test_every_page import NARROW, WIDE, findings
from tests.explorer.samples import demo_study
from tests.explorer.test_about import ABOUT, about_run, measured_run
from tests.explorer.test_price import priced
from tests.forget.samples import bare, forgotten, maker, rows_of_step, trained
from tests.train.isolated.samples import source

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
    folder = tmp_path_factory.mktemp("page")
    studies, deletion = [demo_study(3)], forgotten_rows(folder)
    return write_report(
        folder / "report.html", title="Report", studies=studies, run=run, price=priced(), deletion=deletion
    )


def forgotten_rows(folder: Path) -> DeletionView:
    """Have a run forget rows, and return what a page shows of it."""
    case = bare("MLP, low rank")
    make = maker(case, data := source(case))
    done = forgotten(trained(make, folder / "run"), ToForget(rows=rows_of_step(data, 3)), make, folder / "without")
    assert done.certificate is not None
    about = DeletedRecord(
        certificate=read_certificate(done.certificate)[1],
        what="colour 0.4.6",
        class_name="open/psf",
        num_rows=40,
        steps=(3, 4),
        taught=(TaughtRecord("all", 8, 2),),
        measures=(
            MeasureRecord("bits per byte, held out", 2.5, 2.6),
            MeasureRecord("membership", 0.6, 0.5, is_attack=True),
        ),
        seconds=2.0,
    )
    (folder / "without" / DELETED_FILE).write_text(about.to_json())
    found = read_deletion(folder / "without")
    assert found is not None
    return found


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
