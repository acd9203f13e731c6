"""Policies that change without a stop while methods cut by them: none ends the run, or keeps it from going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmati.core.method import Method
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.selective_masking import SelectiveGradientMasking
from cosmati.train.config import RunConfig
from cosmati.train.policy_watch import REFUSED_FILE
from cosmati.train.trainer import Trainer
from tests.train.packs import samples as packs
from tests.train.policy_world import Happening, leave
from tests.train.strategies.samples import CLASSES, REGIONS, Net, policy, source, trainer

pytestmark = pytest.mark.long

ONES = {name: dict.fromkeys(REGIONS, 1.0) for name in CLASSES}
LOWER = ONES | {"gone": dict.fromkeys(REGIONS, 0.5)}
HEADLESS = ONES | {"gone": {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 0.0}}
"""With Gradient Routing every way from the loss is cut, which only a step tells."""


def run(folder: Path, method: Method, weights: dict[str, dict[str, float]]) -> Trainer:
    seen = Happening({4: leave(policy(weights))})
    config = RunConfig(budget="8ba", num_microbatches=8, num_threads=1, run_folder=folder)
    made = trainer(Net(), ONES, method, data=source(), config=config, observers=seen)
    seen.trainer = made
    return made


@pytest.mark.parametrize("method", [GradientRouting(), SelectiveGradientMasking(forget="forget")])
def test_other_denials_are_for_a_resume(method: Method, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="The run goes on with the policy that it has"):
        assert run(tmp_path / "run", method, HEADLESS).fit().clock.step == 8
    why = json.loads((tmp_path / "run" / REFUSED_FILE).read_text())["why"]
    assert why.startswith(f"The policy denies gone other regions than before, and {type(method).__name__} acts by that")


def test_other_weights_are_taken(tmp_path: Path) -> None:
    made = run(tmp_path / "run", GradientRouting(), LOWER)
    made.fit()
    assert not (tmp_path / "run" / REFUSED_FILE).exists()
    assert made.assembly.router.route_of(CLASSES.index("gone"), 6).weights == (0.5,) * 4


def test_in_packs_classes_are_told_apart_elsewhere_at_a_resume_only(tmp_path: Path) -> None:
    """Whether tokens can be told apart where a region is read, only a step tells."""
    ones = {name: dict.fromkeys(packs.REGIONS, 1.0) for name in packs.CLASSES}
    seen = Happening({4: leave(packs.policy(ones | {"doubtful": ones["doubtful"] | {"head": 0.0}}))})
    data, config = packs.source(packs.documents()), {"run_folder": tmp_path / "run"}
    made = packs.trainer(packs.model(), data, packs.policy(ones), budget="8ba", config=config, observers=seen)
    seen.trainer = made
    with pytest.warns(UserWarning, match="In packs, the policy tells classes apart in head, and none did so before"):
        assert made.fit().clock.step == 8
