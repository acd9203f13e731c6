"""Ranks that gather weights and sum gradients block by block have to do it in one order, however their code runs.

Before each exchange, every rank says which one it's about to make. Where they say the same, they make it. A rank that
has nothing of its own to run (no rows in this slot, fewer batches to evaluate on) keeps the others company: it gives
what it holds to each of their exchanges. Where two ranks say different things, all refuse at once, and none waits for
ever, nor reads what was meant for another.

To ask before each exchange takes as long as a small one, and an accelerator would have to be waited for. So ranks
remember what they made in a slot of this kind, and make the same without a word. Who comes to something else, or to his
end, keeps the others company to the end of what all expect, and they ask once, at its end. If all who had more to run
left it at one place for one exchange, nobody has read anything wrong, and they go on from there, asking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from cosmati.errors import PlanError
from cosmati.train.ranks import Ranks

_DONE = -1
_MOST_CHANGES = 3
"""How often what ranks expect of a kind of slot may turn out to be something else, before they ask each time."""
_OF_A_PIECE = ("mixed torch.Tensor and DTensor", "out of bounds for storage of size 0")
"""What PyTorch says where a piece meets a whole tensor, or weights that aren't gathered are read."""


class Lockstep:
    """Exchanges of all ranks, in one order.

    Args:
        ranks: those that gather from one another.
        accompany: takes part in the exchange of a number for a rank that doesn't run it itself, and returns what takes
            its outcome.
        device: where tensors have to be that ranks exchange.
    """

    def __init__(self, ranks: Ranks, accompany: Callable[[int], Callable[[], None]], device: torch.device) -> None:
        self._ranks, self._accompany, self._device = ranks, accompany, device
        self._expected: dict[Hashable, tuple[int, ...]] = {}
        self._changes: defaultdict[Hashable, int] = defaultdict(int)
        self._way: tuple[int, ...] | None = None
        self._made: list[int] = []

    def begin(self, exchange: int) -> None:
        """Wait until each rank is about to make this exchange, or keeps company; where all expect it, don't wait.

        Args:
            exchange: number of it, >= 0.

        Raises:
            PlanError: ranks are about to make different ones. All of them raise it.
        """
        if self._way is None:
            self._asked(exchange)
        elif self._way[len(self._made) : len(self._made) + 1] != (exchange,):
            self._leave(exchange)
        self._made.append(exchange)

    @contextmanager
    def together(self, kind: Hashable = None) -> Iterator[None]:
        """Stand around what ranks run unequally often: who is through keeps the others company, to their end.

        Args:
            kind: all ranks', and of what makes the same exchanges each time; None where nobody knows.

        Raises:
            PlanError: as in `begin`, or weights were used where they aren't gathered.
        """
        self._way, self._made = self._expected.get(kind), []
        try:
            yield
            following = self._asked(_DONE) if self._way is None else self._leave(_DONE)
            while following != _DONE:
                self._made.append(following)
                self._accompany(following)()
                following = self._asked(_DONE)
            if kind is not None:
                self._expect(kind, tuple(self._made))
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _OF_A_PIECE):
                raise
            msg = (
                "Under sharding='full', weights are whole only while their block's forward and backward run, and the "
                "model or the loss uses some elsewhere: in a penalty on weights, a function of another block's, or a "
                "gradient of a gradient. Leave that out (optimizers have weight_decay), or use another sharding."
            )
            raise PlanError(msg) from error
        finally:
            self._way = None

    def _expect(self, kind: Hashable, made: tuple[int, ...]) -> None:
        """Remember what was made: all ranks have seen the same."""
        if self._expected.get(kind) != made:
            self._changes[kind] += 1
            self._expected[kind] = made
        if self._changes[kind] > _MOST_CHANGES:
            self._expected.pop(kind, None)

    def _leave(self, own: int) -> int:
        """Come to something else than is expected, or to the end; return which exchange comes next, as all then ask.

        Who keeps company with what others expect takes nothing of it before it's known whether they've made it.
        """
        assert self._way is not None, "something is expected"
        place, way = len(self._made), self._way
        outcomes = [self._accompany(exchange) for exchange in way[place:]]
        everyone = self._ranks.gather_by_rank(torch.tensor([[place, own]], device=self._device)).tolist()
        left = {(place, number) for place, number in everyone if number != _DONE}
        furthest = max(place for place, _ in everyone)
        whole, following = left.pop() if left else (furthest, _DONE)
        # Beyond the place where some left it, what others made with them were no sums.
        if left or furthest > whole:
            _refuse()
        for take in outcomes[: whole - place]:
            take()
        self._way, self._made = None, list(way[:whole])
        return following

    def _asked(self, own: int) -> int:
        """Return which exchange comes next; that there is none where all are through."""
        everyone = self._ranks.gather_by_rank(torch.tensor([own], device=self._device))
        others = {number for number in everyone.tolist() if number != _DONE}
        if len(others) > 1:
            _refuse()
        return others.pop() if others else _DONE


def _refuse() -> None:
    msg = (
        "Under sharding='full', every rank gathers the same blocks in the same order, and in this pass they "
        "don't: model or loss leave blocks out, or run them anew, by what the rows are, or a gradient arrives "
        "after its block's. Let each microbatch run all blocks, or use another sharding."
    )
    raise PlanError(msg)
