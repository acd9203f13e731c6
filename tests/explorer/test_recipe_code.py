"""Recipes as code: whoever runs the code has the recipe that was recorded."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.explorer.recipe_code import recipe_code
from cosmati.methods import EMA, GradientClipping, LabelSmoothing, MixUp
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, WSD, AdamW, Constant, Muon
from cosmati.recipes.recipe import Recipe
from cosmati.records.run import RunRecord


@dataclasses.dataclass(frozen=True)
class BuildMLP:
    widths: tuple[int, ...]

    def __call__(self) -> nn.Module:
        return MLP(self.widths)


def toy_rows() -> InMemory:
    return InMemory((torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 2), 4)


OPTIMIZERS = (Muon(lr=0.02, schedule=WSD(warmup="0.1dur", decay="0.5dur")), AdamW(lr=3e-3, betas=(0.9, 0.98)))
METHODS = (
    LabelSmoothing(smoothing=0.2),
    EMA(half_life="20ba"),
    GradientClipping(clipping_type="norm", clipping_threshold=0.5),
)


def recipe() -> Recipe:
    return Recipe(
        name='a "name"',
        model=BuildMLP((3, 64, 64, 2)),
        loss=Classification(2),
        data=toy_rows,
        optimizers=OPTIMIZERS,
        methods=METHODS,
        config=RunConfig(budget="3ba", deterministic=False, check_every=5),
    )


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "recipe", "exec"), names)
    return names


def test_the_code_of_a_recipe_makes_the_recipe() -> None:
    made = recipe()
    code = recipe_code(made.text, seed=7)
    assert code is not None
    assert max(map(len, code.splitlines())) <= 110
    names = run(code.replace("recipe.trainer().fit()", ""), BuildMLP=BuildMLP, toy_rows=toy_rows)
    assert names["recipe"].text == made.text
    assert names["recipe"].config.seed == 7
    assert "# Of the program that made this run: BuildMLP, toy_rows." in code
    assert "had 0.25 of it" in str(recipe_code(made.text, budget=0.25))


@pytest.mark.parametrize(
    ("optimizers", "methods"),
    [
        ([SGD(lr=0.1)], []),
        ([SGD(lr=0.1, schedule=Constant(), parameters="layers.0.*"), AdamW(lr=1e-3)], [MixUp(alpha=0.3)]),
        (OPTIMIZERS, METHODS),
    ],
)
def test_the_code_of_a_run_folder_has_the_plan_of_the_run(tmp_path: Path, optimizers: Any, methods: Any) -> None:
    model, loss, data = MLP((3, 8, 2)), Classification(2), toy_rows()
    again = copy.deepcopy(model)
    config = RunConfig(budget="4ba", seed=3, num_microbatches=2, run_folder=tmp_path, num_threads=1)
    Trainer(model, loss, data, optimizers=optimizers, methods=methods, config=config).fit()
    record = RunRecord.from_json((tmp_path / "run.json").read_text())
    code = recipe_code(record.recipe_text)
    assert code is not None
    trainer = run(code, model=again, loss=loss, data=data)["trainer"]
    assert trainer.plan.digest == record.digests["plan"]
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[1]",
        "{}",
        '{"optimizers": []}',
        '{"optimizers": ["SGD("], "config": {}}',
        '{"optimizers": [3], "config": {}}',
        '{"optimizers": ["{\'is\': \'os.system\'}"], "budget": "1ba"}',
        '{"optimizers": ["[1]"], "budget": "1ba"}',
        '{"optimizers": [], "config": {"a b": 1}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_recipe_of_ours_gives_no_code(text: str) -> None:
    assert recipe_code(text) is None


def test_text_of_others_stays_one_expression() -> None:
    """A line break or a statement in a part can't become a statement of the code."""
    for part in ("x\nimport os", "import os", "x; y", "a = b"):
        assert recipe_code(json.dumps({"optimizers": [part], "config": {}})) is None
    code = recipe_code(json.dumps({"name": "x'\n)\nimport os", "optimizers": [], "config": {"budget": "a\nb"}}))
    assert code is not None
    assert "\nimport os" not in code
    assert "budget='a\\nb'" in code


def test_functions_without_a_name_are_the_programs_own(tmp_path: Path) -> None:
    for place, chosen in enumerate((lambda _, value: value.ndim == 2, functools.partial(print))):
        optimizers = [Muon(lr=0.1, parameters=chosen), AdamW(lr=1e-3)] if not place else []
        if optimizers:
            config = RunConfig(budget="1ba", run_folder=tmp_path / str(place), num_threads=1)
            Trainer(MLP((3, 8, 2)), Classification(2), toy_rows(), optimizers=optimizers, config=config).fit()
            text = RunRecord.from_json((tmp_path / str(place) / "run.json").read_text()).recipe_text
        else:
            fields = {"is": "Muon", "lr": 0.1, "parameters": repr(chosen)}
            text = json.dumps({"optimizers": [repr(fields)], "budget": "1ba"})
        code = recipe_code(text)
        assert code is not None
        assert "parameters=own_parameters" in code
        assert "# Of the program that made this run: own_parameters." in code
        assert "<" not in code
