"""Sees what a microbatch changes besides gradients, and which promises that breaks.

State that one microbatch changes and the next one reads carries a class's content where its route doesn't lead, and
makes bits follow from which rank ran what. BatchNorm's statistics are folded by route (`train/buffers.py`); everything
else that moves in a forward or backward pass is found here. Looking costs a copy of all state, so it's done in steps
0, 1, 2, 4, 8 and so on, and in the first one after a resume: a run of a million steps has 21 such looks. What moves
only in between isn't seen.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from cosmati.core.plan import Plan, Promise
from cosmati.routing.regions import Regions
from cosmati.train.buffers import STATISTICS
from cosmati.train.collectives import without_late_hooks
from cosmati.train.held import HOOK, RESULT, Place, places_in
from cosmati.train.options import says_what
from cosmati.train.ranks import Ranks
from cosmati.train.values import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read

_UNWATCHED = nullcontext()
_ALL = frozenset({"__dict__", "vars", "asdict", "astuple", "fields"})
"""What reads all attributes without their names."""


class ForwardWatch:
    """Compares what model and losses hold before and after a step's passes.

    Args:
        model: in training.
        losses: any callables.
        folded: layers whose buffers a commit folds by itself.
        regions: of the model.
        ranks: all of them say the same of the promises.
        repeated: names of folded layers that have run more than once in a microbatch, as they're found.

    Attributes:
        is_on: whether this step is looked at.
        has_moved: whether anything has ever been found.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[object],
        folded: Iterable[nn.Module],
        regions: Regions,
        ranks: Ranks,
        repeated: Collection[str] = (),
    ) -> None:
        self._model = model
        self._roots = {"": model, **loss_roots(losses)}
        self._own = {id(parameter) for parameter in model.parameters()}
        self._folded = frozenset(map(id, folded))
        self._regions = regions
        self._ranks = ranks
        self._repeated = repeated
        self._leaks: list[str] = []
        self._reads: list[str] = []
        self._has_seen_packs = False
        self._moved: dict[str, Place] = {}
        self._changed: dict[str, Place] = {}
        self._unseen: dict[str, Place] = {}
        self._last: dict[str, object] = {}
        self._spoken: set[str] = set()
        self._at_first: dict[str, bytes] | None = None
        self._is_first, self._has_news, self._looks_again = True, False, False
        self.is_on = False
        self.has_moved = False
        self._begun_at: int | None = None

    def step_begins(self, step: int, *, has_packs: bool = False) -> None:
        """Say which step comes; steps 0, 1, 2, 4, 8 ... are looked at, and the first one after a resume.

        Args:
            step: its number.
            has_packs: some regions' gradients are masked by token; the first such step is looked at, too.
        """
        self._begun_at = step if self._begun_at is None else self._begun_at
        is_first = has_packs and not self._has_seen_packs
        self._has_seen_packs |= has_packs
        self.is_on = step & (step - 1) == 0 or step == self._begun_at or self._looks_again or is_first

    def note(self, leak: str) -> None:
        """Take note of how documents of a pack reach one another, in words; of nothing where it's empty."""
        self._leaks += [leak] if leak else []

    def note_read(self, read: str) -> None:
        """Take note of who reads what is another class's own, in words; of nothing where it's empty."""
        self._reads += [read] if read else []

    def around(self) -> AbstractContextManager[None]:
        """Stand around the forward and backward passes of a step's microbatches, between which nothing is committed."""
        return self._watched() if self.is_on else _UNWATCHED

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = self._state()
        self._compare_with_last(before)
        yield
        after = self._state()
        self._last = {name: content for name, (content, place) in after.items() if self._is_others(place)}
        moved: dict[str, Place] = {}
        for name in before.keys() | after.keys():
            (was, place), (now, other) = (state.get(name, (None, None)) for state in (before, after))
            # That a cached function comes to hold more, or less, says nothing: other arguments.
            if was != now and not (RESULT in name and None in (place, other)):
                found = other or place
                assert found is not None, "it's in one of them"
                moved[name] = found
        # What a first pass installs is looked at once more in the next step: it may count from then on.
        is_installed = self._is_first and _are_installed(moved, before.keys())
        self._moved |= {} if is_installed else moved
        self._has_news |= is_installed or (self._is_first and any(RESULT in n for n in after.keys() - before.keys()))
        if self._is_first:
            self._is_first = False
            self._at_first = numbers_among(before) if self._ranks.is_parallel else None
            self._warn_of_untrained()

    def _compare_with_last(self, now: Mapping[str, tuple[object, Place]]) -> None:
        """See what has changed since the last look, and not by the trainer: by a loop or an observer, say."""
        for name, was in self._last.items():
            content, place = now.get(name, (was, None))
            if content != was and place is not None and self._is_read(place) and self._is_others(place):
                self._changed[name] = place

    def _is_others(self, place: Place) -> bool:
        """Say whether no commit moves a place: it isn't a parameter that is trained."""
        return id(place.value) not in self._own or not (isinstance(place.value, Tensor) and place.value.requires_grad)

    def _state(self) -> dict[str, tuple[object, Place]]:
        """Return what can be compared of all places, by name: modules may have come or gone."""
        found: dict[str, tuple[object, Place]] = {}
        self._spoken = set()
        for place in places_in(self._roots, self._spoken):
            name = place.name
            while name in found:  # Two classes of one name, say.
                name += "'"
            if not (id(place.owner) in self._folded and name.rpartition(".")[2] in STATISTICS):
                content, is_whole = read(place.value, self._own)
                found[name] = content, place
                if not (is_whole and place.is_followed):
                    self._unseen[name] = place
        self._unseen = {name: place for name, place in self._unseen.items() if self._is_read(place)}
        return found

    def _is_read(self, place: Place) -> bool:
        return not place.attribute or bool(self._spoken & {place.attribute, *_ALL})

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
        # A look ends in collectives, so that one rank's news has all of them look again.
        self._looks_again, self._has_news = self._ranks.agree(self._has_news), False
        if self._at_first is not None:
            plan, self._at_first = self._compare_ranks(plan, self._at_first), None
        plan = self._judged_leaks(self._judged_unseen(self._judged_between(without_late_hooks(plan, self._model))))
        if self._ranks.agree(bool(self._repeated)) and plan.holds(Promise.PARITY):
            names = _told(sorted(self._repeated))
            because = f"{names} ran several times in a microbatch, and statistics are folded once"
            plan = plan.withdraw(Promise.PARITY, because)
        if not self._ranks.agree(bool(self._moved)):
            return plan
        self.has_moved = True
        moved, self._moved = [self._moved[name] for name in sorted(self._moved)], {}
        lost = [place for place in moved if not is_kept(place, self._own)]
        breaks = [(Promise.ELASTIC, moved), (Promise.RESUME, lost), (Promise.REPLAYABLE, lost)]
        # One rank alone takes all microbatches in their order, as the bare loop does.
        for promise, places in [*breaks, (Promise.PARITY, moved)] if self._ranks.is_parallel else breaks:
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

    def _judged_between(self, plan: Plan) -> Plan:
        """Withdraw what breaks where others change what the forward pass may read: it may follow from any row."""
        changed = {name: place for name, place in sorted(self._changed.items()) if name not in self._moved}
        self._changed = {}
        lost = [name for name, place in changed.items() if not is_kept(place, self._own)]
        if self._ranks.agree(bool(lost)):
            because = f"{_told(lost)} changes between steps, and no checkpoint holds it"
            for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE):
                plan = plan.withdraw(promise, because) if plan.holds(promise) else plan
        if self._ranks.agree(bool(changed)):
            because = f"{_told(changed)} changes between steps, and what sets it may follow from any row{_DECLARE}"
            for guarantee in plan.guarantees:
                if guarantee.holds and guarantee.promise in (Promise.PARITY, Promise.NO_DIRECT_WRITE):
                    plan = plan.withdraw(guarantee.promise, because, guarantee.pair)
        return plan

    def _judged_leaks(self, plan: Plan) -> Plan:
        """Withdraw what is promised of classes where documents of a pack, or what is a class's own, reach others."""
        for promise, found, elsewhere in (
            (Promise.NO_DIRECT_WRITE, self._leaks, "documents of a pack reach one another"),
            (Promise.ISOLATED, self._reads, "other rows read what is a class's own"),
        ):
            if self._ranks.agree(bool(found)):
                because = found[0] if found else f"on another rank, {elsewhere}"
                for guarantee in plan.guarantees:
                    if guarantee.holds and guarantee.promise is promise:
                        plan = plan.withdraw(promise, because, guarantee.pair)
            found.clear()
        return plan

    def _judged_unseen(self, plan: Plan) -> Plan:
        """Withdraw what nothing is known of where something is too large to be compared."""
        unseen, self._unseen = sorted({place.name for place in self._unseen.values()}), {}
        if self._ranks.agree(bool(unseen)):
            own = () if self._ranks.is_parallel else (Promise.PARITY,)
            because = f"of {_told(unseen)} more could change unseen than is compared: {_LIMITS}{_DECLARE}"
            for guarantee in plan.guarantees:
                if guarantee.holds and guarantee.promise not in own:
                    plan = plan.withdraw(guarantee.promise, because, guarantee.pair)
        return plan

    def _compare_ranks(self, plan: Plan, own: Mapping[str, bytes]) -> Plan:
        """Withdraw what is promised of any number of ranks where each began with numbers of its own."""
        if self._ranks.all_equal(_digest("".join(own).encode(), *own.values())):
            return plan
        unlike = self._ranks.unlike_names(own)
        if not plan.holds(Promise.ELASTIC):  # Asked last: other surroundings have withdrawn it on some ranks only.
            return plan
        return plan.withdraw(Promise.ELASTIC, f"ranks began with unlike values of {', '.join(unlike[:5])}")

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


