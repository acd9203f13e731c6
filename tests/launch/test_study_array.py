"""Studies as arrays of Slurm: the script, and who runs what where tasks, nodes or the one who waits are lost.

Slurm is played: what it's asked for is done in this process. `test_study_slurm.py` asks the real one.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.errors import RunError
from cosmati.launch import array_jobs, study_array, study_task
from cosmati.launch.studies import cluster_of
from cosmati.launch.study_array import SlurmStudy
from cosmati.launch.study_task import ArrayPlan
from cosmati.records.study import StudyRecord
from cosmati.study.python_file import call_of
from cosmati.study.runner import FAILED_FILE, LINES_FILE, STUDY_FILE, Study, run_study
from tests.train.test_bad_input import full_beyond

STUDY = """
from functools import partial
from pathlib import Path

from cosmati.study.runner import Arm, Study
from cosmati.study.search import Dimension, SearchedArm, SearchPlan, chosen_settings, search_arms
from tests.study.fake_runs import FakeRun, loss_at

HERE = Path(__file__).parent


def said(name):
    path = HERE / name
    return path.read_text() if path.exists() else ""


def trial(settings, budget, seed):
    return FakeRun(budget, loss_at(settings, budget, seed))


def start(arm, settings, budget, seed):
    with (HERE / "starts.txt").open("a") as file:
        file.write(f"{arm} {budget} {seed}\\n")
    if (arm, seed) == ("fast", 1) and said("fail.txt"):
        raise ValueError("no room")
    return FakeRun(budget, loss_at(settings, budget, seed) - 0.1 * (arm == "fast"))


def study():
    with (HERE / "reads.txt").open("a") as file:
        file.write("read\\n")
    rate = Dimension(name="lr", low=0.01, high=1.0)
    found = search_arms(
        {"base": SearchedArm(start=trial, dimensions=[rate], recipe_text="base")},
        SearchPlan(rungs=((0.5, 4), (1.0, 2)), max_rounds=0), HERE / "search", quality="loss", higher_is_better=False,
        hardware="here",
    )
    best = chosen_settings(found["base"])
    arms = {
        name: Arm(start=partial(start, name, best), recipe_text=name + said("version.txt"), search=found["base"])
        for name in ("baseline", "fast")
    }
    return Study(name="tiny", task="none", arms=arms, budgets=(0.5, 1.0), seeds=(0, 1), quality="loss",
                 higher_is_better=False, cost_turns=2)
"""


class PlayedSlurm:
    """Keeps jobs as a controller does; `go_on` is called at each look at the tasks, and does what nodes would."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[Path, list[int]]] = {}
        self.asked: list[tuple[str, ...]] = []
        self.go_on: Callable[[], None] = self.run_one

    def __call__(self, program: str, *arguments: str, max_seconds: float | None = 60.0) -> str:
        assert (max_seconds is None) is (program == "srun"), "only what waits in the queue may take its time"
        self.asked.append((program, *arguments))
        return str(getattr(self, program)(*arguments))

    def sbatch(self, _: str, script: str) -> str:
        text = Path(script).read_text()
        last = int(text.partition("--array=0-")[2].partition("%")[0])
        job = str(100 + len(self.asked))
        self.arrays[job] = Path(script).parent, list(range(last + 1))
        return f"{job};cluster\n"

    def squeue(self, *arguments: str) -> str:
        if "--array" not in arguments:
            return "".join(f"{job} {folder}\n" for job, (folder, _) in self.arrays.items()) + "7 /somebody/else's\n"
        self.go_on()
        listed = [f"{job} {number}\n" for job, (_, tasks) in self.arrays.items() for number in tasks]
        return "".join(listed) + "7 N/A\n"

    def scancel(self, job: str) -> str:
        self.arrays.pop(job, None)
        return ""

    def srun(self, *words: str) -> str:
        said = io.StringIO()
        with redirect_stdout(said):
            study_task.main(list(words[words.index("cosmati.launch.study_task") + 1 :]))
        return said.getvalue()

    def run_one(self, *, is_lost: bool = False) -> None:
        """Carry out the first task of all, or lose it."""
        for folder, tasks in self.arrays.values():
            if tasks:
                number = tasks.pop(0)
                if not is_lost:
                    study_task.main(["run", str(folder), str(number)])
                return


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedSlurm]:
    played, threads = PlayedSlurm(), torch.get_num_threads()
    for module in (study_array, array_jobs):
        monkeypatch.setattr(module, "ask_slurm", played)
    monkeypatch.setattr(study_array, "_POLL_SECONDS", 0.0)
    yield played
    torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_study.py"
    path.write_text(STUDY)
    return path


