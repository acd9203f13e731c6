"""The store's pages on composition, methods and governance, over a real socket."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cosmati.explorer.method_view import arm_findings
from cosmati.explorer.method_words import words_of
from cosmati.explorer.server import checks, methods
from cosmati.explorer.server.checks import LedgerChecks
from cosmati.ledger.query import contributions
from cosmati.records.study import Prediction, Registration, StudyRecord
from cosmati.study.comparison import SpeedUp, comparisons, speed_up_at_equal_quality
from tests.explorer.samples import demo_study
from tests.explorer.test_composition_view import parts
from tests.explorer.test_run_view import trainer_in
from tests.explorer.test_server import Served, data_of
from tests.study.oracles import study

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    for name, record in (("digits", demo_study()), ("deep/parts", parts(both=1.5))):
        (store / name).mkdir(parents=True)
        (store / name / "study.json").write_text(record.to_json())
    evil = demo_study(num_seeds=3)
    arms = tuple(replace(arm, methods=(EVIL,) if arm.name == "freezing" else arm.methods) for arm in evil.arms)
    (store / "evil").mkdir()
    (store / "evil" / "study.json").write_text(replace(evil, name=EVIL, task=EVIL, arms=arms).to_json())
    (store / "broken").mkdir()
    (store / "broken" / "study.json").write_text("{")
    trainer_in(store / "governed").fit()
    shutil.copytree(store / "governed", store / "tampered")
    (details := store / "tampered" / "ledger" / "details.jsonl").write_text(details.read_text().replace("1", "2", 1))
    found = Served(store)
    yield found
    found.close()


def key_of(served: Served, path: str) -> str:
    ((key,),) = served.index.query("SELECT key FROM runs WHERE path = ?", [path])
    return str(key)


def test_studies_with_parts_are_listed_with_their_counts(served: Served) -> None:
    page = served.get("/composition")[1]
    row = re.search(r'href="/composition/digits">.*?</tr>', page, re.DOTALL)
    assert row
    num_runs = len(demo_study().runs)
    assert f"<td>3</td><td>1</td><td>0</td><td>{num_runs}</td>" in row[0], "three parts alone, one pair"
    assert 'href="/composition/deep/parts"' in page
    assert "can't be read</a> and may hold more" in page


def test_a_composition_has_axes_and_measures_by_address(served: Served) -> None:
    status, page, _ = served.get("/composition/deep/parts?axis=step&measure=difference")
    assert status == 200
    assert '<option value="step" selected>' in page
    assert '<option value="difference" selected>' in page
    figures = data_of(page)["figures"]
    assert {"alone", "pairs", "breakdown"} <= set(figures)
    assert "difference" in str(figures["pairs"]["csv"]).split("\n")[0]  # type: ignore[index]
    assert "Shown to help each other: both." in served.get("/composition/deep/parts")[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/composition/deep/parts?axis=money", "no axis"),
        ("/composition/deep/parts?axis=tokens", "no axis"),
        ("/composition/deep/parts?measure=luck", "no measure"),
        ("/composition/nowhere", "holds no study"),
        ("/composition/broken", "JSON"),
        ("/composition/..%2f..%2fetc", "this store"),
        ("/methods/nothing-like-it", "No run of this store names"),
        ("/methods?sort=beauty", "be sorted by"),
        ("/methods?axis=money", "no axis"),
        ("/governance/0000", "no governed run 0000"),
    ],
)
def test_bad_addresses_are_told_what_is_wrong(served: Served, path: str, words: str) -> None:
    status, page, _ = served.get(path)
    assert status == 404
    assert words in page


def test_a_methods_page_has_each_study_with_its_own_figures(served: Served) -> None:
    status, page, _ = served.get("/methods/label%20smoothing")
    assert status == 200
    assert "<h1>LabelSmoothing</h1>" in page
    rows = str(data_of(page)["figures"]["forest"]["csv"]).splitlines()  # type: ignore[index]
    assert len(rows) == 1 + 4, "two studies have it alone and in a composition"
    one = next(one for one in comparisons(demo_study()) if one.arm == "label smoothing")
    assert isinstance(one.found, SpeedUp)
    assert str(one.found.ratio) in next(row for row in rows if row.startswith('"Digits, small network",digits,label'))
    words = words_of("LabelSmoothing")
    assert words is not None
    assert f'<p class="lead">{words.does[0]}</p>' in page
    num_runs = 2 * 6 * (5 + 3)  # two arms at six budgets, in a study of five seeds and one of three
    assert f"{num_runs} runs" in page
    runs = re.search(r'href="(/runs\?method=[^"]+)"', page)
    assert runs
    assert f"<strong>{num_runs}</strong> runs" in served.get(runs[1])[1]


def test_the_list_counts_arms_alone_and_compositions_apart(served: Served) -> None:
    page = served.get("/methods?sort=name")[1]
    names = re.findall(r'<th scope="row"><a href="/methods/[^"]*">([^<]*)</a>', page)
    assert names == sorted(names, key=str.casefold)
    shown = [one for one in comparisons(parts(both=1.5)) if one.arm == "a" and one.is_shown]
    assert shown, "what the row says"
    row = re.search(r'<a href="/methods/A">A</a></th>(.*?)</tr>', page)
    assert row
    assert "▲ 1" in row[1]
    assert 'aria-sort="ascending"' in page
    assert 'aria-sort="descending"' in served.get("/methods?sort=-runs")[1]


def test_nothing_of_a_user_runs_on_these_pages(served: Served) -> None:
    evil = "%3Cscript%3Ealert(1)%3C/script%3E"
    for path in ("/composition", "/composition/evil", "/methods", f"/methods/{evil}", f"/methods/x{evil}"):
        assert "<script>alert" not in served.get(path)[1], path


def test_studies_that_take_long_are_gone_on_with_and_lost_ones_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(methods, "WORK_SECONDS", -1.0)
        page = served.get("/methods?axis=rows")[1]
        assert re.search(r"0 of \d+ studies are worked out", page)
        assert 'hx-trigger="load' in page
    assert "are worked out" not in served.get("/methods?axis=rows")[1]
    path = Path(served.index.root) / "digits" / "study.json"
    text = path.read_text()
    try:
        path.write_text("{")
        page = served.get("/methods")[1]
        assert "1 study can't be read" in page
    finally:
        path.write_text(text)
    assert "can't be read</a> and may hold more" in served.get("/methods")[1]


def test_governance_says_what_the_ledger_says(served: Served) -> None:
    key = key_of(served, "governed")
    status, page, _ = served.get(f"/governance/{key}?region=high")
    assert status == 200
    folder = Path(served.index.root) / "governed"
    for cell in contributions(folder / "ledger").cells:
        if cell.region == "high" and cell.num_rows:
            assert f"<td>{cell.num_steps:,}</td><td>{cell.num_rows:,}</td>" in page
    low = served.get(f"/governance/{key}?region=low")[1]
    assert "no step that stands gave it any weight here" in low, "shut/b may not teach the low region"
    assert "no row of it taught any region" in low, "unseen"
    assert f"cosmati ledger query {folder} --class shut/b --region low" in low
    assert {"policy-0", "shares", "schedule", "contribution-0"} <= set(data_of(page)["figures"])
    assert "names no region" in served.get(f"/governance/{key}?region=nothing")[1]


def test_row_ids_are_for_nobody(served: Served) -> None:
    assert "Row ids are withheld" in served.get(f"/governance/{key_of(served, 'governed')}")[1]


def test_a_ledger_that_was_changed_shows_nothing_of_it(served: Served) -> None:
    page = served.get(f"/governance/{key_of(served, 'tampered')}")[1]
    assert "The ledger does not verify" in page
    assert data_of(page)["figures"] == {}
    assert "doesn't verify" in served.get("/governance")[1].replace("&#39;", "'")


def test_the_button_verifies_again_and_no_other_site_may_press_it(served: Served) -> None:
    key = key_of(served, "governed")
    first = re.search(r"Checked here at ([^,]*),", served.get(f"/governance/{key}")[1])
    time.sleep(1.1)
    again = re.search(r"Checked here at ([^,]*),", served.get(f"/governance/{key}")[1])
    assert first
    assert again
    assert first[1] == again[1], "what nothing changed isn't checked anew"
    address = f"{served.address}/governance/{key}/check"
    request = urllib.request.Request(address, data=b"", headers={"Sec-Fetch-Site": "cross-site"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=60)
    urllib.request.urlopen(urllib.request.Request(address, data=b""), timeout=60).close()
    after = re.search(r"Checked here at ([^,]*),", served.get(f"/governance/{key}")[1])
    assert after
    assert after[1] > first[1]


def test_a_check_that_takes_long_is_waited_for_by_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real, may_end = checks.read_run, threading.Event()
    monkeypatch.setattr(checks, "read_run", lambda folder, **_: (may_end.wait(60), real(folder))[1])
    asked, folder = LedgerChecks(), Path(served.index.root) / "governed"
    found, going = asked.ask(folder)
    assert found is None
    assert going is not None
    assert asked.ask(folder)[0] is None, "the same check goes on"
    may_end.set()
    found, going = asked.ask(folder, wait=30)
    assert found is not None
    assert found.view is not None
    assert going is None
    monkeypatch.setattr(checks, "read_run", lambda *_, **__: 1 / 0)
    found, _ = asked.ask(folder, wait=30, anew=True)
    assert found is not None
    assert "ZeroDivisionError" in found.problem


def test_data_of_these_pages_is_json(served: Served) -> None:
    for path in ("/composition/digits", "/methods/EMA", "/governance"):
        json.dumps(data_of(served.get(path)[1]), allow_nan=False)


def page_text(page: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", page, flags=re.DOTALL)).split())


def stored(store: Path, **studies: StudyRecord) -> Served:
    for name, record in studies.items():
        (store / name).mkdir(parents=True)
        (store / name / "study.json").write_text(record.to_json())
    return Served(store)


def with_final(record: StudyRecord, **changes: float) -> StudyRecord:
    """All runs end with other figures."""
    return replace(record, runs=tuple(replace(run, final=replace(run.final, **changes)) for run in record.runs))


def test_studies_of_nothing_but_diverged_runs_have_all_their_pages(tmp_path: Path) -> None:
    lost = with_final(parts(both=1.5, seeds=(0, 1)), quality=math.nan)
    first = replace(lost, runs=tuple(run for run in lost.runs if run.arm == "baseline")[:1])
    found = stored(tmp_path, lost=lost, first=first)
    try:
        for path in ("lost", "first"):
            for page in (
                f"/composition/{path}",
                f"/studies/{path}",
                f"/?path={path}",
                f"/composition/{path}?axis=seconds",
            ):
                status, text, _ = found.get(page)
                assert status == 200, page
                if page != f"/?path={path}":
                    assert "No run of this study has ended with a finite quality" in text, page
        for page in ("/", "/runs", "/methods", "/methods/A", "/composition"):
            assert found.get(page)[0] == 200, page
    finally:
        found.close()


def test_a_baseline_and_its_double_are_no_arms_of_parts(tmp_path: Path) -> None:
    record = parts(both=1.5, seeds=(0, 1))
    base = replace(record.arms[0], methods=("Muon", "EMA"))
    double = replace(base, name="aa")
    runs = (*record.runs, *(replace(run, arm="aa", seed=run.seed + 9) for run in record.runs if run.arm == "baseline"))
    found = stored(tmp_path, one=replace(record, arms=(double, *record.arms[1:], base), runs=runs))
    try:
        row = re.search(r'href="/composition/one">.*?</tr>', found.get("/composition")[1], re.DOTALL)
        assert row
        assert f"<td>2</td><td>1</td><td>0</td><td>{len(runs)}</td>" in row[0]
    finally:
        found.close()


def test_studies_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, other = parts(both=1.5, seeds=(0, 1)), parts(both=1.2, seeds=(0, 1))
    found = stored(tmp_path, first=one, second=other)
    try:
        keys = dict(found.index.query("SELECT path, min(key) FROM runs GROUP BY path"))
        names = {path: f"{one.name} ({path})" for path in keys}
        for path, name in names.items():
            for page in (f"/composition/{path}", f"/studies/{path}", f"/runs/{keys[path]}", f"/compare?a={keys[path]}"):
                assert name in page_text(found.get(page)[1]), page
        pair = page_text(found.get(f"/compare?a={keys['first']}&b={keys['second']}")[1])
        listed, method = page_text(found.get("/composition")[1]), found.get("/methods/A")[1]
        for name in names.values():
            assert name in pair
            assert name in listed
            assert f">{name}</a>" in method
        labels = data_of(method)["figures"]["forest"]["plot"]["layout"]["yaxis"]["ticktext"]  # type: ignore[index]
        assert {label.partition("<br>")[0] for label in labels} == {"synthetic (first)", "synthetic (second)"}
        runs = re.search(r'href="(/runs\?path=[^"]*)">its runs', found.get("/studies/first")[1])
        assert runs
        rows = found.get(unescape(runs[1]).replace("/runs?", "/runs.csv?"))[1].splitlines()
        assert len(rows) == 1 + len(one.runs), "of this one alone"
    finally:
        found.close()


def test_studies_without_a_count_of_the_axis_are_named(tmp_path: Path) -> None:
    """A record that counts no tokens says nothing by tokens: it's left out, by name."""
    counted = with_final(parts(both=1.5, seeds=(0, 1)), tokens=1000)
    bare = {f"bare{k:02}": replace(parts(both=1.5, seeds=(0,)), name=f"Bare {k}") for k in range(14)}
    found = stored(tmp_path, counted=counted, **bare)
    try:
        for page in ("/methods", "/methods/A"):
            assert "counted here" not in found.get(page)[1]
            text = found.get(f"{page}?axis=tokens")[1]
            assert "14 studies aren't counted here" in page_text(text)
            assert all(f'<a href="/studies/{path}">{one.name}</a>' in text for path, one in bare.items())
            assert "<summary>2 more</summary>" in text
    finally:
        found.close()


