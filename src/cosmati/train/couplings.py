"""What couples regions: what methods and optimizers say of themselves, and what a trial at setup shows.

A run that denies a class a region promises that no row of the class moves it. An optimizer with one number for all
parameters, or one that moves what has no gradient, breaks that; so does a method that fills in gradients or takes a
norm over everything. Who declares it is believed (`couples`). What neither PyTorch nor this library ships has to
declare something, an empty set where it couples nothing, and is tried out too, on copies: two regions, of which one has
other gradients, or the only ones.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from cosmati.core.clock import Budget, Clock
from cosmati.core.method import Method, Position, overrides
from cosmati.core.pieces import Pieces
from cosmati.core.plan import describe
from cosmati.train.assembly import ScheduledOptimizer
from cosmati.train.ingredients import Ingredients

_NUM_STEPS = 6
_SIDE = 3
_SCALE = 1024.0
# Each of these steps a parameter by itself, and leaves one without a gradient alone. LBFGS isn't among them.
_APART = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
)


def find_couplings(
    given: Ingredients, scheduled: Sequence[ScheduledOptimizer], weights: Pieces, model: nn.Module, budget: Budget
) -> tuple[str, ...]:
    """Say what couples regions; nothing of methods that say so themselves, nor of a run without a policy.

    Args:
        given: by the user.
        scheduled: what its optimizers have become, in their order.
        weights: of all trainable parameters.
        model: after surgery.
        budget: of the run.
    """
    if given.policy is None:
        return ()
    loss = given.loss if callable(given.loss) else given.loss[0].loss

    def position(step: int) -> Position:
        return Position(Clock(step=step), budget, given.config.seed, 0, model, loss)

    regions = {id(weight): weights.regions[name] for name, weight in weights.tensors.items()}
    found = [method_coupling(method, weights, position) for method in given.methods]
    found += [
        optimizer_coupling(built.optimizer, regions, declared)
        for built, declared in zip(scheduled, given.optimizers, strict=True)
    ]
    return tuple(reason for reason in found if reason)


def optimizer_coupling(optimizer: torch.optim.Optimizer, regions: Mapping[int, int], declared: object = None) -> str:
    """Say what an optimizer does across regions; empty where that's nothing.

    Args:
        optimizer: built; it isn't touched.
        regions: index of the region of each of its parameters, by the parameter's `id`.
        declared: the configuration that it was built from, if there is one.
    """
    name = type(declared or optimizer).__name__
    is_declared = any("regions" in getattr(one, "couples", ()) for one in (optimizer, declared))
    if is_declared or isinstance(optimizer, torch.optim.LBFGS):
        return f"{name} couples regions"
    if acts := hooked(optimizer):
        return f"{name} {acts}"
    if type(optimizer) in _APART or type(optimizer).__module__.startswith("cosmati."):
        return ""
    try:
        does = _across(optimizer, regions)
    except Exception as error:  # noqa: BLE001  (code of the user's own)
        does = f"can't be tried out ({type(error).__name__}: {error})"
    return f"{name} {does or _UNDECLARED}" if does or not (_declares(optimizer) or _declares(declared)) else ""


def counts_together(optimizers: Sequence[ScheduledOptimizer], weights: Pieces) -> tuple[str, ...]:
    """Say which optimizers tell, where a region ends, how often others have learnt: one counter for all, say.

    That a class learns its own in a step would then show in every other region. Such an optimizer may still leave
    regions apart in what they learn.
    """
    regions = {id(weight): weights.regions[name] for name, weight in weights.tensors.items()}
    found = []
    for optimizer in (scheduled.optimizer for scheduled in optimizers):
        if type(optimizer) in _APART or type(optimizer).__module__.startswith("cosmati."):
            continue
        try:
            own = sorted({regions[id(p)] for group in optimizer.param_groups for p in group["params"]})
            # One and two: a counter may be asked for its parity.
            ends = [[_Trial(optimizer, regions).ends_beside(r, n) for n in (0, 1, 2)] for r in own]
            tells = any(not torch.equal(of_none, of_some) for of_none, *rest in ends for of_some in rest)
            does = "counts the steps in which another region alone has learnt" if tells else ""
        except Exception as error:  # noqa: BLE001  (code of the user's own)
            does = f"can't be tried out ({type(error).__name__}: {error})"
        found += [f"{type(optimizer).__name__} {does}"] if does else []
    return tuple(found)


_UNDECLARED = "doesn't say what it couples (`couples = frozenset()`, if it leaves regions apart)"


def _declares(one: object) -> bool:
    """Say whether a class of the user's own says what it couples: a trial doesn't see what comes later."""
    kinds = [kind for kind in type(one).__mro__ if not kind.__module__.startswith(("cosmati.", "torch."))]
    return any("couples" in vars(kind) for kind in kinds)


def hooked(optimizer: torch.optim.Optimizer) -> str:
    """Say what else acts when an optimizer steps."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001
    if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "has step hooks, which aren't looked into"
    patched = vars(optimizer).get("step")
    # A torch scheduler counts steps so.
    is_patched = patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False)
    return "has another `step` than its class" if is_patched else ""


