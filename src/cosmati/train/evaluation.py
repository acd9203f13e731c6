"""Evaluation: metrics summed in canonical order, on the weights that the methods say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, count_rows, input_of, target_of
from cosmati.core.labels import IGNORED, with_own_labels
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.named_settings import KnownNames
from cosmati.core.nest import moved, select_rows
from cosmati.core.out_of_range import refuse_index
from cosmati.core.own_loss import own_logits
from cosmati.data.foreign import refuse_part, refuse_rows, refuse_shares, shuffles
from cosmati.data.loader import StreamingLoader
from cosmati.errors import BatchError, DataError
from cosmati.methods.isolated_adapters import enabled_classes
from cosmati.records.run import CLOCK_FIELDS
from cosmati.train.forward_watch import loss_roots
from cosmati.train.held import places_in, remember
from cosmati.train.loss_state import loss_module
from cosmati.train.marks import Mark, Repeated
from cosmati.train.ranks import Ranks
from cosmati.train.recalibration import put_back_modes
from cosmati.train.written import WRITTEN, WrittenHere

Metric = Callable[[nn.Module, Data], "Loss | Tensor | float"]


class StatefulMetric(Protocol):
    """A metric that isn't a mean over rows (macro-F1, AUROC): it's fed batch by batch, and asked at the end.

    torchmetrics' are such metrics.
    """

    def reset(self) -> None:
        """Forget everything."""
        ...

    def update(self, *outputs: Any) -> None:  # noqa: ANN401  (the metric's own)
        """Take note of a batch's outputs."""
        ...

    def compute(self) -> Any:  # noqa: ANN401
        """Return the value: a number, a scalar tensor, or a dictionary of these."""
        ...


def output_and_target(model: nn.Module, data: Data) -> tuple[Data, Data]:
    """Return what the model gives for the batch's input, and the batch's target."""
    return model(input_of(data)), target_of(data)


@dataclass(frozen=True)
class Stateful:
    """A stateful metric, and what it's fed with.

    Every rank feeds it with all batches, in their order, so that it has one value, whatever the number of ranks.

    Args:
        metric: an object with `update`, `compute` and `reset`.
        outputs: gives the arguments of `update` for a model and a batch.

    Example:
        >>> Stateful(MulticlassF1Score(10, average="macro"), lambda model, data: (model(data[0]).argmax(1), data[1]))
    """

    metric: StatefulMetric
    outputs: Callable[[nn.Module, Data], Sequence[Any]] = output_and_target


AnyMetric = Metric | Stateful | StatefulMetric


