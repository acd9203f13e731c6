"""A module that runs once for each route: for what tokens teach where no layer's gradient can be taken by token.

All tokens go through each run, so that shapes, and what a token is given, are those of a plain one. What a run gives is
taken at the tokens of its own route alone, and its parameters hand on gradients times that route's weight. A token's
output follows from its own document, whose tokens are of one class: so a parameter's gradient is the sum over documents
of weight times their own, whatever the module does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cosmati.core.batch import Data, iterate_tensors, map_tensors
from cosmati.core.containers import rebuilt
from cosmati.core.meetings import num_collectives
from cosmati.core.rng import DefaultGenerators
from cosmati.errors import PlanError
from cosmati.routing.token_layers import TokenMask

ALONE = (
    "calls collectives of torch.distributed, and reads parameters in a way that can't be taken apart by token, so that "
    "ranks would run it unlike many times, and wait for ever. Leave the ranks' sharing to the trainer; or pack each "
    "class by itself."
)
"""What is wrong with a module that would run once for each route."""


class TokenGroup(NamedTuple):
    """Tokens that may teach alike.

    Attributes:
        members: bool [rows, tokens].
        weights: what they may teach, by the `id` of the mask that says so.
    """

    members: Tensor
    weights: Mapping[int, float]


def groups_of(masks: Sequence[TokenMask]) -> list[TokenGroup]:
    """Return the tokens of a microbatch in groups that may teach alike; each token is in one."""
    columns = [mask.admits.double() if mask.scale is None else mask.scale.double() for mask in masks]
    kinds, kind_of = torch.stack(columns).flatten(1).unique(dim=1, return_inverse=True)
    members = kind_of.view(masks[0].admits.shape)
    told = [dict(zip(map(id, masks), kind, strict=True)) for kind in kinds.T.tolist()]
    return [TokenGroup(members == index, weights) for index, weights in enumerate(told)]


class Gating(NamedTuple):
    """How the tokens that run have to do with a parameter.

    Attributes:
        weight: by which they may teach it.
        reads: whether they read it; zeros in its place otherwise.
    """

    weight: float
    reads: bool = True


class _Gate(torch.autograd.Function):
    """Leaves a parameter as it is, or gives zeros; backward, it multiplies the gradient by a weight: 0 leaves none.

    A detached one would do for 0, and kernels follow from whether a parameter requires a gradient: bits would differ.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gating: Gating) -> Tensor:  # noqa: ANN401
        """Take a parameter, its weight, and whether it's read."""
        ctx.weight = gating.weight
        return parameter.view_as(parameter) if gating.reads else torch.zeros_like(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # noqa: ANN401
        if ctx.weight in (0, 1):
            return gradient if ctx.weight else None, None
        return gradient * ctx.weight, None


GATE: type = _Gate._backward_cls  # noqa: SLF001  (a gate in a graph)


def gated(data: Data, gating_of: Callable[[Tensor], Gating | None]) -> Data:
    """Return a nest whose parameters hand on their gradient times a weight; None leaves a tensor as it is."""
    if not isinstance(data, Tensor):
        return rebuilt(lambda child: gated(child, gating_of), data) if isinstance(data, tuple | list | dict) else data
    gating = gating_of(data)
    return data if gating is None else _Gate.apply(data, gating)  # type: ignore[no-untyped-call]


def tensors_in(data: object) -> Iterator[Tensor]:
    """Yield the tensors of a function's arguments, or of what it gives."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, list | tuple | dict):
        for one in data.values() if isinstance(data, dict) else data:
            yield from tensors_in(one)


def replace_forward(module: nn.Module, run: Callable[..., Data]) -> Callable[[], None]:
    """Let a module run otherwise, given its own forward pass first; return how to undo it."""
    own = vars(module).get("forward")
    module.__dict__["forward"] = partial(run, module.forward)

    def put_back() -> None:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own

    return put_back


def is_by_token(tensor: Tensor, shape: torch.Size) -> bool:
    """Say whether a tensor is [rows, tokens, ...], and surely so.

    Of as many heads as tokens, [rows, heads, tokens, width] looks alike. The last dimension may be as long: a width.
    """
    num_tokens = shape[1]
    return tensor.shape[:2] == shape and (num_tokens == 1 or num_tokens not in tensor.shape[2:-1])


def reads_tokens(given: Data, shape: torch.Size) -> bool:
    """Say whether a module is given tokens: numbers [rows, tokens], or [rows, tokens, ...] of any kind."""
    return any(is_by_token(t, shape) and (t.ndim > 2 or not t.is_floating_point()) for t in iterate_tensors(given))


def run_apart(
    module: nn.Module,
    groups: Sequence[TokenGroup],
    run: Callable[[TokenGroup], Data],
    given: Data,
    name: str,
    *,
    reads_alike: bool = True,
) -> Data | None:
    """Run a module once for each group of tokens, and take from each run what it gives at its own.

    Random draws and the module's buffers are, in each run and afterwards, as if it were the only one.

    Args:
        module: in question.
        groups: of all tokens.
        run: runs it for a group.
        given: what it's given.
        name: of the module.
        reads_alike: all groups read the same numbers, so that what isn't learnt is alike in all runs.

    Returns:
        What it gives; None where that isn't all of tokens, with draws and buffers as before.

    Raises:
        PlanError: the module changes what it's given, in place, so that the next run would read something else; or it
            waits for other ranks.
    """
    versions = _versions(given)
    generators, met = DefaultGenerators(groups[0].members.device), num_collectives()
    found: list[list[Tensor]] = []
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        with nullcontext() if is_last else generators.restored(), nullcontext() if is_last else _own_buffers(module):
            output = run(group)
        if not is_last and met != num_collectives():
            raise PlanError(f"{name or 'The model'} {ALONE}")
        if versions != _versions(given):
            msg = (
                f"{name or 'The model'} changes in place what it is given, and has to run once for each route, since "
                "it reads parameters in a way that can't be taken apart by token. Let it change a copy (ReLU without "
                "inplace=True); or pack each class by itself."
            )
            raise PlanError(msg)
        found.append(list(iterate_tensors(output)))
        if len(groups) > 1 and any(t.requires_grad and not is_by_token(t, group.members.shape) for t in found[-1]):
            return None
        if not reads_alike and not _are_alike_but_at_tokens(found[0], found[-1], group.members.shape):
            return None
    merged = iter([_merged(groups, parts, reads_alike=reads_alike) for parts in zip(*found, strict=True)])
    return map_tensors(lambda _: next(merged), output)


def _versions(given: Data) -> list[tuple[int, int]]:
    """Return which tensors a nest holds, and how often each was changed; nobody counts those of inference mode."""
    return [(id(one), 0 if one.is_inference() else one._version) for one in iterate_tensors(given)]  # noqa: SLF001


def _are_alike_but_at_tokens(one: Sequence[Tensor], other: Sequence[Tensor], shape: torch.Size) -> bool:
    """Say whether two runs gave the same numbers wherever these aren't those of tokens, by which they could be told."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        (is_by_token(a, shape) and is_by_token(b, shape)) or torch.equal(a, b) for a, b in pairs
    )


def _merged(groups: Sequence[TokenGroup], parts: Sequence[Tensor], *, reads_alike: bool) -> Tensor:
    """Take each token's part of what a module gave in the run of its group; what isn't learnt may be alike in all."""
    whole = parts[-1]
    if whole.requires_grad or (not reads_alike and is_by_token(whole, groups[-1].members.shape)):
        for group, part in zip(groups[:-1], parts[:-1], strict=True):
            members = group.members.view(*group.members.shape, *[1] * (part.ndim - 2))
            whole = torch.where(members, part, whole)
    return whole


@contextmanager
def _own_buffers(module: nn.Module) -> Any:  # noqa: ANN401
    """Give a module copies of its buffers for a while."""
    # Those without any, too: it may register one in its first pass. One of several names is one.
    holders = [(part._buffers, dict(part._buffers)) for part in module.modules()]  # noqa: SLF001
    copies = {id(one): one.clone() for _, kept in holders for one in kept.values() if one is not None}
    for held, kept in holders:
        held.update({name: None if buffer is None else copies[id(buffer)] for name, buffer in kept.items()})
    try:
        yield
    finally:
        for held, kept in holders:
            held.clear()
            held.update(kept)
