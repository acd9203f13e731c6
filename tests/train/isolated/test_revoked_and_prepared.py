"""What was prepared is taken back while a class's own stands still: the run stops, and goes on to the same bits."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import artifact
from cosmati.core.plan import Promise
from cosmati.methods.functional import drop_isolated
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.authority.errors import NoLongerVouchedError
from tests.processes import PythonProcess, launch_ranks
from tests.provenance.authority.people import PII
from tests.train.isolated import revoked_worker
from tests.train.isolated.revoked_world import PAIR, tensors, trainer
from tests.train.prepared_world import at_others, authority, made_in, others_of
from tests.train.test_authority_watch import in_force, verify
from tests.train.vouched_world import Events, World, hide, revoke, rows_by_step

pytestmark = pytest.mark.long

WORKER = revoked_worker.__file__
REJECT = "{revocation: reject}"
REVOKED = ("revocation", "reject", 9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_in(tmp_path_factory.mktemp("world"))


def prepared(world: World, kind: Any, **more: Any) -> Artifact:
    return artifact(kind, world.people.root / "others" / "tokenizer", authority=authority(world, **more))


def both(*events: Any) -> Any:
    return lambda world: [event(world) for event in events]


def find_again(world: World) -> None:
    others = others_of(world).people
    (others.root / "hidden").rename(others.folder)


@pytest.mark.parametrize(
    ("kind", "events", "stops_at"),
    [
        ("tokenizer", {5: both(revoke(PII), at_others(hide))}, 9),
        pytest.param("statistics", {5: revoke(PII), 10: at_others(hide)}, 13, marks=pytest.mark.slow),
        pytest.param("tokenizer", {5: at_others(hide), 6: revoke(PII)}, 9, marks=pytest.mark.slow),
    ],
    ids=["at once", "afterwards", "before"],
)
def test_what_was_prepared_is_taken_back_too(
    world: World, tmp_path: Path, never: dict[str, Tensor], kind: str, events: Events, stops_at: int
) -> None:
    folder = tmp_path / "run"
    run = trainer(world, folder, events, REJECT, artifacts=[prepared(world, kind)])
    with pytest.raises(NoLongerVouchedError, match="being withdrawn"):
        run.fit()
    assert run.clock.step == stops_at
    assert run.plan.holds(Promise.ISOLATED, PAIR)
    stopped = tensors(run)
    verify(folder)
    find_again(world)
    again = trainer(world, folder, {}, REJECT, run=folder, artifacts=[prepared(world, kind, run=folder)])
    assert again.fit().outcome == "completed"
    assert again.plan.holds(Promise.ISOLATED, PAIR), again.plan
    after = tensors(again)
    assert all(torch.equal(value, never[name]) for name, value in after.items() if "isolated" not in name)
    assert all(torch.equal(value, stopped[name]) for name, value in after.items() if "isolated" in name)
    assert in_force(folder) == [(PII, *REVOKED)]
    assert not any(rows_by_step(folder, PII)[9:])
    dropped = drop_isolated(again.model, PII).state_dict()
    assert all(torch.equal(dropped[name], never[f"model.{name}"]) for name in dropped)
    said = verify(folder)
    assert "vouched for again" in said
    assert f"drop_isolated(model, '{PII}')" in said


@pytest.mark.slow
def test_two_ranks_and_a_crash_come_to_the_same(made: Path, tmp_path: Path, never: dict[str, Tensor]) -> None:
    """Both are taken back at once; a third run is killed a step before it would stop, and finds it at its resume."""
    found = []
    for place, ranks, killed in (("one", 1, False), ("two", 2, False), ("three", 1, True)):
        own = World.found_in(Path(shutil.copytree(made, tmp_path / place)))
        folder = tmp_path / f"run-{place}"
        command = [WORKER, own.people.root, folder]
        if killed:
            crash = PythonProcess([*map(str, command), "5:revoke", "5:hide", "8:kill"])
            crash.communicate()
            assert crash.returncode == -signal.SIGKILL
        launch_ranks([*command, *([] if killed else ["5:revoke", "5:hide"])], ranks)
        assert revoked_worker.step_of(folder) == (6 if killed else 9), "it has stopped"
        find_again(own)
        launch_ranks(command, ranks)
        assert revoked_worker.step_of(folder) == 20
        found.append(revoked_worker.weights_of(folder))
        verify(folder)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
        assert "isolated" in name or torch.equal(value, never[f"model.{name}"])
        assert "isolated" in name or torch.equal(value, found[2][name])
