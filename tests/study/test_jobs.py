"""Several runs at a time: what can be sent, what comes back, and what a death says."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cosmati.errors import RunError
from cosmati.records.study import StudyRecord
from cosmati.study.jobs import LocalProcesses, jobs_of, named_call
from cosmati.study.lines import only_one
from cosmati.study.python_file import load_module
from cosmati.study.runner import FAILED_FILE, LINES_FILE, Arm, Study, run_study
from cosmati.study.search import TRIALS_FILE
from tests.processes import PythonProcess
from tests.study.fake_runs import STALL, FakeRun, diverging_start, dying_start, failing_start, study_start
from tests.train.test_bad_input import full_beyond

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent.parent
ARMS = ("baseline", "fast")
quick = pytest.mark.usefixtures("quick_processes")


def make_study(folder: Path, seconds: float = 0.0, **changes: Any) -> Study:
    arms = {name: Arm(start=partial(study_start, str(folder), name, seconds), recipe_text=name) for name in ARMS}
    options = {"name": "small", "task": "nothing", "arms": arms, "budgets": (0.5, 1.0), "seeds": (0, 1, 2)}
    return Study(**{**options, "quality": "loss", "higher_is_better": False, **changes})  # type: ignore[arg-type]


def run(study: Study, folder: Path, jobs: int = 2) -> StudyRecord:
    return run_study(study, folder, hardware="machine", jobs=jobs, console=Console(file=io.StringIO()))


def starts(folder: Path) -> list[str]:
    """Return what was started, without the process that did."""
    return [line.rpartition(" ")[0] for line in (folder / "starts.txt").read_text().splitlines()]


def facts() -> tuple[int, int, object]:
    return os.getpid(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)


def slow_for_long() -> None:
    time.sleep(300)


@quick
def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run(make_study(tmp_path / "one"), tmp_path / "one", jobs=1)
    assert run(make_study(tmp_path / "two"), tmp_path / "two") == alone
    assert sorted(starts(tmp_path / "one")) == sorted(starts(tmp_path / "two"))
    with pytest.raises(RunError, match=r"went on 1 at a time, and now it's 2.*cost_turns"):
        run(make_study(tmp_path / "one", seeds=(0, 1, 2, 3)), tmp_path / "one")


def test_a_process_has_one_thread_and_is_kept_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with LocalProcesses(2) as workers:
        first = dict(workers.results(dict.fromkeys(range(4), facts)))
        second = dict(workers.results(dict.fromkeys(range(4), facts)))
    pids = {pid for pid, _, _ in [*first.values(), *second.values()]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {(threads, handler) for _, threads, handler in first.values()} == {(1, signal.SIG_IGN)}
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@quick
def test_an_error_in_a_process_is_told_here_with_where_it_was(tmp_path: Path) -> None:
    def study(start: Any) -> Study:
        return make_study(tmp_path, arms={"baseline": Arm(start=start)}, seeds=(4,), budgets=(1.0,))

    with pytest.raises(RunError, match="seed 4: ValueError: seed 4 has no data"):
        run(study(failing_start), tmp_path)
    assert "fake_runs.py" in (tmp_path / FAILED_FILE).read_text()
    with pytest.raises(RunError, match=r"process of the run baseline, 1.0, 4 died with exit code 7.*__main__"):
        run(study(dying_start), tmp_path / "other")
    record = run(study(diverging_start), tmp_path)
    assert record.runs[0].final.quality != record.runs[0].final.quality


@quick
def test_what_cannot_be_sent_is_refused_before_a_run(tmp_path: Path) -> None:
    study = make_study(tmp_path, arms={"baseline": Arm(start=lambda b, s: FakeRun(b, 0.0))})
    with pytest.raises(RunError, match=r"baseline, 0.5, 0 can't be sent.*functools.partial.*jobs=1"):
        run(study, tmp_path)
    assert not (tmp_path / LINES_FILE).exists()


@quick
def test_functions_of_a_file_outside_of_any_package_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "outside.py"
    path.write_text("import sibling\ndef answer():\n    return sibling.VALUE\n")
    (tmp_path / "sibling.py").write_text("VALUE = 42\n")
    module = load_module(path)
    with LocalProcesses(1) as workers:
        assert dict(workers.results({"a": module.answer, "b": module.answer})) == {"a": 42, "b": 42}


@quick
def test_the_end_does_not_wait_for_what_still_runs() -> None:
    began = time.monotonic()
    with LocalProcesses(2) as workers:
        found = workers.results({"quick": facts, "slow": slow_for_long})
        key, (pid, _, _) = next(iter(found))  # type: ignore[misc]
        assert key == "quick"
    assert time.monotonic() - began < 120
    assert not alive(pid)


def test_a_number_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="jobs is 0"):
        jobs_of(0)


SCRIPT = """
import io, os, signal, sys
from functools import partial
from pathlib import Path
from rich.console import Console
from cosmati.study import jobs
from cosmati.study.runner import Arm, Study, run_study
from cosmati.study.search import Dimension, SearchPlan, SearchedArm, search_arms
from tests.train.test_bad_input import full_beyond
from tests.study.fake_runs import search_start, study_start

