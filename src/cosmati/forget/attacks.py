"""What a model gives away of rows: attacks that an approximate deletion is measured with.

An attack that finds nothing shows that this attack finds nothing. It's no proof of absence: stronger attacks are known
(LiRA: Carlini et al., 2022, arXiv 2112.03570).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from cosmati.errors import DataError


def membership_auc(members: ArrayLike, others: ArrayLike) -> float:
    """Return how well scores tell members from others: the chance that a member's is higher, ties counting half.

    With scores `-loss` it's the attack by a threshold on the loss (Yeom et al., 2018, arXiv 1709.01604); with the loss
    of a model that never had the rows less the model's own, the calibrated one (Watson et al., 2022, arXiv 2111.08440).

    Args:
        members: scores of rows that were trained on, [rows].
        others: of rows of the same kind that weren't, [rows].

    Returns:
        0.5 where the attack learns nothing; 1 where it is always right.

    Raises:
        DataError: there are none, or a score isn't a number.
    """
    own, other = np.asarray(members, np.float64).ravel(), np.asarray(others, np.float64).ravel()
    if not len(own) or not len(other) or np.isnan(own).any() or np.isnan(other).any():
        raise DataError("An attack needs a score of each row, of members and of others: at least one, and none is NaN.")
    ranks = _ranks(np.concatenate([own, other]))[: len(own)]
    return float((ranks.sum() - len(own) * (len(own) + 1) / 2) / (len(own) * len(other)))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: NDArray[np.float64] = (ends - (counts - 1) / 2)[places]
    return ranks


@torch.no_grad()
def extracted(model: nn.Module, prompts: Tensor, continuations: Tensor) -> NDArray[np.bool_]:
    """Say which prompts a language model goes on with verbatim, taking its likeliest token each time.

    (Carlini et al., 2021, arXiv 2012.07805, with the prefix given.)

    Args:
        model: gives logits [rows, tokens, vocabulary] for tokens [rows, tokens]; its mode is left as it was.
        prompts: int64 [rows, tokens].
        continuations: what follows in the data, int64 [rows, tokens].

    Returns:
        bool [rows].
    """
    was_training = model.training
    model.eval()
    try:
        tokens = prompts
        for _ in range(continuations.shape[1]):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    finally:
        model.train(was_training)
    same: NDArray[np.bool_] = (tokens[:, prompts.shape[1] :] == continuations).all(1).cpu().numpy()
    return same
