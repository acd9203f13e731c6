"""The method cards are whole: every method, every option, and nothing that isn't there."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cosmati.methods.functional
from cosmati import methods
from cosmati.core.method import Method
from cosmati.train.config import RunConfig
from tests.methods.cases import CASES, Case, digits, network_of, text

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from cards import cards  # noqa: E402  (the docs' own folder)
from cards.overview import gains_svg  # noqa: E402  (the docs' own folder)

NOTES = cards.read_notes()
MEASURED = {which: cards.read_measured(which) for which in cards.MEASURED}
each_method = pytest.mark.parametrize("kind", methods.ALL, ids=lambda kind: kind.__name__)


def test_every_method_has_a_note_in_the_methods_order() -> None:
    assert list(NOTES) == [kind.__name__ for kind in methods.ALL]


@each_method
def test_the_card_is_whole(kind: type[Method]) -> None:
    name = kind.__name__
    note = NOTES[name]
    page = cards.card(name, note, MEASURED)
    assert type(cards.instance(name, note)) is kind
    assert page.startswith(f"# {name}\n")
    for option, _, _, meaning in cards.options_of(kind):
        assert len(meaning) > 5, f"{name}.{option} has no meaning in its docstring"
        assert f"| `{option}` |" in page
    for other in note.badly:
        assert other in NOTES
        assert other != name
    for said in (note.when, note.cost, note.published, note.try_first, *note.badly.values()):
        assert said.endswith(".")
    assert "| Settings to try first | " in page
    assert f"| Input shapes | {'one' if cards.instance(name, note).shapes(cards.BUDGET) == 1 else 'at most'}" in page
    assert "## Cost here" in page
    assert "## Gain here" in page
    for svg in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(svg)


@each_method
def test_functions_stand_on_the_card_of_their_method(kind: type[Method]) -> None:
    page = cards.card(kind.__name__, NOTES[kind.__name__], MEASURED)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown = re.findall(r"^cf\.(\w+)\(", blocks[-1], re.MULTILINE)
    assert shown == cards.functions_of(kind)


@pytest.mark.filterwarnings("ignore:.* changes nothing")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_examples_run(case: Case) -> None:
    """Those of the trainer make a method; those of a loop of one's own act on a model and a batch."""
    note = NOTES[str(case)]
    page = cards.card(str(case), note, MEASURED)
    first, *rest = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, object] = {}
    exec(compile(first, str(case), "exec"), made)
    assert [type(method) for method in made["methods"]] == [type(case.on)]  # type: ignore[attr-defined]
    shown = cards.functions_of(type(case.on))
    assert len(rest) == (2 if shown else 0)
    if not shown:
        return
    torch.manual_seed(0)
    model = network_of(case)
    (images, labels), (tokens, targets) = ((x[:8], y[:8]) for x, y in (digits(), text()))
    scope = {"model": model, "images": images, "labels": labels, "tokens": tokens, "targets": targets}
    scope |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "elapsed": 0.6, "step": 1}
    scope |= {"cf": cosmati.methods.functional, "torch": torch, "F": F, "copy": copy}
    exec(compile(rest[0], str(case), "exec"), scope)
    assert any(f"cf.{name}(" in rest[0] for name in shown)
    assert len(rest[0].splitlines()) <= 3
    result = scope.get("loss", scope.get("logits"))
    assert result is None or bool(torch.as_tensor(result).isfinite().all())


def test_signatures_are_those_of_the_functions() -> None:
    """Python reads them back: names, order, kinds and defaults, strings included."""
    for name in cosmati.methods.functional.__all__:
        shown = cards.signature_of(name).removeprefix("cf.")
        head, _, _ = shown.rpartition(" -> ")
        read = ast.parse(f"def {head}: ...").body[0]
        assert isinstance(read, ast.FunctionDef)
        real = inspect.signature(getattr(cosmati.methods.functional, name)).parameters.values()
        assert [a.arg for a in (*read.args.args, *read.args.kwonlyargs)] == [p.name for p in real]
        keyword_only = [p for p in real if p.kind is p.KEYWORD_ONLY]
        assert [a.arg for a in read.args.kwonlyargs] == [p.name for p in keyword_only]
        defaults = [*read.args.defaults, *(d for d in read.args.kw_defaults if d)]
        assert [ast.literal_eval(d) for d in defaults] == [p.default for p in real if p.default is not p.empty]


