"""Compares what a replica's ranks compute together with what each of them computes by itself, to the last bit.

A model of the user's own says how it's cut (`compute_in_parts`), and a slip there shows on several ranks only: what all
parts read without `copies`, a draw within a part, a part's shape that follows from how many a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cosmati.core.batch import Batch, map_tensors
from cosmati.core.state import tensor_root
from cosmati.core.virtual_shards import ComputesInParts, VirtualShards
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.cutting import shortage
from cosmati.train.held import remember
from cosmati.train.layout.in_replicas import InReplicas

NUM_ROWS = 2
"""Of a microbatch, that are computed whole: a rank has room for a part of one."""
_GRADIENT = "the gradient of"


def refuse_unlike_parts(
    a: Assembly, roots: Mapping[str, object], objective: Callable[[Batch], Tensor], batch: Batch
) -> None:
    """Refuse a model that several ranks compute to other bits than one process, by the names of what differs.

    Args:
        a: the run's assembly, in replicas of several ranks.
        roots: model and losses, whose state is as before afterwards.
        objective: runs some rows forward, always with the same draws, and returns what is differentiated.
        batch: a microbatch, the same on all ranks of a replica. Its first rows are taken.

    Raises:
        PlanError: on all ranks.
    """
    number, model = a.config.virtual_shards, a.model
    parts = a.layout.parts if isinstance(a.layout, InReplicas) else None
    assert number is not None, "in replicas"
    assert parts is not None, "of several ranks"
    assert isinstance(model, ComputesInParts), "it was asked"
    few = batch.select(slice(0, NUM_ROWS))
    put_back = remember(roots)
    differ = set[str]()
    with a.generators.restored():
        try:
            together = _computed(a, objective, few)
            put_back()
            model.compute_in_parts(VirtualShards(number))
            alone = _computed(a, objective, few)
            differ = {name for name in together.keys() | alone.keys() if together.get(name) != alone.get(name)}
            if differ:
                put_back()
                model.compute_in_parts(VirtualShards(number))
                again = _computed(a, objective, few)
                differ &= {name for name in alone if alone[name] == again.get(name)}
        except (RuntimeError, MemoryError) as error:
            if not shortage(error):
                raise
        finally:
            put_back()
            model.compute_in_parts(parts.shards)
    everyone = {name for told in a.ranks.told_by_all({"differ": sorted(differ)}) for name in told["differ"]}
    if found := sorted(everyone, key=lambda name: (name.startswith(_GRADIENT), name)):
        more = f" and {len(found) - 3} more" if found[3:] else ""
        msg = (
            f"With tensor_parallel={a.ranks.degree}, {type(model).__name__} computes other bits than in one process: "
            f"{', '.join(found[:3])}{more}. What all parts read comes through shards.copies or slices, weights through "
            "shards.weights, and what parts give goes through shards.total; a part draws nothing, folds no statistics, "
            "and is computed by itself. Mend compute_in_parts and forward, or leave out tensor_parallel."
        )
        raise PlanError(msg)


def _computed(a: Assembly, objective: Callable[[Batch], Tensor], batch: Batch) -> dict[str, bytes]:
    """Return digests of loss, gradients, BatchNorm's statistics and where the generator of draws stands, by name."""
    mark = a.statistics.clear()
    value = objective(Batch(map_tensors(torch.clone, batch.data), batch.lineage, batch.class_id, batch.band))
    found = {"the loss": value, "draws": torch.get_rng_state()}
    if a.statistics.layers:
        found["statistics"] = a.statistics.read(mark)
    learning = [(p.name, p.tensor) for p in a.layout.parameters if p.tensor.requires_grad]
    if value.requires_grad and learning:
        gradients = torch.autograd.grad(value, [tensor for _, tensor in learning], allow_unused=True)
        named = zip(learning, gradients, strict=True)
        found |= {f"{_GRADIENT} {name}": gradient for (name, _), gradient in named if gradient is not None}
    return {name: tensor_root(name, tensor) for name, tensor in found.items()}
