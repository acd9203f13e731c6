"""Who finds a lock taken waits for it: the other one is about to be done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cosmati.ledger.cosigned import FOLDER, ask_witness
from cosmati.ledger.derived.folder import _locked
from cosmati.ledger.witness import Witness
from cosmati.storage.lock import FileLock

from .ledgers import write_run
from .test_witness import KEY, witness_at


def waited(lock: Path, act: Callable[[], object]) -> None:
    """Act while somebody holds a lock, who lets go after a while."""
    held, lets_go = FileLock(lock), threading.Event()

    def let_go() -> None:
        lets_go.set()
        held.release()

    timer = threading.Timer(0.3, let_go)
    timer.start()
    act()
    assert lets_go.is_set()
    timer.join()


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, Witness]:
    write_run(tmp_path / "l", KEY, 5).close()
    return tmp_path / "l", witness_at(tmp_path / "w")


def test_a_witness_waits_for_itself(asked: tuple[Path, Witness], tmp_path: Path) -> None:
    ledger, witness = asked
    waited(tmp_path / "w" / "lock", lambda: witness.trust(KEY.verifier))
    waited(tmp_path / "w" / "lock", lambda: ask_witness(ledger, witness.key, witness.send))
    assert len(list((ledger / FOLDER).iterdir())) == 1


def test_who_keeps_a_cosignature_waits_for_another(asked: tuple[Path, Witness]) -> None:
    ledger, witness = asked
    waited(ledger / "cosigned.lock", lambda: ask_witness(ledger, witness.key, witness.send))
    assert len(list((ledger / FOLDER).iterdir())) == 1


def test_who_derives_tables_waits_for_another(tmp_path: Path) -> None:
    def derive() -> None:
        with _locked(tmp_path):
            pass

    waited(tmp_path / "lock", derive)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: derive(), range(20))) == [None] * 20
