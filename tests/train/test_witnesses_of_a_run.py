"""How a run's witnesses are asked at its begin and its end, whom it asks, and what it does where they don't answer."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.cosigned import ForkError, WitnessRefusedError
from cosmati.ledger.profile import ATTESTED, HOUR_SECONDS, PATIENCE_SECONDS, SELF
from cosmati.train.observers import witnessing
from cosmati.train.observers.witnessing import AskedWitnesses, asked_witnesses

GONE = LedgerError("gone.")


class World:
    """Two witnesses, and a clock. `answers` are what they raise; `seen` is what they were asked with."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, quorum: int = 1) -> None:
        self.now = 1000.0
        self.answers: dict[str, Exception | None] = {"w0": None, "w1": None}
        self.seen: list[tuple[Path, str, str]] = []
        self.lock = threading.Lock()
        patch.setattr(witnessing, "monotonic", lambda: self.now)
        patch.setattr(witnessing, "ask_witness", self._asked)
        profile: Any = SimpleNamespace(name=name, quorum=quorum, witnesses=("w0", "w1"))
        sends: Any = ["send 0", "send 1"]
        self.asked = AskedWitnesses(Path("ledger"), profile, sends)

    def _asked(self, directory: Path, witness: str, send: str) -> None:
        with self.lock:
            self.seen.append((directory, witness, send))
        if (error := self.answers[witness]) is not None:
            raise error


BOTH = [(Path("ledger"), "w0", "send 0"), (Path("ledger"), "w1", "send 1")]


def pauses_of(world: World, patch: pytest.MonkeyPatch) -> list[float]:
    """Let the thread note how long it would wait at first, and end."""
    pauses = list[float]()
    patch.setattr(world.asked, "_go_on", pauses.append)
    return pauses


def test_each_witness_is_asked_through_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ATTESTED)
    assert world.asked._ask() is True
    assert sorted(world.seen) == BOTH
    world.answers["w1"] = OSError("down")
    assert [world.asked._ask_one(index) for index in (0, 1)] == ["", "down"]


def test_an_attested_run_begins_with_its_quorum_and_asks_again_in_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ATTESTED)
    world.answers["w0"] = GONE
    pauses = pauses_of(world, monkeypatch)
    world.asked.begin()
    world.asked.close()
    assert (sorted(world.seen), pauses) == (BOTH, [HOUR_SECONDS])


def test_an_attested_run_does_not_begin_without_its_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ATTESTED)
    world.answers = {"w0": GONE, "w1": OSError("down.")}
    pauses = pauses_of(world, monkeypatch)
    with pytest.raises(WitnessRefusedError) as caught:
        world.asked.begin()
    said = "Training doesn't begin: 0 of 2 witnesses have cosigned. gone. down. Wait until they answer, or take "
    assert str(caught.value).startswith(said + "ledger_profile='self'")
    assert pauses == []
    assert world.asked._thread is None


def test_any_other_run_begins_at_once_and_asks_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, SELF)
    world.answers = {"w0": GONE, "w1": GONE}
    pauses = pauses_of(world, monkeypatch)
    world.asked.begin()
    thread = world.asked._thread
    assert thread is not None
    assert (thread.daemon, thread.name) == (True, "cosmati-witnesses")
    world.asked.close()
    assert (world.seen, pauses, thread.is_alive()) == ([], [0.0], False)


def test_who_was_closed_can_begin_again_and_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, SELF)
    world.asked.close()
    assert world.asked._closed.is_set()
    is_closed = list[bool]()
    monkeypatch.setattr(world.asked, "_go_on", lambda pause: is_closed.append(world.asked._closed.is_set()))
    world.asked.begin()
    world.asked.close()
    assert is_closed == [False]
    assert world.asked._closed.is_set()


def test_what_is_being_asked_is_given_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    world, waited = World(monkeypatch, SELF), list[float]()
    thread: Any = SimpleNamespace(join=waited.append)
    world.asked._thread = thread
    world.asked.close()
    assert waited == [15.0]


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize(("name", "num_gone", "is_met"), [(ATTESTED, 1, True), (ATTESTED, 2, False), (SELF, 1, False)])
def test_the_end_is_asked_for_once_and_said_where_it_is_not_witnessed(
    name: str, num_gone: int, is_met: bool, must: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, name)
    world.answers.update({f"w{index}": GONE for index in range(num_gone)})
    words = rf"The end of the run isn't witnessed: {2 - num_gone} of 2 witnesses have cosigned\. gone\."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if is_met:
            world.asked.end(must=must)
        elif must and name == ATTESTED:
            with pytest.raises(WitnessRefusedError, match=words + ".* All is on disk: start the run again"):
                world.asked.end(must=must)
        else:
            with pytest.raises(UserWarning, match=words):
                world.asked.end(must=must)
    assert sorted(world.seen) == BOTH
    assert world.asked._closed.is_set()


def test_an_attested_run_has_an_hour_and_some_patience_from_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_stopped in ((ATTESTED, True), (SELF, False)):
        world = World(monkeypatch, name, quorum=2)
        world.answers["w0"] = GONE
        world.now += HOUR_SECONDS
        assert not world.asked._ask()
        world.now += PATIENCE_SECONDS
        assert world.asked.refuse() == ""
        world.now += 0.5
        said = "its ledger couldn't be witnessed for an hour: 1 of 2 witnesses have cosigned. gone."
        assert world.asked.refuse() == (said if is_stopped else "")


def test_a_quorum_of_all_is_met_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ATTESTED, quorum=2)
    assert world.asked._ask()
    world.answers["w1"] = ForkError("forked")
    assert not world.asked._ask()
    assert world.asked.refuse() == "forked"


def test_witnesses_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: Any = {"one": ("key 1", "http://1"), "two": ("key 2", "http://2"), "three": ("key 3", "http://3")}
    monkeypatch.setattr(witnessing, "witness_and_url", keys.__getitem__)
    monkeypatch.setattr(witnessing, "over_http", lambda url: f"over {url}")

    def made(*witnesses: str, quorum: int = 0) -> AskedWitnesses | None:
        config: Any = SimpleNamespace(witnesses=witnesses, witness_quorum=quorum, ledger_profile=ATTESTED)
        return asked_witnesses(Path("run"), config)

    assert made() is None
    for quorum, needed in ((0, 3), (2, 2)):
        found = made("one", "three", "two", quorum=quorum)
        assert found is not None
        profile = found.profile
        assert (profile.name, profile.witnesses, profile.quorum) == (ATTESTED, ("key 1", "key 3", "key 2"), needed)
        assert (found._directory, found._sends) == (
            Path("run/ledger"),
            ["over http://1", "over http://3", "over http://2"],
        )
