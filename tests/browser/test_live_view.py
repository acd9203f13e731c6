"""A job under the page's eyes: it runs, its server is killed and comes back, it is killed itself, and goes on."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cosmati.store.summary import key_of
from tests.browser.test_tour import expect
from tests.explorer.serving import ExploreServer, child_environment
from tests.processes import PythonProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

LONG = 60_000
"""Milliseconds: a page asks every two to three seconds, and a machine may be busy."""
JOB = """
import json, sys, time
from pathlib import Path
from cosmati.storage.lock import FileLock
from tests.store.samples import run_record, write_run
folder, begin = Path(sys.argv[1]), int(sys.argv[2])
lines = [{"step": n, "rows": 8 * n, "seconds": 0.1 * n, "loss": 2 / n, "learning_rate": 0.1} for n in range(1, 1001)]
record = run_record("job", outcome="running", ended=None, metrics={}, num_steps=0)
write_run(folder, record, lines[:begin])
with FileLock(folder / "lock"), (folder / "steps.jsonl").open("a") as file:
    for line in lines[begin:]:
        file.write(json.dumps(line) + "\\n")
        file.flush()
        print(line["step"], flush=True)
        time.sleep(0.1)
"""


def job(folder: Path, begin: int) -> PythonProcess:
    """Start a job that writes ten lines a second, and wait for its first."""
    found = PythonProcess(["-c", JOB, folder, str(begin)], env=child_environment())
    found.stdout.readline()
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[int], PythonProcess]]:
    jobs: list[PythonProcess] = []

    def started(begin: int) -> PythonProcess:
        jobs.append(job(tmp_path / "job", begin))
        return jobs[-1]

    yield started
    for one in jobs:
        one.kill()
        one.communicate()


def last_step(page: Page) -> int:
    """Return the step that the loss's curve has come to, as its label says."""
    label = page.get_by_role("img", name=re.compile("^loss over the steps")).get_attribute("aria-label") or ""
    found = re.search(r"at step (\d+)", label)
    assert found is not None
    return int(found[1])


@pytest.mark.slow  # `explorer/test_live_pages.py` kills a job too, and asks as the page does
def test_a_job_is_followed_through_its_death_and_its_servers(
    browser: Browser, tmp_path: Path, running: Callable[[int], PythonProcess]
) -> None:
    first = running(20)
    server = ExploreServer(tmp_path)
    context = browser.new_context(base_url=server.address)
    page, wrong, outside = context.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda one: outside.append(one.url) if not one.url.startswith(server.address) else None)
    try:
        page.goto("/live")
        page.get_by_role("main").get_by_role("link", name=re.compile("job")).first.click()
        page.goto(f"/runs/{key_of('job')}/live")
        title = page.get_by_role("heading", level=2).first
        expect(title).to_have_text("Running")
        curve = page.get_by_role("img", name=re.compile("^loss over the steps"))
        expect(curve).to_be_visible(timeout=LONG)
        before = last_step(page)
        expect(curve).not_to_have_attribute("aria-label", re.compile(rf"at step {before}$"), timeout=LONG)
        assert last_step(page) > before >= 20
        port = int(server.address.rpartition(":")[2])
        server.kill()
        expect(page.get_by_text(re.compile("No answer"))).to_be_visible(timeout=LONG)
        before = last_step(page)
        server.close()
        server = ExploreServer(tmp_path, port)
        expect(page.get_by_text(re.compile("No answer"))).to_be_hidden(timeout=LONG)
        assert last_step(page) > before, "what came meanwhile is there"
        first.send_signal(signal.SIGKILL)
        first.wait()
        expect(title).to_have_text("Broken off", timeout=LONG)
        expect(page.get_by_role("main")).to_contain_text("it was killed")
        page.reload()
        expect(title).to_have_text("Broken off")
        ended = last_step_when_drawn(page)
        second = running(10)
        page.reload()  # a page that waits for a job to go on looks but every 15 s
        expect(title).to_have_text("Running", timeout=LONG)
        expect(curve).to_be_visible(timeout=LONG)
        assert last_step(page) < ended + 100, "its overwritten steps are replaced"
        second.kill()
        assert wrong == []
        assert outside == []
    finally:
        context.close()
        server.close()


def last_step_when_drawn(page: Page) -> int:
    expect(page.get_by_role("img", name=re.compile("^loss over the steps"))).to_be_visible(timeout=LONG)
    return last_step(page)
