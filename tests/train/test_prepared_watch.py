"""What was prepared before a run, and is signed: asked about again as it goes on, as its data are."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import Evaluation, RunConfig, Trainer, artifact
from cosmati.data.plain_files import describe_files
from cosmati.data.signing import sign_sources
from cosmati.errors import ProvenanceError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.vouched import problem_with, read_withdrawals
from cosmati.optim import SGD
from cosmati.provenance.authority.errors import DeclaredOnlyError, NoLongerVouchedError, UntrustedRootError
from cosmati.train.observers.observer import Observer
from tests.processes import PythonProcess, launch_ranks
from tests.provenance.authority.people import NEWS
from tests.train import prepared_worker
from tests.train.prepared_world import (
    LICENCE_UNTIL,
    REJECT,
    at_others,
    authority,
    error,
    evaluation,
    made_in,
    others_of,
    tokenizer,
)
from tests.train.test_authority_watch import verify, weights
from tests.train.vouched_world import OPEN, Events, World, go_on, hide, revoke, rotate

pytestmark = pytest.mark.long

WORKER = prepared_worker.__file__


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three sources, and another authority, which has signed a tokenizer and what is evaluated on."""
    return made_in(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    return World.found_in(Path(shutil.copytree(made, tmp_path / "world")))


def told(folder: Path) -> list[tuple[str, str, str, int]]:
    """Return what is in force at the ledger's end: of what, why, and what is done from which step on."""
    facts = VerifiedLedger(folder / "ledger").tables[-1].details.get("withdrawn") or {"in_force": []}
    return [(one["of"], one["reason"], one["action"], one["step"]) for one in facts["in_force"]]


@pytest.fixture(scope="module")
def undisturbed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("undisturbed")
    world = World.found_in(Path(shutil.copytree(made, root / "world")))
    world.trainer(root / "run", {}, artifacts=[tokenizer(world)]).fit()
    return weights(root / "run")


@pytest.mark.parametrize(
    ("event", "reason", "says"),
    [
        (at_others(revoke(OPEN)), "revocation", "it isn't signed any more"),
        (at_others(hide), "expiry", "nobody could be asked"),
        (go_on(8), "expiry", "it had expired"),
    ],
    ids=["revoked", "unreachable", "expired"],
)
@pytest.mark.parametrize("grace", ["", REJECT], ids=["stop", "reject"])
def test_a_run_whose_tokenizer_is_taken_back_stops(
    world: World, tmp_path: Path, event: Any, reason: str, says: str, grace: str
) -> None:
    """Nothing of it can be left out: to reject it is to stop."""
    folder = tmp_path / "run"
    with pytest.raises(NoLongerVouchedError, match="being withdrawn"):
        world.trainer(folder, {5: event}, grace=grace, artifacts=[tokenizer(world)]).fit()
    assert ("tokenizer", reason, "stop", 9) in told(folder)
    said = verify(folder)
    assert f"withdrawn tokenizer firm/{OPEN}/bpe/1 ({reason}), stop from step 9 on: {says}" in said


def test_a_licence_that_ends_stops_the_run(world: World, tmp_path: Path) -> None:
    left = datetime.fromisoformat(f"{LICENCE_UNTIL}T00:00:00+00:00") - datetime.now(UTC) + timedelta(days=1)

    def end(own: World) -> None:
        go_on(left / timedelta(days=1))(own)

    with pytest.raises(NoLongerVouchedError):
        world.trainer(tmp_path / "run", {5: end}, artifacts=[tokenizer(world)]).fit()
    assert ("tokenizer", "licence", "stop", 9) in told(tmp_path / "run")
    assert f"bpe/1 (licence), stop from step 9 on: the manifest says until {LICENCE_UNTIL}" in verify(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["eve", "fay"], ids=["the tokenizer", "evaluation data"])
def test_two_ranks_and_a_crash_come_to_the_same(made: Path, tmp_path: Path, event: str) -> None:
    for place, ranks in (("one", 1), ("two", 2)):
        shutil.copytree(made, tmp_path / place)
        launch_ranks([WORKER, tmp_path / place, tmp_path / f"run-{place}", f"5:{event}"], ranks)
    shutil.copytree(made, tmp_path / "three")
    command = [WORKER, str(tmp_path / "three"), str(tmp_path / "run-three")]
    killed = PythonProcess([*command, f"5:{event}", f"{9 if event == 'eve' else 11}:kill"])
    killed.communicate()
    again = PythonProcess(command)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    runs = [tmp_path / f"run-{place}" for place in ("one", "two", "three")]
    wanted = ("tokenizer", "stop") if event == "eve" else ("evaluation data", "skip")
    for run in runs:
        ((of, _, action, step),) = told(run)
        assert (of, action, step) == (*wanted, 9)
        assert weights(run) == weights(runs[0])
        verify(run)


def test_a_grace_lets_it_finish(world: World, tmp_path: Path) -> None:
    with pytest.raises(NoLongerVouchedError):
        world.trainer(
            tmp_path / "run",
            {5: at_others(hide)},
            grace="{expiry: {finish: 5ba}}",
            artifacts=[tokenizer(world)],
        ).fit()
    assert told(tmp_path / "run") == [("tokenizer", "expiry", "stop", 14)]
    others_of(world).people.root.joinpath("hidden").rename(others_of(world).people.folder)
    at_others(revoke(OPEN))(world)
    with pytest.raises(ProvenanceError):
        tokenizer(world)
    kept = tokenizer(world, run=tmp_path / "run")
    with pytest.raises(NoLongerVouchedError, match="is for going on with that run"):
        world.trainer(tmp_path / "another", {}, artifacts=[kept])
    with pytest.raises(NoLongerVouchedError, match="revocation"):
        world.trainer(tmp_path / "run", {}, grace="{expiry: {finish: 5ba}}", artifacts=[kept]).fit()


def test_who_is_vouched_for_again_goes_on_to_the_same_bits(world: World, tmp_path: Path, undisturbed: str) -> None:
    run, people = tmp_path / "run", others_of(world).people
    with pytest.raises(NoLongerVouchedError):
        world.trainer(run, {5: at_others(hide)}, artifacts=[tokenizer(world)]).fit()
    (people.root / "hidden").rename(people.folder)
    assert world.trainer(run, {}, artifacts=[tokenizer(world)]).fit().outcome == "completed"
    assert weights(run) == undisturbed
    assert not told(run)
    assert "vouched for again" in verify(run)


def test_other_keys_are_an_entry_and_no_more(world: World, tmp_path: Path, undisturbed: str) -> None:
    run = tmp_path / "run"
    world.trainer(run, {5: at_others(rotate(OPEN))}, artifacts=[tokenizer(world)]).fit()
    assert weights(run) == undisturbed
    before, after = [
        next(one["provenance"]["sources"][0]["keyids"] for one in tables.details["artifacts"])
        for tables in VerifiedLedger(run / "ledger").tables
    ]
    assert before != after
    assert "provenance: " in verify(run)
    assert f"from step 8 on, tokenizer: signed, as firm/{OPEN}/bpe/1" in verify(run)


class Measured(Observer):
    """Notes after which steps something was measured."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluation(self, clock: Any, metrics: Mapping[str, float], seconds: float) -> None:
        del seconds
        if metrics:
            self.steps.append(clock.step)


def evaluated(world: World, folder: Path, events: Events, **more: Any) -> tuple[Trainer, list[int]]:
    own = {"run": more["run"]} if "run" in more else {}
    trainer = world.trainer(folder, events, evaluation=evaluation(world, **own), evaluate_every="2ba", **more)
    seen = Measured()
    trainer.observers.append(seen)
    return trainer, seen.steps


def test_evaluation_data_are_read_no_more_where_the_class_would_be_rejected(
    world: World, tmp_path: Path, undisturbed: str
) -> None:
    run = tmp_path / "run"
    trainer, steps = evaluated(world, run, {5: at_others(revoke(NEWS)), 14: lambda _w: trainer.stop()}, grace=REJECT)
    assert trainer.fit().outcome == "stopped"
    assert steps == [2, 4, 6, 8]
    assert told(run) == [("evaluation data", "revocation", "skip", 9)]
    assert f"withdrawn evaluation data firm/{NEWS}/held/1 (revocation), skip from step 9 on" in verify(run)
    with pytest.raises(ProvenanceError):
        evaluation(world)
    # Signed again: what was left out stays so.
    others = others_of(world).people
    others.delegate(NEWS, "gus")
    list(sign_sources(str(others.root / "held-out"), others.folder, others.ring("gus")))
    trainer, steps = evaluated(world, run, {}, grace=REJECT)
    assert trainer.fit().outcome == "completed"
    assert steps == []
    assert told(run) == [("evaluation data", "revocation", "skip", 9)]
    assert weights(run) == undisturbed, "and nothing else of the training is another"
    verify(run)


def test_a_resume_reads_what_the_run_has_kept(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer, _ = evaluated(world, run, {6: lambda _w: trainer.stop()}, grace=REJECT)
    trainer.fit()
    at_others(revoke(NEWS))(world)
    trainer, steps = evaluated(world, run, {}, grace=REJECT, run=run)
    trainer.fit()
    assert steps == []
    assert told(run) == [("evaluation data", "revocation", "skip", 6)]
    verify(run)


def test_without_a_policy_evaluation_data_stop_the_run_too(world: World, tmp_path: Path) -> None:
    trainer, _ = evaluated(world, tmp_path / "run", {5: at_others(revoke(NEWS))}, policy="")
    with pytest.raises(NoLongerVouchedError, match="the evaluation data"):
        trainer.fit()


def test_the_clock_that_is_set_back_brings_nothing_back(world: World, tmp_path: Path) -> None:
    """Of two refreshes the first sees the end of a year, and the second a day before: what was skipped stays so."""

    def back(own: World) -> None:
        own.ahead = timedelta()

    at_others_expired = {5: go_on(8), 9: back}
    trainer, steps = evaluated(world, tmp_path / "run", at_others_expired, grace="{expiry: {finish: 0.5dur}}")
    with pytest.raises(NoLongerVouchedError):
        trainer.fit()
    assert steps[:4] == [2, 4, 6, 8]
    assert {step for _, _, action, step in told(tmp_path / "run") if action == "stop"} == {21}
    verify(tmp_path / "run")


def test_a_ledger_that_reads_again_what_it_left_out_is_refused(world: World, tmp_path: Path) -> None:
    trainer, _ = evaluated(world, tmp_path / "run", {5: at_others(revoke(NEWS))}, grace=REJECT)
    trainer.fit()
    details = VerifiedLedger(tmp_path / "run" / "ledger").tables[-1].details
    (taken,) = read_withdrawals(details)
    assert (taken.of, taken.action) == ("evaluation data", "skip")
    assert "weren't to be read" in problem_with((), (taken,), (), (), ())
    assert not problem_with((taken,), (taken,), (), (), ())
    one = details["withdrawn"]["in_force"][0]
    for wrong in ({"action": "reject"}, {"of": ""}, {"of": 3}, {"root": 3}, {"class": "other"}):
        with pytest.raises(ValueError, match="isn't a list of"):
            read_withdrawals({"withdrawn": {"in_force": [one | wrong]}})


def bare(world: World, **more: Any) -> Trainer:
    """A run that takes only what is signed; its `evaluation` or `artifacts` are given."""
    given, measured = more.pop("artifacts", ()), more.pop("evaluation", None)
    config = RunConfig(budget="2ba", num_microbatches=4, require_signed=True, artifacts=given, **more)
    return Trainer(
        nn.Linear(1, 1), lambda m, d: m(d.float()[:, None]).mean(), world.sources(), optimizers=SGD(lr=0.1),
        evaluation=measured, config=config,
    )  # fmt: skip


def test_who_takes_only_what_is_signed_takes_no_ungoverned_artifact(world: World, tmp_path: Path) -> None:
    held = Evaluation([torch.arange(4)], {"loss": error})
    for more, name, mend in (
        ({"artifacts": [artifact("tokenizer", world.people.root / "pin", name="bpe")]}, "tokenizer bpe", "describe"),
        ({"artifacts": [artifact("statistics", {"mean": 0.5})]}, "statistics", "data sign FOLDER"),
        ({"evaluation": held}, "evaluation data", "StreamingDataset"),
        ({"evaluation": {"held": held}}, "evaluation data held", "StreamingDataset"),
    ):
        with pytest.raises(DeclaredOnlyError, match=rf"(?s)the .*{name} is ungoverned.*{mend}"):
            bare(world, **more)
    save_file(dict(nn.Linear(1, 1).state_dict()), tmp_path / "base.safetensors")
    with pytest.raises(DeclaredOnlyError, match="the base weights is ungoverned"):
        bare(world, load_weights=tmp_path / "base.safetensors")
    given: dict[str, Any] = {"artifacts": [dataclasses.replace(tokenizer(world), kind="base weights")]}
    with pytest.raises(DeclaredOnlyError, match=r"base\.safetensors isn't one of the files that were signed"):
        bare(world, load_weights=tmp_path / "base.safetensors", **given)
    people, folder = others_of(world).people, tmp_path / "weights"
    folder.mkdir()
    shutil.copy(tmp_path / "base.safetensors", folder)
    describe_files(folder, class_path=OPEN, source="weights", version="1")
    list(sign_sources(str(folder), people.folder, people.ring("eve")))
    weights_ = artifact("base weights", folder, authority=authority(world))
    bare(world, load_weights=folder / "base.safetensors", artifacts=[weights_])
    signed = bare(world, artifacts=[tokenizer(world)], evaluation=evaluation(world))
    assert signed.fit().outcome == "completed"
    own = world.people.pin
    with pytest.raises(UntrustedRootError, match="isn't one of"):
        bare(world, artifacts=[tokenizer(world)], trusted_roots=(own,))
    bare(world, artifacts=[tokenizer(world)], trusted_roots=(own, others_of(world).people.pin))
