"""The report page: self-contained, escaped, well formed, and its numbers are the statistics' numbers."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import MissingExtraError, RunError
from cosmati.explorer import rendering, report
from cosmati.explorer.report import embedded_json, render_report, write_report
from cosmati.explorer.run_view import RunView
from cosmati.explorer.wording import ratio_interval_text, ratio_text
from cosmati.records.governance import GovernanceFacts, LedgerFacts, SourceRow
from cosmati.records.run import GuaranteeRecord, PlanLine
from cosmati.records.study import ChecklistItem
from cosmati.study.comparison import NotReached, SpeedUp, comparisons, speed_up_at_equal_quality
from cosmati.study.curves import tradeoff_curve
from tests.explorer.samples import demo_facts, demo_record, demo_run, demo_study

VOID = {"meta", "input", "br", "hr", "img", "link"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """Checks nesting, and collects ids, links, attributes and the page's text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[int] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def source() -> str:
    return render_report(title="Digits", studies=[demo_study()], run=demo_run())


def plain(page: str) -> str:
    """The page without Plotly's own source."""
    return page.replace(report.plotly_source(), "")


@pytest.mark.long
def test_structure_is_sound(source: str) -> None:
    page = Page(plain(source))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    targets = [value[1:] for _, name, value in page.attributes if name == "href"]
    assert set(targets) <= set(page.ids)
    for anchor in ("summary", "study-1-tradeoffs", "study-1-time", "study-1-baseline", "training", "plan"):
        assert anchor in targets
    for anchor in ("policy", "schedule", "contribution", "totals", "exclusions", "sources", "ledger", "reproduction"):
        assert anchor in page.ids


def test_nothing_is_loaded_from_outside(source: str) -> None:
    own = plain(source)
    page = Page(own)
    loads = [value for _, name, value in page.attributes if name in {"src", "srcset", "action", "data", "poster"}]
    assert loads == []
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert not re.search(r"https?://|@import|url\((?!#guilloche)|fetch\(|XMLHttpRequest|import\(|WebSocket", own)
    assert "showSendToCloud: false" in own


def test_the_whole_of_plotly_is_inside(source: str) -> None:
    assert report.plotly_source() in source
    assert len(source) > 4_000_000


def test_numbers_are_those_of_the_statistics(source: str) -> None:
    study, page = demo_study(), Page(plain(source))
    judged = {one.arm: one.found for one in comparisons(study)}
    assert judged["composed"] == speed_up_at_equal_quality(study, "composed")
    assert "progressive doesn't surely reach baseline's best accuracy. It reached the lesser of both bests" in page.text
    for arm in ("composed", "label smoothing", "progressive"):
        found = judged[arm]
        assert isinstance(found, SpeedUp)
        assert f"({ratio_text(found)}, 95 % interval {ratio_interval_text(found)}" in page.text
        assert f"in {100 / found.ratio:.1f} % of baseline's training time" in page.text
    unreached = speed_up_at_equal_quality(study, "freezing")
    assert isinstance(unreached, NotReached)
    assert f"{unreached.reason} freezing reached its own best accuracy (0.8998) in" in page.text


def test_embedded_data_are_those_of_the_statistics(source: str) -> None:
    study = demo_study()
    data = json.loads(Page(plain(source)).scripts[0])
    traces = {trace["name"]: trace for trace in data["figures"]["study-1-tradeoff-seconds"]["plot"]["data"]}
    points = tradeoff_curve(study, "composed").points
    assert traces["composed"]["y"] == [point.quality.value for point in points]
    assert traces["composed"]["x"] == pytest.approx([point.position.value / 60 for point in points])
    live = data["studies"]["study-1"]["step"]
    assert live["levels"] == sorted(live["levels"], key=lambda level: level["quality"])
    for level in live["levels"][::6]:
        for arm, _, ratio, interval in level["rows"]:
            found = speed_up_at_equal_quality(study, arm, quality=level["quality"], axis="step")
            if isinstance(found, NotReached):
                assert (ratio, interval) == ("—", found.reason)
            elif level["text"].endswith("best"):
                assert ratio == ratio_text(found)
            else:
                assert (ratio, interval) == (ratio_text(found), ratio_interval_text(found))
    assert live["levels"][live["start"]]["text"].endswith("the baseline's best")


def test_every_figure_is_there_with_its_exports(source: str) -> None:
    page = Page(plain(source))
    data = json.loads(page.scripts[0])
    drawn = [value for _, name, value in page.attributes if name == "data-figure"]
    assert set(drawn) <= set(data["figures"])
    assert len([1 for _, name, value in page.attributes if (name, value) == ("data-save", "csv")]) == len(drawn)
    assert data["figures"]["policy-1"]["csv"].splitlines()[1] == "public-domain,main,embedding,1.0,admit"
    used = set(re.findall(r'"var\((--[a-z0-9-]+)\)"', page.scripts[0]))
    assert used
    assert all(f"{name}: #" in source for name in used)


def hostile_facts() -> GovernanceFacts:
    return GovernanceFacts(
        classes=(HOSTILE,),
        regions=(HOSTILE,),
        phases=(HOSTILE,),
        weight={HOSTILE: {HOSTILE: {HOSTILE: 1.0}}},
        decision={HOSTILE: {HOSTILE: HOSTILE}},
        contribution=demo_facts().contribution[:1],
        totals=(),
        exclusions=(HOSTILE,),
        sources=(SourceRow(HOSTILE, HOSTILE, 1, 1, HOSTILE, HOSTILE),),
        ledger=LedgerFacts(HOSTILE, 1, HOSTILE, HOSTILE, True, (HOSTILE,), 0, (HOSTILE,)),
        notes=(HOSTILE,),
    )


