"""Segments that are replayed together: each is told what was found in it and before, and none after an interruption."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.ledger.difference import LedgerDifference
from cosmati.train import replay as replaying
from cosmati.train.replay import ReplayFound, replay_segments

GROUPS = [(0, [range(2, 4), range(3, 8)]), (8, [range(9, 12)])]


def replayed(monkeypatch: pytest.MonkeyPatch, steps: list[int | None], *, cut_at: int = 99) -> list[ReplayFound]:
    """Replay, with differences at some steps, and interrupted before one."""

    def fake(_run: object, whole: range, _make: object, **asked: Any) -> ReplayFound:
        assert asked["keep_going"], "a later segment is looked at, too"
        start = asked["start"].step
        assert whole == ((range(2, 8)) if start == 0 else range(9, 12))
        own = tuple(
            LedgerDifference(one, "loss", "1", "2") for one in steps if one is None or start <= one < whole.stop
        )
        return ReplayFound(
            segment=whole,
            start=start,
            from_entry_0=False,
            num_steps=min(whole.stop, cut_at) - start,
            num_roots=0,
            differences=own,
            num_differences=len(own),
            without_rows=frozenset(),
            forgotten={},
            skipped=(),
            doubts=(),
            is_interrupted=start <= cut_at < whole.stop,
        )

    monkeypatch.setattr(replaying, "replay", fake)
    planned: Any = [(SimpleNamespace(step=start), group) for start, group in GROUPS]
    run: Any = None
    make: Any = None
    return replay_segments(run, planned, make, ledger=Path())


def told(found: list[ReplayFound]) -> list[tuple[range, list[int | None], bool]]:
    return [(one.segment, [d.step for d in one.differences], one.is_interrupted) for one in found]


def test_each_segment_is_told_what_was_found_in_it_and_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replayed(monkeypatch, [None, 1, 3, 4, 7, 10])
    assert told(found) == [
        (range(2, 4), [None, 1, 3], False),
        (range(3, 8), [None, 1, 3, 4, 7], False),
        (range(9, 12), [None, 10], False),
    ]
    assert [one.num_differences for one in found] == [3, 5, 2]


@pytest.mark.parametrize(("cut_at", "cut"), [(3, [True] * 3), (4, [False, True, False]), (6, [False, True, False])])
def test_what_was_not_reached_is_told_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, cut_at: int, cut: list[bool]
) -> None:
    found = replayed(monkeypatch, [], cut_at=cut_at)
    assert [one.segment for one in found] == [range(2, 4), range(3, 8), range(9, 12)]
    assert [one.is_interrupted for one in found[:2]] == cut[:2]
    assert [found[-1].is_interrupted, found[-1].num_steps] == [True, 0]
    assert replace(found[-1], start=0) == replace(found[1], segment=range(9, 12), num_steps=0, start=0)


@pytest.mark.parametrize("steps", [[], [2]])
@pytest.mark.parametrize("cut_at", [4, 7])
def test_groups_after_an_interruption_are_told_as_not_reached_and_with_nothing_found(
    steps: list[int | None], cut_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At 7 the group's last segment is through, and the one before it isn't.
    monkeypatch.setattr(sys.modules[__name__], "GROUPS", [(0, [range(2, 8), range(3, 4)]), GROUPS[1]])
    found = replayed(monkeypatch, steps, cut_at=cut_at)
    assert [one.is_interrupted for one in found] == [True, False, True]
    assert (found[-1].outcome, found[-1].num_steps, found[-1].differences) == ("interrupted", 0, ())
