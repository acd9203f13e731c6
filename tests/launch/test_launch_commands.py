"""The verbs, on the command line and from Python: over a queue that is written by hand, and over real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cosmati import launch as sdk
from cosmati.cli.main import app
from cosmati.cli.runs import seconds_of, span
from cosmati.errors import RunError
from cosmati.launch import commands
from cosmati.launch.engine import RankProgram
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob, attempt_folder, folder_of
from cosmati.launch.notes import log_of
from cosmati.launch.program import in_own_folder, of_job, program_of
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import LaunchState
from cosmati.storage.lock import FileLock
from tests.launch.jobs import marks_of, recipe_in, until
from tests.processes import PythonProcess


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSMATI_QUEUE", str(tmp_path / "queue"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "queue"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been begun of keepers: their commands."""
    commands_of: list[list[str]] = []
    monkeypatch.setattr(commands.subprocess, "Popen", lambda command, **_: commands_of.append(command))
    return commands_of


def said(*words: str, status: int = 0) -> str:
    result: Result = CliRunner().invoke(app, list(words))
    assert result.exit_code == status, result.output
    return result.output


def asked(**changes: Any) -> JobRequest:
    program = RankProgram(command=("/w/train.py",), folder=Path("/w"), python=Path(sys.executable))
    return JobRequest(**{"name": "train", "program": program, "ranks": 4, **changes})


def resumed_job(home: Path) -> LaunchedJob:
    """Put a job into the queue that was resumed once, and runs with 2 of its 4 ranks."""
    with JobQueue(home) as jobs:
        job = jobs.add(asked(max_seconds=7200.0))
        for was, now in (("PENDING", "QUEUED"), ("QUEUED", "STARTING"), ("STARTING", "RUNNING")):
            jobs.move(job.id, LaunchState(was), LaunchState(now))
        jobs.hold(job.id, "me")
        first = JobAttempt(
            number=0, started=1.7e9, ranks=4, seconds=600.0, outcome="failed", reason="SIGKILL", place="n/3"
        )
        jobs.begin_attempt(job.id, "me", first)
        jobs.note_attempt(job.id, "me", 0, first_step=0, last_step=40)
        jobs.begin_attempt(job.id, "me", JobAttempt(number=1, started=1.7e9, ranks=2, idle=1, seconds=30.0))
        jobs.add_bad_place(job.id, "me", "n/3", "failed 3 times in a row: SIGKILL")
        known = {"step": 50, "num_steps": 100, "step_seconds": 6.0, "num_microbatches": 8, "run_folder": "/w/runs/1"}
        jobs.note(job.id, "me", **known)
        return jobs.get(job.id)


def test_a_queue_without_jobs_says_how_to_begin_one(home: Path) -> None:
    assert said("runs") == "No jobs. Begin one: cosmati launch FILE\n"


def test_jobs_are_listed(home: Path) -> None:
    job = resumed_job(home)
    folder_of(home, job.id).mkdir()
    with FileLock(folder_of(home, job.id) / "supervisor.lock"):
        lines = said("runs").splitlines()
    assert lines[0].split() == ["id", "state", "ranks", "priority", "step", "time", "left", "resumed"]
    cells = ["train-1", "RUNNING", "2/4", "0", "50/100", "10 min", "5 min", "1"]
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == cells
    assert "has no supervisor just now; if that lasts: cosmati resume train-1" in said("runs", "--state", "running")
    assert said("runs", "--state", "failed") == "No jobs. Begin one: cosmati launch FILE\n"
    assert "The states are PENDING, QUEUED" in said("runs", "--state", "what", status=1)


def test_a_job_is_shown_with_its_attempts(home: Path) -> None:
    resumed_job(home)
    shown = said("show", "train-1")
    for line in (
        "ranks        2 of 4, 1 idle (the number has to divide V = 8)",
        "step         50/100, about 5 min left",
        "time         10 min of 2 h 00 min",
        "run          /w/runs/1",
        "without n/3  failed 3 times in a row: SIGKILL",
    ):
        assert line in shown
    with JobQueue(home) as jobs:
        jobs.note("train-1", "me", tensor_parallel=2)
    assert "2 of 4, 1 idle (replicas of 2 ranks, whose number has to divide V = 8)" in said("show", "train-1")
    table = shown.splitlines()[-3:]
    assert table[0].split() == ["attempt", "began", "time", "ranks", "steps", "outcome"]
    assert table[1].endswith("10 min  4      0 to 40  failed   SIGKILL (n/3)")
    assert table[2].endswith("30 s    2               goes on")


