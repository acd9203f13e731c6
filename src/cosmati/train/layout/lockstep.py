"""Ranks that gather weights and sum gradients block by block have to do it in one order, however their code runs.

Before each exchange, every rank says which one it's about to make. Where they say the same, they make it. A rank that
has nothing of its own to run (no rows in this slot, fewer batches to evaluate on) keeps the others company: it gives
what it holds to each of their exchanges. Where two ranks say different things, all refuse at once, and none waits for
ever, nor reads what was meant for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cosmati.errors import PlanError
from cosmati.train.ranks import Ranks

_DONE = -1
_OF_A_PIECE = ("mixed torch.Tensor and DTensor", "out of bounds for storage of size 0")
"""What PyTorch says where a piece meets a whole tensor, or weights that aren't gathered are read."""


class Lockstep:
    """Exchanges of all ranks, in one order.

    Args:
        ranks: those that gather from one another.
        accompany: takes part in the exchange of a number for a rank that doesn't run it itself.
    """

    def __init__(self, ranks: Ranks, accompany: Callable[[int], None]) -> None:
        self._ranks = ranks
        self._accompany = accompany

    def begin(self, exchange: int) -> None:
        """Wait until each rank is about to make this exchange, or keeps company.

        Args:
            exchange: number of it, >= 0.

        Raises:
            PlanError: ranks are about to make different ones. All of them raise it.
        """
        self._told(exchange)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Stand around what ranks run unequally often: who is through keeps the others company, to their end.

        Raises:
            PlanError: as in `begin`, or weights were used where they aren't gathered.
        """
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _OF_A_PIECE):
                raise
            msg = (
                "Under sharding='full', weights are whole only while their block's forward and backward run, and the "
                "model or the loss uses some elsewhere: in a penalty on weights, a function of another block's, or a "
                "gradient of a gradient. Leave that out (optimizers have weight_decay), or use another sharding."
            )
            raise PlanError(msg) from error
        while (exchange := self._told(_DONE)) != _DONE:
            self._accompany(exchange)

    def _told(self, own: int) -> int:
        """Return which exchange comes next; that there is none where all are through."""
        everyone = self._ranks.gather_by_rank(torch.tensor([own]))
        others = {number for number in everyone.tolist() if number != _DONE}
        if len(others) > 1:
            msg = (
                "Under sharding='full', every rank gathers the same blocks in the same order, and in this pass they "
                "don't: model or loss leave blocks out, or run them anew, by what the rows are, or a gradient arrives "
                "after its block's. Let each microbatch run all blocks, or use another sharding."
            )
            raise PlanError(msg)
        return others.pop() if others else _DONE
