"""Sharding of a planned run: what can't be sharded is refused by name, and the optimizers move onto pieces."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import nn

from cosmati.core.isolated import isolated_modules
from cosmati.core.plan import Plan
from cosmati.errors import PlanError
from cosmati.optim import Optimizer
from cosmati.optim.piecewise import demands_of
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.routing.regions import Regions
from cosmati.train.assembly import ScheduledOptimizer, Turn
from cosmati.train.compiled_blocks import compiled_blocks
from cosmati.train.ingredients import Ingredients, others_than
from cosmati.train.layout.in_replicas import InReplicas, Parts
from cosmati.train.layout.layout import Layout
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.shard_cut import refuse_uncuttable
from cosmati.train.ranks import Ranks
from cosmati.train.user_code import HOOKS
from cosmati.train.virtual_shards import share_parts

_BY_ELEMENT = ("AdamW", "Lion", "ScheduleFreeAdamW", "SGD", "SGDW", "Sophia")
"""Optimizers that move each element by itself: on a rank's rows as on the whole."""
_BY_MATRIX = ("Aurora", "Muon", "NorMuon", "SOAP")
_METHODS = ("EMA", "GradientClipping", "LabelSmoothing", "LayerFreezing", "MixUp", "SAM", "SWA")
"""Methods whose runs have the same bits in the tests of full sharding."""


def sharded_as_asked(
    given: Ingredients,
    model: nn.Module,
    regions: Regions,
    ranks: Ranks,
    plan: Plan,
    layout: Layout,
    turns: tuple[Turn, ...],
) -> tuple[Layout, tuple[Turn, ...]]:
    """Return a planned run's layout and turns, cut over the ranks where that is asked for.

    Args:
        given: what the run is made of.
        model: after surgery: where it's cut, nothing may read its parameters whole from here on.
        regions: of its trainable parameters.
        ranks: the data-parallel ranks.
        plan: of the run.
        layout: as planned, on whole parameters.
        turns: as planned on these; no step was taken.

    Raises:
        PlanError: an optimizer can't be shared out, or parameters share memory; or something of the run hasn't been
            tried under full sharding, or can't be cut by rows. On one rank too, since a run may go on with more.
    """
    if given.config.rounds_weights and plan.facts.num_microbatches == 1:
        msg = (
            "gather_precision='bfloat16' is of weights that ranks gather from one another, and V = 1 microbatch a step "
            "runs on one rank. Set RunConfig(num_microbatches=...) to a power of two above 1, or leave it out."
        )
        raise PlanError(msg)
    parts = share_parts(given, model, ranks, packed=plan.facts.packed)
    if given.config.sharding != "replicated":
        _refuse_overlaps(model, given.config.sharding)
    if given.config.sharding == "optimizer":
        optimizers = list({id(one): one.optimizer for turn in turns for one in turn.optimizers}.values())
        return _shared_out(given, model, regions, ranks, plan.facts.num_microbatches, layout, optimizers, parts), turns
    if parts is not None:
        return InReplicas(model, regions, ranks, plan.facts.num_microbatches, parts), turns
    if given.config.sharding != "full":
        return layout, turns
    _refuse_untried(given, model, ranks, packed=plan.facts.packed)
    refuse_uncuttable(model)
    # One rank holds everything anyway.
    return (
        _cut(given, model, regions, ranks, plan.facts.num_microbatches, turns) if ranks.is_parallel else (layout, turns)
    )


def _refuse_overlaps(model: nn.Module, sharding: str) -> None:
    """Refuse parameters that lie in one another's memory: each would have a piece and an owner of its own.

    And under full sharding a buffer in a parameter's memory, which lies elsewhere then.
    """
    buffers = dict(model.named_buffers()) if sharding == "full" else {}
    spans = sorted(
        (
            start,
            start + p.element_size() * (1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))),
            name,
        )
        for name, p in [*model.named_parameters(), *buffers.items()]
        if p.layout is torch.strided and p.numel() and (start := p.data_ptr())
    )
    overlaps = (
        (one, other)
        for index, (_, stop, one) in enumerate(spans)
        for _, _, other in spans[index + 1 : bisect_left(spans, stop, key=itemgetter(0))]
    )
    for one, other in overlaps:
        views = {one, other} & buffers.keys()
        if len(views) == 1:
            msg = (
                f"{views.pop()} is a view of {({one, other} - buffers.keys()).pop()}, whose memory sharding='full' "
                "cuts: it would stay as it is now. Read the parameter itself, or use another sharding."
            )
            raise PlanError(msg)
        if not views:
            msg = (
                f"{one} and {other} share memory, and are two parameters: sharded, each would be stepped by itself. "
                f"Tie them as one (model.b.weight = model.a.weight), or train with RunConfig(sharding='replicated')."
            )
            raise PlanError(msg)


