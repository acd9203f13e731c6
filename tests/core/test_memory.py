"""A step's memory is kept for the next step, and given back at the end."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from cosmati.core import memory
from cosmati.core.memory import freed_memory_kept

pytestmark = pytest.mark.long

FAULTS = """
import resource, torch
from contextlib import nullcontext
from cosmati.core.memory import freed_memory_kept

def step():
    kept = [torch.ones(1 << 21) for _ in range(16)]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def faults(context):
    with context:
        step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, resident()

at_first = resident()
usual, _ = faults(nullcontext())
print(at_first, usual, *faults(freed_memory_kept()), resident())
"""
"""A step of 128 MiB, twice: MiB held at first, faults of the second step by glibc's own rule, and with memory kept.

What glibc holds by its own rule varies: something small at the end of the heap keeps all of it.
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
def test_the_next_step_finds_the_memory_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    held_at_first, usual, kept, held, held_after = map(int, run.stdout.split())
    assert kept * 10 < usual
    assert held > held_at_first + 100, "the step's memory isn't kept"
    assert held_after < held - 100, "it isn't given back"


class Library:
    """Notes what it's asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def mallopt(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append((pad,))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    for name in memory._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return library


def test_thresholds_are_lowered_after_an_error_too(library: Library) -> None:
    context = freed_memory_kept()
    context.__enter__()
    assert library.calls == [(-3, 1 << 25), (-1, -1)]
    context.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert library.calls[2:] == [(-1, 1 << 26), (0,)]


@pytest.mark.parametrize("name", memory._SETTINGS)
def test_what_the_user_has_set_stands(library: Library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with freed_memory_kept():
        assert not library.calls
    assert not library.calls


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = object()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    entered = []
    with freed_memory_kept():
        entered.append(library)
    assert entered == [library]
