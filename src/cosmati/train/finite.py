"""Stops a run whose loss isn't finite, before that loss is committed or at the next look at it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cosmati.errors import DivergenceError
from cosmati.train.config import RunConfig


class FiniteCheck:
    """Looks at every loss before its commit on CPU; every `check_every` steps on an accelerator, since each look waits.

    Args:
        config: of the run.
        device: where it trains.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config = config
        self._looks_at_once = device.type == "cpu"
        self._bad: Tensor | None = None

    def check(self, loss: Tensor, step: int) -> None:
        """Take note of a loss that is about to be committed.

        Args:
            loss: scalar.
            step: its step.

        Raises:
            DivergenceError: it isn't finite.
        """
        if self._looks_at_once:
            if not math.isfinite(value := loss.item()):
                self._refuse(f"The loss is {value} at step {step} and isn't committed.")
            return
        wrong = ~torch.isfinite(loss.detach())
        self._bad = wrong if self._bad is None else self._bad | wrong
        if (step + 1) % self._config.check_every == 0:
            self.look(step)

    def look(self, step: int) -> None:
        """Look whether any loss since the last look wasn't finite; a checkpoint is never written before a look.

        Raises:
            DivergenceError: one wasn't.
        """
        if self._bad is not None and bool(self._bad):
            self._refuse(f"A loss in the {self._config.check_every} steps up to {step} isn't finite.")
        self._bad = None

    def _refuse(self, what: str) -> None:
        kept = (
            "Checkpoints before it are whole."
            if self._config.run_folder
            else "No run_folder is set, so there's no checkpoint."
        )
        msg = (
            f"{what} {kept} Lower the learning rate, clip gradients (GradientClipping), lengthen the "
            "warm-up, or look at "
            "the rows of this step."
        )
        raise DivergenceError(msg)
