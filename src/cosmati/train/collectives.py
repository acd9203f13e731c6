"""Withdraws what a model or a loss breaks that talks to the other ranks, or to other microbatches, by itself."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import NoReturn, TypeVar

from torch import nn

from cosmati.core.function_code import names_read
from cosmati.core.meetings import MetAloneError, meeting_nobody
from cosmati.core.plan import Plan, Promise
from cosmati.errors import PlanError
from cosmati.train.ranks import Ranks
from cosmati.train.reach import functions_run
from cosmati.train.user_code import functions_within, methods_called, reached

Result = TypeVar("Result")
_COLLECTIVES = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "send", "recv", "permute_tensor")
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_ALL_BUFFERS = {"buffers", "named_buffers", "state_dict"}
_MAX_FUNCTIONS = 1000
_WHO = "model, loss or a hook"
_OF_ALL = (Promise.ELASTIC, Promise.PARITY, Promise.NO_DIRECT_WRITE, Promise.ISOLATED)


def without_named(
    plan: Plan, model: nn.Module, losses: Sequence[object], ranks: Ranks, folded: Collection[str]
) -> Plan:
    """Return the plan without what the user's code breaks by what it names: collectives, running statistics, hooks.

    Args:
        plan: as it is.
        model: whose forward pass is looked at.
        losses: likewise.
        ranks: of the run.
        folded: names of the layers whose running statistics move at the commit.
    """
    functions = [function for one in (model, *losses) for function in functions_within(one)]
    found = list(reached(functions, _MAX_FUNCTIONS))
    plan = without_late_hooks(plan, model)
    read = sorted(_STATISTICS & {name for one in found for name in names_read(one.__code__)})
    run = reached(functions_run(model, losses), _MAX_FUNCTIONS)
    read += [f"{name}()" for name in sorted(_ALL_BUFFERS & {n for one in run for n in methods_called(one.__code__)})]
    if read and folded and plan.facts.num_microbatches > 1 and plan.holds(Promise.PARITY):
        because = (
            f"model or loss read {', '.join(read)}, which the microbatches of a step move together, after it, and a "
            "loop that accumulates gradients moves in between. Use what the layer returns"
        )
        plan = plan.withdraw(Promise.PARITY, because)
    names = sorted({name for one in found for name in _collectives_in(one)})
    ranks.has_met |= ranks.is_parallel and bool(names)
    return _without(plan, ranks, f"model or loss call {', '.join(names)}") if names else plan


def without_late_hooks(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan without what hooks of the user's own break that see sums of gradients before they're whole."""
    named = [name for name, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if not named or plan.facts.num_microbatches == 1:
        return plan
    because = (
        f"{named[0]} has a hook (register_post_accumulate_grad_hook) that sees what a rank has summed so far, after "
        "each of its microbatches, and that follows from the number of ranks. Use a method's `gradients`, or "
        "Tensor.register_hook, which sees each microbatch's own"
    )
    for promise in (Promise.ELASTIC, Promise.PARITY):
        plan = plan.withdraw(promise, because) if plan.holds(promise) else plan
    return plan


def without_met(plan: Plan, ranks: Ranks, *, is_on: bool) -> Plan:
    """Return the plan without what is broken where ranks have met in a forward or backward pass. All ranks ask."""
    if not (is_on and ranks.is_parallel and ranks.agree(ranks.has_met)):
        return plan
    return _without(plan, ranks, f"{_WHO} call collectives of torch.distributed")


def unmet(ranks: Ranks, offered: Sequence[bool]) -> frozenset[int]:
    """Return the microbatches of a step that are run forward while other ranks have nothing to run.

    Args:
        ranks: of the run. In lockstep, those that have nothing to run keep the others company.
        offered: of each of the step's microbatches, whether it's run forward.
    """
    if ranks.world == 1 or ranks.in_lockstep:
        return frozenset()
    slots = ranks.slots(len(offered))
    return frozenset(m for slot in slots if len({offered[m] for m in slot}) > 1 for m in slot if offered[m])


def refuse_unmet() -> NoReturn:
    """Refuse a step in which only some ranks run code that waits for the others: on all ranks, before it waits.

    Raises:
        PlanError: always.
    """
    msg = (
        f"{_WHO.capitalize()} call collectives of torch.distributed, and in this step some ranks have no rows, or "
        "rows that the policy doesn't offer, so that others would wait for them for ever. Leave the ranks' sharing "
        "to the trainer, give these classes a weight, or run on one rank."
    )
    raise PlanError(msg)


def run_alike(
    ranks: Ranks, offered: Sequence[bool], own: Sequence[Callable[[], Result]], *, runs_model: bool
) -> tuple[list[Result], Exception | None]:
    """Return what comes of something done for each of this rank's microbatches before the step.

    Or nothing and what it has failed at, where other ranks can still be told.

    Args:
        ranks: of the run.
        offered: of all V microbatches, whether each is run forward.
        own: what is done for each of this rank's.
        runs_model: it may run the model, as methods do that score rows.

    Raises:
        PlanError: model, loss or a hook wait for other ranks, and in this step not all of these run them.
    """
    alone = unmet(ranks, offered)
    if alone and ranks.has_met:
        refuse_unmet()
    watches = bool(alone) and runs_model
    done, is_alone, failure = list[Result](), False, None
    for number, do in zip(ranks.mine(len(offered)), own, strict=True):
        try:
            with meeting_nobody() if watches and number in alone else nullcontext():
                found = do()
            done.append(found)
        except MetAloneError:
            is_alone = True
        except Exception as error:
            if not ranks.can_tell:
                raise
            failure = error
            break
    if watches and ranks.agree(is_alone):
        refuse_unmet()
    return ([], failure) if failure is not None else (done, None)


def _without(plan: Plan, ranks: Ranks, what: str) -> Plan:
    because = (
        f"{what}: what they compute follows from the number of ranks, and from what each has. Leave the ranks' sharing "
        "to the trainer"
    )
    for guarantee in plan.guarantees:
        if guarantee.holds and guarantee.promise in (_OF_ALL if ranks.is_parallel else (Promise.ELASTIC,)):
            plan = plan.withdraw(guarantee.promise, because, guarantee.pair)
    return plan


def _collectives_in(function: types.FunctionType) -> list[str]:
    named, known = names_read(function.__code__), function.__globals__
    held = {name: known.get(name) for name in named}
    has_module = any(isinstance(one, types.ModuleType) and _is_distributed(one.__name__) for one in held.values())
    has_module = has_module or {"torch", "distributed"} <= named
    told = [name for name in named if any(part in name for part in _COLLECTIVES)]
    return [
        f"{name}()"
        for name in told
        if _is_distributed(getattr(held[name], "__module__", None)) or (has_module and held[name] is None)
    ]


def _is_distributed(module: str | None) -> bool:
    return (module or "").startswith("torch.distributed")
