"""Segments are replayed together where one begins at what the other has taken already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.train import replay
from cosmati.train.replay import plan_replays


def test_segments_whose_checkpoints_lie_within_others_are_taken_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """There's a checkpoint every ten steps."""
    monkeypatch.setattr(replay, "nearest_checkpoint", lambda _run, step, _at: SimpleNamespace(step=step // 10 * 10))
    run: Any = None

    def planned(*segments: range) -> list[tuple[int, list[range]]]:
        return [(start.step, group) for start, group in plan_replays(run, segments, Path())]

    assert planned() == []
    assert planned(range(33, 35), range(5, 7)) == [(0, [range(5, 7)]), (30, [range(33, 35)])]
    assert planned(range(5, 7), range(8, 12), range(11, 13)) == [(0, [range(5, 7), range(8, 12), range(11, 13)])]
    assert planned(range(5, 10), range(13, 14)) == [(0, [range(5, 10), range(13, 14)])]
    assert planned(range(5, 9), range(13, 14)) == [(0, [range(5, 9)]), (10, [range(13, 14)])]
    # The longest of a group counts, not the last.
    assert planned(range(1, 25), range(3, 4), range(22, 23)) == [(0, [range(1, 25), range(3, 4), range(22, 23)])]
