"""Tampering with the Parquet files that were derived from a ledger, and with the index beside them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb

from cosmati.errors import LedgerError
from cosmati.ledger.derived.folder import INDEX_FILE, place_of
from cosmati.ledger.derived.opened import open_derived, open_proven
from tests.ledger.random_runs import random_run
from tests.ledger.test_tampering import KEY
from tests.ledger.test_verify import write_signed

from .trials import FOUND, HARMLESS, MISSED, Trial, change_bytes

VKEY = KEY.verifier.text
Rows = dict[str, "Counter[tuple[Any, ...]]"]


class TablesTarget:
    """Derived tables. Whoever makes their index anew, too, is found by `--prove` alone."""

    name = "derived tables"

    def __init__(self, folder: Path) -> None:
        self._ledger = folder / "ledger"
        write_signed(self._ledger, random_run(11, 60).items, KEY)
        with open_derived(self._ledger, vkey=VKEY):
            pass
        self._place = place_of(self._ledger)
        shutil.copytree(self._place, folder / "kept")
        self._kept = folder / "kept"
        self._names = sorted(path.name for path in self._kept.glob("*.parquet"))
        self._rows = self._read()

    def _restore(self) -> None:
        shutil.rmtree(self._place)
        shutil.copytree(self._kept, self._place)

    def _read(self) -> Rows:
        """Return the rows of all tables, in any order, as DuckDB reads the files."""
        found: Rows = {}
        with duckdb.connect() as database:
            for path in sorted(self._place.glob("*.parquet")):
                found[path.name.split("-")[0]] = Counter(database.execute(f"SELECT * FROM '{path}'").fetchall())
        return found

    def check_untouched(self) -> None:
        """Fail unless the tables as they were made are taken, and are those of the entries."""
        self._restore()
        with open_derived(self._ledger, vkey=VKEY):
            assert self._read() == self._rows
        with open_proven(self._ledger, vkey=VKEY) as (_, was_other):
            assert not was_other

    def try_once(self, draw: random.Random) -> Trial:
        """Change bytes, files or rows; and make the digests in the index anew, or not."""
        self._restore()
        path, is_forged = self._place / draw.choice(self._names), draw.random() < 0.3
        kind = draw.choice(["bytes", "bytes", "index", "files", "rows", "rows"])
        if kind == "bytes":
            kind, data = change_bytes(path.read_bytes(), draw)
            path.write_bytes(data)
        elif kind == "index":
            _, data = change_bytes((self._place / INDEX_FILE).read_bytes(), draw)
            (self._place / INDEX_FILE).write_bytes(data)
            is_forged = False
        elif kind == "files":
            other = self._place / draw.choice(self._names)
            if draw.random() < 0.3:
                path.unlink()
                is_forged = False
            else:
                one, two = path.read_bytes(), other.read_bytes()
                path.write_bytes(two)
                other.write_bytes(one)
        else:
            kind = self._change_rows(path, draw)
        if is_forged:
            self._forge_index()
            return Trial(f"{kind}, index made anew", self._judge_proven())
        return Trial(kind, self._judge())

    def _change_rows(self, path: Path, draw: random.Random) -> str:
        kind = draw.choice(["drop row", "duplicate row", "reorder rows", "change row"])
        with duckdb.connect() as database:
            database.execute(f"CREATE TABLE t AS SELECT row_number() OVER () AS place, * FROM '{path}'")
            num = database.execute("SELECT count(*) FROM t").fetchall()[0][0]
            at = draw.randrange(max(1, num)) + 1
            if kind == "drop row":
                database.execute("DELETE FROM t WHERE place = ?", [at])
            elif kind == "duplicate row":
                database.execute("INSERT INTO t SELECT * FROM t WHERE place = ?", [at])
            elif kind == "change row":
                columns = [row[0] for row in database.execute("DESCRIBE t").fetchall() if row[0] != "place"]
                column = draw.choice(columns)
                other = draw.randrange(max(1, num)) + 1
                value = f"(SELECT {column} FROM t WHERE place = {other})"
                database.execute(f"UPDATE t SET {column} = {value} WHERE place = ?", [at])
            order = "place DESC" if kind == "reorder rows" else "place"
            database.execute(f"COPY (SELECT * EXCLUDE (place) FROM t ORDER BY {order}) TO '{path}' (FORMAT parquet)")
        return kind

    def _forge_index(self) -> None:
        place = self._place / INDEX_FILE
        told = json.loads(place.read_bytes())
        for part in told["parts"]:
            for table, one in part["files"].items():
                path = self._place / f"{table}-{part['first']:012}-{part['end']:012}.parquet"
                one[0] = hashlib.sha256(path.read_bytes()).hexdigest()
        place.write_text(json.dumps(told))

    def _judge(self) -> str:
        try:
            with open_derived(self._ledger, vkey=VKEY):
                return HARMLESS if self._read() == self._rows else MISSED
        except LedgerError:
            return FOUND

    def _judge_proven(self) -> str:
        try:
            before: Rows | None = self._read()
        except duckdb.Error:
            before = None
        try:
            with open_proven(self._ledger, vkey=VKEY) as (_, was_other):
                is_mended = self._read() == self._rows
        except LedgerError:
            return FOUND
        if not is_mended:
            return MISSED
        return FOUND if was_other else HARMLESS if before == self._rows else MISSED
