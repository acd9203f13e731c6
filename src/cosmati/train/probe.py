"""Compares code that can't be digested by what it computes: the loss of one fixed microbatch, in bits.

The microbatch has the shapes of the run's first one and no content of it, so nothing of the data is kept: random
numbers, and integers below the largest that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.batch import Data, iterate_tensors, map_tensors
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.rng import DefaultGenerators
from cosmati.train.loss_state import loss_module

TensorSpec = tuple[list[int], str, int]
"""Shape, dtype, and for integers one more than the largest value."""

_SEED = 0x5EED


class Probe:
    """The loss of a fixed microbatch under a model's present weights.

    Args:
        specs: of the microbatch's tensors, in order; None until a microbatch has been seen.
    """

    def __init__(self, specs: Sequence[TensorSpec] | None = None) -> None:
        self._specs = None if specs is None else [(list(shape), dtype, high) for shape, dtype, high in specs]
        self._data: Data | None = None

    def see(self, data: Data) -> None:
        """Take the form of the run's first microbatch, or after a resume that of any: its shapes are known then."""
        if self._data is not None:
            return
        if self._specs is None:
            self._specs = [_spec(tensor) for tensor in iterate_tensors(data)]
        generator = torch.Generator().manual_seed(_SEED)
        specs = iter(self._specs)
        try:
            self._data = map_tensors(lambda tensor: _draw(next(specs), generator).to(tensor.device), data)
        except StopIteration:
            self._data = None

    def losses(
        self,
        model: nn.Module,
        losses: Sequence[LossFunction],
        generators: DefaultGenerators,
        device: torch.device,
    ) -> list[str | None] | None:
        """Return each loss in hexadecimal, None for one that the microbatch makes no sense to; None before `see`.

        Nothing of model and losses moves: buffers and plain attributes are put back.
        """
        if self._data is None:
            return None
        data = map_tensors(lambda tensor: tensor.to(device), self._data)
        return [self._loss(model, loss, data, generators) for loss in losses]

    def _loss(self, model: nn.Module, loss: LossFunction, data: Data, generators: DefaultGenerators) -> str | None:
        module = loss_module(loss)
        restore = keep_state(model if module is None else nn.ModuleList([model, module]))
        try:
            with torch.no_grad(), generators.restored():
                generators.seed(_SEED)
                result = loss(model, data)
            value = float(result.mean() if isinstance(result, Loss) else result)
        except Exception:  # noqa: BLE001  (the user's own code, on numbers that mean nothing to it)
            return None
        finally:
            restore()
        return value.hex() if math.isfinite(value) else str(value)

    @property
    def specs(self) -> list[TensorSpec] | None:
        """What a checkpoint keeps of it."""
        return self._specs


def keep_state(model: nn.Module) -> Callable[[], None]:
    """Remember what a forward pass may change, buffers and plain attributes; return a function that puts it back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [(module, dict(_plain(module))) for module in model.modules()]

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, values in attributes:
            for name in [name for name, _ in _plain(module) if name not in values]:
                del module.__dict__[name]
            module.__dict__.update(values)

    return restore


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            yield name, value.detach().clone() if not value.requires_grad else value
        elif isinstance(value, bool | int | float | str | None):
            yield name, value


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
