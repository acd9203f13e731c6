"""Compares what a replica's ranks compute together with what each of them computes by itself.

A model of the user's own says how it's cut (`compute_in_parts`), and a slip there shows on several ranks only: what all
parts read without `copies`, a draw within a part, a part's shape that follows from how many a rank has. Then any bit
that differs is a slip. A model that is cut by styles sums in another order on several ranks, so what is compared there
is the function, as far as its precision goes; and all ranks of a replica still have to come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.core.batch import Batch, map_tensors
from cosmati.core.state import tensor_root
from cosmati.core.virtual_shards import VirtualShards
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.cutting import shortage
from cosmati.train.held import remember
from cosmati.train.layout.in_replicas import InReplicas, Parts

NUM_ROWS = 2
"""Of a microbatch, that are computed whole: a rank has room for a part of one. Where so few can't be, all of them."""
_GRADIENT, _DRAWS = "the gradient of", "draws"
_SHORT, _MUTE = "short", "mute"
_DIGITS = 16
"""Of a digest, that ranks tell one another."""
_TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-3, 4e-6)}
"""How far another order of a sum may lead, of a tensor's norm, by the type of what is summed; and how much of the
weights is changed to see whether less moves it as far."""
_NARROW = 5e-2, 2e-3
_MOVES = 4
"""How much further than by weights that were moved a little something has to lie, to be told from noise."""
_NOISE = 1e-2
"""Share of all gradients' norm below which one's own is noise: that of attention's key biases is none at all."""

_MEND = (
    "What all parts read comes through shards.copies or slices, weights through shards.weights, and what parts give "
    "goes through shards.total; a part draws nothing, folds no statistics, and is computed by itself. Mend "
    "compute_in_parts and forward"
)
_MEND_STYLES = (
    "Between a colwise layer and the rowwise one that follows, each rank has its own features: what lies there treats "
    "each feature or head by itself, draws nothing, keeps nothing, and has no parameters that aren't cut. Mend "
    "parallel_styles"
)


class _Seen(NamedTuple):
    """What a look found, by name.

    Attributes:
        digests: of all of it.
        tensors: themselves, where only these can be compared.
        tells: some gradient isn't zero, and is finite.
    """

    digests: Mapping[str, bytes]
    tensors: Mapping[str, Tensor]
    tells: bool


_Look = Callable[[Batch, VirtualShards | None], _Seen]
"""Computes some rows in parts, and leaves no trace."""


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
    look = partial(_seen, a, parts, roots, objective)
    with a.generators.restored():
        found = _found(a, parts, look, batch)
    if found:
        more = f" and {len(found) - 3} more" if found[3:] else ""
        what, mend = ("other bits", _MEND) if parts.alone else ("something else", _MEND_STYLES)
        msg = (
            f"With tensor_parallel={a.ranks.degree}, {type(a.model).__name__} computes {what} than in one process: "
            f"{', '.join(found[:3])}{more}. {mend}, or leave out tensor_parallel."
        )
        raise PlanError(msg)


def _found(a: Assembly, parts: Parts, look: _Look, batch: Batch) -> list[str]:
    """Return the names of what any rank finds to differ in a few rows, and in all of them where there's room."""
    found: list[str] = []
    for is_all in (False, True):  # on all ranks alike, whose microbatches may have unlike numbers of rows
        few = batch if is_all else batch.select(slice(0, NUM_ROWS))
        alone = _alone(look, parts, few, is_all=is_all)
        told = {one["alone"] for one in a.ranks.told_by_all({"alone": "seen" if isinstance(alone, _Seen) else alone})}
        if _SHORT in told:
            break
        if isinstance(alone, _Seen) and (is_all or _MUTE not in told):
            own = sorted(_differing(a, parts, look, few, alone))
            everyone = {name for one in a.ranks.told_by_all({"differ": own}) for name in one["differ"]}
            found = sorted(everyone, key=lambda name: (name.startswith(_GRADIENT), name))
            if is_all or not found:
                break
    return found


def _alone(look: _Look, parts: Parts, few: Batch, *, is_all: bool) -> _Seen | str:
    """Return what this rank sees by itself; or that it has no room, or that so few rows say nothing."""
    try:
        seen = look(few, parts.alone)
    except Exception as error:
        if shortage(error):
            return _SHORT
        if is_all:
            raise
        return _MUTE  # model or loss can't take so few
    return seen if seen.tells or is_all else _MUTE


def _differing(a: Assembly, parts: Parts, look: _Look, few: Batch, alone: _Seen) -> set[str]:
    """Return the names of what this rank finds to differ."""
    together = _together(a, parts, look, few)
    tolerance, share = _tolerance(parts.shards)
    apart = _unequal(together, alone) if parts.alone else _far_apart(together, alone, tolerance)
    among = _unlike_among(a, together)
    if apart or among:
        moving = _unequal(alone, look(few, parts.alone))  # which says nothing of parts
        apart, among = apart - moving, among - moving
    if apart and not parts.alone:
        weights = a.layout.weights()
        moved = weights.map(lambda weight: weight.detach() * (1 + share * torch.randn_like(weight)))
        with a.layout.replaced(moved.tensors):
            apart &= _far_apart(together, alone, tolerance, look(few, None))
    return apart | among


