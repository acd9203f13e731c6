"""How many labels a batch has that aren't ignored: what a bare scalar may be the mean of."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data, target_of
from cosmati.core.nest import children
from cosmati.errors import BatchError

IGNORED = -100
"""The label that PyTorch's and Hugging Face's losses leave out."""

_WIDE = (torch.int64, torch.int32)
"""Types of labels. Narrower ones hold sound, say, where -100 is a value like any other."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")

_known: WeakKeyDictionary[nn.Module, bool | None] = WeakKeyDictionary()
"""What `predicts_next` has found."""


class LabelCount(NamedTuple):
    """The labels of a microbatch.

    Attributes:
        total: labels in its target, and in whatever else has ignored ones; 0 where there is neither.
        key: equal for microbatches with equally many labels in each of their tensors, and above 0.
    """

    total: Tensor | float
    key: Tensor | float


def count_labels(model: nn.Module, data: Data) -> LabelCount:
    """Count the labels that aren't ignored (-100), wherever they are: what a mean over them divides by.

    What has no -100 and isn't the batch's target isn't taken for labels.

    Args:
        model: tells whether the first label of a row is predicted.
        data: of a microbatch.
    """
    try:
        target = target_of(data)
    except BatchError:
        target = None
    total: Tensor | float = 0.0
    key: Tensor | float = 1.0
    elsewhere: list[tuple[Tensor, bool, int]] = []
    for index, found in enumerate(_integers(data, target)):
        is_tensor = isinstance(found, Tensor)
        is_target = is_tensor and found is target
        labels = _predicted(model, found) if is_tensor else found
        if isinstance(labels, Tensor) and not labels.is_cpu:
            elsewhere.append((labels, is_target, index))
            continue
        # By NumPy: 2 us for a small tensor, where PyTorch takes 6.
        values = np.asarray(labels)
        ignored = int(np.count_nonzero(values == IGNORED))
        if ignored or is_target:
            total += values.size - ignored
            key += (1 + values.size - ignored) * _factor(index)
    if elsewhere:
        more = _count_elsewhere(elsewhere)
        total, key = total + more[0], key + more[1]
    return LabelCount(total, key)


def _count_elsewhere(found: list[tuple[Tensor, bool, int]]) -> Tensor:
    """Return total and key of an accelerator's tensors, without waiting for it: float64 [2]."""
    ignored = torch.stack([(labels == IGNORED).sum() for labels, _, _ in found])
    known = tuple((labels.numel(), is_target, _factor(index)) for labels, is_target, index in found)
    sizes, targets, factors = _constants(known, ignored.device)
    labels = torch.where((ignored > 0) | (targets > 0), sizes - ignored + 1, 0)
    return torch.stack([(labels - labels.sign()).sum(), (labels * factors).sum()])


@lru_cache(maxsize=64)
def _constants(known: tuple[tuple[float, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Keep them on the device: to send them there takes as long as all the rest."""
    return torch.tensor(known, dtype=torch.float64, device=device).unbind(1)


@lru_cache(maxsize=64)
def _factor(index: int) -> float:
    """Return what a tensor's count is multiplied by in the key.

    Powers of e to different fractions: no two sets of counts have the same sum (Lindemann and Weierstrass).
    """
    return math.exp(1 / (1 + index))


def _integers(data: Data, target: Data) -> Iterator[Any]:
    """Yield the target, if it holds integers, and every tensor, array or list of numbers that may hold labels."""
    if isinstance(data, Tensor):
        is_dense = data.layout is torch.strided
        if is_dense and (data.dtype in _WIDE or (data is target and not data.is_floating_point())):
            yield data
    elif isinstance(data, np.ndarray):
        if data.dtype in (np.int64, np.int32):
            yield data
    elif not isinstance(data, str | bytes):
        numbers = [child for child in data if type(child) is int] if isinstance(data, list | tuple) else []
        if numbers:
            yield numbers
        for child in children(data):
            # A batch may have many strings.
            if not isinstance(child, str | int | float):
                yield from _integers(child, target)


def _predicted(model: nn.Module, labels: Tensor) -> Tensor:
    """Leave out the first label of each row where the model predicts a row's next token from those before."""
    return labels[..., 1:] if labels.ndim > 1 and predicts_next(model) else labels


def count_own_labels(model: nn.Module, labels: Tensor) -> Tensor:
    """Count the labels over which a Hugging Face model averages its loss.

    Raises:
        BatchError: it can't be told: it holds several models that differ, or a loss of the user's.
    """
    if labels.ndim > 1 and predicts_next(model) is None:
        msg = (
            f"Over how many labels the {type(model).__name__} averages can't be told: it holds several Hugging Face "
            "models, of which only some leave out each row's first label, or a loss_function of your own. Write a "
            "loss function that returns Loss(mean * num_labels, num_labels)."
        )
        raise BatchError(msg)
    return (_predicted(model, labels) != IGNORED).sum()


def predicts_next(model: nn.Module) -> bool | None:
    """Say whether a model's own loss shifts the labels by one, and so leaves out each row's first.

    Looks into what is compiled, distributed, adapted or wrapped. None where the models inside differ, or have a loss of
    the user's.
    """
    if model not in _known:
        found = _verdicts(model)
        _known[model] = found.pop() if len(found) == 1 else None if found else False
    return _known[model]


def with_own_labels(module: nn.Module) -> Any:  # noqa: ANN401  (a model of transformers, which nothing here imports)
    """Return the Hugging Face model that computes a loss from `labels`: a module, or the one inside that does.

    None where there is none, or where there are several.
    """
    found = list(_labelled(module))
    return found[0] if len(found) == 1 else None


def _labelled(module: nn.Module) -> Iterator[nn.Module]:
    if _own_forward(module) is not None:
        yield module
        return
    for child in module.children():
        yield from _labelled(child)


def _own_forward(module: nn.Module) -> tuple[str, Any] | None:
    """Return the class's name and the forward function of a Hugging Face model that takes `labels`; else None."""
    for kind in type(module).__mro__:
        forward = vars(kind).get("forward")
        if forward is not None and kind.__module__.startswith("transformers."):
            function = inspect.unwrap(forward)
            if "labels" in inspect.signature(function).parameters:
                return kind.__name__, function
    return None


def _verdicts(module: nn.Module) -> set[bool | None]:
    own = _own_forward(module)
    if own is not None:
        return {_shifts(module, *own)}
    found = set[bool | None]().union(*(_verdicts(child) for child in module.children()))
    return found or ({True} if type(module).__name__.endswith(_CAUSAL) else found)


def _shifts(module: nn.Module, name: str, forward: Any) -> bool | None:  # noqa: ANN401  (a function, as mypy sees none)
    """Say whether one of Hugging Face's models does; None where its loss was exchanged.

    Names aren't enough: BartForCausalLM doesn't, nor does T5ForConditionalGeneration, and LlavaForConditionalGeneration
    does. Those that do call `self.loss_function`, which tells its name, or, in earlier releases, shift by themselves.
    """
    if "loss_function" in forward.__code__.co_names:
        loss = getattr(module, "loss_function", None)
        is_own = str(getattr(loss, "__module__", "")).startswith("transformers.")
        return getattr(loss, "__name__", "") == "ForCausalLMLoss" if is_own else None
    return name.endswith(_CAUSAL) and any("shift" in local for local in forward.__code__.co_varnames)
