"""What a run's program tells of it: samples, licence decisions and commands, in the page and escaped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.explorer.about_view import licence_rows, plain_commands, sample_pairs, source_classes
from cosmati.explorer.loss_figure import loss_figure
from cosmati.explorer.palette import LIGHT, PAGE
from cosmati.explorer.report import render_report
from cosmati.explorer.run_figures import heat_map_figure, run_figures
from cosmati.explorer.run_view import RunView, read_run
from cosmati.records.about import ABOUT_FILE, PackageRecord, RunAbout, SampleRecord
from cosmati.records.governance import SourceRow
from tests.explorer.samples import CLASSES, demo_facts, demo_record, demo_run
from tests.explorer.test_report import HOSTILE, Page, plain

SAMPLE = SampleRecord("def ", "f(x):\n\treturn \x1b[31mx", 0, 0.7, 200)


def package(name: str, class_name: str, evidence: str, num_rows: int = 10) -> PackageRecord:
    return PackageRecord(name, "1.0", class_name, "", "normalised", evidence, num_rows, "train")


ABOUT = RunAbout(
    quality="bits_per_byte",
    higher_is_better=False,
    sources=(SourceRow("open/permissive", "jinja2, six", 50, 2, "MIT", "declared"),),
    packages=(package("jinja2", "open/permissive", "classifier: BSD License; text of LICENSE.txt: BSD-3-Clause"),),
    samples=(SAMPLE,),
    commands=("cosmati quickstart --output 'my folder'",),
    notes=("Not legal advice.",),
)


def about_run(about: RunAbout = ABOUT) -> RunView:
    facts = replace(demo_facts(), sources=about.sources)
    return replace(demo_run(), about=about, governance=facts)


def folder_with(tmp_path: Path, about: str) -> Path:
    (tmp_path / "run.json").write_text(demo_record().to_json())
    (tmp_path / ABOUT_FILE).write_text(about)
    return tmp_path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_run(folder_with(tmp_path, ABOUT.to_json())).about == ABOUT
    assert RunAbout.from_json(ABOUT.to_json()) == ABOUT


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9}', "[" * 100_000, json.dumps({**json.loads(ABOUT.to_json()), "more": 1})]
)
def test_a_damaged_file_is_left_out_with_the_reason(tmp_path: Path, text: str) -> None:
    view = read_run(folder_with(tmp_path, text))
    assert view.about is None
    assert [note for note in view.notes if note.startswith(f"{ABOUT_FILE} is left out: ")]


def test_a_link_and_a_huge_file_are_not_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, " " * (5 << 20))
    assert "isn't read" in " ".join(read_run(folder).notes)
    (folder / ABOUT_FILE).unlink()
    (tmp_path / "elsewhere").write_text(ABOUT.to_json())
    (folder / ABOUT_FILE).symlink_to(tmp_path / "elsewhere")
    view = read_run(folder)
    assert view.about is None
    assert "is a link" in " ".join(view.notes)


def test_another_version_is_refused() -> None:
    with pytest.raises(RunError, match="version 2"):
        RunAbout.from_json(replace(ABOUT, version=2).to_json())


def test_the_page_shows_what_the_model_wrote_why_licences_and_how_to_do_it_again() -> None:
    text = Page(plain(render_report(title="t", run=about_run()))).text
    assert "def f(x):\n\treturn \ufffd[31mx" in text
    assert "seed 0 from the weights of step 200" in text
    assert "text of LICENSE.txt: BSD-3-Clause" in text
    assert "cosmati quickstart --output 'my folder'" in text


def test_hostile_words_stay_text() -> None:
    hostile = RunAbout(
        quality=HOSTILE,
        sources=(SourceRow(HOSTILE, HOSTILE, 1, 1, HOSTILE, HOSTILE),),
        packages=(PackageRecord(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE),),
        samples=(SampleRecord(HOSTILE, HOSTILE, 0, 0.7, 1),),
        commands=(HOSTILE,),
        notes=(HOSTILE,),
    )
    source = plain(render_report(title="t", run=about_run(hostile)))
    assert source.count("<script") == 3
    assert "<img" not in source
    assert Page(source).open == []
    assert Page(source).text.count(HOSTILE) >= 7


def test_samples_stand_beside_what_was_drawn_alike() -> None:
    other = replace(SAMPLE, text="g()")
    twin = about_run(replace(ABOUT, samples=(replace(other, seed=1), other, replace(other, prompt="class "))))
    (pair,) = sample_pairs(about_run(), twin)
    assert pair.twin is not None
    assert (pair.twin.text, pair.twin.seed) == ("g()", 0)
    assert sample_pairs(about_run(), None)[0].twin is None
    assert sample_pairs(demo_run(), None) == ()


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /",
        "cosmati report x; rm -rf /",
        "cosmati report $(rm -rf /)",
        "cosmati report x\nrm -rf /",
        "cosmati report x | sh",
        "cosmati report 'x",
        "cosmati report x\u202e",
        "cosmati report x # rm",
        "",
    ],
)
def test_only_plain_calls_are_offered_for_pasting(command: str) -> None:
    assert plain_commands([command, *ABOUT.commands]) == ABOUT.commands


def test_packages_that_were_decided_alike_are_one_row() -> None:
    alike = [package(f"p{index:02}", "open/psf", "same; words", index) for index in range(15)]
    first, second = licence_rows([*alike, package("x", "open/copyleft", "GPL")])
    assert (first.class_name, first.num_packages, first.num_rows) == ("open/copyleft", 1, 10)
    (row,) = second.rows
    assert row.names[0] == "p14", "the most rows first"
    assert (len(row.names) + row.num_more, row.num_rows) == (15, sum(range(15)))
    assert row.evidence == ("same", "words")


def test_sources_are_one_row_a_class() -> None:
    rows = [SourceRow("b", f"s{i}", 10 * i, i, f"L{i % 2}", "declared") for i in range(1, 6)]
    first, second = source_classes([*rows, SourceRow("a", "only", 1, 1, "MIT", "declared")])
    assert (first.class_name, first.names, first.licences) == ("a", "only", "MIT (1)")
    assert (second.num_rows, second.num_packages) == (150, 15)
    assert second.names == "s5; s4; s3; …"
    assert second.licences == "L1 (9), L0 (6)"


def measured_run() -> RunView:
    metrics = {
        "bits_per_byte": ((5, 3.0), (10, 2.0)),
        "loss/all": ((5, 2.0), (10, 1.5)),
        f"loss/{CLASSES[0]}": ((5, 2.2), (10, 1.7)),
        "loss/elsewhere": ((5, 9.0), (10, 9.0)),
    }
    return replace(demo_run(), metrics=metrics)


def test_the_loss_is_drawn_in_training_on_held_out_rows_and_by_class() -> None:
    run = measured_run()
    plot = loss_figure(run, LIGHT, twin=replace(run, metrics={"loss/all": ((10, 1.4),)})).plot
    assert [one["name"] for one in plot["data"]] == [
        "training",
        "held out, all classes",
        f"held out, {CLASSES[0]}",
        "held out, without the policy",
    ]
    assert plot["data"][2]["y"] == [2.2, 1.7]
    names = [name for name in run_figures(run, PAGE) if name.startswith("metric-")]
    assert names == ["metric-0", "metric-3"], "what the loss figure has isn't drawn again"


def test_the_first_training_steps_do_not_press_the_curves_together() -> None:
    run = replace(measured_run(), losses=((1, 9.0), (5, 2.1), (10, 1.4)))
    framed = loss_figure(run, LIGHT).plot["layout"]["yaxis"]["range"]
    assert framed[0] < 1.4
    assert 2.2 < framed[1] < 3.0
    assert "lie above the frame" in plain(render_report(title="t", run=run))
    assert "range" not in loss_figure(replace(run, losses=((1, 2.2), (5, 2.1))), LIGHT).plot["layout"]["yaxis"]
    assert "range" not in loss_figure(demo_run(), LIGHT).plot["layout"]["yaxis"]


def test_a_class_has_one_colour_wherever_it_stands() -> None:
    run = measured_run()
    figures = run_figures(run, PAGE)
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    for figure in figures.values():
        for trace in figure.plot["data"]:
            name = str(trace.get("name", "")).removeprefix("held out, ")
            if name in found:
                found[name].add(trace.get("marker", {}).get("color") or trace["line"]["color"])
        for text in figure.plot["layout"]["yaxis"].get("ticktext", ()):
            for name, colours in found.items():
                if text.replace("<br>", "").endswith(f"> {name}"):
                    colours.add(text.split('"color:')[1].split('"')[0])
    assert found[CLASSES[0]] == {"var(--series-0)"}
    assert all(len(colours) <= 1 for colours in found.values()), found
    assert len({colour for colours in found.values() for colour in colours}) == sum(map(bool, found.values()))
    page = plain(render_report(title="t", run=run))
    assert f'mark-0 round-0" aria-hidden="true"></span>{CLASSES[0]}' in page


def test_classes_without_weight_are_folded_and_stay_in_the_csv() -> None:
    figure = heat_map_figure(demo_facts(), "opening", LIGHT)
    assert figure.plot["layout"]["yaxis"]["ticktext"] == ["public-domain"]
    assert len(figure.plot["data"][0]["z"]) == 1
    assert all(name in figure.csv for name in CLASSES)
    assert "Not drawn, for they have no weight in this phase" in plain(render_report(title="t", run=demo_run()))


def test_what_is_not_promised_is_no_failure() -> None:
    page = plain(render_report(title="t", run=demo_run()))
    assert '<li class="open"><strong>Not promised</strong> <code>elastic</code> because' in page
    assert "Broken" not in Page(page).text