SECONDS = 0.2

def work(folder, seconds=SECONDS, jobs=2):
    quiet = Console(file=io.StringIO())
    plan = SearchPlan(rungs=((0.5, 4), (1.0, 2)), max_rounds=0)
    searched = {
        name: SearchedArm(start=partial(search_start, str(folder), name, seconds), recipe_text=name,
                          dimensions=[Dimension(name="lr", low=0.01, high=1.0)])
        for name in ("baseline", "fast")
    }
    found = search_arms(searched, plan, folder, quality="loss", higher_is_better=False, hardware="machine", jobs=jobs,
                        console=quiet)
    arms = {name: Arm(start=partial(study_start, str(folder), name, seconds), recipe_text=name, search=search)
            for name, search in found.items()}
    study = Study(name="small", task="nothing", arms=arms, budgets=(0.5, 1.0), seeds=(0, 1), quality="loss",
                  higher_is_better=False)
    return run_study(study, folder, hardware="machine", jobs=jobs, console=quiet)

if __name__ == "__main__":
    if "FORKED" in os.environ:
        from tests.processes import Alone
        jobs.get_context = lambda method: Alone
    signal.signal(signal.SIGINT, signal.default_int_handler)  # What a shell starts in the background ignores it.
    work(Path(sys.argv[1]))
"""


def begin(folder: Path, *, is_forked: bool) -> PythonProcess | subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    if is_forked:
        return PythonProcess([script, folder], cwd=folder, env=environment | {"FORKED": "1"}, start_new_session=True)
    command = [sys.executable, str(script), str(folder)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(number: int, path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < until, f"{path} never had {number} lines"
        time.sleep(0.02)


def end(process: PythonProcess | subprocess.Popen[str], folder: Path, number: signal.Signals) -> str:
    """Kill it, wait until all that it started have gone too, and return what it said."""
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]
    pids = {int(line.split()[-1]) for line in (folder / "starts.txt").read_text().splitlines()}
    until = time.monotonic() + 120
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "a process outlived its parent"
        time.sleep(0.05)
    return error


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_search_and_a_killed_study_lose_and_repeat_nothing(tmp_path: Path, is_forked: bool) -> None:
    kept = []
    kills = ((TRIALS_FILE, signal.SIGKILL, 3), (LINES_FILE, signal.SIGKILL, 2), (LINES_FILE, signal.SIGINT, 5))
    for name, number, num_lines in kills:
        process = begin(tmp_path, is_forked=is_forked)
        wait_for(num_lines, tmp_path / name)
        (tmp_path / STALL).touch()  # in the midst of long runs
        time.sleep(0.5)
        error = end(process, tmp_path, number)
        assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
        (tmp_path / STALL).unlink(missing_ok=True)
        kept.append((tmp_path / name).read_bytes())
    before = starts(tmp_path)
    work = load_module(tmp_path / "script.py").work
    record = work(tmp_path, 0.0)
    for name, lines, count in zip((TRIALS_FILE, LINES_FILE, LINES_FILE), kept, (12, 8, 8), strict=True):
        whole = (tmp_path / name).read_bytes()
        assert whole.startswith(lines)
        assert whole.count(b"\n") == count
    # What is started twice was going on when the process died: at most two runs each time.
    repeated = Counter(starts(tmp_path))
    assert len(repeated) == 20
    assert sum(repeated.values()) - 20 <= 6
    assert max(repeated.values()) <= 3
    assert len(starts(tmp_path)) - len(before) == 8 - kept[-1].count(b"\n")
    (tmp_path / "whole").mkdir()
    assert work(tmp_path / "whole", 0.0, jobs=1) == record


def test_two_processes_do_not_run_one_study(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(RunError, match="Another process runs a study or a search"):
        run(make_study(tmp_path), tmp_path, jobs=1)


def fails(error: Exception) -> None:
    raise error


class TwoWordError(Exception):
    """An error that a pickle can't give back."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def raise_two_words() -> None:
    raise TwoWordError("two", "words")


