"""A class with something of its own whose signer's key is revoked in mid-run: trained no more, it can be deleted."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import Evaluation
from cosmati.core.plan import Promise
from cosmati.methods.functional import drop_isolated
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.train.observers.observer import Observer
from tests.processes import PythonProcess, launch_ranks
from tests.provenance.authority.people import PII
from tests.train.isolated import revoked_worker
from tests.train.isolated.revoked_world import PAIR, error, shared, tensors, trainer
from tests.train.test_authority_watch import in_force, verify
from tests.train.vouched_world import World, hide, revoke, rows_by_step

pytestmark = pytest.mark.long

WORKER = revoked_worker.__file__
REJECT = "{revocation: reject}"


def own(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if "isolated" in name}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_what_is_its_own_is_trained_no_more_and_nothing_else_has_seen_it(
    world: World, tmp_path: Path, never: dict[str, Tensor]
) -> None:
    """Its weights, its averages and what the optimizer keeps of it stay as they were, without decay."""
    kept: list[dict[str, Tensor]] = []
    run = trainer(world, tmp_path / "run", {5: revoke(PII), 9: lambda _w: kept.append(tensors(run))}, REJECT)
    assert run.fit().outcome == "completed"
    assert in_force(tmp_path / "run") == [(PII, "revocation", "reject", 9)]
    after = tensors(run)
    assert same(own(kept[0]), own(after))
    assert not same(shared(kept[0]), shared(after))
    assert same(shared(after), never)
    assert run.plan.holds(Promise.ISOLATED, PAIR)
    dropped = drop_isolated(run.model, PII).state_dict()
    assert all(torch.equal(dropped[name], never[f"model.{name}"]) for name in dropped)
    assert not any(rows_by_step(tmp_path / "run", PII)[9:])
    said = verify(tmp_path / "run")
    assert f"drop_isolated(model, '{PII}')" in said, "how to delete it"


@pytest.mark.parametrize(("event", "reason"), [(revoke(PII), "revocation"), (hide, "expiry")])
def test_a_stop_leaves_the_promise_as_it_was(
    world: World, tmp_path: Path, never: dict[str, Tensor], event: Any, reason: str
) -> None:
    """Nobody's rows have ended the run: once all is well again it comes to the same."""
    run = trainer(world, tmp_path / "run", {5: event})
    with pytest.raises(NoLongerVouchedError) as caught:
        run.fit()
    assert (f"drop_isolated(model, '{PII}')" in str(caught.value)) is (reason == "revocation")
    assert run.plan.holds(Promise.ISOLATED, PAIR)
    if event is hide:
        (world.people.root / "hidden").rename(world.people.folder)
        again = trainer(world, tmp_path / "run", {})
    else:
        again = trainer(world, tmp_path / "run", {}, REJECT, run=tmp_path / "run", change=("policy",))
    again.fit()
    assert again.plan.holds(Promise.ISOLATED, PAIR), again.plan
    assert same(shared(tensors(again)), never)
    verify(tmp_path / "run")


def test_an_evaluation_that_runs_it_is_measured_no_more(world: World, tmp_path: Path) -> None:
    rows = [torch.arange(4)]
    seen: list[tuple[int, set[str]]] = []

    class Measured(Observer):
        def on_evaluation(self, clock: Any, metrics: Any, seconds: float) -> None:
            seen.append((clock.step, {name.partition("/")[0] for name in metrics}))

    evaluation = {"all": Evaluation(rows, {"e": error}), "own": Evaluation(rows, {"e": error}, classes=PII)}
    run = trainer(world, tmp_path / "run", {5: revoke(PII)}, REJECT, evaluation=evaluation, evaluate_every="4ba")
    run.observers.append(Measured())
    run.fit()
    assert seen[:4] == [(4, {"all", "own"}), (8, {"all", "own"}), (12, {"all"}), (16, {"all"})]


@pytest.mark.slow
def test_two_ranks_and_a_crash_come_to_the_same(made: Path, tmp_path: Path, never: dict[str, Tensor]) -> None:
    found = []
    for place, ranks in (("one", 1), ("two", 2)):
        shutil.copytree(made, tmp_path / place)
        launch_ranks([WORKER, tmp_path / place, tmp_path / f"run-{place}", "5:revoke"], ranks)
        found.append(revoked_worker.weights_of(tmp_path / f"run-{place}"))
    shutil.copytree(made, tmp_path / "three")
    command = [WORKER, str(tmp_path / "three"), str(tmp_path / "run-three")]
    killed = PythonProcess([*command, "5:revoke", "10:kill"])
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = PythonProcess(command)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    found.append(revoked_worker.weights_of(tmp_path / "run-three"))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    for name, value in shared(found[0]).items():
        assert torch.equal(value, never[f"model.{name}"])
    for place in ("one", "two", "three"):
        assert in_force(tmp_path / f"run-{place}") == [(PII, "revocation", "reject", 9)]
        verify(tmp_path / f"run-{place}")
