"""The way back to an exported model: Python that puts its layers into the plain model of the user's own class.

It's written for who has the weights, the class of the model, and PyTorch: what surgery has added stands in the code.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cosmati.core.method import Method
from cosmati.core.plan import describe
from cosmati.export import plain_layers
from cosmati.export.folding import Folded
from cosmati.export.plain_layers import KeptShare, SqueezeExcitation

_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_OPTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: _CONVOLUTION,
    nn.Linear: ("in_features", "out_features"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation"),
    nn.AvgPool2d: ("kernel_size", "stride"),
    nn.ReflectionPad2d: ("padding",),
}
"""Options of the layers that folding makes."""
_NOTE = re.compile(r"  # noqa.*$", re.MULTILINE)
"""For this project's own linter."""

_HEAD = '''"""Put the layers of this export into a model of its own class: model = rebuild(MyModel()).

Then load the weights: safetensors.torch.load_model(model, "model.safetensors"), and model.eval().
"""

from collections import OrderedDict

import torch
from torch import nn
'''


def needs_rebuilding(folded: Folded) -> bool:
    """Say whether the model's own class alone computes something else."""
    return bool(folded.replaced or folded.shares or folded.kept or folded.untied)


def methods_of_others(methods: Sequence[Method]) -> list[str]:
    """Return the methods with surgery that isn't Cosmati's: what it has put in can't be told from the user's layers."""
    return [describe(method) for method in methods if not _is_ours(type(method).apply)]


def _is_ours(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("cosmati.")


def rebuilding_code(folded: Folded, methods: Sequence[Method]) -> str | None:
    """Return a file with a function `rebuild(model)`; None where methods can't be written down as calls.

    Args:
        folded: the exported model.
        methods: of the run, in the order in which they rebuilt it: those that left layers which stay are applied.
    """
    kept = {kind.__module__ for kind in folded.kept.values()}
    applied = [method for method in methods if type(method).__module__ in kept]
    if {type(method).__module__ for method in applied} != kept or not all(map(_is_python, map(describe, applied))):
        return None
    used = [kind for kind in (SqueezeExcitation, KeptShare) if _uses(folded, kind)]
    sources = "".join(f"\n\n{_NOTE.sub('', inspect.getsource(kind))}" for kind in used)
    imports = _HEAD
    if used:
        imports = imports.replace("\nimport torch\nfrom torch import nn", _imports_of_layers())
    body = [f"    model = methods.{describe(method)}.apply(model)" for method in applied]
    body += _placed(folded) + _shares(folded) + _ties(folded)
    if applied:
        imports += "\nfrom cosmati import methods\n"
    return f"{imports}{sources}\n\ndef rebuild(model):\n" + "\n".join([*body, "    return model", ""])


def _imports_of_layers() -> str:
    source = inspect.getsource(plain_layers).partition("from __future__ import annotations")[2]
    return source.partition("\n\n\nclass ")[0].strip()


def _uses(folded: Folded, kind: type) -> bool:
    if kind is KeptShare:
        return bool(folded.shares)
    return any(isinstance(part, kind) for layer in folded.replaced.values() for part in layer.modules())


def _placed(folded: Folded) -> list[str]:
    """Return the lines that put plain layers in their places; one that stands in several stays one."""
    outer = {
        name: layer
        for name, layer in folded.replaced.items()
        if not any(name.startswith(f"{other}.") or (name and not other) for other in folded.replaced)
    }
    lines: list[str] = []
    names: dict[nn.Module, str] = {}
    for name, layer in outer.items():
        if layer not in names:
            names[layer] = f"layer_{len(names)}"
            lines.append(f"    {names[layer]} = {expression(layer)}")
        place = f"    model.set_submodule({name!r}, {names[layer]})" if name else f"    model = {names[layer]}"
        lines.append(place)
    return lines


def _shares(folded: Folded) -> list[str]:
    lines, seen = [], set[nn.Module]()
    for name, share in folded.shares.items():
        block = folded.model.get_submodule(name)
        if block not in seen:
            place = f"model.get_submodule({name!r})" if name else "model"
            lines.append(f"    {place}.register_forward_hook(KeptShare({share!r}), prepend=True, with_kwargs=True)")
        seen.add(block)
    return lines


def _ties(folded: Folded) -> list[str]:
    """Return the lines that tie weights of new layers to others again, and untie those that aren't one any more."""
    names: dict[int, list[str]] = {}
    for name, parameter in folded.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    new = tuple(f"{name}." for name in folded.replaced)
    lines = []
    for first, *others in names.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            if other.startswith(new) or first.startswith(new):
                lines.append(f"    setattr(model.get_submodule({owner!r}), {leaf!r}, model.get_parameter({first!r}))")
    for name in folded.untied:
        owner, _, leaf = name.rpartition(".")
        own = f"nn.Parameter(model.get_parameter({name!r}).detach().clone())"
        lines.append(f"    setattr(model.get_submodule({owner!r}), {leaf!r}, {own})")
    return lines


def expression(layer: nn.Module) -> str:
    """Return the call that makes a layer of those that folding makes; its weights are any."""
    if isinstance(layer, nn.Sequential):
        inner = ", ".join(f"({name!r}, {expression(part)})" for name, part in layer.named_children())
        return f"nn.Sequential(OrderedDict([{inner}]))"
    if isinstance(layer, SqueezeExcitation):
        width, num_features = layer.squeeze.shape
        return f"SqueezeExcitation({num_features}, {width}{_dtype(layer)})"
    options: Mapping[str, Any] = {name: getattr(layer, name) for name in _OPTIONS[type(layer)]}
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    if "weight" in layer._parameters:  # noqa: SLF001
        text += f", bias={layer.bias is not None}{_dtype(layer)}"
    return f"nn.{type(layer).__name__}({text})"


def _dtype(layer: nn.Module) -> str:
    dtype = str(next(layer.parameters()).dtype)
    return "" if dtype == "torch.float32" else f", dtype={dtype}"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True
