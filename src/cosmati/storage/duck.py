"""DuckDB in memory, which fetches nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cosmati.errors import MissingExtraError

if TYPE_CHECKING:
    import duckdb

SETTINGS = {
    "threads": 2,
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "temp_directory": "",  # or what's too large for memory would be spilt into whichever folder one is in
}


def has_duckdb() -> bool:
    """Return whether DuckDB is installed."""
    try:
        import duckdb  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open DuckDB.

    Raises:
        MissingExtraError: it isn't installed.
    """
    try:
        import duckdb
    except ImportError as error:
        msg = "Tables in Parquet need DuckDB, which isn't installed. Run: pip install 'cosmati[queries]'"
        raise MissingExtraError(msg) from error
    with duckdb.connect(":memory:", config=SETTINGS) as database:  # type: ignore[arg-type]
        yield database


def quoted(name: str) -> str:
    """Return a name as SQL, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return a text as SQL."""
    return "'" + value.replace("'", "''") + "'"
