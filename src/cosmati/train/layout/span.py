"""What a rank holds of a whole tensor: a run of its elements, in the order of the contiguous whole."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """A run of a tensor's elements.

    Attributes:
        tensor: all of it in its shape, or the elements of the run, in any shape.
        shape: of the whole.
        start: the run's first element, in the order of the contiguous whole.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @classmethod
    def of(cls, whole: Tensor) -> HeldSpan:
        """Return all of a tensor."""
        return cls(whole, tuple(whole.shape))

    @property
    def stop(self) -> int:
        """One after the run's last element."""
        return self.start + self.tensor.numel()

    def content(self, start: int, stop: int) -> Tensor:
        """Return the canonical bytes of the elements from `start` to `stop - 1` of the whole: uint8, on its device."""
        flat = self.tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat[start - self.start : stop - self.start].view(torch.uint8)


def parameter_in(key: str, names: Container[str]) -> str | None:
    """Return the parameter whose name stands in a key, between slashes.

    Names may have slashes of their own: the longest one is meant.
    """
    parts = key.split("/")
    runs = ((start, start + length) for length in range(len(parts), 0, -1) for start in range(len(parts) + 1 - length))
    return next((name for start, stop in runs if (name := "/".join(parts[start:stop])) in names), None)
