"""Evaluation: metrics summed in canonical order, on the weights that the methods say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, count_rows, input_of, map_tensors, target_of
from cosmati.core.loss import Loss
from cosmati.core.method import Position, State
from cosmati.core.rng import position_key
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.train.assembly import Assembly
from cosmati.train.feed import Feed
from cosmati.train.ranks import Ranks
from cosmati.train.routes import Route

RECALIBRATION_STEPS = 8
"""Steps whose rows give averaged weights their BatchNorm statistics."""

Metric = Callable[[nn.Module, Data], "Loss | Tensor"]


@dataclass(frozen=True)
class Evaluation:
    """What is measured, and on what.

    Args:
        data: batches, the same ones each time; a list, a DataLoader that doesn't shuffle, or `batches(...)`.
        metrics: functions of model and batch that return `Loss(sum, weight)`, or a scalar mean of the batch.
    """

    data: Iterable[Data]
    metrics: Mapping[str, Metric] = field(default_factory=dict)


def batches(data: Data, rows: int) -> list[Data]:
    """Cut a nest of tensors into batches of so many rows; the last one may be smaller."""
    return [map_tensors(lambda tensor, i=i: tensor[i : i + rows], data) for i in range(0, count_rows(data), rows)]  # type: ignore[misc]


def accuracy(model: nn.Module, data: Data) -> Loss:
    """Count the rows whose largest logit is at the target's index."""
    hits = model(input_of(data)).argmax(1) == target_of(data)
    return Loss(hits.sum(), float(hits.numel()))


@torch.no_grad()
def evaluate(
    model: nn.Module, evaluation: Evaluation, ranks: Ranks, device: torch.device, autocast: torch.autocast
) -> dict[str, float]:
    """Return each metric over all batches.

    Batches are shared out over the ranks; their sums are added in the batches' order in float64, so a metric has one
    value, whatever the number of ranks.
    """
    was_training = model.training
    model.eval()
    try:
        rows: dict[int, list[float]] = {}
        num_batches = 0
        for index, data in enumerate(evaluation.data):
            num_batches += 1
            if index % ranks.world == ranks.rank:
                moved = map_tensors(lambda tensor: tensor.to(device), data)
                with autocast:
                    rows[index] = [
                        value
                        for metric in evaluation.metrics.values()
                        for value in _measure(metric(model, moved), data)
                    ]
    finally:
        model.train(was_training)
    width = 2 * len(evaluation.metrics)
    padded = [
        rows.get(index, [0.0] * width)
        for index in range(ranks.rank, -(-num_batches // ranks.world) * ranks.world, ranks.world)
    ]
    table = ranks.gather(torch.tensor(padded, dtype=torch.float64, device=device).reshape(len(padded), width)).cpu()
    return {
        name: _ordered_sum(table[:, 2 * i]) / max(_ordered_sum(table[:, 2 * i + 1]), 1e-300)
        for i, name in enumerate(evaluation.metrics)
    }


def try_out(model: nn.Module, evaluation: Evaluation, device: torch.device, autocast: torch.autocast) -> None:
    """Compute the metrics of one batch, to find before the first step what would fail at the first evaluation.

    Data that can be gone through only once are left alone.
    """
    if iter(evaluation.data) is not evaluation.data and (first := next(iter(evaluation.data), None)) is not None:
        with kept_buffers(model):
            evaluate(model, Evaluation([first], evaluation.metrics), Ranks.alone(), device, autocast)


def _measure(result: Loss | Tensor, data: Data) -> Sequence[float]:
    if isinstance(result, Loss):
        return float(result.sum), float(result.weight)
    weight = float(count_rows(data))
    return float(result) * weight, weight


def _ordered_sum(values: Tensor) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def averaged_weights(assembly: Assembly, states: Mapping[int, State], at: Position) -> dict[str, Tensor] | None:
    """Return the averages that a method or an optimizer keeps, by parameter name; None where none does."""
    for index, method in enumerate(assembly.plan.methods):
        weights = method.evaluation_weights(states[index], at)
        if weights is not None:
            return dict(weights)
    names = {id(parameter): name for name, parameter in assembly.layout.pieces()}
    found: dict[str, Tensor] = {}
    for scheduled in assembly.optimizers:
        if isinstance(scheduled.optimizer, GroupedOptimizer):
            found |= {names[id(p)]: value for p, value in scheduled.optimizer.evaluation_weights().items()}
    return found or None


@contextmanager
def averaged(assembly: Assembly, weights: Mapping[str, Tensor] | None, feed: Feed | None) -> Iterator[nn.Module]:
    """Give the model with averages in place of its weights, and BatchNorm's statistics computed for them."""
    model = assembly.model
    if weights is None:
        with assembly.generators.restored():
            yield model
        return
    with assembly.layout.replaced(weights), kept_buffers(model), assembly.generators.restored():
        if assembly.statistics.layers:
            recalibrate(model, assembly.statistics.layers.values(), recalibration_passes(assembly, feed))
        yield model


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers back afterwards, from a saved copy."""
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])


@torch.no_grad()
def recalibrate(model: nn.Module, layers: Iterable[nn.Module], forwards: Iterable[Callable[[], object]]) -> None:
    """Compute BatchNorm's statistics anew, as the plain average over some forward passes in training mode."""
    chosen = [layer for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    forwards = list(forwards)
    if not chosen or not forwards:
        # Data that can't be read again from their start: the running statistics are the best there is.
        return
    momenta = [layer.momentum for layer in chosen]
    running = [[buffer.clone() for buffer in layer.buffers()] for layer in chosen]
    for layer in chosen:
        layer.reset_running_stats()
        layer.momentum = None
    was_training = model.training
    model.train()
    try:
        for forward in forwards:
            forward()
    finally:
        model.train(was_training)
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
            route = assembly.router.route_of(assembly.router.class_of(batch), step, is_empty=is_empty)
            if route.offered:
                yield partial(_recalibration_pass, assembly, batch, route, step, index)


def _recalibration_pass(assembly: Assembly, batch: Batch, route: Route, step: int, index: int) -> None:
    """Run one microbatch forward, as a step would: in the run's precision, with draws of its own position."""
    a = assembly
    a.generators.seed(position_key(a.config.seed, "recalibrate", step, index))
    # In training mode a layer doesn't read its running statistics: what is put back has changed nothing else.
    untaught = [layer for name, layer in a.statistics.layers.items() if not a.router.teaches(route, name)]
    kept = [(buffer, buffer.clone()) for layer in untaught for buffer in layer.buffers()]
    with a.config.autocast(a.device):
        a.turns[0].loss(a.model, batch.to(a.device).data)
    for buffer, value in kept:
        buffer.copy_(value)