def hostile_run() -> RunView:
    record = replace(
        demo_record(),
        recipe_name=HOSTILE,
        recipe_text=HOSTILE,
        run_id=HOSTILE,
        hardware=HOSTILE,
        started=HOSTILE,
        environment={HOSTILE: HOSTILE},
        digests={"policy": HOSTILE, HOSTILE: HOSTILE},
        seconds_by_part={HOSTILE: 1.0},
        plan=(PlanLine(HOSTILE, HOSTILE, HOSTILE),),
        guarantees=tuple(GuaranteeRecord(f"{HOSTILE}({i})", holds=True, because=HOSTILE) for i in range(5)),
    )
    facts = hostile_facts()
    return RunView(
        record=record,
        status=HOSTILE,
        num_steps=2,
        losses=((1, 2.0), (2, 1.0)),
        metrics={HOSTILE: ((1, 2.0), (2, None))},
        ledger=facts.ledger,
        governance=facts,
        schedule=((HOSTILE,), (HOSTILE,)),
        warnings=(HOSTILE,),
        notes=(HOSTILE,),
    )


@pytest.mark.long
def test_hostile_text_stays_text() -> None:
    study = demo_study(2)
    arms = tuple(
        replace(arm, name=HOSTILE if arm.name == "composed" else arm.name, description=HOSTILE) for arm in study.arms
    )
    runs = tuple(replace(run, arm=HOSTILE) if run.arm == "composed" else run for run in study.runs)
    study = replace(
        study,
        name=HOSTILE,
        task=HOSTILE,
        quality_name=HOSTILE,
        unit=HOSTILE,
        arms=arms,
        runs=runs,
        checklist=(ChecklistItem(HOSTILE, False, HOSTILE),),
        command=HOSTILE,
        notes=HOSTILE,
    )
    own = plain(render_report(title=HOSTILE, studies=[study], run=hostile_run()))
    page = Page(own)
    assert own.count("<script") == 3
    assert "<img" not in own
    assert page.open == []
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) > 10
    figures = json.loads(page.scripts[0])["figures"]
    shown = [figures[name]["plot"] for name in ("policy-0", "schedule", "metric-0")]
    assert "<" not in shown[0]["layout"]["xaxis"]["ticktext"][0].replace("<br>", "")
    assert "<script" not in json.dumps(shown)


def test_embedded_json_round_trips() -> None:
    value = {"a": HOSTILE, "b": [1.5, None, "\u2028"]}
    text = embedded_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_an_empty_report_makes_no_claim() -> None:
    page = Page(plain(render_report(title="Empty")))
    assert "holds no study and no run" in page.text
    assert "governance" not in page.ids


def test_a_study_without_runs_and_with_one_seed() -> None:
    bare = replace(demo_study(), runs=(), checklist=())
    text = Page(plain(render_report(title="t", studies=[bare, demo_study(1)]))).text
    assert "No run of this study has finished" in text
    assert "no search is on record" in text
    assert "One seed shows no spread, so this is no claim." in text
    assert "no interval, n\u00a0=\u00a01" in text


def text_of(run: RunView) -> str:
    return Page(plain(render_report(title="t", run=run))).text


def test_ledger_states_are_told_apart() -> None:
    run, ledger = demo_run(), demo_facts().ledger
    assert ledger is not None
    for state, words in (
        (replace(ledger, checked=False), "Not checked"),
        (replace(ledger, num_witnesses=2), "2 witnesses cosigned"),
        (None, "The folder holds no ledger"),
    ):
        assert words in text_of(replace(run, ledger=state))
    damaged = text_of(replace(run, ledger=replace(ledger, problems=("root differs",)), governance=None))
    assert damaged.count("does not verify") == damaged.count("root differs") == 2
    assert "Verified" not in damaged


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("completed", "Completed\nafter 1,000 steps"),
        ("still going", "A process is training in this folder"),
        ("broken off", "Its process is gone without an end"),
        ("stopped", "goes on from here"),
        ("diverged", "Diverged"),
    ],
)
def test_the_page_says_how_the_run_stands(status: str, words: str) -> None:
    assert words in text_of(replace(demo_run(), status=status))


def test_guarantees_of_one_kind_are_one_line() -> None:
    pairs = tuple(GuaranteeRecord(f"no_direct_write(c, r{i})", holds=True, because="absent") for i in range(4))
    kept = replace(pairs[0], name="no_direct_write(d, r0)", because="rejected")
    run = replace(demo_run(), record=replace(demo_record(), guarantees=(*pairs, kept)))
    text = text_of(run)
    assert text.count("no_direct_write(…)") == 1
    assert "All 4 of them" in text
    assert all(one.name in text for one in (*pairs, kept))
    assert text.count("Holds") == 2


def test_a_run_with_nothing_logged_says_so() -> None:
    bare = replace(
        demo_run(), losses=(), metrics={}, governance=None, schedule=(), notes=("The folder holds no losses.",)
    )
    text = text_of(bare)
    assert "There is nothing to draw" in text
    assert "The folder holds no losses." in text


def test_the_file_is_written_where_it_was_asked(tmp_path: Path) -> None:
    path = write_report(tmp_path / "new" / "report.html", title="t")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(RunError, match="Name another file"):
        write_report(path / "below", title="t")


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_jinja(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_jinja)
        with pytest.raises(MissingExtraError, match=re.escape("pip install 'cosmati[explorer]'")):
            render_report(title="t")
    monkeypatch.setattr(rendering, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="Plotly"):
        render_report(title="t")
