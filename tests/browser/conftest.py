"""One Chromium and one server for all tests here; every page that they open is watched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.explorer.serving import ExploreServer, fill
from tests.explorer.test_run_view import trainer_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

NOTICE = "document.addEventListener('cosmati:drawn', () => { document.documentElement.dataset.drawn = ''; })"


# Not of the session: Playwright's loop counts as running, and others' tests of this process start their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("browsed")
    fill(found)
    trainer_in(found / "runs" / "governed").fit()
    return found


@pytest.fixture(scope="session")
def site(store: Path) -> Iterator[ExploreServer]:
    with ExploreServer(store) as found:
        assert found.address, "".join(found.said)
        yield found


class Watched:
    """What a browser's pages did that they shouldn't."""

    def __init__(self, address: str) -> None:
        self.address, self.faults = address, list[str]()

    def watch(self, page: Page) -> None:
        def outside(request: Any) -> None:
            if not request.url.startswith((self.address, "data:", "blob:")):
                self.faults.append(f"a request to {request.url[:200]}")

        def told(message: Any) -> None:
            # That an address has no page is what its test asks for, and Chromium says so.
            if message.type in ("error", "warning") and "status of 404" not in message.text:
                self.faults.append(f"console {message.type} on {page.url}: {message.text[:300]}")

        def dialog(found: Any) -> None:
            self.faults.append(f"a dialog: {found.message[:200]}")
            found.dismiss()

        page.on("request", outside)
        page.on("console", told)
        page.on("dialog", dialog)
        page.on("pageerror", lambda error: self.faults.append(f"an error on {page.url}: {error}"))


@pytest.fixture
def fresh(browser: Browser, site: ExploreServer) -> Iterator[Callable[..., Page]]:
    """Return what opens a page in a browser profile of its own; after the test no page may have done wrong."""
    watched = Watched(site.address)
    contexts: list[BrowserContext] = []

    def opened(address: str = "", width: int = 1440, height: int = 900, **options: Any) -> Page:
        size = {"width": width, "height": height}
        options = {"color_scheme": "light", "reduced_motion": "reduce", **options}
        contexts.append(browser.new_context(base_url=site.address, viewport=size, **options))
        contexts[-1].set_default_timeout(60_000)
        contexts[-1].add_init_script(NOTICE)
        found = contexts[-1].new_page()
        watched.watch(found)
        if address:
            found.goto(address)
        return found

    yield opened
    for context in contexts:
        context.close()
    assert watched.faults == []


@pytest.fixture
def page(fresh: Callable[..., Page]) -> Page:
    """A wide page in a profile of its own."""
    return fresh()
