"""PyTorch's loaders go on where they stopped: the same rows in the same order, and the same draws."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cosmati.core.clock import Clock
from cosmati.core.plain import decode, encode
from cosmati.core.rng import DefaultGenerators
from cosmati.data.foreign import has_known_order
from cosmati.data.loader import StreamingLoader
from cosmati.errors import DataError
from cosmati.train.feed import IterableFeed
from tests.train.ordinary.loaders import (
    NUM_ROWS,
    Rows,
    Seen,
    Stream,
    draw_numpy,
    draw_python,
    draw_torch,
    interrupted,
    trainer,
    whole,
)

pytestmark = pytest.mark.long


def _loader(dataset: Dataset[Any] | None = None, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Rows() if dataset is None else dataset, **{"batch_size": 4} | options)


def _seeded(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(11), **options)


def _weighted() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=4, sampler=WeightedRandomSampler([1.0] * NUM_ROWS, NUM_ROWS))


def _subset() -> DataLoader[Any]:
    sampler = SubsetRandomSampler(range(NUM_ROWS), generator=torch.Generator().manual_seed(3))
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


KNOWN = {
    "plain": _loader(),
    "shuffled": _loader(shuffle=True),
    "generator": _seeded,
    "workers": _loader(shuffle=True, num_workers=2),
    "weighted": _weighted,
    "subset": _subset,
    "replacement": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), replacement=True)),
    "batched items": lambda: DataLoader([torch.full((4, 2), float(i)) for i in range(6)], batch_size=None),
    "torch draws": _loader(Rows(draw_torch), shuffle=True),
    "random draws": _loader(Rows(draw_python), shuffle=True),
    "numpy draws": _loader(Rows(draw_numpy), shuffle=True),
    "draws in workers": _loader(Rows(draw_python), shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_loader_goes_on_where_it_stopped(name: str, tmp_path: Path) -> None:
    """Six batches a pass, eight steps: killed in the first pass, at its border and in the second."""
    make = KNOWN[name]
    assert interrupted(make, tmp_path / "run", 3, 6, 7) == whole(make)
    run = trainer(make(), Seen(), tmp_path / "run")
    assert run.plan.holds("resume")
    with run:
        assert (run.clock.step, run.clock.epoch) == (8, 1)


def test_all_rows_of_a_pass_are_seen_and_none_twice(tmp_path: Path) -> None:
    """The case that was reported: rows seen again, others never."""
    ids = [[int(row[0]) for row in step] for step in interrupted(_loader(), tmp_path / "run", 3, budget="1ep")]
    assert list(itertools.chain(*ids)) == list(range(NUM_ROWS))


def test_an_order_follows_the_runs_seed_and_the_pass_alone() -> None:
    """Whatever the process has drawn before: so all ranks have one order."""
    orders = []
    for state in (1, 2):
        seen = Seen()
        run = trainer(_loader(shuffle=True)(), seen, budget="2ep")
        torch.manual_seed(state)
        run.fit()
        orders.append(seen.ids)
    assert orders[0] == orders[1]
    passes = [list(itertools.chain(*orders[0][:6])), list(itertools.chain(*orders[0][6:]))]
    assert [sorted(one) for one in passes] == [list(range(NUM_ROWS))] * 2
    assert passes[0] != passes[1]
    other = Seen()
    trainer(_loader(shuffle=True)(), other, seed=6).fit()
    assert other.ids[:6] != orders[0][:6]
    workers = whole(_loader(shuffle=True, num_workers=2), budget="2ep")
    assert [[int(row[0]) for row in step] for step in workers] == orders[0]


def test_a_feed_that_was_closed_goes_on() -> None:
    """As a trainer whose `fit` is called again."""
    loader = _seeded()
    expected = [batch.tolist() for _ in range(2) for batch in loader]
    feed = IterableFeed(_seeded(), 1)
    found = []
    for step in range(12):
        found.append(feed.whole(Clock(step=step)).tolist())
        if step in (2, 5, 6):
            feed.close()
    assert found == expected
    once = IterableFeed(iter(_Again()), 1)
    once.whole(Clock())
    once.close()
    # The step wasn't committed, and then it was.
    assert float(once.whole(Clock())[0, 0]) == 0.0
    assert float(once.whole(Clock(step=1))[0, 0]) == 1.0


def test_a_loaders_own_generator_gives_what_it_gives_in_a_plain_loop() -> None:
    loader = _seeded()
    expected = [batch.tolist() for _ in range(2) for batch in loader][:8]
    assert whole(_seeded) == expected


@pytest.mark.parametrize("draw", [draw_torch, draw_python, draw_numpy])
def test_draws_differ_from_row_to_row_and_from_pass_to_pass(draw: Callable[[], float]) -> None:
    noise = [row[1] for step in whole(_loader(Rows(draw)), budget="2ep") for row in step]
    assert len(set(noise)) == 2 * NUM_ROWS


class _EveryOther(Sampler[int]):
    """An order that the loop doesn't know."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, NUM_ROWS, 2), *range(1, NUM_ROWS, 2)])

    def __len__(self) -> int:
        return NUM_ROWS


