"""Compares code that can't be digested by what it computes: the loss of one fixed microbatch, in bits.

The microbatch has the shapes of the run's first one and no content of it, so nothing of the data is kept: random
numbers, and integers below the largest that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from cosmati.core.batch import Data, map_tensors
from cosmati.core.containers import rebuilt, with_items
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.rng import DefaultGenerators
from cosmati.train.apart import apart
from cosmati.train.held import places_in, remember
from cosmati.train.values import content_of

TensorSpec = tuple[list[int], str, int]
"""Shape, dtype, and for integers one more than the largest value."""

_SEED = 0x5EED


class Probe:
    """The loss of a fixed microbatch under a model's present weights, computed on copies of model and loss.

    Their code finds copies of what it names, too (`apart`). Where that can't be done it isn't: a batch that isn't all
    tensors, what can't be copied, a compiled model, more than `LARGEST` bytes, or a loss that isn't the same twice.

    Args:
        specs: of the microbatch's tensors, in order; None until a microbatch has been seen.
    """

    def __init__(self, specs: Sequence[TensorSpec] | None = None) -> None:
        self._specs = None if specs is None else [(list(shape), dtype, high) for shape, dtype, high in specs]
        self._data: Data | None = None
        self._is_steady: bool | None = None

    def see(self, data: Data) -> None:
        """Take the form of the run's first microbatch, or after a resume that of any: its shapes are known then."""
        if self._data is not None or not _is_all_tensors(data):
            return
        # There's none of a kind that can't be drawn.
        with suppress(AttributeError, StopIteration, RuntimeError, TypeError, ValueError, OverflowError):
            if self._specs is None:
                found: list[TensorSpec] = []

                def note(tensor: Tensor) -> Tensor:
                    found.append(_spec(tensor))
                    return tensor

                _by_name(note, data)
                self._specs = found
            generator = torch.Generator().manual_seed(_SEED)
            specs = iter(self._specs)
            self._data = _by_name(lambda tensor: _draw(next(specs), generator).to(tensor.device), data)

    def losses(
        self,
        model: nn.Module,
        losses: Sequence[LossFunction],
        generators: DefaultGenerators,
        device: torch.device,
    ) -> list[str | None] | None:
        """Return each loss in hexadecimal, None for one that the microbatch makes no sense to; None if it can't be.

        The model is in eval mode: layers that a method sets in each step (which rows a mask hides) then don't count.
        """
        if self._data is None or self._is_steady is False:
            return None
        if hasattr(model, "_orig_mod"):
            return None
        run = partial(self._on_copies, model, losses, generators, device)
        try:
            if self._is_steady is not None:
                return run()
            roots = {"": model, **{str(index): loss for index, loss in enumerate(losses)}}
            before, put_back = _state(roots), remember(roots)
            found = run()
            is_moved = found != run() or _state(roots) != before
            if is_moved:
                put_back()
        except Exception:  # noqa: BLE001  (of the user's own objects, while they're copied)
            is_moved = True
        self._is_steady = not is_moved
        return None if is_moved else found

    def _on_copies(
        self, model: nn.Module, losses: Sequence[LossFunction], generators: DefaultGenerators, device: torch.device
    ) -> list[str | None]:
        # Together, so that a loss which holds a part of the model holds the copy's.
        with apart((model, list(losses))) as (own, copies):
            own.eval()
            return [self._loss(own, loss, generators, device) for loss in copies]

    def _loss(
        self, model: nn.Module, loss: LossFunction, generators: DefaultGenerators, device: torch.device
    ) -> str | None:
        data = map_tensors(lambda tensor: tensor.clone().to(device), self._data)
        try:
            with torch.no_grad(), generators.restored():
                generators.seed(_SEED)
                value = _mean(loss(model, data))
        except Exception:  # noqa: BLE001  (the user's own code, on numbers that mean nothing to it)
            return None
        return value.hex() if math.isfinite(value) else str(value)

    @property
    def specs(self) -> list[TensorSpec] | None:
        """What a checkpoint keeps of it."""
        return self._specs


def _state(roots: Mapping[str, object]) -> dict[str, object]:
    return {place.name: content_of(place.value) for place in places_in(roots) if place.kind != "parameter"}


def _is_all_tensors(data: Data) -> bool:
    if isinstance(data, Tensor):
        return data.layout is torch.strided and not data.is_nested
    if isinstance(data, Mapping):
        return all(map(_is_all_tensors, data.values()))
    return isinstance(data, list | tuple) and all(map(_is_all_tensors, data))


def _by_name(function: Callable[[Tensor], Tensor], data: Data) -> Data:
    """Apply a function to every tensor, in a mapping in the names' order: each process may have another of its own."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return with_items(data, {name: _by_name(function, data[name]) for name in sorted(data, key=repr)})
    return rebuilt(partial(_by_name, function), data)


def _mean(result: object) -> float:
    if not isinstance(result, Tensor | Loss):
        result = result["loss"] if isinstance(result, Mapping) else getattr(result, "loss")  # noqa: B009
    return float(result.mean() if isinstance(result, Loss) else result)  # type: ignore[arg-type]


def _spec(tensor: Tensor) -> TensorSpec:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    high = int(tensor.long().max()) + 1 if is_whole and tensor.numel() else 1
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), max(1, high)


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    shape, name, high = spec
    dtype: torch.dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, generator=generator).to(dtype)
    return torch.randint(0, high, shape, generator=generator).to(dtype)