ROW = {
    "method": "EMA",
    "arm": "EMA of a kind",
    "budget": 60,
    "n": 3,
    "baseline": 1.0,
    "value": 0.9,
    "difference": -0.1,
    "low": None,
    "high": 0.1,
}
JUDGED = {"seconds": "no difference shown", "step": "slower"}
GAIN = {
    "metric": "loss",
    "lower_is_better": True,
    "hardware": "here",
    "command": "run",
    "rows": [ROW],
    "speedup": [
        {
            "method": "EMA",
            "arm": "another EMA",
            **{axis: {"verdict": "faster", "sentence": "Not this."} for axis in JUDGED},
        },
        {
            "method": "EMA",
            "arm": "EMA of a kind",
            **{axis: {"verdict": verdict, "sentence": f"Said by {axis}."} for axis, verdict in JUDGED.items()},
        },
    ],
}


def test_a_card_says_what_the_study_says_of_its_arm_and_no_more() -> None:
    page = cards.card("EMA", NOTES["EMA"], {"cost": {}, "gain": {"tasks": {"language": GAIN}}})
    assert "- By training time, **no difference shown**: Said by seconds.\n" in page
    assert "- By steps, **slower**: Said by step.\n" in page
    assert "Not this." not in page
    assert "faster" not in page
    assert "| 60 | 1.0000 | 0.9000 | -0.1000 (open to +0.1000) |" in page
    [svg] = re.findall(r"<svg.*?</svg>", page.split("## Gain here")[1])
    assert "left of the dashed line is better" in "".join(ET.fromstring(svg).itertext())
    assert "Not measured here." in page.split("## Gain here")[0]
    assert "Not measured here." not in page.split("## Gain here")[1]


def test_what_was_not_measured_is_said_plainly() -> None:
    page = cards.card("MixUp", NOTES["MixUp"], {"cost": {}, "gain": {}})
    assert page.endswith("## Cost here\n\nNot measured here.\n\n## Gain here\n\nNot measured here.\n\n")


def test_every_function_is_on_a_card() -> None:
    shown = {name for kind in methods.ALL for name in cards.functions_of(kind)}
    assert shown == set(cosmati.methods.functional.__all__)


def test_every_pair_has_been_run() -> None:
    names = [kind.__name__ for kind in methods.ALL]
    expected = {f"{a}|{b}" for a, b in itertools.combinations_with_replacement(names, 2)}
    assert set(MEASURED["pairs"]) == {"vision", "language"}
    for part in MEASURED["pairs"].values():
        assert part["methods"] == names, "pairs.json isn't of these methods: run `make methods`"
        assert set(part["cells"]) == expected
        for cell in part["cells"].values():
            assert cell["outcome"] in {"trains", "refused", "unneeded"}
            assert cell["outcome"] == "trains" or len(cell["reason"]) > 40


