"""Engines by name, dry runs on the command line, and what Slurm says of a job, read."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.errors import RunError
from cosmati.launch import local
from cosmati.launch.agents import fence_off_earlier
from cosmati.launch.engine import AttemptPhase, AttemptRequest, RankProgram
from cosmati.launch.engines import check_engine
from cosmati.launch.slurm import SlurmEngine, render, standing_of
from cosmati.records.launched import LaunchedRun
from tests.launch.test_manifests import request_of

SCRIPT = "print('trained')\n"


def _dry(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(SCRIPT)
    done = CliRunner().invoke(app, ["launch", "train.py", "--ranks", "4", "--dry-run", *options])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]  # nothing is begun or written
    return done.stdout


def test_a_dry_run_of_slurm_is_a_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _dry(tmp_path, monkeypatch, "--on", "slurm", "--with", "nodes=2", "--with", "partition=gpu")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert {"#SBATCH --nodes=2-2", "#SBATCH --partition=gpu", "#SBATCH --requeue"} <= {*text.splitlines()}


def test_a_dry_run_of_kubernetes_is_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _dry(tmp_path, monkeypatch, "--on", "kubernetes", "--with", "image=a/b:1", "--with", "volume=runs")
    assert [one["kind"] for one in yaml.safe_load_all(text)] == ["Service", "Job"]


def test_priority_and_retries_are_rendered_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--with", "image=a/b:1", "--with", "volume=runs")
    text = _dry(tmp_path, monkeypatch, "--on", "dstack", *given, "--priority", "7")
    assert [one["priority"] for one in yaml.safe_load_all(text)] == [7]
    for options, named in ((("--priority", "7"), "priority"), (("--retries", "9"), "restarts")):
        command = ["launch", "train.py", "--ranks", "4", "--dry-run", "--on", "kubernetes", *given, *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert named in done.output


@pytest.mark.parametrize("engine", ["kubernetes", "skypilot", "dstack"])
def test_what_is_rendered_only_is_not_begun(engine: str) -> None:
    with pytest.raises(RunError, match=f"--on {engine} --dry-run"):
        check_engine(engine)


def test_an_engine_that_is_none_is_refused() -> None:
    with pytest.raises(RunError, match="There are local, slurm, kubernetes, skypilot, dstack"):
        check_engine("nomad")


def test_an_agent_that_is_killed_before_it_was_told_where_to_meet_has_ended_and_the_job_may_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, others = local.TCPStore, {one.pid for one in multiprocessing.active_children()}

    def made_late(*given: Any, **more: Any) -> Any:
        for agent in multiprocessing.active_children():
            if agent.pid in others:
                continue
            agent.kill()
            agent.join()
        return store(*given, **more)

    monkeypatch.setattr(local, "TCPStore", made_late)
    program = RankProgram(command=("-c", "pass"), folder=tmp_path, python=Path(sys.executable))
    asked = AttemptRequest(job="gpt", number=0, program=program, ranks=2, folder=tmp_path / "attempt-0", settings={})
    engine = local.LocalEngine()
    handle = engine.submit(asked)
    standing = engine.poll(handle)
    engine.cancel(handle)
    assert standing.phase is AttemptPhase.ENDED
    assert standing.reason == "an agent was ended by SIGKILL"
    assert not standing.own_fault


def _slurm(**settings: str) -> AttemptRequest:
    asked = request_of(4, **settings)
    kept = {name: value for name, value in asked.settings.items() if name not in ("image", "volume")}
    return AttemptRequest(
        job="gpt",
        number=2,
        program=asked.program,
        ranks=4,
        folder=Path("/shared/it's here"),
        bad=("n3/1", "n3", "n5"),
        max_seconds=90.0,
        settings=kept,
    )


def test_a_batch_script_holds_what_was_asked_for() -> None:
    text = render(_slurm(nodes="1-2", requeues="4", restarts="1", mem="8G"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    told = {"job-name=cosmati-gpt-2", "nodes=1-2", "time=3", "exclude=n3,n5", "mem=8G", "cpus-per-task=2"}
    assert {f"#SBATCH --{one}" for one in told} <= {*text.splitlines()}
    assert '#SBATCH --output="/shared/it\'s here/job.log"' in text
    assert "counts='2 1'" in text
    assert '[ "$restarts" -gt 4 ]' in text
    assert "--max-restarts=1" in text
    assert "--nproc-per-node=2" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"colour": "red"},
        {"nodes": "3"},
        {"nodes": "\N{SUPERSCRIPT TWO}"},
        {"mem": '8"G'},
        {"mem": "8G\n#SBATCH --uid=0"},
        {"restarts": "three"},
        {"requeues": "-1"},
    ],
)
def test_a_batch_script_of_nonsense_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(RunError):
        render(_slurm(**wrong))


@pytest.mark.parametrize(
    ("said", "phase", "status"),
    [
        ("JobId=1 JobState=PENDING Reason=BeginTime Restarts=2 ExitCode=0:0", AttemptPhase.WAITING, None),
        ("JobId=1 JobState=CONFIGURING Reason=None Restarts=0", AttemptPhase.WAITING, None),
        ("JobId=1 JobState=RUNNING Reason=None NodeList=n[0-1]", AttemptPhase.RUNNING, None),
        ("JobId=1 JobState=COMPLETING NodeList=n0", AttemptPhase.RUNNING, None),
        ("JobId=1 JobState=COMPLETED ExitCode=0:0", AttemptPhase.ENDED, 0),
        ("JobId=1 JobState=FAILED ExitCode=3:0", AttemptPhase.ENDED, 3),
        ("JobId=1 JobState=CANCELLED ExitCode=0:15", AttemptPhase.ENDED, -15),
        ("JobId=1 JobState=TIMEOUT ExitCode=0:0", AttemptPhase.ENDED, 1),
        ("JobId=1 JobState=NODE_FAIL ExitCode=1:0", AttemptPhase.ENDED, 1),
    ],
)
def test_what_slurm_says_is_read(said: str, phase: AttemptPhase, status: int | None) -> None:
    standing = standing_of(said)
    assert (standing.phase, standing.status) == (phase, status)
    assert ("requeued 2 times" in standing.reason) is ("Restarts=2" in said)
    assert bool(standing.reason) is (status != 0)


def _begun_again(folder: Path, ranks: int, nodes: str, there: int, degree: int) -> tuple[int, str, str]:
    """Run a batch script that Slurm has requeued, with so many nodes; return its status, srun's words and its own."""
    own = folder / f"attempt of {ranks} on {nodes}"
    own.mkdir()
    note = LaunchedRun(
        folder=str(folder / "run"), attempt=0, num_microbatches=4, num_steps=None, tensor_parallel=degree
    )
    (own / "run").write_text(note.to_json())
    (folder / "run" / "ledger").mkdir(parents=True)
    for name in ("srun", "scontrol"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$*" >> "{folder}/asked"\n')
        (folder / name).chmod(0o755)
    program = RankProgram(command=("train.py",), folder=folder, python=Path(sys.executable))
    script = render(
        AttemptRequest(job="gpt", number=0, program=program, ranks=ranks, folder=own, settings={"nodes": nodes})
    )
    told = {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(there)}
    more = {"SLURMD_NODENAME": "n0", "PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash"], input=script, text=True, check=False, env={**told, **more}, capture_output=True)
    assert (folder / "run" / "epoch").exists(), "who trained before is fenced off"
    assert (own / "status").read_text().strip() == str(done.returncode), done.stderr
    asked = folder / "asked"
    return done.returncode, asked.read_text() if asked.exists() else "", done.stdout


