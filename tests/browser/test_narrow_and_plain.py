"""Narrow windows, and browsers without JavaScript: what is hidden says so, and what can't work isn't offered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cosmati.store.summary import key_of
from tests.explorer.serving import ExploreServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MASKS = """() => [...document.querySelectorAll(".scroll")].map(
    (e) => [e.scrollWidth > e.clientWidth + 8, getComputedStyle(e).maskImage !== "none"])"""
KEY = key_of("runs/governed")


@pytest.mark.parametrize("path", ["/runs", pytest.param(f"/governance/{KEY}", marks=pytest.mark.slow)])
def test_what_goes_on_sideways_fades_until_its_end(browser: Browser, site: ExploreServer, path: str) -> None:
    for width, is_hidden in ((390, True), (2200, False)):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(site.address + path)
        if path != "/runs":
            page.locator(".main-svg").first.wait_for()
        found = page.evaluate(MASKS)
        assert [True, True] in found or not is_hidden
        assert [False, True] not in found
        if is_hidden:
            place = found.index([True, True])
            page.evaluate("(i) => { const e = document.querySelectorAll('.scroll')[i]; e.scrollLeft = 1e6; }", place)
            page.wait_for_function(f"() => !({MASKS})()[{place}][1]")
        page.close()


def test_without_scripts_no_dead_button_is_shown_and_numbers_are_had(browser: Browser, site: ExploreServer) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    for path in ("/", "/runs", f"/runs/{KEY}", f"/runs/{KEY}/live"):
        page.goto(site.address + path)
        assert page.locator("button:visible").evaluate_all("all => all.filter((one) => !one.form).length") == 0, path
    page.goto(site.address + f"/runs/{KEY}/live")
    link = page.locator('noscript a[download="loss.csv"]')
    assert link.is_visible()
    address = link.get_attribute("href")
    assert address is not None
    assert site.get(address)[1].startswith("step,mean loss\r\n1,")
    context.close()
