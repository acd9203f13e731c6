"""One rank of `test_collectives.py`: `collectives_worker.py CASE...`. Code of the user's own meets the other rank.

The rank that has mixed packs, or an offered microbatch, would run it more often. Prints what became of each, in a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import LanguageModel, Loss
from cosmati.core.method import Method, Position, Stage
from cosmati.core.plan import Promise
from cosmati.errors import CosmatiError
from tests.train.packs.samples import (
    REGIONS,
    VOCABULARY,
    WEIGHTS,
    documents,
    first_step,
    model,
    policy,
    source,
    trainer,
)
from tests.train.packs.test_split import BODY, Body, Flattened

RANK = int(os.environ["RANK"])
HIDDEN = "all_" + "reduce"


def met(network: nn.Module, data: Any) -> Loss:
    """Meet the other rank in a way that code names."""
    dist.all_reduce(torch.ones(1))
    return plain(network, data)


def met_unnamed(network: nn.Module, data: Any) -> Loss:
    """Meet it in a way that nobody sees from the code."""
    getattr(dist, HIDDEN)(torch.ones(1))
    return plain(network, data)


def plain(network: nn.Module, data: Any) -> Loss:
    return LanguageModel(VOCABULARY)(network, data)


def met_by_operator(network: nn.Module, data: Any) -> Loss:
    """Meet it past the functions of a group."""
    found = getattr(functional_collectives, HIDDEN)(torch.ones(1), "sum", dist.group.WORLD)
    assert found > 0
    return plain(network, data)


def met_quietly(network: nn.Module, data: Any) -> Loss:
    """Meet it, and take no notice of what comes of it."""
    with contextlib.suppress(Exception):
        getattr(dist, HIDDEN)(torch.ones(1))
    return plain(network, data)


def meeting_backward() -> nn.Module:
    """Return a model that meets the other rank in the backward pass alone."""
    made = model()
    made.head.register_full_backward_hook(lambda *_: getattr(dist, HIDDEN)(torch.ones(1)) and None)  # type: ignore[func-returns-value]
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Method):
    """Runs the loss before the step, as methods do that choose rows by it."""

    stage: ClassVar[Stage] = Stage.SELECT

    def batch(self, batch: Batch, at: Position) -> Batch:
        assert at.model is not None
        met_unnamed(at.model, batch.data)
        return batch


class MeetingLater:
    """Meets the other rank from the second step on."""

    def __init__(self) -> None:
        self.is_first = True

    def __call__(self, network: nn.Module, data: Any) -> Loss:
        if not self.is_first:
            getattr(dist, HIDDEN)(torch.ones(1))
        self.is_first = False
        return plain(network, data)


class Meeting(Flattened):
    """Runs once for each route, and meets the other rank from the second step on: that is known by then."""

    forward_caches = ("meets",)
    meets = False

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        if self.meets:
            getattr(dist, HIDDEN)(torch.ones(1))
        return super().forward(hidden, documents)


def of_one_class(batch: Batch) -> Batch:
    """Take all documents of packs for the first class's."""
    ids = batch.lineage.token_class_ids
    assert ids is not None
    return dataclasses.replace(batch, lineage=dataclasses.replace(batch.lineage, token_class_ids=ids.clamp(max=0)))


def pure(batch: Batch, class_id: int) -> Batch:
    rows = batch.num_rows
    return Batch(batch.data, Lineage(torch.arange(rows), torch.full((rows,), class_id)), class_id)


REJECTING = {name: row for name, row in WEIGHTS.items() if name != "personal"}
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    # The model, the loss, the regions, and whether rank 1's rows are packs of one class, pure, or pure and rejected.
    "looks, named": (model, met, REGIONS, "one"),
    "looks, unnamed": (model, met_unnamed, REGIONS, "one"),
    "a search": (lambda: Body(Flattened()), met_unnamed, BODY, "one"),
    "a module apart": (lambda: Body(Meeting()), plain, BODY, "one"),
    "both offered": (model, met_unnamed, REGIONS, "pure"),
    "one rejected, named": (model, met, REGIONS, "rejected"),
    "one rejected, unnamed": (model, met_unnamed, REGIONS, "rejected"),
    "one rejected, an operator": (model, met_by_operator, REGIONS, "rejected"),
    "one rejected, quietly": (model, met_quietly, REGIONS, "rejected"),
    "one rejected, backward": (meeting_backward, plain, REGIONS, "rejected"),
    "one rejected, from the second step on": (model, MeetingLater(), REGIONS, "rejected"),
    "one rejected, scored": (model, plain, REGIONS, "rejected, scored"),
    "one rejected, nobody meets": (model, plain, REGIONS, "rejected"),
    "one rejected later": (model, met_unnamed, REGIONS, "rejected later"),
}


def main(case: str) -> str:
    """Take three steps; say how they ended, and what is still promised."""
    build, loss, regions, kind = CASES[case]
    torch.manual_seed(0)
    weights = REJECTING if "rejected" in kind else WEIGHTS
    methods = Scoring() if "scored" in kind else ()
    made = trainer(build(), None, policy(weights, regions), loss=loss, budget="3ba", methods=methods)
    batches = first_step(source(documents()))
    try:
        with made:
            for step in range(3):
                Meeting.meets = step > 0
                if kind == "one":
                    given, ids = [batches[0], of_one_class(batches[1])], [None, None]
                else:
                    other = 2 if "rejected" in kind and (step or "later" not in kind) else 0
                    given, ids = [pure(batches[0], 1), pure(batches[1], other)], [1, other]  # type: ignore[list-item]
                made.step_microbatches([given[RANK]], ids)
    except CosmatiError as error:
        return f"step {made.clock.step} refused: {error}"
    except RuntimeError as error:
        is_late = "imed out" in str(error)
        return f"step {made.clock.step} {'timed out' if is_late else 'the other rank has ended'}: {error}"
    held = [str(p) for p in (Promise.ELASTIC, Promise.NO_DIRECT_WRITE) if made.plan.holds(p)]
    return f"done, and promises {', '.join(held) or 'neither'}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Parameters are read in ways")
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    for name in sys.argv[1:]:
        print(main(name), flush=True)  # noqa: T201
    os._exit(0)  # A rank that was left alone in a collective has nobody to leave the group with.
