"""A change of the policy that a checkpoint already has is made once by whoever goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.train.policy_watch import FILE, PolicyWatch, policy_changes_in
from tests.train.policy_world import AFTER, leave, trainer

pytestmark = pytest.mark.long


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_change_is_made_once_wherever_the_run_is_stopped(stop: int, tmp_path: Path) -> None:
    """What is left after step 4 acts from step 5 on."""
    events = {4: leave(AFTER)}
    run = trainer(tmp_path, {**events, stop: lambda own: own.stop()} if stop > 4 else events)
    if stop > 4:
        run.fit()
    else:
        with run:
            while run.clock.step < 5:
                run._get_ready()
                run._take(*run._next(run.feed))  # type: ignore[arg-type, misc]
            run.save()
    trainer(tmp_path).fit()
    assert [one["step"] for one in policy_changes_in(tmp_path)] == [5]


@pytest.mark.parametrize("held", [b"read", b"another since", None])
def test_a_file_that_was_read_is_taken_away_unless_another_has_come(held: bytes | None, tmp_path: Path) -> None:
    watch: Any = object.__new__(PolicyWatch)
    watch._folder = tmp_path
    if held is not None:
        (tmp_path / FILE).write_bytes(held)
    watch._take_away(None)
    watch._take_away(b"read")
    assert watch._content() == (None if held == b"read" else held)
    # Somebody takes it away between the look and that.
    watch._content = lambda: b"read"
    (tmp_path / FILE).unlink(missing_ok=True)
    watch._take_away(b"read")