@pytest.mark.parametrize(("degree", "nodes"), [(1, 2), (2, 2), (4, 1)])
def test_a_requeued_job_takes_nodes_that_make_whole_replicas(tmp_path: Path, degree: int, nodes: int) -> None:
    status, asked, said = _begun_again(tmp_path, 4, "1-4", 3, degree)  # T wasn't known when the script was written
    assert (status, f"srun --nodes={nodes} " in asked) == (0, True)
    assert f"{3 - nodes} of 3 nodes idle." in said


def test_a_requeued_job_with_just_enough_nodes_begins(tmp_path: Path) -> None:
    status, asked, said = _begun_again(tmp_path, 4, "1-2", 2, 4)
    assert (status, "srun --nodes=2 " in asked, "idle" in said) == (0, True, False)


def test_a_requeued_job_with_too_few_nodes_says_so_and_begins_nothing(tmp_path: Path) -> None:
    status, asked, said = _begun_again(tmp_path, 4, "1-2", 1, 4)
    assert (status, "srun" in asked, "requeue" in asked) == (1, False, False)
    assert "Too few nodes for whole replicas: there are 1, and 2 are the fewest." in said


def test_a_job_that_was_submitted_and_not_noted_is_found_in_an_odd_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "it's  the 100%j folder"
    asked = replace(_slurm(nodes="1-2"), folder=own)
    listed = [f"8 {own}/other", "9", f"7 {own}"]
    (tmp_path / "listed").write_text("\n".join(listed) + "\n")
    (tmp_path / "squeue").write_text(f'#!/bin/sh\ncat "{tmp_path}/listed"\n')
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 10\n")
    for name in ("squeue", "sbatch"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = SlurmEngine()
    assert [engine.submit(asked), engine.submit(asked)] == [f"10 {own}", f"7 {own}"]
    # A percent sign begins what Slurm puts in.
    assert f'#SBATCH --output="{tmp_path}/it\'s  the 100%%j folder/job.log"' in (own / "job.sbatch").read_text()


def test_who_trained_before_a_requeue_is_fenced_off(tmp_path: Path) -> None:
    run, attempt = tmp_path / "run", tmp_path / "attempt"
    (run / "ledger").mkdir(parents=True)
    attempt.mkdir()
    fence_off_earlier(attempt)  # nobody has begun
    assert not (run / "epoch").exists()
    note = LaunchedRun(folder=str(run), attempt=0, num_microbatches=4, num_steps=None)
    (attempt / "run").write_text(note.to_json())
    fence_off_earlier(attempt)
    assert [(path / "epoch").read_text().split()[0] for path in (run, run / "ledger")] == ["1", "1"]
