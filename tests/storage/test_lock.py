from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cosmati.storage.lock import FileLock, is_locked

pytestmark = pytest.mark.long

HOLD = "import sys, time; from pathlib import Path; from cosmati.storage.lock import FileLock\n"
HOLD += "lock = FileLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(100)"


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    first.release()
    first.release()
    with FileLock(path) as second, pytest.raises(BlockingIOError):
        FileLock(second.path)
    FileLock(path).release()


def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            FileLock(path)
        holder.kill()
    FileLock(path).release()


@pytest.mark.parametrize("is_renamed", [True, False])
def test_who_waited_locks_the_file_that_the_path_names_then(tmp_path: Path, is_renamed: bool) -> None:
    path, found = tmp_path / "lock", []
    first = FileLock(path)

    def wait() -> None:
        with FileLock(path, wait=True) as second:
            found.append(second.is_in_place())

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert first.is_in_place()
    if is_renamed:
        path.rename(tmp_path / "other")
    else:
        path.unlink()
    assert not first.is_in_place()
    first.release()
    waiting.join(20)
    assert (found, path.exists()) == ([True], True)


def test_a_path_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "none" / "lock")


PARENT = """
import os, sys, time
from pathlib import Path
from cosmati.storage.lock import FileLock, is_locked

lock = FileLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_that_outlives_its_killed_parent_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(BlockingIOError):
            FileLock(path)
        parent.kill()
        parent.wait()
        # The child lets go as soon as it runs.
        until = time.monotonic() + 60
        while is_locked(path) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(child, 0)  # It's alive.
        FileLock(path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_waits_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    waiting = threading.Thread(target=lambda: FileLock(path, wait=True).release())
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        first.release()
        waiting.join(10)
        FileLock(path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_children_forked_while_locks_come_and_go_hold_none(tmp_path: Path) -> None:
    is_over = threading.Event()

    def come_and_go(number: int) -> None:
        while not is_over.is_set():
            FileLock(tmp_path / f"{number}", wait=True).release()

    threads = [threading.Thread(target=come_and_go, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = []
    try:
        for _ in range(40):
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(100)
                os._exit(0)
        is_over.set()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert not any(map(is_locked, tmp_path.iterdir()))
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        is_over.set()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


WAITING = """
import os, sys, threading, time
from pathlib import Path
from cosmati.storage.lock import FileLock, _known

locks = []
waiting = threading.Thread(target=lambda: locks.append(FileLock(Path(sys.argv[1]), wait=True)))
waiting.start()
while not any(lock._descriptor >= 0 for lock in list(_known)):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
waiting.join()
print("held", flush=True)
time.sleep(60)
"""


def test_a_child_forked_while_a_thread_waited_holds_nothing_once_its_parent_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    parent = subprocess.Popen([sys.executable, "-c", WAITING, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        first.release()
        assert parent.stdout.readline() == "held\n"
        assert is_locked(path)
        parent.kill()
        parent.wait()
        until = time.monotonic() + 60
        while is_locked(path) and time.monotonic() < until:
            time.sleep(0.01)  # The child lets go as soon as it runs.
        os.kill(child, 0)  # It's alive.
        assert not is_locked(path)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.stdout.close()


LATE_CHILD = """
import os, sys, time
os.register_at_fork(after_in_child=lambda: time.sleep(60))  # before the lock's own
from pathlib import Path
from cosmati.storage.lock import FileLock, is_locked

path = Path(sys.argv[1])
lock = FileLock(path)
child = os.fork()
lock.release()
print(is_locked(path))
os.kill(child, 9)
"""


def test_a_lock_that_is_released_is_free_though_a_child_has_not_closed_its_copy_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATE_CHILD, str(tmp_path / "lock")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
