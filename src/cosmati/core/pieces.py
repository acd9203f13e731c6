"""What a method sees of weights and gradients: named tensors, of which this rank may hold no more than a piece each.

A sharded run cuts every parameter, and each rank holds its cut. What is elementwise acts on the pieces as they are
(`map`); what needs more than an element asks for it by name: `norm`, `norm_by_region`, `map_whole`. A method written
like that gives the same bits however its run is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


class Cut(Protocol):
    """How whole tensors are cut into the pieces that ranks hold. Every rank makes the same calls in the same order."""

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the norm of each whole tensor, from this rank's pieces: scalars."""
        ...

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """Return the whole tensor of which this rank holds a piece."""
        ...

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole tensor."""
        ...

    def anywhere(self, flag: bool) -> bool:
        """Return whether any rank says so of its pieces."""
        ...


class Uncut:
    """Every rank holds everything."""

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the norm of each tensor."""
        return list(torch._foreach_norm(list(tensors.values()))) if tensors else []  # noqa: SLF001

    def whole(self, name: str, piece: Tensor) -> Tensor:  # noqa: ARG002  (see `Cut`)
        """Return the tensor."""
        return piece

    def piece(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002  (see `Cut`)
        """Return the tensor."""
        return whole

    def anywhere(self, flag: bool) -> bool:
        """Return what is said of everything."""
        return flag


@dataclass(frozen=True)
class Pieces:
    """Named tensors in the model's order, as this rank holds them.

    Args:
        tensors: this rank's piece of each, by parameter name. What doesn't learn in a step has no gradient here.
        regions: index of each parameter's region.
        cut: how the pieces were cut.
    """

    tensors: Mapping[str, Tensor]
    regions: Mapping[str, int] = field(default_factory=dict)
    cut: Cut = field(default_factory=Uncut)

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the model's order."""
        return tuple(self.tensors)

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def having(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return other tensors that are cut alike."""
        return replace(self, tensors=tensors)

    def only(self, names: Iterable[str]) -> Pieces:
        """Return some of them, in the order given."""
        return self.having({name: self.tensors[name] for name in names})

    def copied(self) -> Pieces:
        """Return copies, without a graph."""
        return self.map(lambda tensor: tensor.detach().clone())

    def map(self, function: Callable[..., Tensor], *others: Pieces) -> Pieces:
        """Apply an elementwise function to each piece.

        Args:
            function: takes a piece of this, and the piece of the same parameter of each of the others.
            others: cut alike, and having these names at least.
        """
        return self.having(
            {
                name: function(tensor, *(other.tensors[name] for other in others))
                for name, tensor in self.tensors.items()
            }
        )

    def scaled(self, factor: Tensor | float | Mapping[int, Tensor]) -> Pieces:
        """Return each piece times a factor: a scalar, or one for each region's index."""
        if not isinstance(factor, Mapping):
            return self.having(
                dict(zip(self.tensors, torch._foreach_mul(list(self.tensors.values()), factor), strict=True))  # noqa: SLF001
            )
        return self.having({name: tensor * factor[self.regions[name]] for name, tensor in self.tensors.items()})

    def map_whole(self, function: Callable[..., Tensor], *others: Pieces) -> Pieces:
        """Apply a function that needs whole tensors (rows, matrices) and keeps their shape; every rank runs it."""
        return self.having(
            {
                name: self.cut.piece(name, function(self.whole(name), *(other.whole(name) for other in others)))
                for name in self.tensors
            }
        )

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor, of which this rank may hold a piece. Every rank has to ask."""
        return self.cut.whole(name, self.tensors[name])

    def alike(self, other: Pieces) -> Pieces:
        """Return other tensors cut as these are."""
        if other.cut is self.cut:
            return other
        return replace(
            other, tensors={name: self.cut.piece(name, other.whole(name)) for name in other.names}, cut=self.cut
        )

    def norm(self) -> Tensor:
        """Return the norm over everything: a scalar, of the same bits on any number of ranks."""
        return _norm(self.cut.norms(self.tensors))

    def norm_by_region(self) -> dict[int, Tensor]:
        """Return the norm over each region that has a tensor here, by the region's index."""
        groups: dict[int, list[Tensor]] = {}
        for name, norm in zip(self.tensors, self.cut.norms(self.tensors), strict=True):
            groups.setdefault(self.regions[name], []).append(norm)
        return {region: _norm(norms) for region, norms in groups.items()}


def _norm(norms: list[Tensor]) -> Tensor:
    # Norms of whole parameters, in the model's order: nothing depends on how they are cut.
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