def run_on(file: Path, folder: Path, *, is_local: bool = False) -> StudyRecord:
    study = call_of(str(file), Study, "study")
    assert isinstance(study, Study)
    cluster = None if is_local else SlurmStudy(str(file), folder, 2, {})
    return run_study(study, folder, cluster=cluster, console=Console(file=io.StringIO()))


def starts(file: Path) -> list[str]:
    path = file.with_name("starts.txt")
    told = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return told


def num_done(folder: Path) -> int:
    path = folder / LINES_FILE
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.long
def test_an_array_gives_what_a_local_study_gives(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    local = run_on(file, tmp_path / "local", is_local=True)
    search = file.with_name("search")

    def go_on() -> None:
        shutil.rmtree(search, ignore_errors=True)
        slurm.run_one()

    slurm.go_on = go_on
    torch.set_num_threads(2)
    record = run_on(file, tmp_path / "array")
    assert record.runs == local.runs
    assert {run.num_threads for run in record.runs} == {1}
    lines = (tmp_path / "array" / LINES_FILE).read_text().splitlines()
    assert {json.loads(line)["jobs"] for line in lines} == {2}
    assert (record.hardware, record.arms) == (local.hardware, local.arms)
    assert [one.arm for one in record.costs] == [one.arm for one in local.costs]
    assert StudyRecord.from_json((tmp_path / "array" / STUDY_FILE).read_text()) == record
    assert not search.exists()  # no task searches
    # Costs were profiled there, alone.
    last = [words for words in slurm.asked if words[0] == "srun"][-1]
    assert "--exclusive" in last
    assert last[-2:] == ("baseline", "fast")
    assert not list((tmp_path / "array" / "slurm" / "results").iterdir())
    assert not slurm.arrays


def test_what_is_finished_is_not_run_again(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "array"
    first = run_on(file, folder)
    starts(file)
    slurm.asked.clear()
    assert run_on(file, folder).runs == first.runs
    assert "sbatch" not in [words[0] for words in slurm.asked]


def test_who_waits_may_be_lost(slurm: PlayedSlurm, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It's killed with two lines written, and two results that it hasn't seen; the array goes on meanwhile."""
    folder = tmp_path / "array"

    def killed() -> None:
        slurm.run_one()
        if num_done(folder) == 2:
            slurm.run_one()
            raise SystemExit(9)

    slurm.go_on = killed
    with monkeypatch.context() as patch:
        patch.setattr(study_array.SlurmArrays, "__exit__", lambda *_: None)  # a killed process cancels nothing
        with pytest.raises(SystemExit):
            run_on(file, folder)
    done, (left,) = num_done(folder), [len(tasks) for _, tasks in slurm.arrays.values()]
    assert (done, left) == (2, 4)
    assert len(list((folder / "slurm" / "results").iterdir())) >= 2
    slurm.go_on = slurm.run_one
    slurm.asked.clear()
    record = run_on(file, folder)
    assert "sbatch" not in [words[0] for words in slurm.asked]
    own = [line for line in starts(file) if line != "baseline 0.5 0"]  # which the hardware and the costs take too
    assert len(own) == len({*own}) + sum("0.5 0" in line for line in own) - 1
    assert record.runs == run_on(file, tmp_path / "local", is_local=True).runs


def test_tasks_that_leave_no_result_are_failed_runs_and_run_once_more(
    slurm: PlayedSlurm, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "array"
    looks = 0

    def lose_the_third() -> None:
        nonlocal looks
        looks += 1
        slurm.run_one(is_lost=looks == 3)

    slurm.go_on = lose_the_third
    with pytest.raises(
        RunError, match=r"1 of 8 runs of 'tiny' failed.*Task 2 of Slurm's job \d+ has ended.*task-2.log"
    ):
        run_on(file, folder)
    assert num_done(folder) == 7
    slurm.go_on = slurm.run_one
    assert not any(run.error for run in run_on(file, folder).runs)


def test_an_error_of_a_run_is_told_as_it_is_here(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    told = []
    file.with_name("fail.txt").write_text("fail")
    for is_local in (True, False):
        folder = tmp_path / f"study-{is_local}"
        with pytest.raises(RunError, match="2 of 8 runs of 'tiny' failed") as refused:
            run_on(file, folder, is_local=is_local)
        told.append(str(refused.value).replace(str(folder), ""))
        failed = [json.loads(line) for line in (folder / FAILED_FILE).read_text().splitlines()]
        assert {one["error"] for one in failed} == {"ValueError: no room"}
        assert all("tiny_study.py" in one["trace"] for one in failed)
        assert not any("\n" in one["error"] for one in failed)
    assert told[0] == told[1]
    # Begun again it runs them once more, and then they are kept as failed.
    record = run_on(file, tmp_path / "study-False")
    assert [one.error for one in record.runs if one.error] == ["ValueError: no room"] * 2


def leave(slurm: PlayedSlurm, file: Path, folder: Path, num_tasks: int) -> None:
    """Begin, run some tasks, and be killed before anything of them is seen."""

    def killed() -> None:
        for _ in range(num_tasks):
            slurm.run_one()
        raise SystemExit(9)

    slurm.go_on = killed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_array.SlurmArrays, "__exit__", lambda *_: None)  # a killed process cancels nothing
        with pytest.raises(SystemExit):
            run_on(file, folder)
    slurm.go_on = slurm.run_one


def test_a_changed_recipe_cancels_what_trains_the_old_one(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "array"
    leave(slurm, file, folder, 4)
    ((old, (array, _)),) = slurm.arrays.items()
    file.with_name("version.txt").write_text(" of today")
    # A task of the old array that begins now refuses, and says nothing to the new study.
    study_task.main(["run", str(array), "4"])
    told = [path.read_text() for path in (folder / "slurm" / "results").iterdir()]
    assert sum("has another recipe of 'fast'" in one for one in told) == 1
    starts(file)
    record = run_on(file, folder)
    assert ("scancel", old) in slurm.asked
    assert (array / "stop").exists()
    assert len({*starts(file)}) == 8  # what the old recipe has reached isn't taken
    assert not any(one.error for one in record.runs)


def test_what_another_metric_was_measured_for_is_not_taken(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    leave(slurm, file, tmp_path / "array", 8)
    file.write_text(STUDY.replace('seeds=(0, 1), quality="loss"', 'seeds=(0, 1), quality="gained"'))
    with pytest.raises(RunError, match="the study asks for 'gained'"):
        run_on(file, tmp_path / "array")
    assert len([words for words in slurm.asked if words[0] == "sbatch"]) == 2


def test_failures_that_nobody_saw_and_runs_on_other_hardware_are_run_again(
    slurm: PlayedSlurm, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "array"
    file.with_name("fail.txt").write_text("fail")
    leave(slurm, file, folder, 8)
    results = list((folder / "slurm" / "results").iterdir())
    assert sum("no room" in one.read_text() for one in results) == 2
    good = next(one for one in results if "no room" not in one.read_text())
    facts = json.loads(good.read_text())
    facts["measured"]["hardware"] = "another"
    good.write_text(json.dumps(facts))
    file.with_name("fail.txt").unlink()
    starts(file)
    record = run_on(file, folder)
    assert not any(one.error for one in record.runs)
    _, *rest = [words for words in slurm.asked if words[0] == "sbatch"]
    assert (len(rest), "--array=0-2%2" in Path(rest[0][-1]).read_text()) == (1, True)


def test_a_result_that_a_shared_disk_shows_late_is_not_lost(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    looks = 0

    def go_on() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            slurm.run_one(is_lost=True)
        elif looks == 3:
            ((folder, _),) = slurm.arrays.values()
            study_task.main(["run", str(folder), "0"])
        else:
            slurm.run_one()

    slurm.go_on = go_on
    assert not any(one.error for one in run_on(file, tmp_path / "array").runs)


def test_an_error_that_lets_nothing_go_on_ends_the_array(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    file.write_text(
        STUDY.replace(
            'budgets=(0.5, 1.0), seeds=(0, 1), quality="loss"', 'budgets=(0.5,), seeds=(0, 1), quality="gain"'
        )
    )
    for _ in range(2):  # and it isn't what the next beginning says before it has run anything
        with pytest.raises(RunError, match="measure \\['loss'\\], and the study asks for 'gain'"):
            run_on(file, tmp_path / "array")
        assert not slurm.arrays
        assert starts(file)
        assert not (tmp_path / "array" / FAILED_FILE).exists()


def test_more_runs_than_an_array_may_have_come_in_several(
    slurm: PlayedSlurm, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_array, "_MOST_TASKS", 3)
    at_once = []

    def go_on() -> None:
        at_once.append(sum(bool(tasks) for _, tasks in slurm.arrays.values()))
        slurm.run_one()

    slurm.go_on = go_on
    assert len(run_on(file, tmp_path / "array").runs) == 8
    assert [words[-1].rpartition("slurm/")[2] for words in slurm.asked if words[0] == "sbatch"] == [
        f"array-{number}/array.sbatch" for number in range(3)
    ]
    assert max(at_once) == 1


def test_a_controller_that_does_not_answer_loses_no_run(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    looks = 0

    def go_on() -> None:
        nonlocal looks
        looks += 1
        if 2 <= looks < 12:
            raise RunError("squeue said no: Unable to contact slurm controller")
        slurm.run_one()

    slurm.go_on = go_on
    assert not any(one.error for one in run_on(file, tmp_path / "array").runs)


def test_a_disk_that_is_lost_ends_the_array(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "array"

    def lose() -> None:
        if slurm.arrays and folder.exists():
            folder.rename(tmp_path / "elsewhere")

    slurm.go_on = lose
    with pytest.raises(RunError, match="slurm/results can't be read: No such file"):
        run_on(file, folder)
    assert not slurm.arrays
    (tmp_path / "elsewhere").rename(folder)
    slurm.go_on = slurm.run_one
    assert len(run_on(file, folder).runs) == 8


def test_a_task_that_has_no_room_for_its_result_leaves_none(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    folder, results, refused = tmp_path / "array", tmp_path / "array" / "slurm" / "results", []

    def one_without_room() -> None:
        if refused or num_done(folder) != 2:
            slurm.run_one()
            return
        before = {*results.iterdir()}
        with full_beyond(400), pytest.raises(OSError, match="too large") as error:
            slurm.run_one()
        refused.append(error.value)
        assert {*results.iterdir()} == before

    slurm.go_on = one_without_room
    with pytest.raises(RunError, match=r"1 of 8 runs of 'tiny' failed.*had no room.*task-\d.log"):
        run_on(file, folder)
    slurm.go_on = slurm.run_one
    assert run_on(file, folder).runs == run_on(file, tmp_path / "local", is_local=True).runs


@pytest.mark.long
@pytest.mark.parametrize("limit", [10, 700, 3000])
def test_who_asks_for_an_array_may_have_no_room(slurm: PlayedSlurm, file: Path, tmp_path: Path, limit: int) -> None:
    """For trials of the search, for what was asked for; and Python leaves half of what it compiles."""
    folder = tmp_path / "array"
    with full_beyond(limit), pytest.raises(RunError, match=r"can't be written: File too large.*Make room"):
        run_on(file, folder)
    assert not slurm.arrays
    assert run_on(file, folder).runs == run_on(file, tmp_path / "local", is_local=True).runs


def test_who_waits_for_an_array_may_have_no_room(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "array"
    with ExitStack() as full:

        def go_on() -> None:
            slurm.run_one()
            if num_done(folder) == 2:
                full.enter_context(full_beyond((folder / LINES_FILE).stat().st_size + 10))

        slurm.go_on = go_on
        with pytest.raises(RunError, match=r"runs\.jsonl can't be written: File too large.*Make room"):
            run_on(file, folder)
    slurm.go_on = slurm.run_one
    assert run_on(file, folder).runs == run_on(file, tmp_path / "local", is_local=True).runs


def test_the_script_of_a_dry_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_on(file, tmp_path / "local", is_local=True)  # its search
    before = sorted(path.name for path in tmp_path.iterdir())
    options = ["--folder", "it's here", "--on", "slurm", "--dry-run", "--jobs", "3", "--with", "partition=gpu"]
    done = CliRunner().invoke(app, ["study", "run", str(file), *options, "--with", "requeues=5"])
    assert done.exit_code == 0, done.output
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    assert {"#SBATCH --array=0-7%3", "#SBATCH --partition=gpu", "#SBATCH --requeue", "#SBATCH --ntasks=1"} <= {
        *done.stdout.splitlines()
    }
    assert f'#SBATCH --output="{tmp_path}/it\'s here/slurm/array-0/task-%a.log"' in done.stdout
    assert '[ "$restarts" -gt 5 ]' in done.stdout
    assert '[ "$restarts" -lt 5 ]' in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing is written


SCRIPT_END = """
python() {{ echo "$*" >> "{folder}/called"; return {status}; }}
scontrol() {{ echo "$*" >> "{folder}/requeued"; }}
"""


@pytest.mark.parametrize(
    ("status", "restarts", "is_stopped", "requeued", "code"),
    [
        (0, 0, False, "", 0),
        (9, 0, False, "requeue 12_5", 0),
        (9, 3, False, "", 9),
        (9, 0, True, "", 9),
        (0, 4, False, "", 1),
    ],
)
def test_what_a_task_does_that_is_killed(
    tmp_path: Path, status: int, restarts: int, *, is_stopped: bool, requeued: str, code: int
) -> None:
    folder = tmp_path / "slurm" / "array-0"
    folder.mkdir(parents=True)
    if is_stopped:
        (folder / "stop").touch()
    script = SlurmStudy("study.py", tmp_path, 2, {}).script(folder, 8)
    head, _, module = script.partition(" -m cosmati.launch.study_task")
    played = SCRIPT_END.format(folder=folder, status=status)
    begin, _, _ = head.rpartition("\n")
    script = f"{begin}\n{played}python -m cosmati.launch.study_task{module}"
    told = {"SLURM_RESTART_COUNT": str(restarts), "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "5"}
    done = subprocess.run(["bash"], input=script, text=True, check=False, env={"PATH": "/usr/bin:/bin", **told})
    assert done.returncode == code
    called = folder / "called"
    assert (called.read_text() if called.exists() else "") == (
        f"-m cosmati.launch.study_task run {folder} 5\n" if restarts < 4 else ""
    )
    again = folder / "requeued"
    assert (again.read_text().strip() if again.exists() else "") == requeued


@pytest.mark.parametrize(
    ("on", "jobs", "settings", "told"),
    [
        ("nomad", None, {}, "There are local, slurm, ray"),
        ("local", 2, {"partition": "gpu"}, "engine local has no setting partition"),
        ("slurm", 1, {}, "--jobs 2 or more"),
        ("slurm", 2, {"nodes": "2"}, "no setting nodes"),
        ("slurm", 2, {"requeues": "some"}, "requeues is 'some'"),
        ("slurm", 2, {"requeues": "\N{SUPERSCRIPT TWO}"}, "requeues is "),
        ("ray", 2, {"retries": "some"}, "retries=some is no number that Ray could take"),
        ("ray", 2, {"retries": "-1"}, "retries=-1 is no number"),
        ("ray", 2, {"num-cpus": "nan"}, "num-cpus=nan is no number"),
        ("ray", 2, {"num-cpus": "-2"}, "num-cpus=-2 is no number"),
        ("ray", 2, {"num-gpus": "inf"}, "num-gpus=inf is no number"),
        ("ray", 2, {"num-gpus": "one"}, "num-gpus=one is no number"),
    ],
)
def test_what_carries_nothing_out_is_refused(on: str, jobs: int | None, settings: dict[str, str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        cluster_of(on, "study.py", Path("study"), jobs, settings)


def test_nothing_is_shown_where_nothing_is_written(file: Path) -> None:
    done = CliRunner().invoke(app, ["study", "run", str(file), "--dry-run"])
    assert (done.exit_code, "Leave out --dry-run" in done.output) == (1, True)


def test_a_controller_that_falls_silent_at_the_beginning_cancels_nothing(
    slurm: PlayedSlurm, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "array"
    leave(slurm, file, folder, 2)

    def silent() -> None:
        raise RunError("squeue said no: Unable to contact slurm controller")

    slurm.go_on = silent
    slurm.asked.clear()
    with pytest.raises(RunError, match="Unable to contact"):
        run_on(file, folder)
    assert not [words for words in slurm.asked if words[0] in ("sbatch", "scancel")]
    slurm.go_on = slurm.run_one
    assert not any(one.error for one in run_on(file, folder).runs)
    assert not [words for words in slurm.asked if words[0] == "sbatch"]


@pytest.mark.parametrize("while_asking", ["srun", "squeue", "sbatch"])
def test_ctrl_c_ends_what_goes_on_from_before_too(
    slurm: PlayedSlurm, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_asking: str
) -> None:
    """Whatever the command is doing then: asking for the hardware, looking for arrays, or submitting a further one."""
    folder, ask = tmp_path / "array", getattr(slurm, while_asking)
    if while_asking != "sbatch":
        leave(slurm, file, folder, 2)
    slurm.arrays["9"] = tmp_path / "other" / "slurm" / "array-0", []

    def interrupted(*arguments: str) -> str:
        said = ask(*arguments) if while_asking == "sbatch" else ""  # Slurm has it by then, and its number isn't known
        monkeypatch.setattr(slurm, while_asking, ask)
        raise KeyboardInterrupt(said)

    monkeypatch.setattr(slurm, while_asking, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_on(file, folder)
    assert [*slurm.arrays] == ["9"]  # another study's
    assert (folder / "slurm" / "array-0" / "stop").exists()
    assert not any(one.error for one in run_on(file, folder).runs)


def test_an_array_s_folder_is_new_though_earlier_ones_were_taken_away(
    slurm: PlayedSlurm, file: Path, tmp_path: Path
) -> None:
    for number in (3, 10):
        (tmp_path / "array" / "slurm" / f"array-{number}").mkdir(parents=True)
        (tmp_path / "array" / "slurm" / f"array-{number}" / "stop").touch()
    (tmp_path / "array" / "slurm" / "array-of mine").touch()
    run_on(file, tmp_path / "array")
    (submitted,) = [words for words in slurm.asked if words[0] == "sbatch"]
    assert submitted[-1].endswith("/slurm/array-11/array.sbatch")


def test_an_array_whose_folder_was_taken_away_is_cancelled(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    leave(slurm, file, tmp_path / "array", 3)
    ((old, (folder, _)),) = slurm.arrays.items()
    shutil.rmtree(folder)
    slurm.go_on = lambda: None if old in slurm.arrays else slurm.run_one()  # its tasks can't begin
    assert not any(one.error for one in run_on(file, tmp_path / "array").runs)
    assert ("scancel", old) in slurm.asked


def test_what_cannot_be_cancelled_keeps_nothing_else_from_it(
    slurm: PlayedSlurm, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = study_array.SlurmArrays(SlurmStudy("s.py", tmp_path, 2, {}), "loss", {}, ArrayPlan(
        file="s.py", hardware="here", results=str(tmp_path / "slurm" / "results"), cells=()))  # fmt: skip
    cancelled = []

    def scancel(job: str) -> str:
        if job == "1":
            raise RunError("scancel said no: Unable to contact slurm controller")
        if job == "2":
            raise RunError("scancel said no: Invalid job id specified")  # it has ended meanwhile
        cancelled.append(job)
        return ""

    monkeypatch.setattr(slurm, "scancel", scancel)
    with pytest.raises(RunError, match=r"Slurm's job 1 goes on: scancel said no.*scancel 1"), arrays:
        arrays._arrays |= dict.fromkeys(("2", "1", "3"), tmp_path)
    assert cancelled == ["3"]


def test_a_result_that_is_damaged_is_named(slurm: PlayedSlurm, file: Path, tmp_path: Path) -> None:
    def go_on() -> None:
        slurm.run_one()
        for path in (tmp_path / "array" / "slurm" / "results").iterdir():
            path.write_text("{")

    slurm.go_on = go_on
    with pytest.raises(RunError, match=r"slurm/results/.*\.json"):
        run_on(file, tmp_path / "array")
    assert not slurm.arrays
