"""Compares code that can't be digested by what it computes: the loss of one fixed microbatch, in bits.

The microbatch has the shapes of the run's first one and no content of it, so nothing of the data is kept: random
numbers, and integers below the largest that was seen.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cosmati.core.batch import Data, iterate_tensors, map_tensors
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.rng import DefaultGenerators
from cosmati.train.held import places_in

TensorSpec = tuple[list[int], str, int]
"""Shape, dtype, and for integers one more than the largest value."""

_SEED = 0x5EED


class Probe:
    """The loss of a fixed microbatch under a model's present weights, computed on copies of model and loss.

    Where that can't be done without side effects, it isn't: a batch that isn't all tensors, a function that closes over
    modules or containers, what can't be copied, a compiled model, more than `LARGEST` bytes, or a loss that isn't the
    same twice.

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
        try:
            if self._specs is None:
                self._specs = [_spec(tensor) for tensor in iterate_tensors(data)]
            generator = torch.Generator().manual_seed(_SEED)
            specs = iter(self._specs)
            self._data = map_tensors(lambda tensor: _draw(next(specs), generator).to(tensor.device), data)
        except (StopIteration, RuntimeError, TypeError, ValueError, OverflowError):
            self._data = None  # Of a kind that can't be drawn.

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
        try:
            if not _can_be_copied(model, losses):
                self._is_steady = False
                return None
            found = self._on_copies(model, losses, generators, device)
            if self._is_steady is None:
                self._is_steady = found == self._on_copies(model, losses, generators, device)
        except Exception:  # noqa: BLE001  (of the user's own objects, while they're copied)
            self._is_steady = False
        return found if self._is_steady else None

    def _on_copies(
        self, model: nn.Module, losses: Sequence[LossFunction], generators: DefaultGenerators, device: torch.device
    ) -> list[str | None]:
        # Together, so that a loss which holds a part of the model holds the copy's.
        own, copies = copy.deepcopy((model, list(losses)))
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


LARGEST = 1 << 30
"""Bytes of parameters and buffers above which no copy is made."""


def _can_be_copied(model: nn.Module, losses: Sequence[LossFunction]) -> bool:
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if size > LARGEST or hasattr(model, "_orig_mod") or not all(map(_holds_nothing, losses)):
        return False
    # What ends with a copy may be the original's: an open file, a lock.
    roots: dict[str, object] = {"": model}
    roots |= {str(i): getattr(f, "__self__", f) for i, f in enumerate(losses) if not isinstance(f, types.FunctionType)}
    held = [*roots.values(), *(place.value for place in places_in(roots))]
    return not any(hasattr(type(value), "__del__") for value in held)


def _holds_nothing(loss: object) -> bool:
    """Say whether a copy of a loss is apart from it: a function is never copied, nor what it closes over or names."""
    while isinstance(loss, partial):
        if not all(map(_is_constant, (*loss.args, *loss.keywords.values()))):
            return False
        loss = loss.func
    if not isinstance(loss, types.FunctionType):
        return True
    names = _names_in(loss.__code__) - {loss.__name__}
    held = [cell.cell_contents for cell in loss.__closure__ or ()]
    held += [loss.__globals__[name] for name in names if name in loss.__globals__]
    for value in held:
        # A function that is imported from elsewhere is a library's.
        is_library = isinstance(value, types.FunctionType) and value.__module__ != loss.__module__
        if not (
            is_library or (_holds_nothing(value) if isinstance(value, types.FunctionType) else _is_constant(value))
        ):
            return False
    return True


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function's code reads, and the functions within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _is_constant(value: object) -> bool:
    kinds = (bool, int, float, str, bytes, type, types.ModuleType, types.BuiltinFunctionType, types.NoneType)
    return isinstance(value, kinds) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _is_all_tensors(data: Data) -> bool:
    if isinstance(data, Tensor):
        return data.layout is torch.strided
    if isinstance(data, Mapping):
        return all(map(_is_all_tensors, data.values()))
    return isinstance(data, list | tuple) and all(map(_is_all_tensors, data))


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
