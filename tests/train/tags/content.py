"""Rows and tokens that can be told by their content alone, and who is found in a batch. Nothing here knows of lineage.

Row `number` as an image has ones in the channel of its number and zeros elsewhere; as tokens, token `place` of it is
`number * PLACES + place + 1`. Whatever crops, mixes, packs or cuts them, each value still says whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_ROWS = 36
PLACES = 16
SIDE = 6
LENGTH = 8
VOCABULARY = NUM_ROWS * PLACES + 1
CLASSES = ("licensed", "open", "personal")


def class_of(number: int) -> int:
    """Return the class of a row, an index into CLASSES."""
    return (number * 5 // 3) % 3


def image(number: int) -> NDArray[np.float32]:
    made = np.zeros((NUM_ROWS, SIDE, SIDE), np.float32)
    made[number] = 1
    return made


def tokens(number: int, length: int = LENGTH + 1) -> NDArray[np.int64]:
    return np.arange(length) + number * PLACES + 1


def documents() -> list[dict[str, object]]:
    """Return all rows as documents of several lengths, as `pack` takes them."""
    return [
        {"tokens": tokens(number, 3 + number * 7 % 11), "row_id": number, "class_id": class_of(number)}
        for number in range(NUM_ROWS)
    ]


def rows_in_image(pixels: Tensor) -> set[int]:
    """Return the numbers of the rows of which a mixed image [channels, height, width] has anything."""
    return set((pixels != 0).flatten(1).any(1).nonzero().flatten().tolist())


def row_of_token(token: int) -> int:
    """Return whose a token is; -1 for padding."""
    return (token - 1) // PLACES if token else -1


def rows_of_tokens(given: Tensor) -> list[list[int]]:
    """Return whose each token of [rows, tokens] is."""
    return [[row_of_token(token) for token in line] for line in given.tolist()]


def input_in(data: object) -> Tensor:
    """Return what the model reads of a batch."""
    if isinstance(data, Mapping):
        found = data["input"]
    elif isinstance(data, Sequence):
        found = data[0]
    else:
        found = data
    assert isinstance(found, Tensor)
    return found


def images() -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.stack([image(number) for number in range(NUM_ROWS)])), torch.arange(NUM_ROWS)


def sequences() -> Tensor:
    return torch.from_numpy(np.stack([tokens(number) for number in range(NUM_ROWS)]))