def test_the_overview_shows_all_and_is_well_formed() -> None:
    page = cards.card_pages()["index.md"]
    assert all(f"]({name.lower()}.md) |" in page for name in NOTES)
    gains, compose = page.split("## Which compose")
    assert len([ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", gains)]) == 3
    pictures = re.findall(r"<svg.*?</svg>", compose, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        cells = [element for element in ET.fromstring(picture).iter() if element.tag.endswith("title")]
        assert len(cells) == len(NOTES) * (len(NOTES) + 1) // 2


def test_the_overview_is_sorted_by_the_gain_measured_here() -> None:
    page = cards.card_pages()["index.md"]
    by_gain, rest = page.split("### Not measured here")
    *_, images, text, as_used = re.split(r"^### ", by_gain, flags=re.MULTILINE)
    measured = set()
    for table, task, axis in (
        (images, "vision", "seconds"),
        (text, "language", "seconds"),
        (as_used, "language-as-used", "step"),
    ):
        part = MEASURED["gain"]["tasks"][task]
        told = {arm["arm"]: arm[axis] for arm in part["speedup"] if arm["method"] in NOTES}
        rows = re.findall(r"^\| \[(.+?)\]\((\w+)\.md\) \| (.+?) \| (.+?) \| .+ \|$", table, re.MULTILINE)
        assert {arm for arm, *_ in rows} == set(told)
        for arm, _, gain, verdict in rows:
            assert (gain, verdict) == (told[arm]["text"], told[arm]["verdict"])
            assert re.search(r"\(\S+ to \S+, n\s=\s\d+\)$", gain), "without its interval"
        ratios = [told[arm]["ratio"] or 0.0 for arm, *_ in rows]
        assert ratios == sorted(ratios, reverse=True)
        assert part["hardware"] in table
        assert all(line in table for line in part["noise"])
        measured |= {method for _, method, *_ in rows}
    unmeasured = set(re.findall(r"^\| \[\w+\]\((\w+)\.md\)", rest, re.MULTILINE))
    assert measured | unmeasured == {name.lower() for name in NOTES}
    assert not measured & unmeasured


def test_the_picture_of_gains_shows_each_interval() -> None:
    told = [
        {"arm": "a", "seconds": {"ratio": 2.0, "low": 1.0, "high": 4.0, "verdict": "faster"}},
        {"arm": "b", "seconds": {"ratio": 0.5, "low": None, "high": None, "verdict": "slower"}},
        {"arm": "c", "seconds": {"ratio": None, "low": None, "high": None, "verdict": "no difference shown"}},
    ]
    root = ET.fromstring(gains_svg("Text", told, "seconds"))
    dots = [(float(dot.attrib["cx"]), dot.attrib["fill"]) for dot in root if dot.tag == "circle"]
    lines = [[float(x.split(",")[0]) for x in line.attrib["points"].split()] for line in root if line.tag == "polyline"]
    quarter, half, one, two, four = (line[0] for line in lines[:5])
    assert quarter < half < one < two < four
    assert dots == [(two, "var(--good)"), (half, "var(--bad)")]
    assert lines[5] == [one, four]
    assert lines[6][0] < quarter
    assert lines[6][1] > four
    assert [text.text for text in root if text.tag == "text"][-3:] == ["a", "b", "c"]


@each_method
def test_published_figures_say_where(kind: type[Method]) -> None:
    published = NOTES[kind.__name__].published
    if re.search(r"\d", published):
        assert re.search(r"arXiv \d{4}\.\d{4,5}|\]\((https://|composer:)", published)
    for url in re.findall(r"\]\((.*?)\)", cards.linked(published)):
        assert re.fullmatch(r"https://[\w./-]+", url)


def test_links_are_made_once() -> None:
    made = cards.linked("[C](composer:sam), arXiv 2010.01412, 2007.08554 and [x](https://arxiv.org/abs/1905.04899)")
    assert made == (
        "[C](https://docs.mosaicml.com/projects/composer/en/stable/method_cards/sam.html), "
        "[arXiv 2010.01412](https://arxiv.org/abs/2010.01412), [arXiv 2007.08554](https://arxiv.org/abs/2007.08554) "
        "and [x](https://arxiv.org/abs/1905.04899)"
    )


@each_method
def test_settings_to_try_first_are_taken(kind: type[Method]) -> None:
    note = NOTES[kind.__name__]
    for code in re.findall(r"`([^`]*=[^`]*)`", note.try_first):
        call = ast.parse(f"f({code})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if "precision" in given:
            RunConfig(budget="1ba", **given)
        else:
            assert dataclasses.replace(cards.instance(kind.__name__, note), **given)  # type: ignore[type-var]


@pytest.mark.long
def test_pages_are_written_once(tmp_path: Path) -> None:
    cards.write_cards(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(times) == len(NOTES) + 1
    cards.write_cards(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
