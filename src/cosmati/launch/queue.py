"""The queue: one SQLite file, which any number of supervisors and commands of a machine share.

Every change of state names the state that it was decided on, and every change by a supervisor the token that it holds
the job by: whoever is late or stale changes nothing.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from cosmati.errors import RunError
from cosmati.launch.engine import RankProgram
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob
from cosmati.launch.program import folder_in_name_of
from cosmati.launch.states import ACTIVE, ENDED, FOLLOWS, LaunchState

_FILE = "queue.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, request TEXT NOT NULL, state TEXT NOT NULL,
  priority INTEGER NOT NULL, ranks INTEGER NOT NULL, wish TEXT NOT NULL DEFAULT '', holder TEXT NOT NULL DEFAULT '',
  reason TEXT NOT NULL DEFAULT '', created REAL NOT NULL, step INTEGER, best_step INTEGER NOT NULL DEFAULT -1,
  num_steps INTEGER, step_seconds REAL, num_microbatches INTEGER, failures INTEGER NOT NULL DEFAULT 0,
  run_folder TEXT NOT NULL DEFAULT '', tensor_parallel INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS attempts (
  job TEXT NOT NULL REFERENCES jobs(id) ON DELETE CASCADE, number INTEGER NOT NULL, started REAL NOT NULL,
  seconds REAL NOT NULL DEFAULT 0, ranks INTEGER NOT NULL, idle INTEGER NOT NULL DEFAULT 0,
  outcome TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', place TEXT NOT NULL DEFAULT '',
  handle TEXT NOT NULL DEFAULT '', first_step INTEGER, last_step INTEGER, PRIMARY KEY (job, number));
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bad_places (
  job TEXT NOT NULL REFERENCES jobs(id) ON DELETE CASCADE, place TEXT NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY (job, place));
"""
_LATER_COLUMNS = {"tensor_parallel": "INTEGER NOT NULL DEFAULT 1"}
"""Columns of `jobs` that a queue of an earlier version lacks."""
_JOB = "SELECT *, (SELECT COALESCE(SUM(seconds), 0) FROM attempts WHERE job = jobs.id) AS seconds FROM jobs "


class StaleHolderError(RunError):
    """A supervisor's job is another one's, was moved on in the meantime, or isn't there."""


