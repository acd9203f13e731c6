"""Wherever a folder is named, a string will do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cosmati.data.opened import CacheOptions
from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds
from cosmati.data.shards.verify import verify_source
from cosmati.data.streaming import StreamingDataset
from cosmati.explorer.report import write_report
from cosmati.explorer.run_view import read_run
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig
from tests.data.shard_files import write_source
from tests.train.ordinary.loaders import Seen, trainer


def test_a_run_folder_may_be_a_string(tmp_path: Path) -> None:
    config = RunConfig(run_folder=str(tmp_path / "run"))
    assert config == RunConfig(run_folder=tmp_path / "run")
    assert config.run_folder == tmp_path / "run"
    assert isinstance(config.run_folder, Path)
    assert RunConfig().run_folder is None
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config, seed=0)):
        assert (again, again.run_folder) == (config, tmp_path / "run")
    assert dataclasses.asdict(config)["run_folder"] == tmp_path / "run"
    assert hash(config) == hash(RunConfig(run_folder=tmp_path / "run")) != hash(RunConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run_folder = "other"  # type: ignore[misc]


def test_a_run_is_kept_and_read_under_a_string(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    data = [torch.ones(4, 2)]
    result = trainer(data, Seen(), folder, budget="2ba").fit()  # type: ignore[arg-type]
    assert result.run_folder == Path(folder)
    assert read_run(folder).record.num_steps == 2
    page = write_report(str(tmp_path / "a" / "page.html"), title="a run", run=read_run(folder))
    assert page == tmp_path / "a" / "page.html"
    assert page.exists()


def _no_loss(model: object, data: object) -> Tensor:
    raise AssertionError


def test_sources_and_their_caches_take_strings(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "rows", [3, 2], class_path="open/psf")
    for cache in (str(tmp_path / "cache"), CacheOptions(directory=str(tmp_path / "cache"))):
        rows = StreamingDataset(str(folder), columns=("number",), cache=cache)
        assert [rows[i]["number"] for i in range(5)] == [StreamingDataset(folder)[i]["number"] for i in range(5)]
    assert verify_source(str(folder), cache=str(tmp_path / "other")).num_rows == 5
    assert mds_to_parquet(str(folder), str(tmp_path / "parquet")) == 5
    parquet_to_mds(str(tmp_path / "parquet"), str(tmp_path / "again"), class_path="open/psf")
    assert (tmp_path / "again" / "index.json").exists()


def test_a_recipe_takes_a_string(tmp_path: Path) -> None:
    recipe = Recipe(
        name="r",
        model=lambda: torch.nn.Linear(1, 1),
        loss=_no_loss,
        data=lambda: [torch.ones(1, 1)],
        optimizers=(SGD(lr=0.1),),
    )
    made = recipe.trainer(run_folder=str(tmp_path / "run"))
    assert made.assembly.config.run_folder == tmp_path / "run"
    assert recipe.with_settings({"config.run_folder": "x"}).config.run_folder == Path("x")


@pytest.mark.slow
def test_the_types_say_so(tmp_path: Path) -> None:
    """`mypy --strict` over what a user writes."""
    script = tmp_path / "user.py"
    script.write_text(
        "from pathlib import Path\n"
        "from cosmati.train.config import RunConfig\n"
        'folder: Path | None = RunConfig(run_folder="runs/x").run_folder\n'
        'RunConfig(run_folder=Path("runs/x"))\n'
        "RunConfig(run_folder=3)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280).stdout
    assert [line.split(":")[1] for line in found.splitlines() if "error" in line and "user.py" in line] == ["5"]
