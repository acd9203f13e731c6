"""One writer of a folder, and none that comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cosmati.storage.fence import Fence, fence_off
from cosmati.storage.lock import is_locked


def test_a_second_writer_is_refused_and_one_after_the_first_is_counted(tmp_path: Path) -> None:
    first = Fence(tmp_path)
    with pytest.raises(BlockingIOError):
        Fence(tmp_path)
    assert (first.holds(), first.number) == (True, 1)
    first.release()
    second = Fence(tmp_path)
    assert (first.holds(), second.holds(), second.number) == (False, True, 2)
    second.release()


def test_a_writer_that_is_fenced_off_is_stale_and_leaves_room(tmp_path: Path) -> None:
    first = Fence(tmp_path)
    fence_off(tmp_path)
    assert not first.holds()
    second = Fence(tmp_path)  # though the first still has its lock, of a file that is no more
    first.release()
    assert (first.holds(), second.holds(), second.number) == (False, True, 3)
    assert is_locked(tmp_path / "lock")
    second.release()


def test_a_lock_that_is_let_go_in_time_stays(tmp_path: Path) -> None:
    first = Fence(tmp_path)
    first.release()
    before = (tmp_path / "lock").stat().st_ino
    began = time.monotonic()
    fence_off(tmp_path, wait_seconds=30.0)
    assert time.monotonic() - began < 5.0
    assert (tmp_path / "lock").stat().st_ino == before


def test_two_are_never_fenced_to_one_token(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        fence_off(tmp_path)
        seen.add((tmp_path / "epoch").read_text())
        (tmp_path / "epoch").write_text("1 somebody else's\n")
    assert len(seen) == 3


def test_what_is_no_epoch_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_bytes(b"\xff torn")
    fence = Fence(tmp_path)
    assert (fence.number, fence.holds()) == (1, True)
    fence.release()


def test_nothing_is_made_where_there_is_no_folder(tmp_path: Path) -> None:
    fence_off(tmp_path / "none")
    assert not (tmp_path / "none").exists()
