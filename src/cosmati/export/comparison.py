"""Whether an exported model is the one that was measured: its outputs, and the metrics that the run recorded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from cosmati.core.state import model_tensors
from cosmati.errors import ExportError

CallInputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: arguments, and keyword arguments."""
Metrics = Mapping[str, float]

EXACT = 1e-5
"""Relative: the same function on the same rows, however threads cut its sums."""
MOVED = 1e-3
"""Relative or absolute: sums in another order, and a row at a tie may fall on the other side."""
LOW_PRECISION = 2e-2
"""The same of a run in bfloat16, whose unit in the last place is 4e-3."""
_OF_FUNCTION = 1e-9
"""Relative, in float64: beyond this it's another function."""
_OF_FLOAT32 = 1e-3


@dataclass(frozen=True)
class Difference:
    """How far the outputs of two models are apart on the same rows, over the largest output.

    Attributes:
        own: in the model's precision; 0 is bit for bit.
        double: in float64; None where the bits are equal, or the model doesn't run in it.
    """

    own: float
    double: float | None = None

    def __str__(self) -> str:
        if self.own == 0:
            return "equal bit for bit"
        told = f"{self.own:.1e} of the largest output in the model's precision"
        return told + ("" if self.double is None else f", {self.double:.1e} in float64")


@torch.no_grad()
def difference_of(first: nn.Module, second: nn.Module, inputs: CallInputs) -> Difference:
    """Compare the outputs of two models in evaluation mode.

    Raises:
        ExportError: they aren't the same function, or the second one can't be run.
    """
    expected = _outputs(first, inputs)
    try:
        found = _outputs(second, inputs)
    except Exception as error:
        msg = (
            f"The exported model can't be run on the rows that the run's own model takes: {type(error).__name__}: "
            f"{error}. Keep surgery's layers as they are: --keep-surgery, or export(..., fold=False)."
        )
        raise ExportError(msg) from error
    own = _distance(expected, found)
    if own == 0:
        return Difference(own)
    try:
        doubled = tuple(_outputs(copy.deepcopy(model).double(), _doubled(inputs)) for model in (first, second))
        double = _distance(*doubled)
    except (RuntimeError, TypeError, NotImplementedError):  # Kernels of one precision.
        double = None
    dtypes = {value.dtype for value in expected}
    limit = LOW_PRECISION if dtypes & {torch.bfloat16, torch.float16} else _OF_FLOAT32
    if not own <= limit or not (double is None or double <= _OF_FUNCTION):
        msg = (
            f"The exported model isn't the one that was trained: their outputs differ by {Difference(own, double)}. "
            "Nothing was written. Export without folding (--keep-surgery), and report this, please."
        )
        raise ExportError(msg)
    return Difference(own, double)


@torch.no_grad()
def refuse_shared(model: nn.Module, exported: nn.Module, inputs: CallInputs) -> None:
    """Check that an exported model stays what it is when the weights of the run's own model move.

    A copy's closures still name what the original's did.

    Raises:
        ExportError: it reads the other model's weights.
    """
    before = _outputs(exported, inputs)
    held = [value for value in model_tensors(model).values() if not is_expanded(value)]
    kept = [value.clone() for value in held]
    try:
        for value in held:
            value.zero_()
        try:
            after = _outputs(exported, inputs)
        except Exception:  # noqa: BLE001  (whatever a model's code says to zeros)
            after = []
    finally:
        for value, own in zip(held, kept, strict=True):
            value.copy_(own)
    if not _distance(before, after) <= EXACT:
        msg = (
            f"A copy of the {type(model).__name__} still reads weights of the original: through a closure (a lambda, a "
            "hook), or a list that isn't a module's. The exported model would change with the run's. Keep what it "
            "reads as attributes of its modules: self.weight."
        )
        raise ExportError(msg)


def is_expanded(tensor: Tensor) -> bool:
    """Say whether elements share their memory, so that nothing can be written to them."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers back: some models count, or remember, in evaluation too."""
    held = [(m, name, value) for m in model.modules() for name, value in m._buffers.items() if value is not None]  # noqa: SLF001
    copies = [value.clone() for _, _, value in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, value), kept in zip(held, copies, strict=True):
                module._buffers[name] = value  # noqa: SLF001
                if not torch.equal(value, kept):
                    value.copy_(kept)


def _outputs(model: nn.Module, inputs: CallInputs) -> list[Tensor]:
    arguments, keywords = copy.deepcopy(inputs)
    with kept_buffers(model):
        output = model(*arguments, **keywords)
    output = dict(output) if isinstance(output, Mapping) else output
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _doubled(inputs: CallInputs) -> CallInputs:
    def double(leaf: object) -> object:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    doubled: CallInputs = _pytree.tree_map(double, inputs)
    return doubled


def _distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference over the largest value; infinite where they can't be compared."""
    if [value.shape for value in first] != [value.shape for value in second]:
        return math.inf
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        wide, other = a.double(), b.double()
        size = wide[wide.isfinite()].abs().max().item() if bool(wide.isfinite().any()) else 0.0
        # Equal infinities (a mask's) are equal, and so is what both don't know.
        is_equal = (wide == other) | (wide.isnan() & other.isnan())
        gap = torch.where(is_equal, 0.0, (wide - other).abs()).max().item() if wide.numel() else 0.0
        worst = max(worst, math.inf if math.isnan(gap) else gap / max(size, 1e-12))
    return worst


def check_metrics(recorded: Metrics, found: Metrics, tolerance: float, own: Callable[[], Metrics], where: str) -> None:
    """Compare the metrics of the exported model with those that were recorded.

    Args:
        recorded: by name.
        found: of the exported model.
        tolerance: relative, or absolute for values below 1.
        own: measures the run's own model here and now, for the message.
        where: what was evaluated, in words.

    Raises:
        ExportError: one differs, or wasn't measured.
    """
    wrong = [name for name, value in recorded.items() if not _agrees(value, found.get(name), tolerance)]
    if not wrong:
        return
    here = own()
    told = "; ".join(
        f"{name}: recorded {recorded[name]:.6g}, exported {_number(found.get(name))}, "
        f"the run's own model here {_number(here.get(name))}"
        for name in wrong
    )
    own_is_other = any(not _agrees(recorded[name], here.get(name), tolerance) for name in wrong)
    why = (
        "The run's own model gives another value here too: the data to evaluate on, the metric or the machine isn't "
        "the run's. Give the recipe that the run had"
        if own_is_other
        else "The model as it was trained still has it, so it's the export that differs. Use --keep-surgery"
    )
    msg = f"The exported model isn't the one that was measured ({where}). {told}. Nothing was written. {why}."
    raise ExportError(msg)


def _agrees(recorded: float, found: float | None, tolerance: float) -> bool:
    if math.isnan(recorded) and found is not None:
        return not math.isfinite(found)  # JSON has null for an infinity too.
    return is_close(recorded, found, tolerance)


def is_close(first: float, second: float | None, tolerance: float) -> bool:
    """Say whether two figures agree, relative, or absolute for values below 1. No figure agrees with none."""
    if second is None:
        return False
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
