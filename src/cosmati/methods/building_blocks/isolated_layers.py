"""What classes have of their own in a layer: adapters of low rank, and experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.isolated import Forward, Isolated
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Graft


class LowRank(nn.Module):
    """A matrix of low rank, zero at the start: `scale * up @ down`.

    Args:
        like: the weight that it's added to, [out_features, in_features]; it has its type and device.
        rank: at most.
        scale: of the product.
        generator: of the CPU, for `down`.
    """

    def __init__(self, like: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(_uniform((rank, like.shape[1]), like.shape[1], generator, like))
        self.up = nn.Parameter(like.new_zeros(like.shape[0], rank))

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(F.linear(input, self.down), self.up) * self.scale

    def weight(self) -> Tensor:
        """Return the matrix."""
        return (self.up @ self.down) * self.scale


class LowRankLinear(Isolated):
    """Adds a low-rank map to the output of a linear layer.

    Args:
        name: of the class.
        weight: of the layer, [out_features, in_features].
        rank: of the map.
        scale: of what it adds.
        generator: of the CPU.
    """

    def __init__(self, name: str, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__(name)
        self.matrix = LowRank(weight.detach(), rank, scale, generator)

    def around(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return the layer's output, with the map's added at the class's rows."""
        shared: Tensor = forward(*args, **kwargs)
        return self.chosen(shared + self.matrix(args[0] if args else next(iter(kwargs.values()))), shared)


class LowRankConv(Isolated):
    """Adds a convolution to few channels, and one of size 1 back, to the output of a convolution."""

    def __init__(
        self, name: str, layer: nn.Conv1d | nn.Conv2d, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__(name)
        weight, size = layer.weight.detach(), (rank, layer.in_channels, *layer.kernel_size)
        self.scale = scale
        self.down = nn.Parameter(_uniform(size, math.prod(size[1:]), generator, weight))
        self.up = nn.Parameter(weight.new_zeros(layer.out_channels, rank, *(1 for _ in layer.kernel_size)))

    def around(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return the layer's output, with the convolution's added at the class's rows."""
        assert isinstance(layer, nn.Conv1d | nn.Conv2d), "made for one"
        shared: Tensor = forward(*args, **kwargs)
        input: Tensor = args[0] if args else kwargs["input"]
        padding: str | int | tuple[int, ...] = layer.padding
        convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
        if layer.padding_mode != "zeros":
            input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)  # noqa: SLF001
            padding = 0
        latent = convolve(input, self.down, None, layer.stride, padding, layer.dilation)
        own = shared + convolve(latent, self.up) * self.scale
        if isinstance(self.rows, Tensor) and not isinstance(layer, nn.Conv1d):
            self.refuse_tokens("a Conv2d has no tokens")
        return self.chosen(own, shared, axis=2)


class LowRankAttention(Isolated):
    """Adds low-rank matrices to the four projections of an `nn.MultiheadAttention`."""

    def __init__(
        self, name: str, layer: nn.MultiheadAttention, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__(name)
        weights = [part.detach() for part in _projections(layer)]
        self.query, self.key, self.value, self.out = (LowRank(w, rank, scale, generator) for w in weights)

    def around(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return what the layer gives with the matrices added to its projections."""
        assert isinstance(layer, nn.MultiheadAttention), "made for one"
        if isinstance(self.rows, Tensor):
            self.refuse_tokens("its projections are read as one")
        added = [part.weight() for part in (self.query, self.key, self.value)]
        if layer.in_proj_weight is not None:
            inward = {"in_proj_weight": layer.in_proj_weight + torch.cat(added)}
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            inward = {n: getattr(layer, n) + part for n, part in zip(names, added, strict=True)}
        outward = {"weight": layer.out_proj.weight + self.out.weight()}
        with _standing_in(layer, inward), _standing_in(layer.out_proj, outward):
            return forward(*args, **kwargs)


class Expert(Isolated):
    """A copy of a layer, which stands in its place or beside it.

    Args:
        name: of the class.
        expert: a copy of the layer, without what is isolated in it.
        beside: add its output, times a gate that begins at 0, to the layer's; or stand in the layer's place.
    """

    def __init__(self, name: str, expert: nn.Module, *, beside: bool) -> None:
        super().__init__(name)
        self.expert = expert.requires_grad_()
        like = next(expert.parameters())
        self.gate = nn.Parameter(like.detach().new_zeros(1)) if beside else None

    def around(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the expert's output at the class's rows; of a layer that gives several things, the first is it."""
        is_masked = isinstance(self.rows, Tensor)
        own = self.expert(*args, **kwargs)
        if self.gate is None and not is_masked:
            return own
        shared = forward(*args, **kwargs)
        first, rest = (shared[0], shared[1:]) if isinstance(shared, tuple) else (shared, None)
        mine = own[0] if isinstance(own, tuple) else own
        if not isinstance(first, Tensor):
            msg = (
                f"A {type(layer).__name__} gives a {type(first).__name__}, which no expert's output can join. "
                "Let it give a tensor, or a tuple that begins with one; or use kind='expert' without packs."
            )
            raise PlanError(msg)
        found = self.chosen(mine if self.gate is None else first + self.gate * mine, first)
        return found if rest is None else (found, *rest)


class OfClasses(Graft):
    """A layer with modules of classes' own in its child `isolated`: they run around it, for rows of their class."""

    prefix = "Isolated"
    isolated: nn.ModuleDict

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (whatever the layer takes and gives)
        """Return what the layer gives, with the modules that are enabled around it."""
        forward: Forward = super().forward
        enabled = [module for module in self.isolated.values() if isinstance(module, Isolated) and module.is_enabled]
        in_place = [m.class_name for m in enabled if isinstance(m, Expert) and m.gate is None and m.rows is True]
        if len(in_place) > 1:
            msg = f"Experts of {' and '.join(in_place)} can't both stand in one layer's place. Enable one of them."
            raise PlanError(msg)
        for module in enabled:
            forward = partial(module.around, self, forward)
        return forward(*args, **kwargs)


def _projections(layer: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if layer.in_proj_weight is not None:
        query, key, value = layer.in_proj_weight.chunk(3)
    else:
        query, key, value = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    return query, key, value, layer.out_proj.weight


@contextmanager
def _standing_in(layer: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let a layer read other tensors in place of its parameters."""
    kept = {name: layer._parameters[name] for name in tensors}  # noqa: SLF001
    try:
        layer._parameters |= tensors  # type: ignore[arg-type]  # noqa: SLF001  (read as they are)
        yield
    finally:
        layer._parameters |= kept  # noqa: SLF001


def _uniform(size: Sequence[int], fan_in: int, generator: torch.Generator, like: Tensor) -> Tensor:
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(*size).uniform_(-bound, bound, generator=generator).to(like)
