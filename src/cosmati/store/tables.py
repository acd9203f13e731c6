"""Studies and stores as tidy tables: Parquet or CSV, a row for each thing and a column for each fact of it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmati.records.study import EvaluationPoint, StudyRecord
from cosmati.storage.atomic import replace_file
from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex
from cosmati.store.parquet import write_parquet

Form = Literal["parquet", "csv"]
_PAGE = 10_000
_CELL = {"arm": "VARCHAR", "budget": "DOUBLE", "seed": "BIGINT"}
_POINT = {
    "step": "BIGINT",
    "seconds": "DOUBLE",
    "quality": "DOUBLE",
    "rows": "BIGINT",
    "tokens": "BIGINT",
    "flops": "DOUBLE",
}
_RUN = {
    "key": "VARCHAR",
    "path": "VARCHAR",
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "study": "VARCHAR",
    "arm": "VARCHAR",
    "is_baseline": "BOOLEAN",
    "task": "VARCHAR",
    "methods": "VARCHAR",
    "hardware": "VARCHAR",
    "budget": "DOUBLE",
    "seed": "BIGINT",
    "status": "VARCHAR",
    "started": "VARCHAR",
    "ended": "VARCHAR",
    "steps": "BIGINT",
    "rows": "BIGINT",
    "tokens": "BIGINT",
    "flops": "DOUBLE",
    "seconds": "DOUBLE",
    "cost": "DOUBLE",
    "quality_name": "VARCHAR",
    "higher_is_better": "BOOLEAN",
    "quality": "DOUBLE",
    "is_governed": "BOOLEAN",
    "recipe": "VARCHAR",
}


@dataclass(frozen=True)
class Table:
    """Rows by column, with the columns' SQL types; what a row lacks isn't known."""

    columns: Mapping[str, str]
    rows: Iterable[Mapping[str, Any]]


def study_tables(record: StudyRecord) -> dict[str, Table]:
    """Return a study's tables: `runs`, `points`, `parts` (seconds by part of the work), `arms` and `costs`."""
    price = record.price_per_hour
    cells = [({"arm": run.arm, "budget": run.budget, "seed": run.seed}, run) for run in record.runs]
    about = {"study": record.name, "task": record.task, "hardware": record.hardware}
    about |= {"quality_name": record.quality_name}
    up = {"higher_is_better": record.higher_is_better}
    runs = [
        {
            **about,
            **up,
            **cell,
            "is_baseline": run.arm == record.baseline_arm,
            "run_id": run.run_id,
            **_point(run.final),
            "cost": None if price is None else run.final.seconds / 3600 * price,
        }
        for cell, run in cells
    ]
    run_columns = {**dict.fromkeys(about, "VARCHAR"), "higher_is_better": "BOOLEAN", **_CELL, "is_baseline": "BOOLEAN"}
    arms = [
        {
            "arm": arm.name,
            "is_baseline": arm.name == record.baseline_arm,
            "description": arm.description,
            "methods": json.dumps(arm.methods, ensure_ascii=False),
            "opponent": arm.opponent,
            "source": arm.source,
            "num_trials": len(arm.search.trials) if arm.search else 0,
            "recipe_text": arm.recipe_text,
        }
        for arm in record.arms
    ]
    arm_columns = dict.fromkeys(arms[0] if arms else (), "VARCHAR") | {"is_baseline": "BOOLEAN", "num_trials": "BIGINT"}
    return {
        "runs": Table({**run_columns, "run_id": "VARCHAR", **_POINT, "cost": "DOUBLE"}, runs),
        "points": Table({**_CELL, **_POINT}, [{**cell, **_point(one)} for cell, run in cells for one in run.points]),
        "parts": Table(
            {**_CELL, "part": "VARCHAR", "seconds": "DOUBLE"},
            [{**c, "part": name, "seconds": s} for c, run in cells for name, s in run.seconds_by_part.items()],
        ),
        "arms": Table(arm_columns, arms),
        "costs": Table(
            {"arm": "VARCHAR", "turn": "BIGINT", "steps": "BIGINT", "seconds": "DOUBLE"},
            [{"arm": c.arm, "turn": c.turn, "steps": c.steps, "seconds": c.seconds} for c in record.costs],
        ),
    }


def _point(point: EvaluationPoint) -> dict[str, Any]:
    return {name: getattr(point, name) for name in _POINT}


def store_tables(index: RunIndex) -> dict[str, Table]:
    """Return a store's tables: `runs`, their `metrics`, and the `facts` of the recipes that they name, as JSON."""
    text = {"name": "VARCHAR", "value": "VARCHAR"}
    facts = index.query("SELECT recipe, facts FROM recipes ORDER BY recipe")
    fact_rows = (
        {"recipe": recipe, "name": name, "value": json.dumps(value, ensure_ascii=False)}
        for recipe, found in facts
        for name, value in json.loads(found).items()
    )
    metrics = index.query(
        "SELECT runs.key, one.key, one.value FROM runs, json_each(runs.metrics) AS one ORDER BY runs.key, one.key"
    )
    metric_rows = ({"key": key, "name": name, "value": value} for key, name, value in metrics)
    return {
        "runs": Table(_RUN, _runs(index)),
        "metrics": Table({"key": "VARCHAR", "name": "VARCHAR", "value": "DOUBLE"}, metric_rows),
        "facts": Table({"recipe": "VARCHAR", **text}, fact_rows),
    }


def _runs(index: RunIndex) -> Iterator[dict[str, Any]]:
    for run in index.each_run(RunFilter(), page=_PAGE):
        found = {name: getattr(run, name) for name in _RUN}
        yield found | {"methods": json.dumps(run.methods, ensure_ascii=False)}


def write_tables(tables: Mapping[str, Table], folder: Path, form: Form) -> list[Path]:
    """Write each table as a file of its name, and return the files.

    CSV has one header, an empty field where something isn't known, and `nan` or `inf` for what isn't finite.

    Raises:
        MissingExtraError: Parquet needs DuckDB, and it isn't installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables.items():
        path = folder / f"{name}.{form}"
        if form == "parquet":
            write_parquet(path, table.rows, table.columns)
        else:
            out = io.StringIO()
            writer = csv.DictWriter(out, table.columns, lineterminator="\r\n")
            writer.writeheader()
            writer.writerows(table.rows)
            replace_file(path, out.getvalue().encode("utf-8", "replace"))
        written.append(path)
    return written