def _unlike_among(a: Assembly, seen: _Seen) -> set[str]:
    """Return the names of what the ranks of this one's replica haven't come to alike, to the last bit."""
    own = {name: root.hex()[:_DIGITS] for name, root in seen.digests.items()}
    degree, place = a.ranks.degree, a.ranks.replica * a.ranks.degree
    root = sha256(repr(sorted(own.items())).encode()).hexdigest()
    roots = [one["root"] for one in a.ranks.told_by_all({"root": root})]
    if all(len({*roots[start : start + degree]}) == 1 for start in range(0, len(roots), degree)):
        return set()
    told = a.ranks.told_by_all(own)[place : place + degree]
    return {name for one in told for name in one.keys() | own if one.get(name) != own.get(name)}


def _together(a: Assembly, parts: Parts, look: _Look, batch: Batch) -> _Seen:
    """Compute with the other ranks what each has computed alone; say what is cut where a model's shapes don't follow.

    Memory that's too short ends the run here: the others wait in the middle of a pass.
    """
    try:
        return look(batch, parts.shards)
    except (RuntimeError, ValueError, IndexError) as error:
        if parts.alone is not None or shortage(error) or _is_of_an_exchange(error):
            raise
        msg = (
            f"With tensor_parallel={a.ranks.degree} and these parallel_styles, {type(a.model).__name__} fails: {error}"
            f"{'' if str(error).endswith('.') else '.'} A colwise layer gives each rank its own features, which a "
            "rowwise layer takes; a view between them counts heads by -1. Mend parallel_styles or the model, or leave "
            "out tensor_parallel."
        )
        raise PlanError(msg) from error


def _is_of_an_exchange(error: BaseException) -> bool:
    """Say whether an error comes from a collective: another rank has ended."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, dist.DistError) or where.startswith("torch.distributed")


def _seen(
    a: Assembly,
    parts: Parts,
    roots: Mapping[str, object],
    objective: Callable[[Batch], Tensor],
    batch: Batch,
    shards: VirtualShards | None,
) -> _Seen:
    """Compute some rows in parts, or whole, and put everything back."""
    put_back = remember(roots)
    try:
        parts.compute(shards)
        found = _computed(a, objective, batch)
        digests = {name: tensor_root(name, tensor) for name, tensor in found.items()}
        gradients = [tensor for name, tensor in found.items() if name.startswith(_GRADIENT)]
        tells = any(bool(one.any()) and bool(one.isfinite().all()) for one in gradients)
        return _Seen(digests, {} if parts.alone else found, tells)
    finally:
        put_back()
        parts.compute(parts.shards)


def _computed(a: Assembly, objective: Callable[[Batch], Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return loss, gradients, BatchNorm's statistics, buffers and where the generator of draws stands, by name."""
    mark = a.statistics.clear()
    value = objective(Batch(map_tensors(torch.clone, batch.data), batch.lineage, batch.class_id, batch.band))
    found = {"the loss": value.detach(), _DRAWS: torch.get_rng_state()}
    if a.statistics.layers:
        found["statistics"] = a.statistics.read(mark)
    learning = [(p.name, p.tensor) for p in a.layout.parameters if p.tensor.requires_grad]
    if value.requires_grad and learning:
        gradients = torch.autograd.grad(value, [tensor for _, tensor in learning], allow_unused=True)
        named = zip(learning, gradients, strict=True)
        found |= {f"{_GRADIENT} {name}": gradient for (name, _), gradient in named if gradient is not None}
    found |= {f"the buffer {name}": buffer.detach().clone() for name, buffer in a.model.named_buffers()}
    return found


def _unequal(one: _Seen, other: _Seen) -> set[str]:
    """Return the names of what isn't equal to the last bit."""
    names = one.digests.keys() | other.digests.keys()
    return {name for name in names if one.digests.get(name) != other.digests.get(name)}


def _tolerance(shards: VirtualShards) -> tuple[float, float]:
    """Return how far sums may differ, by the narrowest type of what was summed; and by how much to change weights."""
    found = [_TOLERANCES.get(kind, _NARROW) for kind in shards.kinds]
    return max(found, default=_TOLERANCES[torch.float32])


def _far_apart(one: _Seen, other: _Seen, tolerance: float, moved: _Seen | None = None) -> set[str]:
    """Return the names of the tensors that differ by more than the order of sums explains.

    Args:
        one: seen in one order.
        other: in another.
        tolerance: share of a tensor's norm.
        moved: as the other, where weights were moved a little: a difference of that kind says nothing.
    """
    gradients = [_norm(_real(tensor)) for name, tensor in one.tensors.items() if name.startswith(_GRADIENT)]
    noise = _NOISE * torch.stack(gradients).norm() if gradients else 0.0

    def agree(name: str) -> bool:
        found = [seen.tensors.get(name) for seen in (one, other, moved or other)]
        first, second, third = (None if tensor is None else _real(tensor) for tensor in found)
        if first is None or second is None or third is None or first.shape != second.shape:
            return False
        about = _norm(second) + (noise if name.startswith(_GRADIENT) else 0.0)
        room = 0.0 if name == _DRAWS else tolerance * about + _MOVES * _distance(third, second)
        return bool(_distance(first, second) <= room)

    return {name for name in one.tensors.keys() | other.tensors.keys() if not agree(name)}


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0))
    return norm


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the norm of a difference; what isn't finite differs from nothing that is the same."""
    same = (one == other) | (one.isnan() & other.isnan())
    norm: Tensor = torch.linalg.vector_norm(torch.where(same, 0.0, one - other))
    return norm
