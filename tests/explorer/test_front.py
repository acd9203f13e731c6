"""The front pages over a real socket: filters and their chips, parts that are fetched, columns, CSV, names."""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cosmati.explorer.server import run_table
from cosmati.explorer.server.asked import Asked
from cosmati.explorer.views import live_data, study_figures, study_view
from cosmati.store.filters import RunFilter
from tests.explorer.samples import demo_study
from tests.explorer.test_server import EVIL, Served, data_of
from tests.store.samples import indexed, run_record, small_study, write_run, write_study


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("front")
    study = demo_study(num_seeds=2)
    write_study(root / "mine" / "digits", study)
    write_study(root / "yours & theirs" / "digits", replace(study, hardware="GPU"))
    for n in range(4):
        model = ("small", "large", EVIL, "large")[n]
        recipe = json.dumps({"model": model, "lr": 0.1 * n, "shared": True})
        metrics = {"accuracy": 0.5 + n / 10, "top/5": 0.9}
        write_run(root / f"r{n}", run_record(f"run {n}", seed=2000 + n, recipe_text=recipe, metrics=metrics))
    found = Served(root)
    yield found
    found.close()


def cloud_of(page: str) -> Any:
    """Return the plot of the cloud that a page draws."""
    return json.loads(json.dumps(data_of(page)["figures"]["cloud"]))["plot"]


def chips_of(page: str) -> dict[str, str]:
    found = re.findall(r'<a href="([^"]*)" aria-label="Take away ([^"]*)"', page)
    return {html.unescape(text): html.unescape(address) for address, text in found}


def num_runs(page: str) -> int:
    (found,) = re.findall(r"<strong>([\d,]+)</strong> runs?", page)
    return int(found.replace(",", ""))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_parts_of_a_study_are_what_its_bundle_holds(served: Served) -> None:
    whole = study_view(demo_study(num_seeds=2), "study-1")
    page = served.get("/studies/mine/digits")[1]
    assert set(data_of(page)["figures"]) == {"study-1-tradeoff-seconds"}
    addresses = [html.unescape(one) for one in re.findall(r'data-address="(/figures/[^"]*)"', page)]
    figures = study_figures(whole)
    assert len(addresses) == 3
    for address in addresses:
        ((name, found),) = json.loads(served.get(address)[1])["figures"].items()
        assert found["plot"] == json.loads(json.dumps(figures[name].plot))
        assert served.get(address + "&form=csv")[1] == figures[name].csv
    assert data_of(page)["studies"] == {"study-1": json.loads(json.dumps({"seconds": live_data(whole)["seconds"]}))}
    for axis, _ in whole.axes:
        found = json.loads(served.get(f"/levels/mine/digits?axis={axis}")[1])
        assert found["studies"]["study-1"] == json.loads(json.dumps({axis: live_data(whole)[axis]}))
        assert set(found["figures"]) == {f"study-1-tradeoff-{axis}", f"study-1-learning-{axis}"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/figures/mine/digits?name=study-1-nothing", "has no figure"),
        ("/figures/nowhere?name=study-1-gains", "holds no study"),
        ("/levels/mine/digits?axis=money", "has no axis"),
        ("/levels/mine/digits", "Choose one of: seconds"),
        ("/figures/..%2f..%2fetc?name=x", "this store"),
        ("/?colour=taste", "no colour by"),
        ("/?at=high", "at is"),
        ("/runs?size=7", "Choose one of 25"),
        ("/runs?column=nothing", "nothing"),
        ("/runs.csv?sort=nothing", "nothing"),
        ("/runs/compare?key=1", "1 runs are chosen"),
    ],
)
def test_bad_addresses_say_what_is_wrong(served: Served, path: str, words: str) -> None:
    status, page, _ = served.get(path)
    assert status == 404
    assert words in html.unescape(page)


def test_a_chip_takes_back_one_value_and_clear_all_of_them(served: Served) -> None:
    page = served.get("/runs?arm=composed&arm=freezing&seed=1&min_quality=0.1&text=d&column=fact:lr&sort=-seed")[1]
    assert num_runs(page) == 24
    chips = chips_of(page)
    assert set(chips) == {"“d”", "arm: composed", "arm: freezing", "seed: 1", "quality at least 0.1"}
    without = parse_qs(urlsplit(chips["arm: composed"]).query)
    assert without["arm"] == ["freezing"]
    assert without["seed"] == ["1"]
    assert num_runs(served.get(chips["arm: composed"])[1]) == 12
    (clear,) = re.findall(r'class="clear" href="([^"]*)"', page)
    assert parse_qs(urlsplit(html.unescape(clear)).query) == {"column": ["fact:lr"], "sort": ["-seed"]}
    # Both arms stay when the form is sent, though a select holds one value.
    assert page.count('type="hidden" name="arm"') == 2 * 2  # the filters' form and that of columns
    assert 'More filters <span class="count">2</span>' in page


def test_the_model_is_a_filter(served: Served) -> None:
    assert num_runs(served.get("/runs?model=large")[1]) == 2
    assert num_runs(served.get("/runs?model=large&model=small")[1]) == 3
    evil = served.get(f"/runs?model={EVIL.replace('<', '%3C').replace('>', '%3E')}")[1]
    assert num_runs(evil) == 1
    assert EVIL not in evil
    by_hand = [run for run in served.index.runs(limit=1000) if run.facts.get("model") == "large"]
    assert {run.key for run in by_hand} == {
        run.key for run in served.index.runs(RunFilter(exact={"model": ("large",)}), limit=1000)
    }
    assert ("large", 2) in served.index.choices("model")


