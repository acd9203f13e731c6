"""Slurm as it is: a controller and two nodes on this machine, which are killed as machines are."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmati.launch import LaunchState, launch, show, wait
from cosmati.launch.engine import AttemptPhase
from cosmati.launch.notes import processes_in
from cosmati.launch.slurm import SlurmEngine
from cosmati.records.attempts import read_attempts
from tests.launch.slurm_cluster import ENVIRONMENT, RECIPE, Job, result_of, step_of, until
from tests.processes import run_python
from tools.slurm_on_one_host import SlurmOnOneHost

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # A supervisor outlives the process that begins it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmOnOneHost]:
    with pytest.MonkeyPatch.context() as patch, SlurmOnOneHost(tmp_path_factory.mktemp("slurm")) as cluster:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """What one process makes of the recipe."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "small.py").write_text(RECIPE.replace("PAUSE", "0"))
    done = run_python(["-m", "cosmati", "train", folder / "small.py", "--run-folder", folder / "run"])
    assert done.returncode == 0, done.stderr
    return result_of(folder / "run")


def test_a_node_that_is_killed_costs_time_and_no_bit(
    cluster: SlurmOnOneHost, alone: tuple[bytes, int], tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(RECIPE.replace("PAUSE", "0.05"))
    queue, run = tmp_path / "queue", tmp_path / "run"
    job = launch(
        str(tmp_path / "small.py"),
        ranks=2,
        engine="slurm",
        engine_settings={"nodes": "1-2"},
        run_folder=run,
        environment=ENVIRONMENT,
        queue=queue,
    )
    until(lambda: step_of(run) >= 20)
    cluster.kill_node("n1")
    try:
        job = wait(job.id, queue=queue)
    finally:
        cluster.begin_node("n1")
        cluster.wait_until_idle()
    assert (job.state, job.step, job.reason) == (LaunchState.COMPLETED, 60, "")
    assert result_of(run) == alone
    # The other rank may have told of the one that it lost before it was ended too.
    begun, ended = (one.outcome for one in read_attempts(run))
    assert begun in ("", "failed")
    assert ended == "completed"
    # Slurm's own affair: for the queue it was one attempt.
    _, attempts, bad = show(job.id, queue)
    assert ([one.outcome for one in attempts], bad) == (["completed"], {})


def test_the_node_of_the_batch_script_is_killed(
    cluster: SlurmOnOneHost, alone: tuple[bytes, int], tmp_path: Path
) -> None:
    job = Job(tmp_path, 0.05, nodes="1-2")
    job.until(lambda: job.step >= 20)
    cluster.kill_node("n0")
    try:
        standing = job.ended()
    finally:
        cluster.begin_node("n0")
        cluster.wait_until_idle()
    assert (standing.phase, standing.status) == (AttemptPhase.ENDED, 0), job.log
    assert result_of(job.run) == alone
    assert len(read_attempts(job.run)) == 2
    assert job.num_requeues >= 1


def test_a_rank_that_is_killed_goes_on_without_the_queue(
    alone: tuple[bytes, int], cluster: object, tmp_path: Path
) -> None:
    job = Job(tmp_path, 0.05, nodes="2")
    job.until(lambda: job.step >= 20 and job.is_running)
    mark = list(processes_in(job.request.folder, "rank"))[1]
    os.kill(int(mark.partition(":")[0]), signal.SIGKILL)
    assert job.ended().status == 0, job.log
    assert result_of(job.run) == alone
    assert "Back to the queue" not in job.log
    assert len(read_attempts(job.run)) == 2


def test_a_stop_is_no_failure_and_the_run_goes_on_later(
    alone: tuple[bytes, int], cluster: object, tmp_path: Path
) -> None:
    job = Job(tmp_path, 0.05, nodes="2")
    job.until(lambda: job.step >= 20 and job.is_running)
    job.engine.dump_stacks(job.handle)
    job.engine.ask_to_stop(job.handle)
    assert job.ended().status == 0, job.log
    assert "cosmati/train/trainer.py" in (job.request.folder / "rank-1.stacks").read_text()
    assert 20 <= job.step < 60
    assert len(read_attempts(job.run)) == 1
    again = Job(tmp_path, 0.0, nodes="2")
    assert again.handle != job.handle


def test_an_error_of_the_program_s_own_is_told_and_not_tried_again(cluster: object, tmp_path: Path) -> None:
    broken = RECIPE.replace("time.sleep(PAUSE)", "raise ValueError('no such thing')")
    job = Job(tmp_path, 0.0, broken, nodes="2", restarts="0")
    standing = job.ended()
    assert (standing.own_fault, standing.reason) == (True, "ValueError: no such thing"), job.log
    assert standing.place in ("n0", "n1")
    assert standing.status == 1
    assert "Back to the queue" not in job.log


def test_a_job_that_is_cancelled_stays_so(cluster: object, tmp_path: Path) -> None:
    job = Job(tmp_path, 1.0, nodes="2")
    # A supervisor that was killed before it wrote the handle down asks again.
    assert SlurmEngine().submit(job.request) == job.handle
    job.until(lambda: job.is_running)
    ranks = list(processes_in(job.request.folder, "rank"))
    job.engine.cancel(job.handle)
    job.engine.cancel(job.handle)
    assert "CANCELLED" in job.ended().reason
    assert job.standing.status
    assert not [mark for mark in ranks if Path(f"/proc/{mark.partition(':')[0]}").exists()]


def test_a_time_limit_takes_it_back_to_the_queue_below_a_cap(
    alone: tuple[bytes, int], cluster: object, tmp_path: Path
) -> None:
    job = Job(tmp_path, 0.05, nodes="2", requeues="1")
    for time in (1, 2):
        job.until(lambda: len(read_attempts(job.run)) == time and job.is_running)  # noqa: B023
        # What Slurm sends a minute before the limit.
        job_id = job.handle.partition(" ")[0]
        subprocess.run(["scancel", "--batch", "--signal=USR1", job_id], check=True)
        if time == 1:
            job.until(lambda: job.standing.phase is AttemptPhase.WAITING)
    # The second time is one too many: it runs on until Slurm would end it, which is after the last step here.
    assert job.ended().status == 0, job.log
    assert job.log.count("Back to the queue") == 1
    assert result_of(job.run) == alone
