"""Which modules full sharding gathers each by itself."""

from __future__ import annotations

from collections import Counter

from torch import nn


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of every `nn.ModuleList`, or `nn.Sequential` where there is none, each with its own parameters.

    A block of which a parameter occurs elsewhere too (tied weights) stays with what is outside all blocks: one group
    holds all names of a parameter. So does a block within a block. A list of lists has the blocks of these.
    """
    holders: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    holders = holders or [module for module in model.modules() if isinstance(module, nn.Sequential)]
    blocks = [child for holder in holders for child in holder.children() if _is_block(child)]
    within = {id(module) for block in blocks for module in block.modules() if module is not block}
    chosen = [block for block in dict.fromkeys(blocks) if id(block) not in within and block is not model]
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    inside = [
        Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False)) for block in chosen
    ]
    return [block for block, own in zip(chosen, inside, strict=True) if all(uses[key] == own[key] for key in own)]


def _is_block(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward  # FSDP2's own test
    return has_forward and next(module.parameters(), None) is not None
