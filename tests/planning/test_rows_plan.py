"""Methods that change rows: planned memory against the most that PyTorch's profiler sees in a whole run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cosmati.core.batch import Batch
from cosmati.core.method import Method, Position, Stage
from cosmati.methods import EMA, CutMix, MixUp, ProgressiveResizing, SelectiveBackprop, SeqLengthWarmup
from cosmati.planning.job import smaller
from cosmati.planning.measuring import measure
from cosmati.planning.memory import MemoryPlan, memory_of
from cosmati.planning.rows import AtPoint, unplanned
from cosmati.recipes.recipe import Recipe
from tests.planning import recipes
from tests.planning.made import made
from tests.planning.test_memory_plan import allocated

pytestmark = pytest.mark.long


def large(*methods: Method) -> Recipe:
    return recipes.images(*methods, side=64)


RUNS = {
    "as they are": large(),
    "mixed": large(MixUp()),
    "cut and mixed": large(CutMix()),
    "growing": large(ProgressiveResizing()),
    "growing, cropped": large(ProgressiveResizing(mode="crop", delay_fraction=0.0)),
    "selected in every other step": large(SelectiveBackprop(start=0.0)),
    "selected later": large(SelectiveBackprop(start=0.5, interrupt=0)),
    "mixed and selected": large(MixUp(), SelectiveBackprop(start=0.0)),
    "longer and longer": recipes.text(SeqLengthWarmup()),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_allocates_what_was_planned(kind: str) -> None:
    """All but what is there before it begins: the model. Methods by how far the run is, and in every other step."""
    plan = memory_of(measure(RUNS[kind].trainer()), 1, "replicated")
    most = allocated(RUNS[kind].trainer().fit)
    assert plan.total - plan.backward["parameters"] - plan.backward["buffers"] == pytest.approx(most, rel=0.05)


def test_rows_are_counted_as_they_come_and_as_they_re_changed() -> None:
    plain, mixed = (measure(recipe.trainer()) for recipe in (large(), large(MixUp())))
    images = 4 * 3 * 64 * 64 * 4
    assert (plain.changed, plain.rows, plain.num_rows) == (0, images + 4 * 8, 4)
    assert images < mixed.changed <= images + 4 * 64
    assert (mixed.rows, mixed.num_rows) == (plain.rows, 4)
    for ranks in (1, 4, 8):
        plan = memory_of(mixed, ranks, "replicated")
        assert {moment["changed rows"] for moment in plan.moments.values()} == {8 // ranks * mixed.changed}
        assert plan.change["changing"] == mixed.changing - mixed.changed > 0


@dataclass(frozen=True, kw_only=True)
class Copies(Method):
    """In the second half of a run rows are copies, for which more and more is taken; their shapes stay."""

    stage: ClassVar[Stage] = Stage.SHAPE

    def batch(self, batch: Batch, at: Position) -> Batch:
        times = int(8 * at.elapsed)
        return batch if times < 4 else batch.replace(input=torch.cat([batch.input] * times)[: batch.num_rows].clone())


def test_rows_of_the_same_shapes_take_what_they_take_at_most() -> None:
    images = 4 * 3 * 64 * 64 * 4
    parts = measure(large(Copies()).trainer())
    assert {(point.changed, point.changing) for point in parts.points} == {(0, 0), (images, 7 * images)}
    plan = memory_of(parts, 8, "replicated")
    assert (plan.commit["changed rows"], plan.change["changing"]) == (images, 6 * images)


def test_work_is_that_of_the_point_with_most_activations() -> None:
    late = ProgressiveResizing(finetune_fraction=0.3)
    full, growing = (measure(recipe.trainer()) for recipe in (large(), large(late)))
    assert growing.flops == full.flops
    assert (growing.activations, growing.changed) == (full.activations, 0)
    small = min(growing.elsewhere, key=lambda point: point.activations)
    assert small.activations < 0.5 * full.activations
    assert small.changed > 0


def test_each_moment_has_the_point_at_which_it_needs_most() -> None:
    parts = made(elsewhere=(AtPoint(activations=100, first_activations=5000, changed=50, changing=90),))
    alone, each = memory_of(parts, 1, "replicated"), memory_of(parts, 8, "replicated")
    first = memory_of(made(), 1, "replicated")
    assert alone.backward == first.backward, "1,600 of activations are more than 100 and eight times 50"
    assert sum(alone.commit.values()) == sum(first.commit.values()) + 8 * 50
    assert (each.backward["activations"], each.backward["changed rows"]) == (5000, 50)
    assert (each.change["changing"], each.change["changed rows"]) == (40, 50)
    half = memory_of(smaller(parts, 2), 16, "replicated")
    assert (half.backward["activations"], half.backward["changed rows"]) == (2500, 25)
    assert half.change["changing"] == 20


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (ProgressiveResizing(image_width=16), ("ProgressiveResizing",)),
        (SelectiveBackprop(), ("SelectiveBackprop",)),
        (MixUp(), ()),
    ],
)
def test_without_a_known_length_it_s_said_whose_later_changes_aren_t_seen(method: Method, names: tuple[str]) -> None:
    parts = measure(recipes.images(method, budget="60sec").trainer())
    assert parts.unplanned == names
    assert measure(recipes.images(method).trainer()).unplanned == ()


def test_images_that_their_decoder_resizes_aren_t_seen_in_their_later_sizes() -> None:
    trainer = recipes.images(ProgressiveResizing()).trainer()
    a: Any = dataclasses.replace(trainer.assembly, image_size=(16, 16))
    given: Any = SimpleNamespace(assembly=a)
    assert unplanned(given) == ("ProgressiveResizing",)


def test_methods_that_change_no_rows_leave_one_point() -> None:
    parts = measure(recipes.averaged().trainer())
    assert any(isinstance(method, EMA) for method in recipes.averaged().methods)
    assert (parts.elsewhere, parts.changed, parts.changing, parts.unplanned) == ((), 0, 0, ())
    assert isinstance(memory_of(parts, 2, "full"), MemoryPlan)
