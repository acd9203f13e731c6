"""A sum cut into U parts of fixed shape, which one rank or several compute: the same bits, whoever has which part.

Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053) cuts a layer's first product by columns and its second one by rows,
so that ranks meet once in forward and once in backward. There the number of ranks fixes the shapes of the products and
the order of the sum, and so the bits. Here both follow from U alone: each part is computed by itself, and the parts are
summed in one binary tree. A rank of T has U / T consecutive parts, a whole subtree, which it folds by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cosmati.errors import PlanError


class Peers(Protocol):
    """The ranks that share the parts of one microbatch."""

    @property
    def degree(self) -> int:
        """T, how many they are: a power of two."""
        ...

    @property
    def place(self) -> int:
        """Which of them this one is, from 0."""
        ...

    def puts_off(self, parameter: int, dim: int) -> bool:
        """Whether the gradient of a parameter that is cut along a dimension is put together later, by somebody else.

        Args:
            parameter: its `id`.
            dim: the dimension.
        """
        ...

    def total(self, own: Tensor) -> Tensor:
        """Return the sum of what all of them have, in the tree over their places: the same on each."""
        ...

    def everyone(self, own: Tensor) -> list[Tensor]:
        """Return what each of them has, in the order of places."""
        ...


class Alone:
    """A process that has all parts."""

    degree, place = 1, 0

    def total(self, own: Tensor) -> Tensor:
        """Return it as it is."""
        return own

    def everyone(self, own: Tensor) -> list[Tensor]:
        """Return it as it is."""
        return [own]

    def puts_off(self, parameter: int, dim: int) -> bool:  # noqa: ARG002  (see `Peers`)
        """Say no: it has the whole."""
        return False


@runtime_checkable
class ComputesInParts(Protocol):
    """A model that can compute its large products in parts."""

    def compute_in_parts(self, shards: VirtualShards | None) -> Mapping[str, int]:
        """Compute them in parts from now on; None puts them back.

        Returns:
            Names of the parameters that are cut, and the dimension along which each is.

        Raises:
            PlanError: it can't.
        """
        ...


class VirtualShards:
    """U parts of a sum, and which of them this process computes.

    Args:
        number: U, a power of two.
        peers: who share them; their number divides U.
        called: the setting that says how many they are.

    Attributes:
        kinds: types of what was summed so far.
    """

    def __init__(self, number: int, peers: Peers | None = None, *, called: str = "virtual_shards") -> None:
        self.number, self.called = number, f"{called}={number}"
        self.peers: Peers = peers or Alone()
        self.kinds = set[torch.dtype]()
        share = number // self.peers.degree
        self.own = range(self.peers.place * share, (self.peers.place + 1) * share)

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """Return itself: a copy of a model meets the same ranks."""
        return self

    def copies(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor for each of this process's parts; its gradient is the sum over all U parts."""
        copied: tuple[Tensor, ...] = _Copies.apply(self, tensor)  # type: ignore[no-untyped-call]
        return copied

    def slices(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return this process's slices of a tensor that is cut into U along a dimension; its gradient is whole.

        Raises:
            PlanError: they would have unlike shapes.
        """
        self.refuse_unequal("A tensor", tensor, dim)
        cut: tuple[Tensor, ...] = _Slices.apply(self, tensor, dim, None)  # type: ignore[no-untyped-call]
        return cut

    def weights(self, parameter: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return this process's slices of a parameter; its gradient has zeros for the others' where that's put off.

        Raises:
            PlanError: they would have unlike shapes.
        """
        self.refuse_unequal("A parameter", parameter, dim)
        cut: tuple[Tensor, ...] = _Slices.apply(self, parameter, dim, id(parameter))  # type: ignore[no-untyped-call]
        return cut

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all U parts, of which these are this process's; they have one shape and type.

        Raises:
            PlanError: they're more or fewer.
        """
        if len(parts) != len(self.own):
            msg = (
                f"This process computes {len(self.own)} of {self.called} parts, and {len(parts)} are to "
                "be summed. Give `total` what each slice of `weights` gives, one tensor for each."
            )
            raise PlanError(msg)
        summed: Tensor = _Total.apply(self, *parts)  # type: ignore[no-untyped-call]
        return summed

    def refuse_unequal(self, what: str, tensor: Tensor, dim: int) -> None:
        """Refuse to cut a tensor into U parts of unlike shapes.

        Args:
            what: it is, as a sentence begins.
            tensor: to be cut.
            dim: along which dimension.

        Raises:
            PlanError: U doesn't divide it, or there is no such dimension.
        """
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] % self.number:
            msg = (
                f"{what} of shape {tuple(tensor.shape)} can't be cut along dimension {dim} into {self.called} "
                "equal parts. Cut along one that this number divides, or take a smaller number."
            )
            raise PlanError(msg)

    def summed(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all U parts, without a gradient: taken in float32, or in float64 where they are."""
        self.kinds.add(parts[0].dtype)
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        return self.peers.total(fold([part.to(wide) for part in parts])).to(parts[0].dtype)


def fold(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of 2^k tensors in a binary tree: (0, 1), (2, 3), then ((0, 1), (2, 3)), and so on."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def compute_whole(model: nn.Module) -> None:
    """Put a model back that an earlier run has cut."""
    for module in model.modules():
        if isinstance(module, ComputesInParts):
            module.compute_in_parts(None)


def has_hooks(module: nn.Module) -> bool:
    """Say whether a module has hooks of its own, which nobody calls where others compute with its weights."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module)[kind] for kind in kinds)


class _Copies(torch.autograd.Function):
    """The same to each part; the sum of what comes back."""

    @staticmethod
    def forward(ctx: Any, shards: VirtualShards, tensor: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401  (torch's own)
        ctx.shards = shards
        return tuple(tensor.view_as(tensor) for _ in shards.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # noqa: ANN401  (torch's own)
        return None, ctx.shards.summed(gradients)


class _Slices(torch.autograd.Function):
    """To each part its own; what comes back is put together."""

    @staticmethod
    def forward(ctx: Any, shards: VirtualShards, tensor: Tensor, dim: int, parameter: int | None) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.shards, ctx.dim, ctx.parameter = shards, dim, parameter
        cut = tensor.chunk(shards.number, dim)
        return tuple(cut[part] for part in shards.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:  # noqa: ANN401  (torch's own)
        own, peers = torch.cat(gradients, ctx.dim), ctx.shards.peers
        if ctx.parameter is not None and peers.puts_off(ctx.parameter, ctx.dim):
            everyone = [own if place == peers.place else torch.zeros_like(own) for place in range(peers.degree)]
        else:
            everyone = peers.everyone(own)
        return None, torch.cat(everyone, ctx.dim), None, None


class _Total(torch.autograd.Function):
    """The sum of all parts; to each the same that comes back."""

    @staticmethod
    def forward(ctx: Any, shards: VirtualShards, *parts: Tensor) -> Tensor:  # noqa: ANN401  (torch's own)
        ctx.num_parts = len(parts)
        return shards.summed(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  (torch's own)
        return None, *[gradient] * ctx.num_parts
