"""Policies that change without a stop while a class has something of its own: what's printed still holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.core.plan import Promise
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import CASES, policy, promise, source, trainer
from tests.train.policy_world import Event, Happening, leave

pytestmark = pytest.mark.long

MLP = CASES["MLP, low rank"]
BEGIN = 5
"""What is left after step 4 acts from step 5 on."""


def run(folder: Path, events: dict[int, Event], chosen: PolicyFile | None = None, **options: Any) -> Trainer:
    """Return a run in which things happen after given steps."""
    seen = Happening(events)
    config = {"run_folder": folder, "checkpoint_every": "1ba"} | options.pop("config", {})
    made = trainer(
        MLP,
        options.pop("data", None) or source(MLP),
        chosen=chosen,
        budget=options.pop("budget", "8ba"),
        config=config,
        observers=seen,
        **options,
    )
    seen.trainer = made
    return made


def test_others_may_teach_what_was_a_classs_own(tmp_path: Path) -> None:
    made = run(tmp_path / "run", {4: leave(policy(own="1"))})
    made.fit()
    assert not promise(made).holds
    assert promise(made).because == (
        "from step 5 on another policy is in force, by which open, other may teach 'own', too: give them weight 0 there"
    )


def test_a_class_may_teach_elsewhere(tmp_path: Path) -> None:
    made = run(tmp_path / "run", {4: leave(policy(trunk="1"))})
    made.fit()
    assert not promise(made).holds
    assert not made.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))


def test_a_policy_that_keeps_it_apart_keeps_the_promise(tmp_path: Path) -> None:
    lower = policy(rules="  - {class: other, region: trunk, weight: 0.5}\n")
    made = run(tmp_path / "run", {4: leave(lower)})
    made.fit()
    assert promise(made).holds
    assert made.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))


@pytest.mark.parametrize("stop", [BEGIN, 6])
def test_who_resumes_says_so_too(tmp_path: Path, stop: int) -> None:
    """Also where the checkpoint is of the very step at which the change begins to act."""
    run(tmp_path / "run", {4: leave(policy(own="1")), stop: lambda own: own.stop()}).fit()
    again = run(tmp_path / "run", {})
    with again:
        assert not promise(again).holds
        assert not again.plan.holds(Promise.NO_DIRECT_WRITE, ("open", "own"))


def test_a_policy_that_goes_back_doesnt_bring_it_back(tmp_path: Path) -> None:
    back = {4: leave(policy(own="1")), 8: leave(policy())}
    run(tmp_path / "run", back, budget="12ba").fit()
    again = run(tmp_path / "run", {}, policy(), budget="12ba", config={"change": "policy"})
    with again:
        assert not promise(again).holds
