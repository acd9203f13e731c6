"""A loader goes on where it stood when a run resumes: with the batches that come next, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cosmati.core.clock import Clock
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.errors import DataError
from cosmati.train import feed
from cosmati.train.feed import IterableFeed

CPU = torch.device("cpu")


class Numbers(Dataset[Tensor]):
    """Eight rows, and how many were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        return torch.tensor([float(index)])


class Loader:
    """Makes its batches by a function of the pass, which is counted from 1."""

    def __init__(self, make: Callable[[int], Iterator[Any]]) -> None:
        self.make, self.started = make, 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return self.make(self.started)


def of(*numbers: float) -> Loader:
    """The same batches in each pass."""
    return Loader(lambda _: iter([torch.full((2, 1), number) for number in numbers]))


def shuffled(seed: int = 3) -> DataLoader[Tensor]:
    return DataLoader(Numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))


def taken(own: IterableFeed, *steps: int) -> list[Any]:
    found = [own.whole(Clock(step=step)) for step in steps]
    return [None if one is None else one.flatten().tolist() for one in found]


def drawn(*key: int) -> list[float]:
    """What is drawn by hand after the key."""
    with torch.random.fork_rng():
        DefaultGenerators(CPU).seed(position_key(7, "data", *key))
        return [float(torch.rand(())), float(torch.rand(()))]


