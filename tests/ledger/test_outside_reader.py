from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cosmati.ledger.keys import SigningKey

from . import outside_reader
from .ledgers import ORIGIN, write_run


@pytest.mark.parametrize("num_steps", [1, 3, 210])
def test_a_reader_that_knows_only_the_specifications_verifies_the_log(tmp_path: Path, num_steps: int) -> None:
    with write_run(tmp_path / "ledger", SigningKey.generate(ORIGIN), num_steps, every=1000) as writer:
        head = writer.checkpoint()
    assert outside_reader.check_log(tmp_path / "ledger") == (ORIGIN, head.size)


def test_the_reader_needs_nothing_of_the_package(tmp_path: Path) -> None:
    write_run(tmp_path / "ledger", SigningKey.generate(ORIGIN), 5).close()
    command = [sys.executable, "-I", outside_reader.__file__, str(tmp_path / "ledger")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{ORIGIN} 7\n"
    source = Path(outside_reader.__file__).read_text()
    assert "import cosmati" not in source
    assert "from cosmati" not in source


def test_the_reader_refuses_a_changed_entry(tmp_path: Path) -> None:
    write_run(tmp_path / "ledger", SigningKey.generate(ORIGIN), 5).close()
    bundle = tmp_path / "ledger/tile/entries/000.p/7"
    data = bytearray(bundle.read_bytes())
    data[-1] ^= 1
    bundle.write_bytes(data)
    with pytest.raises(AssertionError, match="signed root"):
        outside_reader.check_log(tmp_path / "ledger")
