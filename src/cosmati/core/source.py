"""What the loop needs of data: batches as a pure function of the position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from cosmati.core.batch import Batch

ImageSize = tuple[int, int]
"""Height and width in pixels."""


@runtime_checkable
class Order(Protocol):
    """The one order in which a run visits its rows."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the rows."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Rows in a step, tombstones included."""
        ...

    def microbatch(self, step: int, index: int) -> Batch:
        """Return microbatch `index` of step `step`, counted from the start of the run."""
        ...

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a route-pure microbatch without reading its rows."""
        ...


@runtime_checkable
class TellsBands(Protocol):
    """An order whose route-pure microbatches are of one band each; in others all rows are of band 0."""

    def band(self, step: int, index: int) -> int:
        """Return the band of a microbatch without reading its rows."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """An order that reads before it's asked, once it knows what is coming."""

    def expect(self, step: int, indices: Sequence[int]) -> None:
        """Take note that these microbatches are wanted in each step from `step` on."""
        ...


@runtime_checkable
class ResizesImages(Protocol):
    """An order that can give images in the size that a step wants, which costs its decoder less."""

    @property
    def image_size(self) -> ImageSize | None:
        """Size of all images if nothing else is asked for; None where it has none, or can give no other."""
        ...

    def resize(self, size_at: Callable[[int], ImageSize]) -> None:
        """Give the images of each step in the size that this function says; it can be pickled."""
        ...


@runtime_checkable
class Source(Protocol):
    """Rows with provenance that can be put in order."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that lineage's class ids index."""
        ...

    @property
    def digest(self) -> str:
        """Hex digest of the content and its classes."""
        ...

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> Order:
        """Fix the order for a run.

        Args:
            seed: the run's seed.
            num_microbatches: V, microbatches a step.
            route_pure: each microbatch holds rows of one class.
            classes: classes that are offered at all; None means all.
        """
        ...
