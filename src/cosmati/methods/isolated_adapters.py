"""Adapters and experts of a class's own, read by its rows alone and denied to all others.

Low-rank adapters are those of Hu et al. (2021, arXiv 2106.09685), one for each class; an expert is a copy of a layer
that stands in its place for the class's rows, or beside it behind a gate that begins at zero (Bachlechner et al., 2020,
arXiv 2003.04887). Under a policy that confines a class to what is its own, dropping it leaves the bits of a run that
never saw the class's content (DEMix layers, Gururangan et al., 2021, arXiv 2108.05036, drop experts of domains, without
that promise).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cosmati.core.isolated import Isolated, isolated_classes, isolated_modules, running
from cosmati.core.method import Method, Stage
from cosmati.core.rng import position_generator
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.isolated_layers import (
    Expert,
    LowRankAttention,
    LowRankConv,
    LowRankLinear,
    OfClasses,
)
from cosmati.methods.building_blocks.surgery import (
    Optimizers,
    graft,
    is_loaded_instance,
    join_groups,
    ungraft,
    warn_unchanged,
)

__all__ = ["IsolatedAdapters", "apply_isolated", "drop_isolated", "enabled_classes"]

OwnKind = Literal["low_rank", "expert", "beside"]
_KINDS = ("low_rank", "expert", "beside")


def apply_isolated(
    model: nn.Module,
    classes: str | Sequence[str],
    layers: str | Sequence[str] = "*",
    kind: OwnKind = "low_rank",
    rank: int = 8,
    scale: float = 1.0,
    optimizers: Optimizers = None,
    *,
    seed: int = 0,
) -> nn.Module:
    """Give classes modules of their own in some layers, in place.

    They're named `LAYER.isolated.CLASS` and run nowhere until something says for which rows: a `Trainer` under a
    policy, or `enabled_classes`. Layers stay the same objects with the same parameters, hooks and names. What a class
    begins with depends on its name and the layer's, not on which other classes there are.

    Args:
        model: the model.
        classes: names of classes, as policies have them.
        layers: globs over names of modules; `*` matches dots too.
        kind: `low_rank` adds adapters to every `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` and `nn.MultiheadAttention` among
            the layers and within them; `expert` puts a copy of each layer in its place, `beside` next to it.
        rank: of adapters.
        scale: multiplies what adapters add.
        optimizers: new parameters join the groups that hold the layer's first parameter.
        seed: of adapters.

    Returns:
        The same model.

    Raises:
        PlanError: options that can't be; experts for all layers, or for a container of layers; some names name none.

    Warns:
        UserWarning: nothing is changed.
    """
    names, globs = _listed(classes), _listed(layers)
    _check(names, globs, kind, rank, scale)
    found = dict(_layers(model, globs, kind)) if names else {}
    _refuse_containers(found)
    _refuse_idle(globs, found, kind)
    for path, layer in found.items():
        if not isinstance(layer, OfClasses):
            _refuse_odd(path, layer)
            graft(layer, OfClasses)
            layer.add_module("isolated", nn.ModuleDict().train(layer.training))
        for name in names:
            _add(path, layer, name, partial(_made, kind=kind, rank=rank, scale=scale, seed=seed), optimizers)
    for module in model.modules():
        # In evaluation it reads its layers' weights by itself, past all that is isolated.
        if isinstance(module, nn.TransformerEncoderLayer) and isolated_classes(module):
            module.activation_relu_or_gelu = 0
    if names and not found:
        what = f"{', '.join(globs)} names no layer of {type(model).__name__}" + (
            " that is a Linear, Conv1d, Conv2d or MultiheadAttention" if kind == "low_rank" else ""
        )
        warn_unchanged(f"IsolatedAdapters changes nothing: {what}. Name others, or leave it out.", model)
    return model


@contextmanager
def enabled_classes(model: nn.Module, *classes: str) -> Iterator[None]:
    """Let the modules of some classes run, and those of no other, as long as the context stands.

    It's for evaluation, export, inference and loops of one's own, where whoever calls knows the rows. A governed
    `Trainer` says it itself, for each microbatch. Without it, no class's own modules run.

    Args:
        model: with isolated modules.
        classes: whose modules run, for all rows; none switches all off.

    Raises:
        PlanError: the model has nothing of such a class.

    Example:
        >>> with cf.enabled_classes(model, "customer/pii"):
        ...     logits = model(rows)
    """
    unknown = sorted(set(classes) - set(known := isolated_classes(model)))
    if unknown:
        msg = (
            f"{type(model).__name__} has nothing of class {', '.join(map(repr, unknown))} to enable; it has "
            f"{', '.join(map(repr, known)) or 'no isolated modules'}. Apply IsolatedAdapters to it first, or mend the "
            "name."
        )
        raise PlanError(msg)
    with running(isolated_modules(model).values(), dict.fromkeys(classes, True)):
        yield


def drop_isolated(model: nn.Module, *classes: str) -> nn.Module:
    """Take away all that is classes' own, in place; what is left are the shared weights, and other classes'.

    Args:
        model: with isolated modules.
        classes: whose; there have to be some of each.

    Returns:
        The same model.

    Raises:
        PlanError: the model has nothing of a class.
    """
    unknown = sorted(set(classes) - set(known := isolated_classes(model)))
    if unknown:
        msg = f"{type(model).__name__} has nothing of class {', '.join(unknown)} to drop; it has of {list(known)}."
        raise PlanError(msg)
    for layer in [module for module in model.modules() if isinstance(module, OfClasses)]:
        for key, module in list(layer.isolated.items()):
            if isinstance(module, Isolated) and module.class_name in classes:
                del layer.isolated[key]
        if not layer.isolated:
            del layer.isolated
            ungraft(layer, OfClasses)
    return model


@dataclass(frozen=True, kw_only=True)
class IsolatedAdapters(Method):
    """Give classes adapters or experts of their own, which only their rows read.

    Which rows those are says the policy of the run: without one they rest, as they do in evaluation. A policy names
    them as `tag: isolated/CLASS`.

    Args:
        classes: names of classes, as the policy has them; none is off.
        layers: globs over names of modules; `*` matches dots too.
        kind: `low_rank` adds adapters to linear layers, convolutions and attention; `expert` puts a copy of each layer
            in its place, `beside` next to it, behind a gate that begins at zero.
        rank: of adapters.
        scale: multiplies what adapters add.
        seed: of adapters.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    classes: str | Sequence[str] = ()
    layers: str | Sequence[str] = "*"
    kind: OwnKind = "low_rank"
    rank: int = 8
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        object.__setattr__(self, "classes", _listed(self.classes))
        object.__setattr__(self, "layers", _listed(self.layers))
        _check(self.classes, self.layers, self.kind, self.rank, self.scale)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with what is classes' own."""
        if not self.classes:
            return model
        return apply_isolated(
            model, self.classes, self.layers, self.kind, self.rank, self.scale, optimizers, seed=self.seed
        )