@pytest.mark.parametrize("num", [1, 3, 4, 5, 9])
def test_a_shuffling_loader_goes_on_with_the_same_batches(num: int) -> None:
    with torch.random.fork_rng():
        own = IterableFeed(shuffled(), 1, seed=7, generators=DefaultGenerators(CPU))
        found = taken(own, *range(num + 6))
        own = IterableFeed(shuffled(), 1, seed=7, generators=DefaultGenerators(CPU))
        taken(own, *range(num))
        state = own.state()
        assert (state["passes"], state["batches"]) == ((num - 1) // 4, (num - 1) % 4 + 1)
        assert len(state["generators"]) == len(own.generators) == 1
        other = IterableFeed(shuffled(99), 1, seed=7, generators=DefaultGenerators(CPU))
        taken(other, 0)
        other.restore(state, Clock(step=num))
        assert taken(other, *range(num, num + 6)) == found[num:]
        again = IterableFeed(shuffled(99), 1, seed=7, generators=DefaultGenerators(CPU))
        again.restore(state, Clock(step=num))
        kept = again.state()
        assert torch.equal(kept["generators"][0], state["generators"][0])
        assert {name: kept[name] for name in ("passes", "batches", "first", "last")} == {
            name: state[name] for name in ("passes", "batches", "first", "last")
        }


def resumed(before: Loader, after: Loader, num: int) -> IterableFeed:
    own = IterableFeed(before, 1)
    taken(own, *range(num))
    other = IterableFeed(after, 1)
    other.restore(own.state(), Clock(step=num))
    return other


def test_other_batches_than_were_seen_are_refused() -> None:
    with pytest.raises(DataError, match="its first batch isn't the one that this pass began with"):
        taken(resumed(of(1, 2, 3), of(9, 2, 3), 2), 2)
    with pytest.raises(DataError, match="batch 1 of this pass, the last one seen, is another one now"):
        taken(resumed(of(1, 2, 3), of(1, 9, 3), 2), 2)
    with pytest.raises(DataError, match="it ended after 2 batches, and 3 of this pass were seen"):
        taken(resumed(of(1, 2, 3), of(1, 2), 3), 3)
    assert taken(resumed(of(1, 2, 3, 4), of(1, 9, 3, 4), 3), 3) == [[4, 4]], "only the first and the last are known"


def test_a_later_pass_may_begin_with_another_batch() -> None:
    own = IterableFeed(Loader(lambda number: iter([torch.full((1, 1), float(number))])), 1)
    assert taken(own, 0, 1, 2) == [[1], [2], [3]]


def test_generators_that_a_loader_does_not_have_any_more_are_refused() -> None:
    own = IterableFeed(of(1), 1)
    with pytest.raises(DataError, match="it had 2 generators of its own, and has 0"):
        own.restore({"generators": [torch.ones(1), torch.ones(1)]}, Clock(step=1))


def test_an_iterator_that_has_begun_cannot_go_on() -> None:
    own = IterableFeed(iter([torch.ones(1)]), 1)
    own.restore({}, Clock())
    with pytest.raises(DataError, match="it can be iterated over only once, and how far it is can't be told"):
        own.restore({}, Clock(step=1))


def test_an_older_state_goes_by_the_clock() -> None:
    own = IterableFeed(of(1, 2, 3), 1)
    own.restore({}, Clock(step=5, epoch=1, step_in_epoch=2))
    assert own.num_passes == 1
    assert taken(own, 5) == [[3, 3]]
    assert own.num_passes == 1


def test_workers_that_live_on_are_begun_as_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(feed, "workers_live_on", lambda data: asked.append(data) or True)  # type: ignore[func-returns-value]
    drawn_at: list[float] = []

    def make(number: int) -> Iterator[Tensor]:
        drawn_at.append(float(torch.rand(())))
        return iter([torch.ones(1, 1), torch.ones(1, 1) + 1])

    with torch.random.fork_rng():
        loader = Loader(make)
        own = IterableFeed(loader, 1, seed=7, generators=DefaultGenerators(CPU))
        taken(own, 0, 1)
        assert loader.started == 1
        own.restore(own.state() | {"passes": 1, "batches": 1, "last": None}, Clock(step=3))
        taken(own, 3)
        assert asked == [loader]
    assert drawn_at == [drawn(0, 0)[0], drawn(0, 0)[0], drawn(1, 0)[0]]


class TestLoadersWithAState:
    """A loader that restores itself is asked to."""

    class Counting:
        """Goes on after what its state says; or begins anew, where it can't."""

        num_workers = 0
        tells = False

        def __init__(self, num: int = 5, *, forgets: bool = False) -> None:
            self.num, self.place, self.forgets, self.generator = num, 0, forgets, torch.Generator().manual_seed(1)

        def __iter__(self) -> Iterator[Tensor]:
            start, self.start = getattr(self, "start", 0), 0
            self.place = start
            while self.place < self.num:
                self.place += 1
                draw = float(torch.randint(100, (), generator=self.generator))
                yield torch.tensor([[float(self.place), draw if self.tells else 0.0]])

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start = 0 if self.forgets else state["place"]

    @pytest.mark.parametrize("num", [1, 2, 4, 5, 7])
    def test_it_goes_on_with_the_same_batches(self, num: int) -> None:
        own = IterableFeed(self.Counting(), 1)
        found = [row[0] for row in taken(own, *range(num + 7))]
        assert found == [float(step % 5 + 1) for step in range(num + 7)]
        own = IterableFeed(self.Counting(), 1)
        taken(own, *range(num))
        other = IterableFeed(self.Counting(), 1)
        other.restore(own.state(), Clock(step=num))
        assert [row[0] for row in taken(other, *range(num, num + 7))] == found[num:]
        assert own.is_positional

    def test_its_own_generator_stands_where_it_stood(self) -> None:
        for num in (1, 3):
            own, loader = IterableFeed(self.Counting(), 1), self.Counting()
            own._data.tells = loader.tells = num == 1  # type: ignore[attr-defined]  (before that, all is in the state)
            taken(own, *range(num))
            state = own.state()
            other = IterableFeed(loader, 1)
            taken(other, 0, 1)
            other.restore(state, Clock(step=num))
            assert taken(other, num, num + 1) == taken(own, num, num + 1)
            assert torch.equal(other.generators[0].get_state(), own.generators[0].get_state())

    def test_one_that_begins_again_is_refused(self) -> None:
        own = IterableFeed(self.Counting(), 1)
        taken(own, 0)
        loader = self.Counting(forgets=True)
        loader.generator = torch.Generator().manual_seed(1)
        other = IterableFeed(loader, 1)
        other.restore(own.state() | {"generators": [torch.Generator().manual_seed(1).get_state()]}, Clock(step=1))
        with pytest.raises(DataError, match="it gives the first batch of this pass again"):
            taken(other, 1)

    def test_it_keeps_its_place_where_it_is_closed(self) -> None:
        own = IterableFeed(self.Counting(), 1)
        taken(own, 0, 1)
        iterator = own._iterator
        own.close()
        assert own._iterator is iterator
        assert taken(own, 2)[0][0] == 3.0

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_what_its_workers_draw_is_in_no_state(self, num_workers: int) -> None:
        own, loader = IterableFeed(self.Counting(), 1), self.Counting()
        taken(own, 0, 1, 2)
        loader.num_workers = num_workers
        other = IterableFeed(loader, 1)
        other.restore(own.state() | {"last": "another"}, Clock(step=3))
        if not num_workers:
            with pytest.raises(DataError, match="batch 2 of this pass, the last one seen, is another one now"):
                taken(other, 3)
            return
        with pytest.warns(UserWarning, match="goes on with other rows than it would have had: batch 2 of this pass"):
            assert taken(other, 3)[0][0] == 4.0
        assert "the state of Counting doesn't have what its workers draw" in other.doubt


def test_a_pass_that_is_begun_anew_draws_as_it_did() -> None:
    for num in (1, 2, 5):
        with torch.random.fork_rng():
            whole = taken(IterableFeed(shuffled(), 1, seed=7, generators=DefaultGenerators(CPU)), *range(num + 5))
            own = IterableFeed(shuffled(), 1, seed=7, generators=DefaultGenerators(CPU))
            taken(own, *range(num))
            own.close()
            assert taken(own, *range(num, num + 5)) == whole[num:]


def test_who_can_say_its_place_and_not_take_it_is_read_again() -> None:
    for name in ("state_dict", "load_state_dict"):
        loader: Any = of(1, 2)
        setattr(loader, name, dict)
        own = IterableFeed(loader, 1)
        taken(own, 0)
        assert "loader" not in own.state()
        assert not own.is_positional


def test_what_ended_has_no_first_batch_and_no_last_one() -> None:
    own = IterableFeed(iter([torch.ones(1)]), 1)
    assert taken(own, 0, 1) == [[1], None]
    state = own.state()
    assert (state["passes"], state["batches"], state["first"], state["last"]) == (1, 0, None, None)


def test_a_batch_may_be_like_the_first_one() -> None:
    assert taken(IterableFeed(of(1, 1, 1), 1), 0, 1, 2, 3) == [[1, 1]] * 4
    assert taken(resumed(of(1, 1, 1, 1), of(1, 1, 1, 1), 2), 2, 3) == [[1, 1]] * 2


def test_the_state_that_is_kept_of_a_loader_is_of_this_pass() -> None:
    class Passes:
        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.number += 1
            for self.place in range(4):
                yield torch.full((1, 1), float(self.place))

        def state_dict(self) -> dict[str, int]:
            return {"number": self.number, "place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    own = IterableFeed(Passes(), 1)
    taken(own, 0, 1, 2)
    assert own.state()["loader"] == {"number": 1, "place": 0}
    taken(own, 3, 4, 5, 6)
    assert own.state()["loader"] == {"number": 2, "place": 0}


def test_what_a_step_has_changed_is_seen_before_the_next_batch() -> None:
    batches = [torch.ones(1, 1), torch.ones(1, 1)]
    own = IterableFeed(Loader(lambda _: iter(batches)), 1)
    first = own.whole(Clock())
    assert first is batches[0]
    batches[0].add_(1)
    taken(own, 1)
    with pytest.raises(DataError, match="changed in place"):
        IterableFeed(Loader(lambda _: iter(batches)), 1).whole(Clock())


def test_what_is_read_by_position_is_compared_where_it_goes_on() -> None:
    class Made(Sequence[Tensor]):
        def __init__(self, *numbers: float) -> None:
            self.numbers = numbers

        def __len__(self) -> int:
            return len(self.numbers)

        def __getitem__(self, index: Any) -> Any:
            return torch.full((1, 1), self.numbers[index])

    own = IterableFeed(Made(1, 2, 3), 1)
    taken(own, 0, 1)
    for numbers, is_same in (((1, 2, 3), True), ((9, 2, 3), False), ((1, 9, 3), False)):
        other = IterableFeed(Made(*numbers), 1)
        other.restore(own.state(), Clock(step=2))
        if is_same:
            assert taken(other, 2) == [[3]]
        else:
            with pytest.raises(DataError, match="of the data is another one now"):
                taken(other, 2)


def test_a_run_that_had_not_begun_goes_on_with_the_generators_that_it_had() -> None:
    state = IterableFeed(shuffled(), 1).state()
    other = IterableFeed(shuffled(99), 1)
    other.restore(state, Clock())
    assert taken(other, 0, 1, 2, 3) == taken(IterableFeed(shuffled(), 1), 0, 1, 2, 3)


def test_what_a_loader_draws_as_it_goes_on_follows_what_it_had_drawn() -> None:
    class Drawing:
        def __init__(self, seed: int) -> None:
            self.generator = torch.Generator().manual_seed(seed)

        def __iter__(self) -> Iterator[Tensor]:
            own = float(torch.randint(1000, (), generator=self.generator))
            return iter([torch.tensor([[own + place / 8]]) for place in range(5)])

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {}

    own = IterableFeed(Drawing(1), 1)
    taken(own, 0)
    other = IterableFeed(Drawing(2), 1)
    other.restore(own.state(), Clock(step=1))
    drawn_first = torch.Generator().manual_seed(1)
    expected = [float(torch.randint(1000, (), generator=drawn_first)) for _ in range(2)]
    assert taken(other, 1) == [[expected[1]]]
