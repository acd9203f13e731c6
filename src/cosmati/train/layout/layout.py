"""What the loop asks of a layout: the one thing that knows where a parameter's pieces lie.

A step is a context of slots. Each slot holds one microbatch's forward *and* backward pass, because a sharded model
gathers weights in the one and sums gradients in the other: no leaf outlives its slot, and what happens to a leaf
(float32, attenuation, its norms) happens before it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.routing.cells import RegionWeights
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.span import HeldSpan


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable parameter.

    Attributes:
        index: place among the trainable parameters, in the model's order.
        name: the user's own.
        region: index of its region.
        tensor: what the optimizer holds: the parameter, or this rank's piece of it.
    """

    index: int
    name: str
    region: int
    tensor: nn.Parameter


class Slot(Protocol):
    """One microbatch of this rank: `with` it around forward and backward."""

    @property
    def norms(self) -> Sequence[Tensor]:
        """The leaf's norm in each region, NaN where it's absent: float64 scalars. Empty where nobody asked."""
        ...

    @property
    def sketches(self) -> Sequence[Tensor]:
        """The sketch of the leaf in each region, NaN where it's absent: float32 [16]. Empty where nobody asked."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def backward(self, objective: Tensor, *, is_final: bool = True) -> None:
        """Differentiate the microbatch's objective for what may learn from it. At most once, where that ends well.

        Args:
            objective: scalar.
            is_final: where it doesn't, it isn't tried anew: what has arrived may leave for other ranks.
        """
        ...


class LayoutStep(Protocol):
    """One pass over a step's microbatches."""

    @property
    def is_finite(self) -> bool:
        """Whether all of the root is known to be finite, on all ranks."""
        ...

    def slot(self, microbatch: int) -> Slot:
        """Return the slot of this rank's next microbatch. Every rank opens equally many."""
        ...

    def root(self, denominators: Tensor | None) -> Pieces:
        """Return the sum of all V leaves over each region's denominator.

        Args:
            denominators: float64 [regions]; None leaves the sum as it is. A region with 0 has no gradient.

        Returns:
            What this rank holds of it; a parameter that no microbatch has taught is absent.
        """
        ...


class Layout(Protocol):
    """Names, regions and local pieces of parameters, who runs which microbatch, and the step's sum.

    Attributes:
        is_cut: ranks hold unlike parts of the state, so that a checkpoint is written by all of them.
    """

    is_cut: bool

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The trainable ones, in the model's order."""
        ...

    @property
    def mine(self) -> Sequence[int]:
        """This rank's microbatches, in the order of its slots."""
        ...

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and local pieces: what optimizers are built on."""
        ...

    def weights(self) -> Pieces:
        """Return the trainable parameters as methods see them; they follow every commit."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Bring what each rank has of its microbatches, [V / W, ...], into microbatch order: [V, ...] on every rank."""
        ...

    def step(
        self,
        routes: Sequence[RegionWeights],
        learns: frozenset[int],
        *,
        measure: bool,
        sketch: DirectionSketch | None = None,
    ) -> AbstractContextManager[LayoutStep]:
        """Open a pass over the step's microbatches.

        Args:
            routes: of all V microbatches, a weight for each region; 0 means that the leaf is absent there.
            learns: indices of the parameters that learn in this pass.
            measure: take each leaf's norm by region.
            sketch: sketches each leaf's direction by region; None where nobody asks.
        """
        ...

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        """Put gradients in place and let the optimizers step: the one gate through which parameters change.

        Args:
            root: the step's gradients. What is absent doesn't move at all.
            learns: indices of the parameters that the optimizers hold.
            step: steps them.

        Returns:
            Names of the parameters that moved.
        """
        ...

    def perturbed(self, offsets: Pieces) -> AbstractContextManager[None]:
        """Add offsets to parameters for a while; afterwards a saved copy is put back, since w + e - e isn't w."""
        ...

    def replaced(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Put other values in place of parameters for a while, in place, and their own back from a saved copy."""
        ...

    def save(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters and persistent buffers by name, one at a time. Every rank has to ask for all."""
        ...

    def held(self) -> dict[str, HeldSpan]:
        """Return what this rank holds of parameters and persistent buffers, by name; no other rank is asked.

        What ranks may hold otherwise, where their own code has written to it, is the first rank's alone.
        """
        ...

    def held_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        """Return what this rank holds of the state of optimizers or methods (see `whole_state`); all have to ask."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole parameters and buffers.

        Raises:
            CheckpointError: they don't fit the model.
        """
        ...

    def whole_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return state of optimizers or methods whole, as checkpoints hold it. Every rank has to ask.

        Args:
            tensors: by names of which one part, between slashes, is a parameter's; of optimizers, `parameter/key`.
            of_optimizers: cut as optimizers hold parameters (see `pieces`), or else as methods do (see `weights`).
        """
        ...

    def own_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return what this rank keeps of whole state (see `whole_state`)."""
        ...

    def digest(self) -> bytes:
        """Return the Merkle root over parameters and buffers: 32 bytes, however they are cut."""
        ...
