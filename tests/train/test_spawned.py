"""A script is the same one in a process that multiprocessing spawned, though its module has another name there."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from torch import nn

from cosmati.train.identity import check_resume
from cosmati.train.options import name_of
from cosmati.train.user_code import is_library
from tests.processes import run_python

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("spawned_run.py")


def test_a_run_goes_on_in_spawned_processes_and_back(tmp_path: Path) -> None:
    done = run_python([SCRIPT, tmp_path / "run", "here", "spawned", "here"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["completed 2", "completed 4", "completed 6"]


def test_what_an_earlier_release_wrote_in_a_spawned_process() -> None:
    facts = {"loss 0.is": "__mp_main__.loss", "loss 0.owner.is": "__mp_main__.Task", "seed": 1}
    now = {name: fact.replace("_mp_", "_") if isinstance(fact, str) else fact for name, fact in facts.items()}
    assert now["loss 0.is"] == "__main__.loss"
    assert check_resume(facts, now, asked=(), where="It") == check_resume(now, facts, asked=(), where="It") == []


def test_a_script_within_a_library_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__mp_main__")
    script.__file__ = "/usr/lib/python3/site-packages/recipes/train.py"
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    is_library.cache_clear()
    assert not is_library("__mp_main__")
    assert name_of(type("Net", (nn.Module,), {"__module__": "__mp_main__"})) == "__main__.Net"
