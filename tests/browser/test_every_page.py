"""Each page, light and dark, wide and narrow: no error, no request elsewhere, nothing that axe-core finds serious."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from cosmati.store.summary import key_of
from tests.browser.pages import drawn, sideways
from tests.explorer.serving import EVIL

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

EVIL_RUN = key_of("runs/" + EVIL.replace("/", "_"))
PAGES = {
    "tradeoffs": "/",
    "one study": "/?study=Known+speed-up",
    "costs": "/?task=&axis=cost",
    "evil names": "/?" + urllib.parse.urlencode({"task": EVIL}),
    "nothing chosen": "/?text=nothing-is-called-that",
    "runs": "/runs",
    "runs with columns": "/runs?column=metric:accuracy&column=fact:optimizer.lr&sort=metric:accuracy",
    "study": "/studies/known",
    "evil study": "/studies/evil",
    "study that goes on": "/studies/begun",
    "run of a study": "/runs/" + key_of("known", "twice", 1.0, 0),
    "governed run": "/runs/" + key_of("runs/governed"),
    "failed run": "/runs/" + key_of("runs/failed"),
    "broken off run": "/runs/" + key_of("runs/broken-off"),
    "evil run": "/runs/" + EVIL_RUN,
    "live": "/live",
    "live view of a run": f"/runs/{key_of('runs/broken-off')}/live",
    "comparison": f"/compare?a={key_of('known', 'twice', 1.0, 0)}&b={key_of('known', 'baseline', 1.0, 0)}",
    "comparison of a run with evil": f"/compare?a={EVIL_RUN}&b={key_of('runs/governed')}",
    "choice to compare": "/compare",
    "compositions": "/composition",
    "composition": "/composition/parts",
    "methods": "/methods",
    "method": "/methods/Shapes",
    "evil method": "/methods/" + urllib.parse.quote(EVIL, safe=""),
    "governed runs": "/governance",
    "governance": "/governance/" + key_of("runs/governed"),
    "problems": "/problems",
    "no such page": "/nowhere",
    "no such run": "/runs/0000000000000000",
}
# Much like another page, so that a default run leaves them out.
SLOW = {
    "runs",
    "live view of a run",
    "methods",
    "governed runs",
    "problems",
    "no such page",
    "one study",
    "costs",
    "nothing chosen",
    "runs with columns",
    "evil study",
    "study that goes on",
    "failed run",
    "broken off run",
    "comparison of a run with evil",
    "choice to compare",
    "compositions",
    "evil method",
    "no such run",
}
WIDE, NARROW = (1440, 900), (390, 844)


def findings(page: Page) -> list[tuple[str, str, str]]:
    """Return what axe-core finds: how bad, which rule, where first."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core isn't installed").Axe()
    found: dict[str, Any] = axe.run(page).response
    return [(one["impact"], one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]]


def opened(fresh: Callable[..., Page], name: str, size: tuple[int, int]) -> Page:
    page = fresh("", *size)
    answer = page.goto(PAGES[name])
    assert answer is not None
    assert answer.status == (404 if name.startswith("no such") else 200)
    return page


def look(page: Page) -> list[tuple[str, str, str]]:
    drawn(page)
    assert page.title()
    assert page.locator("h1:visible").count() == 1, "one heading says what the page is"
    assert sideways(page) == 0
    return findings(page)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PAGES]
)
def test_a_page_is_sound_wide_and_light_narrow_and_dark(fresh: Callable[..., Page], name: str) -> None:
    page = opened(fresh, name, WIDE)
    found = look(page)
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    page.emulate_media(color_scheme="dark")
    found += look(page)
    assert [one for one in found if one[0] in ("serious", "critical")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_sound_wide_and_dark_narrow_and_light(fresh: Callable[..., Page], name: str) -> None:
    page = opened(fresh, name, NARROW)
    found = look(page)
    page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    page.emulate_media(color_scheme="dark")
    found += look(page)
    assert [one for one in found if one[0] in ("serious", "critical")] == []
