"""No thread of ours keeps a process alive that has nothing else to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.ledger.derived import views
from cosmati.train.all_ranks import meet
from cosmati.train.asking import Asking
from cosmati.train.observers.witnessing import AskedWitnesses
from tests.train.policy_world import AFTER, leave, trainer


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    found: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(self: threading.Thread) -> None:
        found.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    yield found
    assert all(thread.daemon for thread in found), [thread.name for thread in found if not thread.daemon]


def test_threads_of_a_run_that_writes_copies_and_looks_for_policies(
    tmp_path: Path, begun: list[threading.Thread]
) -> None:
    (tmp_path / "run").mkdir()
    leave(AFTER)(_at(tmp_path / "run"))
    trainer(tmp_path / "run", checkpoint_async=True, checkpoint_to=str(tmp_path / "copies")).fit()
    assert {"cosmati-ledger", "checkpoint", "copy", "cosmati-policy"} <= {thread.name for thread in begun}


def _at(folder: Path) -> Any:
    config = SimpleNamespace(run_folder=folder)
    return SimpleNamespace(assembly=SimpleNamespace(config=config), policy_watch=SimpleNamespace(look=lambda: None))


def test_threads_that_ask(begun: list[threading.Thread]) -> None:
    asking: Any = object.__new__(Asking)
    asking._thread, asking._wake, asking._ask = None, threading.Event(), lambda: None
    asking.start()
    witnessing: Any = object.__new__(AskedWitnesses)
    witnessing._is_attested, witnessing._closed, witnessing._go_on = False, threading.Event(), lambda _pause: None
    witnessing.begin()
    assert [thread.name for thread in begun] == ["cosmati-authority", "cosmati-witnesses"]


def test_threads_that_wait(begun: list[threading.Thread]) -> None:
    ranks: Any = SimpleNamespace(is_parallel=True, rank=0, agree=lambda flag: flag)
    meet(ranks, "save()")
    with views._answering(lambda: None, 100.0):
        pass
    for thread in begun:
        thread.join(10)
    assert len(begun) == 2
    assert not any(thread.is_alive() for thread in begun), "nobody waits any more"
