"""What no test here can do for real: Comet, and Weights & Biases online, against doubles of their documented calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import MissingExtraError, RunError
from cosmati.integrations import TRACKERS, Tracking, track_run, tracker_of
from tests.integrations.doubles import CometPackage, WandbPackage
from tests.integrations.runs import begun_again, told


def test_comet_has_each_attempt_as_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = CometPackage()
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    begun_again(tmp_path / "run")
    track_run(tmp_path / "run", tracker_of(f"comet:project=small,offline_folder={tmp_path}"))
    first, second = package.experiments.values()
    assert (first.name, second.name) == ("run", "run (attempt 1)")
    assert first.tags == {"run", "superseded from step 20"}
    assert second.tags == {"run"}
    assert first.is_ended
    assert second.is_ended
    found = {(name, step): value for one in (first, second) for name, step, value in one.metrics}
    assert {key: value for key, value in found.items() if key[0] != "measured_at"} == told(tmp_path / "run")
    assert (first.others["outcome"], second.others["outcome"]) == ("failed", "completed")
    assert second.parameters["first_step"] == 20


def test_an_earlier_attempt_is_tagged_online_and_not_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = CometPackage()
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    offline = Tracking(tracker_of(f"comet:offline_folder={tmp_path}"))
    begun_again(tmp_path / "run", [Tracking(tracker_of("comet"))], [Tracking(tracker_of("comet"))])
    assert [one.tags for one in package.experiments.values()] == [{"run", "superseded from step 20"}, {"run"}]
    package.experiments.clear()
    begun_again(tmp_path / "other", [offline], [Tracking(tracker_of(f"comet:offline_folder={tmp_path}"))])
    assert [one.tags for one in package.experiments.values()] == [{"other"}, {"other"}]


def test_wandb_online_opens_an_earlier_attempt_to_tag_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = WandbPackage()
    monkeypatch.setitem(sys.modules, "wandb", package)
    watchers = [Tracking(tracker_of(f"wandb:project=small,folder={tmp_path}")) for _ in range(2)]
    begun_again(tmp_path / "run", watchers[:1], watchers[1:])
    assert [one.problem for one in watchers] == ["", ""]
    first, second = package.runs.values()
    assert (first.tags, second.tags) == (("superseded from step 20",), ())
    assert {one.options["group"] for one in (first, second)} == {"run"}
    assert (first.exit_codes, second.exit_codes) == ([1, 1], [0]), "a tag leaves it failed"
    assert [step for step, values in second.history if "loss" in values] == [30]


def test_wandb_is_given_names_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = WandbPackage()
    monkeypatch.setitem(sys.modules, "wandb", package)
    begun_again(tmp_path / ("r" * 200))
    track_run(tmp_path / ("r" * 200), tracker_of(f"wandb:project=small,folder={tmp_path}"))
    options = [one.options for one in package.runs.values()]
    assert [one["name"] for one in options] == ["r" * 100, "r" * 100 + " (attempt 1)"]
    assert {one["group"] for one in options} == {"r" * 100}
    modes = {mode: getattr(tracker_of(f"wandb:mode={mode}"), "replaces", None) for mode in ("online", "offline")}
    assert modes == {"online": False, "offline": True}
    with pytest.raises(RunError, match=r"project=a/b has /, which W&B refuses.*another name"):
        tracker_of("wandb:project=a/b")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("comet_ml", "mlflow", "mlflow.tracking", "torch.utils.tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"can't be imported .*Run: pip install"):
        tracker_of(name)


def test_the_real_comet_takes_the_arguments(tmp_path: Path) -> None:
    comet: Any = pytest.importorskip("comet_ml", reason="comet-ml isn't installed")
    begun_again(tmp_path / "run")
    track_run(tmp_path / "run", tracker_of(f"comet:project=small,offline_folder={tmp_path}"))
    assert comet is not None
    assert len(list(tmp_path.glob("*.zip"))) == 2
