"""What model and policy keep classes out of, and what speaks against the isolation of what is their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from cosmati.core.isolated import Isolated, isolated_classes
from cosmati.core.plan import Pair, Plan, Promise
from cosmati.errors import PlanError
from cosmati.routing.policy import CompiledPolicy

_MAX_NAMED = 3


def denied_pairs(policy: CompiledPolicy | None, class_map: Sequence[int]) -> tuple[Pair, ...]:
    """Return the classes of the data, and the regions that are denied to them wherever they're admitted."""
    if policy is None:
        return ()
    pairs = []
    for own in sorted(set(class_map)):
        rows, phases = policy.rows_of(own), range(len(policy.phases))
        admitted = [(row, p) for row in rows for p in phases if policy.decision[row][p] in ("admit", "gate")]
        for region, name in enumerate(policy.regions):
            if admitted and all(policy.weight[row][phase][region] == 0 for row, phase in admitted):
                pairs.append((policy.classes[own], name))
    return tuple(pairs)


def isolated_pairs(
    model: nn.Module, policy: CompiledPolicy | None, class_map: Sequence[int], more: Callable[[], tuple[str, ...]]
) -> Mapping[Pair, tuple[str, ...]]:
    """Return for each class and each region with something of its own what breaks the isolation; empty for nothing.

    Args:
        model: after surgery.
        policy: compiled, or None.
        class_map: the policy's class of each of the data's classes.
        more: says what breaks the isolation of any class; asked where something is isolated.

    Raises:
        PlanError: the model has something of a class that the taxonomy lacks.
    """
    if policy is None:
        rests = ("without a policy nobody says whose rows these are, and what is its own rests: give one",)
        return {(name, "all"): rests for name in isolated_classes(model)}
    owners = _owners(model)
    known = {name for classes in owners.values() for name in classes if name}
    if unknown := sorted(known - set(policy.classes)):
        msg = (
            f"The model has modules of class {', '.join(map(repr, unknown))}, and the taxonomy has no such class: it "
            f"has {', '.join(policy.classes)}. Mend IsolatedAdapters(classes=...)."
        )
        raise PlanError(msg)
    found: dict[Pair, tuple[str, ...]] = {}
    for own in sorted(set(class_map)):
        name = policy.classes[own]
        shared = [
            [parameter for parameter in parameters if owners[parameter] != {name}]
            for parameters in policy.partition.parameters
        ]
        for region, parameters in enumerate(policy.partition.parameters):
            if any(name in owners[parameter] for parameter in parameters):
                others = [r for r, read in enumerate(shared) if read and r != region]
                found[name, policy.regions[region]] = (
                    *_read_by_others(policy, region, name, shared[region]),
                    *_other_teachers(policy, region, own, class_map),
                    *_taught_too(policy, own, others),
                )
    common = more() if found else ()
    return {pair: (*reasons, *common) for pair, reasons in found.items()}


def without_admitted(plan: Plan, model: nn.Module, policy: CompiledPolicy, class_map: Sequence[int], step: int) -> Plan:
    """Take back what a policy that acts from a step on doesn't keep: its classes teach more, or what is others' own.

    Args:
        plan: of the run, whose policy was another one before.
        model: after surgery.
        policy: in force from the step on, over the same regions.
        class_map: the policy's class of each of the data's classes.
        step: phases that end before it don't count.
    """
    late = _from_step(policy, step)
    isolated = isolated_pairs(model, late, class_map, tuple)
    for promise, pair in [(g.promise, g.pair) for g in plan.guarantees if g.pair is not None and g.holds]:
        because = f"from step {step} on another policy "
        if promise is Promise.ISOLATED and (reasons := isolated[pair]):
            plan = plan.withdraw(promise, f"{because}is in force, by which {'; '.join(reasons)}", pair)
        own, region = policy.classes.index(pair[0]), policy.regions.index(pair[1])
        if promise is Promise.NO_DIRECT_WRITE and _teaches(late, own, region):
            plan = plan.withdraw(promise, f"{because}lets rows of {pair[0]} teach {pair[1]}", pair)
    return plan


def _from_step(policy: CompiledPolicy, step: int) -> CompiledPolicy:
    late = [index for index, phase in enumerate(policy.phases) if phase.end_step > step]
    return dataclasses.replace(
        policy,
        phases=tuple(policy.phases[index] for index in late),
        weight=tuple(tuple(row[index] for index in late) for row in policy.weight),
        decision=tuple(tuple(row[index] for index in late) for row in policy.decision),
    )


def _owners(model: nn.Module) -> dict[str, set[str]]:
    """Return for each parameter the classes whose own modules hold it; empty text where anything else does."""
    modules = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, Isolated)}
    held: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [module.class_name for path, module in modules.items() if name.startswith(f"{path}.".lstrip("."))]
        held.setdefault(id(parameter), set()).update(around or [""])
    return {name: held[id(parameter)] for name, parameter in model.named_parameters()}


def _teaches(policy: CompiledPolicy, own: int, region: int) -> bool:
    return any(weights[region] for row in policy.rows_of(own) for weights in policy.weight[row])


def _read_by_others(policy: CompiledPolicy, region: int, name: str, shared: Sequence[str]) -> Iterator[str]:
    if shared:
        yield (
            f"rows of other classes read {_listed(shared)} of {policy.regions[region]!r}, too: give what is {name}'s "
            f"own a region of its own (tag: isolated/{name})"
        )


def _other_teachers(policy: CompiledPolicy, region: int, own: int, class_map: Sequence[int]) -> Iterator[str]:
    teachers = [policy.classes[c] for c in sorted(set(class_map) - {own}) if _teaches(policy, c, region)]
    if teachers:
        yield f"{_listed(teachers)} may teach {policy.regions[region]!r}, too: give them weight 0 there"


def _taught_too(policy: CompiledPolicy, own: int, others: Sequence[int]) -> Iterator[str]:
    taught = [policy.regions[r] for r in others if _teaches(policy, own, r)]
    if taught:
        yield f"{policy.classes[own]} may teach {_listed(taught)}, too: give it weight 0 there"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
