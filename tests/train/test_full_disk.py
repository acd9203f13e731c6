"""A disk that fills while the ledger is written: a clear error, nothing lost, and a run that can go on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cosmati.ledger.verify import verify_ledger
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.processes import PythonProcess, run_python
from tests.train import full_disk_run

pytestmark = pytest.mark.long


def _run(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    return run_python([full_disk_run.__file__, folder, str(limit)])


def _weights(folder: Path) -> dict[str, object]:
    return {
        name: value.tolist()
        for name, value in read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model.items()
    }


@pytest.mark.parametrize("limit", [9_000, 14_000])
def test_the_run_stops_with_a_reason_and_goes_on_to_the_same_end(tmp_path: Path, limit: int) -> None:
    whole = _run(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    full = _run(tmp_path / "full", limit)
    assert full.returncode != 0
    assert "LedgerError" in full.stderr or "CheckpointError" in full.stderr or "RunError" in full.stderr
    again = _run(tmp_path / "full", 0)
    assert again.returncode == 0, again.stderr
    report = verify_ledger(tmp_path / "full" / "ledger")
    assert report.has_ended
    assert report.num_steps == 80
    assert report.diverged_steps == ()
    assert _weights(tmp_path / "full") == _weights(tmp_path / "whole")


def test_two_processes_in_one_folder_are_refused(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.train.full_disk_run import trainer\n"
        "with trainer(Path(sys.argv[1])): print('open', flush=True); time.sleep(600)\n"
    )
    holder = PythonProcess(["-c", script, tmp_path])
    try:
        assert holder.stdout.readline() == "open\n"
        second = _run(tmp_path, 0)
        assert second.returncode != 0
        assert "RunError" in second.stderr
        assert "Wait for it, stop it, or give this run a folder of its own" in second.stderr
    finally:
        holder.kill()
        holder.communicate()
    assert _run(tmp_path, 0).returncode == 0
