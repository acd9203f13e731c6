"""What one step did, by whichever road."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.clock import Clock
from cosmati.train.region_changes import RegionDigests
from cosmati.train.routes import Route


class Taught(NamedTuple):
    """What a sub-step taught.

    Attributes:
        regions: indices of the regions that had a parameter which learns in it: not frozen, and in its optimizers.
        weights: of each microbatch, float64 [V].
    """

    regions: tuple[int, ...]
    weights: Tensor


def _unknown() -> float:
    return math.nan


class StepOutcome(NamedTuple):
    """What one step did. Tensors stay on the device until somebody needs them.

    Attributes:
        clock: after the step; the step's own number is `clock.step - 1`.
        loss: mean over the step's weight, scalar; of the first sub-step.
        sub_losses: mean loss of each sub-step.
        batches: this rank's microbatches as the methods left them; empty on the short road where nobody asked.
        routes: of all V microbatches; empty on the short road.
        weights: weight of each microbatch [V], or None on the short road.
        num_rows: rows of each microbatch that took part [V], or None on the short road.
        labels: of each microbatch, labels by the source's class [V, classes], where rows are packs; None otherwise.
        norms: each microbatch's gradient norm by region [V, regions], when it was measured.
        sketches: of these gradients' directions [V, regions, 16], likewise (`DirectionSketch`).
        entropies: spectral entropy of what each region computed of each microbatch [V, regions], likewise.
        update_norms: norm of the parameters' change by region [regions], likewise.
        update_sketches: of its direction [regions, 16], likewise.
        digests: of each region before and after the step, likewise.
        taught: for each sub-step, what it taught; empty on the short road.
        given: this rank's microbatches as the data gave them; empty on the short road.
        learning_rates: of each optimizer's first group, in this step.
        gradient_norm: returns the norm of the gradients that were committed; NaN where none was.
        left_out: why nothing of the step was committed, empty where it was.
        withheld: `updates`, or `norms` and updates, and `loss` too, where they would tell of a sensitive class.
    """

    clock: Clock
    loss: Tensor
    sub_losses: Sequence[Tensor]
    batches: Sequence[Batch] = ()
    routes: Sequence[Route] = ()
    weights: Tensor | None = None
    num_rows: Tensor | None = None
    labels: Tensor | None = None
    norms: Tensor | None = None
    sketches: Tensor | None = None
    entropies: Tensor | None = None
    update_norms: Tensor | None = None
    update_sketches: Tensor | None = None
    digests: RegionDigests | None = None
    taught: Sequence[Taught] = ()
    given: Sequence[Batch] = ()
    learning_rates: Sequence[float] = ()
    gradient_norm: Callable[[], float] = _unknown
    left_out: str = ""
    withheld: Sequence[str] = ()


StepReport = StepOutcome
"""The earlier name."""
