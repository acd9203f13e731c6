"""Names and texts that want to be more, addresses that ask for too much: what the pages make of them."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cosmati.records.study import StudyRecord
from cosmati.store.summary import key_of
from tests.explorer.serving import EVIL
from tests.explorer.test_server import Served
from tests.store.samples import run_record, small_study, write_run, write_study

PLAIN = "plain"
NAMES = {
    "script": EVIL,
    "end of the data": '</script><script src="//evil.example/x.js"></script>',
    "comment": "<!-- <script>",
    "quotes": '"\' onmouseover=alert(1) x="',
    "entities": "&lt;script&gt;&#60;b&#62;",
    "template": "{{ 7*7 }}{% raw %}{# x #}",
    "plotly": "%{x}<a href='javascript:alert(1)'>x</a><extra>y</extra>",
    "formula": '=cmd|"/c calc"!A1',
    "address": "javascript:alert(1)",
    "path": "../../../../etc/passwd",
    "long": "W" * 10_000,
    "control": "a\x00b\x01c\x1bd\x7fe",
    "lines": "one\r\ntwo\u2028three",
    "right to left": "\u202egnp.exe\u2066x\u2069\u200f",
    "not normal": "e\u0301\u00e9\ufeff\ufffe",
}


def named(record: StudyRecord, name: str) -> StudyRecord:
    """Return a study that has a name wherever text stands in it."""
    arms = {"baseline": "baseline", "fast": f"{name}-fast"}
    return replace(
        record,
        name=name,
        task=name,
        hardware=name,
        notes=name,
        command=name,
        arms=tuple(
            replace(
                one,
                name=arms[one.name],
                description=name,
                recipe_text=json.dumps({name: name}),
                methods=(name.partition("(")[0],),
            )
            for one in record.arms
        ),
        runs=tuple(replace(one, arm=arms[one.arm], run_id=name) for one in record.runs),
        checklist=tuple(replace(one, name=name, note=name) for one in record.checklist),
    )


def fill(store: Path, name: str) -> None:
    write_study(store / "study", named(small_study(), name))
    steps = [{"step": n, "rows": 32 * n, "loss": 2.0 / n} for n in range(1, 9)]
    record = run_record(name, recipe_name=name, recipe_text=name, hardware=name, metrics={name: 0.5})
    record = replace(record, plan=tuple(replace(one, method=name, does=name) for one in record.plan))
    write_run(store / "run", record, steps, [{"step": 4, name: 0.25}, {"step": 8, name: 0.5}])


class Markup(HTMLParser):
    """Counts elements with the names of their attributes, and keeps what could run."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[tuple[str, ...]] = Counter()
        self.dangers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag, *sorted(name for name, _ in attrs)] += 1
        for name, value in attrs:
            is_script = tag == "script" and name == "src" and not re.match(r"/(static|assets)/", value or "")
            is_address = name in ("href", "src", "action", "formaction", "hx-get")
            runs = is_address and re.match(r"\s*(javascript|data:text)", value or "", re.IGNORECASE)
            if name.startswith("on") or is_script or runs:
                self.dangers.append(f"<{tag} {name}={value!r:.80}>")
        if tag == "script" and "src" not in dict(attrs) and dict(attrs).get("type") != "application/json":
            self.dangers.append("a script in the page")


def pages_of(name: str) -> dict[str, str]:
    query = urllib.parse.urlencode
    text = name.encode("utf-8", "replace").decode()
    return {
        "tradeoffs": "/?" + query({"task": text}),
        "runs": "/runs?column=metric:accuracy&column=fact:recipe",
        "runs, searched": "/runs?" + query({"text": text}),
        "runs, filtered": "/runs?" + query({"arm": f"{text}-fast", "column": f"metric:{text}"}),
        "study": "/studies/study",
        "run": "/runs/" + key_of("run"),
        "run of a study": "/runs/" + key_of("study", "baseline", 1.0, 0),
        "problems": "/problems",
    }


def markup_of(served: Served, pages: dict[str, str]) -> dict[str, Markup]:
    found = {}
    for name, address in pages.items():
        status, page, _ = served.get(address)
        assert status == 200, (name, page[-2000:])
        found[name] = Markup(page)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Markup]]:
    store = tmp_path_factory.mktemp("plain")
    fill(store, PLAIN)
    served = Served(store)
    yield markup_of(served, pages_of(PLAIN))
    served.close()


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_changes_no_markup_and_runs_nothing(kind: str, plain: dict[str, Markup], tmp_path: Path) -> None:
    name = NAMES[kind]
    fill(tmp_path, name)
    served = Served(tmp_path)
    try:
        assert served.index.problems() == []
        for page, found in markup_of(served, pages_of(name)).items():
            assert found.dangers == [], page
            assert found.elements == plain[page].elements, page
    finally:
        served.close()


