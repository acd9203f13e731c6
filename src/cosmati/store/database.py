"""The index's file: made where it's missing, anew where it's damaged or of another release; one writer at a time."""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cosmati.errors import RunError
from cosmati.storage.lock import FileLock
from cosmati.store.rows import RUN_COLUMNS
from cosmati.store.scan import STORE_FOLDER

INDEX_FILE = "index.sqlite"
VERSION = 4
_SCHEMA = f"""
CREATE TABLE state (mark TEXT);
INSERT INTO state VALUES (hex(randomblob(8)));
CREATE TABLE sources (path TEXT PRIMARY KEY, kind TEXT, fingerprint TEXT, problem TEXT, name TEXT, planned INTEGER)
    WITHOUT ROWID;
CREATE TABLE recipes (recipe TEXT PRIMARY KEY, facts TEXT) WITHOUT ROWID;
CREATE TABLE runs ({", ".join(RUN_COLUMNS)}, words, PRIMARY KEY (key));
CREATE INDEX runs_of_source ON runs (path);
CREATE INDEX runs_of_arm ON runs (study, arm, budget);
CREATE INDEX runs_by_start ON runs (started);
CREATE INDEX runs_by_status ON runs (status);
CREATE INDEX runs_by_methods ON runs (methods, task, quality_name);
CREATE VIEW method_lists AS
    WITH RECURSIVE lists (methods) AS (
        SELECT min(methods) FROM runs
        UNION ALL
        SELECT (SELECT min(methods) FROM runs WHERE methods > lists.methods) FROM lists WHERE lists.methods IS NOT NULL
    )
    SELECT methods FROM lists WHERE methods IS NOT NULL;
PRAGMA user_version = {VERSION};
"""
_DAMAGE = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


class Database:
    """The file at a path.

    Args:
        path: of the file; its folder is made again where somebody removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        with self.writing(check=True):
            pass

    @contextmanager
    def writing(self, *, check: bool = False) -> Iterator[sqlite3.Connection]:
        """Hold the one writer's place; what was written stands when the context ends without an error.

        Args:
            check: the whole file for damage, which takes a second for a large one.

        Raises:
            RunError: the file can't be written.
        """
        try:
            # Somebody may have removed the folder too. A store that is away isn't made: only what is below it is.
            self.path.parent.mkdir(parents=self.path.parent.name != STORE_FOLDER, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), wait=True):
                try:
                    with closing(self._sound(check=check)) as database, database:
                        yield database
                except sqlite3.DatabaseError as error:
                    if _is_damage(error):
                        self._remove()  # the next one makes it anew
                    raise
        except (sqlite3.Error, OSError) as error:
            msg = f"The index {self.path} can't be written: {error}. Free space, or make its folder writable."
            raise RunError(msg) from error

    def _sound(self, *, check: bool) -> sqlite3.Connection:
        """Return a connection to a file of this release, whatever was there before."""
        if not self._is_sound(check=check):
            self._remove()
        database = _connect(self.path, "rwc")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # the index can be made again
        # A writer whose lock went away with a folder that was moved may be making the same file.
        database.execute("BEGIN IMMEDIATE")
        if database.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                database.execute(statement)
        database.commit()
        return database

    def _is_sound(self, *, check: bool) -> bool:
        if not self.path.exists():
            return False
        try:
            with closing(_connect(self.path, "rw")) as database:
                is_known = database.execute("PRAGMA user_version").fetchone()[0] == VERSION
                return is_known and (not check or database.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                return False
            raise

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query, by a connection of this thread's own that can't write."""
        for is_last in (False, True):
            try:
                return self._reader().execute(sql, values).fetchall()
            except sqlite3.DatabaseError as error:
                self.close()
                if is_last:
                    raise
                with self.writing(check=_is_damage(error)):
                    pass  # made anew where it's damaged or gone
        raise AssertionError("the loop returns or raises")

    def _reader(self) -> sqlite3.Connection:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            with self.writing():
                state = self.path.stat()
        if getattr(self._local, "file", None) != (state.st_dev, state.st_ino):
            # The first query, or somebody has removed the file: what a connection sees of it stays as it was.
            self.close()
            self._local.database = _connect(self.path, "rw")
            self._local.database.execute("PRAGMA query_only = 1")
            self._local.file = (state.st_dev, state.st_ino)
        found: sqlite3.Connection = self._local.database
        return found

    def close(self) -> None:
        """Close this thread's connection."""
        if hasattr(self._local, "database"):
            self._local.database.close()
            del self._local.database, self._local.file


def place_of(root: Path) -> Path:
    """Return where a store's index is kept.

    Raises:
        RunError: nowhere.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "cosmati"
    folders = (root / STORE_FOLDER, cache / "stores" / hashlib.sha256(os.fsencode(root)).hexdigest()[:16])
    refused: OSError | str = "not writable"
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / INDEX_FILE
            if os.access(folder, os.W_OK) and (not file.exists() or os.access(file, os.W_OK)):
                return file
        except OSError as error:
            refused = error
    msg = f"There's no place for the index: neither in {folders[0]} nor in {folders[1]} ({refused}). Make one writable."
    raise RunError(msg)


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


class _StandardError:
    """The standard error of a mean, by Welford's recurrence: sums of squares lose what large and close values have."""

    def __init__(self) -> None:
        self._n, self._first, self._mean, self._squares = 0, 0.0, 0.0, 0.0

    def step(self, value: float) -> None:
        """Take one more value."""
        if not self._n:
            self._first = value
        self._n += 1
        apart = value - self._first  # exact where values are close
        gap = apart - self._mean
        self._mean += gap / self._n
        self._squares += gap * (apart - self._mean)

    def finalize(self) -> float | None:
        """Return it, None of a single value, and where it's no number."""
        found = math.sqrt(self._squares / (self._n - 1) / self._n) if self._n > 1 else math.nan
        return found if math.isfinite(found) else None


def _null_safe(function: Callable[[float], float]) -> Callable[[float | None], float | None]:
    return lambda value: None if value is None else function(value)


class _Connection(sqlite3.Connection):
    """A connection that is closed with the thread whose own it is, by whichever thread sees to that."""

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError):  # one that couldn't be opened
            self.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection; `rw` doesn't make the file."""
    name = f"file:{quote(os.fsencode(path))}?mode={mode}"
    database = sqlite3.connect(name, timeout=30, uri=True, factory=_Connection, check_same_thread=False)
    for name, function in (("ln", math.log), ("exp", math.exp)):
        try:
            database.execute(f"SELECT {name}(1.0)")
        except sqlite3.OperationalError:  # SQLite can be built without
            database.create_function(name, 1, _null_safe(function), deterministic=True)
    # Its stub knows whole numbers only.
    database.create_aggregate("standard_error", 1, _StandardError)  # type: ignore[arg-type]
    return database
