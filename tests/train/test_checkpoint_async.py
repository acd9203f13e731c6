"""Checkpoints that are written beside the loop: of the state as it was, in order, one at a time, and not lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock
from cosmati.errors import CheckpointError
from cosmati.ledger.verify import verify_ledger
from cosmati.storage.lock import is_locked
from cosmati.train.identity import Change
from cosmati.train.observers import Observer
from cosmati.train.run import saving
from cosmati.train.run.checkpoints import Checkpoint, Roots, list_checkpoints, read_checkpoint
from cosmati.train.run.session import OpenRun
from tests.processes import PythonProcess
from tests.train.test_checkpoint_parts import make_trainer
from tests.train.test_open_run import FACTS, RESULT, Told, _open_run

pytestmark = pytest.mark.long

STEPS = 5


class Gate:
    """Stands in the way of who writes a checkpoint, until it's opened; fails then, if it's told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, self.error = threading.Event(), threading.Event(), None
        self.error: Exception | None = None
        self._write = saving.write_checkpoint
        monkeypatch.setattr(saving, "write_checkpoint", self.pass_through)

    def pass_through(self, *given: Any) -> Path:
        self.entered.set()
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        return self._write(*given)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def started(folder: Path, *observers: Observer) -> OpenRun:
    run = _open_run(*observers, run_folder=folder, checkpoint_async=True)
    with run.opening():
        run.start(Clock())
    return run


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def landed(run: OpenRun, after: Clock) -> None:
    """Take steps until what was written is published."""
    flight = run._saver._flight
    assert flight is not None
    flight.join(60)
    run.checkpoint_is_due(after)


def test_the_loop_goes_on_and_what_it_changes_is_not_in_the_file(tmp_path: Path, gate: Gate) -> None:
    told: list[tuple[Any, ...]] = []
    run = started(tmp_path, Told(told))
    weight, facts = torch.zeros(3), {"about": [1]}
    state = {"m": torch.arange(6.0).view(2, 3).t()}
    before = state["m"].clone()
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": weight}, state, facts))
    assert gate.entered.wait(60)
    weight.add_(1)
    state["m"].mul_(2)
    facts["about"].append(2)
    run.checkpoint_is_due(Clock(step=2))
    assert names(tmp_path) == []
    assert [event[1] for event in told] == ["start"]
    gate.opened.set()
    landed(run, Clock(step=3))
    assert names(tmp_path) == ["step-00000001"]
    read = read_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    assert read.model["w"].tolist() == [0, 0, 0]
    assert torch.equal(read.state["m"], before)
    assert read.facts == {"about": [1]}
    roots = read.roots
    assert told[1:] == [("", "checkpoint", Clock(step=1), roots.state_digest, roots.parameter_root)]
    run.close(RESULT, FACTS.plan)


def test_one_is_under_way_at_a_time_and_memory_is_used_again(tmp_path: Path, gate: Gate) -> None:
    run, weight = started(tmp_path), torch.zeros(3)
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": weight}, {}, {}))
    kept = run._saver._kept["model/w"]
    weight.fill_(2)
    second = threading.Thread(target=run.save, args=(Clock(step=2), lambda: Checkpoint(2, {"w": weight}, {}, {})))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits for the first"
    gate.opened.set()
    second.join(60)
    run.settle()
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
    folder = tmp_path / "checkpoints"
    assert [read_checkpoint(folder / name).model["w"][0].item() for name in names(tmp_path)] == [2, 0]
    assert run._saver._kept["model/w"] is kept
    run.save(Clock(step=3), lambda: Checkpoint(3, {"w": torch.ones(5)}, {}, {}))
    run.settle()
    assert read_checkpoint(folder / "step-00000003").model["w"].tolist() == [1] * 5
    run.close(RESULT, FACTS.plan)


def test_an_amendment_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    """The ledger's entry is read by the tables in force where it stands."""
    run = started(tmp_path)
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": torch.zeros(1)}, {}, {}))
    amending = threading.Thread(target=run.amend, args=(Clock(step=2), [Change("policy", "a", "b")]))
    amending.start()
    amending.join(0.2)
    assert amending.is_alive()
    gate.opened.set()
    amending.join(60)
    assert names(tmp_path) == ["step-00000001"]
    run.close(RESULT, FACTS.plan)


def test_a_run_that_fails_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    class Waiting:
        path, abandoned = tmp_path, threading.Event()

        def write(self) -> None:
            """Do nothing: this rank's part is there."""

        def finish(self) -> Roots:
            raise CheckpointError("Rank 1's isn't." if self.abandoned.wait(60) else "Nobody said to give up.")

    run, draft = started(tmp_path), Waiting()
    run._saver._flight = flight = saving.Flight(Clock(step=1), draft, is_first=True)
    run.close(RESULT, FACTS.plan)
    assert str(flight.error) == "Rank 1's isn't."


@pytest.mark.parametrize("when", ["step", "save", "end"])
def test_what_failed_is_told_at_the_next_step_and_at_the_end(tmp_path: Path, gate: Gate, when: str) -> None:
    run = started(tmp_path)
    gate.error = CheckpointError("No space.")
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": torch.zeros(1)}, {}, {}))
    gate.opened.set()
    tell: dict[str, Callable[[], Any]] = {
        "step": lambda: landed(run, Clock(step=2)),
        "save": lambda: run.save(Clock(step=2), lambda: pytest.fail("made though the one before failed")),
        "end": run.settle,
    }
    with pytest.raises(CheckpointError, match=r"No space\."):
        tell[when]()
    assert names(tmp_path) == []
    run.close(RESULT, FACTS.plan)


