"""A loader is read pass by pass, its draws keyed by pass and batch, and goes on where it stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Clock
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.errors import DataError, PlanError
from cosmati.train.feed import IterableFeed, OrderedFeed, in_microbatches
from tests.train.hand_made import rows

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


def of_class(*class_ids: int) -> Batch:
    ids = torch.tensor(class_ids)
    return Batch(ids.float()[:, None], Lineage(torch.arange(len(class_ids)), ids))


@pytest.mark.parametrize("name", ["sampler", "data", "rows"])
def test_shares_and_rows_are_refused(name: str) -> None:
    loader: Any = of(1)
    if name == "sampler":
        loader.sampler = type("Sampler", (), {"num_replicas": 2, "rank": 0})()
    match = "gives each of 2 ranks a share" if name == "sampler" else "gives rows one by one"
    given = {"sampler": loader, "data": Numbers(), "rows": torch.ones(3)}[name]
    with pytest.raises(DataError, match=match):
        IterableFeed(given, 1)


def test_our_shards_come_by_their_source_under_a_policy() -> None:
    loader: Any = of(1)
    loader.dataset = type("StreamingDataset", (), {"__module__": "cosmati.data.streaming"})()
    IterableFeed(loader, 1)
    with pytest.raises(DataError, match="come by StreamingSource"):
        IterableFeed(loader, 1, class_names=["a"])


@pytest.mark.parametrize("given", [[torch.ones(2, 1)], (torch.ones(2, 1), 3), [], [rows(1), torch.ones(2)]])
def test_a_governed_list_says_its_classes_in_its_first_batch(given: Any) -> None:
    if given and isinstance(given[0], Batch):
        assert IterableFeed(given, 1, class_names=["a"]).steps_per_epoch == 2
        return
    with pytest.raises(PlanError, match=rf"A policy needs rows with classes, and {type(given).__name__} has none"):
        IterableFeed(given, 1, class_names=["a"])
    if given:
        IterableFeed(given, 1)


def test_a_governed_loader_is_refused_by_how_it_puts_rows_together_and_not_read() -> None:
    data = Numbers()
    with pytest.raises(PlanError, match="DataLoader has none"):
        IterableFeed(DataLoader(data, batch_size=2), 1, class_names=["a"])
    assert data.num_read == 0
    own: DataLoader[Any] = DataLoader(data, batch_size=2, collate_fn=lambda _: rows(1, 2))
    assert isinstance(IterableFeed(own, 1, class_names=["a"]).whole(Clock()), Batch)
    late = IterableFeed(of(1), 1, class_names=["a"])
    with pytest.raises(PlanError, match="Loader has none"):
        late.whole(Clock())
    ended = IterableFeed(of(), 1, class_names=["a"])
    assert ended.whole(Clock()) is None


def test_a_feed_begins_with_no_pass_ended() -> None:
    own = IterableFeed(of(1), 1)
    assert (own.num_passes, own.has_ended, own.sees_changes, own.doubt, list(own.generators)) == (
        0,
        False,
        True,
        "",
        [],
    )
    assert not own.is_positional
    assert IterableFeed(shuffled(), 1).is_positional
    assert IterableFeed([torch.ones(1)], 1).is_positional


@pytest.mark.parametrize(("error", "is_known"), [(TypeError, False), (NotImplementedError, False), (KeyError, True)])
def test_a_length_may_not_be_known(error: type[Exception], is_known: bool) -> None:
    class Sized(Loader):
        def __len__(self) -> int:
            raise error

    loader = Sized(lambda _: iter([torch.ones(1)]))
    if is_known:
        with pytest.raises(error):
            IterableFeed(loader, 1)
    else:
        assert IterableFeed(loader, 1).steps_per_epoch is None


def drawn(*key: int) -> list[float]:
    """What is drawn by hand after the key."""
    with torch.random.fork_rng():
        DefaultGenerators(CPU).seed(position_key(7, "data", *key))
        return [float(torch.rand(())), float(torch.rand(()))]


def test_draws_are_keyed_by_pass_and_batch_and_the_first_ones_follow_the_start() -> None:
    def make(_: int) -> Iterator[Tensor]:
        start = torch.rand(())
        for _index in range(3):
            yield torch.stack([start, torch.rand(())])[:, None]

    loader = Loader(make)
    with torch.random.fork_rng():
        own = IterableFeed(loader, 1, seed=7, generators=DefaultGenerators(CPU))
        found = taken(own, *range(6))
    expected = []
    for number in (0, 1):
        start, first = drawn(number, 0)
        expected += [[start, first], [start, drawn(number, 1)[0]], [start, drawn(number, 2)[0]]]
    assert found == expected


def test_without_a_seed_it_is_zero() -> None:
    with torch.random.fork_rng():
        own = IterableFeed(Loader(lambda _: iter([torch.rand((1, 1))])), 1, generators=DefaultGenerators(CPU))
        found = taken(own, 0)
        DefaultGenerators(CPU).seed(position_key(0, "data", 0, 0))
        assert found == [[float(torch.rand(()))]]


def test_what_is_read_by_position_draws_by_the_step() -> None:
    class Drawing(Sequence[Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: Any) -> Any:
            return torch.rand((1, 1)) + 10 * index

    with torch.random.fork_rng():
        own = IterableFeed(Drawing(), 1, seed=7, generators=DefaultGenerators(CPU))
        found = taken(own, 0, 3)
    assert found == [[drawn(0)[0]], [pytest.approx(drawn(3)[0] + 10)]]


def test_without_generators_nothing_is_seeded() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        taken(IterableFeed(of(1, 2), 1), 0, 1, 2)
        assert torch.equal(torch.random.get_rng_state(), before)


class Told:
    """Ranks that note what they compare."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def refuse_unlike_end(self, step: int, num_passes: int, data: Any) -> None:
        self.seen.append((step, num_passes, data is None))


