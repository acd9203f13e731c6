"""A run's settings have the values that are documented, are read as they're checked, and tell how the run goes."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati import RunConfig
from cosmati.core.later import untold
from cosmati.errors import LedgerError, PlanError, ProvenanceError
from cosmati.provenance.artifact import Artifact
from cosmati.train.config import TRAINER_NAMES, PathSetting

CPU = torch.device("cpu")
DEFAULTS: dict[str, Any] = {
    "name": "run", "budget": "1ep", "seed": 0, "num_microbatches": None, "elastic": False, "max_ranks": 1,
    "sharding": "replicated", "shard_ranks": None, "virtual_shards": None, "tensor_parallel": 1, "parallel_styles": (),
    "precision": "float32", "gather_precision": "float32", "compile_blocks": False, "num_threads": None,
    "deterministic": True, "device": None, "run_folder": None, "checkpoint_every": None, "checkpoint_async": False,
    "checkpoint_to": "", "num_checkpoints": 2, "evaluate_every": None, "ledger": None, "details_every": 4,
    "update_norm_every": 10, "direction_every": 200, "update_direction_every": 200, "digests_every": 0,
    "entropy_every": 0, "check_every": 1, "on_divergence": "stop", "change": (), "load_weights": None,
    "require_signed": False, "trusted_roots": (), "witnesses": (), "witness_quorum": 0, "ledger_profile": "self",
    "artifacts": (), "resume_from": "newest", "sensitive": (), "progress": False, "task": "",
}  # fmt: skip


def test_what_is_not_given_is_as_documented() -> None:
    config = RunConfig()
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found["parallel_styles"] = tuple(found["parallel_styles"])
    assert found == DEFAULTS
    assert untold(config) == {"virtual_shards", "parallel_styles", "gather_precision"}


def test_settings_stay_as_they_are() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="takes its settings by name"):
        RunConfig("run")  # type: ignore[call-arg]


def test_folders_are_paths_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = RunConfig(run_folder="~/runs/x", load_weights=Path("weights"))  # type: ignore[arg-type]
    assert (config.run_folder, config.load_weights) == (Path("/home/me/runs/x"), Path("weights"))
    assert isinstance(config.run_folder, Path)
    assert RunConfig.run_folder is None
    assert PathSetting.accepts == Path | None


def test_a_folder_is_anchored_where_the_process_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    anchored = RunConfig(run_folder="runs/x", seed=3).anchored()  # type: ignore[arg-type]
    assert (anchored.run_folder, anchored.seed) == (here / "runs/x", 3)
    assert anchored.anchored() is anchored
    bare = RunConfig()
    assert bare.anchored() is bare


@pytest.mark.parametrize("name", ["budget", "checkpoint_every", "evaluate_every"])
def test_times_are_read_at_once(name: str) -> None:
    with pytest.raises(PlanError, match="'3 of them' is not a time"):
        RunConfig(**{name: "3 of them"})
    assert getattr(RunConfig(**{name: "3ba"}), name) == "3ba"


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("bf16", "Here the nearest is 'bfloat16'"),
        ("float16", "Here the nearest is 'bfloat16'"),
        (32, "Here the nearest is 'float32'"),
        ("32-true", "Here the nearest is 'float32'"),
        ("int8", "Use 'float32' or 'bfloat16'"),
    ],
)
def test_a_precision_of_other_tools_has_its_nearest_here(given: Any, here: str) -> None:
    for name in ("precision", "gather_precision"):
        with pytest.raises(PlanError) as caught:
            RunConfig(**{name: given})
        assert str(caught.value) == f"Precision {given!r} is not known. {here}."


def test_artifacts_are_put_in_order_and_one_may_stand_alone() -> None:
    one, other = Artifact("tokenizer", "ab"), Artifact("base weights", "cd")
    assert RunConfig(artifacts=(one, other)).artifacts == (other, one)
    assert RunConfig(artifacts=one).artifacts == (one,)  # type: ignore[arg-type]
    with pytest.raises(ProvenanceError, match="Two preparation artifacts"):
        RunConfig(artifacts=(one, Artifact("tokenizer", "ef")))


def test_witnesses_have_a_key_and_an_address() -> None:
    with pytest.raises(LedgerError, match="names no witness"):
        RunConfig(witnesses=["nobody"])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="witness_quorum = 3, and there are 2 witnesses"):
        RunConfig(witnesses="a b, c d", witness_quorum=3)


def test_changes_that_are_unknown_are_named_in_order() -> None:
    with pytest.raises(PlanError) as caught:
        RunConfig(change=("seed", "budget", "lr"))
    assert str(caught.value) == "RunConfig.change names lr, seed. What may change is policy, budget, schedule."
    assert RunConfig(change="policy, budget,schedule").change == ("policy", "budget", "schedule")


def test_weights_are_rounded_where_they_are_gathered_so() -> None:
    assert RunConfig().rounds_weights is False
    assert RunConfig(precision="bfloat16").rounds_weights is False
    assert RunConfig(gather_precision="bfloat16").rounds_weights is True


def product_of(config: RunConfig) -> torch.dtype:
    with config.autocast(CPU):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_forward_passes_run_in_the_precision_whatever_is_around() -> None:
    whole, half = RunConfig(), RunConfig(precision="bfloat16")
    assert isinstance(whole.autocast(CPU), nullcontext)
    assert (product_of(whole), product_of(half)) == (torch.float32, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (product_of(whole), product_of(half)) == (torch.float32, torch.bfloat16)


def test_a_trainer_is_told_where_each_setting_belongs() -> None:
    assert TRAINER_NAMES["seed"] == "config=RunConfig(seed={!r})"
    assert TRAINER_NAMES["max_duration"] == "config=RunConfig(budget={!r})"
    assert TRAINER_NAMES["max_epochs"] == "config=RunConfig(budget='{}ep')"
    assert {*DEFAULTS, *RunConfig.other_names} <= TRAINER_NAMES.keys()
    assert TRAINER_NAMES["loss_fn"] == "loss=..."
