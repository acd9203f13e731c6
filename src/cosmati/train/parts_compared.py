"""Compares what a replica's ranks compute together with what each of them computes by itself, before a first step.

A model of the user's own says how it's cut (`compute_in_parts`), and a slip there shows on several ranks only: what all
parts read without `copies`, a draw within a part, a part's shape that follows from how many a rank has. Then any bit
that differs is a slip. A model that is cut by styles sums in another order on several ranks, so what is compared there
is the function, as far as its precision goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cosmati.core.batch import Batch, map_tensors
from cosmati.core.state import tensor_root
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.cutting import shortage
from cosmati.train.held import remember
from cosmati.train.layout.in_replicas import InReplicas, Parts

NUM_ROWS = 2
"""Of a microbatch, that are computed whole: a rank has room for a part of one."""
_GRADIENT = "the gradient of"
_LOSS = "the loss"
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How far another order of a sum may lead, of a tensor's norm, by the type that products are taken in."""
_NARROW_TOLERANCE = 5e-2
_NOISE = 1e-2
"""Share of all gradients' norm below which one's own is noise: that of attention's key biases is none at all."""

_MEND = (
    "What all parts read comes through shards.copies or slices, weights through shards.weights, and what parts give "
    "goes through shards.total; a part draws nothing, folds no statistics, and is computed by itself. Mend "
    "compute_in_parts and forward"
)
_MEND_STYLES = (
    "Between a colwise layer and the rowwise one that follows, each rank has its own features: what lies there treats "
    "each feature or head by itself, draws nothing, folds no statistics, and has no parameters that aren't cut. Mend "
    "parallel_styles"
)
_Compared = Callable[[Mapping[str, Any], Mapping[str, Any]], set[str]]
"""Names what differs."""


def refuse_unlike_parts(
    a: Assembly, roots: Mapping[str, object], objective: Callable[[Batch], Tensor], batch: Batch
) -> None:
    """Refuse a model that several ranks compute otherwise than one process, by the names of what differs.

    Args:
        a: the run's assembly, in replicas of several ranks.
        roots: model and losses, whose state is as before afterwards.
        objective: runs some rows forward, always with the same draws, and returns what is differentiated.
        batch: a microbatch, the same on all ranks of a replica. Its first rows are taken.

    Raises:
        PlanError: on all ranks.
    """
    parts = a.layout.parts if isinstance(a.layout, InReplicas) else None
    assert parts is not None, "in replicas of several ranks"
    few = batch.select(slice(0, NUM_ROWS))
    looked_at: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = _tensors if parts.alone is None else _digests
    unlike: _Compared = _far_apart(a) if parts.alone is None else _unequal
    put_back = remember(roots)
    differ = set[str]()
    with a.generators.restored():
        try:
            together = looked_at(_together(a, parts, objective, few))
            put_back()
            parts.compute(parts.alone)
            alone = looked_at(_computed(a, objective, few))
            differ = unlike(together, alone)
            if differ:
                put_back()
                parts.compute(parts.alone)
                differ -= unlike(alone, looked_at(_computed(a, objective, few)))
        except (RuntimeError, MemoryError) as error:
            if not shortage(error):
                raise
        finally:
            put_back()
            parts.compute(parts.shards)
    everyone = {name for told in a.ranks.told_by_all({"differ": sorted(differ)}) for name in told["differ"]}
    if found := sorted(everyone, key=lambda name: (name.startswith(_GRADIENT), name)):
        more = f" and {len(found) - 3} more" if found[3:] else ""
        what, mend = ("other bits", _MEND) if parts.alone else ("something else", _MEND_STYLES)
        msg = (
            f"With tensor_parallel={a.ranks.degree}, {type(a.model).__name__} computes {what} than in one process: "
            f"{', '.join(found[:3])}{more}. {mend}, or leave out tensor_parallel."
        )
        raise PlanError(msg)


def _together(a: Assembly, parts: Parts, objective: Callable[[Batch], Tensor], batch: Batch) -> Mapping[str, Tensor]:
    """Compute with the other ranks; say what is cut where a model's shapes don't follow."""
    try:
        return _computed(a, objective, batch)
    except (RuntimeError, ValueError, IndexError) as error:
        if parts.alone is not None or shortage(error):
            raise
        msg = (
            f"With tensor_parallel={a.ranks.degree} and these parallel_styles, {type(a.model).__name__} fails: {error}"
            f"{'' if str(error).endswith('.') else '.'} A colwise layer gives each rank its own features, which a "
            "rowwise layer takes; a view between them counts heads by -1. Mend parallel_styles or the model, or leave "
            "out tensor_parallel."
        )
        raise PlanError(msg) from error


def _computed(a: Assembly, objective: Callable[[Batch], Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return loss, gradients, BatchNorm's statistics and where the generator of draws stands, by name."""
    mark = a.statistics.clear()
    value = objective(Batch(map_tensors(torch.clone, batch.data), batch.lineage, batch.class_id, batch.band))
    found = {_LOSS: value, "draws": torch.get_rng_state()}
    if a.statistics.layers:
        found["statistics"] = a.statistics.read(mark)
    learning = [(p.name, p.tensor) for p in a.layout.parameters if p.tensor.requires_grad]
    if value.requires_grad and learning:
        gradients = torch.autograd.grad(value, [tensor for _, tensor in learning], allow_unused=True)
        named = zip(learning, gradients, strict=True)
        found |= {f"{_GRADIENT} {name}": gradient for (name, _), gradient in named if gradient is not None}
    return found


def _digests(found: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor_root(name, tensor) for name, tensor in found.items()}


def _unequal(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _tensors(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in found.items()}


def _far_apart(a: Assembly) -> _Compared:
    """Return what names the tensors that differ by more than the order of sums explains."""
    kinds = {p.tensor.dtype for p in a.layout.parameters}
    narrow = a.config.precision != "float32" or not kinds <= _TOLERANCES.keys()
    tolerance = _NARROW_TOLERANCE if narrow else max(_TOLERANCES[kind] for kind in kinds)

    def compared(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
        gradients = [tensor.double().norm() for name, tensor in one.items() if name.startswith(_GRADIENT)]
        noise = _NOISE * torch.stack(gradients).norm() if gradients else 0.0

        def agree(name: str) -> bool:
            if name not in one or name not in other or one[name].shape != other[name].shape:
                return False
            first, second = one[name].double(), other[name].double()
            about = second.norm() + (noise if name.startswith(_GRADIENT) else 0.0)
            return bool((first - second).norm() <= (0.0 if name == "draws" else tolerance) * about)

        return {name for name in one.keys() | other.keys() if not agree(name)}

    return compared
