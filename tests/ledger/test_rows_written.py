"""Rows of an answer are written as they are, each character and each row, but for what would act on who reads them."""

from __future__ import annotations

import json
import math
from datetime import date
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest

from cosmati.ledger.derived.views import MAX_TABLE_ROWS, written


def test_a_line_of_json_holds_letters_of_any_script_as_they_are() -> None:
    assert list(written(("name", "größe"), iter([("Łódź 数\n\x1b", None)]), "json")) == [
        '{"name": "Łódź 数\\n\\u001b", "größe": null}'
    ]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (True, "true"),
        (0, "0"),
        (-0.5, "-0.5"),
        (1e300, "1e+300"),
        (math.inf, '"inf"'),
        (-math.inf, '"-inf"'),
        (math.nan, '"nan"'),
        ([], "[]"),
        ((1, [math.inf, None]), '[1, ["inf", null]]'),
        ({1: (math.nan,), None: {True: "é"}}, '{"1": ["nan"], "None": {"True": "é"}}'),
        (Decimal("1.50"), '"1.50"'),
        (date(2024, 2, 29), '"2024-02-29"'),
        (MappingProxyType({}), '"{}"'),
        ("=1+1", '"=1+1"'),
    ],
)
def test_what_json_has_no_word_for_is_a_text_at_any_depth(value: Any, told: str) -> None:
    assert list(written(("value",), iter([(value,), (value,)]), "json")) == [f'{{"value": {told}}}'] * 2


def test_a_row_that_has_not_a_value_for_each_name_is_no_object() -> None:
    for row in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"zip\(\)"):
            list(written(("one", "two"), iter([row]), "json"))


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, ""),
        ("", ""),
        (0, "0"),
        (-1.5, "-1.5"),
        (False, "False"),
        ("=1", "'=1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("1=+-@", "1=+-@"),
        ("a,b", '"a,b"'),
        ('"', '""""'),
        ("é\x1b[2J\n", "é\\x1b[2J\\n"),
    ],
)
def test_a_cell_of_csv_is_no_formula_and_no_control_code(value: Any, cell: str) -> None:
    assert list(written(("first", "@last"), iter([("x", value), (value, "x")]), "csv")) == [
        "first,'@last",
        f"x,{cell}",
        f"{cell},x",
    ]


def test_a_table_has_columns_as_wide_as_their_widest_cell_and_none_after_the_last() -> None:
    rows = [(None, 1 / 3, "wider\tstill"), (12, math.nan, ""), (True, 1234567.0, "-")]
    assert list(written(("n", "value", "text"), iter(rows), "table")) == [
        "n     value        text",
        "–     0.333333     wider\\tstill",
        "12    nan",
        "True  1.23457e+06  -",
    ]
    assert list(written(("a", "bcd"), iter([]), "table")) == ["a  bcd"]


@pytest.mark.parametrize("form", ["table", "csv", "json"])
@pytest.mark.parametrize("more", [-1, 0, 1, 2, 50])
def test_a_table_says_where_it_ends_and_the_other_forms_have_all(form: Any, more: int) -> None:
    number = MAX_TABLE_ROWS + more
    lines = list(written(("row",), ((row,) for row in range(number)), form))
    if form == "json":
        assert [json.loads(line)["row"] for line in lines] == list(range(number))
        return
    assert lines[0] == "row"
    told = [f"... and more: the first {MAX_TABLE_ROWS} rows are shown. --format csv or json has all."]
    assert lines[1:] == (
        [str(row) for row in range(number)]
        if form == "csv" or more <= 0
        else [*(str(row) for row in range(MAX_TABLE_ROWS)), *told]
    )