def _shared_out(
    given: Ingredients,
    model: nn.Module,
    regions: Regions,
    ranks: Ranks,
    num_microbatches: int,
    layout: Layout,
    optimizers: Sequence[torch.optim.Optimizer],
    parts: Parts | None,
) -> Layout:
    if not ranks.is_parallel:
        for optimizer in optimizers:
            demands_of(optimizer)
        return layout
    shared = OptimizerSharded(model, regions, ranks, num_microbatches, parts, rounds=given.config.rounds_weights)
    shared.rehome(optimizers)
    return shared


def _refuse_untried(given: Ingredients, model: nn.Module, ranks: Ranks, *, packed: bool) -> None:
    """Refuse what nobody has tried under full sharding, at any number of ranks: a run may go on with more."""
    config, device = given.config, next(model.parameters()).device
    wrong = [] if device.type == "cpu" else [f"device {device.type}"]
    wrong += ["compile_blocks=True of blocks that have hooks"] if config.compile_blocks and _has_hooks(model) else []
    wrong += ["entropy_every"] if config.entropy_every else []
    wrong += ["several sub-steps"] if not callable(given.loss) else []
    wrong += ["modules of one class alone"] if isolated_modules(model) else []
    wrong += ["packs under a policy"] if packed else []
    wrong += ["collectives in model or loss"] if ranks.has_met else []
    wrong += others_than(_METHODS, given.methods)
    for optimizer in given.optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            wrong.append(f"an optimizer that is already built ({name}: give cosmati.optim's configuration)")
        elif name not in (*_BY_ELEMENT, *_BY_MATRIX) or not type(optimizer).__module__.startswith("cosmati."):
            wrong.append(name)
        elif getattr(optimizer, "fused", False):
            wrong.append(f"{name}(fused=True), whose bits follow from where a parameter is cut")
    if wrong:
        msg = (
            f"sharding='full' hasn't been tried with {'; '.join(dict.fromkeys(wrong))}. Leave that out, or use another "
            "sharding: the bits are the same."
        )
        raise PlanError(msg)


def _has_hooks(model: nn.Module) -> bool:
    """Say whether a block that is to be compiled has hooks: on one rank they're in its graph, and sharded beside it."""
    blocks = compiled_blocks(model)
    return any(getattr(block, kind, None) for block in blocks for kind in HOOKS)


def _cut(
    given: Ingredients,
    model: nn.Module,
    regions: Regions,
    ranks: Ranks,
    num_microbatches: int,
    turns: Sequence[Turn],
) -> tuple[Layout, tuple[Turn, ...]]:
    # FSDP2 takes a second to load, and most runs have no use for it.
    from cosmati.train.layout.sharded import Sharded

    configured = [optimizer for optimizer in given.optimizers if isinstance(optimizer, Optimizer)]
    # With fewer ranks than a copy is meant to lie on, all of them hold one.
    num_shards = min(given.config.shard_ranks or ranks.world, ranks.world)
    layout = Sharded(model, regions, ranks, num_microbatches, num_shards, rounds=given.config.rounds_weights)
    names = [p.name for p in layout.parameters]
    of_turns = {id(scheduled): scheduled for turn in turns for scheduled in turn.optimizers}
    moved: dict[int, ScheduledOptimizer] = {}
    for optimizer, scheduled in zip(configured, of_turns.values(), strict=True):
        own = [names[index] for index in sorted(scheduled.parameters)]
        if type(optimizer).__name__ in _BY_MATRIX or getattr(optimizer, "hyperball", False):
            layout.stage(own)
        held = dict(layout.pieces())
        built = optimizer.build([(name, held[name]) for name in own])
        assert not isinstance(built, GroupedOptimizer) or built.sharing.world == 1, "each owner works by itself"
        built.__dict__["holds_pieces"] = True  # as of OptimizerSharded
        moved[id(scheduled)] = dataclasses.replace(scheduled, optimizer=built)
    ranks.in_lockstep, ranks.together = True, layout.lockstep.together
    return layout, tuple(
        dataclasses.replace(turn, optimizers=tuple(moved[id(one)] for one in turn.optimizers)) for turn in turns
    )
