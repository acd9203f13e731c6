"""When an attested run has to stop for its witnesses, and how long it waits before it asks them again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.cosigned import ForkError, WitnessRefusedError
from cosmati.ledger.profile import ATTESTED
from cosmati.train.observers import witnessing
from cosmati.train.observers.witnessing import AskedWitnesses

HOUR, PATIENCE = witnessing.HOUR_SECONDS, witnessing.PATIENCE_SECONDS


class World:
    """Three witnesses, of which two are needed, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = ATTESTED) -> None:
        self.now, self.answers = 100.0, [None, None, None]
        monkeypatch.setattr(witnessing, "monotonic", lambda: self.now)
        monkeypatch.setattr(witnessing, "ask_witness", self._asked)
        profile: Any = SimpleNamespace(name=name, quorum=2, witnesses=(0, 1, 2))
        sends: Any = [None] * 3
        self.asked = AskedWitnesses(Path(), profile, sends)

    def _asked(self, _directory: Path, witness: int, _send: object) -> None:
        error: Any = self.answers[witness]
        if error is not None:
            raise error

    def ask(self, *answers: Any) -> bool:
        self.answers = list(answers)
        return self.asked._ask()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


GONE = LedgerError("gone")


def test_a_quorum_is_met_where_enough_have_cosigned(world: World) -> None:
    assert world.ask(None, None, None)
    assert world.ask(None, GONE, None)
    assert world.asked._why() == "2 of 3 witnesses have cosigned. gone"
    assert not world.ask(OSError("down"), None, GONE)
    assert world.asked._why() == "1 of 3 witnesses have cosigned. down gone"


def test_who_is_not_attested_asks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "self")
    assert world.ask(None, None, None)
    assert not world.ask(None, GONE, None)
    world.now += 10 * HOUR
    assert not world.ask(ForkError("forked"), GONE, GONE)
    assert world.asked.refuse() == ""


def test_a_run_stops_an_hour_after_its_quorum_was_met_last(world: World) -> None:
    for begin in (100.0, 5000.0):
        world.now = begin
        assert world.ask(None, None, GONE)
        world.now = begin + HOUR + PATIENCE
        assert not world.ask(None, GONE, GONE)
        assert world.asked.refuse() == ""
        world.now += 1
        assert "couldn't be witnessed for an hour: 1 of 3" in world.asked.refuse()


def test_a_fork_stops_it_at_once(world: World) -> None:
    assert world.ask(None, None, ForkError("forked"))
    assert world.asked.refuse() == "forked"
    assert world.ask(None, None, None)
    assert world.asked.refuse() == "forked", "it isn't forgotten"


@pytest.mark.parametrize(("name", "again"), [(ATTESTED, witnessing._AGAIN_SECONDS), ("self", HOUR)])
def test_it_asks_every_hour_and_sooner_where_a_quorum_is_missing(
    name: str, again: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, pauses = World(monkeypatch, name), list[float]()
    answers = iter([True, False, True])

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) == 4

    monkeypatch.setattr(world.asked, "_closed", SimpleNamespace(wait=wait))
    monkeypatch.setattr(world.asked, "_ask", lambda: next(answers))
    world.asked._go_on(7.0)
    assert pauses == [7.0, HOUR, again, HOUR]


@pytest.mark.parametrize("when", ["before", "at the end"])
def test_a_fork_that_one_of_them_saw_is_told_at_the_end_whatever_the_others_say(world: World, when: str) -> None:
    assert world.ask(None, None, ForkError("forked") if when == "before" else None)
    world.answers = [None, None, ForkError("forked")]
    with pytest.raises(WitnessRefusedError, match="The end of the run isn't witnessed: forked"):
        world.asked.end(must=True)
    world.asked.end(must=False)  # it has stopped for that
    assert world.asked.refuse() == "forked"


def test_the_end_is_witnessed_where_enough_have_cosigned(world: World) -> None:
    world.answers = [None, None, GONE]
    world.asked.end(must=True)
    world.answers = [None, GONE, GONE]
    with pytest.raises(WitnessRefusedError, match="1 of 3 witnesses have cosigned"):
        world.asked.end(must=True)
