"""Data that keep the memory which a loss writes to, and hand it out by other objects each time, whole or in part."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from cosmati import Batch, Evaluation, InMemory, RunConfig, Trainer
from cosmati.core.batch import Lineage
from cosmati.core.plan import Promise
from cosmati.errors import DataError
from cosmati.optim import SGD
from cosmati.train import written
from cosmati.train.written import Region, Written, WrittenHere

X = np.random.default_rng(0).uniform(0, 255, (32, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)


def divide(model: nn.Module, b: Any) -> Tensor:
    """Normalise the rows in place, as many a loop does."""
    b[0].div_(255)
    return mse_loss(model(b[0]), b[1])


def divide_copy(model: nn.Module, b: Any) -> Tensor:
    return mse_loss(model(b[0] / 255), b[1])


def train(data: Any, budget: str, loss: Callable[..., Tensor] = divide, **settings: Any) -> Trainer:
    trainer = made(data, budget, loss, **settings)
    trainer.fit()
    return trainer


def made(
    data: Any, budget: str = "8ba", loss: Callable[..., Tensor] = divide, evaluation: Any = None, **settings: Any
) -> Trainer:
    torch.manual_seed(0)
    config = RunConfig(budget=budget, num_threads=1, **({"num_microbatches": 1} | settings))
    return Trainer(nn.Linear(4, 3), loss, data, optimizers=[SGD(lr=0.1)], evaluation=evaluation, config=config)


class Rows(Sequence[Any]):
    """Batches over memory that it keeps, by new objects at each read."""

    width = 8

    def __init__(self) -> None:
        self.x, self.y = X.copy(), Y.copy()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if index >= 4:
            raise IndexError
        rows = slice(8 * index, 8 * index + self.width)
        return [self.tensor(self.x[rows]), torch.from_numpy(self.y[rows])]

    def tensor(self, rows: Any) -> Tensor:
        return torch.from_numpy(rows)


class OverBytes(Rows):
    def tensor(self, rows: Any) -> Tensor:
        return torch.frombuffer(memoryview(rows).cast("B"), dtype=torch.float32).view(-1, 4)


class ByProtocol(Rows):
    def tensor(self, rows: Any) -> Tensor:
        return torch.from_dlpack(rows)


class Windows(Rows):
    """Each has half of the next one's rows."""

    width = 16

    def __getitem__(self, index: Any) -> Any:
        rows = slice(8 * (index % 3), 8 * (index % 3) + 16)
        return [torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])]


class Shuffled(Rows):
    """Other rows at each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        start = int(np.random.default_rng(self.num_read).integers(24))
        return [torch.from_numpy(self.x[start : start + 8]), torch.from_numpy(self.y[start : start + 8])]


class Mapped(Rows):
    """A file's memory, by a new mapping's array at each read of the one mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.map = mmap.mmap(-1, X.nbytes)
        self.map.write(X.tobytes())

    def __getitem__(self, index: Any) -> Any:
        x = np.frombuffer(self.map, np.float32, 32, 128 * index).reshape(8, 4)
        return [torch.from_numpy(x), torch.from_numpy(self.y[8 * index : 8 * index + 8])]


class Streamed:
    """Windows over memory that a generator function keeps."""

    def __init__(self) -> None:
        self.x, self.y = X.copy(), torch.from_numpy(Y.copy())

    def __iter__(self) -> Iterator[Any]:
        for i in range(4):
            yield [torch.from_numpy(self.x[8 * i : 8 * i + 8]), self.y[8 * i : 8 * i + 8]]


def same(batch: Any) -> Any:
    return batch


def strided() -> list[Any]:
    x = torch.from_numpy(X.copy())
    return [[x[i::4], torch.zeros(8, 3)] for i in range(4)] + [[x[:8], torch.zeros(8, 3)]]


