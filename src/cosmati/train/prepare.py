"""From what the user gave to an `Assembly`: plan, surgery, layout, regions, optimizers, all checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cosmati.core.clock import Budget, Clock, Time, Unit
from cosmati.core.isolated import isolated_classes, isolated_modules
from cosmati.core.method import Method, operated, overrides
from cosmati.core.plan import Facts, Pair, Plan, describe, make_plan
from cosmati.core.rng import DefaultGenerators
from cosmati.core.source import Order, Source
from cosmati.core.virtual_shards import compute_whole
from cosmati.errors import PlanError
from cosmati.optim.optimizers import Optimizer, assign_parameters
from cosmati.optim.schedules import Schedule
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.voucher import VouchedData
from cosmati.routing.deferral import DeferredOrder
from cosmati.routing.policy import CompiledPolicy, partition_by
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.starvation import kind_map, token_kinds
from cosmati.train.artifacts import artifacts_of
from cosmati.train.assembly import Assembly, ScheduledOptimizer, Turn, resolve_turns
from cosmati.train.authority_watch import AuthorityWatch, watch_of
from cosmati.train.buffers import BatchNormStatistics, unrouted
from cosmati.train.collectives import without_named
from cosmati.train.compiled_blocks import compile_blocks
from cosmati.train.config import RunConfig
from cosmati.train.couplings import counts_together, find_couplings
from cosmati.train.deferred_rows import DeferredRows, warn_of_own_loop
from cosmati.train.epochs import refuse_times
from cosmati.train.feed import Feed, IterableFeed, OrderedFeed, in_microbatches
from cosmati.train.given_policy import compile_given, offered
from cosmati.train.image_sizes import ask_for_sizes, input_kind_of
from cosmati.train.ingredients import AnyOptimizer, Ingredients
from cosmati.train.isolation import denied_pairs, isolated_pairs
from cosmati.train.layout.whole import Whole
from cosmati.train.loss_state import refuse_untrained
from cosmati.train.ranks import Ranks
from cosmati.train.refusals import refuse_foreign, refuse_misgiven, refuse_packs, refuse_unsavable, refuse_waiting
from cosmati.train.routes import Router
from cosmati.train.settings import identity_of, settings_of
from cosmati.train.sharding import sharded_as_asked
from cosmati.train.signed import digests_of, provenance_of, vouched_of, wants_ledger
from cosmati.train.virtual_shards import in_parts
from cosmati.train.warm_start import place


@dataclass(frozen=True)
class Prepared:
    """What a run needs.

    Attributes:
        assembly: what a step works with.
        feed: where `fit` takes its batches from, None where only `step` is called.
        data_digest: hex digest of the data, empty where they have none.
        identity: what makes the run this one, by name.
        vouched: who vouched for the data; None where nobody was asked.
        data_text: what their digest is of, where somebody vouches for them.
        watch: asks them again as the run goes on; None where nobody is to be asked.
        artifacts: what was prepared before the run.
        given: what it was made of.
        class_map: policy's class of each of the source's classes.
    """

    assembly: Assembly
    feed: Feed | None
    data_digest: str
    identity: Mapping[str, Any]
    vouched: VouchedData | None
    data_text: str
    watch: AuthorityWatch | None
    given: Ingredients
    class_map: Sequence[int]
    artifacts: tuple[Artifact, ...] = ()


def prepare(given: Ingredients) -> Prepared:
    """Check and build everything that a run needs.

    Raises:
        PlanError: something can't be composed; the message says what, why and the mend.
        PolicyError: the policy doesn't fit the model, the taxonomy or the run.
        DataError: the data can't be put in order.
    """
    refuse_misgiven(given)
    config, ranks = given.config, Ranks(given.config.tensor_parallel)
    ranks.share_out(num_microbatches := config.resolve_microbatches(governed=given.policy is not None))
    model = _surgery(given)
    device = torch.device(config.device) if config.device else next(model.parameters()).device
    parent = place(model, device, given, ranks)
    regions = partition_by(given.policy, model) if given.policy else partition_parameters(model)
    # Compiled twice: the order's length, and so the phases, follow from which classes the policy ever admits.
    generators, artifacts = DefaultGenerators(device), artifacts_of(given, parent)
    feed, budget = _feed(given, num_microbatches, offered(given, regions), generators, ranks)
    policy, class_map = compile_given(given, regions, budget)
    feed, never_offered = _deferring(given, feed, policy, class_map)
    layout = Whole(model, regions, ranks, num_microbatches, rounds=config.rounds_weights)
    statistics, denied = BatchNormStatistics(model), denied_pairs(policy, class_map)
    scheduled = _optimizers(given.optimizers, layout.pieces(), _rate_method(given), ranks, model)
    refuse_times(config, budget, given.data, given.methods, scheduled)
    turns = resolve_turns(given.loss, layout.weights().names, scheduled)
    refuse_untrained(losses := [turn.loss for turn in turns], model)
    couplings = unrouted(statistics, regions) + find_couplings(given, scheduled, layout.weights(), model, budget)
    isolated = isolated_pairs(model, policy, class_map, partial(counts_together, scheduled, layout.weights()))
    facts = _facts(given, feed, budget, num_microbatches, denied, isolated, turns, couplings, never_offered, statistics)
    facts = replace(facts, provenance=provenance_of(given, artifacts))
    plan = without_named(in_parts(make_plan(given.methods, facts), config), model, losses, ranks, statistics.layers)
    _check_shapes(plan, budget, config, 1 + len(isolated_classes(model)))
    identity = identity_of(given, plan, turns, model, budget, parent)
    cut, turns = sharded_as_asked(given, model, regions, ranks, plan, layout, turns)
    if config.compile_blocks:
        compile_blocks(model, is_sharded=ranks.in_lockstep)
    assembly = Assembly(
        model=model,
        layout=cut,
        regions=regions,
        policy=policy,
        router=_router(given, policy, regions, class_map, model),
        turns=turns,
        plan=plan,
        config=config,
        budget=budget,
        num_microbatches=num_microbatches,
        ranks=ranks,
        generators=generators,
        statistics=statistics,
        device=device,
        deferred_rows=DeferredRows(policy, class_map, is_told=feed is None),
        image_size=ask_for_sizes(feed, plan, budget),
    )
    digest, text, vouched = digests_of(given.data)
    watch = watch_of(given, vouched, artifacts, assembly)
    return Prepared(assembly, feed, digest, identity, vouched, text, watch, given, class_map, artifacts)


def _facts(
    given: Ingredients,
    feed: Feed | None,
    budget: Budget,
    num_microbatches: int,
    denied: tuple[Pair, ...],
    isolated: Mapping[Pair, tuple[str, ...]],
    turns: Sequence[Turn],
    couplings: tuple[str, ...],
    never_offered: tuple[str, ...],
    statistics: BatchNormStatistics,
) -> Facts:
    config, cut, is_governed = given.config, in_microbatches(feed), given.policy is not None
    return Facts(
        num_microbatches=num_microbatches,
        rows_per_microbatch=budget.rows_per_step // num_microbatches if cut is not None else None,
        positional_data=feed is None or feed.is_positional,
        own_loop=feed is None,
        input_kind=input_kind_of(given, feed),
        loss_couples="rows" if getattr(turns[0].loss, "couples", None) == "rows" else "",
        packed=is_governed and cut is not None and None in cut.class_ids(Clock()),
        regroups=is_governed and feed is not None and cut is None,
        row_coupled_layers=statistics.row_coupled,
        rounded_statistics=statistics.rounded if num_microbatches > 1 else (),
        host_clock=budget.span.unit is Unit.SECOND,
        deterministic=config.deterministic,
        couplings=couplings,
        denied=denied,
        isolated=isolated,
        has_ledger=wants_ledger(config, given.policy, vouched_of(given.data)),
        num_sub_steps=len(turns),
        owned={thing: type(o).__name__ for o in given.optimizers for thing in getattr(o, "owns", ())},
        never_offered=never_offered,
        settings=settings_of(given, budget, num_microbatches),
    )


def _surgery(given: Ingredients) -> nn.Module:
    ready = [optimizer for optimizer in given.optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    model = given.model
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        msg = (
            f"{', '.join(lazy[:5])} {'has' if len(lazy) == 1 else 'have'} no shape yet (lazy modules). Run one batch "
            "through the model before the optimizer and the Trainer are made: model(batch)."
        )
        raise PlanError(msg)
    if not model.training:
        # It isn't set: who fine-tunes with frozen statistics means it, and a bare loop would take the model as it is.
        warnings.warn(
            f"The {type(model).__name__} is in evaluation mode, as from_pretrained() leaves it: dropout drops nothing, "
            "and BatchNorm learns no statistics. Call model.train() before, unless that's meant.",
            stacklevel=5,
        )
    compute_whole(model)
    model = operated(model, given.methods, ready)
    refuse_unsavable(model, given.loss)
    return model


def _feed(
    given: Ingredients,
    num_microbatches: int,
    classes: frozenset[int] | None,
    generators: DefaultGenerators,
    ranks: Ranks,
) -> tuple[Feed | None, Budget]:
    config, data, is_governed = given.config, given.data, given.policy is not None
    ratio = math.prod((method.dilation() for method in given.methods), start=1.0)
    span = Time.parse(config.budget)
    if data is None:
        return None, Budget(span, ratio=ratio, knows_rows=False)
    if isinstance(data, Source):
        given_by = partial(data.order, seed=config.seed, route_pure=is_governed, classes=classes)
        order, is_whole = _order(given_by, num_microbatches, is_governed=is_governed)
        first = order.microbatch(0, 0)
        tokens = first.num_tokens // first.num_rows
        return OrderedFeed(order, num_microbatches, is_whole=is_whole), Budget(
            span, order.steps_per_epoch, order.rows_per_step, tokens, ratio
        )
    feed = IterableFeed(
        data,
        num_microbatches,
        seed=config.seed,
        generators=generators,
        ranks=ranks,
        class_names=given.taxonomy.classes if given.policy is not None and given.taxonomy is not None else (),
    )
    return feed, Budget(span, feed.steps_per_epoch, ratio=ratio, knows_rows=False)


def _order(given_by: Callable[..., Order], num_microbatches: int, *, is_governed: bool) -> tuple[Order, bool]:
    """Return a source's order, and whether its one microbatch is a step of rows of several classes.

    Such a step is regrouped by class into V of unlike sizes: V needn't divide its rows, though a source may say so.

    Raises:
        DataError: the source can't be cut so.
    """
    try:
        order = given_by(num_microbatches=num_microbatches)
    except ValueError:
        with suppress(ValueError):
            order = given_by(num_microbatches=1)
            if is_governed and _is_mixed(order):
                return order, True
        raise
    if is_governed and _is_mixed(order):
        return given_by(num_microbatches=1), True
    return order, False


def _is_mixed(order: Order) -> bool:
    return order.class_id(0, 0) is None and order.microbatch(0, 0).lineage.token_class_ids is None


def _router(
    given: Ingredients, policy: CompiledPolicy | None, regions: Regions, class_map: Sequence[int], model: nn.Module
) -> Router:
    kinds = kind_map(policy, given.data), isolated_modules(model), token_kinds(policy, given.data)
    names = () if policy is None else given.data.class_names if isinstance(given.data, Source) else policy.classes
    return Router(policy, regions, class_map, *kinds, names)


def _deferring(
    given: Ingredients, feed: Feed | None, policy: CompiledPolicy | None, class_map: Sequence[int]
) -> tuple[Feed | None, tuple[str, ...]]:
    """Return the feed in which deferred microbatches come again, and what is never offered, in words."""
    if feed is None:
        return feed, warn_of_own_loop(policy)
    if policy is None:
        return feed, ()
    cut = in_microbatches(feed)
    if cut is None:
        refuse_waiting(policy, "a step's rows are regrouped as they come")
        return feed, ()
    refuse_packs(policy, cut.class_ids(Clock()), has_kinds=bool(token_kinds(policy, given.data)))
    if not any("defer" in policy.decision[row] for own in class_map for row in policy.rows_of(own)):
        return feed, ()
    orders: list[DeferredOrder] = []

    def change(order: Order) -> Order:
        num_microbatches = given.config.resolve_microbatches(governed=True)
        orders.append(DeferredOrder(order, policy, class_map, num_microbatches, kind_map(policy, given.data)))
        return orders[0]

    feed = cut.reordered(change)
    left = sorted(orders[0].never_offered.items())
    return feed, tuple(f"{policy.classes[class_map[own]]}, {num} microbatches" for own, num in left)


def _rate_method(given: Ingredients) -> Method | None:
    """Return the method that changes learning rates; the plan sees to it that there's one at most."""
    method = next((m for m in given.methods if overrides(m, "learning_rate") and "learning rate" in m.claims), None)
    if method is not None and any(isinstance(o, torch.optim.Optimizer) for o in given.optimizers):
        msg = (
            f"{describe(method)} changes the learning rate, and a built torch optimizer leaves it to you. Give "
            "configurations instead, such as cosmati.optim.SGD(lr=0.1, schedule=Cosine())."
        )
        raise PlanError(msg)
    return method


