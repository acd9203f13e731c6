"""A study as an array of the real Slurm, on a controller and two nodes of this machine, which lose what can be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmati.launch.study_array import SlurmStudy
from cosmati.records.study import StudyRecord
from cosmati.study.runner import STUDY_FILE
from tests.launch.slurm_cluster import ENVIRONMENT, until
from tests.launch.studies import num_done, reached, run_in, starts_of, study_file
from tools.slurm_on_one_host import SlurmOnOneHost

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmOnOneHost]:
    with pytest.MonkeyPatch.context() as patch, SlurmOnOneHost(tmp_path_factory.mktemp("slurm")) as cluster:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield cluster


def begin(file: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Begin the study as its user does."""
    options = ["--folder", str(folder), "--on", "slurm", "--jobs", "4"]
    command = [sys.executable, "-m", "cosmati", "study", "run", str(file), *options]
    with (folder.parent / "said.txt").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=folder.parent)


def until_the_long_runs_wait(file: Path, folder: Path) -> list[list[str]]:
    """Wait until the short runs are done and the long ones have begun; return the starts of these."""
    until(lambda: num_done(folder) == 2 and len(_long(file)) == 2, 200.0, lambda: f"{starts_of(file)}")
    return _long(file)


def _long(file: Path) -> list[list[str]]:
    return [one for one in starts_of(file) if one[1] == "1"]


def test_a_node_and_a_task_that_are_killed_cost_time_and_no_bit(cluster: SlurmOnOneHost, tmp_path: Path) -> None:
    file, folder = study_file(tmp_path), tmp_path / "study"
    (tmp_path / "stall").touch()
    process = begin(file, folder)
    first, second = until_the_long_runs_wait(file, folder)
    os.kill(int(second[-2]), signal.SIGKILL)
    until(lambda: len(_long(file)) == 3)
    cluster.kill_node(first[-1])
    (tmp_path / "stall").unlink()
    try:
        assert process.wait(250) == 0, (tmp_path / "said.txt").read_text()
    finally:
        cluster.begin_node(first[-1])
        cluster.wait_until_idle()
    record = StudyRecord.from_json((folder / STUDY_FILE).read_text())
    logs = "".join(path.read_text() for path in (folder / "slurm" / "array-0").glob("task-*.log"))
    assert "Back to the queue, for time 1 of 3: it ended with status 137." in logs
    again = _long(file)[2]
    assert again[:3] == second[:3]  # the task alone was begun again, not the array
    assert len(_long(file)) == 5 if again[-1] == first[-1] else 4
    assert len([one for one in starts_of(file) if one[:2] == ["adam", "0.5"]]) == 1
    assert reached(record) == reached(run_in(file, tmp_path / "local"))


def test_who_waits_is_killed_and_the_array_goes_on(cluster: object, tmp_path: Path) -> None:
    file, folder = study_file(tmp_path, turns=2), tmp_path / "study"
    (tmp_path / "stall").touch()
    process = begin(file, folder)
    until_the_long_runs_wait(file, folder)
    process.kill()
    process.wait()
    (tmp_path / "stall").unlink()
    until(lambda: len(list((folder / "slurm" / "results").iterdir())) == 2)
    record = run_in(file, folder, SlurmStudy(str(file), folder, 4, {}))
    assert len(_long(file)) == 2  # none was begun again
    assert not (folder / "slurm" / "array-1").exists()
    assert reached(record) == reached(run_in(file, tmp_path / "local"))
    assert [(one.arm, one.num_threads) for one in record.costs] == [
        (arm, 1) for arm in ("baseline", "adam", "adam", "baseline")
    ]


def test_ctrl_c_cancels_the_array(cluster: object, tmp_path: Path) -> None:
    file, folder = study_file(tmp_path), tmp_path / "study"
    (tmp_path / "stall").touch()
    process = begin(file, folder)
    starts = until_the_long_runs_wait(file, folder)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    until(lambda: not [one for one in starts if Path(f"/proc/{one[-2]}").exists()], 30.0)
    assert len(_long(file)) == 2
    (tmp_path / "stall").unlink()
    assert reached(run_in(file, folder, SlurmStudy(str(file), folder, 4, {}))) == reached(
        run_in(file, tmp_path / "local")
    )


def test_ctrl_c_of_a_study_begun_again_cancels_the_array_of_before(cluster: object, tmp_path: Path) -> None:
    """While it asks for the hardware, before it has looked for arrays."""
    file, folder = study_file(tmp_path), tmp_path / "study"
    (tmp_path / "stall").touch()
    process = begin(file, folder)
    starts = until_the_long_runs_wait(file, folder)
    process.kill()
    process.wait()
    again = begin(file, folder)
    asking = ["pgrep", "-x", "-P", str(again.pid), "srun"]
    until(lambda: subprocess.run(asking, check=False, capture_output=True).returncode == 0)
    again.send_signal(signal.SIGINT)
    assert again.wait(60) == 130
    until(lambda: not [one for one in starts if Path(f"/proc/{one[-2]}").exists()], 30.0)
    assert len(_long(file)) == 2
