"""The Fashion-MNIST recipe, and the headline's arms built on it, on files of a few random rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.headline import images
from cosmati.errors import PlanError
from cosmati.optim import SGD, Muon
from cosmati.recipes.fashion import BuildWhitenedResNet, FashionEvaluation, FashionRows, fashion_resnet
from cosmati.recipes.recipe import Recipe
from tests.corpora.fashion_files import write

pytestmark = pytest.mark.long

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fashion")
    write(made, num_train=60, num_test=20)
    return made


def shortened(recipe: Recipe, folder: Path) -> Recipe:
    config = replace(recipe.config, budget="2ba")
    return replace(
        recipe,
        model=replace(recipe.model, folder=folder) if isinstance(recipe.model, BuildWhitenedResNet) else recipe.model,  # type: ignore[type-var]
        data=FashionRows(rows_per_step=16, folder=folder),
        evaluation=FashionEvaluation(folder=folder),
        config=config,
    )


def test_no_row_is_trained_on_and_measured(folder: Path) -> None:
    source = FashionRows(rows_per_step=10, folder=folder)()
    parts = {rows: FashionEvaluation(rows=rows, folder=folder)().data for rows in ("selection", "reported")}
    images_of = {rows: torch.cat([batch[0] for batch in data]) for rows, data in parts.items()}
    assert (source.num_rows, len(images_of["selection"]), len(images_of["reported"])) == (50, 10, 20)
    every = torch.cat([source.data[0], images_of["selection"], images_of["reported"]]).flatten(1)
    assert len(every.unique(dim=0)) == 80
    assert source.row_ids.tolist() == list(range(50))
    assert source.rows_per_step == 10


def test_accuracy_is_the_share_of_right_answers(folder: Path) -> None:
    class Constant(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[torch.full((len(images),), 4)]

    evaluation = FashionEvaluation(folder=folder)()
    targets = torch.cat([batch[1] for batch in evaluation.data])
    hits = sum(float(evaluation.metrics["accuracy"](Constant(), batch).sum) for batch in evaluation.data)
    assert hits == int((targets == 4).sum())
    losses = [evaluation.metrics["cross_entropy"](Constant(), batch) for batch in evaluation.data]
    nats = sum(float(loss.sum) for loss in losses) / sum(float(loss.weight) for loss in losses)
    assert nats == pytest.approx(math.log(math.e + 9) - hits / 20, rel=1e-5)


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="'selection'"):
        FashionEvaluation(rows="test")  # type: ignore[arg-type]


def test_its_text_says_all_that_was_chosen() -> None:
    text = fashion_resnet(rows_per_step=32, num_steps=7).text
    assert "stem_stride=1" in text
    assert "rows_per_step=32" in text
    assert '"budget": "7ba"' in text
    assert "ChannelsLast" in text


@pytest.mark.parametrize("arm", ["opponent", "composition"])
def test_known_settings_are_within_the_search(arm: images.ArmName) -> None:
    dimensions = (*images.SHARED, *(images.OWN if arm == "composition" else ()))
    assert images.KNOWN[arm]
    for settings in images.KNOWN[arm]:
        assert settings.keys() == {dimension.name for dimension in dimensions}
        for dimension in dimensions:
            value = settings[dimension.name]
            inside = value in dimension.choices if dimension.choices else dimension.low <= value <= dimension.high
            assert inside, (dimension.name, value)


def test_arms_see_the_same_rows_in_precision_layout_and_number() -> None:
    arms = [
        images.recipe("opponent", images.KNOWN["opponent"][0], 0.5, 3, rows="reported"),
        images.recipe("composition", images.KNOWN["composition"][0], 0.5, 3, rows="reported"),
        images.plain_recipe(0.5, 3),
        images.whitepaper(images.KNOWN["opponent"][0], 0.5, 3),
    ]
    for arm in arms:
        assert arm.config.precision == "bfloat16"
        assert (arm.config.num_threads, arm.config.seed) == (1, 3)
        assert sum(type(method).__name__ == "ChannelsLast" for method in arm.methods) == 1
        assert isinstance(arm.data, FashionRows)
        rows = int(arm.config.budget.removesuffix("ba")) * arm.data.rows_per_step
        assert abs(rows - images.FULL_ROWS * 0.5) <= arm.data.rows_per_step / 2


def test_a_part_alone_is_that_part_alone() -> None:
    settings = images.KNOWN["composition"][0]
    found = {
        parts: images.recipe_of_parts(parts, settings, 0.25, 0, rows="selection", name="part")
        for parts in [(), *((part,) for part in images.PARTS), images.PARTS]
    }
    assert [type(optimizer) for optimizer in found["muon",].optimizers] == [Muon, SGD]
    assert found["muon",].model == found[()].model
    whole = images.recipe("composition", settings, 0.25, 0, rows="selection")
    assert replace(found[images.PARTS], name="composition").text == whole.text
    texts = [recipe.text for recipe in found.values()]
    assert len(set(texts)) == len(texts)


def test_plain_is_the_cited_recipe() -> None:
    (optimizer,) = images.plain_recipe(1.0, 0).optimizers
    assert isinstance(optimizer, SGD)
    assert (optimizer.lr, optimizer.momentum, optimizer.nesterov) == (0.1, 0.9, False)
    assert (optimizer.weight_decay, optimizer.decay_vectors) == (5e-4, True)
    assert images.plain_recipe(1.0, 0).config.budget == f"{round(images.FULL_ROWS / 128)}ba"


@pytest.mark.parametrize("arm", ["opponent", "composition", "plain", "whitepaper", "clipped"])
def test_arms_train(arm: str, folder: Path) -> None:
    if arm == "plain":
        recipe = images.plain_recipe(1.0, 0)
    elif arm == "whitepaper":
        recipe = images.whitepaper(images.KNOWN["opponent"][0], 1.0, 0)
    elif arm == "clipped":
        settings = {**images.KNOWN["composition"][0], "clipping": 1.0, "zero_init": True, "momentum": 0.8}
        recipe = images.recipe("composition", settings, 1.0, 0, rows="selection")
    else:
        recipe = images.recipe(arm, images.KNOWN[arm][0], 1.0, 0, rows="selection")  # type: ignore[arg-type, index]
    result = shortened(recipe, folder).trainer().fit()
    assert result.outcome == "completed"
    assert result.metrics["accuracy"] * 20 == pytest.approx(round(result.metrics["accuracy"] * 20))
