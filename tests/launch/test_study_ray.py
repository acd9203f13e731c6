"""A study's runs as tasks of the real Ray: a cluster of nodes on this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cosmati
from cosmati.errors import RunError
from cosmati.launch.studies import cluster_of
from cosmati.launch.study_ray import RayTasks
from cosmati.records.study import StudyRecord
from cosmati.study.jobs import FailedCall
from cosmati.study.runner import FAILED_FILE, STUDY_FILE
from tests.launch.slurm_cluster import until
from tests.launch.studies import num_done, reached, run_in, starts_of, study_file

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of files that it leaves open
]
ROOT = Path(cosmati.__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    paths = os.pathsep.join([str(ROOT), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": paths}})
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_node_and_a_task_that_are_killed_cost_time_and_no_bit(cluster: Any, tmp_path: Path) -> None:
    file, folder = study_file(tmp_path, turns=2), tmp_path / "study"
    (tmp_path / "stall").touch()
    found: list[StudyRecord] = []
    carrier = cluster_of("ray", str(file), folder, 2, {"num-cpus": "1"})
    working = threading.Thread(target=lambda: found.append(run_in(file, folder, carrier)), daemon=True)
    working.start()

    def long() -> list[list[str]]:
        return [one for one in starts_of(file) if one[1] == "1"]

    until(lambda: num_done(folder) == 2 and len(long()) == 2, 200.0)
    os.kill(int(long()[0][-2]), signal.SIGKILL)
    until(lambda: len(long()) == 3)
    (node,) = cluster.worker_nodes
    cluster.add_node(num_cpus=2)
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: len(long()) == 5, 200.0)  # A process outlives its node for a moment, and could end its run in it.
    (tmp_path / "stall").unlink()
    working.join(200.0)
    assert not working.is_alive()
    assert len(long()) == 5
    assert len([one for one in starts_of(file) if one[:2] == ["adam", "0.5"]]) >= 1
    assert not (folder / FAILED_FILE).exists()
    (record,) = found
    assert reached(record) == reached(run_in(file, tmp_path / "local"))
    assert {one.num_threads for one in record.costs} == {1}
    assert len(record.costs) == 4


def end_at_once() -> None:
    os._exit(7)


def fail() -> None:
    raise ValueError("no room")


def refuse() -> None:
    raise RunError("nothing can go on")


def threads() -> int:
    import torch

    return torch.get_num_threads()


def test_what_tasks_end_with(cluster: object) -> None:
    with RayTasks(2, retries=1) as tasks:
        found = dict(tasks.outcomes({"dead": end_at_once, "bad": fail, "good": threads}))
        assert found["good"] == 1
        dead, bad = found["dead"], found["bad"]
        assert isinstance(dead, FailedCall)
        assert "The task of the run dead died more often" in dead.text
        assert isinstance(bad, FailedCall)
        assert bad.text == "ValueError: no room"
        assert "in fail" in bad.trace
        with pytest.raises(RunError, match="nothing can go on"):
            dict(tasks.outcomes({"end": refuse}))
        with pytest.raises(RunError, match="can't be sent"):
            dict(tasks.outcomes({"here": lambda: None}))


def test_the_command(cluster: Any, tmp_path: Path) -> None:
    file = study_file(tmp_path)
    command = [sys.executable, "-m", "cosmati", "study", "run", str(file), "--on", "ray"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def said(setting: str, status: int = 1) -> str:
        done = subprocess.run(
            [*command, "--with", setting], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "No Ray cluster answers at 127.0.0.1:1" in said("address=127.0.0.1:1")
    assert "retries=many is no number that Ray could take" in said("retries=many")
    assert "no setting nodes" in said("nodes=2")
    said(f"address={cluster.address}", status=0)
    record = StudyRecord.from_json((tmp_path / "small" / STUDY_FILE).read_text())
    assert record.command == f"cosmati study run {file} --on ray --with address={cluster.address}"
    assert reached(record) == reached(run_in(file, tmp_path / "local"))