def _optimizers(
    given: Sequence[AnyOptimizer],
    named: list[tuple[str, nn.Parameter]],
    method: Method | None,
    ranks: Ranks,
    model: nn.Module,
) -> list[ScheduledOptimizer]:
    configured = [optimizer for optimizer in given if isinstance(optimizer, Optimizer)]
    if configured and len(configured) != len(given):
        msg = "Give either configurations (cosmati.optim.AdamW(...)) or built torch optimizers, not both."
        raise PlanError(msg)
    index = {id(parameter): i for i, (_, parameter) in enumerate(named)}
    pairs: list[tuple[torch.optim.Optimizer, Schedule | None]] = [
        (o, None) for o in given if isinstance(o, torch.optim.Optimizer)
    ]
    if configured:
        shares = assign_parameters(configured, named)
        pairs = [(o.build(share), o.schedule) for o, share in zip(configured, shares, strict=True)]
    scheduled = []
    for optimizer, schedule in pairs:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        refuse_foreign(optimizer, model, frozenset(index))
        if isinstance(optimizer, GroupedOptimizer):
            optimizer.sharing = ranks.sharing
        held = frozenset(index[id(p)] for p in own if id(p) in index)
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        scheduled.append(ScheduledOptimizer(optimizer, schedule, rates, held, method))
    if not scheduled:
        msg = "No optimizer. Give one: Trainer(..., optimizers=[cosmati.optim.AdamW(lr=1e-3)])."
        raise PlanError(msg)
    return scheduled


def _check_shapes(plan: Plan, budget: Budget, config: RunConfig, shapes: int) -> None:
    """Refuse more forms of a block than are compiled: shapes of inputs, for each class with something of its own."""
    for method in plan.methods:
        shapes *= method.shapes(budget)
    limit = torch._dynamo.config.recompile_limit if config.compile_blocks else shapes  # noqa: SLF001
    if shapes > limit:
        msg = (
            f"The methods give up to {shapes} input shapes, and compiled blocks may be recompiled {limit} times. Use a "
            "larger size increment or step size, fewer classes with something of their own, or compile_blocks=False."
        )
        raise PlanError(msg)
