"""The launcher's commands, once more: what is a recipe, whose folder a job takes, and other releases' jobs."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.launch import commands
from cosmati.launch.asking import asked_for
from cosmati.launch.job import LaunchedJob, folder_of
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import LaunchState
from cosmati.storage.lock import FileLock
from tests.launch.test_launch_commands import asked, begun, home, resumed_job, said

pytestmark = pytest.mark.long

__all__ = ["begun", "home"]


@pytest.mark.parametrize(
    "text",
    [
        "if True:\n    def recipe():\n        pass\n",
        "try:\n    from mine import recipe\nexcept ImportError:\n    pass\n",
        "try:\n    import fast\nexcept ImportError:\n    def recipe():\n        pass\n",
        "recipe: object = make()\n",
        "recipe, other = make()\n",
        "import mine as recipe\n",
        "class recipe:\n    pass\n",
        "with quiet():\n    recipe = make()\n",
        "match 1:\n    case 1:\n        recipe = make()\n",
    ],
)
def test_however_it_is_defined_a_recipe_is_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert asked_for(str(path)).program.command[:3] == ("-m", "cosmati", "train")


@pytest.mark.parametrize(
    "text",
    [
        "def main():\n    recipe = 1\n",
        "class A:\n    def recipe(self):\n        pass\n",
        "if __name__ == '__main__':\n    recipe = make()\n    train(recipe)\n",
        "recipe.train()\n",
        "for recipe in recipes():\n    recipe.seed = 1\n    recipes[recipe] = recipe.train()\n",
        "other = recipe\n",
        "",
    ],
)
def test_a_script_that_speaks_of_a_recipe_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert asked_for(str(path)).program.command == (str(path),)


def test_what_no_queue_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("")
    with pytest.raises(RunError, match=r"A script's arguments are text, and 1 isn't"):
        asked_for(str(path), 1)  # type: ignore[arg-type]
    for priority in (10**9, -(10**9), 10**20):
        with pytest.raises(RunError, match=f"at most nine digits, and {priority} was given"):
            asked_for(str(path), priority=priority)
    assert asked_for(str(path), priority=1 - 10**9).priority == 1 - 10**9


def test_a_job_takes_no_folder_in_which_another_queues_job_has_trained(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("def recipe():\n    pass\n")
    for name in ("slow-1", "slow-2", "slow-4"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with JobQueue(home) as jobs:
        assert [jobs.add(asked_for(str(path))).id for _ in range(2)] == ["slow-3", "slow-5"]
        given = asked_for(str(path), run_folder=tmp_path / "runs" / "slow-1")
        assert jobs.add(given).id == "slow-6"  # who names a folder goes on with its run
        assert [job.id for job in jobs.all()] == ["slow-3", "slow-5", "slow-6"]


def test_a_queue_in_a_folder_that_others_read_is_read_by_its_owner(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with JobQueue(shared) as jobs:
        jobs.add(asked())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}
    assert modes.pop("jobs") == 0o700
    assert "queue.db" in modes
    assert {*modes.values()} == {0o600}


def test_a_file_of_the_users_own_stands_in_for_no_module(tmp_path: Path, home: Path) -> None:
    """Neither the keeper nor the supervisor looks into the folder in which they were begun."""
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "train.py").write_text("import queue, sys\nprint('ran', sys.flags.safe_path)\n")
    with JobQueue(home) as jobs:
        job = jobs.add(asked())
        jobs.move(job.id, LaunchState.PENDING, LaunchState.STOPPED)
    command = [sys.executable, *commands._KEEPER, str(home), job.id]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, "shadowed" in done.stdout + done.stderr) == (0, False)


def test_what_was_being_stopped_goes_on_where_it_is_resumed(home: Path, begun: list[list[str]]) -> None:
    """Its supervisor and its keeper were killed meanwhile."""
    resumed_job(home)
    said("stop", "train-1")
    assert said("resume", "--lost") == "No job is lost.\n"
    assert len(begun) == 2  # it is ended
    with JobQueue(home) as jobs:
        assert jobs.get("train-1").wish == "stop"
    said("resume", "train-1")
    with JobQueue(home) as jobs:
        assert (jobs.get("train-1").wish, jobs.get("train-1").state) == ("", LaunchState.RUNNING)
    assert len(begun) == 3


def test_jobs_of_another_release_are_named_and_taken_out(home: Path) -> None:
    with JobQueue(home) as jobs:
        jobs.add(asked())
        jobs.add(asked())
    with closing(sqlite3.connect(home / "queue.db")) as database, database:
        database.execute("UPDATE jobs SET request = json_set(request, '$.colour', 'red') WHERE id = 'train-1'")
    told = said("runs")
    assert "train-1 is another release's, and can't be read. Take it out: cosmati delete train-1" in told
    assert "train-2" in told
    folder_of(home, "train-1").mkdir(parents=True)
    with FileLock(folder_of(home, "train-1") / "supervisor.lock"):
        assert "is another release's, and goes on" in said("delete", "train-1", status=1)
    said("delete", "train-1")
    assert "another release" not in said("runs")
    assert not folder_of(home, "train-1").exists()


def test_what_ends_is_waited_for_before_it_is_deleted(home: Path) -> None:
    job = resumed_job(home)
    with JobQueue(home) as jobs:
        jobs.move(job.id, LaunchState.RUNNING, LaunchState.TERMINATING)
    assert "Job train-1 is TERMINATING. It ends: cosmati show train-1" in said("delete", "train-1", status=1)


@pytest.mark.parametrize("follow", [True, False])
def test_what_will_say_nothing_any_more_is_not_waited_for(home: Path, follow: bool) -> None:
    job = resumed_job(home)
    with JobQueue(home) as jobs:
        jobs.move(job.id, LaunchState.RUNNING, LaunchState.COMPLETED)
    more = ["--follow"] if follow else []
    told = said("logs", "train-1", "--rank", "9", *more, status=1)
    assert told.rstrip().endswith("Rank 9 of train-1 has said nothing in attempt 1.")


def test_a_rank_that_says_nothing_is_followed_to_its_end(home: Path) -> None:
    job = resumed_job(home)
    log = folder_of(home, job.id) / "attempt-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    with JobQueue(home) as jobs:
        jobs.move(job.id, LaunchState.RUNNING, LaunchState.COMPLETED)
    assert said("logs", "train-1", "--follow") == ""
    assert "Rank 0 of train-1 has said nothing in attempt 1." in said("logs", "train-1", status=1)


def test_an_attempt_that_others_have_followed_is_not_waited_for(home: Path) -> None:
    job = resumed_job(home)
    log = folder_of(home, job.id) / "attempt-0" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("said in attempt 0\nand no more")
    assert said("logs", "train-1", "--attempt", "0", "--follow") == "said in attempt 0\nand no more"


@pytest.mark.parametrize("num", [1, 2])
def test_a_second_ctrl_c_leaves_the_job_to_itself(
    home: Path, begun: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    (tmp_path / "train.py").write_text("")
    left = [KeyboardInterrupt] * num

    def wait(job_id: str, *_: object) -> LaunchedJob:
        if left:
            raise left.pop()
        with JobQueue(home) as jobs:
            jobs.move(job_id, LaunchState.PENDING, LaunchState.STOPPED)
            return jobs.get(job_id)

    monkeypatch.setattr("cosmati.cli.launch.wait", wait)
    told = said("launch", "train.py", status=130)
    assert "Stopping after the step in progress" in told
    assert ("train-1 ends by itself. See when it has: cosmati show train-1" in told) == (num == 2)
    assert ("Go on: cosmati resume train-1" in told) == (num == 1)
    assert "The same command goes on" not in told  # it would be another job


def test_who_looks_on_stops_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed_job(home)

    def logs(*_: object, **__: object) -> Iterator[str]:
        yield "a line\n"
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmati.cli.runs.commands.logs", logs)
    assert said("logs", "train-1", "--follow", status=130) == "a line\n"
