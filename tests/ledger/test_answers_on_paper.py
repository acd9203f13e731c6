"""Answers are written whole for programs, in a thousand lines for people, and with nothing that a screen would obey."""

from __future__ import annotations

import csv
import datetime
import json
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.derived.views import MAX_TABLE_ROWS, RowForm, _answering, _fetched, _lock, written


def told(form: RowForm, *rows: tuple[Any, ...], names: tuple[str, ...] = ("a", "b")) -> list[str]:
    return list(written(names, iter(rows), form))


# --------------------------------------------------------------------------------------------------------------- JSON


def test_json_is_an_object_a_line_with_the_columns_in_their_order() -> None:
    assert told("json", (1, "x"), (2, None)) == ['{"a": 1, "b": "x"}', '{"a": 2, "b": null}']
    assert told("json") == []
    assert told("json", ("ü", True)) == ['{"a": "ü", "b": true}']
    with pytest.raises(ValueError, match="zip"):
        told("json", (1,))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (0.0, 0.0),
        (-1.5, -1.5),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (Decimal("0.10"), "0.10"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (2**70, 2**70),
        (False, False),
        ([1, math.nan, (2, math.inf)], [1, "nan", [2, "inf"]]),
        ((), []),
        ({3: {"x": math.nan}, "y": (1,)}, {"3": {"x": "nan"}, "y": [1]}),
    ],
)
def test_what_json_has_no_word_for_is_a_text(value: object, plain: object) -> None:
    [line] = told("json", (value, 1))
    assert json.loads(line, parse_constant=pytest.fail) == {"a": plain, "b": 1}


# ---------------------------------------------------------------------------------------------------------------- CSV


def test_csv_has_a_head_and_all_rows_and_can_be_read_again() -> None:
    rows = [("one, two", 'a "b"'), (1.25, None), (True, -3), *((n, n) for n in range(MAX_TABLE_ROWS + 5))]
    lines = told("csv", *rows)
    assert lines[:3] == ["a,b", '"one, two","a ""b"""', "1.25,"]
    assert list(csv.reader(lines)) == [["a", "b"], *(["" if v is None else str(v) for v in row] for row in rows)]
    assert told("csv") == ["a,b"]


@pytest.mark.parametrize("first", "=+-@")
def test_a_text_that_a_spreadsheet_would_run_is_quoted_and_a_number_is_not(first: str) -> None:
    assert told("csv", (f"{first}1+1", f"1{first}1")) == ["a,b", f"'{first}1+1,1{first}1"]
    assert told("csv", names=(f"{first}a", "b")) == [f"'{first}a,b"]
    assert told("csv", (-1, -math.inf)) == ["a,b", "-1,-inf"]


def test_csv_has_a_line_for_each_row_whatever_a_text_holds() -> None:
    assert told("csv", ("x\ny", "\r=1"), ("\x1b[2J", "\t")) == ["a,b", "x\\ny,\\r=1", "\\x1b[2J,\\t"]


# -------------------------------------------------------------------------------------------------------------- table


def test_a_table_has_columns_as_wide_as_their_widest_cell_and_no_trailing_space() -> None:
    assert told("table", (1, "x"), (1000, "y"), names=("a", "long")) == ["a     long", "1     x", "1000  y"]
    assert told("table") == ["a  b"]


def test_numbers_have_six_digits_in_a_table_and_what_is_absent_a_dash() -> None:
    lines = told("table", (0.123456789, 123456789), (None, 1e-9), (math.nan, True), (1.0, ""))
    assert [line.split() for line in lines] == [
        ["a", "b"],
        ["0.123457", "123456789"],
        ["–", "1e-09"],
        ["nan", "True"],
        ["1"],
    ]