def test_ranks_compare_how_passes_end_where_batches_come_one_by_one() -> None:
    ranks: Any = Told()
    own = IterableFeed(iter([torch.ones(1, 1)]), 1, ranks=ranks)
    taken(own, 4, 5)
    assert ranks.seen == [(4, 0, False), (5, 1, True)]
    taken(IterableFeed([torch.ones(1, 1)], 1, ranks=ranks), 0)
    assert len(ranks.seen) == 2


def test_what_has_ended_isnt_asked_again() -> None:
    loader = of()
    own = IterableFeed(loader, 1)
    assert taken(own, 0, 0, 1) == [None] * 3
    assert (own.has_ended, own.num_passes, loader.started) == (True, 1, 2)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="The Loader gave None for a batch"):
        taken(IterableFeed(Loader(lambda _: iter([None])), 1), 0)


def test_a_step_that_failed_is_given_its_batch_once_more() -> None:
    loader = of(1, 2, 3)
    own = IterableFeed(loader, 1)
    first = own.whole(Clock(step=0))
    assert taken(own, 0) == [[2, 2]], "nobody has closed it"
    own.close()
    assert taken(own, 0) == [[2, 2]]
    assert taken(own, 1) == [[3, 3]]
    own.close()
    assert taken(own, 2) == [[1, 1]], "a pass later"
    assert taken(own, 2) == [[2, 2]], "it isn't closed any more"
    assert first is not None
    own.close()
    given = own._given_last[1]
    assert isinstance(given, Tensor)
    given.add_(1)
    with pytest.raises(DataError, match="Step 2 has failed, and can't be taken anew"):
        own.whole(Clock(step=2))


def test_who_closes_begins_a_pass_anew_and_skips_what_was_seen() -> None:
    loader = of(1, 2, 3)
    own = IterableFeed(loader, 1)
    taken(own, 0, 1)
    own.close()
    assert taken(own, 2) == [[3, 3]]
    assert loader.started == 2
    once = IterableFeed(iter([torch.ones(1), torch.ones(1) + 1]), 1)
    taken(once, 0)
    once.close()
    assert taken(once, 1) == [[2]], "an iterator can't be begun anew, and stands where it was"