def _refuse_containers(layers: Mapping[str, nn.Module]) -> None:
    kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    if found := [f"{path!r} ({type(layer).__name__})" for path, layer in layers.items() if isinstance(layer, kinds)]:
        msg = (
            f"No expert can stand in the place of {', '.join(found[:5])}: a container runs, or gives, whatever is put "
            "into it. Name its parts in layers=, or make it a module with a forward of its own."
        )
        raise PlanError(msg)


def _refuse_idle(globs: Sequence[str], layers: Mapping[str, nn.Module], kind: OwnKind) -> None:
    idle = [g for g in globs if not any(_covers(g, path, within=kind == "low_rank") for path in layers)]
    if layers and idle:
        msg = f"layers: {', '.join(map(repr, idle))} names no layer that could have something isolated. Mend it."
        raise PlanError(msg)


def _refuse_odd(path: str, layer: nn.Module) -> None:
    if hasattr(layer, "isolated"):
        msg = f"{path or 'The model'} has something called 'isolated' already. Rename it, or leave that layer out."
        raise PlanError(msg)
    if not next(layer.parameters()).is_floating_point():
        kind = next(layer.parameters()).dtype
        msg = f"The weight of {path or 'the model'} is {kind}, so nothing can be added to it. Leave that layer out."
        raise PlanError(msg)


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _check(classes: Sequence[str], layers: Sequence[str], kind: str, rank: int, scale: float) -> None:
    problems = []
    if bad := [name for name in classes if not isinstance(name, str) or not name or "." in name]:
        problems.append(f"{bad!r} name no class")
    if kind not in _KINDS:
        problems.append(f"kind={kind!r} is none of {_KINDS}")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 or not 0 < scale < math.inf:
        problems.append(f"rank={rank!r} is a whole number of at least 1, and scale={scale!r} positive")
    if kind != "low_rank" and "*" in layers:
        problems.append("an expert copies whole layers, so say which: layers='blocks.*.feed_forward'")
    if problems:
        msg = f"IsolatedAdapters can't be built: {'; '.join(problems)}."
        raise PlanError(msg)


