"""What a replay compares step by step: when it stops and saves, which roots differ, whose rows nobody can compare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmati.core.clock import Budget, Clock, Time
from cosmati.ledger.difference import UNKNOWN_ROWS, LedgerDifference
from cosmati.ledger.row_secrets import commit
from cosmati.ledger.rows import ROWS_VERSION, SALTED_VERSION
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry, StepEntry
from cosmati.train.observers import replayed
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.observers.replayed import LedgerComparison, ReplayedLedger
from tests.train.hand_made import run_facts

DIFFERENCE = LedgerDifference(0, "loss", "1", "2")
OWN, OTHER, THIRD = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32


def comparison(*, first: int = 0, end: int = 8, keep_going: bool = False, **more: Any) -> Any:
    tables = SimpleNamespace(details={}, entry="in force")
    told: dict[str, Any] = {"roots": {}, "states": lambda *_: set(), "ended": None, "version": ROWS_VERSION, **more}
    ledger = SimpleNamespace(
        details={"rows_version": told["version"]}, run="entry 0", key=SimpleNamespace(name="r"), keys=None
    )
    run: Any = SimpleNamespace(
        ledger=ledger,
        steps=lambda a, b: ((f"item {step}", SimpleNamespace(step=step), tables) for step in range(a, b)),
        roots=told["roots"],
        states=told["states"],
        end=told["ended"],
    )
    made: Any = LedgerComparison(
        run, range(first, end), told.get("blinds"), keep_going=keep_going, told=told.get("told")
    )
    made.saved, made.stopped = [], []
    made.save, made.stop = lambda: made.saved.append(made.done), made.stopped.append
    made.tables_now = dict
    return made


@pytest.mark.parametrize("keep_going", [False, True])
def test_it_stops_at_the_end_of_its_span_or_at_a_difference(keep_going: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def compare(item: str, logged: Any, tables: Any, made: Any, details: Any, **_: Any) -> Any:
        looked.append((item, details))
        return ([DIFFERENCE] if made.step == 4 else []), {"sealed"} if made.step == 5 else set()

    monkeypatch.setattr(replayed, "compare_step", compare)
    monkeypatch.setattr(
        replayed, "compare_tables", lambda step, *_: [LedgerDifference(step, "t", "", "")] if step else []
    )
    told: list[tuple[int, int]] = []
    made = comparison(
        keep_going=keep_going,
        roots={2: set(), 4: set(), 7: set(), 8: set()},
        told=lambda s, f: told.append((s, len(f))),
    )
    assert made.in_force == "entry 0"
    made.span_end = 7
    for step in range(7):
        made._compare_step(SimpleNamespace(step=step), {"of": step})
        if made.stopped:
            break
    last = 6 if keep_going else 4
    assert looked == [(f"item {step}", {"of": step}) for step in range(last + 1)]
    assert told == [(step, int(step == 4)) for step in range(last + 1)]
    assert made.saved == [2, 4], "at the end of the span there's a checkpoint in any case"
    assert made.stopped == ["the replay has what it compares"]
    assert (made.done, made.num_steps, made.num_differences) == (last + 1, last + 1, 1)
    assert made.skipped == ({"sealed"} if keep_going else set())
    assert made.is_over is not keep_going
    assert made.in_force == "in force"


def test_differences_beyond_a_hundred_are_counted() -> None:
    made = comparison(keep_going=True)
    for number in range(70):
        made.differs(LedgerDifference(number, "a", "", ""), LedgerDifference(number, "b", "", ""))
    assert (made.num_differences, len(made.differences), made.is_over) == (140, 100, False)
    assert made.differences[-1].step == 49
    made = comparison()
    made.differs()
    assert not made.is_over
    made.differs(DIFFERENCE)
    assert made.is_over


def checkpoint(step: int, root: bytes, state: bytes) -> CheckpointEntry:
    found: Any = object.__new__(CheckpointEntry)
    for name, value in (("step", step), ("parameter_root", root), ("state_digest", state)):
        object.__setattr__(found, name, value)
    entry: CheckpointEntry = found
    return entry


def end(step: int, root: bytes) -> EndEntry:
    return EndEntry(step, "completed", root)


def test_roots_of_checkpoints_and_of_the_end_are_compared() -> None:
    states = {3: {OWN}, 5: {OWN, OTHER}}
    made = comparison(
        keep_going=True,
        roots={3: {OWN}, 5: {OWN}, 6: {OWN, THIRD}},
        states=lambda step, _: states[step],
        ended=end(8, OWN),
    )
    asked: list[tuple[int, set[bytes]]] = []
    made.unexplained = lambda step, signed: (asked.append((step, set(signed))), [OTHER])[1] if step == 5 else []
    made.append(checkpoint(2, OWN, OWN))  # of which nothing is signed
    assert made.num_roots == 0
    made.append(checkpoint(3, OWN, OWN))
    made.append(checkpoint(5, OWN, OWN))
    assert (made.num_roots, made.differences) == (2, [])
    made.append(checkpoint(6, OWN, OWN))
    assert asked == [(5, {OWN, OTHER})], "it's looked at again once more is known"
    first, second = made.differences
    assert (first.what, first.logged, first.replayed) == (
        "digest of weights, optimizers and averages after 5 steps",
        OTHER.hex()[:16],
        OWN.hex()[:16],
    )
    assert (second.what, second.logged) == ("root of parameters and buffers after 6 steps", THIRD.hex()[:16])
    made.append(end(7, OTHER))
    made.append(end(8, OWN))
    assert (made.num_roots, made.num_differences) == (4, 2)
    made.append(end(8, OTHER))
    last = made.differences[-1]
    assert (last.step, last.what, last.logged, last.replayed) == (
        7,
        "root of the weights at the end",
        OWN.hex()[:16],
        OTHER.hex()[:16],
    )


def rows(step: int, name: str = "a") -> Any:
    return SimpleNamespace(
        step=step,
        microbatch=0,
        class_name=name,
        slots=np.array([0]),
        ids=np.array([[5]]),
        contents=None,
        owners=None,
    )


@pytest.mark.parametrize("version", [SALTED_VERSION, ROWS_VERSION, 1])
def test_rows_are_compared_where_their_blinds_are_known(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {1: [b"b" * 32], 2: [None], 3: None, 4: [None]}
    blinds = SimpleNamespace(blinds=lambda asked: answers[asked.step], certificates={"d1": 7, "d2": 3, "d3": 9})
    signed = {"a": ["d2", "unknown", "d1"], "b": []}
    asked: list[str] = []
    monkeypatch.setattr(replayed, "certificates_of_drops", lambda _, name: (asked.append(name), signed[name])[1])
    made = comparison(version=version, blinds=blinds)
    found = [made.commit(one) for one in (rows(1), rows(2), rows(3), rows(4, "b"), rows(2))]
    if version == 1:
        assert found == [UNKNOWN_ROWS] * 5
        assert (made.without_rows, made.forgotten) == ({1, 2, 3, 4}, {})
        return
    assert found == [commit(rows(1), [b"b" * 32]), *[UNKNOWN_ROWS] * 4]
    assert made.without_rows == {3, 4}, "nobody has the blinds, or no certificate says why"
    assert made.forgotten == {2: (3, 7)}
    assert asked == ["a", "b"]


def step_entry(step: int) -> StepEntry:
    found: Any = object.__new__(StepEntry)
    object.__setattr__(found, "step", step)
    entry: StepEntry = found
    return entry


def test_steps_are_compared_with_their_details_and_the_tables_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(
        replayed, "compare_step", lambda *given, **more: looked.append((*given[3:], more)) or ([], set())
    )
    monkeypatch.setattr(replayed, "compare_tables", lambda *given: looked.append(given) or [])
    made = comparison()
    made.tables_now = lambda: {"seed": 3}
    first, second = step_entry(0), step_entry(1)
    made.append(first, {"of": 0})
    made.append(second)
    signed = {"origin": "r", "keys": None}
    assert looked == [(0, {}, {"seed": 3}, replayed._TABLES), (first, {"of": 0}, signed), (second, {}, signed)]
    made.append(step_entry(3))
    assert (made.num_steps, made.done) == (2, 4), "of which nothing was written there"


def test_at_its_end_it_looks_at_what_is_left() -> None:
    made = comparison(
        keep_going=True, roots={5: {OWN}}, states=lambda step, asked: {OTHER} if asked == "all" else set()
    )
    made.request = "all"
    made.unexplained = lambda step, signed: list(signed)
    made.append(checkpoint(5, OWN, OWN))
    assert made.differences == []
    for _ in range(2):
        made.close()
        assert [one.what for one in made.differences] == ["digest of weights, optimizers and averages after 5 steps"], (
            "once"
        )


def test_what_nobody_reads_of_a_writer_is_nothing() -> None:
    made = comparison()
    assert (made.checkpoint(), made.has_ended(), made.next_attempt()) == (None, False, 0)
    assert made.resume_entry(7) == ResumeEntry(7, 0, 0)
    fresh = LedgerComparison(made.run, range(2, 5), None, keep_going=False)
    assert (fresh.done, fresh.span_end, fresh.is_over, fresh.request) == (2, 5, False, "")
    for work in (fresh.stop, fresh.save, fresh.tables_now, fresh.unexplained):
        with pytest.raises(AssertionError, match="the run isn't open"):
            work()  # type: ignore[operator]


def test_the_observer_of_a_replay_writes_no_ledger(tmp_path: Path) -> None:
    stopped: list[str] = []
    made, facts = comparison(), run_facts()
    own = ReplayedLedger(made, lambda: OWN)
    told: dict[str, Any] = {"model": None, "rank": 0, "attempt": 0, "started": 0.0, "superseded": {}}
    own.on_open(
        WatchedRun(facts=facts, folder=tmp_path, stop=stopped.append, publish=lambda *_: None, **told)  # type: ignore[arg-type]
    )
    made.stop("enough")
    assert (own._facts, own._directory, own._digest(), stopped) == (facts, tmp_path / "ledger", OWN, ["enough"])
    own.on_start(Clock(), Budget(Time.parse("2ba")))
    assert vars(own)["_writer"] is made
    assert made.tables_now()["seed"] == facts.seed
    assert own._commit(rows(3)) == UNKNOWN_ROWS
    assert made.without_rows == {3}
    own._keep_archive()
    assert list(tmp_path.iterdir()) == []