def test_what_there_is_none_of_is_said(home: Path) -> None:
    for verb in ("show", "logs", "stop", "resume", "clone", "delete"):
        assert "No job is called 'what-1'. There is none at all." in said(verb, "what-1", status=1)


def test_logs_are_those_of_a_rank_and_an_attempt(home: Path) -> None:
    resumed_job(home)
    for number, rank, text in ((0, 0, "first\n"), (1, 0, "second\n"), (1, 1, "other\n")):
        path = log_of(attempt_folder(home, "train-1", number), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert said("logs", "train-1") == "second\n"
    assert said("logs", "train-1", "--rank", "1") == "other\n"
    assert said("logs", "train-1", "--attempt", "0") == "first\n"
    assert "Rank 2 of train-1 has said nothing in attempt 1" in said("logs", "train-1", "--rank", "2", status=1)
    with JobQueue(home) as jobs:
        followed = sdk.logs("train-1", follow=True)
        assert next(followed) == "second\n"
        with log_of(attempt_folder(home, "train-1", 1), 0).open("a") as file:
            file.write("more\n")
        assert next(followed) == "more\n"
        jobs.begin_attempt("train-1", "me", JobAttempt(number=2, started=0.0, ranks=2))
        (attempt_folder(home, "train-1", 2)).mkdir()
        log_of(attempt_folder(home, "train-1", 2), 0).write_text("third\n")
        jobs.move("train-1", LaunchState.RUNNING, LaunchState.COMPLETED)
        assert list(followed) == ["--- attempt 2 ---\n", "third\n"]


def test_a_log_is_followed_where_it_is_cut_or_made_anew_and_in_whole_characters(home: Path) -> None:
    resumed_job(home)
    log = log_of(attempt_folder(home, "train-1", 1), 0)
    log.parent.mkdir(parents=True)
    log.write_bytes("long enough: caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode()[:-1])
    followed = sdk.logs("train-1", follow=True)
    assert next(followed) == "long enough: caf"
    with log.open("ab") as file:
        file.write("\N{LATIN SMALL LETTER E WITH ACUTE}!\n".encode()[1:])
    assert next(followed) == "\N{LATIN SMALL LETTER E WITH ACUTE}!\n"
    log.write_text("cut\n")  # as logrotate's copytruncate does
    assert next(followed) == "cut\n"
    log.rename(log.with_suffix(".1"))
    log.write_text("anew, and longer than what was there\n")
    assert next(followed) == "anew, and longer than what was there\n"
    with JobQueue(home) as jobs:
        log.write_bytes(log.read_bytes() + b"torn \xc3")
        jobs.move("train-1", LaunchState.RUNNING, LaunchState.COMPLETED)
    assert list(followed) == ["torn ", "\N{REPLACEMENT CHARACTER}"]


def test_what_has_ended_is_not_stopped_and_what_runs_is_not_deleted(home: Path, begun: list[list[str]]) -> None:
    resumed_job(home)
    assert "Job train-1 is RUNNING. Stop it first: cosmati stop train-1" in said("delete", "train-1", status=1)
    assert "was asked to stop" in said("stop", "train-1")
    assert begun[0][-3:] == ["cosmati.launch.keeper", str(home), "train-1"]  # it had no supervisor to hear it
    with JobQueue(home) as jobs:
        assert jobs.get("train-1").wish == "stop"
        jobs.move("train-1", LaunchState.RUNNING, LaunchState.STOPPED)
    assert "Job train-1 is STOPPED already" in said("stop", "train-1", status=1)
    (folder_of(home, "train-1")).mkdir(parents=True, exist_ok=True)
    said("delete", "train-1")
    assert not folder_of(home, "train-1").exists()
    assert said("runs") == "No jobs. Begin one: cosmati launch FILE\n"


def test_resuming_takes_what_has_ended_or_is_lost(home: Path, begun: list[list[str]]) -> None:
    resumed_job(home)
    with JobQueue(home) as jobs:
        other = jobs.add(asked())
        jobs.move(other.id, LaunchState.PENDING, LaunchState.STOPPED)
    assert said("resume", "--lost").splitlines() == ["train-1 goes on. Follow it: cosmati logs train-1 --follow"]
    said("resume", "train-2")
    assert [command[-1] for command in begun] == ["train-1", "train-2"]
    with JobQueue(home) as jobs:
        assert jobs.get("train-2").state is LaunchState.PENDING
        folder_of(home, "train-2").mkdir(exist_ok=True)
        with FileLock(folder_of(home, "train-2") / "supervisor.lock"):
            assert "Job train-2 is PENDING. Follow it" in said("resume", "train-2", status=1)
        jobs.move("train-1", LaunchState.RUNNING, LaunchState.COMPLETED)
    assert "Job train-1 is completed: nothing is left to do" in said("resume", "train-1", status=1)
    assert "Which job is to go on?" in said("resume", status=1)
    assert "Which job is to go on?" in said("resume", "train-1", "--lost", status=1)


def stopped_job(home: Path, **changes: Any) -> LaunchedJob:
    """Put a job into the queue that has trained ten minutes and was stopped."""
    with JobQueue(home) as jobs:
        job = jobs.add(asked(**changes))
        jobs.hold(job.id, "me")
        jobs.begin_attempt(job.id, "me", JobAttempt(number=0, started=1.7e9, ranks=4, seconds=600.0, outcome="stopped"))
        jobs.move(job.id, LaunchState.PENDING, LaunchState.STOPPED, reason="its 600 s are over")
        return jobs.get(job.id)


def test_a_job_whose_duration_is_over_goes_on_with_a_longer_one(home: Path, begun: list[list[str]]) -> None:
    stopped_job(home, max_seconds=600.0)
    for words in ((), ("--max-duration", "10m"), ("--max-duration", "1m")):
        told = said("resume", "train-1", *words, status=1)
        assert "600 s" in told
        assert "cosmati resume train-1 --max-duration" in told
    assert "'1' is no duration" in said("resume", "train-1", "--max-duration", "1", status=1)
    with JobQueue(home) as jobs:  # and nothing of that has changed it
        assert (jobs.get("train-1").state, jobs.get("train-1").request.max_seconds) == (LaunchState.STOPPED, 600.0)
    assert begun == []
    said("resume", "train-1", "--max-duration", "2h")
    assert "time      10 min of 2 h 00 min" in said("show", "train-1")
    with JobQueue(home) as jobs:
        job = jobs.get("train-1")
        assert (job.state, job.request) == (LaunchState.PENDING, asked(max_seconds=7200.0))
    assert [command[-1] for command in begun] == ["train-1"]


def test_a_job_gets_a_duration_that_had_none_and_one_that_is_lost_too(home: Path, begun: list[list[str]]) -> None:
    stopped_job(home)
    sdk.resume("train-1", max_seconds=601.0)
    with JobQueue(home) as jobs:
        assert jobs.get("train-1").request.max_seconds == 601.0
        for was, now in (("PENDING", "QUEUED"), ("QUEUED", "STARTING"), ("STARTING", "RUNNING")):
            jobs.move("train-1", LaunchState(was), LaunchState(now))
        sdk.resume("train-1", max_seconds=1200.0)  # it runs, and nobody sees to it
        assert jobs.get("train-1").request.max_seconds == 1200.0
        folder_of(home, "train-1").mkdir(exist_ok=True)
        with FileLock(folder_of(home, "train-1") / "supervisor.lock"), pytest.raises(RunError, match="is RUNNING"):
            sdk.resume("train-1", max_seconds=9999.0)
        jobs.move("train-1", LaunchState.RUNNING, LaunchState.COMPLETED)
        with pytest.raises(RunError, match="is completed"):
            sdk.resume("train-1", max_seconds=9999.0)
        assert jobs.get("train-1").request.max_seconds == 1200.0
    assert "is of one job" in said("resume", "--lost", "--max-duration", "1h", status=1)
    assert len(begun) == 2


def test_a_clone_is_refused_as_a_job_is(home: Path, begun: list[list[str]]) -> None:
    stopped_job(home)
    for ranks in ("0", "-2"):
        assert "A job has one rank at least" in said("clone", "train-1", "--ranks", ranks, status=1)
    with pytest.raises(RunError, match="a duration is longer than 0 s"):
        sdk.clone("train-1", max_seconds=-1.0)
    assert (len(sdk.runs()), begun) == (1, [])


def test_what_has_just_ended_is_gone_on_with_once_its_supervisor_has(
    home: Path, begun: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_job(home)
    there = iter([True, True, True, False])

    def is_supervised(*_: object) -> bool:
        assert not begun
        return next(there)

    monkeypatch.setattr(commands, "is_supervised", is_supervised)
    sdk.resume("train-1")
    assert (list(there), len(begun)) == ([], 1)


def test_a_job_goes_on_with_the_python_that_it_was_launched_with(
    home: Path, begun: list[list[str]], tmp_path: Path
) -> None:
    own = tmp_path / "own-python"
    own.symlink_to(sys.executable)
    with JobQueue(home) as jobs:
        program = RankProgram(command=("/w/train.py",), folder=Path("/w"), python=own)
        job = jobs.add(asked(program=program))
        jobs.move(job.id, LaunchState.PENDING, LaunchState.STOPPED)
    said("resume", job.id)
    own.unlink()  # an environment that was removed: better this one than none
    said("resume", "--lost")
    assert [command[0] for command in begun] == [str(own), sys.executable]


def test_slots_are_the_queues(home: Path) -> None:
    said("runs", "--slots", "3")
    with JobQueue(home) as jobs:
        assert jobs.slots == 3
    assert "Give 1 or more" in said("runs", "--slots", "0", status=1)


def test_a_clone_is_asked_for_alike_in_a_folder_of_its_own(home: Path, begun: list[list[str]], tmp_path: Path) -> None:
    file = recipe_in(tmp_path, 2)
    said("launch", str(file), "--ranks", "2", "--priority", "3", "--run-folder", "runs/mine", "--detach")
    assert said("clone", "slow-1", "--ranks", "4", "--max-duration", "30m") == "slow-2\n"
    first, second = sdk.runs()
    assert (first.request.ranks, second.request.ranks, second.request.priority) == (2, 4, 3)
    assert second.request.max_seconds == 1800.0
    folders = [of_job(job.request.program, job.id).command[5] for job in (first, second)]
    assert folders == [str(tmp_path / "runs" / "mine"), str(tmp_path / "runs" / "slow-2")]
    assert len(begun) == 2


@pytest.mark.parametrize("own", [("--run-folder",), ("--run-folder", "mine"), ("--lr", "1")])
def test_a_clone_leaves_a_scripts_arguments_as_they_are(
    home: Path, begun: list[list[str]], tmp_path: Path, own: tuple[str, ...]
) -> None:
    (tmp_path / "script.py").write_text("print('hello')\n")
    said("launch", "script.py", "--detach", "--", *own)
    said("clone", "script-1")
    assert [job.request.program.command[1:] for job in sdk.runs()] == [own, own]
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py"], "none.py can't be read: No such file or directory. Give a script or a recipe's file."),
        (["broken.py"], "broken.py is no Python that could be run"),
        (["script.py", "--set", "config.seed=1"], "--set is for recipes"),
        (["script.py", "--run-folder", "runs/1"], "--run-folder is for recipes"),
        (["script.py:big"], "script.py has no function 'big'"),
        (["slow.py", "--", "--lr", "1"], "slow.py is a recipe, and takes no arguments (--lr 1)"),
        (["script.py", "--ranks", "0"], "A job has one rank at least, and 0 were asked for"),
        (["script.py", "--retries", "-1"], "Retries can't be fewer than 0"),
        (["script.py", "--max-duration", "8"], "'8' is no duration. Write a number and a unit: 90s, 30m, 8h or 2d."),
        (["script.py", "--with", "agents"], "write a name and a value"),
        (["script.py", "--with", "agents=two"], "--with agents=two can't be: it's a number of agents, 1 or more."),
        (["script.py", "--with", "agents=0"], "--with agents=0 can't be"),
        (["script.py", "--with", "nodes=2"], "The engine local has no setting nodes. It has agents."),
    ],
)
def test_what_cannot_be_launched_as_asked_is_said_at_once(
    home: Path, begun: list[list[str]], tmp_path: Path, words: list[str], told: str
) -> None:
    recipe_in(tmp_path, 2)
    (tmp_path / "script.py").write_text("print('hello')\n")
    (tmp_path / "broken.py").write_text("def (\n")
    assert told in said("launch", *words, status=1)
    assert (sdk.runs(), begun) == ([], [])


def test_a_script_is_run_as_it_is_and_a_recipe_by_cosmati(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe_in(tmp_path, 2)
    (tmp_path / "script.py").write_text("import os\n\nx = 1\n")
    script = program_of("script.py", ["--out", "runs/{job}"])
    assert script.command == (str(tmp_path / "script.py"), "--out", "runs/{job}")
    assert of_job(script, "a-1").command[-1] == "runs/a-1"
    assert in_own_folder(script) == script
    (tmp_path / "{job}").mkdir()  # as whoever runs a script without the launcher makes one
    for name in ("script.py", "slow.py"):
        (tmp_path / "{job}" / name).write_bytes((tmp_path / name).read_bytes())
        assert f"{tmp_path}/{{job}}/{name}" in of_job(program_of(f"{{job}}/{name}"), "a-1").command
    recipe = program_of("slow.py", settings=["a=1", "b=2"])
    assert recipe.command[:4] == ("-m", "cosmati", "train", str(tmp_path / "slow.py"))
    assert recipe.command[4:] == ("--run-folder", str(tmp_path / "runs" / "{job}"), "--set", "a=1", "--set", "b=2")
    for text in ("from slow import recipe\n", "recipe = None\n"):
        (tmp_path / "named.py").write_text(text)
        assert program_of("named.py:recipe").command[3] == f"{tmp_path / 'named.py'}:recipe"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "8", "h", "-1h", "0s", "infd", "nand", "1w"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(RunError):
        seconds_of(text)


def test_spans_fit_into_a_table() -> None:
    assert [span(one) for one in (0.4, 59.4, 60, 7140, 7200, 90_000)] == [
        "0 s", "59 s", "1 min", "119 min", "2 h 00 min", "25 h 00 min"
    ]  # fmt: skip


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PythonProcess]]:
    """Begin supervisors as forks, which have PyTorch loaded, without keepers."""
    made: list[PythonProcess] = []

    def begin(command: list[str], **_: object) -> None:
        made.append(PythonProcess(["-m", "cosmati.launch.serve", *command[-2:]], env=dict(os.environ)))

    monkeypatch.setattr(commands.subprocess, "Popen", begin)
    yield made
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_is_stopped_and_goes_on(home: Path, tmp_path: Path, supervisors: list[PythonProcess]) -> None:
    job = sdk.launch(str(recipe_in(tmp_path, 60, 0.01)), ranks=2)
    with JobQueue(home) as jobs:
        until(lambda: jobs.get(job.id).state is LaunchState.RUNNING)
        sdk.stop(job.id)
        stopped = sdk.wait(job.id)
        assert (stopped.state, stopped.reason) == (LaunchState.STOPPED, "asked to stop")
        assert [one.outcome for one in jobs.attempts(job.id)] == ["stopped"]
        assert not supervisors[0].communicate()[1]
        sdk.resume(job.id)
        told: list[LaunchedJob] = []
        assert sdk.wait(job.id, told.append).state is LaunchState.COMPLETED
        first, second = jobs.attempts(job.id)
        assert (first.outcome, second.outcome) == ("stopped", "completed")
        assert second.first_step is not None
        assert 0 < (first.last_step or 0) <= second.first_step < 60
        assert told[-1].step == 60
    assert "slow: completed after 60 steps" in "".join(sdk.logs(job.id))
    assert "slow: stopped after" in "".join(sdk.logs(job.id, attempt=0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_stops_a_job_and_a_keeper_begins_its_killed_supervisor_anew(home: Path, tmp_path: Path) -> None:
    file = recipe_in(tmp_path, 400, 0.01)
    process = PythonProcess(["-m", "cosmati", "launch", str(file), "--ranks", "2"], env=dict(os.environ))
    with JobQueue(home) as jobs:
        until(lambda: jobs.all() and jobs.get("slow-1").state is LaunchState.RUNNING)
        (agent,) = marks_of(jobs, "slow-1", "agent")
        stat = Path(f"/proc/{agent.partition(':')[0]}/stat").read_text()
        supervisor = int(stat.rpartition(")")[2].split()[1])
        assert b"cosmati.launch.serve" in Path(f"/proc/{supervisor}/cmdline").read_bytes()
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: len(jobs.attempts("slow-1")) == 2 and jobs.get("slow-1").state is LaunchState.RUNNING)
        assert jobs.attempts("slow-1")[0].outcome == "lost"
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate()
        assert process.returncode == 130, text + errors
        assert "Stopping after the step in progress" in errors
        assert jobs.get("slow-1").state is LaunchState.STOPPED
        assert marks_of(jobs, "slow-1", "rank")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recipe_that_has_changed_is_refused_once(
    home: Path, tmp_path: Path, supervisors: list[PythonProcess]
) -> None:
    file = recipe_in(tmp_path, 400, 0.01)
    job = sdk.launch(str(file), ranks=2)
    with JobQueue(home) as jobs:
        until(lambda: jobs.get(job.id).step)
        sdk.stop(job.id)
        assert sdk.wait(job.id).state is LaunchState.STOPPED
        file.write_text(file.read_text().replace("lr=0.01", "lr=0.02"))
        sdk.resume(job.id)
        ended = sdk.wait(job.id)
        assert ended.state is LaunchState.FAILED
        assert "is of another run: optimizer" in ended.reason
        assert [one.outcome for one in jobs.attempts(job.id)] == ["stopped", "failed"]
        assert not jobs.bad_places(job.id)
        file.write_text(file.read_text().replace("lr=0.02", "lr=0.01"))
        sdk.resume(job.id)
        until(lambda: len(jobs.attempts(job.id)) == 3 and jobs.get(job.id).state is LaunchState.RUNNING)
        sdk.stop(job.id)
        assert sdk.wait(job.id).state is LaunchState.STOPPED
