"""BatchNorm's statistics for averaged weights: computed anew from the first steps' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from cosmati.core.batch import Batch
from cosmati.core.rng import position_key
from cosmati.train.assembly import Assembly
from cosmati.train.feed import Feed
from cosmati.train.routes import Route

RECALIBRATION_STEPS = 8
"""Steps whose rows give averaged weights their BatchNorm statistics."""


def put_back_modes(flags: Sequence[tuple[nn.Module, bool]]) -> None:
    """Put each module back into its own mode: some may be frozen in eval mode."""
    for module, is_training in flags:
        module.training = is_training


@torch.no_grad()
def recalibrate(model: nn.Module, layers: Iterable[nn.Module], forwards: Iterable[Callable[[], object]]) -> None:
    """Compute BatchNorm's statistics anew, as the plain average over some forward passes in training mode."""
    flags = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    # A frozen layer keeps its statistics.
    chosen = [layer for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training]  # noqa: SLF001
    forwards = list(forwards)
    if not chosen or not forwards:
        # Data that can't be read again from their start: the running statistics are the best there is.
        put_back_modes(flags)
        return
    momenta = [layer.momentum for layer in chosen]
    running = [[buffer.clone() for buffer in layer.buffers()] for layer in chosen]
    for layer in chosen:
        layer.reset_running_stats()
        layer.momentum = None
    try:
        for forward in forwards:
            forward()
    finally:
        put_back_modes(flags)
        for layer, momentum, before in zip(chosen, momenta, running, strict=True):
            layer.momentum = momentum
            if layer.num_batches_tracked == 0:
                # No pass may teach it, or none runs it.
                for buffer, value in zip(layer.buffers(), before, strict=True):
                    buffer.copy_(value)


def recalibration_passes(assembly: Assembly, feed: Feed | None) -> Iterator[Callable[[], object]]:
    """Yield forward passes over the first steps of the data, for BatchNorm's statistics of averaged weights.

    Each follows its step's route: what wasn't offered isn't forwarded, and a layer takes its statistics only from
    microbatches that may teach its region.
    """
    steps = (
        RECALIBRATION_STEPS
        if assembly.policy is None
        else min(RECALIBRATION_STEPS, assembly.policy.phases[-1].end_step)
    )
    for step in range(steps):
        for index, batch in enumerate(feed.again(step) if feed is not None else ()):
            is_empty = bool((batch.lineage.row_ids < 0).all())
            route = assembly.router.route_of(assembly.router.class_of(batch), step, batch.band, is_empty=is_empty)
            if route.offered:
                yield partial(_recalibration_pass, assembly, batch, route, step, index)


def _recalibration_pass(assembly: Assembly, batch: Batch, route: Route, step: int, index: int) -> None:
    """Run one microbatch forward, as a step would: in the run's precision, with draws of its own position."""
    a = assembly
    a.generators.seed(position_key(a.config.seed, "recalibrate", step, index))
    # In training mode a layer doesn't read its running statistics: what is put back has changed nothing else.
    untaught = [layer for name, layer in a.statistics.layers.items() if not a.router.teaches(route, name)]
    kept = [(buffer, buffer.clone()) for layer in untaught for buffer in layer.buffers()]
    with a.config.autocast(a.device), a.router.running(route, batch, a.device):
        a.turns[0].loss(a.model, batch.to(a.device).data)
    for buffer, value in kept:
        buffer.copy_(value)