class _Again:
    """Iterated over anew, of no known length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4, 2), float(index)) for index in range(6))


UNKNOWN = {
    "stream": _loader(Stream()),
    "stream in workers": _loader(Stream(), num_workers=1),
    "sampler": _loader(sampler=_EveryOther()),
    "iterable": _Again,
    "out of order": _loader(num_workers=1, in_order=False),
    "workers that live on": _loader(shuffle=True, num_workers=1, persistent_workers=True),
    "likewise, a generator": lambda: _seeded(num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_order_that_is_not_known_is_skipped_forward_and_not_promised(name: str, tmp_path: Path) -> None:
    make = UNKNOWN[name]
    assert interrupted(make, tmp_path / "run", 3, 7) == whole(make)
    assert not trainer(make(), Seen()).plan.holds("resume")


def test_draws_of_workers_that_live_on_are_gone_with_them(tmp_path: Path) -> None:
    """They begin with the first pass alone: in a later one new workers draw what those of a first pass would."""
    make = _loader(Rows(draw_python), num_workers=1, persistent_workers=True)
    assert interrupted(make, tmp_path / "first", 3, budget="1ep") == whole(make, budget="1ep")
    with pytest.raises(DataError, match=r"carry their draws from pass to pass \(persistent_workers=True\).*Leave that"):
        interrupted(make, tmp_path / "second", 7)
    begun_anew = _loader(Rows(draw_python), num_workers=1)
    assert interrupted(begun_anew, tmp_path / "anew", 7) == whole(begun_anew)


def test_epochs_of_data_without_a_length_are_counted_on(tmp_path: Path) -> None:
    """Killed in the second of two passes: the clock's epochs go on from the first."""
    make = _loader(Stream())
    steps = interrupted(make, tmp_path / "run", 8, budget="2ep")
    assert steps == whole(make, budget="2ep")
    assert len(steps) == 12


class _Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class _Pairs(BatchSampler):
    """Batches of an order of their own."""


@pytest.mark.parametrize(
    ("loader", "is_known"),
    [
        (_loader(num_workers=1)(), True),
        (_loader(batch_size=None)(), True),
        (_loader(num_workers=1, persistent_workers=True)(), False),
        (DataLoader(Rows(), batch_sampler=_Pairs(RandomSampler(Rows()), 2, drop_last=False)), False),
        (DataLoader(Rows(), batch_size=None, sampler=_EveryOther()), False),
        (_Own(Rows(), batch_size=4), False),
        ([torch.zeros(4, 2)], False),
    ],
)
def test_an_order_is_known_where_every_part_of_the_loader_is(loader: Any, is_known: bool) -> None:
    """Workers that live on carry their draws from one pass to the next."""
    assert has_known_order(loader) == is_known


class _Wandering:
    """Another order each time it's made."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4, 2), float(index + 100 * self.made)) for index in range(6))


def test_an_order_that_has_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"its first batch isn't the one .*DataLoader\(\.\.\., generator=.*StatefulData"
    ):
        interrupted(_Wandering, tmp_path / "run", 3)


def test_data_that_are_shorter_than_before_are_refused(tmp_path: Path) -> None:
    lengths = iter([6, 2])
    with pytest.raises(DataError, match="ended after 2 batches, and 3 of this pass were seen"):
        interrupted(lambda: _Long(next(lengths)), tmp_path / "run", 3)


class _Long:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4, 2), float(index)) for index in range(self.length))


def test_a_generator_can_be_begun_and_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"generator can't go on .*iterated over only once.*use a Source"):
        interrupted(lambda: iter(_Again()), tmp_path / "run", 3)
    seen = Seen()
    run = trainer(iter(_Again()), seen, tmp_path / "other", budget="6ba")
    assert run.feed is not None
    run.feed.restore(decode(*encode(run.feed.state())), Clock())
    assert run.fit().clock.step == 6
    assert seen.ids == [[index] * 4 for index in range(6)]


def test_a_feed_knows_that_its_data_have_ended() -> None:
    feed = IterableFeed(iter(_Again()), 1)
    assert [feed.whole(Clock()) is None for _ in range(8)] == [False] * 6 + [True] * 2
    assert (feed.has_ended, feed.num_passes) == (True, 1)
    again = IterableFeed(_Again(), 1)
    assert [again.whole(Clock()) is None for _ in range(13)] == [False] * 13
    assert (again.has_ended, again.num_passes) == (False, 2)


class _Resets:
    """Its own iterator, begun anew by each `iter`, as older code has it."""

    def __iter__(self) -> _Resets:
        self.place = 0
        return self

    def __next__(self) -> Tensor:
        if self.place == 3:
            raise StopIteration
        self.place += 1
        return torch.full((4, 2), float(self.place))


def test_an_iterator_that_begins_anew_has_several_passes() -> None:
    seen = Seen()
    assert trainer(_Resets(), seen, budget="2ep").fit().clock.step == 6
    assert seen.ids == [[1] * 4, [2] * 4, [3] * 4] * 2


class _Stateful:
    """As torchdata's loader: its state holds tensors, bytes, tuples and numbers by number."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.random = random.Random(4)
        self.numpy = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            drawn = float(torch.rand((), generator=self.generator)), self.random.random(), float(self.numpy.random())
            yield torch.tensor([drawn[:2], drawn[1:]])

    def state_dict(self) -> dict[Any, Any]:
        snapshots = {0: self.random.getstate(), 1: self.numpy.bit_generator.state}
        return {"main": self.generator.get_state(), "workers": snapshots, "rng": bytes(range(5)), 3: (None, [1.5])}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state["rng"] == bytes(range(5))
        assert state[3] == (None, [1.5])
        self.generator.set_state(state["main"])
        self.random.setstate(state["workers"][0])
        self.numpy.bit_generator.state = state["workers"][1]