@quick
@pytest.mark.parametrize("num_jobs", [1, 2])
def test_a_call_that_fails_is_given_back_and_the_others_go_on(num_jobs: int) -> None:
    calls: dict[str, Any] = {
        "wrong": partial(named_call, "of the wrong one", partial(fails, ValueError("no\ndata"))),
        "odd": raise_two_words,
        **dict.fromkeys(("a", "b", "c"), facts),
    }
    if num_jobs == 2:
        calls = {"dies": partial(os._exit, 7), **calls}
    with jobs_of(num_jobs) as workers:
        found = dict(workers.outcomes(calls))
        assert set(found) == set(calls)
        assert found["wrong"].text == "ValueError: no data"
        assert "In the run of the wrong one." in found["wrong"].error.__notes__
        assert "test_jobs.py" in found["wrong"].trace
        assert "two words" in found["odd"].text
        assert all(isinstance(found[key], tuple) for key in "abc")
        if num_jobs == 2:
            assert "died with exit code 7" in found["dies"].text
        # What one can't go on after is raised at once, and the processes stay usable until the end.
        with pytest.raises(RunError, match="metric"):
            list(workers.outcomes({"wrong": partial(fails, RunError("metric"))}))
        assert len(dict(workers.results({"d": facts}))) == 1
        with pytest.raises(ValueError, match="first"):
            list(workers.results({"wrong": partial(fails, ValueError("first")), "e": facts}))


HELPED = """
from functools import partial
import beside_it
def study():
    return beside_it.answer, beside_it.deep, lazily
def lazily():
    import beside_later
    return beside_later.VALUE
"""


@quick
def test_modules_beside_a_studys_file_are_found_by_its_processes(tmp_path: Path) -> None:
    """A function of a helper, of a package beside the file, and a helper that is imported when it's called."""
    (tmp_path / "helped.py").write_text(HELPED)
    (tmp_path / "beside_it.py").write_text("from beside_parts.deep import deep\ndef answer():\n    return 1\n")
    (tmp_path / "beside_parts").mkdir()
    (tmp_path / "beside_parts" / "deep.py").write_text("def deep():\n    return 2\n")
    (tmp_path / "beside_later.py").write_text("VALUE = 3\n")
    before = list(sys.path)
    answer, deep, lazily = load_module(tmp_path / "helped.py").study()
    assert sys.path == [*before, str(tmp_path)]
    for call, value in ((deep, 2), (answer, 1), (lazily, 3)):
        with LocalProcesses(1) as workers:  # a new one each time: nothing was imported before
            assert dict(workers.results({"a": call})) == {"a": value}
    load_module(tmp_path / "helped.py")
    assert sys.path == [*before, str(tmp_path)]
    assert lazily() == 3
    sys.path.remove(str(tmp_path))


def test_what_lies_beside_a_file_is_read_again_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python leaves half of a compiled module on a full disk, and can't read that ever after."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "beside_full.py").write_text(f"VALUE = {'x' * 2000!r}\n")
    (tmp_path / "on_full.py").write_text("import beside_full\ndef answer():\n    return len(beside_full.VALUE)\n")
    with full_beyond(100):
        assert load_module(tmp_path / "on_full.py").answer() == 2000
    del sys.modules["beside_full"]
    assert load_module(tmp_path / "on_full.py").answer() == 2000
    assert not sys.dont_write_bytecode
    with pytest.raises(RunError, match="ZeroDivisionError"):
        load_module(_written(tmp_path / "breaks.py", "1 / 0\n"))
    assert not sys.dont_write_bytecode


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_that_fails_or_changes_the_path_leaves_it_whole(tmp_path: Path) -> None:
    before = list(sys.path)
    (tmp_path / "wrong.py").write_text("import sys\nsys.path.insert(0, 'mine')\n1 / 0\n")
    with pytest.raises(RunError, match="ZeroDivisionError"):
        load_module(tmp_path / "wrong.py")
    assert sys.path == ["mine", *before]
    sys.path.remove("mine")
