"""Several evaluations of a run, by name: each metric is then called by both, as in `validation/accuracy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from cosmati.core.batch import Batch, Data
from cosmati.core.loss import LossFunction
from cosmati.errors import DataError
from cosmati.train.evaluation import Evaluation, evaluate, try_out
from cosmati.train.ranks import Ranks

Evaluations = Evaluation | Mapping[str, Evaluation]
"""What a run measures: one evaluation, or several by their names."""


def checked(given: Evaluations | None) -> Evaluations | None:
    """Return what is given, if it can be measured.

    Raises:
        DataError: it's no evaluation, or one has no name, or a name that can't be told from a metric's.
    """
    if given is None or isinstance(given, Evaluation):
        return given
    if isinstance(given, Mapping):
        for name, one in given.items():
            if not isinstance(one, Evaluation):
                msg = f"evaluation[{name!r}] is a {type(one).__name__}. Give Evaluation(data, metrics)."
                raise DataError(msg)
            if not isinstance(name, str) or not name or "/" in name:
                msg = (
                    f"An evaluation is called {name!r}, and its metrics NAME/METRIC. Give a name without a slash, such "
                    "as 'validation'."
                )
                raise DataError(msg)
        return dict(given) or None
    if isinstance(given, Sequence) and all(isinstance(one, Evaluation) for one in given):
        msg = f"{len(given)} evaluations have no names. Give evaluation={{'validation': ..., 'test': ...}}."
        raise DataError(msg)
    msg = (
        f"evaluation is a {type(given).__name__}, and doesn't say what to measure. Give Evaluation(data, accuracy), or "
        "several by name: {'validation': Evaluation(...), 'test': Evaluation(...)}."
    )
    raise DataError(msg)


def _parts(given: Evaluations) -> Mapping[str, Evaluation]:
    """Return evaluations by what stands before their metrics' names."""
    return {"": given} if isinstance(given, Evaluation) else {f"{name}/": one for name, one in given.items()}


def evaluate_all(
    model: nn.Module,
    given: Evaluations,
    ranks: Ranks,
    device: torch.device,
    autocast: AbstractContextManager[object],
    losses: Sequence[LossFunction] = (),
) -> dict[str, float]:
    """Return each metric of each evaluation, one after the other (see `evaluate`)."""
    return {
        before + name: value
        for before, one in _parts(given).items()
        for name, value in evaluate(model, one, ranks, device, autocast, losses).items()
    }


def try_out_all(
    model: nn.Module,
    given: Evaluations,
    device: torch.device,
    autocast: AbstractContextManager[object],
    losses: Sequence[LossFunction] = (),
) -> None:
    """Compute the metrics of one batch of each (see `try_out`)."""
    for one in _parts(given).values():
        try_out(model, one, device, autocast, losses)


def first_batch(given: Evaluations | None) -> Evaluation | None:
    """Return an evaluation on the first batch of the first one that measures anything; None where none does."""
    for one in _parts(given).values() if given is not None else ():
        if one.metrics:
            return Evaluation([batch for _, batch in zip(range(1), one.read(), strict=False)], one.metrics)
    return None


def held_batches(given: Evaluations | None, metric: str) -> Sequence[Data]:
    """Return the batches that a metric is measured on, where the evaluation holds them in a list; else none."""
    for before, one in _parts(given).items() if given is not None else ():
        if metric.startswith(before) and isinstance(one.data, list | tuple):
            return one.data[: one.num_batches]
    return ()


def batches_of(given: Evaluations | None) -> Iterator[Data]:
    """Yield what is measured on, batch by batch, as the metrics are given it."""
    for one in _parts(given).values() if given is not None else ():
        for batch in one.read():
            yield batch.data if isinstance(batch, Batch) else batch
