"""The headline's text task: what is shared, what is apart, and that its runs can be made anywhere."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping

import pytest
import torch

from benchmarks.headline import text
from cosmati.errors import PlanError
from cosmati.models.gpt import GPT
from cosmati.optim import AdamW, Cosine, Muon
from cosmati.recipes.language import BuildGPT
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import Setting
from cosmati.study.search import Dimension

pytestmark = pytest.mark.long

torch.set_num_threads(1)


def model_of(recipe: Recipe) -> BuildGPT:
    assert isinstance(recipe.model, BuildGPT)
    return recipe.model


def built(recipe: Recipe) -> GPT:
    model = recipe.build_model()
    assert isinstance(model, GPT)
    return model


def test_known_settings_name_every_dimension_and_lie_inside() -> None:
    own = {dimension.name for dimension in text.OWN}
    shared = {dimension.name for dimension in text.SHARED}
    dimensions = {dimension.name: dimension for dimension in (*text.SHARED, *text.OWN)}
    assert not own & shared
    for arm, names in (("opponent", shared), ("composition", shared | own)):
        for known in text.KNOWN[arm]:
            assert known.keys() == names
            assert all(inside(value, dimensions[name]) for name, value in known.items())


def inside(value: Setting, dimension: Dimension) -> bool:
    if dimension.choices:
        return value in (*dimension.wider[0], *dimension.choices, *dimension.wider[1])
    return dimension.low <= float(value) <= dimension.high


@pytest.mark.parametrize("arm", text.ARMS)
def test_an_arm_is_adamw_and_what_it_adds(arm: str) -> None:
    recipe = text.recipe(arm, {}, 0.25, 7, rows="reported")
    adds = text.ARMS[arm]
    *first, rest = recipe.optimizers
    assert isinstance(rest, AdamW)
    assert any(isinstance(optimizer, Muon) for optimizer in first) == ("muon" in adds)
    assert (model_of(recipe).config.ngrams == text.NGRAMS) == ("ngrams" in adds)
    same = {"ngrams": ()}
    plain = text.recipe("opponent", {"projections": projections(recipe)}, 0.25, 7, rows="reported")
    assert dataclasses.replace(model_of(recipe).config, **same) == model_of(plain).config  # type: ignore[arg-type]
    copied = pickle.loads(pickle.dumps(recipe))
    assert (copied.text, copied.config) == (recipe.text, recipe.config)
    assert " at 0x" not in recipe.text


def projections(recipe: Recipe) -> Setting:
    return "zero" if model_of(recipe).config.zero_init_projections else "scaled"


def test_every_setting_reaches_the_run() -> None:
    base = text.recipe("composition", {}, 0.25, 0, rows="selection")
    changes: Mapping[str, Setting] = {
        "batch_size": 8,
        "lr": 1.7e-3,
        "beta1": 0.8,
        "beta2": 0.95,
        "weight_decay": 0.3,
        "clipping": "0.5",
        "warmup": 0.13,
        "decay": 0.45,
        "final": 0.05,
        "init_scale": 1.3,
        "projections": "scaled",
        "tied": True,
        "matrix_lr": 0.013,
        "ngram_lr": 2.3e-3,
    }
    assert changes.keys() == text.KNOWN["composition"][0].keys()
    for name, value in changes.items():
        changed = text.recipe("composition", {name: value}, 0.25, 0, rows="selection")
        differs = (changed.text, str(changed.data)) != (base.text, str(base.data))
        assert differs, f"{name}={value} changes nothing"


def test_budgets_are_equal_training_times() -> None:
    for arm in ("opponent", "composition"):
        for batch_size in (1, 2, 4, 8, 16, 32):
            for budget in (0.0625, 0.25, 1.0):
                recipe = text.recipe(arm, {"batch_size": batch_size}, budget, 0, rows="reported")
                step = text.STEP_SECONDS[arm][batch_size]
                assert abs(int(recipe.config.budget.removesuffix("ba")) * step - 30 * budget) <= step / 2
    assert text.plain_recipe(0.5, 0).config.budget == f"{round(15 / text.STEP_SECONDS['plain'][12])}ba"
    for changes, budget in (({}, 0.0001), ({"batch_size": 3}, 1.0)):
        with pytest.raises(PlanError, match="a whole step at least"):
            text.recipe("opponent", changes, budget, 0, rows="reported")


def test_selection_and_reported_packages_are_apart() -> None:
    library = text.library()
    halves = [text.held_out(library, rows) for rows in ("selection", "reported")]
    assert sum(len(half) for half in halves) == len(library.validation.tokens)
    rows = [{bytes(row.tolist()) for row in half} for half in halves]
    shared = rows[0] & rows[1]
    assert len(shared) < 0.01 * min(len(half) for half in rows)


def test_plain_recipe_is_the_published_one() -> None:
    recipe = text.plain_recipe(1.0, 3)
    (optimizer,) = recipe.optimizers
    assert isinstance(optimizer, AdamW)
    assert isinstance(optimizer.schedule, Cosine)
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-3, (0.9, 0.99), 0.1)
    assert (optimizer.schedule.warmup, optimizer.schedule.final) == ("0.05dur", 0.1)
    assert dataclasses.replace(model_of(recipe).config, tied=False) == text.MODEL


def test_unknown_arms_and_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="no arm 'best'"):
        text.recipe("best", {}, 1.0, 0, rows="reported")
    with pytest.raises(PlanError, match="no setting rate"):
        text.recipe("opponent", {"rate": 1.0}, 1.0, 0, rows="reported")
    with pytest.raises(PlanError, match="no setting matrix_lr"):
        text.recipe("opponent", {"matrix_lr": 1.0}, 1.0, 0, rows="reported")


def test_composition_trains() -> None:
    recipe = text.recipe("composition", {"batch_size": 1}, 0.004, 0, rows="selection")
    model = built(recipe)
    assert all(bool((table.weight == 0).all()) for table in model.ngram_embedding.tables)  # type: ignore[union-attr]
    trainer = dataclasses.replace(recipe, evaluation=None).trainer()
    trainer.fit()
    moved = dict(trainer.model.named_parameters())
    assert all(not torch.equal(moved[name], weight) for name, weight in model.named_parameters() if weight.ndim == 2)
