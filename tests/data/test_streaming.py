"""Streamed rows: exactly once, in one order, whatever the ranks, the workers and where it stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import pickle
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.source import Source
from cosmati.data.ingest import read_text
from cosmati.data.loader import LoaderTail, StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.rows import RowBatch
from cosmati.data.shards.convert import mds_to_parquet
from cosmati.data.shards.writer import ShardWriter, merge_sources
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import Span, StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.data.shard_files import bytes_on_disk, write_data_set, write_source

pytestmark = pytest.mark.long

CLASSES = {"open/permissive": [7, 0, 9, 5], "open/psf": [3], "unknown": [11, 2]}
NUM_ROWS = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_set(tmp_path_factory.mktemp("data"), CLASSES)


def opened(folder: Path, **options: object) -> StreamingDataset:
    return StreamingDataset(folder, columns=("number",), window_rows=10, **{"seed": 3, **options})  # type: ignore[arg-type]


def numbers(batch: Batch) -> list[int]:
    present = batch.lineage.row_ids != TOMBSTONE
    assert torch.equal(batch.data[present], batch.lineage.row_ids[present])  # rows are numbered through
    return batch.data[present].tolist()


def epoch(loader: StreamingLoader) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Put the ranks' shares of each global batch together again."""
    steps = {len(rank) for rank in ranks}
    assert len(steps) == 1, "ranks are in step"
    interleaved = []
    for shares in zip(*ranks, strict=True):
        longest = itertools.zip_longest(*shares)
        interleaved.append([n for row in longest for n in row if n is not None])
    return interleaved


def test_rows_are_read_as_they_were_written(folder: Path) -> None:
    data = StreamingDataset(folder, shuffle=False)
    assert len(data) == NUM_ROWS
    assert data.class_names == ("open/permissive", "open/psf", "unknown")
    rows = data.__getitems__(range(NUM_ROWS))
    for row in rows:
        assert row["number"] == row["row_id"]
        assert row["name"] == f"row {row['row_id']}"
        assert row["tokens"].tolist() == list(range(row["number"], row["number"] + 6))
        source, number = data.where(row["row_id"])
        assert source.class_path == data.class_names[row["class_id"]]
        first = {"open/permissive": 0, "open/psf": 21, "unknown": 24}[source.class_path]
        assert first + number == row["row_id"]
    assert data[5]["name"] == rows[5]["name"]
    with pytest.raises(DataError, match="no row 37"):
        data.where(37)


