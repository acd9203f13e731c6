"""What every test runs under: one thread, one seed, laws without a deadline, no wait for a disk, and no silent skip."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from hypothesis import settings

from tools.slurm_on_one_host import missing_programs

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_READING = ("cosmati-ahead", "cosmati-fetch", "cosmati-read")

torch.set_num_threads(1)
# Compiled code lies beside the sources, where git ignores it, whatever the environment says: without it each worker
# rewrites the assertions of six hundred files anew, and each process that a test begins compiles what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests write into memory where there's enough: a sixth of their time went to the disk.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= 2 << 30:
    (_MEMORY / f"cosmati-tests-{os.getuid()}").mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = str(_MEMORY / f"cosmati-tests-{os.getuid()}")
    tempfile.tempdir = None  # looked up anew
# What a shell starts in the background ignores Ctrl-C, and so would every process that a test begins and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected: there's much to look at, and little garbage


def _lacking() -> dict[str, str]:
    """Markers whose tests can't run on this machine, with what is absent."""
    present = {
        "gpu": (torch.cuda.is_available(), "no CUDA device"),
        "ray": (importlib.util.find_spec("ray") is not None, "Ray isn't installed"),
        "torchft": (importlib.util.find_spec("torchft") is not None, "torchft isn't installed"),
        "slurm": (not missing_programs(), "Slurm isn't installed, with its controller"),
        "s3": (importlib.util.find_spec("moto") is not None, "moto isn't installed"),
        "browser": (
            shutil.which("chromium") is not None and importlib.util.find_spec("playwright") is not None,
            "Chromium or Playwright isn't installed",
        ),
        "bench": (importlib.util.find_spec("lightning") is not None, "the extra `bench` isn't installed"),
    }
    return {marker: reason for marker, (found, reason) in present.items() if not found}


def pytest_collection_finish() -> None:
    """Look for garbage again, and never at what's there by now: nine thousand tests and all modules stay to the end."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a thing that this machine lacks, and say which."""
    lacking = _lacking()
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):  # Who takes the fixture need not say so again.
            item.add_marker("browser")
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Begin with PyTorch's generator seeded, and leave the path of imports as it was.

    PyTorch seeds itself by chance in each process: a model that a test builds without a seed would be another one each
    time. A study's file leaves its folder on the path, where others' modules may lie.
    """
    torch.manual_seed(0)
    before = list(sys.path)
    try:
        return (yield)
    finally:
        sys.path[:] = before


@pytest.fixture
def alone() -> None:
    """Begin when no thread reads any more for an earlier test: for what counts, or patches, what all threads share."""
    until = time.monotonic() + 1.0  # one that a fixture of a wider scope holds waits, and does nothing
    gc.collect()
    while any(one.name in _READING for one in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what recipes cache out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_modules_of_others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test has imported from a folder of its own: another's file may have that name."""
    folder, before = str(tmp_path_factory.getbasetemp()), set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        # Not `getattr`, which modules of PyTorch answer for any name.
        if str(vars(sys.modules[name]).get("__file__")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def no_seed_for_what_is_not_there() -> Iterator[None]:
    """Let `torch.manual_seed` leave out devices that aren't here: it keeps a stack for each, which takes 0.3 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda _seed: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Let a sync end at once. A killed process leaves what it wrote all the same; what has to be synced, spies see."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, _only_looked_up, raising=False)
        yield


def _only_looked_up(file: int | IO[bytes]) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())  # a closed one is still an error
