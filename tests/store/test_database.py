"""The index's file: made by one of those who find that it's gone."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from cosmati.store import database


def test_two_who_make_the_same_file_with_locks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was moved away takes the lock along, so that nothing but the file itself keeps writers apart."""
    path = tmp_path / "index.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, database._SCHEMA.split(";")):
            other.execute(statement)
        monkeypatch.setattr(database.Database, "_is_sound", lambda *_, **__: True)
        made: list[database.Database] = []
        second = threading.Thread(target=lambda: made.append(database.Database(path)))
        second.start()
        second.join(timeout=0.3)
        assert second.is_alive(), "it waits for the first one"
        other.execute("COMMIT")
    second.join(timeout=60)
    assert made[0].query("SELECT count(*) FROM runs") == [(0,)]
    made[0].close()
