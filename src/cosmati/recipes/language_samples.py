"""What a language model of bytes writes, and its loss on each class of the held-out rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.rng import position_generator
from cosmati.errors import DataError
from cosmati.train.evaluation import Stateful

ALL = "all"
"""Name of the mean over all rows, beside those of the classes."""


class LossByClass:
    """Mean of the rows' losses by their class, and over all: `{"all": 1.9, "open/psf": 2.1}`.

    Args:
        names: of the classes, by their ids.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def update(self, losses: Tensor, class_ids: Tensor) -> None:
        """Take note of a batch: each row's loss, and its class's id."""
        for value, index in zip(losses.double().tolist(), class_ids.tolist(), strict=True):
            for name in (ALL, self._names[index]):
                self._sums[name] += value
                self._counts[name] += 1

    def compute(self) -> dict[str, float]:
        """Return the means, in nats; of classes that have no row there's none."""
        return {name: self._sums[name] / self._counts[name] for name in (ALL, *self._names) if self._counts[name]}


def loss_by_class(names: Sequence[str]) -> Stateful:
    """Return the metric for batches of input bytes, target bytes and class ids."""
    return Stateful(LossByClass(names), _row_losses)


@torch.no_grad()
def _row_losses(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401  (a batch's nest)
    tokens, target, class_ids = data
    losses = F.cross_entropy(model(tokens).float().transpose(1, 2), target.long(), reduction="none")
    return losses.mean(1), class_ids


@torch.no_grad()
def write_bytes(
    model: nn.Module, prompt: bytes, num_bytes: int, *, context: int, seed: int, temperature: float = 0.7
) -> bytes:
    """Let a model of bytes go on from a prompt; the same model, prompt and seed always write the same.

    Args:
        model: gives logits [rows, length, 256] for bytes [rows, length]; its mode is left as it was.
        prompt: one byte at least.
        num_bytes: to write; it ends before where the model ends the file, with a null byte.
        context: bytes that the model sees at most.
        seed: keys the draws.
        temperature: divides the logits, above 0.

    Returns:
        What was written, without the prompt.

    Raises:
        DataError: there is no prompt, or the temperature isn't above 0.
    """
    if not prompt or not temperature > 0:
        msg = f"prompt={prompt!r}, temperature={temperature}: nothing can be drawn. Give a byte, and a temperature > 0."
        raise DataError(msg)
    generator, was_training = position_generator(seed, "sample"), model.training
    tokens = torch.tensor([list(prompt)])
    model.eval()
    try:
        for _ in range(num_bytes):
            logits = model(tokens[:, -context:])[0, -1].float() / temperature
            token = torch.multinomial(logits.softmax(0), 1, generator=generator)
            if not token.item():
                break
            tokens = torch.cat([tokens, token[None]], 1)
    finally:
        model.train(was_training)
    return bytes(tokens[0, len(prompt) :].tolist())
