"""A data set as a sequence, subclasses that override `__getitem__`, and rows chosen of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cosmati.core.batch import TOMBSTONE
from cosmati.data.loader import StreamingLoader
from cosmati.data.rows import RowBatch
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.worker import ending_in_cycles
from cosmati.errors import DataError
from tests.data.shard_files import write_data_set, write_source

pytestmark = pytest.mark.long

CLASSES = {"open/permissive": [7, 0, 9, 5], "open/psf": [3], "unknown": [11, 2]}
NUM_ROWS = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_set(tmp_path_factory.mktemp("data"), CLASSES)


def opened(folder: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(folder, window_rows=10, seed=3, **options)


def ids(rows: Any) -> list[int]:
    return [row["row_id"] for row in rows]


def test_a_for_loop_ends_after_one_epoch(folder: Path) -> None:
    data = opened(folder)
    found = ids(itertools.islice(data, 200))
    assert Counter(found) == Counter(range(NUM_ROWS))
    assert ids(data) == found
    assert found != sorted(found)
    assert ids(reversed(data)) == found[::-1]  # type: ignore[call-overload]


def test_places_are_a_sequences(folder: Path) -> None:
    data = opened(folder)
    rows = ids(data)
    assert data[-1]["row_id"] == rows[-1]
    assert data[-NUM_ROWS]["row_id"] == rows[0] == data[np.int64(0)]["row_id"] == data[torch.tensor(0)]["row_id"]
    for at in (slice(3, 9), slice(None, None, -5), slice(-4, None), slice(30, 99), slice(5, 5)):
        assert ids(data[at]) == rows[at]
    assert ids(data[[4, -1, 4]]) == [rows[4], rows[-1], rows[4]] == ids(data[np.asarray([4, -1, 4])])
    assert [ids(part) for part in data[[[1], [2, 3]]]] == [rows[1:2], rows[2:4]]
    assert data[[]] == []
    for wrong in (NUM_ROWS, -NUM_ROWS - 1, [0, NUM_ROWS], np.asarray([99])):
        with pytest.raises(IndexError, match=f"an epoch has {NUM_ROWS}"):
            data[wrong]
    for wrong in ("a", 1.5, None):
        with pytest.raises(DataError, match="is no row"):
            data[wrong]
    with pytest.raises(IndexError):
        next(iter(DataLoader(data, sampler=[NUM_ROWS])))
    assert data[0] != data[1]


class Doubled(StreamingDataset):
    """What somebody who comes from elsewhere writes."""

    def __getitem__(self, idx: Any) -> Any:
        row = super().__getitem__(idx)
        return {"twice": 2 * row["number"], "name": row["name"], "tokens": torch.from_numpy(row["tokens"]) + 1}


class Pairs(StreamingDataset):
    """As torchvision has it."""

    def __getitem__(self, idx: Any) -> Any:
        row = super().__getitem__(idx)
        return torch.from_numpy(row["tokens"]).float(), int(idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_is_honoured_on_every_road(folder: Path, workers: int) -> None:
    data = Doubled(folder, seed=3, window_rows=10)
    expected = [2 * n for n in ids(opened(folder))]
    assert [row["twice"] for row in data] == expected
    assert data[5]["twice"] == expected[5]
    by_torch = [n for batch in DataLoader(data, 8, num_workers=workers) for n in batch["twice"].tolist()]
    assert by_torch == expected
    by_loader = list(StreamingLoader(data, 8, num_workers=workers))
    assert [n for batch in by_loader for n in batch.data[0].tolist()] == expected
    assert [2 * n for batch in by_loader for n in batch.lineage.row_ids.tolist()] == expected
    assert by_loader[0].data[1].shape == (8, 6)
    order = StreamingSource(data, 8, tail="pad", num_workers=workers).order(seed=1, num_microbatches=2, route_pure=True)
    seen: Counter[int] = Counter()
    for step in range(order.steps_per_epoch):
        order.expect(step, (0, 1))
        for index in (0, 1):
            batch = order.microbatch(step, index)
            present = batch.lineage.row_ids != TOMBSTONE
            assert torch.equal(batch.data[0][present], 2 * batch.lineage.row_ids[present])
            assert not batch.data[0][~present].any()
            seen.update(batch.lineage.row_ids[present].tolist())
    assert seen == Counter(range(NUM_ROWS))


def test_a_subclass_goes_through_all_epochs_and_its_index_is_the_rows_id(folder: Path) -> None:
    loader = StreamingLoader(Pairs(folder, seed=3), 5)
    seen: Counter[int] = Counter()
    for _ in range(3):
        for batch in loader:
            tokens, index = batch.data
            assert torch.equal(index, batch.lineage.row_ids)
            assert torch.equal(tokens[:, 0].long(), index)
            seen.update(index.tolist())
    assert seen == Counter(dict.fromkeys(range(NUM_ROWS), 3))
    assert [index for _, index in Pairs(folder, seed=3)] == ids(StreamingDataset(folder, seed=3))
    with pytest.raises(DataError, match="are for rows that are dictionaries"):
        next(iter(StreamingLoader(Pairs(folder, columns=("tokens",)), 5)))


def test_a_subclass_has_columns_transforms_and_bad_rows(folder: Path) -> None:
    class Bad(Doubled):
        def __getitem__(self, idx: Any) -> Any:
            if idx == 4:
                raise ValueError("four")
            return super().__getitem__(idx)

    batch = next(iter(StreamingLoader(Doubled(folder, columns=("tokens", "twice")), 5)))
    assert [one.shape for one in batch.data] == [(5, 6), (5,)]
    names = next(iter(StreamingLoader(Doubled(folder, transform=lambda rows: list(rows.columns["name"])), 5)))
    assert all(name.startswith("row ") for name in names.data)
    with pytest.raises(DataError, match="row 4 is bad: ValueError: four"):
        list(StreamingLoader(Bad(folder), 5))
    data = Bad(folder, on_bad_row="skip")
    with pytest.warns(UserWarning, match="four"):
        found = [n for batch in StreamingLoader(data, 5) for n in batch.lineage.row_ids.tolist()]
    assert sorted(found) == [-1, *(n for n in range(NUM_ROWS) if n != 4)]


@pytest.mark.parametrize("name", ["__iter__", "get_item", "__getitems__"])
def test_an_override_that_no_loader_calls_is_refused(folder: Path, name: str) -> None:
    kind = type("Mine", (StreamingDataset,), {name: lambda _self, *_: iter(())})
    with pytest.raises(DataError, match=f"Mine overrides {name}, which loaders don't call"):
        kind(folder)


def all_ids(data: StreamingDataset, size: int = 8, epochs: int = 1) -> list[int]:
    loader = StreamingLoader(data, size)
    return [n for _ in range(epochs) for batch in loader for n in batch.lineage.row_ids.tolist()]


def odd(rows: RowBatch) -> Any:
    return rows.columns["number"] % 2 == 1  # type: ignore[operator]


def test_a_filter_and_a_subset_are_visited_exactly_once(folder: Path) -> None:
    data = opened(folder, columns=("number",)).filter(odd)
    wanted = list(range(1, NUM_ROWS, 2))
    assert len(data) == len(wanted)
    assert sorted(all_ids(data)) == wanted
    assert all_ids(data) != wanted
    assert Counter(all_ids(data, epochs=3)) == Counter(dict.fromkeys(wanted, 3))
    both = data.subset(range(10, 30))
    assert (
        sorted(ids(both))
        == [n for n in wanted if 10 <= n < 30]
        == sorted(ids(opened(folder).subset(range(10, 30)).filter(odd)))
    )
    assert sorted(ids(opened(folder).subset(np.arange(NUM_ROWS) < 4))) == [0, 1, 2, 3]
    batch = next(iter(StreamingLoader(data, 4)))
    assert torch.equal(batch.data, batch.lineage.row_ids)
    # Ranks, workers and a resume in the midst of it.
    state = None
    found: list[int] = []
    for world in (1, 2, 3):
        share = []
        for rank in range(world):
            loader = StreamingLoader(data, 5, rank=rank, world=world, num_workers=rank % 2)
            if state is not None:
                loader.load_state_dict(state)
            batch = next(iter(loader))
            share += [n for n in batch.lineage.row_ids.tolist() if n != TOMBSTONE]
            after = loader.state_dict()
        state, found = after, found + share
    assert len(set(found)) == len(found) == 15
    order = StreamingSource(data, 8, tail="pad").order(seed=1, num_microbatches=2, route_pure=True)
    seen = [
        n
        for step in range(order.steps_per_epoch)
        for index in (0, 1)
        for n in order.microbatch(step, index).lineage.row_ids.tolist()
        if n != TOMBSTONE
    ]
    assert sorted(seen) == wanted


def test_what_is_visited_is_part_of_the_identity(folder: Path) -> None:
    plain = opened(folder)
    kinds = [plain, plain.filter(odd), plain.subset([1, 2]), plain.choose({"open/psf": 1}), plain.epochs_of(9)]
    assert len({data.digest for data in kinds}) == len(kinds)
    assert plain.filter(odd).digest == plain.subset(range(1, NUM_ROWS, 2)).digest
    assert plain.digest == opened(folder).digest
    state = StreamingLoader(plain.filter(odd), 4).state_dict()
    StreamingLoader(plain.subset(range(1, NUM_ROWS, 2)), 4).load_state_dict(state)
    for other, named in (
        (plain.filter(lambda rows: ~odd(rows)), "filter or subset"),
        (plain, "filter or subset"),
        (plain.filter(odd).epochs_of(5), "repeats, choose or epochs_of"),
        (opened(folder, shuffle=False).filter(odd), "shuffle, window_rows or curriculum"),
    ):
        with pytest.raises(DataError, match=f"What differs: {named}\\."):
            StreamingLoader(other, 4).load_state_dict(state)
    assert ids(pickle.loads(pickle.dumps(plain.filter(odd)))) == ids(plain.filter(odd))


def test_rows_chosen_and_epochs_of_a_size_are_exact(folder: Path) -> None:
    data = opened(folder).choose({"open/psf": 2, "unknown": 26})
    assert len(data) == 21 + 2 + 26
    seen = Counter(all_ids(data, epochs=3))
    assert {seen[n] for n in range(21)} == {3}
    assert {seen[n] for n in (21, 22, 23)} == {2}
    assert {seen[n] for n in range(24, NUM_ROWS)} == {6}
    sized = opened(folder).epochs_of(10)
    assert len(sized) == 10
    assert len(StreamingLoader(sized, 4)) == 3
    assert Counter(all_ids(sized, epochs=37)) == Counter(dict.fromkeys(range(NUM_ROWS), 10))
    assert len(opened(folder).epochs_of(100).choose({"unknown": 13})) == 100
    assert len(opened(folder).choose({"unknown": 13}).filter(odd)) == 11 + 1 + 13


def test_what_cant_be_chosen_says_so(folder: Path) -> None:
    data = opened(folder, repeats={"open/psf": 2})
    for wrong, what in (
        (lambda: data.choose({"open/psf": 2}), "Give one of them"),
        (lambda: data.choose({"open/nothing": 2}), "names open/nothing, and the data have"),
        (lambda: data.choose({"unknown": -1}), "can't be had"),
        (lambda: data.epochs_of(0), "has no end"),
        (lambda: data.subset([NUM_ROWS]), "the data have 0 to 36"),
        (lambda: data.subset([-1]), "the data have 0 to 36"),
        (lambda: data.subset([1, 1]), "twice"),
        (lambda: data.subset([0.5]), "list of row ids"),
        (lambda: data.subset([]), "nothing to visit"),
        (lambda: data.filter(lambda _: True), "one boolean for each"),
        (lambda: data.filter(lambda rows: rows.columns["colour"]), "'colour'"),
        (lambda: opened(folder, repeats={"unknown": float("nan")}), "no number of visits"),
    ):
        with pytest.raises((DataError, KeyError), match=what):
            wrong()


@pytest.mark.parametrize("tail", ["keep", "carry", "drop"])
def test_grown_data_finish_their_epoch_and_then_have_all_rows(tmp_path: Path, tail: Any) -> None:
    source = write_source(tmp_path, [7, 0, 9])
    loader = StreamingLoader(StreamingDataset(source, seed=3, window_rows=5), 4, tail=tail)
    found = []
    for batch in itertools.islice(loader, 2):
        found += batch.lineage.row_ids.tolist()
    state = loader.state_dict()
    write_source(tmp_path, [7, 0, 9, 6, 2])
    grown = StreamingDataset(source, seed=3, window_rows=5)
    with pytest.raises(DataError, match=r"What differs: data or classes\. If rows were appended"):
        StreamingLoader(grown, 4).load_state_dict(state)
    loader = StreamingLoader(grown, 4, tail=tail, num_workers=1)
    loader.load_state_dict(state, grown=True)
    found += next(iter(loader)).lineage.row_ids.tolist()
    assert sorted(found) == sorted(set(found))
    midst = loader.state_dict()
    with pytest.raises(DataError, match="grown=True"):
        StreamingLoader(grown, 4).load_state_dict(midst)
    # Grown once more before that epoch is over.
    write_source(tmp_path, [7, 0, 9, 6, 2, 1])
    grown = StreamingDataset(source, seed=3, window_rows=5)
    loader = StreamingLoader(grown, 4, tail=tail)
    loader.load_state_dict(midst, grown=True)
    while len(found) < 16:
        found += next(iter(loader)).lineage.row_ids.tolist()
    assert Counter(found[:16]) == Counter(range(16))
    rest = found[16:]
    while len(rest) < 25 - 25 % 4 * (tail == "drop"):
        rest += next(iter(loader)).lineage.row_ids.tolist()
    epoch = rest[:25]
    assert len(set(epoch)) == len(epoch)
    assert set(epoch) <= set(range(25))
    state = loader.state_dict()
    assert "grown" not in state
    StreamingLoader(grown, 4).load_state_dict(state)


def test_the_rest_of_a_grown_epoch_is_what_it_would_have_been(tmp_path: Path) -> None:
    source = write_data_set(tmp_path, {"a": [7, 3], "b": [5, 5]})
    options: dict[str, Any] = {"seed": 3, "window_rows": 6, "repeats": {"b": 2}}
    loader = StreamingLoader(StreamingDataset(source, **options), 4)
    first = [batch.data[0].tolist() for batch in itertools.islice(loader, 3)]
    state = loader.state_dict()
    expected = [batch.data[0].tolist() for batch in loader]
    write_source(source / "b", [5, 5, 4], class_path="b", first=10)
    index = (source / "b" / "index.json").read_bytes()
    text = (source / "sources.json").read_text()
    content = json.loads(text)
    content["sources"][1]["index_sha256"] = hashlib.sha256(index).hexdigest()
    (source / "sources.json").write_text(json.dumps(content))
    grown = StreamingLoader(StreamingDataset(source, **options), 4)
    grown.load_state_dict(state, grown=True)
    assert [batch.data[0].tolist() for batch in grown] == expected
    assert first != expected
    assert Counter(n for batch in grown for n in batch.data[0].tolist()) == Counter(
        [*range(10), *range(10, 24), *range(10, 24)]
    )


def test_data_that_changed_otherwise_havent_grown(tmp_path: Path) -> None:
    source = write_source(tmp_path, [7, 9])

    def grown(**options: Any) -> None:
        StreamingLoader(StreamingDataset(source, **options), 4).load_state_dict(state, grown=True)

    state = StreamingLoader(StreamingDataset(source), 4).state_dict()
    write_source(tmp_path, [7, 9, 2])
    grown()
    with pytest.raises(DataError, match="another seed"):
        grown(seed=1)
    with pytest.raises(DataError, match="shuffle, window_rows or curriculum differ"):
        grown(shuffle=False)
    with pytest.raises(DataError, match="repeats, choose or epochs_of differ"):
        grown(repeats={"unknown": 2})
    write_source(tmp_path, [7, 8, 2])
    with pytest.raises(DataError, match="its first 2 shards"):
        grown()
    write_source(tmp_path, [7])
    with pytest.raises(DataError, match="its first 2 shards"):
        grown()
    for wrong in ({}, {"epoch": 1}, None):
        with pytest.raises(DataError, match="is no state of a StreamingLoader"):
            StreamingLoader(StreamingDataset(source), 4).load_state_dict(wrong)  # type: ignore[arg-type]


class AsItIs(StreamingDataset):
    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at)


@pytest.mark.parametrize("columns", [None, ("x", "row_id")])
def test_columns_of_the_names_row_id_and_class_id_are_the_same_in_a_subclass(
    tmp_path: Path, columns: tuple[str, ...] | None
) -> None:
    with ShardWriter(tmp_path, dict.fromkeys(("class_id", "row_id", "x"), "int"), class_path="a/b", source="n") as out:
        for n in range(8):
            out.write({"class_id": 7, "row_id": 100 + n, "x": n})
    found = [
        [[column.tolist() for column in batch.data] for batch in StreamingLoader(kind(tmp_path, columns=columns), 3)]
        for kind in (StreamingDataset, AsItIs)
    ]
    assert found[0] == found[1]
    assert {len(batch) for batch in found[1]} == {len(columns or "abc")}
    rows = AsItIs(tmp_path, transform=lambda rows: rows.tensor("row_id") - rows.tensor("x"))
    assert next(iter(StreamingLoader(rows, 8))).data.tolist() == [100] * 8


def test_a_row_id_that_is_no_column_stays_out_of_a_subclass_batches(tmp_path: Path) -> None:
    write_source(tmp_path, [4])
    columns: list[list[str]] = []
    data = AsItIs(tmp_path, transform=lambda rows: columns.append(list(rows.columns)) or rows.tensor("number"))
    next(iter(StreamingLoader(data, 4)))
    assert columns == [["number", "tokens", "name"]]


class Picky(StreamingDataset):
    """Its bad row is the one that holds 5."""

    def __getitem__(self, at: Any) -> Any:
        row = super().__getitem__(at)
        if row["number"] == 5:
            raise ValueError("broken")
        return row["number"]


def refuse_five(rows: RowBatch) -> torch.Tensor:
    if 5 in rows.columns["number"]:
        raise ValueError("broken")
    return rows.tensor("number")


@pytest.mark.parametrize("how", ["raise", "skip"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_is_named_where_nobody_can_leave_it_out(tmp_path: Path, how: str, workers: int) -> None:
    write_source(tmp_path, [4, 4])
    picky: Any = Picky(tmp_path, on_bad_row=how)  # type: ignore[arg-type]
    plain: Any = StreamingDataset(tmp_path, on_bad_row=how, transform=refuse_five)  # type: ignore[arg-type]
    reads = [
        lambda: list(picky),
        lambda: list(ending_in_cycles(iter(DataLoader(picky, 3, num_workers=workers)))),
        lambda: list(ending_in_cycles(iter(DataLoader(picky, 1, num_workers=workers)))),
        lambda: list(ending_in_cycles(iter(DataLoader(plain, 3, num_workers=workers, collate_fn=plain.collate)))),
    ]
    for read in reads:
        with pytest.raises(DataError, match=r"shard\.00001\.mds, row 1 is bad: ValueError: broken.*StreamingLoader"):
            read()
    if how == "skip":
        for data in (picky, plain):
            with pytest.warns(UserWarning, match=r"left out: .*row 1: ValueError: broken$"):
                batches = list(StreamingLoader(data, 3))
            left = [n for batch in batches for n in batch.data[batch.lineage.row_ids != TOMBSTONE].tolist()]
            assert sorted(left) == [0, 1, 2, 3, 4, 6, 7]


def test_what_is_wrong_with_every_row_is_raised_as_it_is(tmp_path: Path) -> None:
    class Wrong(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        list(Wrong(write_source(tmp_path, [4])))


def test_an_overridden_collate_is_called_by_every_loader(tmp_path: Path) -> None:
    class Twice(StreamingDataset):
        def collate(self, batch: Any) -> Any:
            made = super().collate(batch)
            return replace(made, data=2 * made.data)

    data = Twice(write_source(tmp_path, [4]), columns=("number",), shuffle=False)
    for loader in (StreamingLoader(data, 4), DataLoader(data, 4, collate_fn=data.collate)):
        assert next(iter(loader)).data.tolist() == [0, 2, 4, 6]


def write_grown(folder: Path, sources: dict[str, tuple[str, list[int], int]]) -> Path:
    """Write a data set of sources: path, and class, rows of the shards, first number."""
    entries = []
    for path, (class_path, rows, first) in sources.items():
        source = write_source(folder / path, rows, class_path=class_path, first=first)
        digest = hashlib.sha256((source / "index.json").read_bytes()).hexdigest()
        entries.append({"path": path, "class": class_path, "index_sha256": digest})
    (folder / "sources.json").write_text(json.dumps({"version": 1, "sources": entries}))
    return folder


def with_draws(rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.tensor("number"), rows.uniform("crop")


@pytest.mark.parametrize("tail", ["keep", "drop", "carry"])
@pytest.mark.parametrize("workers", [0, 1])
def test_sources_that_were_added_join_with_the_next_epoch(tmp_path: Path, tail: Any, workers: int) -> None:
    before = {"a": ("a", [7, 3], 0), "b": ("b", [5, 5], 100)}
    after = {"a": ("a", [7, 3, 4], 0), "a.2": ("a", [6], 50), "b": ("b", [5, 5], 100), "c": ("c", [2], 200)}

    def loader() -> StreamingLoader:
        data = StreamingDataset(tmp_path, seed=3, window_rows=6, repeats={"b": 2}, transform=with_draws)
        return StreamingLoader(data, 4, tail=tail, num_workers=workers)

    def taken(batches: Any) -> list[tuple[int, int, float]]:
        return [
            row
            for batch in batches
            for row in zip(
                batch.lineage.row_ids.tolist(), batch.data[0].tolist(), batch.data[1].flatten().tolist(), strict=True
            )
        ]

    write_grown(tmp_path, before)
    first = loader()
    head = taken(itertools.islice(first, 3))
    state = json.loads(json.dumps(first.state_dict()))
    left = (28 if tail == "drop" else 30) - len(head)
    expected = taken(first) + taken(first)
    write_grown(tmp_path, after)
    grown = loader()
    grown.load_state_dict(state, grown=True)
    found: list[tuple[int, int, float]] = []
    while len(found) < left + (40 if tail == "drop" else 42):
        found += taken(grown)
    assert found[:left] == expected[:left]
    rest = found[left:]
    epoch = Counter(number for _, number, _ in rest[: 40 if tail == "drop" else 42])
    every = Counter([*range(14), *range(50, 56), *range(100, 110), *range(100, 110), 200, 201])
    assert epoch <= every if tail == "drop" else epoch == every
    ids = {number: row_id for row_id, number, _ in rest}
    assert ids[50] == 14
    assert ids[100] == 20
    assert "grown" not in grown.state_dict()
