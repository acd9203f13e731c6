"""Packs as a model reads them: tensors, labels, the mask of attention, and the lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Lineage
from cosmati.data.packing import NO_ROW, Pack
from cosmati.errors import DataError

IGNORED_LABEL = -100
"""What `cross_entropy` ignores unless told otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Packs as a model reads them; all int64 [packs, length].

    Attributes:
        tokens: padding at the end.
        labels: the token after each one in its document; `IGNORED_LABEL` for a document's last token and padding.
        position_ids: place in the document.
        document_ids: counted from 0 in each pack; `NO_ROW` where padded.
        class_ids: class of each token; `NO_ROW` where padded.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    class_ids: Tensor


def pack_tensors(packs: Sequence[Pack]) -> PackedTensors:
    """Stack packs of one length.

    Raises:
        DataError: there are none, or their lengths differ.
    """
    lengths = sorted({len(one.tokens) for one in packs})
    if len(lengths) != 1:
        raise DataError(f"Packs of the lengths {lengths} don't stack. Give packs of one length, one at least.")
    stacked = [
        torch.from_numpy(np.stack(parts).astype(np.int64))
        for parts in (
            [one.tokens for one in packs],
            [one.position_ids for one in packs],
            [one.document_ids for one in packs],
            [one.class_ids for one in packs],
        )
    ]
    tokens, positions, documents, classes = stacked
    labels = torch.full_like(tokens, IGNORED_LABEL)
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != NO_ROW)
    labels[:, :-1][follows] = tokens[:, 1:][follows]
    return PackedTensors(tokens, labels, positions, documents, classes)


def document_mask(document_ids: Tensor) -> Tensor:
    """Return which tokens may attend to which: bool [packs, 1, length, length], for `scaled_dot_product_attention`.

    A token attends to itself and to earlier tokens of its document. Padding attends to itself, so that no softmax is
    over nothing.

    Args:
        document_ids: int64 [packs, length], `NO_ROW` where padded.
    """
    length = document_ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    same = document_ids[:, :, None] == document_ids[:, None, :]
    present = (document_ids != NO_ROW)[:, None, :]
    itself = torch.eye(length, dtype=torch.bool, device=document_ids.device)
    return ((same & present & earlier) | itself)[:, None]


def pack_lineage(packs: Sequence[Pack]) -> Lineage:
    """Return the lineage of packs: all rows of each as its parents, filled with `TOMBSTONE` where it has fewer.

    A pack's own row id and class id are those of its first span; class-pure packs have no other class.
    """
    parents = np.full((len(packs), max(len(one.spans) for one in packs)), TOMBSTONE, np.int64)
    for number, one in enumerate(packs):
        parents[number, : len(one.spans)] = one.spans[:, 0]
    first = torch.from_numpy(np.stack([one.spans[0, :2] for one in packs]))
    return Lineage(first[:, 0].clone(), first[:, 1].clone(), torch.from_numpy(parents))
