"""A batch has a digest as long as nobody has changed it, and a loader's state is kept to be read from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cosmati.errors import DataError
from cosmati.train.content import content_digest
from cosmati.train.marks import Mark
from cosmati.train.seen import Kept, LastGiven


def batch(value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full((3,), value), torch.arange(3)]


def test_the_digest_is_of_the_batch_that_was_given_last() -> None:
    last = LastGiven()
    assert last.digest() is None
    first, second = batch(1.0), batch(2.0)
    last.note(first)
    last.note(second)
    assert last.digest() == content_digest(second).hex()
    second[0].add_(1)
    assert last.digest() == content_digest(batch(2.0)).hex(), "it was hashed before"
    last.note(first)
    first[0].add_(1)
    assert last.digest() is None, "nobody has hashed it before it was changed"
    first[0].sub_(1)
    assert last.digest() is None


def test_a_mark_of_before_counts_where_there_is_one() -> None:
    given = batch(1.0)
    mark = Mark(given)
    given[0].add_(1)
    last = LastGiven()
    last.note(given, mark)
    assert last.digest() is None
    last.note(given)
    assert last.digest() == content_digest(given).hex()


def test_a_pass_begins_without_a_batch() -> None:
    last = LastGiven("ab")
    assert last.digest() == "ab"
    last.note(batch())
    last.forget()
    assert last.digest() is None
    last = LastGiven("ab")
    last.forget()
    assert last.digest() is None
    given = batch()
    last.note(given)
    last.forget()
    given[0].add_(1)
    last.refuse_changed(3)
    last.look()
    last.note(given)
    assert last.digest() == content_digest(given).hex()


def test_a_failed_step_is_not_taken_anew_on_what_it_has_changed() -> None:
    last, given = LastGiven(), batch()
    last.refuse_changed(1)
    last.note(given)
    last.refuse_changed(1)
    given[0].add_(1)
    with pytest.raises(DataError, match=r"^Step 7 has failed, and can't be taken anew: the loss or .* have changed"):
        last.refuse_changed(7)


def test_what_comes_again_is_called_by_its_name() -> None:
    last, given = LastGiven(), batch()
    last.note(given)
    given[0].add_(1)
    last.look()
    with pytest.raises(DataError, match=r"^The first batch was changed in place since"):
        LastGiven().note(given, name="The first batch")
    with pytest.raises(DataError, match=r"^A batch comes again, and was changed in place since"):
        last.note(given)


def test_only_what_a_step_was_given_is_looked_at_once() -> None:
    last, given = LastGiven(), batch()
    last.look()
    last.note(given)
    last.look()
    given[0].add_(1)
    last.look()
    last.note(given)
    last.note(batch())
    given[0].add_(1)
    last.look()
    last.note(given)


class Counting:
    """A loader that counts its batches, and gives away the mapping in which it does."""

    def __init__(self, *, moves: bool = True) -> None:
        self.state: dict[str, Any] = {"given": 0}
        self.moves, self.asked = moves, 0

    def give(self) -> None:
        self.state["given"] += self.moves

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_is_kept_before_every_eighth_batch_from_the_second_on() -> None:
    loader = Counting()
    kept = Kept(loader)
    for seen in range(26):
        kept.before(seen)
        assert loader.state["given"] == seen
        where = kept.state(seen)
        expected = seen if seen < 2 else 1 + 8 * ((seen - 1) // 8)
        if seen > 1 and seen % 8 == 1:
            expected = seen
        assert (where["from"], where["loader"]["given"]) == (expected, expected)
        loader.give()
    assert kept.doubt == ""


def test_a_state_is_asked_for_no_more_often_than_it_is_kept() -> None:
    loader = Counting()
    kept = Kept(loader)
    for seen in (0, 1, 1, 2, 3, 8, 9, 9, 10):
        kept.before(seen)
        loader.state["given"] = seen
    assert loader.asked == 3, "at batch 1 and 9, and once at 2 to see if it moves"


def test_a_pass_forgets_the_state_of_the_one_before() -> None:
    loader = Counting()
    kept = Kept(loader)
    for seen in range(12):
        kept.before(seen)
        loader.give()
    kept.begin_pass()
    assert kept.state(0) == {"loader": {"given": 12}, "from": 0}
    kept.before(1)
    assert kept.state(2) == {"loader": {"given": 12}, "from": 1}


def test_a_loader_that_does_not_say_its_place_is_doubted() -> None:
    loader = Counting(moves=False)
    kept = Kept(loader)
    for seen in range(2):
        kept.before(seen)
        loader.give()
        assert kept.doubt == ""
    kept.before(2)
    assert kept.doubt == "the state_dict() of Counting is the same after 2 batches as after 1: it doesn't say the place"
    asked = loader.asked
    kept.before(2)
    assert loader.asked == asked


def test_a_loader_that_was_restored_beyond_its_first_batch_is_not_doubted() -> None:
    loader = Counting(moves=False)
    kept = Kept(loader)
    kept.before(2)
    assert kept.doubt == ""
    assert loader.asked == 0


def test_a_checkpoints_state_is_handed_to_the_loader() -> None:
    loader = Counting()
    kept = Kept(loader)
    assert kept.restore({}, 5) == 5
    assert loader.state == {"given": 0}
    told = {"loader": {"given": 9}, "from": 9}
    before = copy.deepcopy(told)
    assert kept.restore(told, 12) == 9
    assert loader.state == {"given": 9}
    loader.give()
    assert kept.state(12) == before, "what it goes on counting in is its own"
    assert kept.state(9) == {"loader": {"given": 10}, "from": 9}
    kept.before(9)
    assert kept.state(12) == before