@pytest.mark.parametrize(
    ("higher", "gain", "words"),
    [
        (True, 0.05, "higher by 0.0500, better"),
        (True, -0.05, "lower by 0.0500, worse"),
        (False, -0.05, "lower by 0.0500, better"),
        (False, 0.05, "higher by 0.0500, worse"),
    ],
)
def test_a_difference_says_which_way_it_is_and_whether_that_is_better(higher: bool, gain: float, words: str) -> None:
    sign = 1.0 if higher else -1.0
    arms = {
        "baseline": lambda b, s: sign * 0.1 * math.log(b) + 1.0 + 0.001 * s,
        "x": lambda b, s: sign * 0.1 * math.log(b) + 1.0 + 0.001 * s + gain + 0.0004 * (s % 2),
    }
    record = study(arms, methods={"x": ("M",)}, higher_is_better=higher, seeds=(0, 1, 2, 3))
    found = arm_findings(record, "p", "seconds")
    assert found is not None
    text = found[0].difference
    assert text.startswith(words.replace("0.0500", f"{abs(gain + 0.0002):.4f}"))
    low, high = map(float, re.findall(r"\(([\d.]+) to ([\d.]+), n", text)[0])
    gaps = np.abs([gain, gain + 0.0004] * 2)
    half = stats.t.ppf(0.975, 3) * gaps.std(ddof=1) / 2
    assert (low, high) == pytest.approx((gaps.mean() - half, gaps.mean() + half), abs=6e-5)


