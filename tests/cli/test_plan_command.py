"""`cosmati plan` of a run on ranks of a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app

RECIPE = """
from cosmati.methods import MixUp, ProgressiveResizing
from tests.planning.recipes import averaged, images, text
def growing():
    return images(ProgressiveResizing(image_width=16), budget="60sec")
def mixed():
    return images(MixUp())
def recipe():
    return averaged()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.py"
    path.write_text(RECIPE)
    return path


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_plan_says_what_a_rank_needs(recipe: Path) -> None:
    said = call(recipe, "--ranks", 2, "--device", "h200", "--price-per-hour", 4)
    for words in (
        "dense on 2 ranks, NVIDIA H200 SXM, replicated",
        "V = 8 microbatches a step, 16 rows each; 4 a rank; 20,865 parameters learn; float32",
        "optimizer state",
        "It fits: ",
        "Bytes: a rank sends 83.46 kB a step",
        "Tree: 3 levels, 2 within a rank and 1 across ranks",
        "efficiency 0.4 of the peak",
        "at 4 an hour for a rank",
    ):
        assert words in said
    assert "guarantee" not in said


def test_a_plan_says_which_methods_it_does_not_allow_for(recipe: Path) -> None:
    said = call(f"{recipe}:growing", "--device", "h200")
    assert "It fits as the run begins: " in said
    assert "Not in it is what later steps take on account of ProgressiveResizing: " in said
    told = json.loads(call(f"{recipe}:growing", "--device", "h200", "--json"))
    assert told["measured"]["unplanned"] == ["ProgressiveResizing"]
    said = call(f"{recipe}:mixed", "--device", "h200")
    assert "It fits: " in said
    assert "rows change" in said
    assert "changed rows" in said
    assert not {"rows change", "at a look"} & {*call(recipe, "--device", "h200").split("  ")}


def test_a_plan_that_does_not_fit_says_what_to_change(recipe: Path) -> None:
    said = call(recipe, "--ranks", 2, "--device", "l4", "--assume", "memory_gb=0.0007", "--sharding", "optimizer")
    assert "It does not fit: " in said
    assert "What would make it fit:" in said
    assert "--ranks 4 --sharding optimizer" in said
    assert "Nothing that is known here" in call(recipe, "--device", "l4", "--assume", "memory_gb=0.000001")


def test_a_plan_with_failures(recipe: Path) -> None:
    figures = [part for name in ("spares=1", "node_mtbf_hours=100", "num_runs=10") for part in ("--assume", name)]
    said = call(recipe, "--ranks", 8, "--device", "h100", "--failures", *figures)
    assert "n = 10 simulated runs" in said
    assert "1 node and 1 spare" in said


def test_a_plan_of_a_run_that_failures_leave_nothing_of(recipe: Path) -> None:
    figures = [part for name in ("node_mtbf_hours=0.0001", "days=0.001") for part in ("--assume", name)]
    said = call(recipe, "--ranks", 8, "--device", "h100", "--failures", *figures, "--price-per-hour", 3)
    assert "Run: it never ends, as failures leave nothing." in said


def test_a_plan_for_programs(recipe: Path) -> None:
    told = json.loads(call(f"{recipe}:text", "--ranks", 4, "--device", "cpu", "--sharding", "full", "--json"))
    assert told["device"]["is_here"]
    assert told["ranks"] == 4
    assert told["traffic"]["gathers"] > 0
    assert told["memory"]["backward"]["activations"] == told["measured"]["activations"] > 0


@pytest.mark.long
def test_a_plan_of_copies_on_fewer_ranks(recipe: Path) -> None:
    settings = ("--set", "config.sharding=full", "--set", "config.shard_ranks=2")
    assert "on 4 ranks, this machine's processor, full, cut over 2 ranks" in call(
        f"{recipe}:text", "--ranks", 4, "--device", "cpu", *settings
    )
    alike = ("--ranks", 4, "--device", "cpu", "--json", "--sharding", "optimizer")
    told = json.loads(call(f"{recipe}:text", *alike, *settings))
    assert told["shards"] is None
    full = ("--ranks", 4, "--device", "cpu", "--json", "--sharding", "full")
    half = json.loads(call(f"{recipe}:text", *full, "--set", "config.gather_precision=bfloat16"))
    measured, leaves = half["measured"], half["measured"]["num_microbatches"] // 4
    assert 2 * measured["gathered"] == measured["parameters"]
    assert half["traffic"]["gathers"] == 2 * leaves * (measured["gathered"] * 3 // 4)


def test_one_of_ranks_and_device_is_enough(recipe: Path) -> None:
    assert "on 1 rank, NVIDIA L4" in call(recipe, "--device", "l4")
    assert "on 2 ranks, this machine's processor" in call(recipe, "--ranks", 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "h20"], "There are h200, h100, a100-80gb, l4, cpu"),
        (["--ranks", "0"], "0 ranks can't share V = 8 microbatches"),
        (["--ranks", "3"], "3 ranks can't share V = 8 microbatches"),
        (["--json"], "--ranks 8 --device h200"),
        (["--failures"], "--ranks 8 --device h200"),
        (["--sharding", "full"], "--ranks 8 --device h200"),
        (["--device", "l4", "--assume", "speed=3"], "there is no figure 'speed'. There are efficiency, memory_gb"),
        (["--device", "l4", "--assume", "memory_gb=much"], "'much' is no number"),
        (["--device", "l4", "--assume", "ranks_per_node=0.5"], "ranks_per_node=0.5 can't be: give a whole number"),
        (["--device", "l4", "--failures", "--assume", "seed=-1"], "seed=-1 can't be: give a number from 0"),
        (["--device", "l4", "--failures", "--assume", "spares=1.9"], "spares=1.9 can't be: give a whole number"),
        (["--device", "l4", "--assume", "memory_gb=1" + 400 * "0"], "memory_gb can't be"),
        (["--device", "l4", "--assume", "memory_gb=Infinity"], "memory_gb=inf can't be"),
        (["--device", "l4", "--price-per-hour", "inf"], "price_per_hour=inf can't be"),
        (["--device", "l4", "--assume", "spares=1"], "Say --failures too"),
        (
            ["--ranks", "4", "--set", "config.virtual_shards=2", "--set", "config.tensor_parallel=2"],
            "data-parallel ranks",
        ),
    ],
)
def test_what_can_t_be_planned_is_said(recipe: Path, options: list[str], says: str) -> None:
    assert says in call(recipe, *options, code=1)
