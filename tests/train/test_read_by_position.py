"""Batches are read by position: drawn anew by the step's seed, compared after a resume, and never given changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.errors import DataError
from cosmati.train.by_position import ByPosition
from cosmati.train.content import content_digest


class Drawn(Sequence[Tensor]):
    """Makes each batch of its index and of what was seeded last."""

    def __init__(self, length: int = 3, width: int = 2) -> None:
        self.seeds: list[int] = []
        self.asked: list[int] = []
        self.other: dict[int, float] = {}
        self._length, self._width = length, width

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return torch.full((self._width,), self.other.get(index, 0.0) + 100.0 * index + self.seeds[-1])


class Listed(list[Tensor]):
    """A list of somebody's own may draw."""


def reader(data: Drawn) -> ByPosition:
    return ByPosition(data, data.seeds.append)


def digest(value: float) -> str:
    return content_digest(torch.full((2,), value)).hex()


def tensors(num: int = 3) -> list[Tensor]:
    return [torch.full((2,), float(index)) for index in range(num)]


def never(step: int) -> None:
    raise AssertionError("a list draws nothing")


# ------------------------------------------------------------------------------------------------------ what is drawn


def test_a_batch_is_drawn_by_its_steps_seed_and_place() -> None:
    data = Drawn()
    read = reader(data)
    assert [float(read.read(step)[0]) for step in (0, 1, 2, 3, 7)] == [0.0, 101.0, 202.0, 3.0, 107.0]
    assert (data.seeds, data.asked) == ([0, 1, 2, 3, 7], [0, 1, 2, 0, 1])


def test_a_state_tells_of_the_first_batch_and_of_the_last_one() -> None:
    data = Drawn()
    read = reader(data)
    assert read.state() == {"read": []}
    read.read(4)
    assert read.state() == {"read": [[4, digest(104.0)], [4, digest(104.0)]]}
    read.read(5)
    last = read.read(6)
    assert read.state() == {"read": [[4, digest(104.0)], [6, digest(6.0)]]}
    assert read.state() == read.state()
    del last


def test_of_a_last_batch_that_was_changed_in_place_nothing_is_told() -> None:
    data = Drawn()
    read = reader(data)
    read.read(0)
    read.read(1).add_(1)
    assert read.state() == {"read": [[0, digest(0.0)]]}


@pytest.mark.parametrize("kind", [Listed, list, tuple])
def test_only_plain_lists_and_tuples_have_a_content_known_ahead(kind: type) -> None:
    seeds: list[int] = []
    read = ByPosition(kind(tensors()), seeds.append)
    read.read(1)
    is_plain = kind is not Listed
    assert bool(read.state()) == (not is_plain)
    assert seeds == ([] if is_plain else [1])


def test_reading_goes_on_after_both_were_compared_once() -> None:
    before, data = reader(Drawn()), Drawn()
    for step in range(5):
        before.read(step)
    after = reader(data)
    after.restore(before.state())
    assert data.asked == [], "not before somebody reads"
    assert float(after.read(5)[0]) == 205.0
    assert (data.seeds, data.asked) == ([0, 4, 5], [0, 1, 2])
    after.read(6)
    assert (data.seeds, data.asked) == ([0, 4, 5, 6], [0, 1, 2, 0]), "once"
    # The first one is that of the run, not of this process.
    assert after.state() == {"read": [[0, digest(0.0)], [6, digest(6.0)]]}


@pytest.mark.parametrize("step", [0, 4])
def test_another_batch_than_was_read_is_refused_by_its_place(step: int) -> None:
    before, data = reader(Drawn()), Drawn()
    for number in range(5):
        before.read(number)
    after = reader(data)
    after.restore(before.state())
    data.other[step % 3] = 0.5
    why = rf"^The Drawn can't go on where the run stopped: batch {step % 3} of the data is another one now\."
    with pytest.raises(DataError, match=why):
        after.read(5)


def test_of_batches_that_a_checkpoint_does_not_tell_nothing_is_compared() -> None:
    data = Drawn()
    after = reader(data)
    after.restore({})
    after.read(5)
    assert data.asked == [2]
    assert after.state() == {"read": [[5, digest(205.0)], [5, digest(205.0)]]}
    after.restore({"read": []})
    assert after.state()["read"][0] == [5, digest(205.0)], "what was known stays known"


def test_a_batch_that_comes_again_changed_is_refused() -> None:
    held = tensors()
    read = ByPosition(Listed(held), lambda step: None)
    read.read(0).add_(1)
    read.read(1)
    with pytest.raises(DataError, match=r"^A batch comes again, and was changed in place since a step was given it"):
        read.read(3)


# ------------------------------------------------------------------------------------------------------- plain lists


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_lists_batches_are_given_as_they_are_again_and_again(kind: type) -> None:
    held = kind(tensors())
    read = ByPosition(held, never)
    for step in (0, 1, 2, 3, 3, 8):
        assert read.read(step) is held[step % 3]
    assert read.state() == {}
    read.restore({"read": [[0, "another"]]})
    assert read.read(9) is held[0], "its content is part of the run's identity"


@pytest.mark.parametrize("between", [0, 1])
def test_a_lists_batch_that_was_changed_in_place_is_refused_by_its_place(between: int) -> None:
    held = tensors()
    read = ByPosition(held, never)
    for step in range(3):
        read.read(step)
    held[1].mul_(2)
    if between:
        assert read.read(3) is held[0]
    with pytest.raises(DataError, match=r"^Batch 1 of the data was changed in place since a step was given it"):
        read.read(4)


def test_a_batch_that_was_changed_before_it_was_given_is_the_users() -> None:
    held = tensors()
    read = ByPosition(held, never)
    read.read(0)
    held[1].mul_(2)
    assert read.read(1) is held[1]


def test_another_batch_in_a_place_of_the_list_is_refused_where_its_content_is_another() -> None:
    held = tensors()
    read = ByPosition(held, never)
    read.read(0)
    held[0] = torch.zeros(2)
    assert read.read(3) is held[0]
    held[0] = torch.ones(2)
    with pytest.raises(DataError, match=r"^Batch 0 of the data was changed"):
        read.read(6)


def test_one_batch_in_two_places_is_changed_in_both() -> None:
    whole = torch.arange(4.0)
    read = ByPosition([whole, whole[:2], torch.zeros(1)], never)
    read.read(0).add_(1)
    with pytest.raises(DataError, match=r"^Batch 1 of the data was changed in place"):
        read.read(1)


@pytest.mark.parametrize("kind", [list, Listed])
def test_what_the_last_step_has_made_of_its_batch_is_known_to_who_reads_the_data_next(kind: type) -> None:
    """Another trainer may be given the same data."""
    held = kind(tensors())
    read = ByPosition(held, lambda step: None)
    read.read(0).add_(1)
    assert ByPosition(held, lambda step: None).read(0) is held[0], "nobody has looked"
    held = kind(tensors())
    read = ByPosition(held, lambda step: None)
    read.read(0).add_(1)
    assert read.look() is None
    with pytest.raises(DataError, match="was changed in place since a step was given it"):
        ByPosition(held, lambda step: None).read(0)
