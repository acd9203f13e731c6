"""What is taken back in mid-run: on two ranks, and in a run that is killed between the entry and its step."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.ledger.query import VerifiedLedger
from tests.processes import PythonProcess, launch_ranks
from tests.train import vouched_worker
from tests.train.test_authority_watch import in_force, verify, weights
from tests.train.vouched_world import PEOPLE, World, rows_by_step

pytestmark = pytest.mark.long

WORKER = vouched_worker.__file__


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    World.made_in(root)
    return root


def launch(made: Path, place: Path, world: int, grace: str, *events: str) -> Path:
    """Run it in a world of its own, and return the run's folder."""
    place.mkdir()
    shutil.copytree(made, place / "world")
    launch_ranks([WORKER, place / "world", place / "run", grace, *events], world)
    return place / "run"


def story(folder: Path) -> list[object]:
    """What a ledger says but for salts, times, keys and digests."""
    ledger = VerifiedLedger(folder / "ledger")
    steps = [
        [
            entry.step,
            entry.attempt,
            [(c.class_id, c.phase, c.route_id, c.num_rows, c.weight) for c in entry.microbatches],
        ]
        for _, entry, _ in ledger.steps()
    ]
    tables = [[one.phases, one.policy, one.routes, one.withdrawn, len(one.changes)] for one in ledger.tables]
    return [steps, tables]


@pytest.mark.parametrize(
    ("grace", "event"),
    [("{revocation: reject}", "revoke"), ("{expiry: {finish: 5ba}}", "hide")],
    ids=["reject", "finish"],
)
def test_two_ranks_do_the_same_at_the_same_step(made: Path, tmp_path: Path, grace: str, event: str) -> None:
    one = launch(made, tmp_path / "one", 1, grace, f"9:{event}")
    two = launch(made, tmp_path / "two", 2, grace, f"9:{event}")
    assert weights(one) == weights(two)
    assert story(one) == story(two)
    assert in_force(one) == in_force(two) != []
    verify(two)


@pytest.mark.parametrize(
    ("grace", "events", "kill"),
    [("{revocation: reject}", "9:revoke", 13), ("{expiry: {finish: 5ba}}", "9:hide", 15)],
    ids=["reject", "finish"],
)
def test_a_run_that_is_killed_goes_on_by_the_entry(
    made: Path, tmp_path: Path, grace: str, events: str, kill: int
) -> None:
    """It goes back to a checkpoint from before the entry, and takes those steps anew; no clock is asked."""
    undisturbed = launch(made, tmp_path / "undisturbed", 1, grace, events)
    shutil.copytree(made, tmp_path / "world")
    command = [WORKER, str(tmp_path / "world"), str(tmp_path / "run"), grace]
    killed = PythonProcess([*command, events, f"{kill}:kill"])
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert in_force(tmp_path / "run") == in_force(undisturbed)
    again = PythonProcess(command)
    said, errors = again.communicate()
    assert again.returncode == 0, errors
    assert said.partition(":")[0] == ("completed" if "reject" in grace else "stopped")
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert [rows_by_step(tmp_path / "run", name) for name in PEOPLE] == [
        rows_by_step(undisturbed, name) for name in PEOPLE
    ]
    assert in_force(tmp_path / "run") == in_force(undisturbed)
    verify(tmp_path / "run")
