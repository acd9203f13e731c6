"""The front pages over a real socket: filters and their chips, parts that are fetched, columns, CSV, names."""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from cosmati.explorer.rendering import embedded_json
from cosmati.explorer.report import render_report
from cosmati.explorer.server import run_table
from cosmati.explorer.server.asked import Asked
from cosmati.explorer.views import live_data, study_figures, study_view
from cosmati.store.filters import RunFilter
from tests.explorer.samples import demo_study
from tests.explorer.test_server import EVIL, Served, data_of
from tests.store.samples import indexed, run_record, small_study, write_run, write_study
from tests.study.oracles import log_quality, study


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


@pytest.mark.long
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
    assert chip.endswith("(144 of 148 runs)")
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
    names = {trace["name"] for trace in cloud_of(served.get("/")[1])["data"]}
    for end in (" (mine/digits)", "theirs/digits)"):
        assert sum(html.unescape(one).endswith(end) for one in names) == 1
    choices = re.findall(r'<option value="([^"]*)"', page.split('id="filter-study"')[1].split("</select>")[0])
    assert choices == ["", f"{name} (mine/digits)", f"{name} (yours &amp; theirs/digits)"]
    chosen = served.get("/runs?" + urlencode({"study": f"{name} (yours & theirs/digits)"}))[1]
    assert num_runs(chosen) == 72
    assert f"study: {name} (yours & theirs/digits)" in chips_of(chosen)
    assert 'value="Digits, small network (yours &amp; theirs/digits)" selected' in chosen
    both = served.get("/runs?" + urlencode({"study": name}))[1]
    assert num_runs(both) == 144, "an address of before"
    assert num_runs(served.get("/runs?path=mine%2Fdigits&arm=composed")[1]) == 12
    run = served.index.runs(RunFilter(exact={"path": ("mine/digits",)}))[0]
    crumbs = served.get(f"/runs/{run.key}")[1].split('class="crumbs"')[1].split("</p>")[0]
    assert f"{name} (mine/digits)" in crumbs
    for address in re.findall(r'href="(/runs[^"]*)"', crumbs):
        assert num_runs(served.get(html.unescape(address))[1]) in (12, 2)


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


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Served]]:
    """Serve what a test has written."""
    found: list[Served] = []

    def start() -> Served:
        found.append(Served(tmp_path))
        return found[-1]

    yield start
    for one in found:
        one.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_huge_quality_leaves_every_page_standing(tmp_path: Path, serve: Callable[[], Served]) -> None:
    """A perplexity of exp(400): a run that went wrong, and stayed finite."""
    record = small_study(higher_is_better=False, quality_name="perplexity")
    runs = tuple(
        replace(run, final=replace(run.final, quality=math.exp(400 + run.seed))) if run.arm == "fast" else run
        for run in record.runs
    )
    write_study(tmp_path / "one", replace(record, runs=runs))
    write_study(tmp_path / "two", replace(record, name="two"))
    served = serve()
    for address in ("/", "/?path=one", "/studies/one", "/runs", "/runs.csv", "/methods/Fast", "/chosen-study?path=one"):
        assert served.get(address)[0] == 200, address
    assert served.get("/levels/one?axis=step")[0] == 200
    for row in rows_of(served.get("/tradeoffs.csv")[1]):
        is_huge = row["folder"] == "one" and row["arm"] == "fast"
        assert (row["standard_error"] == "") == is_huge
        expected = (math.exp(400) + math.exp(401)) / 2
        assert not is_huge or float(row["perplexity"]) == pytest.approx(expected, rel=1e-12)
    page = render_report(title="huge", studies=[replace(record, runs=runs)])
    assert page.count("<figure") > 2


def test_what_is_not_finite_is_null_in_a_page() -> None:
    value = {"a": [math.inf, (1.0, -math.inf)], "b": {"c": math.nan, "d": "NaN<"}, "e": 2**70, "f": None, "g": True}
    expected = {"a": [None, [1.0, None]], "b": {"c": None, "d": "NaN<"}, "e": 2**70, "f": None, "g": True}
    assert json.loads(embedded_json(value)) == expected
    assert "<" not in embedded_json(value)


def test_what_has_no_place_on_an_axis_is_told(tmp_path: Path, serve: Callable[[], Served]) -> None:
    for name, price in (("free", 0.0), ("paid", 2.0), ("unknown", None)):
        write_study(tmp_path / name, small_study(name, price_per_hour=price))
    served = serve()
    free, priceless = "8 runs cost nothing, at a price of 0", "8 runs recorded no price"
    page = served.get("/?axis=cost")[1]
    assert free in page
    assert priceless in page
    alone = served.get("/?axis=cost&study=free")[1]
    assert "None of the chosen runs can be drawn. " + free in alone
    assert alone.count(free) == 1
    assert "No run that was chosen has both" not in alone
    assert "24 runs recorded no tokens" in served.get("/?axis=tokens")[1]
    for address in ("/", "/?axis=cost&price=NVIDIA+A100+80GB"):
        text = served.get(address)[1]
        assert "recorded no" not in text
        assert "cost nothing" not in text


