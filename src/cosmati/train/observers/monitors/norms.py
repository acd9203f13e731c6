"""Learning rates; norms of gradients, of updates and of weights, by region."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cosmati.core.clock import Clock
from cosmati.errors import PlanError
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.outcome import StepOutcome

_WEIGHTS_EVERY = 10
"""Measurements: weights change slowly."""
Groups = Mapping[str, Sequence[nn.Parameter]]


def parameter_groups(run: WatchedRun) -> Groups:
    """Return the parameters that train, by the policy's regions; without a policy, by the model's parts.

    Raises:
        PlanError: each rank holds a part of every one.
    """
    facts, held = run.facts, dict(run.model.named_parameters())
    if any(hasattr(parameter.detach(), "to_local") for parameter in held.values()):
        msg = (
            "GradientNorms and UpdateNorms look at a model's parameters, and under sharding='full' each rank holds "
            "a part of each. Leave them out: the ledger has both norms (details_every, update_norm_every)."
        )
        raise PlanError(msg)
    if len(facts.regions) > 1:
        regions = zip(facts.regions, facts.parameters, strict=True)
        return {region: [held[name] for name in names] for region, names in regions}
    names = [name for own in facts.parameters for name in own]
    depth = 1
    while depth < 4 and len({_part(name, depth) for name in names}) < 2:
        depth += 1
    found: dict[str, list[nn.Parameter]] = {}
    for name in names:
        found.setdefault(_part(name, depth), []).append(held[name])
    return found


def _part(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:-1][:depth]) or name


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each, on their device."""
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in dense]
    wide = any(tensor.dtype is torch.float64 for tensor in real)  # PyTorch narrows none by itself.
    return torch.stack(torch._foreach_norm(real, 2, torch.float64 if wide else torch.float32))  # noqa: SLF001


def _joined(what: str, regions: Sequence[str], norms: float | Sequence[float]) -> dict[str, float]:
    """Return a norm for each region from those of its tensors."""
    squares: dict[str, float] = {}
    assert not isinstance(norms, float), "of one dimension"
    for region, norm in zip(regions, norms, strict=True):
        squares[region] = squares.get(region, 0.0) + norm * norm
    return {f"{what}/{region}": math.sqrt(square) for region, square in squares.items()}


class LearningRates(Monitor):
    """The rate of each optimizer's first group: `learning_rate/0`, and so on."""

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return them."""
        return {f"learning_rate/{index}": rate for index, rate in enumerate(outcome.learning_rates)}


class GradientNorms(Monitor):
    """Norms of the gradients that were committed, by region: `gradient_norm/REGION`.

    They're taken as the optimizers are about to step, by a hook that stands in PyTorch's own table and only in steps
    that are measured: after the step, no gradient is left.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._found: list[Tensor] = []
        self._regions: list[str] = []
        self._seen: set[int] = set()

    def open(self, run: WatchedRun) -> None:
        """Find the regions."""
        self._region_of = {id(p): name for name, own in parameter_groups(run).items() for p in own}

    def before(self, clock: Clock, number: int) -> None:
        """Put the hook in place."""
        self._regions = []
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._see)

    def _see(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:  # noqa: ANN401  (its own)
        gradients: list[Tensor] = []
        if getattr(optimizer, "holds_pieces", False):
            msg = (
                "GradientNorms sees what optimizers hold, and with this sharding each rank holds pieces. Leave it "
                "out (every step's outcome has the norm of all gradients), or train with "
                "RunConfig(sharding='replicated')."
            )
            raise PlanError(msg)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            region = self._region_of.get(id(parameter))
            # Of an optimizer that calls another one's step, or its base class's, the hook is called twice.
            if region is not None and parameter.grad is not None and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._regions.append(region)
                gradients.append(parameter.grad)
        if gradients:
            self._found.append(_norms(gradients))

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return the norms that were taken."""
        return {"norms": torch.cat(self._found)} if self._found else {}

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Return a norm for each region that has learnt."""
        return _joined("gradient_norm", self._regions, found["norms"]) if found else {}

    def end(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._found, self._seen = None, [], set()


class UpdateNorms(Monitor):
    """Norms of what a step changed, by region: `update_norm/REGION`.

    The first time and every tenth after it, those of the weights, too: `weight_norm/REGION`.

    In a measured step, and only there, the parameters are held twice.
    """

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def open(self, run: WatchedRun) -> None:
        """Find the regions."""
        groups = parameter_groups(run)
        self._regions = [name for name, own in groups.items() for _ in own]
        self._parameters = [parameter for own in groups.values() for parameter in own]

    def before(self, clock: Clock, number: int) -> None:
        """Copy the parameters."""
        self._takes_weights = number % _WEIGHTS_EVERY == 1
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return the norms of the differences, and of the weights."""
        new = [parameter.detach() for parameter in self._parameters]
        torch._foreach_sub_(self._before, new)
        found = {"update_norm": _norms(self._before)}
        return {**found, "weight_norm": _norms(new)} if self._takes_weights else found

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Return them for each region."""
        return {
            name: norm for what, norms in found.items() for name, norm in _joined(what, self._regions, norms).items()
        }

    def end(self) -> None:
        """Let go of the copies."""
        self._before = []
