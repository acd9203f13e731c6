"""Steps that are run again are those of the ledger, digest by digest; and what isn't is found, and named."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.loss import Classification
from cosmati.errors import CheckpointError, LedgerError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.row_blinds import secrets_of_run
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import EMA
from cosmati.optim import AdamW, Cosine
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.replay import ReplayFound, ReplayRequest, plan_replays, replay_segments
from cosmati.train.replay_span import MakeTrainer
from cosmati.train.replay_start import From, nearest_checkpoint
from cosmati.train.run.checkpoints import list_checkpoints
from cosmati.train.trainer import Trainer
from tests.processes import launch_ranks
from tests.train import policy_worker, policy_world
from tests.train import replay_world as world
from tests.train import test_out_of_memory as memory
from tests.train.isolated import samples as isolated
from tests.train.replay_world import again, build, opened, replayed, routed_policy
from tests.train.test_amended_run import StopAt

pytestmark = pytest.mark.long

NUM_STEPS = 12


def stop_at(kind: str, folder: Path, step: int, **options: Any) -> None:
    stop = StopAt(step)
    stop.trainer = build(kind, folder, observers=[stop], **options)
    assert stop.trainer.fit().outcome == "stopped"


def random_segments(seed: int, number: int) -> list[tuple[int, int]]:
    draws = random.Random(seed)
    return [
        (first, draws.randint(first + 1, NUM_STEPS)) for first in (draws.randrange(NUM_STEPS) for _ in range(number))
    ]


@pytest.mark.parametrize(("kind", "v"), [("dense", 1), ("BatchNorm", 4), ("packed", 1), ("routed", 4)])
def test_random_segments_come_out_the_same(kind: str, v: int, tmp_path: Path) -> None:
    check_segments(kind, v, tmp_path / "run", random_segments(v, 1))


@pytest.mark.slow
@pytest.mark.parametrize("v", [1, 4])
@pytest.mark.parametrize("kind", world.KINDS)
def test_fifty_random_segments_come_out_the_same(kind: str, v: int, tmp_path: Path) -> None:
    """Eight runs; 7 segments of each."""
    check_segments(kind, v, tmp_path / "run", random_segments(10 + v, 7))


def check_segments(kind: str, v: int, folder: Path, segments: list[tuple[int, int]]) -> None:
    build(kind, folder, num_microbatches=v).fit()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for first, end in segments:
        found = replayed(folder, first, end, again(kind, num_microbatches=v))
        assert (found.outcome, found.differences, found.skipped) == ("equal", (), ())
        assert (found.start, found.num_steps) == (first // 4 * 4, end - first // 4 * 4)
        assert found.num_roots == end // 4 - found.start // 4 + (found.start == 0) + (end == NUM_STEPS)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_replay_takes_as_many_forward_passes_as_training(tmp_path: Path) -> None:
    counts, num_plain = list[int](), list[int]()

    def counting(asked: Any) -> Any:
        made = again("routed")(asked)
        made.model.register_forward_hook(lambda *_: counts.append(1))
        return made

    plain = build("routed", tmp_path / "run")
    plain.model.register_forward_hook(lambda *_: num_plain.append(1))
    plain.fit()
    # A hook is a fact of the model: the difference is kept going over.
    replayed(tmp_path / "run", 0, 12, counting, with_checkpoints=False, keep_going=True)
    # The looks at the code before each checkpoint, on a fixed microbatch, are the rest of both.
    assert 12 * 4 <= len(counts) <= len(num_plain)


class Crash(Observer):
    """Ends the process's work after a step, as a fault would: without a checkpoint."""

    def __init__(self, step: int, error: Callable[[], BaseException] = ZeroDivisionError) -> None:
        self.step, self.error = step, error

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            raise self.error()


def check_all(folder: Path, make: MakeTrainer, *segments: tuple[int, int]) -> list[ReplayFound]:
    found = [replayed(folder, first, end, make) for first, end in segments]
    assert [(one.outcome, one.differences) for one in found] == [("equal", ())] * len(found)
    return found


