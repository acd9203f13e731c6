"""Signed YAML has plain values alone, and what isn't allowed is told with its line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cosmati.routing.strict_yaml import line_of, load_yaml


def content(text: str) -> Any:
    return load_yaml(text)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", True), ("false", False), ("null", None), ("~", None), ("", None)),
        *(("0", 0), ("-0", 0), ("12", 12), ("-12", -12)),
        *(("0.5", 0.5), ("-1.25", -1.25), ("1e3", 1000.0), ("2.5E-1", 0.25), ("1e+2", 100.0), ("0e0", 0.0)),
        # Words and numbers of YAML 1.1, and whatever goes on after a plain one.
        *((text, text) for text in ("yes", "no", "on", "off", "True", "TRUE", "Null", "NULL", "truer", "nullx", "~x")),
        *((text, text) for text in ("012", "0x1f", "1_000", "1:30", "+1", ".5", "1.", "1.e3", "1e", "00.5", "1.5x")),
        *((text, text) for text in (".inf", ".nan", "2026-11-30", "=", "<<", "a b", "1 2")),
        *(("'1'", "1"), ('"true"', "true")),
    ],
)
def test_a_plain_scalar_is_read_as_yaml_1_2_has_it(text: str, value: object) -> None:
    found = content(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)
    assert content(f"[{text}]") == ([value] if text else [])


def test_a_number_has_the_sign_that_was_written() -> None:
    assert math.copysign(1, content("-0.0")) == -1


def test_a_document_is_given_with_its_nodes() -> None:
    value, node = load_yaml("a: [1, {b: 2}]\n")
    assert value == {"a": [1, {"b": 2}]}
    assert node is not None
    assert node.start_mark.line == 0
    assert load_yaml("") == (None, None)
    assert load_yaml("# only a comment\n") == (None, None)


def test_equal_strings_are_no_aliases_and_lists_hold_equal_things() -> None:
    assert content("[a, a, {b: 1}, {b: 1}]") == ["a", "a", {"b": 1}, {"b": 1}]


def refusal(text: str) -> str:
    with pytest.raises(ValueError, match=r"^line [0-9]+: ") as caught:
        load_yaml(text)
    assert caught.value.__cause__ is not None
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: &x 2", "line 2: anchors and aliases aren't allowed"),
        ("a:\n- &x []", "line 2: anchors and aliases aren't allowed"),
        ("a: 1\n\nb: *x", "line 3: anchors and aliases aren't allowed"),
        ("&x a: 1", "line 1: anchors and aliases aren't allowed"),
        ("a: 1\nb: !!str 2", "line 2: tags aren't allowed: tag:yaml.org,2002:str"),
        ("!x {a: 1}", "line 1: tags aren't allowed: !x"),
        ("- !x a", "line 1: tags aren't allowed: !x"),
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' is given twice"),
        ("a: 1\n'a': 3", "line 2: key 'a' is given twice"),
        ("b:\n  - {a: 1}\n  - {c: 1,\n     c: 2}", "line 4: key 'c' is given twice"),
        ("a: 1\n2: 3", "line 2: key 2 isn't a string; quote it"),
        ("true: 3", "line 1: key True isn't a string; quote it"),
        ("null: 3", "line 1: key None isn't a string; quote it"),
        ("? []\n: 3", "line 1: key [] isn't a string; quote it"),
        ("? [a]\n: 3", "line 1: key ['a'] isn't a string; quote it"),
        ("b: 1\n? {a: [1, {c: 2}]}\n: 3", "line 2: key {'a': [1, {'c': 2}]} isn't a string; quote it"),
        ("? {a: 1, a: 2}\n: 3", "line 1: key 'a' is given twice"),
        ("<<: {a: 1}\n<<: {a: 2}", "line 2: key '<<' is given twice"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(text: str, why: str) -> None:
    assert refusal(text) == why


def test_keys_that_differ_are_keys() -> None:
    assert content("'1': a\n'2': b\n1a: c\n") == {"1": "a", "2": "b", "1a": "c"}
    assert content("- {a: 1}\n- {a: 2}") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ("{a: ", "}")])
def test_twenty_levels_of_lists_and_mappings_are_read_and_no_more(before: str, after: str) -> None:
    value = content(before * 20 + "1" + after * 20)
    for _ in range(20):
        value = value[0] if before == "[" else value["a"]
    assert value == 1
    assert refusal(f"# first\n{before * 21}1{after * 21}") == "line 2: lists and mappings are nested deeper than 20"
    # How many stand beside one another doesn't count.
    assert len(content("[" + "[[1]]," * 50 + "]")) == 50


def test_a_number_that_python_cannot_read_is_told_with_its_line() -> None:
    why = refusal("a: 1\nb: " + "9" * 5000)
    assert why.startswith("line 2: Exceeds the limit")
    assert "digits" in why


def test_characters_that_yaml_lacks_are_told_with_line_and_number() -> None:
    assert refusal("a: 1\nb: \x07\n") == "line 2: the character #x0007 isn't allowed"
    assert refusal("\x00") == "line 1: the character #x0000 isn't allowed"
    assert refusal("a\n\n\nb\x1b[0m\n\x07") == "line 4: the character #x001b isn't allowed"


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("a: 1\nb: [1,\n2", 3, ["while parsing a flow sequence, expected ',' or ']'"]),
        ("a: 'x\n\n", 3, ["quoted scalar", "unexpected end of stream"]),
        ("a: b: c", 1, ["mapping values are not allowed here"]),
        ("a: 1\n\tb: 2", 2, ["cannot start any token"]),
        ("a: 1\n---\nb: 2", 2, ["expected a single document", "but found another document"]),
        ("%FOO\n%YAML 2.0\n---\na", 2, ["incompatible YAML document"]),
    ],
)
def test_what_is_no_yaml_is_told_with_line_and_both_halves_of_why(text: str, line: int, parts: list[str]) -> None:
    why = refusal(text)
    assert why.startswith(f"line {line}: ")
    assert all(part in why for part in parts)
    assert "None" not in why


TEXT = """# first
a: 1
b:
  - x
  - c: 2
    d:

      e: [3,
          4]
"""


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ((), 2),
        (("a",), 2),
        (("b",), 3),
        (("b", 0), 4),
        (("b", 1), 5),
        (("b", 1, "c"), 5),
        (("b", 1, "d"), 6),
        (("b", 1, "d", "e"), 8),
        (("b", 1, "d", "e", 0), 8),
        (("b", 1, "d", "e", 1), 9),
        # What isn't there is looked for around it.
        (("z",), 2),
        (("z", "b"), 2),
        (("b", 2), 3),
        (("b", "x"), 3),
        (("b", 1, "z", "d"), 5),
        (("b", 1, "d", "e", 2), 8),
        (("a", "z"), 2),
        (("a", 0), 2),
        (("b", 0, 0), 4),
    ],
)
def test_a_place_has_the_line_of_its_key_or_of_what_is_around_it(place: tuple[object, ...], line: int) -> None:
    assert line_of(load_yaml(TEXT)[1], place) == line


def test_nothing_has_the_first_line() -> None:
    assert line_of(None, ("a", 1)) == 1
    assert line_of(load_yaml("\n\na: 1")[1], ()) == 3
