"""A page that is left open says when looks at the store stop, and when they go on."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.explorer.serving import ExploreServer
from tests.store.samples import run_record, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.slow
def test_an_open_list_of_jobs_tells_that_looks_have_stopped_and_go_on(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "a", run_record("a"))
    with ExploreServer(tmp_path) as site:
        page = browser.new_page()
        page.goto(f"{site.address}/live")
        late, footer = page.locator("#late p"), page.locator("footer")
        assert late.count() == 0
        assert "stands here within" in footer.inner_text()
        with (tmp_path / ".cosmati" / "index.lock").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            late.wait_for()
            assert "Last look at the store that went well" in late.inner_text()
            assert "stands here within" not in footer.inner_text()
        late.wait_for(state="detached")
        page.wait_for_function("() => document.querySelector('footer').innerText.includes('stands here within')")
        page.close()