def test_superseded_steps_are_not_what_counts(tmp_path: Path) -> None:
    """The first attempt is killed after step 7, and had stepped otherwise: the attempt in force counts."""
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        build("routed", run, observers=[Crash(7)]).fit()
    build("routed", run, policy=routed_policy(0.25), change=("policy",)).fit()
    report = verify_ledger(run / "ledger")
    assert (report.num_superseded, report.num_steps) == (2, 12)
    # Steps 4 and 5 were taken under both policies, and stand under the second one.
    check_all(run, again("routed"), (1, 3), (4, 8), (2, 10), (0, 12))


class Counts(Observer):
    """Has a state, which a replay without it has no use for."""

    num = 0

    def on_step(self, outcome: StepOutcome) -> None:
        self.num += 1

    def state_dict(self) -> dict[str, int]:
        return {"num": self.num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num = state["num"]


def test_a_replay_says_nothing_of_observers_that_it_hasnt(tmp_path: Path) -> None:
    build("dense", tmp_path / "run", observers=[Counts()]).fit()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (found,) = check_all(tmp_path / "run", again("dense"), (5, 8))
    assert found.start == 4
    assert [str(one.message) for one in said] == []
    # Who goes on with the run is told.
    with pytest.warns(UserWarning, match="keeps the state of Counts"):
        build("dense", tmp_path / "run", budget="13ba", change="budget").fit()


def test_a_checkpoint_of_a_superseded_attempt_is_none_to_begin_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop_at("routed", run, 6)
    path, kept = run / "checkpoints/step-00000006", tmp_path / "kept/step-00000006"
    shutil.copytree(path, kept)
    shutil.rmtree(path)
    build("routed", run, policy=routed_policy(0.25), change=("policy",)).fit()
    with pytest.raises(LedgerError, match=r"step-00000006 is of an attempt that was superseded\. Give another one"):
        nearest_checkpoint(opened(run), 7, kept)
    # Among others it's passed over: it's nobody's lie.
    assert nearest_checkpoint(opened(run), 7, kept.parent) == From()
    found = nearest_checkpoint(opened(run), 9, run / "checkpoints/step-00000008")
    assert (found.step, found.unsigned) == (8, ())
    assert nearest_checkpoint(opened(run), 8, found.path) == found


def test_checkpoints_off_the_cadence_are_compared_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop_at("routed", run, 6)
    build("routed", run).fit()
    (found,) = check_all(run, again("routed"), (0, 12))
    assert found.num_roots == 6  # after 0, 4, 6, 8 and 12 steps, and the end


def test_a_longer_run_has_one_end(tmp_path: Path) -> None:
    """The first one, and its checkpoints, don't stand any more where a resume went back behind them."""
    run = tmp_path / "run"
    build("dense", run, budget="6ba").fit()
    shutil.rmtree(run / "checkpoints/step-00000006")
    build("dense", run, budget="8ba", change="budget").fit()
    steps = opened(run)
    assert (sorted(steps.checkpoints), steps.end and steps.end.step, len(steps.signed_states)) == ([0, 4, 8], 8, 4)
    with pytest.raises(ZeroDivisionError):
        build("dense", run, budget="9ba", change="budget", observers=[Crash(9)]).fit()
    assert opened(run).end is None


def test_another_policy_since_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop_at("routed", run, 6)
    build("routed", run, policy=routed_policy(0), change=("policy",)).fit()
    # Whichever policy the recipe has today: the ledger's counts.
    for found in (
        check_all(run, again("routed"), (5, 8)),
        check_all(run, again("routed", policy=routed_policy(1)), (1, 3)),
    ):
        assert found[0].num_steps >= 3


def test_a_longer_budget_and_another_schedule_since_a_resume(tmp_path: Path) -> None:
    run, rate = tmp_path / "run", {"optimizers": [AdamW(lr=0.01, schedule=Cosine())]}
    build("dense", run, budget="6ba").fit()
    build("dense", run, **rate, budget="12ba", change=("budget", "schedule")).fit()
    check_all(run, again("dense"), (2, 6))
    check_all(run, again("dense", **rate), (7, 12))
    # A recipe has one schedule: that of the other steps is named.
    found = replayed(run, 2, 12, again("dense", **rate))
    assert found.differences[0].what.startswith("recipe, optimizers 0: schedule")
    assert replayed(run, 7, 12, again("dense")).differences[0].what.startswith("recipe, optimizers 0")


def test_other_cadences_since_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop_at("dense", run, 5, evaluate_every="2ba")
    build("dense", run, details_every=1, checkpoint_every="3ba", update_norm_every=2, num_checkpoints=2).fit()
    found = check_all(run, again("dense"), (0, 12), (9, 12))
    assert [one.start for one in found] == [0, 9]
    assert len(list_checkpoints(run / "checkpoints")) == 2


def policy_runs(asked: ReplayRequest) -> Trainer:
    events = policy_world.trainer(asked.run_folder, policy=asked.policy, **asked.settings)
    return Trainer(
        events.model,
        events.prepared.given.loss,
        events.prepared.given.data,
        optimizers=events.prepared.given.optimizers,
        policy=asked.policy,
        taxonomy=policy_world.TAXONOMY,
        observers=asked.observers,
        config=events.assembly.config,
    )


def test_a_policy_that_changed_without_a_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    policy_world.trainer(run, {4: policy_world.leave(policy_world.AFTER)}, num_checkpoints=9).fit()
    assert len(verify_ledger(run / "ledger").policies) == 2
    check_all(run, policy_runs, (0, 3), (4, 7), (7, 11), (0, 12))


def test_a_changed_policy_that_a_resume_exchanged(tmp_path: Path) -> None:
    """What acted without a stop is in no entry of later attempts: the replay goes by those of its own steps."""
    run = tmp_path / "run"
    made = policy_world.trainer(run, {4: policy_world.leave(policy_world.AFTER), 10: fail}, num_checkpoints=9)
    with pytest.raises(ZeroDivisionError):
        made.fit()
    third = policy_world.load_policy(policy_world.POLICY + policy_world.AFTER.replace("0.5", "0.25"))
    policy_world.trainer(run, policy=third, change=("policy",), num_checkpoints=9).fit()
    assert len(verify_ledger(run / "ledger").policies) >= 3
    check_all(run, policy_runs, (4, 7), (0, 12))


def fail(_: Trainer) -> None:
    raise ZeroDivisionError


def test_microbatches_that_were_cut_for_want_of_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="cut in two"):
        memory.trainer_of(
            memory.Short(4, from_call=6), run, ledger=True, checkpoint_every="2ba", num_checkpoints=9
        ).fit()

    def make(asked: ReplayRequest) -> Trainer:
        made = memory.trainer_of(memory.Short(64), asked.run_folder, **asked.settings)
        made.observers[:] = asked.observers
        return made

    check_all(run, make, (0, 6), (1, 4), (5, 6))


