"""The method cards are whole: every method, every option, and nothing that isn't there."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import cosmati.methods.functional
from cosmati import methods
from cosmati.core.method import Method

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from cards import cards  # noqa: E402  (the docs' own folder)

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
    for text in (note.when, note.cost, note.published):
        assert text.endswith(".")
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if block.startswith("from"):
            ast.parse(block)
    assert "## Cost here" in page
    assert "## Gain here" in page
    for svg in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(svg)


@each_method
def test_functions_stand_on_the_card_of_their_method(kind: type[Method]) -> None:
    page = cards.card(kind.__name__, NOTES[kind.__name__], MEASURED)
    shown = re.findall(r"^cf\.(\w+)\(", page, re.MULTILINE)
    assert shown == cards.functions_of(kind)


def test_every_function_is_on_a_card() -> None:
    shown = {name for kind in methods.ALL for name in cards.functions_of(kind)}
    assert shown == set(cosmati.methods.functional.__all__)


def test_every_pair_has_been_run() -> None:
    names = [kind.__name__ for kind in methods.ALL]
    expected = {f"{a}|{b}" for a, b in itertools.combinations_with_replacement(names, 2)}
    assert set(MEASURED["pairs"]) == {"vision", "language"}
    for part in MEASURED["pairs"].values():
        assert part["methods"] == names
        assert set(part["cells"]) == expected
        for cell in part["cells"].values():
            assert cell["outcome"] in {"trains", "refused", "unneeded"}
            assert cell["outcome"] == "trains" or len(cell["reason"]) > 40


def test_the_overview_shows_all_and_is_well_formed() -> None:
    page = cards.overview(NOTES, MEASURED["pairs"])
    assert all(f"[{name}]({name.lower()}.md)" in page for name in NOTES)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        cells = [element for element in ET.fromstring(picture).iter() if element.tag.endswith("title")]
        assert len(cells) == len(NOTES) * (len(NOTES) + 1) // 2


def test_pages_are_written_once(tmp_path: Path) -> None:
    cards.write_cards(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(times) == len(NOTES) + 1
    cards.write_cards(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