def test_closing_sees_what_the_last_step_has_changed() -> None:
    one = torch.ones(2, 1)
    for data in ([torch.ones(2, 1)], Loader(lambda _: iter([one]))):
        own = IterableFeed(data, 1)
        batch = own.whole(Clock())
        assert isinstance(batch, Tensor)
        batch.add_(1)
        own.close()
        with pytest.raises(DataError, match="changed in place"):
            IterableFeed([batch], 1).whole(Clock())


def test_where_a_pass_ended_the_next_one_begins() -> None:
    own = IterableFeed(of(1, 2), 1)
    taken(own, 0, 1)
    assert own.state()["batches"] == 2
    taken(own, 2)
    state = own.state()
    assert (state["passes"], state["batches"]) == (1, 1)
    assert state["first"] == state["last"] is not None


class Keyed:
    """An order of rows of two classes at once."""

    steps_per_epoch = 4
    rows_per_step = 4
    told = True

    def microbatch(self, step: int, index: int) -> Any:
        return of_class(0, 1, 0, 1) if self.told else Batch(torch.ones(4, 1), Lineage.of_rows(4, 0))

    def class_id(self, step: int, index: int) -> int | None:
        return None


def test_a_step_that_comes_whole_is_cut_by_class() -> None:
    whole = OrderedFeed(Keyed(), 2, is_whole=True)
    found = [batch.lineage.class_ids.tolist() for batch in whole.again(1)]
    assert found == [[0, 0], [1, 1]]
    assert isinstance(whole.whole(Clock()), Batch)
    untold = Keyed()
    untold.told = False
    assert isinstance(OrderedFeed(untold, 2).whole(Clock()), Batch)
    with pytest.raises(PlanError, match="A policy needs rows with classes, and Keyed has none"):
        OrderedFeed(untold, 2, is_whole=True).whole(Clock())
    assert (whole.has_ended, whole.sees_changes, whole.is_positional) == (False, False, True)
    assert (list(whole.generators), whole.doubt, whole.num_passes) == ([], "", 0)
    assert in_microbatches(whole) is None
    cut = OrderedFeed(Keyed(), 2)
    assert in_microbatches(cut) is cut
    assert in_microbatches(None) is None
    assert in_microbatches(IterableFeed([torch.ones(1)], 1)) is None
    assert cut.decoder is None


def test_another_order_of_the_rows_comes_in_as_many_microbatches() -> None:
    first, second = Keyed(), Keyed()
    own = OrderedFeed(first, 3).reordered(lambda order: second if order is first else order)
    assert own.class_ids(Clock()) == [None] * 3
    assert own._order is second
    assert not own.is_whole


def test_a_lists_early_steps_are_told_once_more_as_they_were_cut() -> None:
    data = [of_class(0, 1, 0, 1), of_class(1, 1, 1, 1)]
    own = IterableFeed(data, 2, class_names=["a", "b"])
    assert [one.lineage.class_ids.tolist() for one in own.again(0)] == [[0, 0], [1, 1]]
    assert [one.lineage.class_ids.tolist() for one in own.again(1)] == [[1, 1], [1, 1]]
    assert list(own.again(2)) == []
    plain = IterableFeed(data, 2)
    assert [one.lineage.class_ids.tolist() for one in plain.again(0)] == [[0, 1], [0, 1]]


def test_a_lists_own_names_of_classes_are_those_of_the_policy_where_there_is_one() -> None:
    batch = of_class(0, 0)
    named = Batch(batch.data, batch.lineage.by_names(("b", "a")))
    (governed,) = IterableFeed([named], 1, class_names=["a", "b"]).again(0)
    assert governed.lineage.class_ids.tolist() == [1, 1]
    (plain,) = IterableFeed([named], 1).again(0)
    assert plain.lineage.class_ids.tolist() == [0, 0]
