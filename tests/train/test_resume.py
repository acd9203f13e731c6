"""Runs that are killed at random events go on to the same bits, and their ledgers stay whole."""

import random
import signal
from pathlib import Path

import pytest
import torch

from cosmati.ledger.verify import verify_ledger
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from tests.processes import PythonProcess
from tests.train.killed_run import STEPS, make_trainer

pytestmark = pytest.mark.long

SCRIPT = ["-m", "tests.train.killed_run"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, int]:
    """The run that nobody disturbed, and the number of events that it tells of."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = make_trainer(folder)
    events: list[str] = []
    trainer.trace = events.append
    assert trainer.fit().outcome == "completed"
    return read_checkpoint(list_checkpoints(folder / "checkpoints")[0]), len(events)


def start_and_signal(folder: Path, event: int, number: signal.Signals) -> tuple[int, list[str]]:
    """Start the run, send it a signal when it has told of so many events, and return how it ended."""
    with PythonProcess([*SCRIPT, str(folder)]) as process:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == event:
                process.send_signal(number)
        return process.wait(timeout=280), lines


def assert_same_bits(folder: Path, expected: Checkpoint) -> None:
    found = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    assert found.step == expected.step == STEPS
    assert found.state_digest == expected.state_digest
    assert found.facts["clock"][:5] == expected.facts["clock"][:5]
    report = verify_ledger(folder / "ledger")
    assert report.num_steps == STEPS
    assert report.has_ended
    # What was run again gave the recorded digests: nothing diverged, so no row was seen with another content or place.
    assert report.diverged_steps == ()


@pytest.mark.parametrize("tries", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_sigkill_at_random_moments_gives_the_same_bits(
    tmp_path: Path, whole: tuple[Checkpoint, int], tries: int
) -> None:
    expected, num_events = whole
    draw = random.Random(tries)
    kills, runs = 0, 0
    while kills < tries:
        folder = tmp_path / str(runs)
        code, lines = start_and_signal(folder, draw.randrange(1, num_events // 2), signal.SIGKILL)
        kills += code == -signal.SIGKILL
        if code == 0:
            # It ended before its moment came: look at it, and start another.
            assert lines[-1] == "outcome completed"
            assert_same_bits(folder, expected)
            runs += 1
    code, lines = start_and_signal(tmp_path / str(runs), 10**9, signal.SIGKILL)
    assert (code, lines[-1]) == (0, "outcome completed")
    assert_same_bits(tmp_path / str(runs), expected)


def test_ctrl_c_ends_with_a_checkpoint_and_goes_on(tmp_path: Path, whole: tuple[Checkpoint, int]) -> None:
    code, lines = start_and_signal(tmp_path / "run", 40, signal.SIGINT)
    assert (code, lines[-1]) == (0, "outcome stopped")
    assert list_checkpoints(tmp_path / "run" / "checkpoints")
    code, lines = start_and_signal(tmp_path / "run", 10**9, signal.SIGINT)
    assert (code, lines[-1]) == (0, "outcome completed")
    assert_same_bits(tmp_path / "run", whole[0])