def test_a_run_that_fails_still_publishes_what_is_whole(tmp_path: Path, gate: Gate) -> None:
    told: list[tuple[Any, ...]] = []
    run = started(tmp_path, Told(told))
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": torch.zeros(1)}, {}, {}))
    gate.opened.set()
    run.close(RESULT, FACTS.plan)
    assert names(tmp_path) == ["step-00000001"]
    assert [event[1] for event in told] == ["start", "checkpoint", "end"]


def test_a_run_that_fails_is_closed_where_that_fails_too(tmp_path: Path, gate: Gate) -> None:
    run = started(tmp_path)
    gate.error = CheckpointError("No space.")
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": torch.zeros(1)}, {}, {}))
    gate.opened.set()
    run.close(RESULT, FACTS.plan)
    assert names(tmp_path) == []


def test_the_folder_is_let_go_where_telling_of_it_fails(tmp_path: Path, gate: Gate) -> None:
    class Fails(Observer):
        def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
            raise OSError("no disk")

    run = started(tmp_path, Fails())
    run.save(Clock(step=1), lambda: Checkpoint(1, {"w": torch.zeros(1)}, {}, {}))
    gate.opened.set()
    with pytest.raises(OSError, match="no disk"):
        run.close(RESULT, FACTS.plan)
    assert not is_locked(tmp_path / "lock")
    assert names(tmp_path) == []


def test_whole_runs_have_the_same_checkpoints(tmp_path: Path) -> None:
    """Also the one before the first step, which is read back, and the last, for which fit waits."""
    found = {}
    for name in ("sync", "async"):
        more = {"checkpoint_every": "1ba", "num_checkpoints": 9, "checkpoint_async": name == "async"}
        assert make_trainer(tmp_path / name, f"{STEPS}ba", **more).fit().outcome == "completed"
        paths = list_checkpoints(tmp_path / name / "checkpoints")
        found[name] = [read_checkpoint(path).signed_digest for path in paths]
        report = verify_ledger(tmp_path / name / "ledger")
        assert (report.num_steps, report.has_ended) == (STEPS, True)
        assert len(found[name]) == STEPS + 1
    assert found["sync"] == found["async"]


class _Looks(Observer):
    """Reads, as the run begins, what is published."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[str]()

    def on_step(self, report: object) -> None:
        self.seen = self.seen or names(self.folder)

    def on_start(self, clock: Clock, budget: Budget) -> None:
        self.seen = []


def test_the_first_one_is_there_before_the_first_step(tmp_path: Path) -> None:
    trainer, looks = make_trainer(tmp_path, "1ba", checkpoint_async=True), _Looks(tmp_path)
    trainer.observers.append(looks)
    trainer.fit()
    assert looks.seen == ["step-00000000"]


def test_averages_and_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The loop saves when it likes, and the `with` ends once all is published."""
    trainer = make_trainer(tmp_path, "9ba", checkpoint_async=True, num_checkpoints=9)
    generator = torch.Generator().manual_seed(2)
    with trainer:
        for step in range(3):
            rows: tuple[Tensor, Tensor] = torch.randn(8, 3, generator=generator), torch.randint(2, (8,))
            trainer.step(rows)
            trainer.save()
            weights = nn.utils.parameters_to_vector(trainer.model.parameters()).clone()
            assert step + 1 == trainer.clock.step
    newest = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    assert names(tmp_path) == [f"step-{step:08d}" for step in (3, 2, 1, 0)]
    assert torch.equal(torch.cat([newest.model[n].flatten() for n, _ in trainer.model.named_parameters()]), weights)


@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_process_that_is_killed_as_it_writes_keeps_the_one_before(tmp_path: Path, where: str) -> None:
    """Before its files are written, or after, with the ledger's entry still to come."""
    code = f"""
import os, signal
from pathlib import Path
from cosmati.train.run import saving
from tests.train.test_checkpoint_parts import make_trainer
write = saving.write_checkpoint
def killed(folder, checkpoint, epoch):
    if checkpoint.step == 4 and "{where}" == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    draft = write(folder, checkpoint, epoch)
    if checkpoint.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return draft
saving.write_checkpoint = killed
make_trainer(Path({str(tmp_path / "run")!r}), "{STEPS}ba", checkpoint_every="2ba", checkpoint_async=True).fit()
"""
    with PythonProcess(["-c", code]) as process:
        assert process.wait(120) == -signal.SIGKILL
    assert names(tmp_path / "run") == ["step-00000002", "step-00000000"]
    more = {"checkpoint_every": "2ba", "checkpoint_async": True}
    make_trainer(tmp_path / "run", f"{STEPS}ba", **more).fit()
    make_trainer(tmp_path / "whole", f"{STEPS}ba", **more).fit()
    found, whole = (read_checkpoint(list_checkpoints(tmp_path / n / "checkpoints")[0]) for n in ("run", "whole"))
    assert (found.step, found.signed_digest) == (STEPS, whole.signed_digest)
    assert not list((tmp_path / "run" / "checkpoints").glob(".draft-*"))
    report = verify_ledger(tmp_path / "run" / "ledger")
    assert (report.num_steps, report.diverged_steps) == (STEPS, ())
