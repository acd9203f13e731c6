"""How methods change a microbatch's rows: now so and later otherwise, by how far the run is, or in every other step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cosmati.core.batch import Batch
from cosmati.core.clock import Clock
from cosmati.planning.live_bytes import LiveBytes, tensors_in
from cosmati.train.trainer import Trainer

PARTS = 8
"""Of the run, at whose ends a microbatch is changed anew, in three steps that follow one another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtPoint:
    """Sizes in bytes, of a microbatch at one point of the run (see `MeasuredParts`).

    Attributes:
        activations: of a microbatch whose gradients are added to those that are there.
        first_activations: of the first one.
        changed: rows as methods leave them, beside those that they're made of.
        changing: the most that changing them takes, these included.
    """

    activations: int
    first_activations: int
    changed: int
    changing: int


class Changed(NamedTuple):
    """A microbatch as methods leave it at a point of the run."""

    clock: Clock
    batch: Batch
    kept: int
    most: int


def changed_rows(trainer: Trainer, batch: Batch) -> list[Changed]:
    """Return a microbatch as methods leave it in the run, once for all points at which it has the same form.

    Args:
        trainer: its clock is moved.
        batch: as it comes from the data.
    """
    found: dict[tuple[int, str], Changed] = {}
    for clock in _points(trainer):
        trainer.clock = clock
        with LiveBytes([*trainer.model.parameters(), *trainer.model.buffers(), *tensors_in(batch.data)]) as live:
            made = trainer.methods.batch(batch, trainer.position())
        own = {id(tensor.untyped_storage()) for tensor in tensors_in(batch.data)}
        storages = [tensor.untyped_storage() for tensor in tensors_in(made.data)]
        kept = sum({id(storage): storage.nbytes() for storage in storages if id(storage) not in own}.values())
        form = kept, repr([(tensor.shape, tensor.dtype) for tensor in tensors_in(made.data)])
        known = found.get(form)
        most = live.peak if known is None else max(known.most, live.peak)
        found[form] = Changed(clock, made, kept, most) if known is None else known._replace(most=most)
    return list(found.values())


def unplanned(trainer: Trainer) -> tuple[str, ...]:
    """Return names of methods whose changes later in the run nobody can look at beforehand."""
    a = trainer.assembly
    blind = [method for method in a.plan.with_hook("batch") if a.budget.num_steps is None and method.follows_elapsed]
    # Images come from their decoder in the size of the step.
    blind += a.plan.with_hook("image_size") if a.image_size is not None else ()
    return tuple(dict.fromkeys(type(method).__name__ for method in blind))


def _points(trainer: Trainer) -> Iterator[Clock]:
    """Yield the beginning and, where methods change rows and the run's length is known, others."""
    yield Clock()
    budget = trainer.assembly.budget
    if budget.num_steps is None or not trainer.methods.change_batches:
        return
    ends = [budget.num_steps * part // PARTS for part in range(PARTS + 1)]
    for step in sorted({step for end in ends for step in (end, end + 1, end - 1) if 0 < step < budget.num_steps}):
        epoch, within = divmod(step, budget.steps_per_epoch) if budget.steps_per_epoch else (0, step)
        rows = step * budget.rows_per_step
        yield Clock(step, epoch, within, rows, rows * budget.tokens_per_row)
