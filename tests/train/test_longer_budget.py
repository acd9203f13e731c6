"""A run goes on with a longer budget where its methods took from it what they'd have taken from the longer one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from cosmati.core.clock import Budget, Time
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.errors import CheckpointError
from cosmati.methods import EMA, SWA, GradientClipping
from cosmati.methods.building_blocks.averaging import steps_of
from cosmati.optim import AdamW, Cosine
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.train.test_other_run import recipe

pytestmark = pytest.mark.long

LONGER = {"budget": "8ba", "change": ("budget",)}


@pytest.mark.parametrize(
    "method",
    [
        EMA(half_life="2ba"),
        EMA(smoothing=0.5, ema_start="0ba"),
        EMA(half_life="1ep", ema_start="2ba"),
        SWA(swa_start="1ba", swa_end="5ba", update_interval="1ba", schedule_swa_lr=False),
    ],
)
def test_averages_that_take_the_same_from_a_longer_budget_go_on_as_if_it_had_been_theirs(
    method: Method, tmp_path: Path
) -> None:
    given = {"methods": [method]}
    recipe(tmp_path / "run", **given)[0].fit()
    longer, _ = recipe(tmp_path / "run", **given, stop_at=99, config=LONGER)
    assert longer.fit().clock.step == 8
    whole, _ = recipe(tmp_path / "whole", **given, stop_at=99, config={"budget": "8ba"})
    whole.fit()
    for trainer in (longer, whole):
        trainer.evaluate()
    with longer.averaged() as mine, whole.averaged() as other:
        pairs = list(zip(mine.parameters(), other.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
    recipe(tmp_path / "run", **given, stop_at=99, config=LONGER | {"budget": "9ba"})[0].fit()


@dataclass(frozen=True, kw_only=True)
class Peeking(Method):
    """Reads the run's length, and doesn't say what for."""

    stage: ClassVar[Stage] = Stage.AVERAGE

    last_step: int = 99

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        if at.clock.step <= self.last_step:
            assert at.budget.num_steps
        return state


@pytest.mark.parametrize(
    "methods",
    [
        [EMA(half_life="2ba", ema_start="0.5dur")],
        [GradientClipping(clipping_type="norm", clipping_threshold=9.0), EMA(half_life="0.5dur")],
        [EMA(half_life="2ba"), Peeking()],
        [Peeking(), EMA(half_life="2ba")],
        [EMA(half_life="2ba"), Peeking(last_step=1)],
        [SWA(swa_start="0.3dur", swa_end="5ba", update_interval="1ba", schedule_swa_lr=False)],
        [SWA(swa_start="1ba", swa_end="0.9dur", update_interval="1ba", schedule_swa_lr=False)],
    ],
)
def test_averages_that_would_have_been_others_keep_the_budget(methods: Sequence[Method], tmp_path: Path) -> None:
    recipe(tmp_path / "run", methods=methods)[0].fit()
    with pytest.raises(CheckpointError, match="a method has acted by how far the run was"):
        recipe(tmp_path / "run", methods=methods, config=LONGER)[0].fit()


@pytest.mark.parametrize(("budget", "is_refused"), [("2ba", True), ("3ba", True), ("4ba", False)])
def test_a_budget_that_is_over_already_is_refused(budget: str, is_refused: bool, tmp_path: Path) -> None:
    recipe(tmp_path / "run", stop_at=3)[0].fit()
    again = recipe(tmp_path / "run", config={"budget": budget, "change": ("budget",)})[0]
    if is_refused:
        with pytest.raises(
            CheckpointError, match=f"to {budget} at step 3: it is over after the 3 steps that were taken"
        ):
            again.fit()
    else:
        assert again.fit().clock.step == 4


def test_what_was_read_before_a_resume_is_not_forgotten(tmp_path: Path) -> None:
    methods = [EMA(half_life="2ba"), Peeking(last_step=1)]
    for stop_at in (3, 5):
        recipe(tmp_path / "run", methods=methods, stop_at=stop_at)[0].fit()
    with pytest.raises(CheckpointError, match="a method has acted by how far the run was"):
        recipe(tmp_path / "run", methods=methods, config=LONGER)[0].fit()
    found = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    other = dataclasses.replace(found, facts={**found.facts, "budget_use_is_told": True})
    assert other.signed_digest != found.signed_digest, "under a ledger, nobody says it afterwards"


def test_an_earlier_releases_checkpoint_does_not_say_what_was_taken(tmp_path: Path) -> None:
    given = {"methods": [EMA(half_life="2ba")]}
    recipe(tmp_path / "run", **given)[0].fit()
    folder = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k != "budget_use_is_told"}))
    digests = json.loads((folder / "digests.json").read_text())
    digests["state.json"] = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
    (folder / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(CheckpointError, match="a method has acted by how far the run was"):
        recipe(tmp_path / "run", **given, config=LONGER)[0].fit()
    assert recipe(tmp_path / "run", **given, stop_at=99)[0].fit().clock.step == 6
    with pytest.raises(CheckpointError, match="a method has acted by how far the run was"):
        recipe(tmp_path / "run", **given, config=LONGER)[0].fit()


class Slower(Method):
    """Changes learning rates by how far the run is, which no schedule says."""

    stage = Stage.AVERAGE
    claims = frozenset({"learning rate"})

    def learning_rate(self, scheduled: Callable[[float], float], elapsed: float, budget: Budget) -> float:
        return scheduled(elapsed) * (1 - elapsed)


def test_rates_that_a_method_has_changed_are_compared_too(tmp_path: Path) -> None:
    for number, method in enumerate((Slower(), SWA(swa_start="0.2dur", update_interval="1ba", schedule_swa_lr=True))):
        folder = tmp_path / str(number)
        recipe(folder, methods=[method])[0].fit()
        with pytest.raises(CheckpointError, match=r"learning rate of step \d would have been another"):
            recipe(folder, methods=[method], config=LONGER)[0].fit()


def test_a_run_in_seconds_keeps_its_rates_too(tmp_path: Path) -> None:
    optimizers = [AdamW(lr=0.01, schedule=Cosine())]
    recipe(tmp_path / "run", optimizers=optimizers, config={"budget": "600sec"})[0].fit()
    with pytest.raises(CheckpointError, match=r"learning rate of step \d would have been another"):
        recipe(tmp_path / "run", optimizers=optimizers, stop_at=5, config=LONGER | {"budget": "1200sec"})[0].fit()


@pytest.mark.parametrize(
    "method", [EMA(smoothing=0.9, ema_start="2ep"), SWA(swa_start="3ep", swa_end="5ep", schedule_swa_lr=False)]
)
def test_what_is_taken_is_the_step_and_no_rounded_fraction_of_the_run(method: Method) -> None:
    shorter, longer = (Budget(Time.parse(span), steps_per_epoch=391) for span in ("41ep", "49ep"))
    assert steps_of("2ep", shorter) != steps_of("2ep", longer)
    assert method.taken_from(shorter) == method.taken_from(longer)
