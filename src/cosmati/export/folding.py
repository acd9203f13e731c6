"""Surgery folded into plain layers: what a method has put into a model, in PyTorch's own words.

A layer is either *turned back* (its class is the native one again, and no weight has another name), *replaced* (by
plain layers that compute the same; its weights may get other names), or *kept*: nothing plain computes the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from cosmati.core.isolated import isolated_classes, isolated_modules
from cosmati.export.comparison import kept_buffers
from cosmati.export.plain_layers import KeptShare, SqueezeExcitation
from cosmati.methods.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d
from cosmati.methods.building_blocks.isolated_layers import OfClasses
from cosmati.methods.building_blocks.surgery import replace_modules, ungraft
from cosmati.methods.factorize import FactorizedConv2d, FactorizedLinear
from cosmati.methods.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from cosmati.methods.gyro_dropout import GyroDropoutLayer
from cosmati.methods.isolated_adapters import drop_isolated
from cosmati.methods.low_precision_norms import GroupNormInAutocast, LayerNormInAutocast
from cosmati.methods.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from cosmati.methods.stochastic_depth import StochasticBlock
from cosmati.methods.weight_standardization import StandardizedWeight, standardize_weight

_NATIVE: dict[type[nn.Module], tuple[type[nn.Module], tuple[str, ...]]] = {
    GhostBatchNorm1d: (nn.BatchNorm1d, ("ghost_batch_size",)),
    GhostBatchNorm2d: (nn.BatchNorm2d, ("ghost_batch_size",)),
    GhostBatchNorm3d: (nn.BatchNorm3d, ("ghost_batch_size",)),
    LayerNormInAutocast: (nn.LayerNorm, ("low_precision",)),
    GroupNormInAutocast: (nn.GroupNorm, ("low_precision",)),
    GyroDropoutLayer: (
        nn.Dropout,
        ("sigma", "tau", "interval", "seed", "name", "step", "counts", "offset", "_masks", "forward_caches"),
    ),
}
"""Layers that evaluate as PyTorch's do, with what they hold beside."""

_OWN = "cosmati.methods."


@dataclass
class Folded:
    """A model in plain layers.

    Attributes:
        model: as given, changed in place; or what stands in the root's place.
        turned_back: what became native again, by name: the class that it was.
        replaced: the layer that stands there now, by each name of the place.
        shares: by which share a block counts (stochastic depth), by each name.
        kept: the layers that stay as surgery made them, by name: their classes.
        untied: parameters that were one with another, and aren't any more.
        own: methods that may have rebuilt the model and aren't Cosmati's, as they're described.
    """

    model: nn.Module
    turned_back: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, nn.Module] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    kept: dict[str, type[nn.Module]] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


@torch.no_grad()
def fold(model: nn.Module, channels: Mapping[str, int] | None = None) -> Folded:
    """Put plain layers in the places of surgery's, in place, in a model that is only evaluated from here on.

    Args:
        model: a copy of the caller's own; its root may be replaced.
        channels: of the inputs of blurred pools, by name (see `channels_seen`). A pool whose channels aren't known is
            blurred by two averages of neighbours, which is the same filter to rounding.

    Returns:
        The model, and what has become of each layer.
    """
    done = Folded(model.eval())
    _drop_resting(model, done)
    names, tied = _names(model), _ties(model)
    _take_grafts_off(model, names, done)
    merged = _read_by_parents(model)
    for module, places in reversed(names.items()):  # What is inside first: plain layers are made of it.
        if type(module) in _NATIVE:
            native, attributes = _NATIVE[type(module)]
            done.turned_back |= dict.fromkeys(places, type(module).__name__)
            module.__class__ = native
            for name in attributes:
                module.__dict__.pop(name, None)
        elif (plain := _plain(module, (channels or {}).get(places[0]), is_read=module in merged)) is not None:
            done.model = replace_modules(done.model, {module: plain})
            done.replaced |= dict.fromkeys(places, plain)
    done.model.eval()
    done.replaced = {name: done.replaced[name] for places in names.values() for name in places if name in done.replaced}
    there = dict(done.model.named_parameters(remove_duplicate=False))
    done.untied = [n for n, first in tied.items() if n in there and first in there and there[n] is not there[first]]
    for module, places in _names(done.model).items():
        own = [kind for kind in type(module).__mro__ if kind.__module__.startswith(_OWN)]
        if own:
            done.kept |= dict.fromkeys(places, own[0])
    return done


