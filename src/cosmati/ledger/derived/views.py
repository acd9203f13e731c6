"""What SQL can ask: views over the derived tables, by names, and a run of one SELECT that can reach nothing else."""

from __future__ import annotations

import csv
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

from cosmati.errors import LedgerError
from cosmati.ledger.derived.opened import NEVER, DerivedLedger
from cosmati.ledger.derived.rows import SKETCH
from cosmati.ledger.sources import sources_of
from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import members_of
from cosmati.storage.duck import quoted, text

RowForm = Literal["table", "csv", "json"]
MAX_SECONDS = 60.0
MAX_TABLE_ROWS = 1000
_MAX_MEMORY = "4GB"
_FORMULA = ("=", "+", "-", "@")

NAMES: Mapping[str, Mapping[str, str]] = {
    "ledger": {"origin": "VARCHAR", "tree_size": "BIGINT", "root": "VARCHAR", "level": "VARCHAR"},
    "policies": {
        "policy_epoch": "BIGINT",
        "entry": "BIGINT",
        "from_step": "BIGINT",
        "policy": "VARCHAR",
        "signed_as": "VARCHAR",
    },
    "policy": {
        "policy_epoch": "BIGINT",
        "class": "VARCHAR",
        "band": "VARCHAR",
        "phase": "VARCHAR",
        "region": "VARCHAR",
        "weight": "DOUBLE",
        "decision": "VARCHAR",
    },
    "classes": {"policy_epoch": "BIGINT", "class_id": "BIGINT", "class": "VARCHAR"},
    "members": {"class": "VARCHAR", "member": "VARCHAR"},
    "bands": {"policy_epoch": "BIGINT", "band_id": "BIGINT", "band": "VARCHAR"},
    "phases": {
        "policy_epoch": "BIGINT",
        "phase_id": "BIGINT",
        "phase": "VARCHAR",
        "first_step": "BIGINT",
        "end_step": "BIGINT",
    },
    "regions": {"policy_epoch": "BIGINT", "region_id": "BIGINT", "region": "VARCHAR"},
    "routes": {
        "policy_epoch": "BIGINT",
        "route": "BIGINT",
        "region_id": "BIGINT",
        "region": "VARCHAR",
        "route_weight": "DOUBLE",
    },
    "sets": {"reaches": "BIGINT", "policy_epoch": "BIGINT", "region_id": "BIGINT"},
    "attempts": {"attempt": "BIGINT", "entry": "BIGINT", "from_step": "BIGINT", "end_step": "BIGINT"},
    "checkpoints": {
        "entry": "BIGINT",
        "step": "BIGINT",
        "state_digest": "VARCHAR",
        "parameter_root": "VARCHAR",
        "outcome": "VARCHAR",
    },
    "sources": {
        "policy_epoch": "BIGINT",
        "class": "VARCHAR",
        "target": "VARCHAR",
        "licence": "VARCHAR",
        "valid_until": "VARCHAR",
        "origin": "VARCHAR",
        "obtained": "VARCHAR",
        "manifest_sha256": "VARCHAR",
    },
}
"""Small tables, by column; the large ones are views of the Parquet files (`_VIEWS`)."""

_STEP = "f.entry, f.step, f.attempt, f.step < cut AS stands, f.policy_epoch"
_TAUGHT = (
    "c.entry, c.step, c.attempt, c.stands, c.policy_epoch, c.microbatch, c.cell, c.class, c.band, c.phase, t.region, "
    "c.rows"
)
_REACHED = """
    JOIN sets s ON s.policy_epoch = c.policy_epoch AND s.reaches = c.reaches
    JOIN routes t ON t.policy_epoch = c.policy_epoch AND t.route = c.route AND t.region_id = s.region_id"""
_SKETCH = f"CASE WHEN d0 IS NULL OR isnan(d0) THEN NULL ELSE [{', '.join(SKETCH)}] END AS direction"
_LOGGED = f"""SELECT {_STEP}, cell, class, region, {{}}
        FROM {{}}_file f JOIN cuts USING (attempt) JOIN classes USING (policy_epoch, class_id)
        JOIN regions USING (policy_epoch, region_id)"""
