"""What the tests of the pages share: when a page is drawn, where a figure's point lies, what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

_DRAWN = """() => "drawn" in document.documentElement.dataset &&
    [...document.querySelectorAll("figure[data-figure] .canvas")].every((canvas) => {
    const { top, bottom } = canvas.getBoundingClientRect();
    return bottom < 0 || top > innerHeight || canvas.querySelector(".main-svg") || !canvas.getClientRects().length;
})"""
_PLACE = """([canvas, wanted]) => {
    const { xaxis, yaxis } = canvas._fullLayout;
    for (const trace of canvas._fullData) {
        for (let i = 0; i < (trace.customdata ?? []).length; i++) {
            if (trace.customdata[i] === wanted) {
                const box = canvas.querySelector(".main-svg").getBoundingClientRect();
                return [box.x + xaxis._offset + xaxis.d2p(trace.x[i]), box.y + yaxis._offset + yaxis.d2p(trace.y[i])];
            }
        }
    }
    return null;
}"""


def drawn(page: Page) -> None:
    """Wait until the page has said that it's drawn, and each figure in sight is."""
    page.wait_for_function(_DRAWN)


def figure(page: Page, name: str) -> Locator:
    """Return a figure by its name; its drawing has the class that Plotly gives it."""
    return page.locator(f'figure[data-figure="{name}"]')


def place_of(page: Page, name: str, address: str) -> tuple[float, float]:
    """Return where on the screen the point lies that leads to an address."""
    canvas = figure(page, name).locator(".canvas")
    canvas.scroll_into_view_if_needed()
    found = page.evaluate(_PLACE, [canvas.element_handle(), address])
    assert found is not None, f"no point of {name} leads to {address}"
    return float(found[0]), float(found[1])


def saved(page: Page, button: Locator, folder: Path) -> Path:
    """Click a button, and return the file that it saves."""
    with page.expect_download() as coming:
        button.click()
    path = folder / coming.value.suggested_filename
    coming.value.save_as(path)
    return path


def sideways(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    found: Any = page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
    return int(found)
