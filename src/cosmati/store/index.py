"""An index of a store's runs in SQLite: read by pages, brought up to date from the runs' own files.

The index holds nothing that the folders don't: it may be deleted at any time. It lies in `.cosmati/` of the store, or
in the user's cache where the store can't be written. Readers and the one writer don't wait for each other (WAL).
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from cosmati.errors import RunError
from cosmati.storage.lock import is_locked
from cosmati.store.database import Database, place_of
from cosmati.store.filters import MODEL, RunFilter, expression_of, order_of
from cosmati.store.reading import read_source
from cosmati.store.rows import RUN_COLUMNS, as_row, as_summary, facts_text
from cosmati.store.scan import StoreEntry, find_sources
from cosmati.store.summary import RunSummary, StoreProblem, StudyProgress

_BATCH_RUNS = 5000
_KEPT_ANSWERS = 64
_SELECTED = ", ".join(f"runs.{name}" for name in RUN_COLUMNS) + ", recipes.facts"
_FROM = "FROM runs JOIN recipes USING (recipe)"
T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed:
    """What a refresh found: sources that are new or changed, gone, and the seconds that it took."""

    num_changed: int
    num_gone: int
    seconds: float


class RunIndex:
    """The index of one store.

    Args:
        root: the store's folder.

    Raises:
        RunError: it isn't a folder, or there is no place to write the index.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        if not self.root.is_dir():
            msg = f"{self.root} is no folder, so it holds no runs. Give the folder that your runs are in."
            raise RunError(msg)
        self._database = Database(place_of(self.root))
        self._answers = OrderedDict[tuple[object, ...], object]()
        self._answers_lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The file that the index is in."""
        return self._database.path

    def refresh(self, tell: Callable[[int, int], None] | None = None) -> Refreshed:
        """Read what is new or changed below the store, and forget what is gone.

        Args:
            tell: is told how many sources of how many are read.

        Raises:
            RunError: the index can't be written, or the store isn't there any more.
        """
        began = time.monotonic()
        if not self.root.is_dir():
            msg = f"The store {self.root} isn't there: it was moved, or its disk is away. Put it back."
            raise RunError(msg)
        with self._database.writing() as database:
            known: dict[str, str] = dict(database.execute("SELECT path, kind || ' ' || fingerprint FROM sources"))
            found = {_name_of(source.path): source for source in find_sources(self.root)}
            running = {path for (path,) in database.execute("SELECT path FROM runs WHERE status = 'running'")}
            changed = [
                (name, source)
                for name, source in found.items()
                if known.get(name) != f"{source.kind} {source.fingerprint}"
                # A process that died changes no file.
                or (name in running and not is_locked(self.root / source.path / "lock"))
            ]
            gone = known.keys() - found.keys()
            for path in gone:
                database.execute("DELETE FROM sources WHERE path = ?", (path,))
                database.execute("DELETE FROM runs WHERE path = ?", (path,))
            pending = 0
            for done, (name, source) in enumerate(changed, 1):
                pending += self._read(database, name, source)
                if pending >= _BATCH_RUNS or done == len(changed):
                    database.execute("UPDATE state SET mark = ?", (secrets.token_hex(8),))
                    database.commit()
                    pending = 0
                    if tell is not None:
                        tell(done, len(changed))
            if gone:
                database.execute("DELETE FROM recipes WHERE recipe NOT IN (SELECT recipe FROM runs)")
                database.execute("UPDATE state SET mark = ?", (secrets.token_hex(8),))
        return Refreshed(len(changed), len(gone), time.monotonic() - began)

    def _read(self, database: Any, name: str, source: StoreEntry) -> int:  # noqa: ANN401  (a connection)
        """Take a source's runs in, and return how many rows were written."""
        reading = read_source(self.root, source)
        rows, problem = list[list[object]](), reading.problem
        if name != source.path:
            problem = "Its name isn't UTF-8, so no page can show it. Rename it."
        else:
            try:
                rows = [as_row(run) for run in reading.runs]
            except RunError as error:
                problem = str(error)
        database.execute("DELETE FROM runs WHERE path = ?", (name,))
        if rows:
            recipes = {run.recipe: run for run in reading.runs}
            facts = [(recipe, facts_text(run)) for recipe, run in recipes.items()]
            database.executemany("INSERT OR IGNORE INTO recipes VALUES (?, ?)", facts)
            marks = ", ".join("?" * len(rows[0]))
            database.executemany(f"INSERT OR REPLACE INTO runs VALUES ({marks})", rows)
        row = (name, source.kind, source.fingerprint, problem, reading.name, reading.num_planned)
        database.execute("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?, ?)", row)
        return 1 + len(rows)

    def runs(
        self,
        chosen: RunFilter | None = None,
        *,
        sort: str = "started",
        descending: bool = True,
        limit: int = 100,
        offset: int = 0,
    ) -> list[RunSummary]:
        """Return the runs that a filter lets through, in an order, some of them."""
        where, values = (chosen or RunFilter()).where()
        order, more = order_of(sort, descending=descending)
        sql = f"SELECT {_SELECTED} {_FROM} WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        return [as_summary(row) for row in self.query(sql, [*values, *more, limit, offset])]

    def each_run(
        self, chosen: RunFilter, *, sort: str = "path", descending: bool = False, page: int = 5000
    ) -> Iterator[RunSummary]:
        """Yield all runs that a filter lets through, in an order: those that there are at the first, each once.

        The index may change in between. A run that is gone when it's reached is left out.

        Args:
            chosen: which.
            sort: column to order by.
            descending: whether the largest comes first.
            page: how many are read at once.
        """
        where, values = chosen.where()
        order, more = order_of(sort, descending=descending)
        keys = [key for (key,) in self.query(f"SELECT key {_FROM} WHERE {where} ORDER BY {order}", [*values, *more])]
        some = f"SELECT {_SELECTED} {_FROM} WHERE key IN (SELECT value FROM json_each(?))"
        for place in range(0, len(keys), page):
            wanted = keys[place : place + page]
            found = {run.key: run for run in map(as_summary, self.query(some, (json.dumps(wanted),)))}
            yield from (found[key] for key in wanted if key in found)

    def count(self, chosen: RunFilter | None = None) -> int:
        """Return how many runs a filter lets through."""
        where, values = (chosen or RunFilter()).where()
        return int(self.answer(f"SELECT count(*) FROM runs WHERE {where}", values)[0][0])

    def run(self, key: str) -> RunSummary | None:
        """Return the run with a key, None where there's none."""
        rows = self.query(f"SELECT {_SELECTED} {_FROM} WHERE key = ?", (key,))
        return as_summary(rows[0]) if rows else None

    def choices(self, column: str, chosen: RunFilter | None = None) -> list[tuple[Any, int]]:
        """Return each value of a column with the number of its runs, most first.

        `method` counts single methods, `model` what recipes name.
        """
        where, values = (chosen or RunFilter()).where()
        if column == "method":
            # Runs have few different lists of methods: these are taken apart once each.
            lists = f"SELECT methods, count(*) AS num FROM runs WHERE {where} GROUP BY 1"
            sql = f"SELECT value, sum(num) FROM ({lists}), json_each(methods) GROUP BY 1 ORDER BY 2 DESC, 1"
        elif column == "model":
            recipes = f"SELECT recipe, count(*) AS num FROM runs WHERE {where} GROUP BY 1"
            sql = f"SELECT {MODEL}, sum(num) FROM ({recipes}) JOIN recipes USING (recipe) GROUP BY 1 ORDER BY 2 DESC, 1"
        else:
            expression, more = expression_of(column)
            table = _FROM if column.startswith("fact:") else "FROM runs"
            sql = f"SELECT {expression}, count(*) {table} WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 1"
            values = [*more, *values]
        return [(value, int(num)) for value, num in self.answer(sql, values)]

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query of one's own; it can't write."""
        return self._database.query(sql, values)

    def answer(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query, kept for the next who asks it before the index changes."""
        return self.kept((sql, *values), lambda: self.query(sql, values))

    def kept(self, name: tuple[object, ...], work_out: Callable[[], T]) -> T:
        """Return what was worked out for this state of the index under a name, or work it out."""
        key = (self.mark, *name)
        with self._answers_lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return cast("T", self._answers[key])
        found = work_out()
        with self._answers_lock:
            self._answers[key] = found
            while len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return found

    def forget_answers(self) -> None:
        """Forget what was kept."""
        with self._answers_lock:
            self._answers.clear()

    @property
    def mark(self) -> str:
        """Changes with what the index holds."""
        return str(self.query("SELECT mark FROM state")[0][0])

    def problems(self) -> list[StoreProblem]:
        """Return the sources that can't be read, or not whole, and why."""
        sql = "SELECT path, problem FROM sources WHERE problem != '' ORDER BY path"
        return [StoreProblem(*row) for row in self.query(sql)]

    def studies(self) -> list[tuple[str, str]]:
        """Return name and folder of each study with a finished run."""
        return self.query("SELECT DISTINCT study, path FROM runs WHERE kind = 'study' ORDER BY study, path")

    def column_names(self, chosen: RunFilter) -> tuple[list[str], list[tuple[str, bool]]]:
        """Return the metrics that the chosen runs have, and recipes' facts, each with whether runs differ in it.

        Recipes differ in a fact that some lack, and in one of another kind: 1 isn't `true`, and none isn't 1.
        """
        where, values = chosen.where()
        # The condition by itself: `json_each` has a `path` too.
        some = f"SELECT metrics FROM runs WHERE {where}"
        metrics = f"SELECT DISTINCT one.key FROM ({some}) AS chosen, json_each(chosen.metrics) AS one ORDER BY 1"
        kind = "CASE WHEN one.type IN ('integer', 'real') THEN 'number' ELSE one.type END"
        facts = f"""
            WITH chosen AS (SELECT facts FROM recipes WHERE recipe IN (SELECT recipe FROM runs WHERE {where}))
            SELECT one.key, count(DISTINCT {kind}) > 1 OR count(DISTINCT one.value) > 1
                OR count(*) < (SELECT count(*) FROM chosen)
            FROM chosen, json_each(chosen.facts) AS one GROUP BY 1 ORDER BY 1
        """
        found = [name for (name,) in self.answer(metrics, values)]
        return found, [(name, bool(differs)) for name, differs in self.answer(facts, values)]

    def recipe_texts(self, recipes: Collection[str], *, most: int = 200) -> dict[str, str]:
        """Return what recipes say, shortly: their first facts as `name=value`, by digest."""
        sql = f"""
            SELECT recipe, group_concat(key || '=' || value, ', ') FROM (
                SELECT recipe, key, value, row_number() OVER (PARTITION BY recipe ORDER BY id) AS place
                FROM recipes, json_each(facts) WHERE recipe IN ({", ".join("?" * len(recipes))}) AND value IS NOT NULL
            ) WHERE place <= 4 GROUP BY recipe
        """
        return {recipe: text[:most] for recipe, text in self.answer(sql, sorted(recipes))} if recipes else {}

    def going(self) -> list[StudyProgress]:
        """Return the studies that were begun and aren't finished, by name, with how far they are."""
        sql = """
            SELECT path, name, planned, (SELECT count(*) FROM runs WHERE runs.path = sources.path)
            FROM sources WHERE planned IS NOT NULL ORDER BY name, path
        """
        return [
            StudyProgress(path, name, num_done, planned, is_running=is_locked(self.root / path / "lock"))
            for path, name, planned, num_done in self.query(sql)
        ]

    def close(self) -> None:
        """Close this thread's connection."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name_of(path: str) -> str:
    """Return a path as text that can be kept: a folder's name is bytes of whatever kind."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