@dataclass(frozen=True)
class Evaluation(KnownNames):
    """What is measured, and on what.

    Args:
        data: batches, the same ones each time; a list, a DataLoader that doesn't shuffle, or `batches(...)`.
        metrics: functions of model and batch that return `Loss(sum, weight)`, or a scalar mean of the batch; or
            stateful metrics (`Stateful`), which are given the model's output and the target where nothing else is said.
            By name; or a list of them, or one alone, which are called as their functions or classes are.
        num_batches: measure on the first so many batches; None takes all.
        classes: whose own adapters and experts run on these batches (`IsolatedAdapters`); by default nobody's.

    Raises:
        DataError: the data give rows, can be read only once, or are this rank's share; or the first batches are others
            each time.
        ValueError: two metrics have one name, or one has none, or one that the run's clock has.
    """

    other_names: ClassVar = {"subset_num_batches": "num_batches", "dataloader": "data", "metric": "metrics"}
    data: Iterable[Data]
    metrics: Mapping[str, AnyMetric] | Sequence[AnyMetric] | AnyMetric = field(default_factory=dict)
    num_batches: int | None = None
    classes: str | Sequence[str] = ()
    _written: WrittenHere = field(default_factory=WrittenHere, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse_rows(self.data)
        refuse_shares(self.data)
        if isinstance(self.data, Iterator):
            msg = (
                f"A {type(self.data).__name__} can be read only once, and every evaluation reads the data. Give "
                "list(...) of it, a DataLoader, or batches(...)."
            )
            raise DataError(msg)
        refuse_part(self.data, self.num_batches)
        self.by_name()

    def read(self) -> Iterator[Data]:
        """Yield what is measured on, the same batches each time: a `StreamingLoader`'s of its first epoch."""
        data = self.data.first_epoch() if isinstance(self.data, StreamingLoader) else self.data
        return islice(data, self.num_batches)

    def by_name(self) -> Mapping[str, AnyMetric]:
        """Return the metrics by their names.

        Raises:
            ValueError: two have one name, or one has none, or one that the run's clock has.
        """
        if isinstance(self.metrics, Mapping):
            return _not_the_clocks(self.metrics)
        given = list(self.metrics) if isinstance(self.metrics, Sequence) else [self.metrics]
        names = [_name_of(one) for one in given]
        if nameless := sorted({name for name in names if names.count(name) > 1 or name == "<lambda>"}):
            msg = (
                f"Metrics in a list are called as their functions or classes are, and these have no name of their own: "
                f"{', '.join(nameless)}. Name them: Evaluation(data, {{'accuracy': ..., 'loss': ...}})."
            )
            raise ValueError(msg)
        return _not_the_clocks(dict(zip(names, given, strict=True)))

    @contextmanager
    def unchanged(self, batch: Data, index: int) -> Iterator[None]:
        """Look whether metrics change a batch in place, as long as the data hold it.

        Raises:
            DataError: they have, and the next evaluation would measure other rows, or this one does.
        """
        has_changed, mark = WRITTEN.has_part_of(batch), Mark(batch)
        if not has_changed:
            yield
            changed = mark.changed_in(batch)
            self._written.add(changed)
            has_changed = bool(changed) and isinstance(self.data, list | tuple)
        if has_changed:
            msg = (
                f"Batch {index} of the data to evaluate on was changed in place, by a metric, a loss or the model's "
                "first layers: the next evaluation would measure other rows. Let these change a copy (x = x.clone(); "
                "ReLU without inplace=True)."
            )
            raise DataError(msg)


def _not_the_clocks(metrics: Mapping[str, AnyMetric]) -> Mapping[str, AnyMetric]:
    if taken := [name for name in metrics if name in CLOCK_FIELDS]:
        msg = (
            f"A metric is called {taken[0]!r}, and a run's files have its clock under that name. Give it another one: "
            f"{{'mean {taken[0]}': ...}}."
        )
        raise ValueError(msg)
    return metrics


def _name_of(metric: AnyMetric) -> str:
    own = metric.metric if isinstance(metric, Stateful) else metric
    return getattr(own, "__name__", None) or type(own).__name__


def batches(data: Data, rows: int) -> list[Data]:
    """Cut a nest of tensors into batches of so many rows; the last one may be smaller."""
    num_rows = count_rows(data)
    return [select_rows(data, slice(i, i + rows), num_rows) for i in range(0, num_rows, rows)]


def accuracy(model: nn.Module, data: Data) -> Loss:
    """Count the rows whose largest logit is at the target's index; probabilities have theirs at the largest.

    Of a Hugging Face model that has labels, those that count: -100 doesn't.
    """
    if isinstance(data, Mapping) and "labels" in data and with_own_labels(model) is not None:
        logits, labels = own_logits(model, data)
        return Loss((logits.argmax(1) == labels).sum(), (labels != IGNORED).sum())
    logits, target = model(input_of(data)), target_of(data)
    hits = logits.argmax(1) == (target.argmax(1) if target.shape == logits.shape else target)
    return Loss(hits.sum(), float(hits.numel()))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    evaluation: Evaluation,
    ranks: Ranks,
    device: torch.device,
    autocast: AbstractContextManager[object],
    losses: Sequence[LossFunction] = (),
) -> dict[str, float]:
    """Return each metric over all batches; model and losses are in eval mode meanwhile.

    Batches are shared out over the ranks; their sums are added in the batches' order in float64, so a metric has one
    value, whatever the number of ranks. Stateful metrics see every batch on every rank.

    Raises:
        BatchError: a metric returns something else than a number.
        DataError: several ranks are given a loader that shuffles, and would not share out the same batches; or a metric
            changes its batch in place.
    """
    if ranks.world > 1 and shuffles(evaluation.data):
        msg = "Ranks share out the batches to evaluate on, and this loader shuffles on each. Give it shuffle=False."
        raise DataError(msg)
    means, stateful = _kinds(evaluation.by_name())
    world = ranks.num_replicas
    classes = (evaluation.classes,) if isinstance(evaluation.classes, str) else tuple(evaluation.classes)
    enabled = enabled_classes(model, *classes) if classes else nullcontext()
    with _in_eval_mode([model, *_modules_of(losses)]), enabled:
        rows: dict[int, list[float]] = {}
        num_batches = 0
        for one in stateful.values():
            _start(one.metric, device)
        with ranks.together():
            for index, given in enumerate(evaluation.read()):
                num_batches += 1
                is_mine = index % world == ranks.replica
                if is_mine or stateful:
                    data = given.data if isinstance(given, Batch) else given
                    with evaluation.unchanged(data, index), autocast:
                        found = _read_by({**(means if is_mine else {}), **stateful}, model, moved(data, device))
                    if is_mine:
                        rows[index] = found
    width = 2 * len(means)
    padded = [rows.get(index, [0.0] * width) for index in range(ranks.replica, -(-num_batches // world) * world, world)]
    own = torch.tensor(padded, dtype=torch.float64, device=device).reshape(len(padded), width)
    by_replica = ranks.gather_by_replica(own).view(world, *own.shape)
    table = by_replica.transpose(0, 1).reshape(world * len(padded), width).cpu()
    values = {
        name: _ordered_sum(table[:, 2 * i]) / max(_ordered_sum(table[:, 2 * i + 1]), 1e-300)
        for i, name in enumerate(means)
    }
    for name, one in stateful.items():
        values |= _computed(name, one.metric)
    return values


def _read_by(metrics: Mapping[str, Metric | Stateful], model: nn.Module, data: Data) -> list[float]:
    """Give a batch to each metric, in containers of its own; return sums and weights of those that are means."""
    batch, found = Repeated([data]), list[float]()
    for name, metric in metrics.items():
        (own,) = batch.given_to(f"The metric {name!r}")
        try:
            if isinstance(metric, Stateful):
                metric.metric.update(*metric.outputs(model, own))
            else:
                found += _measure(name, metric(model, own), data)
        except IndexError as error:
            refuse_index(error)
            raise
    return found


def try_out(
    model: nn.Module,
    evaluation: Evaluation,
    device: torch.device,
    autocast: AbstractContextManager[object],
    losses: Sequence[LossFunction] = (),
) -> None:
    """Compute the metrics of one batch, to find before the first step what would fail at the first evaluation.

    Only a list's: a loader would start its workers and draw from its generator. Stateful metrics are left out, since
    some make no sense of one batch.
    """
    if isinstance(evaluation.data, list | tuple) and evaluation.data:
        with kept_state(model, losses):
            means, _ = _kinds(evaluation.by_name())
            first = Evaluation(evaluation.data[:1], means, classes=evaluation.classes)
            evaluate(model, first, Ranks.alone(), device, autocast, losses)


def _kinds(metrics: Mapping[str, AnyMetric]) -> tuple[dict[str, Metric], dict[str, Stateful]]:
    """Tell metrics that are means from stateful ones; torchmetrics' can be called too, and that is something else."""
    means: dict[str, Metric] = {}
    stateful: dict[str, Stateful] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Stateful):
            stateful[name] = metric
        elif all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            stateful[name] = Stateful(cast("StatefulMetric", metric))
        else:
            means[name] = cast("Metric", metric)
    return means, stateful


def _start(metric: StatefulMetric, device: torch.device) -> None:
    metric.reset()
    if isinstance(metric, nn.Module):
        metric.to(device)


def _computed(name: str, metric: StatefulMetric) -> dict[str, float]:
    """Return a stateful metric's values, by name.

    torchmetrics' would gather those of all ranks, which have seen the same batches, and count each row W times.
    """
    parts = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    kept = [(part, flag, getattr(part, flag)) for part in parts for flag in _SYNCING if hasattr(part, flag)]
    try:
        for part, flag, _ in kept:
            setattr(part, flag, False)
        value = metric.compute()
    finally:
        for part, flag, own in kept:
            setattr(part, flag, own)
    values = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return {key: _number(key, one) for key, one in values.items()}


_SYNCING = ("sync_on_compute", "_to_sync")


def _measure(name: str, result: Loss | Tensor | float, data: Data) -> Sequence[float]:
    if isinstance(result, Loss):
        return _number(name, result.sum), _number(name, result.weight)
    weight = float(count_rows(data))
    return _number(name, result) * weight, weight


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float | np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    msg = (
        f"The metric {name!r} returned a {type(value).__name__}{shape}, and a metric is one number: a scalar, or "
        "Loss(sum, weight). Give each value a metric of its own, metrics={'a': ..., 'b': ...}."
    )
    raise BatchError(msg)


def _ordered_sum(values: Tensor) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def _modules_of(losses: Sequence[LossFunction]) -> Iterator[nn.Module]:
    """Yield the modules that losses are, or hold anything of."""
    yield from (module for loss in losses if (module := loss_module(loss)) is not None)
    yield from (place.owner for place in places_in(loss_roots(losses)) if place.owner is not None)


@contextmanager
def _in_eval_mode(roots: Sequence[nn.Module]) -> Iterator[None]:
    flags = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        put_back_modes(flags)


@contextmanager
def kept_state(model: nn.Module, losses: Sequence[LossFunction] = ()) -> Iterator[None]:
    """Put back what a model and losses hold beside parameters: buffers, attributes, what hooks remember.

    A loss may be a metric, too, or a part of one.
    """
    put_back = remember({"": model, **loss_roots(losses)})
    try:
        yield
    finally:
        put_back()
