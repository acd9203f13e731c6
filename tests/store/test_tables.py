"""Tables of studies and stores, read back by pyarrow and by the csv module, against the records."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from cosmati.records.study import CostProfile
from cosmati.store import tables
from cosmati.store.tables import store_tables, study_tables, write_tables
from tests.store.samples import HOSTILE, indexed, run_record, small_study, write_run, write_study


def parsed(text: str, like: Any) -> Any:
    if text == "":
        return None if not isinstance(like, str) else ""
    return {"True": True, "False": False}[text] if isinstance(like, bool) else type(like)(text)


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def same(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    assert len(found) == len(rows)
    for one, row in zip(found, rows, strict=True):
        assert list(one) == list(row)
        for name, value in row.items():
            got = parsed(one[name], value) if isinstance(one[name], str) and not isinstance(value, str) else one[name]
            if isinstance(value, float) and math.isnan(value):
                assert math.isnan(got)
            else:
                assert got == value or (value is None and got == "")


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_study_comes_back(tmp_path: Path, form: Any, name: str) -> None:
    record = small_study(name, task=name, price_per_hour=None, costs=(CostProfile("fast", 0, 10, 0.1 + 0.2),))
    final = replace(record.runs[0].final, quality=math.nan, flops=1e300 / 3)
    record = replace(record, runs=(replace(record.runs[0], final=final), *record.runs[1:]))
    tables = study_tables(record)
    files = write_tables(tables, tmp_path / "it's [out]", form)
    assert [path.name for path in files] == [f"{one}.{form}" for one in ("runs", "points", "parts", "arms", "costs")]
    for path, table in zip(files, tables.values(), strict=True):
        rows = list(table.rows)
        assert list(table.columns) == list(rows[0])
        same(read(path), rows)
    runs = read(files[0])
    assert [(row["arm"], float(row["budget"]), int(row["seed"])) for row in runs] == [
        (run.arm, run.budget, run.seed) for run in record.runs
    ]
    assert [float(row["seconds"]) for row in runs] == [run.final.seconds for run in record.runs]
    assert math.isnan(float(runs[0]["quality"]))
    assert {row["study"] for row in runs} == {name}
    assert len(read(files[1])) == sum(len(run.points) for run in record.runs)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_store_comes_back(tmp_path: Path, form: Any) -> None:
    write_study(tmp_path / "store" / "s", small_study())
    for number, name in enumerate(HOSTILE):
        metrics = {name: number / 3, "accuracy": 0.5}
        write_run(
            tmp_path / "store" / f"r{number}", run_record(name, metrics=metrics, recipe_text=json.dumps({name: 1}))
        )
    index = indexed(tmp_path / "store")
    runs, metrics, facts = map(read, write_tables(store_tables(index), tmp_path / "out", form))
    expected = {run.key: run for run in index.runs(limit=1000)}
    assert {row["key"] for row in runs} == set(expected)
    for row in runs:
        run = expected[row["key"]]
        assert (row["name"], row["path"], json.loads(row["methods"])) == (run.name, run.path, list(run.methods))
        assert (float(row["quality"]), int(row["seed"])) == (run.quality, run.seed)
    found = {(row["key"], row["name"]): float(row["value"]) for row in metrics}
    assert found == {(key, name): value for key, run in expected.items() for name, value in run.metrics.items()}
    by_recipe: dict[str, dict[str, Any]] = {}
    for row in facts:
        by_recipe.setdefault(row["recipe"], {})[row["name"]] = json.loads(row["value"])
    assert all(by_recipe[run.recipe] == run.facts for run in expected.values())


def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    tables = study_tables(small_study(runs=()))
    paths = write_tables(tables, tmp_path, "parquet")
    assert pyarrow.parquet.read_table(paths[1]).column_names == list(tables["points"].columns)
    (tmp_path / "store").mkdir()
    assert [len(read(path)) for path in write_tables(store_tables(indexed(tmp_path / "store")), tmp_path, "csv")] == [
        0
    ] * 3


def test_what_costs_nothing_costs_nothing() -> None:
    for price, expected in ((0.0, {0.0}), (None, {None}), (3600.0, None)):
        record = small_study(price_per_hour=price)
        rows = list(study_tables(record)["runs"].rows)
        assert {row["cost"] for row in rows} == (expected or {run.final.seconds for run in record.runs})


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
def test_pages_of_a_store_hold_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setattr(tables, "_PAGE", 3)
    for number in range(num):
        write_run(tmp_path / f"r{number}", run_record(f"run {number}"))
    rows = list(store_tables(indexed(tmp_path))["runs"].rows)
    assert [row["name"] for row in rows] == [f"run {number}" for number in range(num)]


def test_a_store_that_grows_while_its_written_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PAGE", 5)
    write_study(tmp_path / "m", small_study("m", seeds=range(5)))
    index = indexed(tmp_path)
    before = sorted(run.key for run in index.runs(limit=1000))
    rows = iter(store_tables(index)["runs"].rows)
    found = [next(rows)["key"]]
    write_study(tmp_path / "a", small_study("a"))
    write_study(tmp_path / "m", small_study("m", seeds=range(6)))
    index.refresh()
    assert sorted([*found, *(row["key"] for row in rows)]) == before
