"""The bundle on paper, and figures as files: in a real browser."""

from __future__ import annotations

import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.errors import RunError
from cosmati.explorer import static_figures
from cosmati.explorer.report import write_report
from cosmati.explorer.static_figures import SCALE, WIDTH, write_figures
from cosmati.explorer.views import study_figures, study_view
from tests.explorer.samples import demo_run, demo_study
from tests.explorer.test_report import HOSTILE

PAPER = (595, 842)  # A4 in points


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paper") / "r.html"
    return write_report(path, title="R", studies=[demo_study(3)], run=demo_run())


@pytest.fixture
def page(browser: Any, bundle: Path) -> Iterator[Any]:
    one = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
    one.goto(bundle.as_uri())
    one.wait_for_function("document.querySelectorAll('.main-svg').length > 0")
    one.wait_for_timeout(500)
    yield one
    one.close()


STATE = """() => ({
  theme: document.documentElement.dataset.theme || null,
  open: [...document.querySelectorAll("details")].filter((part) => part.open).length,
  widths: [...document.querySelectorAll("figure .canvas")].map((canvas) => canvas.getBoundingClientRect().width),
  papers: [...new Set([...document.querySelectorAll(".canvas .main-svg")].map((svg) => svg.style.background))],
})"""


@pytest.mark.browser
def test_paper_is_light_unfolded_and_as_wide_as_the_sheet(page: Any) -> None:
    page.evaluate(f"window.printed = null; addEventListener('beforeprint', () => {{ window.printed = ({STATE})(); }})")
    before = page.evaluate(STATE)
    pdf = page.pdf(prefer_css_page_size=True)
    printed = page.evaluate("window.printed")
    assert printed["theme"] == "light"
    assert "rgb(255, 255, 255)" in printed["papers"]
    assert printed["open"] > before["open"]
    boxes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", pdf)
    assert boxes
    assert all((round(float(w)), round(float(h))) == PAPER for w, h in boxes)
    after = page.evaluate(STATE)
    assert after["theme"] is None
    assert after["open"] == before["open"]
    assert after["widths"] == pytest.approx(before["widths"], abs=2), "the screen's figures are as they were"


@pytest.mark.browser
def test_paper_has_no_buttons_and_nothing_beyond_its_edge(page: Any) -> None:
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 900})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown = page.evaluate(
        "[...document.querySelectorAll('button, input, nav')].filter((one) => one.offsetParent)"
        ".map((one) => one.className)"
    )
    assert shown == []
    beyond = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((one) => !one.closest('svg') && one.offsetParent"
        " && one.getBoundingClientRect().right > 702).map((one) => one.className)"
    )
    assert beyond == []


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.browser
@pytest.mark.slow
def test_figures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(demo_study(3).to_json())
    found = CliRunner().invoke(app, ["study", "report", str(tmp_path), "--png"])
    assert found.exit_code == 0, found.output
    expected = {name.removeprefix("x-") for name in study_figures(study_view(demo_study(3), "x"))}
    written = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert written == {path.stem for path in (tmp_path / "figures").glob("*.svg")} == expected
    png, svg = ((tmp_path / "figures" / f"tradeoff-seconds.{kind}").read_bytes() for kind in ("png", "svg"))
    width, height = size_of(png)
    assert (width, height) == (WIDTH * SCALE, 480 * SCALE)
    pixels = zlib.decompress(b"".join(chunks(png, b"IDAT")))
    assert len(set(pixels)) > 50, "something is drawn"
    assert svg.startswith(b"<svg")
    assert b"training time" in svg


def chunks(png: bytes, kind: bytes) -> Iterator[bytes]:
    place = 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == kind:
            yield png[place + 8 : place + 8 + length]
        place += 12 + length


@pytest.mark.long
def test_without_a_browser_or_without_runs_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    with pytest.raises(RunError, match="Run the study first"):
        write_figures(replace(demo_study(2), runs=()), tmp_path)
    monkeypatch.setattr(static_figures, "BROWSERS", ("no-browser-of-this-name",))
    with pytest.raises(RunError, match=r"none was found on the path\. Install one"):
        write_figures(replace(demo_study(2), name=HOSTILE), tmp_path)
    monkeypatch.setattr(static_figures, "BROWSERS", ("true",))
    with pytest.raises(RunError, match="drew no figure"):
        write_figures(demo_study(2), tmp_path)
