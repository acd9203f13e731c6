"""Processes that die or run out of space while they write. The kernel makes the errors."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from cosmati.ledger.keys import create_key, load_key
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import StepEntry
from tests.processes import PythonProcess

from .ledgers import ORIGIN, append_steps, run_entry, step_entry

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

WRITE_FOREVER = """
import sys
from pathlib import Path
from cosmati.ledger.keys import load_key
from cosmati.ledger.writer import LedgerWriter
from tests.ledger.ledgers import ORIGIN, step_entry
folder = Path(sys.argv[1])
writer = LedgerWriter.open(folder / "l", key=load_key(folder / "key", name=ORIGIN), checkpoint_every=5)
step = (writer.last_step() if writer.last_step() is not None else -1) + 1
while True:
    writer.append(*step_entry(step))
    if step % 3 == 0:
        writer.flush()
        print(step, flush=True)
    step += 1
"""

FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from cosmati.errors import LedgerError
from cosmati.ledger.keys import load_key
from cosmati.ledger.writer import LedgerWriter
from tests.ledger.ledgers import ORIGIN, step_entry
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
key = load_key(folder / "key", name=ORIGIN)
writer = LedgerWriter.open(folder / "l", key=key, checkpoint_every=int(sys.argv[3]))
flushed = -1
try:
    for step in range(10_000):
        writer.append(*step_entry(step))
        writer.flush()
        flushed = step
except LedgerError as error:
    print(flushed, error)
try:
    writer.close()
except LedgerError as error:
    print("close:", error)
"""


def start(folder: Path) -> LedgerWriter:
    key = create_key(folder / "key", name=ORIGIN)
    writer = LedgerWriter.create(folder / "l", origin=ORIGIN, key=key)
    writer.append(*run_entry())
    return writer


def child(script: str, *arguments: str) -> PythonProcess:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return PythonProcess(["-c", script, *arguments], env=environment, cwd=ROOT)


def test_killed_at_any_moment_nothing_flushed_is_lost(tmp_path: Path) -> None:
    start(tmp_path).close()
    key = load_key(tmp_path / "key", name=ORIGIN)
    chance, num_known = random.Random(5), 0
    for _ in range(8):
        with child(WRITE_FOREVER, str(tmp_path)) as process:
            flushed = int(process.stdout.readline())
            time.sleep(chance.uniform(0, 0.08))
            process.send_signal(signal.SIGKILL)
            flushed = max([flushed, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        verify_ledger(tmp_path / "l")
        with LedgerWriter.open(tmp_path / "l", key=key) as writer:
            last = writer.last_step()
            assert last is not None
            assert last >= flushed >= num_known
            steps = [e for e in writer.entries(0, writer.size) if isinstance(e, StepEntry)]
            assert steps == [step_entry(step)[0] for step in range(last + 1)]
            writer.append(*step_entry(last + 1))
            num_known = last + 1
        assert verify_ledger(tmp_path / "l", vkey=key.verifier.text).num_steps == num_known + 1


@pytest.mark.parametrize(("limit", "every"), [(20_000, 1000), (12_000, 10), (3_000, 1000)])
def test_a_full_disk_is_told_and_costs_nothing_that_was_flushed(tmp_path: Path, limit: int, every: int) -> None:
    start(tmp_path).close()
    with child(FILL_THE_DISK, str(tmp_path), str(limit), str(every)) as process:
        told, closing = process.communicate(timeout=280)[0].splitlines()
    flushed, _, message = told.partition(" ")
    for text in (message, closing):
        assert "can't be written: [Errno 27] File too large" in text
        assert "open the ledger again" in text
    assert int(flushed) >= 1
    verify_ledger(tmp_path / "l")
    with LedgerWriter.open(tmp_path / "l", key=load_key(tmp_path / "key", name=ORIGIN)) as writer:
        last = writer.last_step()
        assert last is not None
        assert last >= int(flushed)
        append_steps(writer, range(last + 1, last + 3))
    assert verify_ledger(tmp_path / "l").num_steps == last + 3
