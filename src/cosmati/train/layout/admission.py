"""What a route lets learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Admission(NamedTuple):
    """What a route lets learn.

    Attributes:
        tensors: the parameters that may.
        indices: of these.
        attenuation: by index, of those whose gradient is neither denied nor whole.
    """

    tensors: list[Tensor]
    indices: frozenset[int]
    attenuation: Mapping[int, float]
