"""What several ranks compute together is compared before a process's first step, and before 1, 2, 4, 8, ..."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.train import gradients
from cosmati.train.gradients import StepPasses


@pytest.mark.parametrize(("first", "looks"), [(0, [0, 1, 2, 4, 8, 16]), (3, [3, 4, 8, 16]), (9, [9, 16])])
def test_parts_are_compared_ever_more_rarely(first: int, looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(gradients, "refuse_unlike_parts", lambda *_: compared.append(step))
    passes: Any = object.__new__(StepPasses)
    passes._has_compared, passes._a, passes._roots, passes._scale = False, None, {}, lambda _step: None
    for step in range(first, 20):
        at = SimpleNamespace(clock=SimpleNamespace(step=step))
        given: Any = SimpleNamespace(positions=[at], batches=[None])
        turn: Any = None
        passes._compare(given, turn)
    assert compared == looks