KEEPING: dict[str, tuple[Callable[[], Any], int]] = {
    "from_numpy": (Rows, 4),
    "frombuffer": (OverBytes, 4),
    "dlpack": (ByProtocol, 4),
    "mapped": (Mapped, 4),
    "generator": (Streamed, 4),
    "loader": (lambda: DataLoader(Rows(), batch_size=None, collate_fn=same), 4),
    "windows": (Windows, 1),
    "windows of a list": (lambda: [[x, torch.zeros(8, 3)] for x in torch.from_numpy(X.copy()).unfold(0, 8, 4).mT], 1),
    "rows apart": (strided, 4),
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", [*KEEPING])
def test_memory_that_data_keep_is_known_again(kind: str, num_microbatches: int) -> None:
    """The step before takes none of it; the step that would read what another one has written is refused."""
    make, steps = KEEPING[kind]
    settings = {"num_microbatches": num_microbatches}
    trainer = made(make(), "16ba", **settings)
    with pytest.raises(DataError, match=r"was changed in place since.*clone\(\)"):
        trainer.fit()
    assert trainer.clock.step == steps
    assert train(make(), f"{steps}ba", **settings).plan.holds(Promise.PARITY)
    assert train(make(), "16ba", divide_copy, **settings).clock.step == 16


def test_cuts_at_random_are_known_again() -> None:
    with pytest.raises(DataError, match="was changed in place since"):
        train(Shuffled(), "64ba")


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(X[index].copy()), torch.from_numpy(Y[index].copy())


def collated(rows: Any) -> Any:
    """Make arrays, and tensors over these: PyTorch's own memory isn't in it."""
    return [torch.from_numpy(np.stack([x.numpy() for x in part])) for part in zip(*rows, strict=True)]


class Copies(Rows):
    def tensor(self, rows: Any) -> Tensor:
        return torch.from_numpy(rows.copy())


class Refilled(Rows):
    """One buffer, filled anew for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.empty((8, 4), np.float32)

    def tensor(self, rows: Any) -> Tensor:
        self.buffer[:] = rows
        return torch.from_numpy(self.buffer)


class Ones(Rows):
    """Equal rows, which end as equal ones, in memory of their own."""

    def tensor(self, rows: Any) -> Tensor:
        return torch.from_numpy(np.full_like(rows, 255))


class Halves(Rows):
    """What's written lies between what isn't, and is never given again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.from_numpy(np.tile(X, (1, 4)))

    def __getitem__(self, index: Any) -> Any:
        return [self.table[:8, 4 * index : 4 * index + 4], torch.from_numpy(Y[:8])]


PRIVATE: dict[str, tuple[Callable[[], Any], str]] = {
    "collated": (lambda: DataLoader(Images(), 8), "16ba"),
    "collated arrays": (lambda: DataLoader(Images(), 8, collate_fn=collated), "16ba"),
    "workers": (lambda: DataLoader(Images(), 8, num_workers=1), "9ba"),
    "workers' arrays": (lambda: DataLoader(Images(), 8, collate_fn=collated, num_workers=1), "9ba"),
    "copies": (Copies, "16ba"),
    "refilled": (Refilled, "16ba"),
    "alike": (Ones, "64ba"),
    "columns": (Halves, "4ba"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", [*PRIVATE])
def test_memory_of_a_batchs_own_may_be_written_to(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the loss that leaves its batch alone, and within the bound of what's held."""
    monkeypatch.setattr(written, "_MAX_HELD", 300)
    make, budget = PRIVATE[kind]
    whole, plain = train(make(), budget), train(make(), budget, divide_copy)
    assert whole.plan.holds(Promise.RESUME) == plain.plan.holds(Promise.RESUME)
    assert whole.plan.holds(Promise.PARITY)
    assert all(map(torch.equal, whole.model.state_dict().values(), plain.model.state_dict().values()))


def tensors() -> list[Any]:
    return [[torch.from_numpy(X[8 * i : 8 * i + 8].copy()), torch.from_numpy(Y[:8])] for i in range(4)]


@pytest.mark.parametrize("make", [tensors, Rows])
def test_a_second_trainer_is_not_given_what_the_first_one_changed(make: Callable[[], Any]) -> None:
    """Memory of others is held by the first one, for as long as that is there."""
    data = make()
    first, second = made(data, "1ba"), made(data, "1ba", divide_copy)
    first.fit()
    with pytest.raises(DataError, match="was changed in place since a step was given it"):
        second.fit()
    assert train(make(), "1ba").clock.step == 1


def test_one_trainer_may_follow_another_over_the_same_rows() -> None:
    """Where nobody has changed them, or somebody has between the trainers, as one does in a notebook."""
    data = tensors()
    one = made(data, "4ba", divide_copy)
    data[0][0].mul_(1)
    other = train(data, "4ba", divide_copy)
    train(Rows(), "4ba", divide_copy)
    data[0][0].div_(2)
    again = train(data, "4ba", divide_copy)
    assert one.clock.step == 0
    assert other.plan.holds(Promise.RESUME)
    assert again.plan.holds(Promise.RESUME)


def test_a_trainer_that_has_gone_leaves_word() -> None:
    data = tensors()
    train(data, "1ba")
    with pytest.raises(DataError, match=r"Batch 0 of the data was changed in place since"):
        made(data)
    data[0][0].copy_(torch.from_numpy(X[:8]))
    assert train(data, "4ba", divide_copy).clock.step == 4


PROMISES = (Promise.PARITY, Promise.RESUME)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("make", [tensors, Rows])
def test_a_loop_of_ones_own_is_told_that_its_rows_were_changed(make: Callable[[], Any], num_microbatches: int) -> None:
    data = make()
    settings = {"num_microbatches": num_microbatches}
    one, other = made(None, **settings), made(None, loss=divide_copy, **settings)
    with one, other:
        for batch in data:
            one.step(batch)
            assert all(map(one.plan.holds, PROMISES))
        other.step([data[1][0] + 1, data[1][1]])
        assert all(map(other.plan.holds, PROMISES))
        other.step(data[1])
        one.step(data[0])
        for trainer, step in ((one, 4), (other, 1)):
            for promise in PROMISES:
                (broken,) = [g for g in trainer.plan.guarantees if g.promise is promise]
                assert not broken.holds
                assert broken.because.startswith(f"step {step} is given rows that an earlier step")


def test_a_loop_of_ones_own_may_fill_its_buffer_anew() -> None:
    x, y = torch.empty(8, 4), torch.from_numpy(Y[:8])
    with made(None) as trainer:
        for i in range(8):
            x.copy_(torch.from_numpy(X[8 * (i % 4) :][:8]))
            trainer.step([x, y])
        assert all(map(trainer.plan.holds, PROMISES))


def test_an_evaluation_over_what_the_loss_changes_is_refused() -> None:
    data = tensors()
    metrics = {"loss": divide_copy}
    with pytest.raises(DataError, match=r"Batch 0 of the data to evaluate on was changed in place, by .*loss"):
        train(data, "2ba", evaluation=Evaluation(data, metrics), evaluate_every="1ba")


def test_metrics_that_change_memory_that_the_data_keep_are_refused() -> None:
    with pytest.raises(DataError, match="to evaluate on was changed in place"):
        train(tensors(), "2ba", divide_copy, evaluation=Evaluation(Rows(), {"loss": divide}), evaluate_every="1ba")


@pytest.mark.parametrize("how", ["column", "in place"])
@pytest.mark.parametrize("holds_list", [True, False])
def test_a_data_frame_that_a_loss_changes_is_refused(how: str, holds_list: bool) -> None:
    pandas = pytest.importorskip("pandas")

    def loss(model: nn.Module, b: Any) -> Tensor:
        if how == "column":
            b["x"] /= 255
        elif how == "in place":
            b.loc[:, "x"] = b["x"] / 255
        x = torch.tensor(b["x"].to_numpy()).reshape(-1, 1).expand(-1, 4) / 255
        return model(x).square().mean()

    class Frames(Rows):
        def __init__(self) -> None:
            self.frames = frames

        def __getitem__(self, index: Any) -> Any:
            return self.frames[index]

    frames = [pandas.DataFrame({"x": X[8 * i : 8 * i + 8, 0], "name": [*"abcdefgh"]}) for i in range(4)]
    with pytest.raises(DataError, match="was changed in place since"):
        train(frames if holds_list else Frames(), "8ba", loss)
    how = "not at all"
    fresh = [pandas.DataFrame({"x": X[8 * i : 8 * i + 8, 0], "name": [*"abcdefgh"]}) for i in range(4)]
    frames = fresh
    assert train(fresh if holds_list else Frames(), "8ba", loss).clock.step == 8


def test_regions_share_memory_where_an_element_lies_in_both() -> None:
    """The oracle is NumPy's own answer, over arrays that it knows the memory of."""
    table = torch.arange(96.0).reshape(8, 12)
    parts = [table[:, :6], table[:, 6:], table[::2, ::3], table[1::2], table.T[2:5], table[3], table.view(torch.int32)]
    for a in parts:
        for b in parts:
            found = Region.of(a).shares_memory(Region.of(b))
            assert found == np.shares_memory(a.numpy(), b.numpy())
            assert found == Region.of(a.numpy()).shares_memory(Region.of(b))
    short = table.bfloat16()
    assert (Region.of(short).start, Region.of(short).stop) == (short.data_ptr(), short.data_ptr() + 192)
    empty = Region.of(table[:0])
    assert empty.view is None
    assert not empty.shares_memory(Region.of(table))
    assert Region.of(table.to_sparse()).view is None


def test_what_was_written_is_forgotten_with_its_memory() -> None:
    known = Written()
    for _ in range(300):
        part = torch.ones(4).mul_(2)
        known.add([part])
        assert known.has_part_of(part[1:])
        part.zero_()
        assert not known.has_part_of([part, 1])
    del part
    assert not known._known
    assert not known._numbers
    assert len(known._places) < 80


def test_memory_that_was_given_back_is_not_read() -> None:
    """The storage is there, and what it held is anybody's."""
    known, part = Written(), torch.ones(1 << 20)
    known.add([part])
    (one,) = known._known.values()
    other = part.clone()
    assert one.is_as_left(part[5:])
    assert not one.is_as_left(other)
    part.untyped_storage().resize_(0)
    again = one._replace(region=Region.of(other))
    assert not again.is_as_left(other)
    assert not known.has_part_of([other])


def test_memory_of_others_is_held_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_MAX_HELD", 40)
    here = WrittenHere()
    own, shared = torch.ones(4), torch.ones(4).share_memory_()
    here.add([own, shared, np.ones(4), "text"])
    assert not here._held
    parts = [torch.from_numpy(np.ones(4, np.float32)) for _ in range(5)]
    here.add([parts[0], *parts])
    assert len(here._held) == 3


class Views:
    """A source, and its order, whose microbatches are made over memory that it keeps."""

    digest = "views"
    num_rows, rows_per_step, steps_per_epoch, class_names = 32, 8, 4, ("all",)

    def __init__(self) -> None:
        self.x, self.y = X.copy(), Y.copy()

    def order(self, *, num_microbatches: int, **_: Any) -> Views:
        self.rows = 8 // num_microbatches
        return self

    def class_id(self, step: int, index: int) -> None:
        """Say that no class is known."""

    def microbatch(self, step: int, index: int) -> Batch:
        first = 8 * (step % 4) + self.rows * index
        data = [torch.from_numpy(part[first : first + self.rows]) for part in (self.x, self.y)]
        return Batch(data, Lineage.of_rows(first, self.rows), None)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_source_that_keeps_the_memory_of_its_rows_withdraws_promises(num_microbatches: int) -> None:
    settings = {"num_microbatches": num_microbatches}
    whole, written_to, plain = (
        train(Views(), budget, loss, **settings)
        for budget, loss in (("4ba", divide), ("8ba", divide), ("8ba", divide_copy))
    )
    assert all(map(whole.plan.holds, PROMISES))
    assert all(map(plain.plan.holds, PROMISES))
    for promise in PROMISES:
        (broken,) = [g for g in written_to.plan.guarantees if g.promise is promise]
        assert not broken.holds
        assert broken.because.startswith("step 4 is given rows that an earlier step")
    x, y = map(torch.from_numpy, (X.copy(), Y.copy()))
    assert all(map(train(InMemory([x, y], 8), "8ba", **settings).plan.holds, PROMISES))


def addresses(part: np.ndarray[Any, Any]) -> set[int]:
    """Of each byte of each element, one by one."""
    offsets = (sum(i * stride for i, stride in zip(at, part.strides, strict=True)) for at in np.ndindex(part.shape))
    return {part.ctypes.data + offset + byte for offset in offsets for byte in range(part.itemsize)}


def views_of_one_memory() -> list[np.ndarray[Any, Any]]:
    rows = np.arange(60, dtype=np.int32).reshape(6, 10)
    found = [rows, rows.T, rows[::-1, ::-2], rows[2], rows[:, 3], rows[:, 3:5], rows[:, 4:9:2], rows[1:5:3, 1::4]]
    found += [rows[:3], rows[3:], rows.reshape(-1)[7:53:5], rows.view(np.int16)[:, ::2], rows.view(np.int16)[:, 1::2]]
    return [*found, rows.view(np.uint8)[1:, 3:30:9], rows[4:, 9:], rows[:0], np.arange(60, dtype=np.int32)]


@pytest.mark.parametrize("as_tensors", [False, True])
def test_views_share_what_their_elements_share(as_tensors: bool) -> None:
    views = [one for one in views_of_one_memory() if not as_tensors or min(one.strides) >= 0]
    parts: list[Any] = [torch.from_numpy(one) if as_tensors else one for one in views]
    for part, view in zip(parts, views, strict=True):
        region, own = Region.of(part), addresses(view)
        assert (region.start, region.stop) == ((min(own), max(own) + 1) if own else (0, 0))
        for other, held in zip(parts, views, strict=True):
            if own and addresses(held):
                assert region.shares_memory(Region.of(other)) == bool(own & addresses(held))
            else:
                assert region.shares_memory(Region.of(other)) == (part is other)


def test_what_it_would_take_too_long_to_tell_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(10_000, np.uint8)

    def strided(at: int, *strides: int) -> Region:
        return Region.of(np.lib.stride_tricks.as_strided(memory[at:], (3, 4, 5, 6), strides))

    one, other = strided(0, 1009, 317, 101, 7), strided(5, 1013, 331, 97, 11)
    assert one.shares_memory(one)
    assert one.shares_memory(other)
    monkeypatch.setattr(written, "_MAX_WORK", 1)
    assert one.shares_memory(one)
    assert not one.shares_memory(other)
