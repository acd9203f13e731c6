"""What one rank asks, makes and takes for the others, its peers' words being written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cosmati.errors import PlanError
from cosmati.train.layout import lockstep
from cosmati.train.layout.lockstep import Lockstep

END = -1


class One:
    """A rank whose only peer answers each question with the next of its words, and what the rank did."""

    def __init__(self, *words: int | list[int]) -> None:
        self.words = list(words)
        self.told: list[Any] = []
        self.lockstep = Lockstep(self, self.accompany, torch.device("cpu"))  # type: ignore[arg-type]

    def gather_by_rank(self, own: torch.Tensor) -> torch.Tensor:
        assert own.device == torch.device("cpu")
        self.told.append(("asks", *own.flatten().tolist()))
        return torch.cat([own, torch.tensor([self.words.pop(0)], dtype=own.dtype)])

    def accompany(self, exchange: int) -> Callable[[], None]:
        self.told.append(("gives", exchange))
        return lambda: self.told.append(("takes", exchange))

    def run(self, kind: str | None, *exchanges: int) -> list[Any]:
        """Return what it does while it runs these exchanges of its own."""
        self.told = []
        with self.lockstep.together(kind):
            for exchange in exchanges:
                self.lockstep.begin(exchange)
                self.told.append(exchange)
        assert not self.words, "all was asked that the peer answers"
        return self.told

    def learnt(self, kind: str, way: Sequence[int]) -> One:
        """Have all of a way made once by both."""
        self.words = [*way, END]
        self.run(kind, *way)
        return self


def test_what_nobody_expects_is_asked_for_each_time_and_at_the_end() -> None:
    one = One(4, 0, END)
    assert one.run("a", 4, 0) == [("asks", 4), 4, ("asks", 0), 0, ("asks", END)]
    assert one.lockstep._expected == {"a": (4, 0)}


def test_who_is_through_keeps_the_other_company_until_it_is_too() -> None:
    one = One(4, 5, 0, 6, END)
    company = [("asks", END)]
    for exchange in (5, 0, 6):
        company += [("gives", exchange), ("takes", exchange), ("asks", END)]
    assert one.run("a", 4) == [("asks", 4), 4, *company]
    assert one.lockstep._expected == {"a": (4, 5, 0, 6)}, "what was made for another is part of the way"


def test_what_all_expect_is_made_without_a_word_and_told_once() -> None:
    one = One().learnt("a", (4, 5))
    one.words = [[2, END]]
    assert one.run("a", 4, 5) == [4, 5, ("asks", 2, END)]
    assert one.lockstep._changes == {"a": 1}


def test_another_kind_and_one_that_nobody_knows_are_asked_for() -> None:
    one = One().learnt("a", (4,))
    for kind in ("b", None):
        one.words = [4, END]
        assert one.run(kind, 4) == [("asks", 4), 4, ("asks", END)]
    assert one.lockstep._expected == {"a": (4,), "b": (4,)}


def test_who_comes_to_something_else_gives_all_that_is_expected_first_and_then_asks() -> None:
    one = One().learnt("a", (4, 5, 6))
    one.words = [[1, 9], 3, END]
    assert one.run("a", 4, 9, 3) == [
        *(4, ("gives", 5), ("gives", 6), ("asks", 1, 9)),
        *(9, ("asks", 3), 3, ("asks", END)),
    ]
    assert one.lockstep._expected == {"a": (4, 9, 3)}


def test_who_goes_on_beyond_what_is_expected_asks() -> None:
    one = One().learnt("a", (4,))
    one.words = [[1, END], END]
    assert one.run("a", 4, 4) == [4, ("asks", 1, 4), 4, ("asks", END)]
    assert one.lockstep._expected == {"a": (4, 4)}


def test_who_ends_early_takes_what_the_other_made_and_goes_on_with_it() -> None:
    one = One().learnt("a", (4, 5, 6))
    one.words = [[2, 8], END]
    gave = ("gives", 5), ("gives", 6)
    goes_on = ("takes", 5), ("gives", 8), ("takes", 8), ("asks", END)
    assert one.run("a", 4) == [4, *gave, ("asks", 1, END), *goes_on]
    assert one.lockstep._expected == {"a": (4, 5, 8)}


def test_ways_that_part_are_refused_and_the_next_slot_begins_anew() -> None:
    one = One(4)
    with pytest.raises(PlanError, match=r"every rank gathers the same blocks in the same order.*use another sharding"):
        one.run("a", 5)
    assert one.lockstep._expected == {}
    one.words = [5, END]
    assert one.run("a", 5) == [("asks", 5), 5, ("asks", END)]
    one.words = [[1, 7]]
    with pytest.raises(PlanError, match="every rank gathers the same blocks"):
        one.run("a", 5, 6)
    assert one.lockstep._expected == {"a": (5,)}


@pytest.mark.parametrize("sign", lockstep._OF_A_PIECE)
def test_weights_that_are_used_where_they_are_not_whole_are_told_in_words(sign: str) -> None:
    one, error = One(), RuntimeError(f"aten: {sign}, sorry")
    with (
        pytest.raises(PlanError, match=r"weights are whole only while their block's .* weight_decay") as caught,
        one.lockstep.together("a"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("out of bounds"), ValueError("mixed torch.Tensor and DTensor")])
def test_another_error_is_the_users_and_leaves_nothing_expected_behind(error: Exception) -> None:
    one = One().learnt("a", (4, 5))

    def fail() -> None:
        with one.lockstep.together("a"):
            one.lockstep.begin(4)
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert (one.lockstep._way, one.lockstep._expected) == (None, {"a": (4, 5)})
    one.words = [[2, END]]
    assert one.run("a", 4, 5) == [4, 5, ("asks", 2, END)], "a slot begins at the way's beginning"


def test_after_a_slot_nothing_is_expected() -> None:
    one = One().learnt("a", (4,))
    one.words = [[1, END]]
    one.run("a", 4)
    one.words = [4]
    one.told = []
    one.lockstep.begin(4)
    assert one.told == [("asks", 4)]


def test_a_way_that_changes_for_the_third_time_is_the_last_that_is_kept() -> None:
    one = One()
    for number in range(5):
        one.words = [number, END] if number in (0, 4) else [[0, number], END]
        one.run("a", number)
        assert one.lockstep._expected == ({"a": (number,)} if number < 3 else {})
        if number == 3:
            one.words = [3, END]
            assert one.run("a", 3)[0] == ("asks", 3)
