"""Labels that no class has, and ids that no embedding has: PyTorch names one of them, and not what it was held against.

An accelerator names nothing: it stops in an assertion, and the process with it. So its first labels are looked at.
"""

from __future__ import annotations

from traceback import walk_tb
from weakref import WeakSet

import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import BatchError

_seen: WeakSet[nn.Module] = WeakSet()
"""Models whose first labels on an accelerator were looked at: that waits for it."""

_OF_IMAGES = 255
"""What marks pixels without a label in many data sets."""


def refuse_index(error: IndexError) -> None:
    """Say which labels or ids it was and how many there may be, where PyTorch's losses and embeddings raised an error.

    Raises:
        BatchError: they did. Another error is left to the caller.
    """
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        held = frame.f_locals
        told = ""
        if frame.f_code in (F.cross_entropy.__code__, F.nll_loss.__code__):
            told = _of_labels(held["input"], held["target"], held["ignore_index"])
        elif frame.f_code is F.embedding.__code__:
            told = _of_ids(held["input"], held["weight"].shape[0])
        if told:
            raise BatchError(told) from error


def look_once(model: nn.Module, logits: object, target: Tensor, ignored: int) -> None:
    """Look at the first labels [rows, ...] of a model on an accelerator, for its logits [rows, classes, ...].

    Raises:
        BatchError: some have no class.
    """
    if model in _seen or not isinstance(logits, Tensor) or logits.ndim < 2 or target.shape == logits.shape:
        return
    try:
        told = _of_labels(logits, target, ignored)
    except RuntimeError:
        return  # Tensors without content, or several at once: `meta`, fake ones, `vmap`.
    _seen.add(model)
    if told:
        raise BatchError(told)


def _of_labels(logits: Tensor, target: Tensor, ignored: int) -> str:
    """Return what's wrong with labels; empty where nothing is."""
    num = logits.shape[1 if logits.ndim > 1 else 0] if logits.ndim else 0
    counted = target.long()[target.long() != ignored]
    low, high = (int(one) for one in counted.aminmax()) if counted.numel() else (0, 0)
    if not num or 0 <= low <= high < num:
        return ""
    mend = f"Give it {high + 1} outputs, or number the labels from 0." if high >= num else "Number the labels from 0."
    if low < 0 or high == _OF_IMAGES:
        mend += f" What has no label has {ignored}, or what the loss is told as ignore_index."
    return f"Labels from {low} to {high} in this batch, and the model gives {num} classes: 0 to {num - 1}. {mend}"


def _of_ids(ids: Tensor, num: int) -> str:
    """Return what's wrong with ids; empty where nothing is."""
    if not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < num:
        return ""
    return (
        f"Ids from {int(ids.min())} to {int(ids.max())} in this batch, and the model's embedding has {num} rows: 0 to "
        f"{num - 1}. Give the model a vocabulary as large as the tokenizer's, or take the tokenizer that it's for."
    )
