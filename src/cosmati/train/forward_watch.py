"""Sees what a microbatch changes besides gradients, and which promises that breaks.

State that one microbatch changes and the next one reads carries a class's content where its route doesn't lead, and
makes bits follow from which rank ran what. BatchNorm's statistics are folded by route (`train/buffers.py`); everything
else that moves in a forward or backward pass is found here. Looking costs a copy of all state, so it's done in steps
0, 1, 2, 4, 8 and so on: a run of a million steps has 21 such looks. What moves only in between isn't seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from cosmati.core.plan import Plan, Promise
from cosmati.routing.regions import Regions
from cosmati.train.held import Place, content_of, places_in
from cosmati.train.ranks import Ranks

_UNWATCHED = nullcontext()


class ForwardWatch:
    """Compares what model and losses hold before and after a step's passes.

    Args:
        model: in training.
        losses: any callables.
        folded: layers whose buffers a commit folds by itself.
        regions: of the model.
        ranks: all of them say the same of the promises.

    Attributes:
        is_on: whether this step is looked at.
        has_moved: whether anything has ever been found.
    """

    def __init__(
        self, model: nn.Module, losses: Sequence[object], folded: Iterable[nn.Module], regions: Regions, ranks: Ranks
    ) -> None:
        self._roots = {"": model, **loss_roots(losses)}
        self._own = {id(parameter) for parameter in model.parameters()}
        self._folded = frozenset(map(id, folded))
        self._regions = regions
        self._ranks = ranks
        self._moved: dict[str, Place] = {}
        self._changed: set[str] = set()
        self._last: dict[str, object] = {}
        self._is_first = True
        self.is_on = False
        self.has_moved = False

    def step_begins(self, step: int) -> None:
        """Say which step comes; steps 0, 1, 2, 4, 8 ... are looked at."""
        self.is_on = step & (step - 1) == 0 if step else True

    def around(self) -> AbstractContextManager[None]:
        """Stand around the forward and backward passes of a step's microbatches, between which nothing is committed."""
        return self._watched() if self.is_on else _UNWATCHED

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = self._state()
        self._compare_with_last(before)
        yield
        after = self._state()
        self._last = {name: content for name, (content, place) in after.items() if not is_kept(place, self._own)}
        for name in before.keys() | after.keys():
            (was, place), (now, other) = (state.get(name, (None, None)) for state in (before, after))
            if was != now:
                found = other or place
                assert found is not None, "it's in one of them"
                self._moved[name] = found
        if self._is_first:
            self._is_first = False
            self._warn_of_untrained()

    def _compare_with_last(self, now: Mapping[str, tuple[object, Place]]) -> None:
        """See what has changed since the last look, and no checkpoint holds: by a loop or an observer, say."""
        self._changed |= {name for name, was in self._last.items() if name in now and now[name][0] != was}

    def _state(self) -> dict[str, tuple[object, Place]]:
        """Return what can be compared of all places, by name: modules may have come or gone."""
        return {
            place.name: (content_of(place.value), place)
            for place in places_in(self._roots)
            if not (place.kind == "buffer" and id(place.owner) in self._folded)
        }

    def _warn_of_untrained(self) -> None:
        """Say which parameters outside the model get gradients: the run's optimizers hold the model's."""
        lost = [
            place.name
            for place in places_in(self._roots)
            if isinstance(place.value, nn.Parameter)
            and id(place.value) not in self._own
            and place.value.requires_grad
            and place.value.grad is not None
        ]
        if lost:
            warnings.warn(
                f"Gradients reach {', '.join(lost[:5])}, and no optimizer of this run holds what isn't in the model. "
                "If nothing else trains it, put its module into the model.",
                stacklevel=2,
            )

    def judged(self, plan: Plan) -> Plan:
        """Return the plan without the promises that what has moved breaks. Every rank has to ask."""
        if not self.is_on:
            return plan
        changed, self._changed = sorted(self._changed - self._moved.keys()), set()
        if self._ranks.agree(bool(changed)):
            names = ", ".join(changed) or "state on another rank"
            because = f"{names} changes between steps, and no checkpoint holds it"
            for promise in (Promise.RESUME, Promise.REPLAYABLE):
                plan = plan.withdraw(promise, because) if plan.holds(promise) else plan
        if not self._ranks.agree(bool(self._moved)):
            return plan
        self.has_moved = True
        moved, self._moved = [self._moved[name] for name in sorted(self._moved)], {}
        lost = [place for place in moved if not is_kept(place, self._own)]
        for promise, places in ((Promise.ELASTIC, moved), (Promise.RESUME, lost), (Promise.REPLAYABLE, lost)):
            # Of what moved on another rank, this one knows no name.
            if plan.holds(promise) and (places or not moved):
                plan = plan.withdraw(promise, _because(places))
        for guarantee in plan.guarantees:
            if guarantee.promise is not Promise.NO_DIRECT_WRITE or not guarantee.holds:
                continue
            assert guarantee.pair is not None, "it's about a class and a region"
            places = [place for place in moved if self._reaches(place, guarantee.pair[1])]
            if places or not moved:
                plan = plan.withdraw(guarantee.promise, _because(places), guarantee.pair)
        return plan

    def _reaches(self, place: Place, region: str) -> bool:
        """Say whether what moves may carry a class's content into a region.

        The next microbatch's forward may read it, and then every region's gradients follow from it, wherever it lies.
        InstanceNorm's statistics aren't read in training: they are in their own region only.
        """
        if isinstance(place.owner, _InstanceNorm) and place.kind == "buffer":
            own = self._regions.region_of_buffer(place.name)
            return own is None or self._regions.names[own] == region
        return True


def loss_roots(losses: Sequence[object]) -> dict[str, object]:
    """Return losses by the names with which their places begin."""
    return {"loss" if len(losses) == 1 else f"loss {index}": loss for index, loss in enumerate(losses)}


def is_kept(place: Place, own: set[int]) -> bool:
    """Say whether a checkpoint holds a place: the model's parameters, and every persistent buffer.

    Args:
        place: in question.
        own: `id` of each parameter of the model.
    """
    return place.is_persistent or id(place.value) in own


def _because(places: Sequence[Place]) -> str:
    told = [
        f"the {kind}s {', '.join(names)}"
        for kind in ("parameter", "buffer", "attribute")
        if (names := [place.name for place in places if place.kind == kind])
    ]
    is_declarable = any(place.kind == "attribute" for place in places)
    mend = " (in `forward_caches`, if nothing reads them back)" if is_declarable else ""
    return f"forward changes {' and '.join(told) or 'state on another rank'}{mend}"
