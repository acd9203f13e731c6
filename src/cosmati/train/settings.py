"""What fixes a run's bits, from what the user gave: for the plan's digest, and by name for a resume."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmati.core.clock import Budget
from cosmati.core.later import told_fields, untold
from cosmati.core.method import Method
from cosmati.core.plan import Plan, describe
from cosmati.train.assembly import Turn
from cosmati.train.config import WITNESSING
from cosmati.train.identity import CADENCES, describe_loss, describe_model, describe_source, identify
from cosmati.train.ingredients import AnyOptimizer, Ingredients
from cosmati.train.options import Described, describe_option, public_scalars
from cosmati.train.user_code import code_digest, is_library, methods_of


def settings_of(given: Ingredients, budget: Budget, num_microbatches: int) -> dict[str, object]:
    """Return what determines the run's bits besides the methods: no cadence, nor where it's kept and shown."""
    config = {
        f.name: getattr(given.config, f.name)
        for f in dataclasses.fields(given.config)
        if f.name not in {*_NEUTRAL, *CADENCES, "num_microbatches", *untold(given.config)}
    }
    policy = given.policy.digest.hex() if given.policy else None
    return {
        **config,
        "num_microbatches": num_microbatches,
        "num_steps": budget.num_steps,
        "rows_per_step": budget.rows_per_step,
        "optimizers": [str(_describe(optimizer)) for optimizer in given.optimizers],
        "policy": policy,
    }


_NEUTRAL = (
    "name",
    "task",
    "run_folder",
    "progress",
    "max_ranks",
    "sharding",
    "shard_ranks",
    "tensor_parallel",
    "elastic",
    "change",
    "load_weights",
    "resume_from",
    "checkpoint_async",
    "checkpoint_to",
    "require_signed",
    "trusted_roots",
    "artifacts",
    "sensitive",
    *WITNESSING,
)
"""Settings that say where a run is kept and how it's handled, and no more."""


def identity_of(
    given: Ingredients,
    plan: Plan,
    turns: Sequence[Turn],
    model: nn.Module,
    budget: Budget,
    parent: Mapping[str, object],
) -> dict[str, Any]:
    """Return what makes the run this one: all that fixes its bits, and the cadences."""
    facts = plan.facts
    fixed = {
        name: value
        for name, value in facts.settings.items()
        if name not in ("budget", "num_steps", "optimizers", "policy", "num_threads", "device", "ledger")
    }
    # Only where there are any: to a run that names none nothing is new.
    named = {one.label: one.digest for one in given.config.artifacts}
    prepared = {"artifacts": named} if named else {}
    return identify(
        **prepared,
        model=describe_model(model, [turn.loss for turn in turns]),
        loss=[
            {"parameters": list(turn.parameters.values()), "every": turn.every, **describe_loss(turn.loss, model)}
            for turn in turns
        ],
        data=describe_source(given.data),
        taxonomy=given.taxonomy.digest.hex() if given.policy and given.taxonomy else None,
        policy=given.policy.digest.hex() if given.policy else None,
        optimizers=[_describe(optimizer) for optimizer in given.optimizers],
        groups=_groups(turns, model),
        methods=[describe(method) for method in plan.methods],
        method_options=[_options(method) for method in plan.methods],
        # What is kept, and not what was asked for: None is a ledger here, and none there.
        settings=fixed | {"ledger": facts.has_ledger},
        budget={"span": str(budget.span), "ratio": budget.ratio},
        cadence={name: getattr(given.config, name) for name in CADENCES},
        parent=parent or _asked_parent(given.config.load_weights),
    )


def _asked_parent(path: Path | None) -> dict[str, object]:
    """Return whose weights are asked for where none are loaded: the run resumes, and the parent may be gone by now."""
    if path is None:
        return {}
    if path.name.startswith("step-"):
        return {"asked": path.parent.parent.name, "asked_step": int(path.name[5:]) if path.name[5:].isdigit() else None}
    return {"asked": path.name}


def _groups(turns: Sequence[Turn], model: nn.Module) -> list[list[list[str]]]:
    """Return the parameters' names in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizers = [scheduled.optimizer for turn in turns for scheduled in turn.optimizers]
    return [[[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]


def _options(method: Method) -> dict[str, object]:
    """Return the options of a method that its call doesn't tell: functions and objects of the user's own."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}
    told = {name: _told(value) for name, value in values.items()}
    return {n: option for n, option in told.items() if isinstance(option, dict | list)} | _code_of(type(method))


def _told(value: object) -> object:
    """Return what stands for an option: of an object of the user's own class, with that class's code."""
    told, code = describe_option(value), _code_of(type(value))
    return {**(told if isinstance(told, dict) else {"is": told}), **code} if code else told


def _code_of(kind: type) -> dict[str, object]:
    """Return what stands for the code of the user's own classes that an object's is or derives from."""
    # As written: a decorator's code (torch.no_grad's, or what torch.optim puts around `step`) is the same for all.
    written = [inspect.unwrap(function) for function in methods_of(kind)]
    own = sorted((one for one in written if not is_library(one.__module__)), key=lambda one: one.__qualname__)
    return {"code": code_digest(*own), **dict(Described().globals(own, kind))} if own else {}


def _describe(optimizer: AnyOptimizer) -> dict[str, object]:
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        options = public_scalars(optimizer, _kept(optimizer))
        told = {"is": type(optimizer).__qualname__, "groups": groups} | ({"options": options} if options else {})
        return told | _code_of(type(optimizer))
    values = told_fields(optimizer)
    # Of a function that chooses parameters, what it has chosen tells (`groups`).
    names = {name: _name(value) if name == "parameters" else _told(value) for name, value in values.items()}
    return {"is": type(optimizer).__qualname__, **names, **_code_of(type(optimizer))}


def _kept(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return what isn't an option of an optimizer's own: PyTorch's, and what its state has, being a count."""
    kept = {"defaults", "state", "param_groups"}
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        with suppress(Exception):  # The user's own: what it raises is for a checkpoint to say.
            kept |= {*optimizer.state_dict()}
    return kept


def _name(value: object) -> object:
    # A function's repr holds its address, which no two processes share.
    plain = value if isinstance(value, bool | int | float | str | None) else repr(value)
    return getattr(value, "__qualname__", plain)
