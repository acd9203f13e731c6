"""What ranks say to each other while a checkpoint is saved: who fails says so, and nobody waits in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.clock import Clock
from cosmati.errors import CheckpointError, RunError
from cosmati.train.ranks import Ranks
from cosmati.train.run import saving
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints
from cosmati.train.run.saving import Saver


class First(Ranks):
    """The first of two ranks, the second of which has nothing to say; writes down what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_parallel, self.world, self.said = True, 2, list[bool]()

    def agree(self, flag: bool) -> bool:
        self.said.append(flag)
        return flag

    def barrier(self) -> None:
        self.said.append(False)


class Copying:
    """Copies of which one is under way for so many moments."""

    def __init__(self, moments: int) -> None:
        self.moments, self.begun = moments, list[Path]()

    def wait(self, seconds: float | None = None) -> bool:
        assert seconds is not None or self.moments <= 0, "the other ranks would wait in a collective"
        self.moments -= bool(seconds)
        return self.moments < 0

    def begin(self, checkpoint: Path) -> None:
        self.begun.append(checkpoint)

    def settle(self) -> None:
        self.begun.append(Path("settled"))


def saver(folder: Path, ranks: Ranks, copies: Any = None, *, is_async: bool = False) -> Saver:
    given: dict[str, Any] = {"check": lambda: None, "tell": lambda *_: None, "is_async": is_async, "copies": copies}
    return Saver(folder, ranks, keep=2, epoch=1, **given)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.ones(2)}, {}, {})


@pytest.mark.parametrize("place", ["write_checkpoint", "publish_checkpoint"])
def test_a_disk_that_refuses_the_first_rank_is_told_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object, **__: object) -> None:
        error = OSError(28, "No space left on device")
        raise error if place == "publish_checkpoint" else saving.not_written(1, tmp_path, error)

    monkeypatch.setattr(saving, place, full)
    ranks = First()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 couldn't be written to .*No space left"):
        saver(tmp_path, ranks).save(Clock(step=1), checkpoint(1))
    assert ranks.said[-1]
    assert not any(ranks.said[:-1])


def test_others_do_not_wait_for_a_slow_copy_in_one_collective(tmp_path: Path) -> None:
    """A collective gives up after some minutes, and a copy may take longer."""
    ranks, copies = First(), Copying(3)
    one = saver(tmp_path, ranks, copies)
    one.save(Clock(step=1), checkpoint(1))
    assert ranks.said.count(True) == 3
    assert [path.name for path in copies.begun] == ["step-00000001"]
    copies.moments = 2
    one.settle(copied=True)
    assert ranks.said.count(True) == 5
    assert copies.begun[-1].name == "settled"


def test_beside_the_loop_a_checkpoint_waits_for_the_copy_and_not_the_loop(tmp_path: Path) -> None:
    ranks, copies = First(), Copying(1)
    one = saver(tmp_path, ranks, copies, is_async=True)
    one.save(Clock(step=1), checkpoint(1))
    assert one._flight is not None
    one._flight.join(60)
    one.land(wait=False)
    assert list_checkpoints(tmp_path) == []
    one.settle()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"] == [p.name for p in copies.begun]


def test_who_has_become_stale_while_observers_were_told_publishes_nothing(tmp_path: Path) -> None:
    told: list[int] = []

    def check() -> None:
        if told:
            raise RunError("stale")

    given: dict[str, Any] = {"check": check, "is_async": False, "copies": None}
    one = Saver(tmp_path, Ranks(), keep=2, epoch=1, tell=lambda clock, _: told.append(clock.step), **given)
    with pytest.raises(RunError, match="stale"):
        one.save(Clock(step=1), checkpoint(1))
    assert told == [1]
    assert list_checkpoints(tmp_path) == []
