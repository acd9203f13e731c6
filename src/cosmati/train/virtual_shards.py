"""Large products in parts, by the model itself or by styles: what can't be cut is refused, and ranks get their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from cosmati.core.isolated import isolated_modules
from cosmati.core.parallel_styles import StyledShards, cut_by_styles, named_styles
from cosmati.core.plan import Plan, Promise
from cosmati.core.virtual_shards import ComputesInParts, VirtualShards
from cosmati.errors import PlanError
from cosmati.train.config import RunConfig
from cosmati.train.ingredients import Ingredients, others_than
from cosmati.train.layout.in_replicas import Parts
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.ranks import Ranks

_METHODS = ("EMA", "GradientClipping", "LabelSmoothing", "LayerFreezing", "SAM", "SWA")
"""Methods whose runs have the same bits in the tests of virtual shards."""


def in_parts(plan: Plan, config: RunConfig) -> Plan:
    """Return a plan without what doesn't hold where products are cut: a bare loop sums them in another order."""
    broken: tuple[Promise, ...] = ()
    because = ""
    if config.virtual_shards is not None:
        broken = (Promise.PARITY,)
        because = f"virtual_shards={config.virtual_shards} sums the parts of each product in a tree of its own"
    elif _is_cut_by_styles(config):
        broken = (Promise.ELASTIC, Promise.PARITY, Promise.REPLAYABLE)
        because = (
            f"parallel_styles cut products over tensor_parallel={config.tensor_parallel} ranks: another number of "
            "these, and one process, have other bits (not another number of replicas)"
        )
    for promise in broken:
        if plan.holds(promise):
            plan = plan.withdraw(promise, because)
    return plan


def _is_cut_by_styles(config: RunConfig) -> bool:
    return bool(config.parallel_styles) and config.tensor_parallel > 1


def share_parts(given: Ingredients, model: nn.Module, ranks: Ranks, *, packed: bool) -> Parts | None:
    """Let the ranks of a replica compute parts of a model's large products, where that is asked for.

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
    config, number = given.config, given.config.virtual_shards
    if number is None and not _is_cut_by_styles(config):
        return None
    asked = "parallel_styles" if number is None else f"virtual_shards={number}"
    _refuse_untried(given, model, ranks, asked, packed=packed)
    ranks.in_lockstep |= ranks.degree > 1
    peers, is_shared = ReplicaPeers(ranks), ranks.degree > 1
    compute: Callable[[VirtualShards | None], object]
    shards: VirtualShards
    alone: VirtualShards | None = None
    told: object
    if number is None:
        shards = StyledShards(config.tensor_parallel, peers if is_shared else None)
        compute = partial(cut_by_styles, model, named_styles(config.parallel_styles))
        told = compute(shards if is_shared else None)  # one process computes whole products
    else:
        shards = VirtualShards(number, peers if is_shared else None)
        compute, alone = _offered_by(model, number), VirtualShards(number)
        told = compute(shards)
    cut = _checked(model, shards, told)
    return Parts(peers, cut, shards, compute, alone) if is_shared else None


def _offered_by(model: nn.Module, number: int) -> Callable[[VirtualShards | None], object]:
    # Of its own class: a wrapper lends what it isn't.
    if isinstance(model, ComputesInParts) and hasattr(type(model), "compute_in_parts"):
        return model.compute_in_parts
    msg = (
        f"{type(model).__name__} can't compute its products in virtual_shards={number}: it has no `compute_in_parts`, "
        "as the project's GPT has. Cut it by parallel_styles instead, or leave out virtual_shards and tensor_parallel."
    )
    raise PlanError(msg)


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
                f"{name} has hooks, and with {shards.called} ranks have a part of its gradient each. Leave them out, "
                "or cut nothing."
            )
            raise PlanError(msg)
    return {name: dim for name, (_, dim) in cut.items()}


def _refuse_untried(given: Ingredients, model: nn.Module, ranks: Ranks, asked: str, *, packed: bool) -> None:
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
    wrong += others_than(_METHODS, given.methods)
    if wrong:
        msg = (
            f"{asked} hasn't been tried with {'; '.join(dict.fromkeys(wrong))}. Leave that out, or "
            f"{asked.partition('=')[0]} and tensor_parallel."
        )
        raise PlanError(msg)
