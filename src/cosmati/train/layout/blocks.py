"""Which modules full sharding gathers each by itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from torch import nn


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of every `nn.ModuleList`, or `nn.Sequential` where there is none, each with its own parameters.

    A block of which a parameter occurs elsewhere too (tied weights, a layer that several blocks use) stays with what is
    outside all blocks: one group holds all names of a parameter. So does a block within a block, and one that a list
    has several times, which runs as often. A list of lists has the blocks of these.
    """
    holders: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    holders = holders or [module for module in model.modules() if isinstance(module, nn.Sequential)]
    blocks = [child for holder in holders for child in holder.children() if _is_block(child)]
    within = {id(module) for block in blocks for module in block.modules() if module is not block}
    within |= {id(one) for holder in holders for one, times in Counter(holder._modules.values()).items() if times > 1}  # noqa: SLF001  (`children` gives each once)
    chosen = [block for block in dict.fromkeys(blocks) if id(block) not in within]
    holding = _holding(model, {id(block) for block in chosen})
    return [block for block in chosen if all(holding[id(p)] == {id(block)} for p in block.parameters())]


def _holding(model: nn.Module, blocks: Collection[int]) -> dict[int, set[int | None]]:
    """Return by `id` of each parameter in which blocks it occurs, None for outside of all: a module has many places."""
    found: dict[int, set[int | None]] = defaultdict(set)
    seen: set[tuple[int, int | None]] = set()
    left: list[tuple[nn.Module, int | None]] = [(model, None)]
    while left:
        module, block = left.pop()
        block = id(module) if block is None and id(module) in blocks else block
        if (id(module), block) not in seen:
            seen.add((id(module), block))
            for parameter in module.parameters(recurse=False):
                found[id(parameter)].add(block)
            left += [(child, block) for child in module.children()]
    return found


def _is_block(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward  # FSDP2's own test
    return has_forward and next(module.parameters(), None) is not None