def test_nothing_reaches_a_screen_as_a_control_code() -> None:
    lines = told("table", ("\x1b[31m", "a\nb"), ("\u202e\x9b", "é ñ"))
    assert lines == ["a           b", "\\x1b[31m    a\\nb", "\\u202e\\x9b  é ñ"]
    assert told("table", (["\x1b"], "'"), names=("a", "b")) == ["a         b", "['\\x1b']  '"]


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_table_shows_a_thousand_rows_and_says_where_there_are_more(more: int) -> None:
    left = [(n, n) for n in range(MAX_TABLE_ROWS + more)]
    lines = told("table", *left)
    assert MAX_TABLE_ROWS == 1000
    assert lines[1 : MAX_TABLE_ROWS + 1] == [f"{n:<3}  {n}" for n, _ in left[:MAX_TABLE_ROWS]]
    said = ["... and more: the first 1000 rows are shown. --format csv or json has all."]
    assert lines[MAX_TABLE_ROWS + 1 :] == (said if more > 0 else [])


@pytest.mark.parametrize("form", ["json", "csv"])
def test_rows_are_written_as_they_come(form: RowForm) -> None:
    asked: list[int] = []

    def rows() -> Iterator[tuple[int, int]]:
        for number in range(10):
            asked.append(number)
            yield number, number

    lines = written(("a", "b"), rows(), form)
    assert [next(lines), next(lines)][-1] in ("0,0", '{"a": 1, "b": 1}')
    assert len(asked) <= 2


# ----------------------------------------------------------------------------------------------- what answers belong to


class Timer:
    """Takes note of what a timer is asked, and never goes off."""

    made: list[Timer]

    def __init__(self, seconds: float, interrupt: Any) -> None:
        self.seconds, self.interrupt, self.daemon, self.told = seconds, interrupt, False, list[str]()
        self.made.append(self)

    def start(self) -> None:
        assert self.daemon, "a program that ends doesn't wait for it"
        self.told.append("start")

    def cancel(self) -> None:
        self.told.append("cancel")


@pytest.mark.parametrize("error", [None, KeyError("not DuckDB's")])
def test_who_answers_is_timed_and_the_timer_is_taken_away_whatever_comes(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")
    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(Timer, "made", [], raising=False)
    asked: list[str] = []
    caught = nullcontext() if error is None else pytest.raises(KeyError, match="not DuckDB's")
    with caught, _answering(lambda: asked.append("interrupt"), 2.5):
        assert Timer.made[0].told == ["start"]
        if error is not None:
            raise error
    [timer] = Timer.made
    assert (timer.seconds, timer.told, asked) == (2.5, ["start", "cancel"], [])
    timer.interrupt()
    assert asked == ["interrupt"]


def test_what_is_not_asked_for_is_not_fetched() -> None:
    pages = SimpleNamespace(interrupt=lambda: None, fetchmany=pytest.fail)
    assert not isinstance(_fetched(pages, 1.0), list)


def test_a_connection_is_locked_last_and_reads_the_derived_files_alone() -> None:
    ran: list[str] = []
    derived: Any = SimpleNamespace(
        files={"steps": ["/a/s-1", "/a/s-2"], "cells": ["/it's"]}, database=SimpleNamespace(execute=ran.append)
    )
    _lock(derived)
    assert ran == [
        "SET memory_limit = '4GB'",
        "SET allowed_paths = ['/a/s-1', '/a/s-2', '/it''s']",
        "SET enable_external_access = false",
        "SET lock_configuration = true",
        "BEGIN TRANSACTION READ ONLY",
    ]


def test_an_interruption_is_told_with_its_seconds_and_another_refusal_with_the_views() -> None:
    duckdb = pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")
    for error, said in (
        (duckdb.InterruptException("x"), "longer than 60 seconds, and was stopped. Ask for less, or --seconds more."),
        (duckdb.BinderException("no such column"), "can't be answered: no such column\nThe views are steps, cells,"),
    ):
        with pytest.raises(LedgerError) as caught, _answering(lambda: None, 60.0):
            raise error
        assert said in str(caught.value)
        assert caught.value.__cause__ is error
