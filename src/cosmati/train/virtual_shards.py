"""A model that computes its large products in parts: what can't be cut is refused by name, and ranks get their own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from cosmati.core.isolated import isolated_modules
from cosmati.core.plan import Plan, Promise
from cosmati.core.virtual_shards import ComputesInParts, VirtualShards
from cosmati.errors import PlanError
from cosmati.train.config import RunConfig
from cosmati.train.ingredients import Ingredients
from cosmati.train.layout.in_replicas import Parts
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.ranks import Ranks

_METHODS = ("EMA", "GradientClipping", "LabelSmoothing", "LayerFreezing", "SAM", "SWA")
"""Methods whose runs have the same bits in the tests of virtual shards."""


def in_parts(plan: Plan, config: RunConfig) -> Plan:
    """Return a plan without parity where products are cut: a bare loop sums them in another order."""
    if config.virtual_shards is None or not plan.holds(Promise.PARITY):
        return plan
    because = f"virtual_shards={config.virtual_shards} sums the parts of each product in a tree of its own"
    return plan.withdraw(Promise.PARITY, because)


def share_parts(given: Ingredients, model: nn.Module, ranks: Ranks, *, packed: bool) -> Parts | None:
    """Let a model compute its large products in parts, where that is asked for.

    Args:
        given: what the run is made of.
        model: after surgery.
        ranks: of the run.
        packed: rows are packs of documents under a policy.

    Returns:
        What the layout has to know where several ranks share them.

    Raises:
        PlanError: the model can't, or something of the run hasn't been tried with it; on one rank too, since a run may
            go on with more.
    """
    number = given.config.virtual_shards
    if number is None:
        return None
    _refuse_untried(given, model, ranks, packed=packed)
    if not (
        isinstance(model, ComputesInParts) and hasattr(type(model), "compute_in_parts")
    ):  # no wrapper that lends it
        msg = (
            f"{type(model).__name__} can't compute its products in virtual_shards={number}: it has no "
            "`compute_in_parts`, as the project's GPT has. Leave out virtual_shards and tensor_parallel."
        )
        raise PlanError(msg)
    ranks.in_lockstep |= ranks.degree > 1
    peers = ReplicaPeers(ranks)
    shards = VirtualShards(number, peers if ranks.degree > 1 else None)
    cut = _checked(model, shards, model.compute_in_parts(shards))
    return Parts(peers, cut, shards) if ranks.degree > 1 else None


def _checked(model: nn.Module, shards: VirtualShards, told: object) -> Mapping[str, int]:
    """Return what a model says of its parameters that are cut, without names that are none.

    Raises:
        PlanError: it doesn't say it so; or one can't be cut so, or has hooks, which would see a part of its gradient.
    """
    if not isinstance(told, Mapping) or not all(isinstance(dim, int) for dim in told.values()):
        msg = (
            f"{type(model).__name__}.compute_in_parts returned {told!r:.200}. Return the names of the "
            'parameters that are cut, and the dimension along which each is: {"up.weight": 0, "down.weight": 1}.'
        )
        raise PlanError(msg)
    cut = {name: (one, told[name]) for name, one in model.named_parameters() if name in told}
    for name, (parameter, dim) in cut.items():
        shards.refuse_unequal(name, parameter, dim)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):  # noqa: SLF001
            msg = (
                f"{name} has hooks, and with virtual_shards={shards.number} ranks have a part of its gradient each. "
                "Leave them out, or virtual_shards."
            )
            raise PlanError(msg)
    return {name: dim for name, (_, dim) in cut.items()}


def _refuse_untried(given: Ingredients, model: nn.Module, ranks: Ranks, *, packed: bool) -> None:
    config, device = given.config, next(model.parameters()).device
    wrong = [] if device.type == "cpu" else [f"device {device.type}"]
    wrong += [f"sharding={config.sharding!r}"] if config.sharding == "full" else []
    wrong += ["gather_precision='bfloat16'"] if config.rounds_weights else []
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001
    wrong += ["compile_blocks=True"] if config.compile_blocks else ["compiled modules"] if is_compiled else []
    wrong += ["entropy_every"] if config.entropy_every else []
    wrong += ["several sub-steps"] if not callable(given.loss) else []
    wrong += ["modules of one class alone"] if isolated_modules(model) else []
    wrong += ["packs under a policy"] if packed else []
    wrong += ["collectives in model or loss"] if ranks.has_met else []
    wrong += [type(method).__name__ for method in given.methods if type(method).__name__ not in _METHODS]
    if wrong:
        msg = (
            f"virtual_shards={config.virtual_shards} hasn't been tried with {'; '.join(dict.fromkeys(wrong))}. Leave "
            "that out, or virtual_shards and tensor_parallel."
        )
        raise PlanError(msg)
