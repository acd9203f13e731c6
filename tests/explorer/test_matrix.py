"""The picture of the pairs shows every cell, in words, shapes and colours, and fits the page of the docs."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

from cosmati.explorer.drawing import Theme
from cosmati.explorer.matrix import matrix_svg
from cosmati.explorer.palette import DARK, LIGHT

NAMES = ("MixUp", "EMA", "A<B & C")
CELLS = dict.fromkeys(itertools.combinations_with_replacement(NAMES, 2), ("trains", "")) | {
    ("MixUp", "EMA"): ("refused", "both own <a thing> & more"),
    ("EMA", "A<B & C"): ("unneeded", "it changes nothing"),
}
WIDTH_OF_THE_PAGE = 736
"""Pixels of the text's column in the docs' theme at 1440."""


def drawn(theme: Theme = "light") -> ET.Element:
    return ET.fromstring(matrix_svg(NAMES, CELLS, "Pairs & more", theme))


def cells_of(picture: ET.Element) -> dict[str, ET.Element]:
    groups = [element for element in picture.iter() if element.tag.endswith("}g")]
    return {group.findtext("{*}title", ""): group for group in groups}


def test_each_pair_has_a_cell_that_says_what_became_of_it() -> None:
    assert list(cells_of(drawn())) == [
        "MixUp: trains",
        "MixUp and EMA: both own <a thing> & more",
        "EMA: trains",
        "MixUp and A<B & C: trains together",
        "EMA and A<B & C: it changes nothing",
        "A<B & C: trains",
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_outcomes_differ_by_colour_and_by_glyph(theme: Theme) -> None:
    cells = cells_of(drawn(theme))
    looks = [(cell.find("{*}rect").get("fill"), cell.findtext("{*}text", "")) for cell in cells.values()]  # type: ignore[union-attr]
    palette = DARK if theme == "dark" else LIGHT
    trains, refused, unneeded = (palette.good, ""), (palette.bad, "×"), (palette.denied, "·")
    assert looks == [trains, refused, trains, trains, unneeded, trains]
    assert len({glyph for _, glyph in (trains, refused, unneeded)}) == 3


def test_thirty_methods_fit_the_page() -> None:
    names = [f"{'LowPrecisionLayerNorm'[: 10 + i % 12]}" + chr(65 + i) for i in range(30)]
    cells = dict.fromkeys(itertools.combinations_with_replacement(names, 2), ("trains", ""))
    picture = ET.fromstring(matrix_svg(names, cells, "Pairs"))
    width, height = (float(side) for side in picture.attrib["viewBox"].split()[2:])
    assert width <= WIDTH_OF_THE_PAGE
    for box in (element for element in picture.iter() if element.tag.endswith("rect") and "x" in element.attrib):
        assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"])
        assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"])
    places = {(e.attrib["x"], e.attrib["y"]) for e in picture.iter() if e.tag.endswith("rect") and "x" in e.attrib}
    assert len(places) == len(cells) + 3