_VIEWS = {
    "steps": f"""
        SELECT {_STEP}, p.policy, CASE WHEN isnan(loss) THEN NULL ELSE loss END AS loss
        FROM steps_file f JOIN cuts USING (attempt) LEFT JOIN policies p USING (policy_epoch)""",
    "named_cells": f"""
        SELECT {_STEP}, microbatch, cell, class, coalesce(b.band, '') AS band, coalesce(p.phase, '') AS phase, route,
               rows, weight, reaches, has_own, has_norms
        FROM cells_file f JOIN cuts USING (attempt) JOIN classes USING (policy_epoch, class_id)
        LEFT JOIN bands b ON b.policy_epoch = f.policy_epoch AND b.band_id = f.band
        LEFT JOIN phases p ON p.policy_epoch = f.policy_epoch AND p.phase_id = f.phase""",
    "cells": "SELECT * EXCLUDE (reaches, has_own, has_norms) FROM named_cells",
    "norms": _LOGGED.format("norm, counts AS was_taught", "norms"),
    "directions": _LOGGED.format(_SKETCH, "directions"),
    "entropies": _LOGGED.format("entropy", "entropies"),
    "updates": f"""
        SELECT {_STEP}, region, CASE WHEN isnan(norm) THEN NULL ELSE norm END AS norm, {_SKETCH}, before, after
        FROM updates_file f JOIN cuts USING (attempt) JOIN regions USING (policy_epoch, region_id)""",
    "sealed": _LOGGED.format("'gradient_norm' AS sealed_column", "sealed"),
    "taught": f"""
        SELECT {_TAUGHT}, c.weight * route_weight AS weight, NULL::DOUBLE AS gradient_norm
        FROM named_cells c {_REACHED} WHERE NOT (has_own OR has_norms)
        UNION ALL
        SELECT {_TAUGHT}, CASE WHEN has_own THEN coalesce(learnt, 0) ELSE c.weight * route_weight END, norm
        FROM named_cells c {_REACHED}
        LEFT JOIN norms_file n ON n.entry = c.entry AND n.cell = c.cell AND n.region_id = s.region_id
        LEFT JOIN learnt_file l ON l.entry = c.entry AND l.cell = c.cell AND l.region_id = s.region_id
        WHERE has_own OR has_norms""",
}
_STEP_COLUMNS = ("entry", "step", "attempt", "stands", "policy_epoch")
_CELL_COLUMNS = (*_STEP_COLUMNS, "microbatch", "cell", "class", "band", "phase")
_OF_REGION = (*_STEP_COLUMNS, "cell", "class", "region")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "steps": (*_STEP_COLUMNS, "policy", "loss"),
    "cells": (*_CELL_COLUMNS, "route", "rows", "weight"),
    "taught": (*_CELL_COLUMNS, "region", "rows", "weight", "gradient_norm"),
    "norms": (*_OF_REGION, "norm", "was_taught"),
    "directions": (*_OF_REGION, "direction"),
    "entropies": (*_OF_REGION, "entropy"),
    "updates": (*_STEP_COLUMNS, "region", "norm", "direction", "before", "after"),
    "sealed": (*_OF_REGION, "sealed_column"),
    **{name: tuple(columns) for name, columns in NAMES.items() if name != "sets"},
}
"""What is documented, and promised, of each view."""


