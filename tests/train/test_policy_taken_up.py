"""A change of the policy that a checkpoint already has is made once by whoever goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.train.policy_watch import policy_changes_in
from tests.train.policy_world import AFTER, leave, trainer


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