class JobQueue:
    """The jobs of a folder. A context manager; one for each thread.

    Args:
        home: the folder; made where it isn't there. It's a local one: SQLite's log doesn't work over a network.

    Raises:
        RunError: it can't be written or read.
    """

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        with self._explained():
            # What a program says, and what its environment was given, is its owner's.
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.home / "jobs").mkdir(exist_ok=True, mode=0o700)
            (self.home / _FILE).touch(mode=0o600)  # the folder may be one that others read
            self._database = sqlite3.connect(self.home / _FILE, timeout=60.0, isolation_level=None)
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA journal_mode=WAL")
            # A crash of the machine may undo the last changes, and leaves the file whole; jobs go by their runs.
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("PRAGMA foreign_keys=ON")
            self._database.executescript(_SCHEMA)
            self._add_columns()

    def _add_columns(self) -> None:
        """Bring a queue of an earlier version up to date."""
        for name, kind in _LATER_COLUMNS.items():
            if name not in {row["name"] for row in self._database.execute("PRAGMA table_info(jobs)")}:
                with suppress(sqlite3.OperationalError):  # another process has just added it
                    self._database.execute(f"ALTER TABLE jobs ADD COLUMN {name} {kind}")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def add(self, request: JobRequest) -> LaunchedJob:
        """Put a job in, PENDING, and return it."""
        name = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")[:40] or "job"
        with self._changing():
            values = (
                _text_of(request),
                LaunchState.PENDING,
                request.priority,
                request.ranks,
                time.time(),
                request.run_folder,
            )
            while True:
                number = self._database.execute(
                    "INSERT INTO jobs (request, state, priority, ranks, created, run_folder) VALUES (?, ?, ?, ?, ?, ?)",
                    values,
                ).lastrowid
                own = folder_in_name_of(request.program, f"{name}-{number}")
                if own is None or not own.exists():
                    break
                # Another queue's job has trained there, under this name: nobody has asked to go on with it.
                self._database.execute("DELETE FROM jobs WHERE number = ?", (number,))
            self._database.execute("UPDATE jobs SET id = ? WHERE number = ?", (f"{name}-{number}", number))
        return self.get(f"{name}-{number}")

    def get(self, job_id: str) -> LaunchedJob:
        """Return a job.

        Raises:
            StaleHolderError: there's none of this id; the message names those that are like it.
        """
        rows = self._rows(_JOB + "WHERE id = ?", job_id)
        if not rows:
            ids = [job.id for job in self.all()]
            like = [one for one in ids if job_id in one] or ids[-5:]
            msg = f"No job is called {job_id!r}. There {'are ' + ', '.join(like) if like else 'is none at all'}."
            raise StaleHolderError(msg)
        found = _read(rows[0])
        if isinstance(found, RunError):
            raise found
        return found

    def all(self) -> list[LaunchedJob]:
        """Return all jobs that this release can read, oldest first."""
        return [job for row in self._rows(_JOB + "ORDER BY number") if isinstance(job := _read(row), LaunchedJob)]

    def of_other_releases(self) -> list[str]:
        """Return the ids of the jobs that this release can't read, oldest first."""
        return [row["id"] for row in self._rows(_JOB + "ORDER BY number") if isinstance(_read(row), RunError)]

    def at_work_in(self, run_folder: str) -> list[str]:
        """Return the ids of the jobs that have processes, and train in a folder."""
        rows = self._rows("SELECT id, state FROM jobs WHERE run_folder = ? ORDER BY number", _plain(run_folder))
        return [row["id"] for row in rows if row["state"] in ACTIVE]

    def attempts(self, job_id: str) -> list[JobAttempt]:
        """Return a job's attempts, in order."""
        rows = self._rows("SELECT * FROM attempts WHERE job = ? ORDER BY number", job_id)
        return [JobAttempt(**{one.name: row[one.name] for one in fields(JobAttempt)}) for row in rows]

    def bad_places(self, job_id: str) -> dict[str, str]:
        """Return the places that a job does without, and why."""
        rows = self._rows("SELECT place, reason FROM bad_places WHERE job = ? ORDER BY place", job_id)
        return {row["place"]: row["reason"] for row in rows}

    @property
    def slots(self) -> int | None:
        """Ranks that may run at once on this machine; None where nobody has said it."""
        rows = self._rows("SELECT value FROM settings WHERE name = 'slots'")
        return int(rows[0]["value"]) if rows else None

    @slots.setter
    def slots(self, number: int) -> None:
        with self._changing():
            self._database.execute("INSERT OR REPLACE INTO settings VALUES ('slots', ?)", (str(number),))

    def hold(self, job_id: str, holder: str) -> None:
        """Let a job be this supervisor's; whoever had it is stale from now on."""
        self._set(job_id, "", "holder = ?", holder)

    def move(
        self, job_id: str, was: LaunchState, now: LaunchState, *, holder: str | None = None, reason: str = ""
    ) -> None:
        """Move a job from the state that it was found in to another.

        Args:
            job_id: of the job.
            was: the state that this was decided on.
            now: the next one.
            holder: the supervisor's token; None for a command, which moves jobs that have no supervisor.
            reason: why, in words.

        Raises:
            StaleHolderError: it's in another state by now, or another supervisor's.
        """
        assert now in FOLLOWS[was], f"{was} -> {now}"
        wish = ", wish = ''" if now in ENDED else ""
        guard, given = "AND state = ?", [str(was)]
        if holder is not None:
            guard, given = f"{guard} AND holder = ?", [*given, holder]
        self._set(job_id, guard, f"state = ?, reason = ?{wish}", now, reason, given=given)

    def begin(self, job_id: str, holder: str, *, slots: int, lives: Callable[[str], bool]) -> bool:
        """Move a QUEUED job to STARTING if it's its turn: ranks are free, and no other that waits goes before it.

        Args:
            job_id: of the job.
            holder: its supervisor's token.
            slots: ranks that may run at once on this machine. A job that asks for more runs alone.
            lives: says whether a job's supervisor is there; what has none holds no ranks, and waits for nothing.

        Raises:
            StaleHolderError: the job isn't QUEUED any more, or another supervisor's.
        """
        with self._changing():
            own = self._rows("SELECT * FROM jobs WHERE id = ?", job_id)[0]
            others = self._rows(
                "SELECT * FROM jobs WHERE id != ? AND json_extract(request, '$.engine') = 'local'", job_id
            )
            busy = sum(row["ranks"] for row in others if row["state"] in ACTIVE and lives(row["id"]))
            place = (-own["priority"], own["number"])
            waiting = (row for row in others if row["state"] == LaunchState.QUEUED)
            if any((-row["priority"], row["number"]) < place and lives(row["id"]) for row in waiting):
                return False
            if busy and busy + own["ranks"] > slots:
                return False
            given = (LaunchState.STARTING, job_id, LaunchState.QUEUED, holder)
            text = "UPDATE jobs SET state = ?, reason = '' WHERE id = ? AND state = ? AND holder = ?"
            if not self._database.execute(text, given).rowcount:
                raise self._stale(job_id)
        return True

    def ask_to_stop(self, job_id: str) -> None:
        """Ask a job's supervisor to end it.

        Raises:
            StaleHolderError: it has ended.
        """
        states = ", ".join(f"'{state}'" for state in ENDED)
        self._set(job_id, f"AND state NOT IN ({states})", "wish = 'stop'")

    def ask_to_go_on(self, job_id: str, was: LaunchState) -> None:
        """Take back what was asked of a job that has lost its supervisor before it had ended.

        Raises:
            StaleHolderError: it's in another state by now.
        """
        self._set(job_id, "AND state = ?", "wish = ''", given=[was])

    def begin_attempt(self, job_id: str, holder: str, attempt: JobAttempt) -> None:
        """Write down that an attempt begins."""
        told = {**asdict(attempt), "job": job_id}
        names = ", ".join(told)
        with self._changing():
            self._refuse_stale(job_id, holder)
            marks = ", ".join("?" * len(told))
            given = tuple(map(_plain, told.values()))
            self._database.execute(f"INSERT INTO attempts ({names}) VALUES ({marks})", given)  # noqa: S608

    def note_attempt(self, job_id: str, holder: str, number: int, **changes: object) -> None:
        """Write down what is new of an attempt: fields of `JobAttempt`."""
        text = ", ".join(f"{name} = ?" for name in changes)
        with self._changing():
            self._refuse_stale(job_id, holder)
            given = (*map(_plain, changes.values()), job_id, number)
            self._database.execute(f"UPDATE attempts SET {text} WHERE job = ? AND number = ?", given)  # noqa: S608

    def note(self, job_id: str, holder: str, **changes: object) -> None:
        """Write down what is known of a job's run: fields of `LaunchedJob` that aren't its state."""
        assert "state" not in changes, "is moved"
        text = ", ".join(f"{name} = ?" for name in changes)
        self._set(job_id, "AND holder = ?", text, *changes.values(), given=[holder])

    def add_bad_place(self, job_id: str, holder: str, place: str, reason: str) -> None:
        """Let a job do without a place from now on."""
        with self._changing():
            self._refuse_stale(job_id, holder)
            given = (job_id, _plain(place), _plain(reason))
            self._database.execute("INSERT OR IGNORE INTO bad_places VALUES (?, ?, ?)", given)

    def resume(self, job_id: str, was: LaunchState, *, forgets_places: bool = True) -> None:
        """Make a job PENDING that has ended, with all its retries and places again.

        Raises:
            StaleHolderError: it's in another state by now.
        """
        assert LaunchState.PENDING in FOLLOWS[was], was
        with self._changing():
            text = "UPDATE jobs SET state = ?, reason = '', wish = '', failures = 0 WHERE id = ? AND state = ?"
            if not self._database.execute(text, (LaunchState.PENDING, job_id, was)).rowcount:
                raise self._stale(job_id)
            if forgets_places:
                self._database.execute("DELETE FROM bad_places WHERE job = ?", (job_id,))

    def give_seconds(self, job_id: str, was: LaunchState, seconds: float) -> None:
        """Let a job's attempts run so long together, from now on.

        Raises:
            StaleHolderError: it's in another state by now.
        """
        self._set(job_id, "AND state = ?", "request = json_set(request, '$.max_seconds', ?)", seconds, given=[was])

    def delete(self, job_id: str, *, in_any_state: bool = False) -> None:
        """Take a job out that has ended.

        Raises:
            StaleHolderError: it hasn't.
        """
        states = ", ".join(f"'{state}'" for state in ENDED)
        guard = "" if in_any_state else f"AND state IN ({states})"
        with self._changing():
            text = f"DELETE FROM jobs WHERE id = ? {guard}"  # noqa: S608  (our own words)
            if not self._database.execute(text, (job_id,)).rowcount:
                raise self._stale(job_id)

    def _set(self, job_id: str, guard: str, text: str, *values: object, given: list[Any] | None = None) -> None:
        with self._changing():
            statement = f"UPDATE jobs SET {text} WHERE id = ? {guard}"  # noqa: S608  (our own words)
            if not self._database.execute(statement, (*map(_plain, values), job_id, *(given or []))).rowcount:
                raise self._stale(job_id)

    def _refuse_stale(self, job_id: str, holder: str) -> None:
        if not self._rows("SELECT 1 FROM jobs WHERE id = ? AND holder = ?", job_id, holder):
            raise self._stale(job_id)

    def _stale(self, job_id: str) -> StaleHolderError:
        rows = self._rows("SELECT state FROM jobs WHERE id = ?", job_id)
        now = f"is {rows[0]['state']} by now, or another supervisor's" if rows else "isn't there any more"
        return StaleHolderError(f"Job {job_id} {now}, so nothing was changed. Look at it: cosmati show {job_id}")

    def _rows(self, text: str, *values: object) -> list[sqlite3.Row]:
        with self._explained():
            return self._database.execute(text, values).fetchall()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._database.in_transaction:  # a full disk has ended it
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            msg = (
                f"The queue {self.home} can't be used: {error}. Free space or mend the folder, or name another one: "
                "--queue FOLDER. Jobs go on from their checkpoints."
            )
            raise RunError(msg) from error


def _text_of(request: JobRequest) -> str:
    return json.dumps(asdict(request), default=str)


def _plain(value: object) -> object:
    """Return text that UTF-8 can say: a name or a message may have other bytes in it."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _read(row: sqlite3.Row) -> LaunchedJob | RunError:
    """Return a job; where another release of Cosmati has asked for it, the error that says so."""
    try:
        asked = json.loads(row["request"])
        program = asked.pop("program")
        state = LaunchState(row["state"])
        program = RankProgram(
            command=tuple(program["command"]),
            folder=Path(program["folder"]),
            python=Path(program["python"]),
            environment=program["environment"],
        )
        request = JobRequest(program=program, **asked)
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"Job {row['id']} of this queue was asked for with another release of Cosmati ({error}). Use that one, or "
            f"take it out: cosmati delete {row['id']}"
        )
        return RunError(msg)
    names = ("id", "wish", "reason", "created", "seconds", "step", "best_step", "num_steps", "step_seconds")
    more = ("num_microbatches", "tensor_parallel", "failures", "run_folder")
    return LaunchedJob(request=request, state=state, **{name: row[name] for name in (*names, *more)})