def run_sql(
    derived: DerivedLedger, sql: str, *, seconds: float = MAX_SECONDS
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one SELECT over the views; return its columns and its rows.

    It reads the derived files and nothing else: no other file, no network, no extension, and it changes nothing. The
    connection stays so for good.

    Raises:
        LedgerError: it isn't one SELECT, DuckDB refuses it, or it takes longer than `seconds`.
    """
    import duckdb

    database = derived.database
    # Who has asked before has the views, and a connection that stays as it is.
    is_locked = database.execute("SELECT current_setting('lock_configuration')").fetchall()[0][0]
    if not is_locked:
        make_views(derived)
    cursor = database.cursor()  # of this question alone: another one takes no rows from it, and an error ends no other
    with _answering(cursor.interrupt, seconds):
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise LedgerError("SQL over a ledger is one SELECT, which changes nothing. Ask one question at a time.")
        if not is_locked:
            _lock(derived)
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        cursor.execute(sql)
    return [one[0] for one in cursor.description or ()], _fetched(cursor, seconds)


def _fetched(cursor: Any, seconds: float) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401  (DuckDB is imported late)
    while True:
        with _answering(cursor.interrupt, seconds):
            rows = cursor.fetchmany(10_000)
        if not rows:
            return
        yield from rows


@contextmanager
def _answering(interrupt: Callable[[], None], seconds: float) -> Iterator[None]:
    """Stop what takes too long, and say in our words what DuckDB refuses."""
    import duckdb

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except duckdb.InterruptException as error:
        msg = f"This SQL took longer than {seconds:g} seconds, and was stopped. Ask for less, or --seconds more."
        raise LedgerError(msg) from error
    except duckdb.Error as error:
        msg = f"This SQL can't be answered: {error}\nThe views are {', '.join(COLUMNS)}; docs/queries.md has them."
        raise LedgerError(msg) from error
    finally:
        timer.cancel()


def _lock(derived: DerivedLedger) -> None:
    files = ", ".join(text(str(path)) for paths in derived.files.values() for path in paths)
    for setting in (
        f"memory_limit = '{_MAX_MEMORY}'",
        f"allowed_paths = [{files}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        derived.database.execute(f"SET {setting}")
    derived.database.execute("BEGIN TRANSACTION READ ONLY")


def make_views(derived: DerivedLedger) -> None:
    """Make the views of `COLUMNS`, as of the signed head."""
    derived.set_cuts(None)
    for name, rows in _small(derived).items():
        form = NAMES[name]
        columns = ", ".join(f"{quoted(column)} {kind}" for column, kind in form.items())
        derived.database.execute(f"CREATE OR REPLACE TABLE {name} ({columns})")
        marks = ", ".join("?" * len(form))
        if rows:
            derived.database.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
    for name, sql in _VIEWS.items():
        derived.database.execute(f"CREATE OR REPLACE VIEW {name} AS {sql}")


def _small(derived: DerivedLedger) -> dict[str, list[tuple[Any, ...]]]:
    index, cuts = derived.index, derived.cuts(None)
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in NAMES}
    found["ledger"] = [(index.origin, index.tree_size, index.root, derived.evidence_level)]
    for epoch, tables in enumerate(derived.tables):
        for name, rows in _of_epoch(tables).items():
            found[name] += [(epoch, *row) for row in rows]
        found["sources"] += [(epoch, *asdict(one).values()) for one in sources_of(derived.ledger, tables)]
    found["members"] = [(name, one) for name in derived.classes for one in dict.fromkeys((name, *members_of(name)))]
    found["sets"] = [(number, epoch, one) for number, (epoch, members) in enumerate(index.sets) for one in members]
    starts = [(0, 0), *((entry, one.from_step) for entry, one in derived.resumes)]
    ends = [None if cut == NEVER else cut for cut in cuts]
    found["attempts"] = [(number, *start, end) for number, (start, end) in enumerate(zip(starts, ends, strict=True))]
    found["checkpoints"] = [tuple(asdict(one).values()) for one in derived.milestones]
    return found


def _of_epoch(tables: Tables) -> dict[str, list[tuple[Any, ...]]]:
    """Return what entry 0 or an amendment says, by small table, each row without its `policy_epoch`."""
    phases = [(str(name), int(start), int(end)) for name, start, end in tables.details.get("phases") or ()]
    signed = ((tables.details.get("policy_provenance") or {}).get("sources") or [{}])[0].get("target", "")
    policy = dict(tables.entry.commitments).get("policy", b"").hex()
    kinds = [(name, band) for name in tables.classes for band in tables.bands]
    return {
        "policies": [(tables.index, getattr(tables.entry, "step", 0), policy, signed)],
        "classes": list(enumerate(tables.classes)),
        "bands": [(number, name) for number, name in enumerate(tables.bands) if name],
        "regions": list(enumerate(tables.regions)),
        "phases": [(number, *phase) for number, phase in enumerate(phases)],
        "routes": [
            (number, column, region, route[column])
            for number, route in enumerate(tables.routes)
            for column, region in enumerate(tables.regions)
        ],
        "policy": [
            (*kind, phase[0], region, weight, decision)
            for kind, cells in zip(kinds, tables.policy, strict=False)  # empty without a policy
            for phase, (weights, decision) in zip(phases, cells, strict=True)
            for region, weight in zip(tables.regions, weights, strict=True)
        ],
    }


def written(names: Sequence[str], rows: Iterator[tuple[Any, ...]], form: RowForm) -> Iterator[str]:
    """Yield the lines of a table for people, of CSV, or of JSON, an object each."""
    if form == "json":
        keys = _distinct(names)
        for row in rows:
            line = json.dumps(dict(zip(keys, map(_plain, row), strict=True)), ensure_ascii=False)
            yield "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    elif form == "csv":
        yield _csv(names)
        yield from map(_csv, rows)
    else:
        yield from _table(names, rows)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names of which none comes twice, as DuckDB makes them: an object would keep the last of them alone."""
    found = list[str]()
    for name in names:
        tries = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        found.append(next(one for one in tries if one not in found))
    return found


def _plain(value: object) -> object:
    """Return a value as JSON has it: what isn't finite and what it has no word for is a text."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _csv(row: Sequence[object]) -> str:
    """Return a line; a text that a spreadsheet would run as a formula gets a leading quote."""
    line = io.StringIO()
    texts = [_printable(one) if isinstance(one, str) else one for one in row]
    cells = ["'" + one if isinstance(one, str) and one.startswith(_FORMULA) else one for one in texts]
    csv.writer(line, lineterminator="").writerow(["" if one is None else one for one in cells])
    return line.getvalue()


def _table(names: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    shown = [[*map(_shown, row)] for row in itertools.islice(rows, MAX_TABLE_ROWS)]
    heads = [*map(_printable, names)]
    widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
    for line in (heads, *shown):
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    if len(shown) == MAX_TABLE_ROWS and next(rows, None) is not None:
        yield f"... and more: the first {MAX_TABLE_ROWS} rows are shown. --format csv or json has all."


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else _printable(str(value))


def _printable(value: str) -> str:
    """Return a text of which nothing reaches a terminal as a control code: a name may hold anything."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