def test_the_task_with_most_runs_is_told_and_can_be_left(served: Served) -> None:
    page = served.get("/")[1]
    (chip,) = [text for text in chips_of(page) if text.startswith("task with most runs: Digits")]
    assert 'class="clear"' not in page, "nobody chose anything"
    assert num_runs(page) == 144
    everything = served.get(chips_of(page)[chip])[1]
    assert num_runs(everything) == 148
    assert '<option value="" selected>all tasks</option>' in everything
    # A study of another task than the usual one isn't lost when the form is sent with the usual task.
    assert num_runs(served.get("/?task=*most*&study=Digits%2C+small+network")[1]) == 144


def test_two_studies_of_one_name_are_told_apart(served: Served) -> None:
    name = "Digits, small network"
    page = served.get("/runs?size=250")[1]
    assert f"{name} (mine/digits)" in page
    assert f"{name} (yours &amp; theirs/digits)" in page
    assert '<select id="filter-path" name="path">' in page
    one = served.get("/?path=mine%2Fdigits")[1]
    assert num_runs(one) == 72
    assert "study-1-tradeoff-seconds" in data_of(one)["figures"], "one study's own section is there"
    cloud = cloud_of(served.get("/")[1])
    assert {f"{name} (mine/digits)"[:31] + "…", f"{name} (yours &amp; thei"[:-9] + "…"} & {
        trace["name"] for trace in cloud["data"]
    }


def test_the_quality_line_has_its_table_and_its_address(served: Served) -> None:
    page = served.get("/?at=0.9")[1]
    assert cloud_of(page)["layout"]["shapes"][0]["y0"] == 0.9
    status, part, headers = served.get("/reached?at=0.9&arm=")
    assert status == 200
    assert headers["hx-replace-url"] == "/?at=0.9"
    assert part.strip() in page
    assert part.count('scope="rowgroup"') == 2
    assert "×" in part
    assert "aren't compared" in page or "aren&#39;t compared" in page
    usual = cloud_of(served.get("/?at=17")[1])["layout"]["shapes"][0]["y0"]
    assert 0.8 < usual < 1, "a line beyond the points is drawn where it usually is"


def test_columns_are_ones_own_and_are_kept(served: Served) -> None:
    page = served.get("/runs?model=large")[1]
    for name in ("metric:top/5", "fact:lr", "fact:shared", "tokens"):
        assert f'name="column" value="{name}"' in page
    differ, same = (page.split(words)[1].split("</fieldset>")[0] for words in ("where runs differ", "the same in all"))
    assert "fact:lr" in differ
    assert "fact:shared" in same
    own = served.get("/runs?columns=own&column=seed&column=metric:top/5&sort=metric:top/5")[1]
    heads = re.findall(r'<th scope="col"[^>]*><a href="[^"]*">([^<]*)</a>', own)
    assert heads == ["run", "seed", "top/5"]
    assert 'aria-sort="ascending"' in own
    assert ">2003<" in own, "a seed is no amount"
    few = served.get("/runs?size=25&arm=composed&arm=baseline")[1]
    assert few.count('scope="row"') == 24 + 1
    assert "Page 1 of 2" in few
    assert "<title>Runs · arm: composed · arm: baseline · Cosmati</title>" in few


def test_runs_come_as_csv_in_the_tables_order(served: Served) -> None:
    status, text, headers = served.get("/runs.csv?sort=-seed&columns=own&column=seed&column=quality&column=fact:lr")
    assert status == 200
    assert headers["content-disposition"] == "attachment; filename=runs.csv"
    found = rows_of(text)
    wanted = served.index.runs(sort="seed", descending=True, limit=1000)
    assert [one["key"] for one in found] == [run.key for run in wanted]
    assert [float(one["quality"]) for one in found] == [run.quality for run in wanted]
    assert list(found[0]) == ["key", "name", "path", "seed", "quality", "fact:lr"]
    assert len(rows_of(served.get("/tradeoffs.csv?path=mine%2Fdigits")[1])) == 36


def test_two_runs_are_compared_without_a_script(served: Served) -> None:
    class Kept(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.build_opener(Kept).open(f"{served.address}/runs/compare?key=x&key=y")
    assert told.value.code == 303
    assert told.value.headers["location"] == "/compare?a=x&b=y"
    told.value.close()


def test_answers_are_packed_for_who_can_unpack(served: Served) -> None:
    request = urllib.request.Request(served.address + "/runs", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.read()).decode() == served.get("/runs")[1]


def test_the_runs_as_csv_have_no_empty_line_between_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path / "s", small_study())
    monkeypatch.setattr(run_table, "CSV_RUNS", 3)
    what = Asked(RunFilter(), "name", descending=False, columns=(), has_own_columns=False, page=0, page_size=100)
    lines = list(csv.reader(io.StringIO("".join(run_table.run_lines(indexed(tmp_path), what, ("arm",))), newline="")))
    assert [line[3] for line in lines] == ["arm", *["baseline"] * 4, *["fast"] * 4]
