"""What a page doesn't make its reader wait for: a chosen study's section, a long ledger, the points of a long curve."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from cosmati.explorer.run_view import RunView, read_run
from cosmati.explorer.server import checks
from cosmati.explorer.server.site import Site
from cosmati.explorer.views import StudyView, live_data, study_figures, study_view
from cosmati.storage.lock import FileLock
from cosmati.store.summary import key_of
from tests.explorer.samples import demo_study
from tests.explorer.test_run_view import change_a_loss, trainer_in
from tests.explorer.test_server import EVIL, Served, data_of
from tests.store.samples import run_record, write_run, write_study

pytestmark = pytest.mark.long

CHOSEN = "/?study=Digits%2C+small+network"


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "job"
    trainer_in(folder).fit()
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"outcome": "running", "ended": None}))
    return folder


def aged(folder: Path) -> None:
    """Let files be a minute old: what changed a moment ago is read once more."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))


@pytest.fixture
def studied(tmp_path: Path) -> Iterator[Served]:
    write_study(tmp_path / "digits", demo_study(num_seeds=2))
    aged(tmp_path / "digits")
    served = Served(tmp_path)
    yield served
    served.close()


def by_htmx(served: Served, path: str) -> str:
    request = urllib.request.Request(served.address + path, headers={"HX-Request": "true"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Vary"].startswith("HX-Request")
        found: str = answer.read().decode()
    return found


def words_of(page: str) -> list[str]:
    """Return what a reader sees, word by word."""
    without = re.sub(r"<script.*?</script>", " ", page, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", " ", without)).split()


def test_a_filter_doesnt_wait_for_the_study_that_it_chooses(studied: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: object) -> StudyView:
        raise AssertionError("the filter's answer works the study out")

    with monkeypatch.context() as patch:
        patch.setattr(Site, "study", waited)
        page = by_htmx(studied, CHOSEN)
    assert "<strong>72</strong> runs" in page
    assert set(data_of(page)["figures"]) == {"cloud"}
    (later,) = re.findall(r'hx-get="(/chosen-study[^"]*)" hx-trigger="load"', page)
    part = studied.get(unescape(later))[1]
    whole = study_view(demo_study(num_seeds=2), "study-1")
    drawn = data_of(part)["figures"]
    assert set(drawn) == {"study-1-tradeoff-seconds"}
    plot = study_figures(whole)["study-1-tradeoff-seconds"].plot
    assert drawn["study-1-tradeoff-seconds"]["plot"] == json.loads(json.dumps(plot))
    assert data_of(part)["studies"] == {"study-1": json.loads(json.dumps({"seconds": live_data(whole)["seconds"]}))}


def test_without_htmx_the_page_is_whole_and_its_section_is_the_one_that_follows(studied: Served) -> None:
    page = studied.get(CHOSEN)[1]
    assert "/chosen-study" not in page
    (later,) = re.findall(r'hx-get="(/chosen-study[^"]*)"', by_htmx(studied, CHOSEN))
    words = words_of(studied.get(unescape(later))[1])
    assert len(words) > 300
    assert " ".join(words) in " ".join(words_of(page))


@pytest.mark.parametrize(
    ("asked", "words"), [("path=..%2Fx", "this store"), ("path=digits&axis=money", "no axis"), ("", "holds no study")]
)
def test_a_section_of_nothing_is_refused(studied: Served, asked: str, words: str) -> None:
    status, page, _ = studied.get(f"/chosen-study?{asked}")
    assert status == 404
    assert words in unescape(page)


def test_what_can_be_chosen_is_worked_out_before_somebody_asks(
    studied: Served, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After a change of the store the first filter of each kind finds what all runs can be chosen by."""
    scans, warmed = list[str](), list[str]()
    query, warm = studied.index.query, studied.site.warm

    def counted(sql: str, values: Any = ()) -> list[tuple[Any, ...]]:
        if "FROM runs WHERE 1 GROUP BY" in sql:
            scans.append(sql)
        return query(sql, values)

    def told() -> None:
        warm()
        warmed.append(studied.index.mark)

    monkeypatch.setattr(Site, "interval", 0.05)
    monkeypatch.setattr(studied.site, "warm", told)
    watcher = threading.Thread(target=studied.site.watch, daemon=True)
    watcher.start()
    aside = tmp_path_factory.mktemp("aside") / "one"  # so that it comes at once, and whole
    write_run(aside, run_record("one"), [{"step": 1, "loss": 1.0}])
    aged(aside)
    aside.rename(studied.index.root / "one")
    until = time.monotonic() + 60
    while studied.index.count() != 73 or warmed[-1:] != [studied.index.mark]:
        assert time.monotonic() < until
        time.sleep(0.02)
    monkeypatch.setattr(studied.index, "query", counted)
    assert "<strong>1</strong> run," in studied.get("/?task=&arm=digits")[1]
    assert scans == [], "the page scans the store for what was known"
    studied.index.forget_answers()
    studied.get("/?task=")
    assert len(scans) > 5, "which it does where nothing is known"
    studied.site.stop()
    watcher.join(timeout=30)


def polled(served: Served, key: str) -> str:
    until = time.monotonic() + 60
    while True:
        request = urllib.request.urlopen(f"{served.address}/runs/{key}/ledger", timeout=60)
        with request as answer:
            if answer.status == 200:
                found: str = answer.read().decode()
                return found
            assert answer.status == 204
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_running_jobs_page_doesnt_wait_for_its_ledger_and_finds_what_was_changed(
    governed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(governed, tmp_path / "job")
    may_end = threading.Event()

    def slowly(folder: Path, *, keys: object = None) -> RunView:
        assert keys is None
        assert may_end.wait(60)
        return read_run(folder)

    monkeypatch.setattr(checks, "read_run", slowly)
    key = key_of("job")
    with FileLock(tmp_path / "job" / "lock"):
        served = Served(tmp_path)
        try:
            page = served.get(f"/runs/{key}")[1]
            assert "is being verified, and nothing is said of it before" in page
            assert "Verified" not in page
            assert "policy-0" not in page
            may_end.set()
            part = polled(served, key)
            assert "<strong>Verified</strong>" in part
            assert "policy-0" in data_of(part)["figures"]
            may_end.clear()
            page = served.get(f"/runs/{key}")[1]
            assert "<strong>Verified</strong>" in page
            assert "being verified anew now" in page
            may_end.set()
            polled(served, key)
            # The entry that is changed is among those that were verified twice, and its file's time and size stay.
            details = tmp_path / "job" / "ledger" / "details.jsonl"
            state = details.stat()
            change_a_loss(tmp_path / "job")
            assert details.stat().st_size == state.st_size
            os.utime(details, ns=(state.st_atime_ns, state.st_mtime_ns))
            served.get(f"/runs/{key}")
            part = polled(served, key)
            assert "does not verify" in part
            assert "<strong>Verified</strong>" not in part
            assert data_of(part)["figures"].keys().isdisjoint({"policy-0", "shares"})
            assert "does not verify" in served.get(f"/runs/{key}")[1]
        finally:
            may_end.set()
            served.close()


def curves_of(page: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'href="(/runs/\w+/curve\.csv[^"]*)"', page)]


def test_a_long_runs_page_is_small_and_its_csv_has_all_points(tmp_path: Path) -> None:
    num = 20_000
    steps = [
        {"step": n, "rows": 8 * n, "seconds": n / 8, "loss": 1 / n, "learning_rate": 0.1, "gradient_norm": n % 7 + 0.5}
        for n in range(1, num + 1)
    ]
    steps[4]["loss"] = math.nan
    evaluations = [{"step": n, "accuracy": n / num} | ({"=odd": n} if n % 2 else {}) for n in range(1, num + 1)]
    write_run(tmp_path / "long", run_record("long", metrics={}), steps, evaluations)
    path = tmp_path / "long" / "steps.jsonl"
    path.write_text(path.read_text().replace(json.dumps(steps[9]), "{damaged"))
    served = Served(tmp_path)
    try:
        page = served.get(f"/runs/{key_of('long')}")[1]
        assert len(page) < 100_000
        tables = {}
        for address in curves_of(page):
            _, text, headers = served.get(address)
            assert headers["content-disposition"].endswith(".csv")
            (_, name), *rows = csv.reader(io.StringIO(text))
            tables[name] = [(int(step), float(value) if value else None) for step, value in rows]
    finally:
        served.close()
    kept = [one for one in steps if one["step"] != 10]
    assert tables.pop("mean loss") == [(one["step"], None if one["step"] == 5 else one["loss"]) for one in kept]
    assert tables.pop("learning rate") == [(one["step"], 0.1) for one in kept]
    assert tables.pop("norm of the gradients") == [(one["step"], one["gradient_norm"]) for one in kept]
    assert tables.pop("rows a second") == [(one["step"], 64.0) for one in kept[1:]]
    assert tables.pop("accuracy") == [(one["step"], one["accuracy"]) for one in evaluations]
    assert tables.pop("'=odd") == [(n, float(n)) for n in range(1, num, 2)], "disarmed, for spreadsheets"
    assert tables == {}


def test_a_curve_that_there_isnt_is_refused_and_evil_names_are_no_headers(studied: Served, tmp_path: Path) -> None:
    (study_run,) = studied.index.runs(limit=1)
    status, page, _ = studied.get(f"/runs/{study_run.key}/curve.csv?file=steps&measure=loss")
    assert status == 404
    assert "no files of its own" in page
    write_run(tmp_path / "one", run_record("one"), [{"step": 1, "loss": 1.0}])
    studied.index.refresh()
    status, page, _ = studied.get(f"/runs/{key_of('one')}/curve.csv?file=..%2Frun&measure=x")
    assert status == 404
    assert "has no file" in page
    name = quote(f"{EVIL}\r\nX-Evil: 1")
    status, text, headers = studied.get(f"/runs/{key_of('one')}/curve.csv?file=evaluations&measure={name}")
    assert status == 200
    assert "X-Evil" not in headers
    assert headers["content-type"].startswith("text/csv")
    assert len(list(csv.reader(io.StringIO(text)))) == 1