def test_a_limit_of_quality_leaves_no_lucky_seeds(tmp_path: Path, serve: Callable[[], Served]) -> None:
    record = demo_study(num_seeds=3)
    write_study(tmp_path / "one", record)
    write_study(tmp_path / "two", replace(record, name="two"))
    served = serve()
    every = rows_of(served.get("/tradeoffs.csv")[1])
    middle = sorted(float(one["accuracy"]) for one in every)[len(every) // 2]
    found = rows_of(served.get(f"/tradeoffs.csv?min_quality={middle!r}")[1])
    same = ("folder", "arm", "budget", "n", "accuracy", "standard_error")
    assert [[one[name] for name in same] for one in found] == [
        [one[name] for name in same] for one in every if float(one["accuracy"]) >= middle
    ]
    page = served.get(f"/?min_quality={middle!r}")[1]
    assert "Limits choose whole points" in page
    assert num_runs(page) == 3 * len(found)
    assert "Limits choose whole points" not in served.get("/?min_budget=0.5")[1]
    assert "No point has means within these limits" in served.get("/?min_quality=0.9&max_quality=0.90001")[1]


def test_a_run_that_failed_says_with_what(tmp_path: Path, serve: Callable[[], Served]) -> None:
    record = small_study()
    failed = [
        replace(run, error="RuntimeError: <b>out of memory", final=replace(run.final, quality=math.nan))
        if run.arm == "fast" and run.seed == 1
        else run
        for run in record.runs
    ]
    write_study(tmp_path / "one", replace(record, runs=tuple(failed)))
    served = serve()
    rows = rows_of(served.get("/runs.csv?status=failed")[1])
    assert [(row["arm"], row["seed"], row["status"]) for row in rows] == [("fast", "1", "failed")] * 2
    page = served.get(f"/runs/{rows[0]['key']}")[1]
    assert "RuntimeError: &lt;b&gt;out of memory" in page
    assert "<strong>Failed</strong>" in page
    assert "diverged after" not in page
    assert "It failed, so it has no place" in page
    front = served.get("/?at=0.6")[1]
    assert "2 runs diverged or failed: no mean has them." in front
    assert "2 of 4 runs diverged or failed" in served.get("/reached?at=0.6")[1]


def test_a_third_of_the_budget_can_be_chosen(tmp_path: Path, serve: Callable[[], Served]) -> None:
    thirds = study({"baseline": log_quality(), "x": log_quality()}, seeds=range(3), budgets=(1 / 3, 2 / 3, 1.0))
    write_study(tmp_path / "one", thirds)
    served = serve()
    field = served.get("/runs")[1].split('id="filter-budget"')[1].split("</select>")[0]
    options = re.findall(r'<option value="([^"]*)"[^>]*>([^<]*)<', field)[1:]
    assert [text for _, text in options] == ["0.333333 (6)", "0.666667 (6)", "1 (6)"]
    for value, _ in options:
        page = served.get(f"/runs?budget={value}")[1]
        assert num_runs(page) == 6
        assert f'value="{value}" selected' in page


def test_the_end_of_the_range_is_a_place_for_the_line(served: Served) -> None:
    low, high = (f([float(one["accuracy"]) for one in rows_of(served.get("/tradeoffs.csv")[1])]) for f in (min, max))
    for at in (low, high):
        assert cloud_of(served.get(f"/?at={at!r}")[1])["layout"]["shapes"][0]["y0"] == at


def test_the_table_of_points_begins_with_the_frontier_and_the_baselines(served: Served) -> None:
    page = served.get("/")[1]
    table = page.split('aria-label="Points"')[1].split("</table>")[0]
    found = [
        (cells[0], "yes" not in cells[-1])
        for row in re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1], re.DOTALL)
        if (cells := [re.sub("<[^>]*>", "", one) for one in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)])
    ]
    keys = [(is_off, arm != "baseline") for arm, is_off in found]
    assert keys == sorted(keys)
    assert len(set(keys)) > 2
    assert (False, True) in keys, "a method that is on the frontier comes before a baseline that isn't"


def test_the_second_page_goes_on_where_the_first_one_ends(served: Served) -> None:
    wanted = [run.key for run in served.index.runs(sort="seed", descending=False, limit=1000)]
    found = [
        re.findall(r'name="key" value="([^"]*)"', served.get(f"/runs?sort=seed&size=25&page={n}")[1]) for n in range(6)
    ]
    assert [len(one) for one in found] == [25, 25, 25, 25, 25, 23]
    assert [key for one in found for key in one] == wanted


def test_facts_that_are_not_listed_are_counted(tmp_path: Path, serve: Callable[[], Served]) -> None:
    for n in range(2):
        recipe = json.dumps({f"k{place:03}": place + n for place in range(600)})
        write_run(tmp_path / f"r{n}", run_record(f"r{n}", recipe_text=recipe))
    served = serve()
    page = served.get("/runs?column=fact:k555")[1]
    listed = set(re.findall(r'name="column" value="fact:(k\d+)"', page))
    assert f"{600 - len(listed)} more aren't listed" in page
    assert len(listed) == 401
    assert 'value="fact:k555" checked' in page, "what is shown can be taken away"


def test_a_study_without_steps_has_its_page(tmp_path: Path, serve: Callable[[], Served]) -> None:
    record = small_study()
    runs = tuple(replace(run, final=replace(run.final, step=0, rows=0, flops=0.0)) for run in record.runs)
    write_study(tmp_path / "one", replace(record, runs=runs))
    served = serve()
    assert served.get("/studies/one")[0] == 200
    assert "8 runs took no steps" in served.get("/?axis=steps")[1]


def test_lines_of_a_store_that_grows_are_each_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_table, "CSV_RUNS", 5)
    write_study(tmp_path / "m", small_study("m"))
    index = indexed(tmp_path)
    before = [run.key for run in index.runs(sort="arm", descending=True, limit=100)]
    what = Asked(RunFilter(), "arm", descending=True, columns=(), has_own_columns=False, page=0, page_size=100)
    pieces = run_table.run_lines(index, what, ("arm",))
    text = next(pieces)
    write_study(tmp_path / "a", small_study("a"))
    write_study(tmp_path / "m", small_study("m", seeds=range(3)))
    index.refresh()
    assert [row["key"] for row in rows_of(text + "".join(pieces))] == before
