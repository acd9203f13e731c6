"""Optimizers' state is asked of the layout as optimizers', methods' as methods': matrices have owners for the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.train.run.checkpoints import publish_checkpoint, read_checkpoint, whole, write_checkpoint
from cosmati.train.snapshot import restore, snapshot
from tests.train.test_snapshot import CLOCK, _prepared, _states, _train


def test_each_state_is_held_and_given_back_as_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, feed, _ = _prepared(0)
    _train(assembly, feed, 1)
    asked: list[tuple[str, bool, bool]] = []

    def spied(name: str) -> Any:
        real = getattr(type(assembly.layout), name)

        def spy(self: Any, state: Any, *, of_optimizers: bool) -> Any:
            asked.append((name, "mean" in state, of_optimizers))
            return real(self, state, of_optimizers=of_optimizers)

        return spy

    for name in ("held_state", "own_state"):
        monkeypatch.setattr(type(assembly.layout), name, spied(name))
    taken = whole(snapshot(assembly, _states(1.0, 2.0), CLOCK, assembly.plan, feed))
    checkpoint = read_checkpoint(publish_checkpoint(write_checkpoint(tmp_path, taken), keep=1))
    of_two_optimizers, of_methods = [(False, True)] * 2, [(True, False), (False, False), (True, False)]
    assert [one[1:] for one in asked if one[0] == "held_state"] == [*of_two_optimizers, *of_methods]
    asked.clear()
    restore(checkpoint, assembly, feed)
    assert [one[1:] for one in asked if one[0] == "own_state"] == [*of_two_optimizers, *of_methods]