def test_the_check_of_markup_sees_what_runs() -> None:
    dangers = Markup("<img src=x onerror=y><script>z</script><a href='javascript:x'>a</a><script src='//e'></script>")
    assert len(dangers.dangers) == 4


def test_embedded_data_end_no_script_and_say_the_names(tmp_path: Path) -> None:
    name = NAMES["end of the data"]
    write_study(tmp_path / "study", named(small_study(), name))
    served = Served(tmp_path)
    try:
        page = served.get("/studies/study")[1]
        (data,) = re.findall(r'<script type="application/json" class="data">(.*?)</script>', page, re.DOTALL)
        assert not re.search("[<>&]", data)
        assert f"{name}-fast" in set(strings(json.loads(data)))
    finally:
        served.close()


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


@pytest.mark.parametrize("start", "=+-@\t\r")
def test_a_spreadsheet_takes_no_name_for_a_formula(start: str, tmp_path: Path) -> None:
    name = f"{start}cmd()"
    write_study(tmp_path / "study", replace(named(small_study(), name), quality_name=name))
    served = Served(tmp_path)
    try:
        tables = []
        for address in ("/", "/runs", "/studies/study"):
            page = served.get(address)[1]
            (data,) = re.findall(r'class="data">(.*?)</script>', page, re.DOTALL)
            tables += [one["csv"] for one in json.loads(data)["figures"].values() if one.get("csv")]
            links = [link for link in re.findall(r"<a [^>]*>", page) if 'data-save="csv"' in link or ".csv" in link]
            tables += [served.get(html.unescape(re.findall(r'href="([^"]*)"', link)[0]))[1] for link in links]
        assert tables
        cells = [cell for table in tables for row in csv.reader(io.StringIO(table, newline="")) for cell in row]
        assert any(name in cell for cell in cells)
        numbers = re.compile(r"-?\d[\d.e+-]*$")
        assert [one for one in cells if one[:1] in "=+-@\t\r" and one and not numbers.match(one)] == []
    finally:
        served.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    top = tmp_path_factory.mktemp("top")
    write_study(top / "outside", small_study("Outside"))
    (top / "outside" / "secret.txt").write_text("secret")
    write_study(top / "store" / "study", small_study("Inside"))
    write_run(top / "store" / "run", run_record())
    (top / "store" / "link").symlink_to(top / "outside")
    (top / "store" / "linked-file").mkdir()
    (top / "store" / "linked-file" / "study.json").symlink_to(top / "outside" / "study.json")
    (top / "store" / "loop").symlink_to(top / "store")
    found = Served(top / "store")
    yield found
    found.close()


@pytest.mark.parametrize(
    "path",
    [
        "/studies/link",
        "/studies/linked-file",
        "/studies/../outside",
        "/studies/%2e%2e/outside",
        "/studies/..%2foutside",
        "/studies//etc",
        "/studies/%2fetc",
        "/studies/study/../../outside",
        "/studies/loop/link",
        "/studies/study%00",
        "/studies/%ff",
        "/studies/" + "x" * 5000,
        "/studies/" + "x/" * 2000,
        "/static/../../../pyproject.toml",
        "/static/%2e%2e/server/app.py",
        "/static/..%2fserver%2fapp.py",
        "/static/%00",
        "/runs/..%2f..%2fetc",
        "/runs/%00",
        "/runs/" + "0" * 5000,
    ],
)
def test_no_address_leads_out_of_the_store(served: Served, path: str) -> None:
    status, page, headers = served.get(path)
    assert status in (400, 404, 414), path
    assert "Outside" not in page
    assert "secret" not in page
    assert "Traceback" not in page
    if status == 404:
        assert "script-src 'self'" in headers["content-security-policy"]


def test_a_link_is_not_followed_into_the_list(served: Served) -> None:
    assert {run.study for run in served.index.runs()} == {"Inside", ""}
    assert "Outside" not in served.get("/runs")[1]


