"""What methods that rebuild models have in common: layers change places, and weights find their optimizers."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cosmati.errors import PlanError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Graft(nn.Module):
    """Base of what surgery adds to layers whatever their class: `graft` combines it with that class.

    The combined class is made when the program runs, so no import finds it: its objects are pickled as the classes
    that they are made of.

    Class attributes:
        prefix: of the combined class's name.
    """

    prefix: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401  (typeshed's own)
        own = type(self)
        kind, *grafts = _made_of(own)
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple), "a module is no global"
        make, arguments, *state = reduced
        return _regraft, (grafts, make, tuple(kind if a is own else a for a in arguments)), *state


def graft(layer: nn.Module, part: type[Graft]) -> None:
    """Let a layer have a graft's attributes and methods before those of its own class, in place.

    Raises:
        PlanError: the layer's own forward stands before any class's.
    """
    if "forward" in layer.__dict__ and "forward" in part.__dict__:
        msg = (
            f"This {type(layer).__name__} has had its forward replaced, on the object itself, so {part.prefix} would "
            "change its class in vain. Apply methods first, and what replaces forward (offloading, say) after them."
        )
        raise PlanError(msg)
    layer.__class__ = _combined(part, type(layer))  # type: ignore[arg-type]  # mypy asks whether an instance hashes


def ungraft(layer: nn.Module, part: type[Graft]) -> None:
    """Take a graft off a layer, in place; its other grafts stay, in their order."""
    kind, *parts = _made_of(type(layer))
    layer.__class__ = kind
    for other in parts:
        if other is not part:
            graft(layer, other)


@cache
def _combined(part: type[Graft], kind: type[nn.Module]) -> type[nn.Module]:
    facts = {"__doc__": part.__doc__, "__module__": part.__module__, "_made_of": (*_made_of(kind), part)}
    return type(part.prefix + kind.__name__, (part, kind), facts)


def _made_of(kind: type[nn.Module]) -> tuple[Any, ...]:
    """Return the class that an import finds, and the grafts in their order."""
    own: tuple[Any, ...] = kind.__dict__.get("_made_of", (kind,)) if issubclass(kind, Graft) else (kind,)
    return own


def _regraft(grafts: list[type[Graft]], make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    layer = make(*arguments)
    for part in grafts:
        graft(layer, part)
    return layer


def join_groups(optimizers: Optimizers, beside: Tensor, new: Mapping[str, nn.Parameter]) -> None:
    """Put new parameters into every parameter group that holds another one, with its options.

    Args:
        optimizers: one, several or none.
        beside: the parameter whose groups they join.
        new: new parameters by name; the names are kept where the group keeps names.
    """
    for _, group in _groups_of(optimizers, beside):
        group["params"] += new.values()
        if "param_names" in group:
            group["param_names"] += new


def replace_in_groups(optimizers: Optimizers, old: Tensor, new: Mapping[str, nn.Parameter]) -> None:
    """Put new parameters into every parameter group in the place of another one, whose state is dropped.

    Args:
        optimizers: one, several or none.
        old: the parameter that goes.
        new: new parameters by name; none takes the old one out.

    Warns:
        UserWarning: the old one had been stepped already.
    """
    for optimizer, group in _groups_of(optimizers, old):
        place = next(i for i, parameter in enumerate(group["params"]) if parameter is old)
        group["params"][place : place + 1] = new.values()
        if "param_names" in group:
            group["param_names"][place : place + 1] = new
        if optimizer.state.pop(old, None):
            what = ", ".join(new) or "nothing"
            msg = (
                f"{type(optimizer).__name__} had stepped a weight that surgery replaces by {what}: its state "
                "(momentum and the like) is dropped. Apply methods before the first step."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)


def is_loaded_instance(module: nn.Module, paths: Iterable[str]) -> bool:
    """Say whether a module is of one of the classes "package.module.Class", or of a subclass.

    Nothing is imported for it: nobody has a module whose class isn't loaded.
    """
    for path in paths:
        package, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(package), name, None)
        if isinstance(kind, type) and isinstance(module, kind):
            return True
    return False


def strangers(model: nn.Module, known: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Return by name the modules that stand where known ones stand in other blocks, and aren't known.

    What changes only some of a model's blocks is refused rather than half done.
    """
    held = set(known)
    place_of = {name: re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    places = {place_of[name] for name, module in model.named_modules() if module in held}
    return {n: module for n, module in model.named_modules() if place_of[n] in places and module not in held}


def replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put layers in the places of others, in place; a layer may stand in several places, or be the root.

    New layers take over the old ones' hooks: the dictionaries themselves, so handles still remove them.

    Returns:
        The model, or what replaces it.
    """
    for old, new in replaced.items():
        new.train(old.training)
        new.__dict__ |= {name: value for name, value in old.__dict__.items() if "hook" in name}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # noqa: SLF001  (the same child may stand here twice)
            if child is not None and child in replaced:
                parent._modules[name] = replaced[child]  # noqa: SLF001
    return replaced.get(model, model)


def warn_unchanged(why: str, model: nn.Module, *native: type[nn.Module], stacklevel: int = 3) -> None:
    """Warn that a method found nothing to change, and name subclasses of the native layers that it changes."""
    layers = [type(module) for module in model.modules() if isinstance(module, native)]
    if names := sorted({kind.__name__ for kind in layers if kind not in native}):
        why += f" Subclasses are left alone, since their function isn't known; it has {', '.join(names)}."
    warnings.warn(why, UserWarning, stacklevel=stacklevel)


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules hold: tied weights."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        shared |= seen & own
        seen |= own
    return shared


def _groups_of(
    optimizers: Optimizers, parameter: Tensor
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, list[object]]]]:
    for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or ():
        for group in optimizer.param_groups:
            if any(other is parameter for other in group["params"]):
                yield optimizer, group
