"""A loop of one's own is looked at once more as it ends well: a device that is asked rarely may know of something."""

from __future__ import annotations

import pytest

from tests.train.test_life_of_a_trainer import ROWS, make


@pytest.mark.parametrize("fails", [False, True])
def test_what_wasn_t_finite_is_asked_for_as_a_loop_ends(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, looked = make(), list[int]()
    with pytest.raises(ZeroDivisionError), trainer:  # noqa: PT012
        trainer.step(ROWS[0])
        monkeypatch.setattr(trainer.finite, "look", looked.append)
        if not fails:
            trainer.__exit__(None, None, None)
        raise ZeroDivisionError
    assert looked == ([] if fails else [1])
