"""A file of a user's own, which counts in its globals; imported by tests."""

from __future__ import annotations

from torch import Tensor

average = 1.0
temperature = 1.0


def normalised(loss: Tensor) -> Tensor:
    """Divide by a running mean."""
    global average  # noqa: PLW0603
    average = 0.9 * average + 0.1 * float(loss.detach())
    return loss / average
