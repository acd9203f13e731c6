"""Compiles a model block by block."""

from __future__ import annotations

import torch
from torch import nn


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of every `nn.ModuleList`, or where there's none the parts of `nn.Sequential` with weights."""
    blocks = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    return blocks or [
        child
        for module in model.modules()
        if isinstance(module, nn.Sequential)
        for child in module
        if next(child.parameters(), None) is not None
    ]


def compile_blocks(model: nn.Module, *, is_sharded: bool = False) -> None:
    """Compile each block by itself, in place; names stay as they are.

    Whole-model compilation would compute denied gradients anyway; block by block, region borders can be graph borders.

    Args:
        model: whose blocks.
        is_sharded: blocks have hooks that gather their weights, and these stay outside of the graphs.
    """
    for block in compiled_blocks(model):
        if is_sharded:
            block.forward = torch.compile(block.forward, dynamic=False)
        else:
            block.compile(dynamic=False)


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled by itself, with or without its hooks."""
    with_hooks = module._compiled_call_impl is not None  # noqa: SLF001
    return with_hooks or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