@pytest.mark.parametrize("num_rows", [[1], [2], [7], [30, 23]])
@pytest.mark.parametrize("tail", ["keep", "carry"])
def test_exactly_once_over_worlds(tmp_path: Path, num_rows: list[int], tail: LoaderTail) -> None:
    data = opened(write_source(tmp_path, num_rows))
    total, batch_size = sum(num_rows), 12
    whole = None
    for world in range(1, 10):
        ranks = [StreamingLoader(data, batch_size, rank=r, world=world, tail=tail) for r in range(world)]
        # As many steps as visit every row at least once.
        epochs = 1 if tail == "keep" else max(1, -(-batch_size // total) * 2)
        found = together([list(itertools.chain.from_iterable(epoch(one) for _ in range(epochs))) for one in ranks])
        flat = list(itertools.chain.from_iterable(found))
        for start in range(0, len(flat) - total + 1, total):
            assert sorted(flat[start : start + total]) == list(range(total))
        whole = whole or found
        assert found == whole


def test_drop_leaves_out_what_fills_no_batch_and_other_epochs_leave_out_others(folder: Path) -> None:
    loader = StreamingLoader(opened(folder), 10, rank=0, world=1, tail="drop")
    first, second = epoch(loader), epoch(loader)
    for found in (first, second):
        flat = list(itertools.chain.from_iterable(found))
        assert [len(one) for one in found] == [10, 10, 10]
        assert len(set(flat)) == 30
    assert first != second
    assert len(loader) == 3
    with pytest.raises(DataError, match="don't fill a batch"):
        StreamingLoader(opened(folder), 40, rank=0, world=1, tail="drop")
    with pytest.raises(DataError, match="without any"):
        StreamingLoader(opened(folder), 3, rank=0, world=4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_give_the_same_batches(folder: Path, method: str) -> None:
    data, num_workers = opened(folder), 1 if method == "spawn" else 2  # each spawned one loads PyTorch anew
    alone = StreamingLoader(data, 8, rank=1, world=2)
    context = multiprocessing.get_context(method)
    with_workers = StreamingLoader(data, 8, rank=1, world=2, num_workers=num_workers, multiprocessing_context=context)
    assert [epoch(alone), epoch(alone)] == [epoch(with_workers), epoch(with_workers)]


@pytest.mark.timeout(300)
def test_resume_at_every_batch_into_other_worlds(folder: Path) -> None:
    data = opened(folder)

    def loaders(world: int) -> list[StreamingLoader]:
        return [StreamingLoader(data, 9, rank=r, world=world) for r in range(world)]

    def run(worlds: list[tuple[int, int]]) -> list[list[int]]:
        """Take so many steps in each world, one after another, handing over the state."""
        found: list[list[int]] = []
        state = None
        for world, steps in worlds:
            ranks = loaders(world)
            if state is not None:
                for one in ranks:
                    one.load_state_dict(json.loads(json.dumps(state)))
            iterators = [iter(one) for one in ranks]
            for _ in range(steps):
                shares = []
                for i, one in enumerate(ranks):
                    batch = next(iterators[i], None)
                    if batch is None:
                        iterators[i] = iter(one)
                        batch = next(iterators[i])
                    shares.append([numbers(batch)])
                found += together(shares)
            states = [one.state_dict() for one in ranks]
            assert all(one == states[0] for one in states)
            state = states[0]
        return found

    fresh = run([(1, 12)])
    for stop in range(12):
        assert run([(4, stop), (3, 12 - stop)]) == fresh
    assert run([(4, 3), (3, 2), (6, 4), (1, 3)]) == fresh


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_workers_and_more_ranks_than_rows(tmp_path: Path) -> None:
    data = opened(write_source(tmp_path, [3]))
    for workers, worlds in ((0, (1, 5)), (1, (5,)), (2, (1,)), (5, (1,))):
        for world in worlds:
            options = {"num_workers": workers}
            ranks = [epoch(StreamingLoader(data, 6, rank=r, world=world, **options)) for r in range(world)]
            assert sorted(itertools.chain.from_iterable(together(ranks))) == [0, 1, 2]


def test_no_rows_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to visit"):
        opened(write_source(tmp_path / "empty", []))
    with pytest.raises(DataError, match="nothing to visit"):
        opened(write_source(tmp_path / "hollow", [0, 0]))


def test_a_state_of_other_data_is_refused(folder: Path, tmp_path: Path) -> None:
    state = StreamingLoader(opened(folder), 8).state_dict()
    with pytest.raises(DataError, match="seed"):
        StreamingLoader(opened(folder, seed=4), 8).load_state_dict(state)
    with pytest.raises(DataError, match="digest"):
        StreamingLoader(opened(write_source(tmp_path, [37])), 8).load_state_dict(state)
    with pytest.raises(DataError, match="digest"):
        StreamingLoader(opened(folder, repeats={"open/psf": 2}), 8).load_state_dict(state)


def test_an_iterator_broken_off_and_started_again_goes_on(folder: Path) -> None:
    loader = StreamingLoader(opened(folder), 8, num_workers=1)
    expected = [epoch(StreamingLoader(opened(folder), 8))]
    found = []
    for batch in loader:
        found.append(numbers(batch))
        if len(found) == 2:
            break
    found += epoch(loader)
    assert [found] == expected


def test_the_plain_dataloader_reads_it(folder: Path) -> None:
    data = StreamingDataset(folder, seed=3, window_rows=10)
    found = Counter(n for batch in DataLoader(data, batch_size=5) for n in batch["number"].tolist())
    assert found == Counter(range(NUM_ROWS))
    batch = next(iter(DataLoader(data, batch_size=5, collate_fn=opened(folder).collate)))
    assert batch.data.shape == (5,)


def test_draws_belong_to_rows(folder: Path) -> None:
    def transform(batch: RowBatch) -> tuple[Tensor, Tensor]:
        return batch.tensor("number"), batch.uniform("crop", 2)

    drawn: dict[tuple[int, int], list[float]] = {}
    for size, workers in ((5, 0), (9, 2)):
        loader = StreamingLoader(StreamingDataset(folder, seed=3, transform=transform), size, num_workers=workers)
        for number in range(2):
            for batch in loader:
                for row, draw in zip(batch.data[0].tolist(), batch.data[1].tolist(), strict=True):
                    assert drawn.setdefault((number, row), draw) == draw
    assert len(drawn) == 2 * NUM_ROWS
    assert len({tuple(draw) for draw in drawn.values()}) == 2 * NUM_ROWS


def test_repeats_are_exact(folder: Path) -> None:
    data = opened(folder, repeats={"open/psf": 2.5})
    assert len(data) == 34 + 7
    loader = StreamingLoader(data, 41)
    seen = Counter(row for _ in range(2) for batch in loader for row in numbers(batch))
    # 2.5 x 3 rows is 7.5 visits an epoch; epochs have 41 positions, and go on where the last one stopped.
    repeated = [seen[row] for row in (21, 22, 23)]
    assert sum(repeated) in (14, 15)
    assert max(repeated) - min(repeated) <= 1
    assert {seen[row] for row in range(NUM_ROWS) if row not in (21, 22, 23)} <= {1, 2}
    with pytest.raises(DataError, match=r"names open/nothing, and the data have"):
        opened(folder, repeats={"open/nothing": 2})


def test_as_a_source_its_microbatches_are_route_pure_and_each_row_comes_once(folder: Path) -> None:
    source = StreamingSource(opened(folder), 8, tail="pad")
    assert isinstance(source, Source)
    order = source.order(seed=1, num_microbatches=2, route_pure=True)
    seen: Counter[int] = Counter()
    for step in range(order.steps_per_epoch):
        order.expect(step, (0, 1))
        for index in (0, 1):
            batch = order.microbatch(step, index)
            assert batch.class_id == order.class_id(step, index)
            assert batch.num_rows == 4
            present = batch.lineage.row_ids != TOMBSTONE
            assert set(batch.lineage.class_ids[present].tolist()) <= {batch.class_id}
            assert batch.lineage.digests is not None
            assert bool((batch.lineage.digests[~present] == 0).all())
            assert bool((batch.data[~present] == 0).all())
            seen.update(numbers(batch))
    assert seen == Counter(range(NUM_ROWS))


@pytest.mark.timeout(300)
def test_reading_ahead_changes_nothing(folder: Path) -> None:
    def read(num_workers: int, steps_ahead: int, jumps: list[int]) -> list[list[int]]:
        source = StreamingSource(opened(folder), 8, num_workers=num_workers, steps_ahead=steps_ahead)
        order = source.order(seed=1, num_microbatches=4, route_pure=False)
        found = []
        for step in jumps:
            order.expect(step, (1, 3))
            found += [numbers(order.microbatch(step, index)) for index in (1, 3)]
        return found

    steps = [0, 1, 2, 7, 8, 3, 4]
    expected = read(0, 0, steps)
    assert read(0, 3, steps) == expected
    assert read(2, 2, steps) == expected


def test_classes_that_arent_offered_never_come(folder: Path) -> None:
    order = StreamingSource(opened(folder), 4).order(seed=1, num_microbatches=2, route_pure=True, classes={0, 2})
    assert {order.class_id(step, index) for step in range(30) for index in (0, 1)} == {0, 2}


def test_it_trains_and_resumes_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    def transform(batch: RowBatch) -> tuple[Tensor, Tensor]:
        return batch.tensor("tokens").float() / 40, batch.uniform("noise")

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return (model(data[0])[:, 0] - data[1][:, 0].float()).square().mean()

    def trainer(steps: int, run_folder: Path | None, num_workers: int = 0) -> Trainer:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        data = StreamingDataset(folder, transform=transform, window_rows=10)
        source = StreamingSource(data, 8, num_workers=num_workers)
        config = RunConfig(budget=f"{steps}ba", num_microbatches=4, seed=5, run_folder=run_folder, num_threads=1)
        return Trainer(model, loss, source, optimizers=[SGD(lr=0.1, momentum=0.9)], config=config)

    whole = trainer(12, None)
    whole.fit()
    with_workers = trainer(12, None, num_workers=2)
    with_workers.fit()
    stopped = trainer(12, tmp_path / "run")
    with stopped:
        for _ in range(5):
            batches = stopped.feed.microbatches(stopped.clock, range(4))  # type: ignore[union-attr]
            stopped.step_microbatches(batches, [None] * 4)  # type: ignore[arg-type]
    for other in (with_workers, stopped):
        if other is stopped:
            assert other.clock.step == 5
            continue
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name])


def test_a_remote_is_cached_and_its_cache_crosses_processes(tmp_path: Path) -> None:
    write_source(tmp_path / "remote", [5, 6, 7], compression="gz")
    cache = CacheOptions(tmp_path / "cache")
    data = StreamingDataset(f"file://{tmp_path}/remote", columns=("number",), cache=cache)
    again = pickle.loads(pickle.dumps(data))
    for one in (data, again):
        found = [n for batch in StreamingLoader(one, 4, num_workers=2) for n in numbers(batch)]
        assert sorted(found) == list(range(18))
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name[0] != "."]
    assert sorted(path.suffix for path in files) == [".kept", ".shard", ".shard", ".shard"]


