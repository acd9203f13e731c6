"""The folder of a run, without a trainer: one process at a time, and one record that outlives a resume."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cosmati.core.clock import Clock
from cosmati.errors import RunError
from cosmati.methods.label_smoothing import LabelSmoothing
from cosmati.records.run import GuaranteeRecord, PlanLine, RunRecord
from cosmati.storage.lock import FileLock, is_locked
from cosmati.train.facts import RunFacts
from cosmati.train.run import folder
from cosmati.train.run.folder import RunFolder
from cosmati.train.run.result import RunResult
from tests.train.hand_made import POLICY, run_facts

pytestmark = pytest.mark.long

HOLDER = """
import sys
from pathlib import Path
from cosmati.train.run.folder import RunFolder
from tests.train.hand_made import run_facts
folder = RunFolder.open(Path(sys.argv[1]), run_facts())
print("open", flush=True)
sys.stdin.read()
"""


def _record(path: Path) -> RunRecord:
    return RunRecord.from_json((path / "run.json").read_text())


def _begun(path: Path, facts: RunFacts) -> RunFolder:
    """An open folder whose run has started."""
    folder = RunFolder.open(path, facts)
    folder.write("running", facts.plan, Clock(), None)
    return folder


def _result(outcome: str = "completed") -> RunResult:
    return RunResult(outcome, Clock(step=4), {"accuracy": 0.75}, 2.0, {"forward": 1.5}, None)


def test_an_open_folder_is_that_of_one_process_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mine"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(RunError, match=r"Another process is training in .*mine.* folder of its own"):
            RunFolder.open(path, run_facts(seed=9))
    finally:
        holder.kill()
        holder.communicate()
    RunFolder.open(path, run_facts()).unlock()


def test_a_closed_folder_can_be_opened_again(tmp_path: Path) -> None:
    facts = run_facts()
    folder = _begun(tmp_path, facts)
    assert is_locked(tmp_path / "lock")
    folder.close(_result(), facts.plan)
    assert not is_locked(tmp_path / "lock")
    assert (tmp_path / "checkpoints").is_dir()


def test_the_record_says_what_the_run_is_and_what_became_of_it(tmp_path: Path) -> None:
    facts, path = run_facts(LabelSmoothing(smoothing=0.1), policy=POLICY), tmp_path / "a run"
    before = datetime.now(UTC) - timedelta(seconds=1)
    folder = _begun(path, facts)
    opened = _record(path)
    assert (opened.outcome, opened.num_steps, opened.ended) == ("running", 0, None)
    assert (opened.metrics, opened.seconds_by_part) == ({}, {})
    assert before <= datetime.fromisoformat(opened.started) <= datetime.now(UTC)
    assert (opened.run_id, opened.recipe_name, opened.hardware) == ("a run", "by hand", "an abacus")
    assert (opened.seed, opened.num_microbatches, opened.environment) == (7, 2, {"torch": "2", "python": "3"})
    assert opened.digests == {
        "plan": facts.plan.digest, "model": (b"M" * 32).hex(), "data": "d1", "policy": (b"P" * 32).hex(),
        "policy_root": "declared",
    }  # fmt: skip
    assert json.loads(opened.recipe_text) == {"methods": ["LabelSmoothing()"], "lr": 0.5}
    (line,) = opened.plan
    assert line == PlanLine("label", "LabelSmoothing()", (LabelSmoothing.__doc__ or "").strip().splitlines()[0])

    plan = facts.plan.withdraw("elastic", "a reason")
    folder.close(_result("stopped"), plan)
    closed = _record(path)
    assert (closed.outcome, closed.num_steps, closed.started) == ("stopped", 4, opened.started)
    assert (closed.metrics, closed.seconds_by_part) == ({"accuracy": 0.75}, {"forward": 1.5})
    assert datetime.fromisoformat(closed.ended or "") >= datetime.fromisoformat(closed.started)
    assert GuaranteeRecord("elastic", holds=False, because="a reason") in closed.guarantees
    assert GuaranteeRecord("elastic", holds=False, because="a reason") not in opened.guarantees
    assert len(closed.guarantees) == len(facts.plan.guarantees)


def test_without_a_policy_the_record_has_no_digest_of_one(tmp_path: Path) -> None:
    _begun(tmp_path, run_facts()).unlock()
    assert _record(tmp_path).digests["policy"] == ""


def test_a_resumed_run_keeps_when_it_started_and_from_which_model(tmp_path: Path) -> None:
    facts = run_facts()
    RunFolder.open(tmp_path, facts).close(_result(), facts.plan)
    text = (tmp_path / "run.json").read_text()
    started = _record(tmp_path).started
    (tmp_path / "run.json").write_text(text.replace(started, "2001-02-03T04:05:06+00:00"))
    (tmp_path / "checkpoints" / "step-00000004").mkdir()
    trained = run_facts(model_root=b"N" * 32, data_digest="d2")
    folder = _begun(tmp_path, trained)
    for record in (_record(tmp_path), folder.close(_result(), trained.plan) or _record(tmp_path)):
        assert record.started == "2001-02-03T04:05:06+00:00"
        assert record.digests["model"] == (b"M" * 32).hex()
        assert record.digests["data"] == "d2"


def test_a_record_that_cannot_be_read_lets_the_folder_go(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"version": 1, "run')
    with pytest.raises(RunError):
        RunFolder.open(tmp_path, run_facts())
    FileLock(tmp_path / "lock").release()
    assert (tmp_path / "run.json").read_text() == '{"version": 1, "run'


def test_a_path_that_is_no_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run folder .*file/run can't be written: .*Give another one"):
        RunFolder.open(tmp_path / "file" / "run", run_facts())


def test_a_write_that_fails_leaves_the_record_before_it_and_unlocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = run_facts()
    folder = _begun(tmp_path, facts)
    written = (tmp_path / "run.json").read_bytes()

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device", str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError, match=r"run\.json can't be written: .*No space left.*it goes on"):
        folder.close(_result(), facts.plan)
    assert (tmp_path / "run.json").read_bytes() == written
    assert not is_locked(tmp_path / "lock")
    assert not list(tmp_path.glob("*.tmp"))


def test_opening_alone_writes_no_record(tmp_path: Path) -> None:
    """Who opens it may be refused: what the run was stays as it is."""
    _begun(tmp_path, run_facts()).unlock()
    before = (tmp_path / "run.json").read_bytes()
    RunFolder.open(tmp_path, run_facts(data_digest="d2")).unlock()
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    _begun(tmp_path, run_facts()).unlock()
    _begun(tmp_path, run_facts(model_root=b"N" * 32)).unlock()
    assert _record(tmp_path).digests["model"] == (b"N" * 32).hex()


class Abandoned:
    """Something in a circle, which a collection alone takes away."""

    def __init__(self, held: object, on_end: Callable[[], None] = lambda: None) -> None:
        self.held, self.on_end, self.itself = held, on_end, self

    def __del__(self) -> None:
        self.on_end()


def test_an_abandoned_lock_is_let_go_while_another_thread_collects(tmp_path: Path) -> None:
    """Whose collection began before it was abandoned, and lets other threads run: ours does nothing meanwhile."""
    began = threading.Event()

    def linger() -> None:
        began.set()
        time.sleep(0.1)

    gc.disable()
    try:
        Abandoned(None, linger)
        other = threading.Thread(target=gc.collect)
        other.start()
        assert began.wait(10)
        Abandoned(FileLock(tmp_path / "lock"))
        folder._locked(tmp_path / "lock").release()
        other.join()
    finally:
        gc.enable()