def _across(optimizer: torch.optim.Optimizer, regions: Mapping[int, int]) -> str:
    """Step copies of an optimizer; say what it does across regions."""
    for region in sorted({regions[id(p)] for group in optimizer.param_groups for p in group["params"]}):
        # Also an optimizer of one region is stepped where another one alone has learnt: then with no gradient at all.
        if any(_Trial(optimizer, regions).moves(absent=region, num_present=num) for num in (0, 1)):
            return "moves what has no gradient"
        if not torch.equal(*(_Trial(optimizer, regions).ends(region, scale) for scale in (1.0, _SCALE))):
            return "lets one region's gradients act on another's parameters"
    return ""


class _Trial:
    """A copy of an optimizer over small parameters of as many dimensions."""

    def __init__(self, optimizer: torch.optim.Optimizer, regions: Mapping[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        memo: dict[int, Any] = {}
        self._parameters: list[tuple[nn.Parameter, int]] = []
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            shape = [min(_SIDE, size) for size in parameter.shape]
            small = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter))
            memo[id(parameter)] = small
            self._parameters.append((small, regions[id(parameter)]))
        self._optimizer = memo[id(optimizer)] = object.__new__(type(optimizer))
        # `copy.deepcopy` would leave out what isn't in PyTorch's own fields. A scheduler's wrapper stays behind.
        kept = {key: value for key, value in vars(optimizer).items() if key not in ("step", "state")}
        vars(self._optimizer).update(copy.deepcopy(kept, memo), state=defaultdict(dict))
        self._draws = torch.Generator().manual_seed(1)

    def moves(self, *, absent: int, num_present: int) -> bool:
        """Say whether a region moves in steps in which it has no gradient, after so many in which all have one."""
        for _ in range(num_present):
            self._step(lambda _: 1.0)
        before = [p.detach().clone() for p, region in self._parameters if region == absent]
        for _ in range(_NUM_STEPS):
            self._step(lambda region: None if region == absent else 1.0)
        after = [p.detach() for p, region in self._parameters if region == absent]
        return not all(map(torch.equal, before, after))

    def ends(self, region: int, scale: float) -> Tensor:
        """Return where all other regions end when one region's gradients are scaled: [n]."""
        for _ in range(_NUM_STEPS):
            self._step(lambda own: scale if own == region else 1.0)
        others = [p.detach().flatten() for p, own in self._parameters if own != region]
        return torch.cat(others) if others else torch.zeros(0)

    def ends_beside(self, region: int, num_own: int) -> Tensor:
        """Return where all others end if a region has so many steps of its own between each two of theirs: [n]."""
        for _ in range(_NUM_STEPS):
            self._step(lambda own: None if own == region else 1.0)
            drawn = self._draws.get_state()
            for _ in range(num_own):
                self._step(lambda own: 1.0 if own == region else None)
            self._draws.set_state(drawn)
        others = [p.detach().flatten() for p, own in self._parameters if own != region]
        return torch.cat(others) if others else torch.zeros(0)

    def _step(self, scale: Callable[[int], float | None]) -> None:
        for parameter, region in self._parameters:
            drawn = torch.randn(parameter.shape, generator=self._draws, dtype=torch.float64).to(parameter)
            factor = scale(region)
            parameter.grad = None if factor is None else _other(drawn, factor)
        self._optimizer.step()


def method_coupling(method: Method, weights: Pieces, position: Callable[[int], Position]) -> str:
    """Say what a method of the user's own does across regions to the step's gradients; empty where that's nothing.

    Args:
        method: with a `gradients` hook, which is called in the steps 0 and 1.
        weights: of all trainable parameters; they aren't touched.
        position: of a step.
    """
    if type(method).__module__.startswith("cosmati.") or "regions" in method.couples:
        return ""  # Its own tests have tried it out; or the plan says so already.
    does = ""
    if overrides(method, "perturbation"):
        does = "takes gradients where all regions' gradients have led to"
    elif overrides(method, "gradients"):
        try:
            does = _among_gradients(method, weights, [position(step) for step in (0, 1)])
        except Exception as error:  # noqa: BLE001  (code of the user's own)
            does = f"can't be tried out ({type(error).__name__}: {error})"
    return f"{describe(method)} {does or _UNDECLARED}" if does or not _declares(method) else ""


def _among_gradients(method: Method, weights: Pieces, positions: Sequence[Position]) -> str:
    """Hand gradients to a method; say what it does across regions."""

    def changed(region: int, scale: float | None, at: Position) -> Pieces:
        return method.gradients(_drawn(weights, region, scale), weights.copied(), at)

    for region, at in itertools.product(sorted(set(weights.regions.values())), positions):
        if any(weights.regions[name] != region for name in changed(region, None, at).names):
            return "gives a gradient to what has none"
        one, other = (
            {name: held for name, held in changed(region, scale, at).tensors.items() if weights.regions[name] != region}
            for scale in (1.0, _SCALE)
        )
        if one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one):
            return "lets one region's gradients act on another's"
    return ""


def _other(gradient: Tensor, scale: float) -> Tensor:
    """Return a gradient of another length and another direction; at 1 the same one."""
    return gradient * scale + (scale - 1)


def _drawn(weights: Pieces, region: int, scale: float | None) -> Pieces:
    """Return gradients of all regions, of which one is scaled; of that region alone where the scale is None."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, weight in weights.tensors.items():
        drawn = torch.randn(weight.shape, generator=generator).to(weight)
        if weights.regions[name] == region:
            found[name] = drawn if scale is None else _other(drawn, scale)
        elif scale is not None:
            found[name] = drawn
    return weights.having(found)