def test_a_cache_smaller_than_the_working_set_still_serves(tmp_path: Path) -> None:
    write_source(tmp_path / "remote", [20] * 8)
    largest = max(path.stat().st_size for path in (tmp_path / "remote").glob("*.mds"))
    limit = 2 * largest + 10 + (tmp_path / "remote" / "index.json").stat().st_size
    cache = CacheOptions(tmp_path / "cache", max_bytes=limit)
    data = StreamingDataset(tmp_path / "remote", columns=("number",), cache=cache, window_rows=20)
    source = StreamingSource(data, 8, tail="pad")
    order = source.order(seed=0, num_microbatches=1, route_pure=False)
    found: list[int] = []
    for step in range(order.steps_per_epoch):
        order.expect(step, (0,))
        found += numbers(order.microbatch(step, 0))
        assert bytes_on_disk(tmp_path / "cache") <= limit
    assert sorted(found) == list(range(160))


def test_bad_data_sets_say_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither an index.json"):
        StreamingDataset(tmp_path)
    with pytest.raises(DataError, match="say where to keep what is fetched, with cache="):
        StreamingDataset("memory://nothing/here")
    other = write_data_set(tmp_path / "other", CLASSES)
    (other / "open/psf/index.json").write_bytes((other / "unknown/index.json").read_bytes())
    with pytest.raises(DataError, match="one was changed without the other"):
        StreamingDataset(other)
    (other / "sources.json").write_text(
        '{"version": 1, "sources": [{"path": "../x", "class": "a", "index_sha256": ""}]}'
    )
    with pytest.raises(DataError, match="leaves it"):
        StreamingDataset(other)
    with pytest.raises(DataError, match="no column 'colour'"):
        next(iter(StreamingLoader(StreamingDataset(folder, columns=("colour",)), 4)))