@torch.no_grad()
def channels_seen(model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, int]:
    """Return how many channels each blurred pool is given, by name, in one forward pass over some inputs."""
    seen: dict[str, int] = {}
    pools = [(name, m) for name, m in model.named_modules() if type(m) in (BlurMaxPool2d, BlurPool2d)]
    if not pools:
        return seen

    def note(name: str, given: tuple[Tensor, ...]) -> None:
        seen[name] = given[0].shape[1]

    handles = [pool.register_forward_pre_hook(lambda _, given, name=name: note(name, given)) for name, pool in pools]
    try:
        with kept_buffers(model):
            model(*inputs[0], **inputs[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _drop_resting(model: nn.Module, done: Folded) -> None:
    """Leave out what is classes' own and isn't enabled: the model that was evaluated is the one without it."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, OfClasses)}
    enabled = {module.class_name for module in isolated_modules(model).values() if module.is_enabled}
    drop_isolated(model, *(set(isolated_classes(model)) - enabled))
    done.turned_back |= {n: "OfClasses" for n, module in layers.items() if not isinstance(module, OfClasses)}


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all names of each module: one may stand in several places."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def _ties(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by the others."""
    first: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return {n: first[id(p)] for n, p in named if first.setdefault(id(p), n) != n}


def _take_grafts_off(model: nn.Module, names: Mapping[nn.Module, list[str]], done: Folded) -> None:
    standardized: dict[int, nn.Parameter] = {}  # A weight that several layers hold stays one.
    for module in list(model.modules()):
        if isinstance(module, StandardizedWeight):
            own = cast("nn.Parameter", module._parameters["weight"])  # noqa: SLF001  (what it reads isn't what it holds)
            ungraft(module, StandardizedWeight)
            new = standardized.setdefault(id(own), nn.Parameter(standardize_weight(own), own.requires_grad))
            module._parameters["weight"] = new  # noqa: SLF001
            done.turned_back |= dict.fromkeys(names[module], "StandardizedWeight")
        if isinstance(module, StochasticBlock):
            method, rate = module.stochastic_method, module.drop_rate
            ungraft(module, StochasticBlock)
            for name in ("drop_rate", "drop_scale", "stochastic_method", "_keeps_shape"):
                module.__dict__.pop(name, None)
            if method == "block" and rate > 0:
                # Before the user's own hooks, which are given what the block returned.
                module.register_forward_hook(KeptShare(1 - rate), prepend=True, with_kwargs=True)
                done.shares |= dict.fromkeys(names[module], 1 - rate)
            else:
                done.turned_back |= dict.fromkeys(names[module], "StochasticBlock")


def _read_by_parents(model: nn.Module) -> set[nn.Module]:
    """Return layers whose `weight` PyTorch's own blocks read past their forward: these have to be one layer."""
    readers = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    return {child for module in model.modules() if isinstance(module, readers) for child in module.children()}


def _plain(module: nn.Module, channels: int | None, *, is_read: bool) -> nn.Module | None:  # noqa: PLR0911
    """Return plain layers that compute what a layer does; None where it's plain already, or nothing does."""
    kind = type(module)
    has_weight = getattr(module, "_parameters", {}).get("weight") is not None
    if isinstance(module, BlurConv2d) and kind is BlurConv2d and has_weight:
        if module.blur_first:
            return _sequence(blur=_blur(module.in_channels, 1, module.weight), convolution=_convolution(module))
        blur = _blur(module.out_channels, module.stride, module.weight)
        return _sequence(convolution=_convolution(module, stride=1), blur=blur)
    if isinstance(module, BlurMaxPool2d) and kind is BlurMaxPool2d and not module.ceil_mode:
        pool = nn.MaxPool2d(module.kernel_size, 1, module.padding, module.dilation)
        return nn.Sequential(OrderedDict([("pool", pool), *_blur_of(channels, module.stride, module.blur_kernel)]))
    if isinstance(module, BlurPool2d) and kind is BlurPool2d:
        return nn.Sequential(OrderedDict(_blur_of(channels, module.stride, module.blur_kernel)))
    if isinstance(module, FactorizedLinear | FactorizedConv2d) and kind in (FactorizedLinear, FactorizedConv2d):
        if is_read and isinstance(module, FactorizedLinear):
            return _linear(module)
        return _sequence(reduce=module.reduce, expand=module.expand)
    if isinstance(module, SqueezeExciteConv2d) and kind is SqueezeExciteConv2d and has_weight:
        return _sequence(convolution=_convolution(module), squeeze_excite=_excitation(module.squeeze_excite))
    if isinstance(module, SqueezeExcite2d) and kind is SqueezeExcite2d:
        return _excitation(module)
    return None


def _sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _convolution(module: nn.Conv2d, **changed: Any) -> nn.Conv2d:  # noqa: ANN401  (options of nn.Conv2d)
    """Return the plain convolution that a layer derives from, with the very weights."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    options: dict[str, Any] = {name: getattr(module, name) for name in names} | changed
    layer = nn.Conv2d(**options, bias=False, device="meta")
    layer.weight = module.weight
    layer.register_parameter("bias", cast("nn.Parameter | None", module.bias))
    return layer


def _blur(channels: int, stride: Any, like: Tensor) -> nn.Conv2d:  # noqa: ANN401  (a size)
    """Return the filter as a convolution of each channel by itself."""
    layer = nn.Conv2d(
        channels, channels, 3, stride, 1, groups=channels, bias=False, padding_mode="reflect", device="meta"
    )
    row = torch.tensor([0.25, 0.5, 0.25], device=like.device, dtype=like.dtype)
    kernel = (row[:, None] * row).repeat(channels, 1, 1, 1)
    layer.weight = nn.Parameter(kernel, requires_grad=False)
    return layer


def _blur_of(channels: int | None, stride: Any, like: Tensor) -> list[tuple[str, nn.Module]]:  # noqa: ANN401
    if channels is not None:
        return [("blur", _blur(channels, stride, like))]
    # [1, 2, 1] / 4 is [1, 1] / 2 twice.
    return [("edges", nn.ReflectionPad2d(1)), ("blur", nn.AvgPool2d(2, 1)), ("downsample", nn.AvgPool2d(2, stride))]


def _linear(module: FactorizedLinear) -> nn.Linear:
    """Return the product of both factors as one layer."""
    weight = module.weight
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=module.expand.weight.requires_grad)
    layer.register_parameter("bias", cast("nn.Parameter | None", module.expand.bias))
    return layer


def _excitation(module: SqueezeExcite2d | SqueezeExcitation) -> SqueezeExcitation:
    if isinstance(module, SqueezeExcitation):
        return module
    layer = SqueezeExcitation(module.excite.shape[0], module.excite.shape[1])
    layer.squeeze, layer.excite = module.squeeze, module.excite
    return layer
