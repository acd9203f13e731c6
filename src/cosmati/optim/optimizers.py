"""Optimizers as frozen configurations: which parameters, which schedule, which options."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch.nn import Parameter

from cosmati.core.later import later
from cosmati.core.method import Coupling
from cosmati.core.named_settings import NamedSettings
from cosmati.errors import PlanError
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.foreign_schedules import schedule_in_place_of
from cosmati.optim.muon import OrthogonalizedMomentum, Scale
from cosmati.optim.schedules import Constant, Schedule

Named = Sequence[tuple[str, Parameter]]
ParameterFilter = str | tuple[str, ...] | Callable[[str, Parameter], bool]

_NOT_HIDDEN = re.compile(r"(^|[._])([a-z]*embed[a-z]*|emb|wte|wpe|positions?|heads?|classifier)([._]|$)")
_MAX_NAMED = 12
_CONSTANT = Constant()


def matrices(name: str, parameter: Parameter) -> bool:
    """Say whether a parameter is a hidden matrix, which Muon is for.

    Convolution kernels count as matrices [out channels, all others]. Embeddings and heads don't, by their
    names (a word of the path that contains `embed` or is `emb`, `wte`, `wpe`, `position`, `head`, a plural of
    these or `classifier`), nor does a matrix of one row or column, or of none.
    """
    is_matrix = parameter.ndim >= 2 and parameter.shape[0] > 1 and parameter.numel() // parameter.shape[0] > 1
    return is_matrix and _NOT_HIDDEN.search(name.lower()) is None


@dataclass(frozen=True, kw_only=True)
class Optimizer(NamedSettings):
    """Base of the configurations.

    Args:
        lr: learning rate, which the schedule multiplies.
        schedule: of the learning rate.
        parameters: which parameters it takes: a glob over their names, several, or a predicate of name and
            parameter. Of several optimizers, the first one that matches takes a parameter.

    Class attributes:
        owns: things that only one part of a run may hold, such as the evaluation weights (see `Method.owns`).
        couples: what it lets act on one another, as `Method.couples`: `regions` for one number over all parameters, or
            for moving what has no gradient. What is built is tried out at setup where PyTorch doesn't ship it.
    """

    other_names: ClassVar[dict[str, str]] = {
        "learning_rate": "lr",
        "lr_scheduler": "schedule",
        "scheduler": "schedule",
        "params": "parameters",
        "wd": "weight_decay",
    }
    owns: ClassVar[frozenset[str]] = frozenset()
    couples: ClassVar[frozenset[Coupling]] = frozenset()

    lr: float
    schedule: Schedule = _CONSTANT
    parameters: ParameterFilter = "*"

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            msg = f"{type(self).__name__}(lr={self.lr}): a learning rate is a number >= 0."
            raise PlanError(msg)
        if not isinstance(self.schedule, Schedule) or isinstance(self.schedule, type):
            msg = (
                f"{type(self).__name__}(schedule={self.schedule!r}) is no schedule. Give one that is made, such as "
                "Cosine(warmup='0.1dur'), or an object with multiplier(fraction_elapsed, budget), which returns what "
                "multiplies the learning rate."
            )
            if words := schedule_in_place_of(self.schedule):
                msg = f"{type(self).__name__}(schedule=...): {words}."
            raise PlanError(msg)

    def takes(self, name: str, parameter: Parameter) -> bool:
        """Say whether a parameter matches."""
        if callable(self.parameters):
            return self.parameters(name, parameter)
        globs = (self.parameters,) if isinstance(self.parameters, str) else self.parameters
        return any(fnmatchcase(name, glob) for glob in globs)

    @abstractmethod
    def build(self, named_parameters: Named) -> torch.optim.Optimizer:
        """Return the optimizer over some parameters."""


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent.

    Args:
        momentum: in [0, 1).
        nesterov: look ahead by one step of the momentum.
        weight_decay: added to the gradient, as `torch.optim.SGD` has it: not decoupled.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
        fused: one kernel instead of several (see `_implementation`).
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_vectors: bool = True
    fused: bool = False

    def build(self, named_parameters: Named) -> torch.optim.SGD:
        """Return `torch.optim.SGD` over some parameters."""
        return torch.optim.SGD(
            parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors),
            self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            **_implementation(fused=self.fused, foreach=not (self.momentum and _has_narrow(named_parameters))),
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 1711.05101).

    Args:
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: decoupled, times the learning rate.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
        fused: one kernel instead of several (see `_implementation`).
        cautious: decay only where update and weight have the same sign (Chen et al., 2510.12402).
        hyperball: keep each matrix's Frobenius norm, instead of a decay, and let the learning rate be an update's
            length as a share of it (Wen et al., 2606.16899); for matrices alone.

    Raises:
        PlanError: fused together with one of the last two, which PyTorch's kernel hasn't.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_vectors: bool = True
    fused: bool = False
    cautious: bool = later(default=False)
    hyperball: bool = later(default=False)

    def __post_init__(self) -> None:
        """Check that the implementation has what is asked for."""
        super().__post_init__()
        if self.fused and (self.cautious or self.hyperball):
            msg = "AdamW(fused=True) is PyTorch's kernel, which has neither cautious decay nor Hyperball. Leave it out."
            raise PlanError(msg)

    def build(self, named_parameters: Named) -> torch.optim.AdamW | BoundedAdamW:
        """Return `torch.optim.AdamW` over some parameters, or `BoundedAdamW` for what that one hasn't."""
        groups = parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors)
        if self.cautious or self.hyperball:
            more = {"cautious": self.cautious, "hyperball": self.hyperball}
            return BoundedAdamW(groups, self.lr, self.betas, self.eps, **more)
        return torch.optim.AdamW(
            groups,
            self.lr,
            betas=self.betas,
            eps=self.eps,
            **_implementation(fused=self.fused),
        )


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for hidden matrices; the rest needs another optimizer, after it in the list.

    Args:
        momentum: in [0, 1).
        nesterov: look ahead by one step of the momentum.
        weight_decay: decoupled, times the learning rate.
        num_iterations: of Newton-Schulz.
        scale: `aspect`, or `rms` to use AdamW's learning rates (see `cosmati.optim.muon.OrthogonalizedMomentum`).
        bfloat16: iterate in bfloat16 on a CPU too, over all matrices of one shape together; 3.5 to 4 times as fast
            on CPUs that multiply bfloat16.
        cautious: decay only where update and weight have the same sign (Chen et al., 2510.12402).
        hyperball: keep each matrix's Frobenius norm, instead of a decay, and let the learning rate be an update's
            length as a share of it (Wen et al., 2606.16899).
    """

    parameters: ParameterFilter = matrices
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    num_iterations: int = 5
    scale: Scale = "aspect"
    bfloat16: bool = False
    cautious: bool = later(default=False)
    hyperball: bool = later(default=False)

    def build(self, named_parameters: Named) -> OrthogonalizedMomentum:
        """Return Muon over some parameters."""
        return OrthogonalizedMomentum(
            [parameter for _, parameter in named_parameters],
            self.lr,
            self.momentum,
            self.nesterov,
            self.weight_decay,
            self.num_iterations,
            self.scale,
            self.bfloat16,
            self.cautious,
            self.hyperball,
        )


def assign_parameters(optimizers: Sequence[Optimizer], named_parameters: Named) -> list[list[tuple[str, Parameter]]]:
    """Give each parameter to the first optimizer that takes it.

    Raises:
        PlanError: a parameter that none takes, or an optimizer that gets none.
    """
    shares: list[list[tuple[str, Parameter]]] = [[] for _ in optimizers]
    orphans: list[str] = []
    for name, parameter in named_parameters:
        owner = next((i for i, optimizer in enumerate(optimizers) if optimizer.takes(name, parameter)), None)
        if owner is None:
            orphans.append(name)
        else:
            shares[owner].append((name, parameter))
    if orphans:
        more = f" and {len(orphans) - _MAX_NAMED} more" if len(orphans) > _MAX_NAMED else ""
        msg = (
            f"No optimizer takes {', '.join(orphans[:_MAX_NAMED])}{more}. Add one for the rest at the end, "
            "such as AdamW(lr=1e-3), which takes '*'; or freeze them with requires_grad_(False)."
        )
        raise PlanError(msg)
    for index, share in enumerate(shares):
        if not share:
            optimizer = optimizers[index]
            chosen = getattr(optimizer.parameters, "__qualname__", repr(optimizer.parameters))
            msg = (
                f"Optimizer {index}, {type(optimizer).__name__}(parameters={chosen}), gets no parameter: "
                "nothing matches, or those before it took all. Put the more particular one first, mend its "
                "filter, or remove it."
            )
            raise PlanError(msg)
    return shares


def parameter_groups(named_parameters: Named, weight_decay: float, *, decay_vectors: bool) -> list[dict[str, Any]]:
    """Return parameter groups: one, or those that decay and those that don't."""
    parameters = [parameter for _, parameter in named_parameters]
    if decay_vectors or not weight_decay:
        return [{"params": parameters, "weight_decay": weight_decay}]
    tall = [parameter for parameter in parameters if parameter.ndim >= 2]
    flat = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": tall, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _has_narrow(named_parameters: Named) -> bool:
    return any(p.is_cpu and p.dtype in (torch.bfloat16, torch.float16) for _, p in named_parameters)


def _implementation(*, fused: bool, foreach: bool = True) -> dict[str, bool]:
    """Choose among PyTorch's implementations.

    foreach gives the bits of the plain loop, whatever the number of threads and wherever a parameter is cut
    into shards. fused is 3 to 4 times as fast on CPU (4.8M parameters, AdamW, 1 thread: 3.4 ms for 13.1;
    29,000: 0.35 for 1.09), and its bits depend on the cut: they changed in 26 of 434 for AdamW, 99 for SGD
    with momentum. So it is asked for by name.

    SGD's momentum in narrow types takes the plain loop on a processor: there foreach rounds the momentum to the type,
    and doesn't where a parameter of the list has none yet, so that bits would follow from who is stepped together.
    """
    return {"fused": True} if fused else {"foreach": foreach}