def test_a_curriculum_changes_the_shares_and_loses_no_place(folder: Path) -> None:
    spans = [
        Span({"open/permissive": 1}, 10),
        Span({"open/permissive": 1, "open/psf": 1}, 40),
        Span({"unknown": 2, "open/psf": 1}),
    ]
    data = opened(folder, curriculum=spans)
    loader = StreamingLoader(data, 10, tail="carry")
    read = [n for _ in range(3) for batch in loader for n in numbers(batch)]
    by_class = [["open/permissive", "open/psf", "unknown"][0 if n < 21 else 1 if n < 24 else 2] for n in read]
    assert set(by_class[:10]) == {"open/permissive"}
    assert Counter(by_class[10:40]) == {"open/permissive": 15, "open/psf": 15}
    assert Counter(by_class[40:70]) == {"unknown": 20, "open/psf": 10}
    # Each class goes on where the span before left it: all 21 permissive rows before any comes again.
    assert sorted([n for n in read if n < 21][:21]) == list(range(21))
    order = StreamingSource(data, 4).order(seed=0, num_microbatches=2, route_pure=True)
    units = [order.class_id(step, index) for step in range(40) for index in (0, 1)]
    assert set(units[:5]) == {0}
    assert Counter(units[5:20]) in ({0: 8, 1: 7}, {0: 7, 1: 8})
    assert set(units[20:]) == {1, 2}
    with pytest.raises(DataError, match="tail='carry'"):
        StreamingSource(data, 4, tail="pad").order(seed=0, num_microbatches=2, route_pure=True)
    with pytest.raises(DataError, match="names open/nothing"):
        opened(folder, curriculum=[Span({"open/nothing": 1})])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_poison_row_is_named_or_left_out_with_ranks_in_step(folder: Path, workers: int) -> None:
    def transform(batch: RowBatch) -> Tensor:
        if 13 in batch.columns["number"]:
            raise ValueError("thirteen")
        return batch.tensor("number")

    data = StreamingDataset(folder, seed=3, window_rows=10, transform=transform)
    with pytest.raises(DataError, match=r"open/permissive/shard.00002.mds, row 6 is bad: ValueError: thirteen"):
        list(StreamingLoader(data, 5, num_workers=workers))
    skipping = StreamingDataset(folder, seed=3, window_rows=10, transform=transform, on_bad_row="skip")
    ranks = [StreamingLoader(skipping, 6, rank=rank, world=2, num_workers=workers) for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [list(one) for one in ranks]
    assert [batch.num_rows for batch in found[0][:-1]] == [batch.num_rows for batch in found[1][:-1]]
    read = Counter(n for one in found for batch in one for n in numbers(batch))
    assert read == Counter(n for n in range(NUM_ROWS) if n != 13)
    if not workers:
        assert {(one.row.rpartition("/")[2], one.reason) for one in skipping.skipped} == {
            ("shard.00002.mds, row 6", "ValueError: thirteen")
        }


def test_columns_that_arent_tensors_say_what_to_do(folder: Path) -> None:
    data = StreamingDataset(folder, columns=("number", "name"))
    with pytest.raises(DataError, match=r"'name' can't be one tensor.*transform="):
        next(iter(StreamingLoader(data, 4)))
    everything = StreamingDataset(folder)
    batch = next(iter(StreamingLoader(everything, 4)))
    assert [tuple(tensor.shape) for tensor in batch.data] == [(4,), (4, 6)]
    assert np.array_equal(batch.data[0].numpy(), batch.lineage.row_ids.numpy())


def test_bands_of_a_class_are_never_in_one_microbatch(tmp_path: Path) -> None:
    for band in (0, 1):
        columns = {"number": "int"}
        with ShardWriter(tmp_path / f"band-{band}", columns, class_path="open/psf", source="x", band=band) as writer:
            for number in range(20):
                writer.write({"number": 100 * band + number})
    data = StreamingDataset([tmp_path / "band-0", tmp_path / "band-1"])
    order = StreamingSource(data, 8, tail="pad").order(seed=0, num_microbatches=2, route_pure=True)
    bands: Counter[bool] = Counter()
    for step in range(order.steps_per_epoch):
        for index in (0, 1):
            batch = order.microbatch(step, index)
            found = set((batch.data[batch.lineage.row_ids != TOMBSTONE] >= 100).tolist())
            assert len(found) <= 1
            bands.update(found)
    assert bands[False] == bands[True] == 5


def test_provenance_resolves_after_packing_repetition_merging_and_conversion(tmp_path: Path) -> None:
    lines = [f"line {n} " + "word " * (n % 7) for n in range(60)]
    for part in range(2):
        (tmp_path / f"{part}.txt").write_text("\n".join(lines[30 * part : 30 * part + 30]))
        read = read_text(tmp_path / f"{part}.txt", class_of="open/psf", separator="\n")
        packed = pack_rows(tokenize(read, ByteTokenizer()), Packing(length=64), class_names=("open/psf",))
        with ShardWriter(
            tmp_path / f"out/{part}", packed.columns, class_path="open/psf", source="x", size_limit=8192
        ) as writer:
            for row in packed:
                writer.write(row)
    merge_sources([tmp_path / "out/0", tmp_path / "out/1"], tmp_path / "out")
    mds_to_parquet(tmp_path / "out", tmp_path / "parquet")
    for folder in (tmp_path / "out", tmp_path / "parquet"):
        data = StreamingDataset(folder, repeats={"open/psf": 2})
        seen: Counter[str] = Counter()
        places = data.locate(range(len(data)))
        rows = data.read(places, with_digests=True)
        assert rows.digests is not None
        for row, digest in zip(rows, rows.digests, strict=True):
            source, number = data.where(row["row_id"])
            at = np.asarray([number])
            shard = np.searchsorted(np.cumsum(source.index.shard_rows), at, side="right")
            within = at - (np.cumsum(source.index.shard_rows) - source.index.shard_rows)[shard]
            assert np.array_equal(source.digests(shard, within)[0], digest)
            for (_, _, start, stop, first), (file, place, sha256) in zip(row["spans"], row["origins"], strict=True):
                line = lines[30 * int(file[0]) + place - 1]
                assert hashlib.sha256(line.encode()).hexdigest() == sha256
                text = ByteTokenizer().decode(row["tokens"][start:stop])
                assert text == line[first : first + len(text)]
                seen[sha256] += 1
        assert set(seen) == {hashlib.sha256(line.encode()).hexdigest() for line in lines}


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_over_one_loader_read_each_row_once_each(tmp_path: Path, workers: int) -> None:
    data = StreamingDataset(write_source(tmp_path, [500, 500]), columns=("number",))
    loader = StreamingLoader(data, 10, num_workers=workers)
    for _ in range(2):
        one, other = [], []
        for first, second in zip(loader, loader, strict=True):
            one += numbers(first)
            other += numbers(second)
        assert sorted(one) == sorted(other) == list(range(1000))
        assert one == other
    assert loader.state_dict()["position"] == 2000


def test_the_loader_stands_where_its_latest_iterator_does(tmp_path: Path) -> None:
    data = StreamingDataset(write_source(tmp_path, [40]), columns=("number",))
    loader = StreamingLoader(data, 4)
    outer = iter(loader)
    first = numbers(next(outer)) + numbers(next(outer))
    state = loader.state_dict()
    inner = [n for batch in loader for n in numbers(batch)]
    assert sorted(first + inner) == list(range(40))
    rest = [n for batch in outer for n in numbers(batch)]
    assert rest == inner
    assert loader.state_dict()["position"] == 40
    loader.load_state_dict(state)
    kept = iter(loader)
    next(kept)
    loader.load_state_dict(state)
    next(kept)
    assert loader.state_dict() == state
    assert [n for batch in loader for n in numbers(batch)] == inner


def test_persistent_workers_serve_one_iterator_at_a_time(tmp_path: Path) -> None:
    data = StreamingDataset(write_source(tmp_path, [40]), columns=("number",))
    loader = StreamingLoader(data, 4, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 10
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 9
    with pytest.raises(DataError, match="has taken its persistent workers over"):
        next(outer)


def test_a_plain_loader_collates_by_columns_what_pytorch_makes_of_dictionaries(folder: Path) -> None:
    data = StreamingDataset(folder)
    by_columns = list(DataLoader(data, batch_size=5))
    rows = [dict(row) for row in data]
    expected = [default_collate(rows[start : start + 5]) for start in range(0, len(rows), 5)]
    assert len(by_columns) == len(expected) > 2
    for found, one in zip(by_columns, expected, strict=True):
        assert list(found) == list(one)
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)
            else:
                assert found[name] == value
    assert default_collate([data[0], data[1]])["name"] == [rows[0]["name"], rows[1]["name"]]


class Mark:
    """A transform that refuses some rows."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __call__(self, batch: RowBatch) -> Tensor:
        found = {int(number) for number in batch.columns["number"]} & self.bad
        if found:
            raise ValueError(f"row {min(found)} is bad")
        return batch.tensor("number")


@pytest.mark.parametrize(("size", "world"), [(1, 1), (2, 1), (4, 4), (5, 1)])
def test_a_bad_row_alone_in_its_batch_is_left_out(tmp_path: Path, size: int, world: int) -> None:
    data = StreamingDataset(write_source(tmp_path, [5, 4]), transform=Mark({0, 4}), on_bad_row="skip")
    seen: list[int] = []
    lengths = set()
    for rank in range(world):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = list(StreamingLoader(data, size, rank=rank, world=world))
        lengths.add(len(batches))
        seen += [int(row) for batch in batches for row in batch.lineage.row_ids if row != TOMBSTONE]
    assert sorted(seen) == [1, 2, 3, 5, 6, 7, 8]
    assert len(lengths) == 1, "ranks stay in step"
    assert len(data.skipped) == 2


@pytest.mark.parametrize("size", [1, 4, 32])
def test_what_is_wrong_with_every_row_is_not_left_out(tmp_path: Path, size: int) -> None:
    data = StreamingDataset(write_source(tmp_path, [60]), transform=Mark({*range(60)}), on_bad_row="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((DataError, ValueError), match=r"is bad|rows were all bad|can be read"):
            list(StreamingLoader(data, size))


@pytest.mark.parametrize("size", [1, 2])
def test_bad_rows_with_good_ones_between_them_may_be_many(tmp_path: Path, size: int) -> None:
    bad = {number for number in range(100) if number // size % 3}
    data = StreamingDataset(write_source(tmp_path, [100]), transform=Mark(bad), on_bad_row="skip", shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [int(r) for batch in StreamingLoader(data, size) for r in batch.lineage.row_ids if r != TOMBSTONE]
    assert sorted(seen) == sorted({*range(100)} - bad)
    assert len(data.skipped) == len(bad)