def _are_installed(moved: Mapping[str, Place], known: Collection[str]) -> bool:
    """Say whether all that a pass has changed are hooks that weren't there, and flags which say that they are.

    Transformers installs its hooks when hidden states are first asked for. A number or a container in a hook may hold
    content of the rows, and so may a flag where nothing is installed.
    """
    hooks = [place for place in moved.values() if HOOK in place.name]
    is_new = all(name not in known for name in moved)
    return (
        is_new
        and bool(hooks)
        and all(
            isinstance(place.value, bool | int | str | None) if HOOK in place.name else place.value is True
            for place in moved.values()
        )
    )


def numbers_among(state: Mapping[str, tuple[object, Place]]) -> dict[str, bytes]:
    """Return digests of the numbers among what is kept beside parameters, save of those that say where a rank runs.

    Args:
        state: content and place by name.
    """
    kinds = (Tensor, np.ndarray, bool, int, float)
    told = {name: found for name, found in state.items() if RESULT not in name and says_what(name.rpartition(".")[2])}
    return {
        name: _digest(repr(content).encode())
        for name, (content, place) in told.items()
        if place.kind != "parameter"
        and isinstance(place.value, kinds)
        # `hash` of a text is another number in each process; transformers' models keep one.
        and not (type(place.value) is int and name.endswith("_hash"))
    }


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


_LIMITS = f"what can be read, up to {MAX_VALUES:,} values, {MAX_BYTES >> 30} GiB of arrays and {MAX_DEPTH} levels"
_DECLARE = " (in `forward_caches`, if it follows from the position alone)"


def _told(names: Iterable[str]) -> str:
    return ", ".join(names) or "state on another rank"


def _because(places: Sequence[Place]) -> str:
    told = [
        f"the {kind}s {', '.join(names)}"
        for kind in ("parameter", "buffer", "attribute")
        if (names := [place.name for place in places if place.kind == kind])
    ]
    mend = " (in `forward_caches`, if nothing reads them back)" if any(p.kind == "attribute" for p in places) else ""
    return f"forward changes {' and '.join(told) or 'state on another rank'}{mend}"
