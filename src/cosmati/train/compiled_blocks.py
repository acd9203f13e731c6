"""Compiles a model block by block."""

from __future__ import annotations

from torch import nn


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of every `nn.ModuleList` and `nn.Sequential` by itself, in place; names stay as they are.

    Whole-model compilation would compute denied gradients anyway; block by block, region borders can be graph borders.
    """
    blocks = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    if not blocks:
        blocks = [
            child
            for module in model.modules()
            if isinstance(module, nn.Sequential)
            for child in module
            if next(child.parameters(), None) is not None
        ]
    for block in blocks:
        block.compile(dynamic=False)
