"""The Explorer's pages over a real socket: what they hold, whom they answer, and what bad addresses get."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cosmati.errors import RunError
from cosmati.explorer.server.app import make_app
from cosmati.explorer.server.serve import serve
from cosmati.explorer.server.site import Site
from cosmati.store.index import RunIndex
from tests.explorer.samples import demo_study

EVIL = "<script>alert(1)</script>"


class Served:
    """An application on a free port of this machine."""

    def __init__(self, store: Path) -> None:
        self.index = RunIndex(store)
        self.index.refresh()
        app = make_app(self.index)
        self.site: Site = app.state.site
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    def get(self, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
        request = urllib.request.Request(self.address + path, headers={"Host": host} if host else {})
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode(), dict(answer.headers)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=30)
        self.index.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    study = demo_study(num_seeds=3)
    (store / "digits").mkdir()
    (store / "digits" / "study.json").write_text(study.to_json())
    evil = replace(study, name=EVIL, task=EVIL, arms=tuple(replace(arm, description=EVIL) for arm in study.arms))
    (store / "evil").mkdir()
    (store / "evil" / "study.json").write_text(evil.to_json())
    (store / "broken").mkdir()
    (store / "broken" / "study.json").write_text("{")
    found = Served(store)
    yield found
    found.close()


def data_of(page: str) -> dict[str, dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" class="data">(.*?)</script>', page, re.DOTALL)
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.long
def test_the_first_page_draws_one_tasks_points(served: Served) -> None:
    status, page, _ = served.get("/")
    assert status == 200
    assert set(data_of(page)["figures"]) == {"cloud"}
    # Six arms at six budgets; the study of the other task isn't among them.
    assert served.get("/tradeoffs.csv")[1].count("\n") == 1 + 36
    assert "<h1>Tradeoffs</h1>" in page
    assert "<strong>216</strong> runs, 72 points" in served.get("/?task=")[1]
    assert served.get("/tradeoffs.csv?task=")[1].count("\n") == 1 + 72
    one = served.get("/?study=Digits%2C+small+network&axis=steps")[1]
    assert set(data_of(one)["figures"]) == {"cloud", "study-1-tradeoff-step"}
    assert "study-1" in data_of(one)["studies"]


def test_runs_are_filtered_sorted_and_turned(served: Served) -> None:
    page = served.get("/runs")[1]
    assert "<strong>216</strong> runs. Page 1 of 3." in page
    assert page.count('href="/runs/') == 100
    few = served.get("/runs?arm=composed&budget=1.0&sort=-quality")[1]
    assert "<strong>6</strong> runs." in few
    assert 'aria-sort="descending"' in few
    shown = [float(text) for text in re.findall(r'<td class="num" title="[^"]*">(0\.9\d+)</td>', few)]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 6
    more = served.get("/runs?column=fact:lr&arm=aa")[1]
    assert "fact:lr" in more
    assert '<td class="num" title="0.1">0.1</td>' in more
    assert "Next page" not in served.get("/runs?page=2")[1]


def test_a_run_and_a_study_have_pages(served: Served) -> None:
    (run, *_) = served.index.runs(limit=1)
    status, page, _ = served.get(f"/runs/{run.key}")
    assert status == 200
    assert run.quality_name in page
    status, page, _ = served.get("/studies/digits")
    assert status == 200
    assert "Tradeoff curves" in page


@pytest.mark.long
def test_text_of_users_is_escaped_everywhere(served: Served) -> None:
    for path in ("/", "/?task=", "/runs", "/studies/evil", f"/runs?text={EVIL}", f"/runs?study={EVIL}", "/problems"):
        page = served.get(path.replace("<", "%3C").replace(">", "%3E"))[1]
        assert "<script>alert" not in page, path


def test_every_answer_carries_the_policy_and_names_no_other_place(served: Served) -> None:
    for path in ("/", "/runs", "/nowhere", "/static/site.css", "/assets/style.css", "/assets/script.js"):
        headers = served.get(path)[2]
        assert "script-src 'self';" in headers["content-security-policy"], path
        assert "unsafe-eval" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = served.get("/")[1]
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert not re.findall(r"<script>", page), "no script stands in a page"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""])
def test_a_request_that_names_another_host_is_refused(served: Served, host: str) -> None:
    assert served.get("/", host=host or "[")[0] in (400, 421)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere", "no such page"),
        ("/runs/0000", "has no run 0000"),
        ("/runs?page=x", "page is"),
        ("/runs?page=-1", "page is"),
        ("/runs?min_quality=nan", "min_quality is"),
        ("/runs?sort=nothing", "nothing"),
        ("/?axis=money", "no axis"),
        ("/?price=abacus", "abacus"),
        ("/studies/nowhere", "holds no study"),
        ("/studies/..%2f..%2f..%2fetc", "this store"),
    ],
)
def test_a_bad_address_is_told_what_is_wrong(served: Served, path: str, words: str) -> None:
    status, page, _ = served.get(path)
    assert status == 404
    assert words in page


def test_what_can_not_be_read_is_named(served: Served) -> None:
    assert "1 can&#39;t be read" in served.get("/")[1] or "1 can't be read" in served.get("/")[1]
    assert "broken" in served.get("/problems")[1]


def test_a_growing_store_is_followed(served: Served, tmp_path: Path) -> None:
    del served
    found = Served(tmp_path)
    try:
        assert "<strong>0</strong> runs" in found.get("/runs")[1]
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "study.json").write_text(demo_study(num_seeds=2).to_json())
        found.index.refresh()
        assert "<strong>72</strong> runs" in found.get("/runs")[1]
        shutil.rmtree(tmp_path / "new")
        found.index.refresh()
        assert "<strong>0</strong> runs" in found.get("/runs")[1]
        assert "This store has no runs yet" in found.get("/")[1]
    finally:
        found.close()


def test_a_port_in_use_and_a_store_that_is_none_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"Port \d+ can't be had.*--port N"):
            serve(tmp_path, port=taken.getsockname()[1])
    with pytest.raises(RunError, match="is no folder"):
        serve(tmp_path / "nothing")
