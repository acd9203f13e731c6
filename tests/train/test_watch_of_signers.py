"""The watch over who vouches for a run's data, without a run: when those who are asked are to be asked at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.routing.policy import CompiledPolicy, Phase
from cosmati.train.authority_watch import AuthorityWatch
from tests.train.hand_made import POLICY


def in_phases(*starts: int) -> CompiledPolicy:
    """A policy with a phase from each step on."""
    bounds = zip(starts, (*starts[1:], 40), strict=True)
    return replace(
        POLICY,
        phases=tuple(Phase(f"from {start}", start, stop) for start, stop in bounds),
        weight=tuple((one[0],) * len(starts) for one in POLICY.weight),
        decision=tuple((one[0],) * len(starts) for one in POLICY.decision),
    )


def woken(watch: AuthorityWatch) -> list[int]:
    """The steps at which somebody is asked at once."""
    found: list[int] = []
    clock: Any = SimpleNamespace(step=0)
    asking: Any = SimpleNamespace(wake=lambda: found.append(clock.step), newest=dict)
    watch._askings = [asking]
    for step in range(40):
        clock.step = step
        assert watch.heed(clock) is None
    return found


def watch_of(policy: CompiledPolicy | None) -> AuthorityWatch:
    ranks = SimpleNamespace(rank=0, told=lambda message: message)
    router = SimpleNamespace(tighten=lambda _policy: None)
    config = SimpleNamespace(run_folder=None)
    assembly: Any = SimpleNamespace(policy=policy, ranks=ranks, router=router, config=config)
    return AuthorityWatch((), None, assembly, None)


@pytest.mark.parametrize("starts", [(0,), (0, 7), (0, 7, 9), (0, 5, 20, 31)])
def test_at_the_border_of_each_phase_but_the_first_they_are_asked_at_once(starts: tuple[int, ...]) -> None:
    assert woken(watch_of(in_phases(*starts))) == [*starts[1:]]


def test_without_a_policy_there_is_no_border() -> None:
    assert not woken(watch_of(None))


@pytest.mark.parametrize("starts", [(0,), (0, 6), (0, 6, 13)])
def test_by_another_policy_the_borders_are_that_ones(starts: tuple[int, ...]) -> None:
    watch = watch_of(in_phases(0, 3, 8))
    other = in_phases(*starts)
    assert watch.rebase(other, None, None) == other
    assert woken(watch) == [*starts[1:]]
