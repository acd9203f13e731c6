"""Ranks that make what they expect without asking end as ranks would that ask each time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosmati.errors import PlanError
from cosmati.train.layout.lockstep import Lockstep

pytestmark = pytest.mark.long

ASKING = -1
KINDS = "ab"
NUMBERS = st.integers(0, 3)


class Slot(NamedTuple):
    """What ranks run: a kind of slot, and each rank's exchanges."""

    kind: str
    programs: Sequence[Sequence[int]]


class Meeting:
    """Where so many threads wait for one another, who must all have come for the same thing."""

    def __init__(self, world: int) -> None:
        self.num_asked = self.num_made = 0
        self._brought: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=100)

    def meet(self, rank: int, reason: object, brings: Any) -> list[Any]:
        self._brought[rank] = reason, brings
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        assert len({why for why, _ in found}) == 1, f"one reads what was meant for another: {found}"
        self.num_asked += rank == 0 and reason == ASKING
        self.num_made += rank == 0 and reason != ASKING
        return [what for _, what in found]

    def broken(self) -> None:
        self._barrier.abort()


class Rank:
    """A rank of a meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._meeting = rank, meeting
        self.taken: list[tuple[int, int]] = []

    def gather_by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.meet(self.rank, ASKING, rows))

    def exchange(self, number: int, gives: int) -> Callable[[], None]:
        """Sum what all give, of which each rank has a bit of its own."""
        return partial(self.taken.append, (number, sum(self._meeting.meet(self.rank, number, gives))))

    def run(self, slots: Sequence[Slot]) -> list[Any]:
        """Return what was taken in each slot, and that it was refused."""
        lockstep, told = Lockstep(self, lambda n: self.exchange(n, 0), torch.device("cpu")), list[Any]()  # type: ignore[arg-type]
        try:
            for kind, programs in slots:
                self.taken = []
                with lockstep.together(kind):
                    for number in programs[self.rank]:
                        lockstep.begin(number)
                        self.exchange(number, 1 << self.rank)()
                told.append(self.taken)
        except PlanError:
            told.append("refused")
        except BaseException:
            self._meeting.broken()
            raise
        return told


def asked(slots: Sequence[Slot]) -> list[Any]:
    """Return what comes of it where ranks ask before each exchange, by the definition."""
    told = list[Any]()
    for slot in slots:
        left, taken = [list(program) for program in slot.programs], []
        while any(left):
            following = {program[0] for program in left if program}
            if len(following) > 1:
                return [*told, "refused"]
            taken.append((following.pop(), sum(1 << rank for rank, program in enumerate(left) if program)))
            left = [program[1:] for program in left]
        told.append(taken)
    return told


def ran(slots: Sequence[Slot]) -> tuple[list[Any], Meeting]:
    """Return what comes of it on each rank, and where they met."""
    world = len(slots[0].programs)
    meeting = Meeting(world)
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(lambda rank: Rank(rank, meeting).run(slots), range(world)))
    return found, meeting


@st.composite
def histories(draw: st.DrawFn) -> list[Slot]:
    """Slots of a few kinds, most alike; ranks that run all of it, less, or seldom something else."""
    world = draw(st.integers(2, 4))
    usual = {kind: draw(st.lists(NUMBERS, max_size=5)) for kind in KINDS}
    slots = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(KINDS))
        if draw(st.integers(0, 3)) == 0:
            usual[kind] = draw(st.lists(NUMBERS, max_size=5))
        programs = []
        for _ in range(world):
            own = list(usual[kind])
            how = draw(st.integers(0, 9))
            if how < 3:
                own = own[: draw(st.integers(0, len(own)))]
            elif how == 3:
                own.insert(draw(st.integers(0, len(own))), draw(NUMBERS))
            programs.append(own)
        slots.append(Slot(kind, programs))
    return slots


@settings(max_examples=300)
@given(histories())
@example([Slot("a", [[1, 2, 3]] * 2), Slot("a", [[1, 2, 3], [1, 3]])])
@example([Slot("a", [[1, 2, 3]] * 2), Slot("a", [[1, 3], [1, 3]]), Slot("a", [[1, 3], []])])
@example([Slot("a", [[1, 2]] * 3), Slot("a", [[3], [], [3]]), Slot("a", [[3, 1], [3], [3, 1]])])
@example([Slot("a", [[1, 2]] * 2), Slot("a", [[3], [1]])])
def test_what_is_expected_gives_what_asking_gives(slots: list[Slot]) -> None:
    expected = asked(slots)
    assert ran(slots)[0] == [expected] * len(slots[0].programs)


def test_ranks_ask_once_a_slot_where_all_is_as_expected() -> None:
    usual = Slot("a", [[1, 2, 3, 0]] * 2)
    assert ran([usual])[1].num_asked == 5
    assert ran([usual] * 11)[1].num_asked == 5 + 10


def test_what_nobody_needs_any_more_is_made_in_vain_once() -> None:
    usual, less = Slot("a", [[1, 2, 3]] * 2), Slot("a", [[1], [1]])
    told, meeting = ran([usual, less, less, less])
    assert told == [asked([usual, less, less, less])] * 2
    assert meeting.num_made == 3 + 3 + 1 + 1


def test_what_changes_again_and_again_is_asked_for() -> None:
    """Nobody makes in vain, slot by slot, what an earlier one needed."""
    turns = [Slot("a", [[1, number % 2, 3]] * 2) for number in range(20)]
    told, meeting = ran(turns)
    assert told == [asked(turns)] * 2
    assert meeting.num_asked > 15 * 4


@pytest.mark.parametrize("error", [ValueError("the user's own"), RuntimeError("mixed torch.Tensor and DTensor")])
def test_after_an_error_ranks_know_of_no_way(error: Exception) -> None:
    rank = Rank(0, Meeting(1))
    lockstep = Lockstep(rank, lambda number: rank.exchange(number, 0), torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(2):
        with lockstep.together("a"):
            lockstep.begin(1)
    with pytest.raises((ValueError, PlanError)), lockstep.together("a"):
        raise error
    before = rank._meeting.num_asked
    lockstep.begin(5)
    assert rank._meeting.num_asked == before + 1