QUERIES = {
    "many": "&".join(f"arm=a{n}" for n in range(3000)),
    "many numbers": "&".join(f"seed={n}" for n in range(3000)),
    "many columns": "&".join(f"column=metric:m{n}" for n in range(2000)),
    "long": "text=" + "x" * 30_000,
    "many words": "text=" + "+".join(f"w{n}" for n in range(5000)),
    "nul": "text=%00&arm=%00&sort=%00&column=fact:%00",
    "bytes": "text=%ff%fe&arm=%ff",
    "half a character": "text=%ed%a0%80&arm=%ed%a0%80&column=metric:%ed%a0%80",
    "numbers": "min_quality=1e400",
    "infinite page": "page=1e9",
    "a page that is no whole number": "page=1.5",
    "a digit of others": "page=%C2%B2",
    "a seed": "seed=99999999999999999999999999",
    "a seed of many digits": "seed=" + "9" * 5000,
    "sql": "arm=%27%3B+DROP+TABLE+runs%3B--&sort=quality%3B+DROP+TABLE+runs&column=fact:%27+OR+1",
    "columns that there aren't": "column=&column=:&column=metric:&column=words&column=__class__&column=facts",
    "no value": "arm&study&=&&&;;",
    "markup": "sort=%3Cscript%3Ealert(1)%3C/script%3E&axis=%3Cscript%3E&price=%3Cscript%3E",
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("page", ["/", "/runs", "/studies/study"])
def test_whatever_is_asked_gets_a_page_or_what_is_wrong(served: Served, name: str, page: str) -> None:
    status, text, headers = served.get(f"{page}?{QUERIES[name]}")
    assert status in (200, 400, 404, 414, 431), (status, text[:500])
    assert "Traceback" not in text
    if name in ("many", "many numbers") and page != "/studies/study":
        assert status == 404
        assert "3000 values are chosen, and 200 at most are" in text
    if "content-security-policy" in headers:
        assert Markup(text).dangers == []
        assert "<script>alert" not in text
    assert served.index.count() == 9


def test_what_only_shows_takes_nothing(served: Served) -> None:
    import urllib.request

    for path in ("/", "/runs", "/studies/study", "/static/site.css", "/problems"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
            request = urllib.request.Request(served.address + path, method=method, data=b"arm=x")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=120)
            with refused.value as answer:
                assert answer.status == 405, (path, method)
                assert "script-src 'self'" in answer.headers["content-security-policy"]
                assert "access-control-allow-origin" not in answer.headers


def test_a_head_is_answered_without_a_body(served: Served) -> None:
    import http.client

    for path in ("/", "/runs", "/static/site.css", "/assets/plotly.js", "/nowhere"):
        connection = http.client.HTTPConnection(served.address.removeprefix("http://"), timeout=120)
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert answer.status == (404 if path == "/nowhere" else 200), path
        assert answer.read() == b""
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        connection.close()


def test_a_folder_of_a_name_that_is_no_text_is_a_problem(tmp_path: Path) -> None:
    for name in ("<b>x</b>", "café", "%2e%2e", "?x=1#y", " "):
        write_study(tmp_path / name, small_study(f"in {name!r}"))
    odd = tmp_path / os.fsdecode(b"\xff\xfe")
    odd.mkdir()
    (odd / "study.json").write_text("{")
    served = Served(tmp_path)
    try:
        page = served.get("/problems")[1]
        assert "UTF-8" in page
        first = served.get("/?task=")[1]
        addresses = set(re.findall(r'href="(/studies/[^"]+)"', first))
        assert len(addresses) == 5
        for address in addresses:
            assert served.get(address)[0] == 200, address
    finally:
        served.close()


def test_a_study_in_a_folder_with_a_line_break_has_a_page(tmp_path: Path) -> None:
    write_study(tmp_path / "a\nb", small_study())
    served = Served(tmp_path)
    try:
        assert served.get("/studies/a%0Ab")[0] == 200
    finally:
        served.close()


def test_half_a_character_in_a_record_is_a_problem_with_a_name(tmp_path: Path) -> None:
    write_study(tmp_path / "sound", small_study())
    for name, record in (("study", small_study("x\ud800y")), ("run", run_record("x\ud800y"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(record.to_json(), errors="backslashreplace")
    served = Served(tmp_path)
    try:
        assert {one.path for one in served.index.problems()} == {"study", "run"}
        assert "surrogate" in served.get("/problems")[1]
        assert served.get("/")[0] == served.get("/runs")[0] == 200
    finally:
        served.close()


def test_a_store_that_is_a_study_has_its_page(tmp_path: Path) -> None:
    write_study(tmp_path, small_study())
    served = Served(tmp_path)
    try:
        assert "Tradeoff curves" in served.get("/studies/.")[1]
        assert "Tradeoff curves" in served.get("/studies/")[1]  # as a browser asks for it
    finally:
        served.close()