def test_a_method_with_a_line_break_has_its_page(tmp_path: Path) -> None:
    record = parts(both=1.5, seeds=(0, 1))
    arms = tuple(replace(arm, methods=("new\nline",)) if arm.name == "a" else arm for arm in record.arms)
    found = stored(tmp_path, one=replace(record, arms=arms))
    try:
        link = re.search(r'href="(/methods/new[^"]*)"', found.get("/methods")[1])
        assert link
        assert found.get(unescape(link[1]))[0] == 200
    finally:
        found.close()


def test_a_finding_has_its_own_ends_and_the_axis_that_was_registered() -> None:
    record = parts(both=1.5)
    made = Registration("f", (Prediction("a", "baseline", "step", 1.1),), "2026-01-01T00:00:00+00:00", "0" * 64, 1)
    record = replace(record, registration=made)
    standings = {}
    for axis in ("step", "seconds"):
        findings = arm_findings(record, "p", axis)  # type: ignore[arg-type]
        assert findings is not None
        found = {one.arm: one for one in findings}
        standings[axis] = {arm: one.standing.partition(",")[0] for arm, one in found.items()}
        exact = speed_up_at_equal_quality(record, "a", axis=axis)  # type: ignore[arg-type]
        assert isinstance(exact, SpeedUp)
        assert (found["a"].low, found["a"].high) == (exact.low, exact.high)
        assert (exact.low or 0) < exact.ratio < (exact.high or 0)
        assert found["a"].low != found["a"].high
    assert standings["step"] == {"a": "registered", "b": "screening", "both": "screening"}
    assert set(standings["seconds"].values()) == {"screening"}
    assert arm_findings(record, "p", "tokens") is None, "no run counts them"


def test_a_chosen_study_says_which_filters_its_curves_leave_aside(tmp_path: Path) -> None:
    record = parts(both=1.5, seeds=(0, 1))
    found = stored(tmp_path, one=record, other=record)
    aside = "This section is of the whole study, all its arms, budgets and seeds: the filter by {} counts for"
    try:
        for query, words in (
            ("seed=0", "seed"),
            ("arm=a&arm=baseline&max_quality=2", "arm, quality"),
            ("budget=1.0&text=synthetic", "budget, search"),
        ):
            page = page_text(found.get(f"/?path=one&{query}")[1])
            assert aside.format(words) in page, query
            assert "synthetic (one) #" in page, "the other one has its name"
            asked = urllib.request.Request(f"{found.address}/?path=one&{query}", headers={"HX-Request": "true"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                later = answer.read().decode()
            address = re.search(r'hx-get="(/chosen-study[^"]*)"', later)
            assert address
            assert aside.format(words) in page_text(found.get(unescape(address[1]))[1]), query
        for page in ("/?path=one", "/?path=one&axis=steps&colour=arm&quality_name=accuracy", "/studies/one"):
            assert "the filter by" not in page_text(found.get(page)[1]), page
    finally:
        found.close()
