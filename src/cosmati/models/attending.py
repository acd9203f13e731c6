"""What attention is made of: scores of all pairs, who sees whom in packed documents, and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROTARY_BASE = 10_000.0


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(head_width) + bias) value, with the scores of all pairs in memory.

    Args:
        query: [rows, heads, length, head_width].
        key: the same shape.
        value: the same shape.
        bias: [rows or 1, heads or 1, length, length], with -inf ahead; None is only that.
    """
    if bias is None:
        length = query.shape[2]
        bias = torch.full((length, length), -torch.inf, device=query.device).triu_(1)
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    mixed: Tensor = scores.add_(bias).softmax(-1).to(value.dtype) @ value
    return mixed


def documents_of(tokens: Tensor, end: int) -> Tensor:
    """Return which of its row's documents each token belongs to, int64 [rows, length], from 0.

    Args:
        tokens: integers [rows, length].
        end: the token that ends a document, and belongs to it.
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def places_in(documents: Tensor) -> Tensor:
    """Return the place of each token in its document, int64 [rows, length], from 0.

    Args:
        documents: integers [rows, length], each document in one piece.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places - (places * begins).cummax(1).values


def seen_within(documents: Tensor) -> Tensor:
    """Return which places each one sees, its own document's up to itself: bool [rows, 1, length, length].

    Args:
        documents: integers [rows, length] (see `documents_of`).
    """
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def rotary_table(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_width / 2] of position times 10000^(-2i / head_width)."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float64), _ROTARY_BASE**-exponents)
    return angles.cos().float(), angles.sin().float()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of the last dimension by its position's angle.

    Args:
        heads: [rows, heads, length, head_width].
        cosine: [length, head_width / 2].
        sine: the same shape.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
