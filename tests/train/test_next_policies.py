"""Which version of a policy a run that follows it is handed: the very next one, once, and why it can't be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import PolicyError

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
from cosmati.provenance.authority import policies  # needs it
from cosmati.train import policy_source
from cosmati.train.policy_source import PolicySource


class World:
    """An authority with versions of a policy, some of which can't be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers, self.broken = {1}, dict[int, str]()
        monkeypatch.setattr(policies, "numbers_of", lambda _chain, _name: self.numbers)
        monkeypatch.setattr(policies, "read_policy", self._read)
        monkeypatch.setattr(policy_source, "policy_of_canonical", self._policy)
        self.source: Any = object.__new__(PolicySource)
        self.source._authority, self.source.place = SimpleNamespace(chain=None), SimpleNamespace(name="main")
        self.source._looked_at, self.source._told = 1, ""
        self.source.found = policy_source.SimpleQueue()

    def _read(self, _authority: object, name: str, number: int) -> Any:
        assert name == "main"
        if number in self.broken:
            raise PolicyError(self.broken[number])
        return str(number).encode(), SimpleNamespace(voucher=SimpleNamespace(target=f"policy/main/{number}"))

    @staticmethod
    def _policy(data: bytes, where: str) -> Any:
        assert where == f"policy/main/{data.decode()}"
        return SimpleNamespace(with_voucher=lambda vouched: (int(data), vouched.voucher.target))

    def found(self, number: int) -> list[Any]:
        self.source._look_for_the_next(number)
        return [self.source.found.get_nowait() for _ in range(self.source.found.qsize())]


def test_the_very_next_version_is_handed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.found(1) == []
    world.numbers = {1, 3}
    assert world.found(1) == [], "what stands behind a gap isn't looked at"
    world.numbers = {1, 2, 3}
    assert world.found(1) == [(2, "policy/main/2")]
    assert world.found(1) == [(3, "policy/main/3")]
    assert world.found(1) == []
    world.numbers |= {4, 5, 6}
    assert world.found(5) == [(6, "policy/main/6")], "after the one in force"


def test_why_one_cannot_be_read_is_told_once_and_it_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.numbers, world.broken = {1, 2}, {2: "no policy"}
    (error,) = world.found(1)
    assert str(error) == "no policy"
    assert world.found(1) == []
    world.broken[2] = "another reason"
    assert [str(one) for one in world.found(1)] == ["another reason"]
    world.broken.clear()
    assert world.found(1) == [(2, "policy/main/2")]


def test_only_a_version_of_this_policy_is_gone_by(monkeypatch: pytest.MonkeyPatch) -> None:
    source = World(monkeypatch).source
    for is_of in (False, True):
        source.vouched = "before"
        given: Any = SimpleNamespace(is_of=lambda place, told=is_of: told and place is source.place)
        source.go_by(given)
        assert source.vouched == (given if is_of else "before")
