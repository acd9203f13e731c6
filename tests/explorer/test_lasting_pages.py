"""Pages over an index that goes, a store that goes, looks that fail, and files that are no files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cosmati.explorer.server import site
from cosmati.explorer.server.app import make_app
from cosmati.store.index import RunIndex
from cosmati.store.summary import key_of
from tests.explorer.test_server import Served
from tests.store.samples import run_record, write_run

pytestmark = pytest.mark.long

FRONT = ("/", "/runs", "/live", "/problems")
STEPS = [{"step": n, "rows": 8 * n, "seconds": n / 2, "loss": 1 / n} for n in range(1, 9)]


def soon(is_so: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(site, "_SOONEST", 0.3)
    write_run(tmp_path / "store" / "one", run_record("one"), STEPS)
    found = Served(tmp_path / "store")
    watcher = threading.Thread(target=found.site.watch, daemon=True)
    watcher.start()
    yield found
    found.site.stop()
    watcher.join(timeout=30)
    found.close()


def has_one(served: Served) -> bool:
    return f"/runs/{key_of('one')}" in served.get("/runs")[1]


def test_a_server_outlives_its_index_and_its_store(served: Served, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / ".cosmati").rename(tmp_path / "index")  # at once: the server may be writing there
    assert [served.get(page)[0] for page in FRONT] == [200] * 4
    assert soon(lambda: has_one(served))
    store.rename(tmp_path / "away")
    status, page, headers = served.get("/runs")
    assert (status, "script-src 'self'" in headers["content-security-policy"]) == (404, True)
    assert "can't be written" in unescape(page)
    (tmp_path / "away").rename(store)
    assert soon(lambda: has_one(served))
    store.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", store, ignore=shutil.ignore_patterns(".cosmati"))
    assert soon(lambda: has_one(served))
    assert [served.get(page)[0] for page in FRONT] == [200] * 4


def test_looks_that_fail_are_told_with_their_time_until_one_succeeds(served: Served, tmp_path: Path) -> None:
    assert soon(lambda: has_one(served))
    assert soon(lambda: "Last look" not in served.get("/runs")[1])
    lock = tmp_path / "store" / ".cosmati" / "index.lock"
    lock.unlink()
    lock.mkdir()  # as a full or broken disk refuses it
    assert soon(lambda: "Last look" in served.get("/runs")[1])
    (told,) = re.findall(r'<p class="alarm late"[^>]*>(.*?)</p>', served.get("/runs")[1])
    assert re.match(r"Last look at the store that went well: \d+ s ago\.", told)
    assert "index.lock" in told
    assert "stands here within" not in served.get("/runs")[1]
    lock.rmdir()
    assert soon(lambda: "Last look" not in served.get("/runs")[1])


def test_a_look_that_waits_for_another_process_is_told_too(served: Served, tmp_path: Path) -> None:
    with (tmp_path / "store" / ".cosmati" / "index.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert soon(lambda: "Last look" in served.get("/runs")[1])
        assert "under way" in served.get("/runs")[1]
    assert soon(lambda: "Last look" not in served.get("/runs")[1])


def client_of(store: Path) -> TestClient:
    index = RunIndex(store)
    index.refresh()
    return TestClient(make_app(index), base_url="http://localhost")


def test_sums_beyond_all_numbers_are_no_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "sound", run_record("sound"))
    write_run(tmp_path / "huge", run_record("huge", seconds_by_part={"forward": 1e308, "backward": 1e308}))
    client = client_of(tmp_path)
    assert [client.get(page).status_code for page in (*FRONT, "/tradeoffs.csv", "/runs.csv")] == [200] * 6
    assert f"/runs/{key_of('huge')}" in client.get("/runs").text


def pages_of(name: str) -> list[str]:
    key = key_of(name)
    curve = f"/runs/{key}/curve.csv?file=steps&measure=mean+loss"
    return [f"/runs/{key}", f"/runs/{key}/live", f"/runs/{key}/lines", f"/compare?a={key}&b={key_of('sound')}", curve]


FILES = ("steps.jsonl", "evaluations.jsonl", "lock", "checkpoints/step-00000001/state.json", "ledger/checkpoint")


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_keeps_no_page_waiting(tmp_path: Path, file: str) -> None:
    for name in ("sound", "odd"):
        write_run(tmp_path / name, run_record(name), STEPS)
    path = tmp_path / "odd" / file
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    client = client_of(tmp_path)
    assert [client.get(page).status_code for page in (*pages_of("odd"), *FRONT, "/governance")] == [200] * 10


@pytest.mark.parametrize("file", FILES)
def test_what_a_link_leads_to_is_not_shown(tmp_path: Path, file: str) -> None:
    store, secret = tmp_path / "store", tmp_path / "secret.jsonl"
    for name in ("sound", "odd"):
        write_run(store / name, run_record(name), STEPS)
    secret.write_text('{"step": 1, "loss": 424242.5, "identity": {"model": "424242"}}\n')
    path = store / "odd" / file
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(secret)
    client = client_of(store)
    for page in pages_of("odd"):
        answer = client.get(page)
        assert (answer.status_code, "424242" in answer.text) == (200, False), page
    if file == "steps.jsonl":
        page = unescape(client.get(pages_of("odd")[0]).text)
        assert "steps.jsonl is a link or no plain file, and isn't read." in page


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "line",
    [
        f'{{"step": 9, "rows": 72, "seconds": 4.5, "loss": {HUGE}}}',
        f'{{"step": {HUGE}, "rows": 80, "seconds": 5, "loss": 1}}',
        f'{{"step": 9, "rows": {HUGE}, "seconds": {HUGE}, "loss": 1, "learning_rate": {HUGE}}}',
        f'{{"step": 9, "rows": {HUGE}0, "seconds": 5, "loss": 1, "tokens": -{HUGE}}}',
        f'{{"step": 9, "loss": 1{HUGE * 12}}}',
    ],
)
@pytest.mark.parametrize("outcome", ["completed", "running"])
def test_numbers_of_hundreds_of_digits_take_no_page_down(tmp_path: Path, line: str, outcome: str) -> None:
    recipe = json.dumps({"budget": "60sec", "num_steps": 100} if "rows" in line else {"budget": "60sec"})
    for name in ("sound", "odd"):
        write_run(tmp_path / name, run_record(name, outcome=outcome, recipe_text=recipe, metrics={}), STEPS, STEPS)
    for name in ("steps", "evaluations"):
        with (tmp_path / "odd" / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
    client = client_of(tmp_path)
    assert [client.get(page).status_code for page in (*pages_of("odd"), *FRONT)] == [200] * 9
    assert "/problems" not in client.get("/runs").text