@pytest.mark.slow
def test_two_ranks_are_replayed_on_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch_ranks([policy_worker.__file__, run, "4:leave"], 2)
    check_all(run, policy_runs, (0, 12), (9, 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP, low rank", "CNN, expert with BatchNorm"])
def test_what_is_one_classes_own(tmp_path: Path, name: str) -> None:
    case, run = isolated.CASES[name], tmp_path / "run"
    settings = {"checkpoint_every": "2ba", "num_checkpoints": 9}
    isolated.fitted(case, isolated.source(case), methods=[EMA(half_life="2ba")], config={"run_folder": run, **settings})

    def make(asked: ReplayRequest) -> Trainer:
        config = {name: value for name, value in asked.settings.items() if name not in ("budget", "num_threads")}
        own = {"methods": [EMA(half_life="2ba")], "observers": asked.observers, "chosen": asked.policy}
        return isolated.trainer(case, isolated.source(case), **own, config={"run_folder": asked.run_folder, **config})

    check_all(run, make, (0, 6), (3, 5))


@pytest.mark.parametrize("is_list", [True, False])
def test_lists_and_loaders(tmp_path: Path, is_list: bool) -> None:
    run = tmp_path / "run"

    def made(folder: Path, observers: Any = (), **settings: Any) -> Trainer:
        torch.manual_seed(1)
        pairs = TensorDataset(*world.ROWS)
        batches = list(zip(*(part.split(16) for part in world.ROWS), strict=True))
        data: Any = batches if is_list else DataLoader(pairs, batch_size=16, shuffle=True)
        config = RunConfig(run_folder=folder, **{"budget": "3ep", "num_threads": 1, "ledger": True} | settings)
        loss, optimizers = Classification(3), [AdamW(lr=0.01)]
        return Trainer(world.mlp(), loss, data, optimizers=optimizers, observers=observers, config=config)

    made(run, checkpoint_every="5ba", num_checkpoints=9).fit()
    check_all(run, lambda asked: made(asked.run_folder, asked.observers, **asked.settings), (0, 12), (7, 9), (10, 12))


def test_a_run_that_still_trains_is_replayed_beside_it(tmp_path: Path) -> None:
    """Its lock, log and folder are left alone."""
    run, found = tmp_path / "run", list[ReplayFound]()

    class Auditor(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == 9:
                signed = VerifiedLedger(run / "ledger").standing
                found.append(replayed(run, 5, len(signed), again("routed")))

    build("routed", run, observers=[Auditor()]).fit()
    assert (found[0].outcome, found[0].start, found[0].segment) == ("equal", 4, range(5, 8))
    verify_ledger(run / "ledger")
    check_all(run, again("routed"), (0, 12))


def test_ctrl_c_ends_a_replay_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("routed", tmp_path / "run").fit()
    own = tmp_path / "temporary"  # others replay at the same time
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))

    def told(step: int, _: Any) -> None:
        if step == 6:
            assert len(list(own.glob("cosmati-replay-*"))) == 1
            os.kill(os.getpid(), signal.SIGINT)

    found = replayed(tmp_path / "run", 5, 12, again("routed"), told=told)
    assert (found.outcome, found.num_steps) == ("interrupted", 3)
    assert list(own.iterdir()) == []


def test_segments_after_ctrl_c_are_told_as_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    build("routed", folder, checkpoint_every="2ba").fit()
    run = opened(folder)

    def told(step: int, _: Any) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    planned = plan_replays(run, [range(8, 9), range(1), range(5, 7), range(11, 12)], folder / "checkpoints")
    assert [(start.step, group) for start, group in planned] == [
        (0, [range(1)]), (4, [range(5, 7)]), (8, [range(8, 9)]), (10, [range(11, 12)])
    ]  # fmt: skip
    blinds = secrets_of_run(run, folder / "private")
    found = replay_segments(run, planned, again("routed"), ledger=folder / "ledger", blinds=blinds, told=told)
    assert [(one.outcome, one.segment, one.start) for one in found] == [
        ("equal", range(1), 0), ("interrupted", range(5, 7), 4), ("interrupted", range(8, 9), 8),
        ("interrupted", range(11, 12), 10),
    ]  # fmt: skip
    assert [one.num_steps for one in found][2:] == [0, 0]


def test_a_loss_that_is_not_finite_any_more_is_a_difference(tmp_path: Path) -> None:
    build("routed", tmp_path / "run").fit()
    values = world.ROWS[0].clone()
    values[7] = torch.nan
    make = again("routed", rows=(values, world.ROWS[1]))
    found = replayed(tmp_path / "run", 0, 12, make, with_checkpoints=False, keep_going=True)
    assert (found.outcome, found.differences[-1].what) == ("different", "loss and gradients")


@pytest.mark.parametrize(("step", "is_refused"), [(2, False), (3, False), (4, True), (5, True)])
def test_a_budget_under_which_the_policy_would_have_been_in_another_phase_is_refused(
    tmp_path: Path, step: int, is_refused: bool
) -> None:
    """The second half of 6 steps is the second quarter of 12."""
    text = world.POLICY.format(weight=0.5).replace(
        "regions:", "phases: [{name: early, until: 0.5dur}, {name: late}]\nregions:"
    )
    given = {"policy": load_policy(text)}
    stop_at("routed", tmp_path / "run", step, budget="6ba", **given)
    again = build("routed", tmp_path / "run", budget="12ba", change="budget", **given)
    if is_refused:
        with pytest.raises(CheckpointError, match="the policy's phases would have begun at other steps"):
            again.fit()
    else:
        assert again.fit().clock.step == 12
