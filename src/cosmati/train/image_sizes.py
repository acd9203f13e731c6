"""What the data give: its kind; and images in the size of the step, where a method makes them smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cosmati.core.batch import Batch, InputKind, kind_of_input
from cosmati.core.clock import Budget, Clock
from cosmati.core.loss import LanguageModel
from cosmati.core.method import Method, Stage
from cosmati.core.plan import Plan
from cosmati.core.source import ImageSize, Source
from cosmati.train.feed import Feed, OrderedFeed
from cosmati.train.ingredients import Ingredients


@dataclass(frozen=True)
class StepImageSize:
    """Says in which size a step wants its images: a function of its number, for processes that read ahead."""

    method: Method
    full: ImageSize
    budget: Budget

    def __call__(self, step: int) -> ImageSize:
        """Return height and width."""
        return self.method.image_size(self.full, self.budget.elapsed(Clock(step=step)))


def ask_for_sizes(feed: Feed | None, plan: Plan, budget: Budget) -> ImageSize | None:
    """Have the source decode images as the plan's method wants them; return their full size, None where it can't.

    What acts on a batch before that method, or asks for another size after it, needs images as they are.
    """
    decoder = feed.decoder if isinstance(feed, OrderedFeed) else None
    full = None if decoder is None else decoder.image_size
    asking = plan.with_hook("image_size")
    first = [method for method in plan.with_hook("batch") if method.stage >= Stage.SELECT][:1]
    if decoder is None or full is None or budget.num_steps is None or len(asking) != 1 or list(asking) != first:
        return None
    decoder.resize(StepImageSize(asking[0], full, budget))
    return full


def input_kind_of(given: Ingredients, feed: Feed | None) -> InputKind | None:
    """Return what the model reads, where the first batch shows it, or the loss."""
    if feed is None or not isinstance(given.data, Source | Sequence):
        return "tokens" if isinstance(given.loss, LanguageModel) else None
    first = feed.whole(Clock())
    return kind_of_input(first.data if isinstance(first, Batch) else first)
