"""Refuses what a trainer was given by mistake, before anything is built from it: the ordinary slips of a first run."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cosmati.core.loss import LossFunction
from cosmati.core.method import overrides
from cosmati.core.out_of_range import refuse_index
from cosmati.core.plan import check_methods, describe
from cosmati.errors import PlanError
from cosmati.optim.foreign_schedules import schedule_in_place_of
from cosmati.optim.optimizers import Optimizer
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.assembly import SubStep
from cosmati.train.ingredients import Ingredients
from cosmati.train.loss_state import loss_module
from cosmati.train.signed import refuse_declared

_OF_A_CRITERION = frozenset(
    "input inputs output outputs logits pred preds prediction predictions y_pred y_hat".split()  # noqa: SIM905
)
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
_EXAMPLE = (
    "It's called as loss(model, data), with a step's rows: Classification(num_classes), or `lambda model, data: "
    "torch.nn.functional.cross_entropy(model(data[0]), data[1])`"
)


def refuse_misgiven(given: Ingredients) -> None:
    """Refuse models, optimizers, methods and losses of another kind than a trainer takes, and what is to be signed.

    Raises:
        PlanError: with what, why and the mend.
        ProvenanceError: data or a policy aren't signed, or by others, where the run takes only what is.
    """
    refuse_declared(given)
    _refuse_wrapped(given.model)
    _refuse_optimizers(given.optimizers)
    check_methods(given.methods)
    if given.policy is None and (passing := [m for m in given.methods if overrides(m, "passing")]):
        msg = (
            f"{describe(passing[0])} goes by what a policy denies, and this run has no policy. Give one, "
            "Trainer(..., policy=load_policy(...), taxonomy=...), or leave the method out."
        )
        raise PlanError(msg)
    losses = [given.loss] if callable(given.loss) else given.loss
    if not isinstance(losses, Sequence):
        msg = f"The loss is a {type(losses).__name__}. Give a function loss(model, data), or a list of SubStep."
        raise PlanError(msg)
    for loss in losses:
        _refuse_loss(loss.loss if isinstance(loss, SubStep) else loss)


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wrappers = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")} & _WRAPPERS
        if wrappers:
            where = f"its {name}" if name else "the model"
            msg = (
                f"{where.capitalize()} is wrapped in {wrappers.pop()}, which shares out work and adds up gradients on "
                "its own, past every route. Give the module itself (wrapped.module): started with torchrun, Cosmati "
                "shares a step's microbatches out over the ranks."
            )
            raise PlanError(msg)


def _refuse_optimizers(optimizers: object) -> None:
    if not isinstance(optimizers, Sequence):
        name = getattr(optimizers, "__name__", type(optimizers).__name__)
        raise PlanError(
            f"optimizers={name} isn't a list, and there may be several. Give a list: optimizers=[{name}(...)]."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, type) and issubclass(optimizer, Optimizer | torch.optim.Optimizer):
            msg = (
                f"optimizers=[{optimizer.__name__}] names the class. Give one that is made: "
                "cosmati.optim.AdamW(lr=1e-3), or torch.optim.AdamW(model.parameters(), lr=1e-3)."
            )
            raise PlanError(msg)
        if words := schedule_in_place_of(optimizer):
            msg = f"optimizers holds no optimizer: {words}, as the schedule= of cosmati.optim.SGD or AdamW."
            raise PlanError(msg)
        if not isinstance(optimizer, Optimizer | torch.optim.Optimizer):
            msg = (
                f"optimizers holds a {type(optimizer).__name__}, which is no optimizer. Give configurations "
                "(cosmati.optim.AdamW(lr=1e-3)) or torch.optim's, built over model.parameters()."
            )
            raise PlanError(msg)


def _refuse_loss(loss: object) -> None:
    name = getattr(loss, "__name__", type(loss).__name__)
    called = loss.forward if isinstance(loss, nn.Module) and type(loss).__call__ is nn.Module.__call__ else loss
    try:
        signature = inspect.signature(called)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # written in C: PyTorch says what it misses
        return
    names = ", ".join(signature.parameters)
    first = next((name for name, p in signature.parameters.items() if p.kind is not p.VAR_POSITIONAL), "")
    if isinstance(loss, nn.modules.loss._Loss) or first in _OF_A_CRITERION:  # noqa: SLF001
        msg = f"The loss {name}({names}) compares outputs with targets, and nothing would call the model. {_EXAMPLE}."
        raise PlanError(msg)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise PlanError(
            f"The loss {name}({names}) can't be called with two arguments ({error}). {_EXAMPLE}."
        ) from error


def refuse_unsavable(model: nn.Module, loss: LossFunction | Sequence[SubStep]) -> None:
    """Refuse parameters and persistent buffers of which no digest can be taken, or two under one name.

    Raises:
        PlanError: the message names them.
    """
    losses = [loss] if callable(loss) else [sub_step.loss for sub_step in loss]
    held = [("", model), *((f"loss {i} ", found) for i, one in enumerate(losses) if (found := loss_module(one)))]
    for where, module in held:
        names = collections.Counter(name.replace("_orig_mod.", "") for name in module.state_dict())
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            msg = (
                f"{where}{', '.join(twice[:5])} stands for two tensors: names are kept without the '_orig_mod.' that "
                "compilation adds. Give the module that is called _orig_mod another name."
            )
            raise PlanError(msg)
        odd = [
            f"{where}{name} ({'conjugate' if value.layout is torch.strided else value.layout})"
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_conj() or value.is_neg())
        ]
        if odd:
            msg = (
                f"{', '.join(odd[:5])} has no elements of its own in memory, so that it has no digest and no "
                "checkpoint could hold it. Keep it dense (.to_dense(), .resolve_conj()), as buffers of indices and "
                "values, or with register_buffer(..., persistent=False), which is made anew."
            )
            raise PlanError(msg)


def explain(error: BaseException | None, model: nn.Module) -> None:
    """Add to an error of a step what a loss is given, where it took the model for its output, and what BatchNorm needs.

    Raises:
        BatchError: instead of PyTorch's error of a label or an id that is out of range.
    """
    if isinstance(error, IndexError):
        refuse_index(error)
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        error.add_note(
            "A microbatch had one row, of which BatchNorm takes no statistics: where rows are regrouped by class, one "
            "class may have a single row in a step. Give larger steps, or a Source, whose microbatches are of one "
            "size; or take GroupNorm."
        )
    kind = type(model).__name__
    if isinstance(error, TypeError | AttributeError) and f"{kind}" in str(error):
        error.add_note(f"A loss is given the {kind} itself, and not what it returns. {_EXAMPLE}.")


def refuse_foreign(optimizer: torch.optim.Optimizer, model: nn.Module, trainable: frozenset[int]) -> None:
    """Refuse an optimizer that the loop can't step, or whose parameters aren't the model's; frozen ones may be there.

    Args:
        optimizer: built.
        model: after surgery.
        trainable: `id` of each parameter that learns.

    Raises:
        PlanError: it needs a closure, holds parameters of another model, or nothing that learns.
    """
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        msg = (
            f"{kind} asks for the loss several times in a step (a closure), and a step here is one pass over its "
            "microbatches. Use an optimizer of cosmati.optim or torch.optim that steps once."
        )
        raise PlanError(msg)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(parameter.shape) for parameter in own if id(parameter) not in known]
    if foreign:
        msg = (
            f"{kind} has {len(foreign)} parameter(s) that the model lacks (shapes {foreign[:5]}): it was built over "
            "another model, or before surgery. Build it from the model that you give to the Trainer."
        )
        raise PlanError(msg)
    if not any(id(parameter) in trainable for parameter in own):
        msg = (
            f"None of the {len(own)} parameters of {kind} are trainable parameters of the model: they're frozen. Leave "
            "the optimizer out, or thaw them with requires_grad_(True)."
        )
        raise PlanError(msg)


def refuse_packs(policy: CompiledPolicy, class_ids: Sequence[int | None], *, has_kinds: bool) -> None:
    """Refuse a policy that defers classes, or has bands of which nothing is known, where classes are packed together.

    Args:
        policy: of the run.
        class_ids: of a step's microbatches, None where they're packs.
        has_kinds: the packs say what was measured of their rows.

    Raises:
        PlanError: it has, or does.
    """
    if None not in class_ids:
        return
    if len(policy.kinds) > 1 and not has_kinds:
        msg = (
            f"The policy has bands or grades ({', '.join(policy.bands[:5])}), and these packs don't say those of their "
            "tokens. Say them with PackedSource(..., row_kinds=...), or leave bands, floors and measures out."
        )
        raise PlanError(msg)
    refuse_waiting(policy, "packs hold tokens of several classes")


def refuse_waiting(policy: CompiledPolicy, why: str) -> None:
    """Refuse a policy that defers classes, where their rows can't wait for a later phase.

    Args:
        policy: of the run.
        why: they can't.

    Raises:
        PlanError: it does.
    """
    rows = {name: policy.rows_of(own) for own, name in enumerate(policy.classes)}
    deferred = ", ".join(n for n, own in rows.items() if any("defer" in policy.decision[row] for row in own))
    if deferred:
        msg = (
            f"The policy defers {deferred}, and {why}: they can't wait. Give these classes a weight or reject them in "
            "each phase, or give their rows by a source that gives each class by itself."
        )
        raise PlanError(msg)