def _layers(model: nn.Module, globs: Collection[str], kind: OwnKind) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that are changed, by name; none within what is isolated already."""
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, Isolated) or any(path.startswith(f"{outer}.".lstrip(".")) for outer in inside):
            inside.add(path)
            continue
        is_named = any(_covers(glob, path, within=kind == "low_rank") for glob in globs)
        if not is_named or (kind == "low_rank" and not _is_native(module)):
            continue
        if next(module.parameters(), None) is not None:
            # What an attention layer holds, it reads by itself.
            inside |= {path} if isinstance(module, nn.MultiheadAttention) or kind != "low_rank" else set()
            yield path, module


_NATIVE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)
_TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)
"""GPT-2's linear layers, whose weights are [in_features, out_features]."""


def _is_native(module: nn.Module) -> bool:
    return isinstance(module, _NATIVE) or is_loaded_instance(module, _TRANSPOSED)


def _covers(glob: str, path: str, *, within: bool) -> bool:
    return fnmatchcase(path, glob) or (within and fnmatchcase(path, f"{glob}.*"))


def _made(path: str, layer: nn.Module, name: str, *, kind: OwnKind, rank: int, scale: float, seed: int) -> Isolated:
    if kind != "low_rank":
        return Expert(name, drop_isolated(copy.deepcopy(layer), *isolated_classes(layer)), beside=kind == "beside")
    generator = position_generator(seed, f"isolated {name} {path}")
    if isinstance(layer, nn.MultiheadAttention):
        return LowRankAttention(name, layer, rank, scale, generator)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return LowRankConv(name, layer, rank, scale, generator)
    weight = layer.weight
    assert isinstance(weight, Tensor), "of a linear layer"
    return LowRankLinear(name, weight if isinstance(layer, nn.Linear) else weight.t(), rank, scale, generator)


def _add(
    path: str, layer: nn.Module, name: str, make: Callable[[str, nn.Module, str], Isolated], optimizers: Optimizers
) -> None:
    """Give a layer what is a class's own, unless it has it."""
    assert isinstance(layer, OfClasses), "grafted"
    if any(isinstance(one, Isolated) and one.class_name == name for one in layer.isolated.values()):
        return
    beside = next(layer.parameters())
    own = make(path, layer, name).train(layer.training)
    # A dictionary of modules has methods, which no module may be called like.
    key = name + "_" * hasattr(nn.ModuleDict, name)
    layer.isolated[key] = own
    prefix = f"{path}.isolated.{key}".lstrip(".")
    join_groups(optimizers, beside, dict(own.named_parameters(prefix)))
