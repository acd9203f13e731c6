"""The layers of a model, in the order of depth that its registration gives."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer: of each module that holds some of its own, as the model registers them.

    A parameter that several modules share belongs to the last of them.
    """
    holders: dict[nn.Parameter, nn.Module] = {}
    modules = list(model.modules())
    for module in modules:
        for parameter in module.parameters(recurse=False):
            holders[parameter] = module
    layers: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in modules}
    for parameter, module in holders.items():
        layers[module].append(parameter)
    return [layer for layer in layers.values() if layer]