def test_a_loaders_own_state_of_any_plain_kind_is_kept(tmp_path: Path) -> None:
    assert interrupted(_Stateful, tmp_path / "run", 2, 5) == whole(_Stateful)
    assert trainer(_Stateful(), Seen()).plan.holds("resume")


# ---------------------------------------------------------------------------------------------- what is no such loader


@pytest.mark.parametrize(
    ("data", "mend"),
    [
        (TensorDataset(torch.zeros(8, 2)), r"TensorDataset .*DataLoader\(data, batch_size=32, shuffle=True\)"),
        (StackDataset(torch.zeros(8, 2)), "StackDataset"),
        (Rows(), r"Rows gives rows .*batch_size=None where each item is already a batch"),
        (Stream(), r"Stream .*DataLoader\(data, batch_size=32\), or DataLoader\(data, batch_size=None\)"),
        (torch.zeros(8, 2), r"Tensor .*InMemory\(rows, rows_per_step=32\)"),
        (np.zeros((8, 2)), "ndarray"),
        ({"x": torch.zeros(8, 2)}, "dict"),
        ("rows.csv", "str .*a DataLoader or a Source"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_where_batches_are_meant_are_refused(data: Any, mend: str) -> None:
    with pytest.raises(DataError, match=mend):
        trainer(data, Seen())


def test_hugging_face_data_sets_need_a_loader_and_train_with_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {i}", "x": [float(i), 0.0]} for i in range(NUM_ROWS)]
    table = datasets.Dataset.from_list(rows).with_format("torch")
    stream = table.to_iterable_dataset()
    for data in (table, stream):
        with pytest.raises(DataError, match=rf"{type(data).__name__} gives rows .*DataLoader\(data, batch_size=32"):
            trainer(data, Seen())

    class Named(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[str] = []

        def __call__(self, model: Any, data: Any) -> Tensor:
            self.texts += data["text"]
            assert len(data["text"]) == len(data["x"])
            return super().__call__(model, data["x"])

    for data, microbatches in itertools.product((table, stream), (1, 2)):
        loss = Named()
        trainer(DataLoader(data, batch_size=4), loss, budget="1ep", num_microbatches=microbatches).fit()
        assert list(itertools.chain(*loss.ids)) == list(range(NUM_ROWS))
        assert loss.texts == [row["text"] for row in rows]


def test_none_for_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"gave None for a batch\. Leave the batch out"):
        trainer(iter([torch.zeros(4, 2), None]), Seen()).fit()


class _Shard:
    """As accelerate's: a sampler of this process's batches."""

    num_processes, process_index = 2, 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


def _sharded() -> list[Any]:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    distributed = DistributedSampler(Rows(), num_replicas=2, rank=0)
    return [
        DataLoader(Rows(), batch_size=4, sampler=distributed),
        DataLoader(Rows(), batch_sampler=BatchSampler(distributed, 4, drop_last=True)),
        DataLoader(Rows(), batch_sampler=_Shard()),
        DataLoader(split_dataset_by_node(rows, rank=0, world_size=2), batch_size=4),
        SimpleNamespace(state=SimpleNamespace(num_processes=2, process_index=0), __iter__=None),
        StreamingLoader(_Sized(), 4, rank=1, world=2),
    ]


class _Sized(Rows):
    digest, seed = "", 0


@pytest.mark.parametrize("index", range(6))
def test_a_loader_of_this_ranks_share_is_refused(index: int) -> None:
    with pytest.raises(
        DataError, match=r"each of 2 ranks a share .*would be left out\. Give every rank the whole data"
    ):
        trainer(_sharded()[index], Seen())


def test_a_share_of_one_is_the_whole() -> None:
    loader = DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=False))
    ids = [[int(row[0]) for row in step] for step in whole(lambda: loader, budget="1ep")]
    assert list(itertools.chain(*ids)) == list(range(NUM_ROWS))


def test_the_generators_are_left_alone_where_there_are_none() -> None:
    """A feed by itself draws nothing and seeds nothing."""
    state = torch.get_rng_state()
    IterableFeed(_Again(), 1).whole(Clock())
    assert torch.equal(torch.get_rng_state(), state)
    with DefaultGenerators(torch.device("cpu")).restored():
        IterableFeed(_Again(), 1, generators=DefaultGenerators(torch.device("cpu"))).whole(Clock())
        assert not torch.equal(torch.get_rng_state(), state)
