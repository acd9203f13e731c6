"""What the small views say of a ledger, row by row, and that SQL over them is one SELECT of a connection."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.derived.opened import DerivedLedger, open_derived
from cosmati.ledger.derived.views import COLUMNS, NAMES, _fetched, _of_epoch, make_views, run_sql, written
from cosmati.ledger.tables import Tables
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import NO_DETAILS, AmendEntry, CheckpointEntry, EndEntry, ResumeEntry, RunEntry

from .ledgers import ORIGIN, digest
from .test_amend import FIRST, SECOND
from .test_verify import KEY, Item, write_signed

duckdb = pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

MANIFEST = "ab" * 32
VOUCHED: dict[str, Any] = {
    "policy_provenance": {"sources": [{"target": "policy/main/1"}]},
    "provenance": {"sources": [{"target": "data/a/b/3", "manifest_sha256": MANIFEST}]},
}


def run_items() -> list[Item]:
    """A run that goes on at step 3 under another policy, with checkpoints of either attempt and an end."""
    details = FIRST.details | VOUCHED
    first = (RunEntry("r", FIRST.commitments, details_digest(details)), details)
    joined = SECOND.details | {"changes": [["policy", "first", "second"]], "classes": ["b", "new&b", "a"]}
    amend = (AmendEntry(3, SECOND.commitments, details_digest(joined)), joined)
    return [
        first,
        *(FIRST.step(step) for step in range(4)),
        (CheckpointEntry(4, digest("state 4"), digest("root 4")), None),
        (ResumeEntry(3, 4, 1), None),
        amend,
        *(SECOND.step(step, 1) for step in range(3, 6)),
        (CheckpointEntry(6, digest("state 6"), digest("root 6")), None),
        (EndEntry(6, "completed", digest("end")), None),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "ledger"
    write_signed(path, run_items(), KEY)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[DerivedLedger]:
    with open_derived(folder) as derived:
        make_views(derived)
        yield derived


@pytest.fixture
def derived(folder: Path) -> Iterator[DerivedLedger]:
    """One of its own: SQL leaves it locked."""
    with open_derived(folder) as found:
        yield found


def rows(derived: DerivedLedger, view: str) -> list[tuple[Any, ...]]:
    return derived.database.execute(f"SELECT * FROM {view}").fetchall()


def test_each_small_view_says_what_the_entries_say(shared: DerivedLedger) -> None:
    policies = [FIRST.digest.hex(), SECOND.digest.hex()]
    assert {name: rows(shared, name) for name in NAMES if name not in ("policy", "routes", "sets")} == {
        "ledger": [(ORIGIN, 13, shared.index.root, shared.evidence_level)],
        "policies": [(0, 0, 0, policies[0], "policy/main/1"), (1, 7, 3, policies[1], "")],
        "classes": [(0, 0, "a"), (0, 1, "b"), (0, 2, "c"), (1, 0, "b"), (1, 1, "new&b"), (1, 2, "a")],
        "members": [("a", "a"), ("b", "b"), ("c", "c"), ("new&b", "new&b"), ("new&b", "new"), ("new&b", "b")],
        "bands": [],
        "phases": [(0, 0, "warm", 0, 4), (0, 1, "main", 4, 400), (1, 0, "warm", 0, 4), (1, 1, "main", 4, 400)],
        "regions": [(0, 0, "low"), (0, 1, "high"), (1, 0, "top"), (1, 1, "low")],
        "attempts": [(0, 0, 0, 3), (1, 6, 3, None)],
        "checkpoints": [
            (5, 4, digest("state 4").hex(), digest("root 4").hex(), ""),
            (11, 6, digest("state 6").hex(), digest("root 6").hex(), ""),
            (12, 6, "", digest("end").hex(), "completed"),
        ],
        "sources": [(0, "a", "data/a/b/3", "", "", "", "", MANIFEST)],
    }


def test_routes_and_weights_are_told_by_region(shared: DerivedLedger) -> None:
    assert rows(shared, "routes") == [
        (epoch, number, column, region, route[column])
        for epoch, policy, regions in ((0, FIRST, ("low", "high")), (1, SECOND, ("top", "low")))
        for number, route in enumerate(policy.routes)
        for column, region in enumerate(regions)
    ]
    assert rows(shared, "policy") == [
        (epoch, name, "", phase, region, weights[column], decision)
        for epoch, policy, regions in ((0, FIRST, ("low", "high")), (1, SECOND, ("top", "low")))
        for name, cells in zip(
            ("a", "b", "c") if not epoch else ("b", "new&b", "a"), policy.cells.values(), strict=True
        )
        for phase, (weights, decision) in zip(("warm", "main"), cells, strict=True)
        for column, region in enumerate(regions)
    ]


def test_a_set_of_regions_has_its_members(shared: DerivedLedger) -> None:
    known = shared.index.sets
    assert rows(shared, "sets") == [(n, epoch, one) for n, (epoch, members) in enumerate(known) for one in members]
    assert {(epoch, tuple(members)) for epoch, members in known[1:]} == {(0, (0, 1)), (0, (1,)), (1, (0, 1))}


def test_steps_stand_that_no_later_attempt_has_taken_up(shared: DerivedLedger) -> None:
    told = shared.database.execute("SELECT entry, step, attempt, stands, policy_epoch, policy FROM steps").fetchall()
    policies = [FIRST.digest.hex(), SECOND.digest.hex()]
    assert sorted(told) == [
        (1 + step if attempt == 0 else 5 + step, step, attempt, attempt == 1 or step < 3, attempt, policies[attempt])
        for attempt, steps in ((0, range(4)), (1, range(3, 6)))
        for step in steps
    ]


def test_views_are_as_of_the_signed_head_whatever_was_asked_before(derived: DerivedLedger) -> None:
    derived.set_cuts(derived.milestones[0])
    for _ in range(2):
        make_views(derived)
        assert derived.database.execute("SELECT count(*) FROM steps WHERE stands").fetchall() == [(6,)]
    assert [one[0] for one in rows(derived, "attempts")] == [0, 1]


# ------------------------------------------------------------------------------------------------- what tables say


def hand_made(**details: Any) -> Tables:
    entry = AmendEntry(9, (("data", digest("d")), ("policy", digest("p"))), NO_DETAILS)
    policy = tuple((((0.5, 1.0), "admit"), ((float(row), 0.0), "gate")) for row in range(4))
    return Tables(
        index=4,
        entry=entry,
        details={"phases": [["one", 0, 3], [2, "3", 9.0]], **details},
        classes=("x", "y"),
        regions=("r", "s"),
        routes=((1.0, 0.5), (0.0, 2.0)),
        phases=((0, 3), (3, 9)),
        policy=policy,
        changes=(),
        bands=("low", "high"),
    )


def test_tables_are_told_by_class_band_phase_and_region() -> None:
    told = _of_epoch(hand_made())
    assert told["policies"] == [(4, 9, digest("p").hex(), "")]
    assert told["classes"] == [(0, "x"), (1, "y")]
    assert told["bands"] == [(0, "low"), (1, "high")]
    assert told["regions"] == [(0, "r"), (1, "s")]
    assert told["phases"] == [(0, "one", 0, 3), (1, "2", 3, 9)]
    assert told["routes"] == [(0, 0, "r", 1.0), (0, 1, "s", 0.5), (1, 0, "r", 0.0), (1, 1, "s", 2.0)]
    assert told["policy"] == [
        (name, band, phase, region, weight, decision)
        for row, (name, band) in enumerate(itertools.product(("x", "y"), ("low", "high")))
        for phase, weights, decision in (("one", (0.5, 1.0), "admit"), ("2", (float(row), 0.0), "gate"))
        for region, weight in zip(("r", "s"), weights, strict=True)
    ]
    assert {name: {len(row) for row in rows} for name, rows in told.items()} == {
        name: {len(NAMES[name]) - 1} for name in told
    }


def test_what_tables_do_not_say_is_empty() -> None:
    bare = replace(hand_made(phases=None), policy=(), bands=("",), entry=RunEntry("r", (), NO_DETAILS), index=0)
    told = _of_epoch(bare)
    assert (told["policies"], told["bands"], told["phases"], told["policy"]) == ([(0, 0, "", "")], [], [], [])


@pytest.mark.parametrize(
    ("facts", "signed"),
    [
        (None, ""),
        ({}, ""),
        ({"sources": None}, ""),
        ({"sources": []}, ""),
        ({"sources": [{}]}, ""),
        ({"sources": [{"target": "t/1"}, {"target": "t/2"}]}, "t/1"),
    ],
)
def test_a_policy_is_signed_as_its_first_source(facts: object, signed: str) -> None:
    assert _of_epoch(hand_made(policy_provenance=facts))["policies"][0][-1] == signed


def test_what_is_promised_of_a_view_is_what_it_has(shared: DerivedLedger) -> None:
    assert {name: columns for name, columns in COLUMNS.items() if name in NAMES} == {
        name: tuple(columns) for name, columns in NAMES.items() if name != "sets"
    }
    for name, columns in COLUMNS.items():
        told = shared.database.execute(f"SELECT * FROM {name} LIMIT 0").description or []
        assert tuple(one[0] for one in told) == columns


# ---------------------------------------------------------------------------------------------------------- the SQL


def test_a_select_gives_its_columns_and_its_rows(derived: DerivedLedger) -> None:
    names, found = run_sql(derived, "SELECT step AS s, entry FROM steps WHERE stands ORDER BY 1 DESC LIMIT 2;")
    assert (names, list(found)) == (["s", "entry"], [(5, 10), (4, 9)])
    assert derived.database.execute("SELECT current_setting('memory_limit')").fetchall() == [("3.7 GiB",)]
    for sql in ("CREATE TABLE t (x INTEGER)", "SET threads = 1", f"SELECT * FROM read_text('{__file__}')"):
        with pytest.raises(duckdb.Error):
            derived.database.execute(sql)


@pytest.mark.parametrize("sql", ["", "SELECT 1; SELECT 2", "DROP VIEW cells"])
def test_what_is_not_one_select_is_refused_before_it_runs(shared: DerivedLedger, sql: str) -> None:
    with pytest.raises(LedgerError, match=r"SQL over a ledger is one SELECT, which changes nothing\. Ask one"):
        run_sql(shared, sql)
    assert shared.database.execute("SELECT count(*) FROM cells").fetchall() == [(21,)]


def test_what_duckdb_refuses_is_said_with_the_names_of_the_views(shared: DerivedLedger) -> None:
    with pytest.raises(LedgerError) as caught:
        run_sql(shared, "SELEC 1")
    said = str(caught.value)
    assert said.startswith("This SQL can't be answered: Parser Error")
    assert said.endswith(f"\nThe views are {', '.join(COLUMNS)}; docs/queries.md has them.")
    assert isinstance(caught.value.__cause__, duckdb.Error)


@pytest.mark.parametrize(
    "sql", ["SELECT nonsense FROM steps", "SELECT CAST('x' || step AS INTEGER) FROM steps", "SELECT 1; SELECT 2"]
)
def test_a_question_that_fails_leaves_the_next_its_answer(derived: DerivedLedger, sql: str) -> None:
    for _ in range(2):
        with pytest.raises(LedgerError):
            list(run_sql(derived, sql)[1])
        assert list(run_sql(derived, "SELECT count(*) FROM steps")[1]) == [(7,)]


def test_a_question_takes_no_rows_from_another_that_is_being_read(derived: DerivedLedger) -> None:
    _, found = run_sql(derived, "SELECT range FROM range(25000)")
    read = [next(found)]
    _, other = run_sql(derived, "SELECT -range FROM range(11000)")
    read += [next(found) for _ in range(10_000)]
    assert list(other) == [(-number,) for number in range(11_000)]
    assert [*read, *found] == [(number,) for number in range(25_000)]


def test_a_name_that_comes_twice_hides_no_value_in_json() -> None:
    assert list(written(["a", "b", "a", "a_1", "a"], iter([(1, 2, 3, 4, 5)]), "json")) == [
        '{"a": 1, "b": 2, "a_1": 3, "a_1_1": 4, "a_2": 5}'
    ]


def test_no_form_hands_on_what_commands_a_terminal() -> None:
    name, value = "é\x1b[31m", "ü\x9b31m"
    (line,) = written([name], iter([(value,)]), "json")
    assert line.isprintable()
    assert json.loads(line) == {name: value}
    for form in ("csv", "table"):
        assert all(text.isprintable() for text in written([name], iter([(value,)]), form))


class Pages:
    """A result that comes in pages, each after a while."""

    def __init__(self, *pages: list[tuple[int]], error: Exception | None = None) -> None:
        self.pages, self.error, self.asked = list(pages), error, list[int]()

    def interrupt(self) -> None:
        self.error = duckdb.InterruptException("stopped")

    def fetchmany(self, number: int) -> list[tuple[int]]:
        self.asked.append(number)
        if self.error is not None:
            raise self.error
        return self.pages.pop(0) if self.pages else []


def test_rows_come_page_by_page_as_they_are_asked_for() -> None:
    pages = Pages([(1,), (2,)], [(3,)])
    found = _fetched(pages, 60.0)
    assert (next(found), pages.asked) == ((1,), [10_000])
    assert list(found) == [(2,), (3,)]
    assert pages.asked == [10_000] * 3


def test_a_page_that_takes_too_long_or_fails_is_told_in_our_words() -> None:
    class Slow(Pages):
        stopped = threading.Event()

        def interrupt(self) -> None:
            super().interrupt()
            self.stopped.set()

        def fetchmany(self, number: int) -> list[tuple[int]]:
            self.stopped.wait(30)
            return super().fetchmany(number)

    with pytest.raises(LedgerError, match=r"took longer than 0\.01 seconds, and was stopped\. Ask for less"):
        list(_fetched(Slow([(1,)]), 0.01))
    with pytest.raises(LedgerError, match="can't be answered: out of memory"):
        list(_fetched(Pages(error=duckdb.OutOfMemoryException("out of memory")), 60.0))


def test_what_was_answered_in_time_is_not_stopped_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []
    real = threading.Timer

    def kept(*arguments: Any) -> Any:
        timers.append(real(*arguments))
        return timers[-1]

    monkeypatch.setattr(threading, "Timer", kept)
    assert list(_fetched(Pages([(1,)]), 3600.0)) == [(1,)]
    assert len(timers) == 2
    for timer in timers:
        assert timer.daemon
        timer.join(30)
        assert not timer.is_alive()
        assert timer.interval == 3600.0
