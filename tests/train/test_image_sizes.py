"""Which source is asked for smaller images: one that can give them, for the one method that decides first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from cosmati.core.batch import Batch
from cosmati.core.clock import Budget, Time
from cosmati.core.method import Method, Position, Stage
from cosmati.core.plan import Facts, make_plan
from cosmati.core.source import ImageSize
from cosmati.methods import LabelSmoothing, MixUp, ProgressiveResizing
from cosmati.train.feed import Feed, IterableFeed, OrderedFeed
from cosmati.train.image_sizes import ask_for_sizes

FACTS = Facts(num_microbatches=2, rows_per_microbatch=4, positional_data=True, input_kind="images")
BUDGET = Budget(Time.parse("10ba"))


class Images:
    """An order whose images can be had smaller."""

    steps_per_epoch = 5
    rows_per_step = 8

    def __init__(self, size: ImageSize | None = (8, 12)) -> None:
        self.image_size = size
        self.size_at: Callable[[int], ImageSize] | None = None

    def microbatch(self, step: int, index: int) -> Batch:
        raise NotImplementedError

    def class_id(self, step: int, index: int) -> int | None:
        raise NotImplementedError

    def resize(self, size_at: Callable[[int], ImageSize]) -> None:
        self.size_at = size_at


class Earlier(Method):
    """Looks at a batch before it's resized."""

    stage: ClassVar[Stage] = Stage.SELECT

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch


class Halved(Method):
    """Asks for another size afterwards."""

    stage: ClassVar[Stage] = Stage.SHAPE

    def image_size(self, full: ImageSize, elapsed: float) -> ImageSize:
        return full[0] // 2, full[1] // 2

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch


def asked(images: Images, *methods: Method, budget: Budget = BUDGET) -> ImageSize | None:
    return ask_for_sizes(OrderedFeed(images, 2), make_plan(methods, FACTS), budget)


def test_the_sizes_are_the_methods_at_each_step() -> None:
    images, method = Images(), ProgressiveResizing(initial_scale=0.5, finetune_fraction=0.2, size_increment=2)
    assert asked(images, method, MixUp(), LabelSmoothing()) == (8, 12)
    assert images.size_at is not None
    sizes = [images.size_at(step) for step in range(10)]
    assert sizes == [method.image_size((8, 12), step / 10) for step in range(10)]
    assert sizes[0] == (4, 6)
    assert sizes[-1] == (8, 12)


@pytest.mark.parametrize(
    ("methods", "size", "budget"),
    [
        ((), (8, 12), BUDGET),
        ((MixUp(),), (8, 12), BUDGET),
        ((Earlier(), Halved()), (8, 12), BUDGET),
        ((Halved(), ProgressiveResizing()), (8, 12), BUDGET),
        ((ProgressiveResizing(), Halved()), (8, 12), BUDGET),
        ((ProgressiveResizing(),), None, BUDGET),
        ((ProgressiveResizing(),), (8, 12), Budget(Time.parse("2ep"))),
        ((ProgressiveResizing(),), (8, 12), Budget(Time.parse("9sec"))),
    ],
    ids=["none", "no size", "one before", "two", "two again", "images as they are", "unknown steps", "seconds"],
)
def test_images_come_as_they_are(methods: tuple[Method, ...], size: ImageSize | None, budget: Budget) -> None:
    images = Images(size)
    assert asked(images, *methods, budget=budget) is None
    assert images.size_at is None


def test_a_source_of_another_kind_is_not_asked() -> None:
    class Plain:
        steps_per_epoch = rows_per_step = 5

        def microbatch(self, step: int, index: int) -> Batch:
            raise NotImplementedError

        def class_id(self, step: int, index: int) -> int | None:
            raise NotImplementedError

    feeds: list[Feed | None] = [OrderedFeed(Plain(), 2), IterableFeed([1], 2), None]
    plan = make_plan([ProgressiveResizing()], FACTS)
    assert [ask_for_sizes(feed, plan, BUDGET) for feed in feeds] == [None] * 3
    assert OrderedFeed(Plain(), 2).decoder is None
    images = Images()
    assert OrderedFeed(images, 2).decoder is images
