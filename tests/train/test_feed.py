"""Where a run takes its batches from, without a trainer: keyed order, lists, loaders and generators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.clock import Clock
from cosmati.errors import DataError, PlanError
from cosmati.train.by_position import ByPosition
from cosmati.train.feed import IterableFeed, OrderedFeed
from cosmati.train.step_rows import as_batch, split_batch
from tests.train.hand_made import rows

DATA = [torch.full((4, 1), float(step)) for step in range(3)]


class Keyed:
    """An order of four steps; rows are numbered by step and microbatch."""

    steps_per_epoch = 4
    rows_per_step = 2

    def microbatch(self, step: int, index: int) -> Batch:
        return rows(10 * step + index)

    def class_id(self, step: int, index: int) -> int:
        return 100 * step + index


class KeyedAhead(Keyed):
    """Wants to know what comes next."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, Sequence[int]]] = []

    def expect(self, step: int, mine: Sequence[int]) -> None:
        self.expected.append((step, tuple(mine)))


class Loader:
    """Starts anew each time; of unknown length."""

    def __init__(self, num: int = 3) -> None:
        self.num = num
        self.started = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.started += 1
        return iter(DATA[: self.num])


class Sized(Loader):
    def __len__(self) -> int:
        return self.num


class Restoring(Loader):
    """Begins where its state says."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.place += 1
            yield torch.full((4, 1), float(self.place))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def _first(data: Any) -> float | None:
    return None if data is None else float(data[0, 0])


def _ids(batches: Sequence[Batch] | None) -> list[int]:
    assert batches is not None
    return [int(batch.lineage.row_ids[0]) for batch in batches]


def test_an_order_is_read_by_position() -> None:
    feed = OrderedFeed(Keyed(), 4)
    clock = Clock(step=3)
    assert _ids([feed.whole(clock)]) == [30]
    assert _ids(feed.microbatches(clock, (1, 3))) == [31, 33]
    assert _ids(feed.again(2)) == [20, 21, 22, 23]
    assert feed.class_ids(clock) == [300, 301, 302, 303]
    assert (feed.steps_per_epoch, feed.is_positional, feed.num_passes, feed.state()) == (4, True, 0, {})
    feed.restore({}, clock)
    assert _ids([feed.whole(clock)]) == [30]


def test_an_order_that_reads_ahead_is_told_what_comes() -> None:
    order = KeyedAhead()
    feed = OrderedFeed(order, 4)
    feed.whole(Clock(step=1))
    feed.microbatches(Clock(step=2), (0, 2))
    feed.again(0)
    feed.class_ids(Clock(step=5))
    assert order.expected == [(1, (0,)), (2, (0, 2))]


def test_a_list_is_read_by_position_again_and_again() -> None:
    feed = IterableFeed(DATA, 2)
    assert [_first(feed.whole(Clock(step=step))) for step in (0, 1, 2, 3, 7)] == [0, 1, 2, 0, 1]
    assert (feed.steps_per_epoch, feed.is_positional, feed.num_passes, feed.state()) == (3, True, 0, {})
    assert _ids(feed.again(2)) == [0, 2]
    assert [_first(batch.data) for batch in feed.again(2)] == [2.0, 2.0]
    assert list(feed.again(3)) == []


def test_a_loader_starts_anew_for_each_pass() -> None:
    loader = Loader(2)
    feed = IterableFeed(loader, 1)
    found = [(_first(feed.whole(Clock())), feed.num_passes) for _ in range(5)]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert (loader.started, feed.steps_per_epoch, feed.is_positional) == (3, None, False)
    assert {name: feed.state()[name] for name in ("passes", "batches", "generators")} == {
        "passes": 2, "batches": 1, "generators": []
    }  # fmt: skip
    assert list(feed.again(0)) == []
    assert IterableFeed(Sized(2), 1).steps_per_epoch == 2


def test_a_generator_has_one_pass_in_it() -> None:
    feed = IterableFeed(iter(DATA[:2]), 1)
    assert [_first(feed.whole(Clock())) for _ in range(3)] == [0, 1, None]
    assert feed.num_passes == 1


def test_a_loader_that_gives_nothing_ends_the_data() -> None:
    loader = Loader(0)
    feed = IterableFeed(loader, 1)
    assert (feed.whole(Clock()), loader.started, feed.num_passes) == (None, 2, 1)


@pytest.mark.parametrize("data", [[], (), Sized(0)])
def test_data_of_no_length_are_refused(data: Any) -> None:
    with pytest.raises(DataError, match=rf"The {type(data).__name__} to train on is empty"):
        IterableFeed(data, 1)


def test_a_loader_with_a_state_is_restored_and_others_are_not() -> None:
    feed = IterableFeed(Restoring(), 1)
    assert [_first(feed.whole(Clock())) for _ in range(3)] == [1, 2, 3]
    state = feed.state()
    # From after the first batch: the two that follow are read again, and compared.
    assert {name: state[name] for name in ("loader", "from", "passes", "batches")} == {
        "loader": {"place": 1}, "from": 1, "passes": 0, "batches": 3,
    }  # fmt: skip
    assert feed.is_positional
    other = IterableFeed(Restoring(), 1)
    other.whole(Clock())  # an iterator that has begun is left
    other.restore(feed.state(), Clock())
    assert _first(other.whole(Clock())) == 4
    other.restore({}, Clock())
    assert _first(other.whole(Clock())) == 5
    plain = IterableFeed(Loader(), 1)
    plain.restore({"passes": 0, "batches": 3}, Clock())
    assert _first(plain.whole(Clock())) == 0


def test_rows_are_numbered_from_where_the_clock_stands() -> None:
    for data in (DATA[0], (DATA[0], torch.zeros(4)), {"x": DATA[0], "y": torch.zeros(4)}):
        for trusted in (False, True):
            batch = as_batch(data, 7, trusted=trusted)
            assert batch.lineage.row_ids.tolist() == [7, 8, 9, 10]
            assert batch.class_id is None
    mapping = {"x": DATA[0]}
    assert as_batch(mapping, 0).data is not mapping
    made = rows(5, 6)
    assert as_batch(made, 0) is made


def test_trusted_data_are_not_compared() -> None:
    uneven = (torch.zeros(4, 1), torch.zeros(3))
    assert as_batch(uneven, 0, trusted=True).num_rows == 4
    with pytest.raises(ValueError, match=r"found lengths \[3, 4\]"):
        as_batch(uneven, 0)


@pytest.mark.parametrize(("num_rows", "num"), [(4, 8), (6, 4), (0, 2)])
def test_rows_that_do_not_divide_are_refused(num_rows: int, num: int) -> None:
    with pytest.raises(PlanError, match=rf"A batch of {num_rows} rows can't be split into V = {num}"):
        split_batch(rows(*range(num_rows)), num)


def test_a_batch_is_cut_in_order() -> None:
    batch = rows(*range(8))
    assert split_batch(batch, 1)[0] is batch
    assert [part.lineage.row_ids.tolist() for part in split_batch(batch, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [part.lineage.row_ids.tolist() for part in split_batch(batch, 8)] == [[i] for i in range(8)]


class Rows(Sequence[torch.Tensor]):
    """Makes its batches when it's asked."""

    def __init__(self, made: list[torch.Tensor]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: Any) -> Any:
        return self.made[index].clone()


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_first_batch_and_the_last_one_are_compared_where_reading_goes_on(changed: int) -> None:
    made = [torch.full((2,), float(number)) for number in range(4)]
    before, after = ByPosition(Rows(made), lambda _: None), ByPosition(Rows([*made]), lambda _: None)
    for step in range(3):
        before.read(step)
    state = json.loads(json.dumps(before.state()))
    assert [step for step, _ in state["read"]] == [0, 2]
    after._data.made[changed] = torch.zeros(2) - 1
    after.restore(state)
    if changed == 1:
        assert torch.equal(after.read(3), made[3])
        assert after.state()["read"][0] == state["read"][0], "the first one is that of the run"
        return
    with pytest.raises(DataError, match=f"batch {changed} of the data is another one now"):
        after.read(3)
