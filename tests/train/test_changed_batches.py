"""Losses that change their batch: what they put into its containers reaches nobody, and what they write is told."""

from __future__ import annotations

import dataclasses
import types
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from cosmati import RunConfig, SubStep, Trainer
from cosmati.core.batch import Batch, Lineage
from cosmati.core.containers import shallow_copy
from cosmati.core.plan import Promise
from cosmati.errors import DataError, OutOfMemoryError
from cosmati.methods import SAM
from cosmati.optim import SGD
from cosmati.train.marks import Mark
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome

LARGE = 1 << 15
"""Numbers of an array of which only sums are kept."""


class Graph:
    """A batch object of a library's."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self._count = x, y, None


@dataclasses.dataclass
class Columns:
    x: Tensor
    y: Tensor


class Pair(NamedTuple):
    x: Any
    y: Tensor


def raw(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.rand(8, 4, generator=generator) * 255, torch.randn(8, 3, generator=generator)


def clean(model: nn.Module, b: Any) -> Tensor:
    return mse_loss(model(b[0] / 255), b[1])


def in_list(model: nn.Module, b: Any) -> Tensor:
    b[0] = b[0] / 255
    return mse_loss(model(b[0]), b[1])


def in_dict(model: nn.Module, b: Any) -> Tensor:
    b["x"] = b["x"] / 255
    b["also"] = b["x"].sum()
    return mse_loss(model(b["x"]), b["y"])


def in_nested(model: nn.Module, b: Any) -> Tensor:
    b[0]["x"] = b[0]["x"] / 255
    return mse_loss(model(b[0]["x"]), b[1])


def in_columns(model: nn.Module, b: Any) -> Tensor:
    b.x = b.x / 255
    return mse_loss(model(b.x), b.y)


def in_array(model: nn.Module, b: Any) -> Tensor:
    b["x"] /= 255
    return mse_loss(model(torch.from_numpy(b["x"])), b["y"])


def in_tensor(model: nn.Module, b: Any) -> Tensor:
    b[0].div_(255)
    return mse_loss(model(b[0]), b[1])


def cached(model: nn.Module, b: Any) -> Tensor:
    """Keep in a batch object what follows from it, as graph libraries do."""
    b._count = len(b.x)
    b.mean = b.x.mean()
    return mse_loss(model((b.x - b.mean) / 255), b.y)


ON_THEIR_OWN: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "list": (lambda x, y: [x, y], in_list),
    "dict": (lambda x, y: {"x": x, "y": y}, in_dict),
    "user dict": (lambda x, y: UserDict({"x": x, "y": y}), in_dict),
    "nested": (lambda x, y: ({"x": x}, y), in_nested),
    "named": (lambda x, y: Pair({"x": x}, y), in_nested),
    "columns": (Columns, in_columns),
    "namespace": (lambda x, y: types.SimpleNamespace(x=x, y=y), in_columns),
    "caching": (Graph, cached),
}
WRITTEN: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "array": (lambda x, y: {"x": x.numpy().copy(), "y": y}, in_array),
    "tensor": (lambda x, y: [x, y], in_tensor),
    "graph": (Graph, in_columns),
}


def run(
    loss: Any,
    data: Iterable[Any],
    budget: str,
    folder: Path | None = None,
    num_microbatches: int = 1,
    observers: Sequence[Observer] = (),
) -> Trainer:
    torch.manual_seed(0)
    change = ("budget",) if folder else ()
    config = RunConfig(
        budget=budget, num_microbatches=num_microbatches, change=change, run_folder=folder, num_threads=1
    )
    model, optimizers = nn.Linear(4, 3), [SGD(lr=0.1)]
    trainer = Trainer(model, loss, data, optimizers=optimizers, observers=observers, config=config)
    trainer.fit()
    return trainer


def same(one: Trainer, other: Trainer) -> bool:
    return all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


@pytest.mark.parametrize("kind", [*ON_THEIR_OWN])
def test_what_a_loss_puts_into_containers_stays_its_own(tmp_path: Path, kind: str) -> None:
    """With a run folder and without one, and from pass to pass."""
    make, loss = ON_THEIR_OWN[kind]

    def batches() -> list[Any]:
        return [make(*raw(i)) for i in range(4)]

    bare, whole = run(loss, batches(), "8ba"), run(loss, batches(), "8ba", tmp_path / "whole")
    run(loss, batches(), "6ba", tmp_path / "again")
    assert same(bare, whole)
    assert same(run(loss, batches(), "8ba", tmp_path / "again"), whole)
    fresh = run(loss, [make(*raw(i % 4)) for i in range(8)], "8ba")
    assert same(fresh, whole)


@pytest.mark.parametrize("kind", [*WRITTEN])
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_list_that_a_loss_writes_to_is_refused(tmp_path: Path, kind: str, has_folder: bool) -> None:
    make, loss = WRITTEN[kind]
    folder = tmp_path / "run" if has_folder else None
    with pytest.raises(DataError, match="Batch 0 of the data was changed in place"):
        run(loss, [make(*raw(i)) for i in range(4)], "8ba", folder)


def test_a_tuple_that_a_loss_writes_to_is_refused_and_withdraws_promises() -> None:
    """What most data give."""
    with pytest.raises(DataError, match="Batch 0 of the data was changed in place"):
        run(in_tensor, [raw(i) for i in range(4)], "8ba")
    for loss, holds in ((clean, True), (in_tensor, False)):
        rows = raw(0)
        with Trainer(nn.Linear(4, 3), loss, optimizers=[SGD(lr=0.1)], config=RunConfig(budget="4ba")) as trainer:
            trainer.step(rows)
            trainer.step(rows)
            assert trainer.plan.holds(Promise.RESUME) is holds


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_that_stands_in_a_list_twice_is_refused_once_it_was_written_to(num_microbatches: int) -> None:
    """In part, too; what follows in the first pass would be divided again, and a resume would begin with it whole."""
    x, y = raw(0)
    for data in ([[x, y]] * 4, [[x.detach(), y], [x.data, y.clone()]] * 2):
        x.copy_(raw(0)[0])
        with pytest.raises(DataError, match=r"Batch 1 of the data was changed in place.*clone\(\)"):
            run(in_tensor, data, "4ba", num_microbatches=num_microbatches)
    run(in_tensor, [list(raw(0)) for _ in range(4)], "4ba", num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_lists_batch_that_something_else_has_changed_meanwhile_is_refused(num_microbatches: int) -> None:
    data = [list(raw(index)) for index in range(4)]

    class Spoils(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == 3:
                data[0][0].add_(1)

    with pytest.raises(DataError, match="Batch 0 of the data was changed in place"):
        run(clean, data, "8ba", num_microbatches=num_microbatches, observers=[Spoils()])


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = raw(index)
        return x[0], y[0]


@pytest.mark.parametrize("kind", [*ON_THEIR_OWN, *WRITTEN])
def test_a_loaders_changed_batch_is_no_other_batch(tmp_path: Path, kind: str) -> None:
    """The last batch seen is compared as it was given, or not at all."""
    make, loss = (ON_THEIR_OWN | WRITTEN)[kind]

    def collate(rows: list[Any]) -> Any:
        return make(*map(torch.stack, zip(*rows, strict=True)))

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(), 8, collate_fn=collate)

    run(loss, loader(), "6ba", tmp_path / "again")
    again = run(loss, loader(), "8ba", tmp_path / "again")
    assert same(again, run(loss, loader(), "8ba"))


class Held(Sequence[Any]):
    """A sequence of one's own that holds its batches, or gives parts of what it holds."""

    def __init__(self, kind: str) -> None:
        make = (ON_THEIR_OWN | WRITTEN)[kind][0]
        self.batches = [make(*raw(i)) for i in range(4)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index]


class Sliced(Held):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.x, self.y = map(torch.cat, zip(*map(raw, range(4)), strict=True))
        self.array = self.x.numpy().copy()

    def __getitem__(self, index: Any) -> Any:
        rows = slice(8 * index, 8 * index + 8)
        if self.kind == "detached":
            return [self.x[rows].detach(), self.y[rows].data]
        return [self.x[rows], self.y[rows]] if self.kind == "tensor" else {"x": self.array[rows], "y": self.y[rows]}


class Refilled:
    """Batches in one buffer, which is filled anew for each."""

    def __iter__(self) -> Iterator[Any]:
        x, y = raw(0)
        for i in range(9):
            x.copy_(raw(i)[0])
            yield [x, y]


HOLDING: dict[str, Callable[[str], Any]] = {
    "sequence": Held,
    "slices": Sliced,
    "loader": lambda kind: DataLoader(Held(kind), batch_size=None, collate_fn=lambda batch: batch),
    "loader of slices": lambda kind: DataLoader(Sliced(kind), batch_size=None, collate_fn=lambda batch: batch),
}


@pytest.mark.parametrize("holding", [*HOLDING])
@pytest.mark.parametrize("kind", [*WRITTEN])
def test_data_that_hold_what_a_loss_writes_to_are_refused(tmp_path: Path, kind: str, holding: str) -> None:
    if kind == "graph" and "slices" in holding:
        return
    settings = {"folder": tmp_path / "run"}
    with pytest.raises(DataError, match=r"A batch comes again, and was changed in place.*clone\(\)"):
        run(WRITTEN[kind][1], HOLDING[holding](kind), "8ba", **settings)
    run(WRITTEN[kind][1], HOLDING[holding](kind), "4ba")


def test_detached_parts_of_what_data_hold_are_known_again() -> None:
    with pytest.raises(DataError, match="A batch comes again, and was changed in place"):
        run(in_tensor, Sliced("detached"), "8ba")


def test_a_buffer_that_is_filled_anew_is_another_batch() -> None:
    whole = run(in_tensor, Refilled(), "8ba")
    assert same(whole, run(in_tensor, [list(map(torch.clone, (raw(i)[0], raw(0)[1]))) for i in range(8)], "8ba"))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)


def trained(kind: str | None, num_microbatches: int, *, sub_steps: bool) -> Trainer:
    """Train with two passes over a step's rows, by a loss that changes its batch (None: that leaves it alone)."""
    make, loss = (ON_THEIR_OWN | WRITTEN)[kind] if kind else (lambda *rows: rows, clean)
    torch.manual_seed(0)
    config = RunConfig(budget="4ba", num_microbatches=num_microbatches, num_threads=1)
    data = [make(*raw(i)) for i in range(4)]
    parts = ["first", "second"]
    model = Two() if sub_steps else nn.Linear(4, 3)
    losses = [SubStep(p, lambda m, b, p=p: loss(getattr(m, p), b), f"{p}.*") for p in parts]
    trainer = Trainer(
        model,
        losses if sub_steps else loss,
        data,
        optimizers=[SGD(lr=0.1, parameters=f"{p}.*") for p in parts] if sub_steps else [SGD(lr=0.1)],
        methods=[] if sub_steps else [SAM(rho=0.5)],
        config=config,
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("sub_steps", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in ON_THEIR_OWN if kind != "caching"])
def test_each_pass_over_a_step_has_its_rows(kind: str, sub_steps: bool, num_microbatches: int) -> None:
    """SAM runs the loss twice, and sub-steps one after another."""
    if kind == "namespace" and num_microbatches == 2:
        return  # It can't be cut.
    one, other = (trained(kind, num_microbatches, sub_steps=sub_steps) for kind in (kind, None))
    assert same(one, other)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("sub_steps", [False, True])
@pytest.mark.parametrize("kind", [*WRITTEN])
def test_a_pass_over_rows_that_another_one_wrote_to_is_refused(
    kind: str, sub_steps: bool, num_microbatches: int
) -> None:
    if kind == "graph" and num_microbatches == 2:
        return  # It can't be cut.
    reader = "The sub-step 'second' of step 0" if sub_steps else "The second pass of step 0, for SAM,"
    with pytest.raises(DataError, match=rf"^{reader} would read other rows.*clone\(\)"):
        trained(kind, num_microbatches, sub_steps=sub_steps)


class Short:
    """Has no room in one call, after it has changed the rows."""

    forward_caches = ("num_calls",)

    def __init__(self, kind: str, at: int, *, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.num_calls, self.kind, self.at, self.error = 0, kind, at, error

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        loss = (ON_THEIR_OWN | WRITTEN)[self.kind][1](model, data)
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.error("out of memory")
        return loss


@pytest.mark.filterwarnings("ignore:Memory is too short")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["array", "tensor", "list", "dict"])
def test_changed_rows_are_not_taken_anew_in_smaller_parts(kind: str, num_microbatches: int) -> None:
    make = (ON_THEIR_OWN | WRITTEN)[kind][0]
    data = [make(*raw(i)) for i in range(4)]
    loss = Short(kind, at=2 * num_microbatches)
    if kind in ON_THEIR_OWN:
        assert run(loss, data, "4ba", num_microbatches=num_microbatches).cuts.pieces == 2
        return
    with pytest.raises(OutOfMemoryError, match=r"step 1: out of memory It can't be taken anew.*rows in place"):
        run(loss, data, "4ba", num_microbatches=num_microbatches)


@pytest.mark.parametrize("kind", ["array", "tensor", "list", "dict"])
def test_changed_rows_are_not_taken_anew_after_a_failure(kind: str) -> None:
    make = (ON_THEIR_OWN | WRITTEN)[kind][0]
    data = DataLoader([make(*raw(i)) for i in range(4)], batch_size=None, collate_fn=lambda batch: batch)
    loss = Short(kind, at=3, error=KeyError)
    config = RunConfig(budget="4ba", num_microbatches=1, num_threads=1)
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(4, 3), loss, data, optimizers=[SGD(lr=0.1)], config=config)
    with pytest.raises(KeyError):
        trainer.fit()
    if kind in WRITTEN:
        with pytest.raises(DataError, match=r"Step 2 has failed, and can't be taken anew: .* in place"):
            trainer.fit()
    else:
        trainer.fit()
        assert same(trainer, run(loss, [make(*raw(i)) for i in range(4)], "4ba"))


def test_a_shallow_copy_keeps_leaves_and_types() -> None:
    x = torch.ones(2)
    slotted = dataclasses.make_dataclass("slotted", ["x", "y"], slots=True, frozen=True)([x], x)
    proxy = types.MappingProxyType({"x": [x]})
    data = {"a": [x, (x, {"b": x})], "c": Pair([x], x), "d": UserDict(e=[x]), "f": slotted, "g": proxy, "h": "text"}
    made = shallow_copy(data)
    assert Mark(data).is_same(made)
    for name in "acdf":
        assert type(made[name]) is type(data[name])
        assert made[name] is not data[name]
    assert made["d"]["e"] is not data["d"]["e"]
    assert made["f"].x is not slotted.x
    assert made["f"].y is x
    assert made["g"] is proxy
    whole = (x, np.ones(2), Pair(x, x), "text")
    assert shallow_copy(whole) is whole


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


SIX = torch.ones(6)
PARTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(6),
    "array": lambda: np.ones(6),
    "of strings": lambda: np.array(["a"] * 6),
    "of objects": lambda: np.array([1, "a", None] * 2, dtype=object),
    "large": lambda: np.ones(LARGE),
    "large, odd": lambda: np.ones(LARGE + 3, dtype=np.uint8).repeat(9),
    "strided": lambda: np.ones((LARGE, 2))[:, 0],
    "nothing": lambda: 1,
}


@pytest.mark.parametrize("part", [*PARTS])
def test_a_mark_tells_what_has_changed(part: str) -> None:
    within: dict[str, Callable[[Any], Any]] = {
        "itself": lambda x: x, "list": lambda x: [x], "nested": lambda x: {"a": ([x], "text")}, "object": Slotted,
        "tuple": lambda x: (SIX, x), "tuple of others": lambda x: ({"a": x}, SIX),
        "batch": lambda x: Batch((x,), Lineage.of_rows(0, 6)),
        "objects": lambda x: [Slotted({"b": x}), 1, ["text"] * 9],
    }  # fmt: skip
    for name, make in within.items():
        held = PARTS[part]()
        data = make(held)
        mark = Mark(data)
        assert mark.is_same(data), name
        assert not mark.has_changed(data)
        assert not mark.has_changed(make(PARTS[part]())), "another one of the same content"
        if part != "nothing":
            held[-1] = 7
            assert mark.has_changed(data), name
            assert not mark.is_same(data)


def test_a_mark_looks_at_what_was_there() -> None:
    graph = Graph(torch.ones(2), torch.ones(2))
    mark = Mark(graph)
    graph._count = 2  # type: ignore[assignment]
    assert not mark.has_changed(graph)
    assert not mark.is_same(graph)
    graph.x = torch.ones(2)
    assert not mark.has_changed(graph)
    graph.x = torch.zeros(2)
    assert mark.has_changed(graph)
    del graph.x
    assert mark.has_changed(graph)
    with torch.inference_mode():
        rested = torch.ones(2)
    assert Mark([rested]).is_same([rested])
    assert Mark((rested,)).is_same((rested,))
    pair = [torch.ones(2), torch.ones(2)]
    mark = Mark(pair)
    pair[1] = torch.zeros(2)
    assert mark.has_changed(pair)
    assert not mark.is_same(None)
    assert not Mark(tuple(pair)).is_same((pair[0], pair[0]))
    many = [torch.ones(1)] * 3000 + [None]
    assert not Mark(many).is_same(many)
    assert not Mark(many).has_changed(many)
    own: list[Any] = [torch.ones(1), None]
    own[1] = own
    assert Mark(own).is_same(own)


class Column:
    """Something of a data frame's: one column, by a copy of its own where it's written to."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def to_numpy(self) -> Any:
        return self.held

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.held


@pytest.mark.parametrize("depth", range(1, 15))
def test_a_mark_looks_twelve_containers_deep(depth: int) -> None:
    leaf = torch.ones(2)
    data: Any = leaf
    for _ in range(depth):
        data = [data]
    mark = Mark({"x": torch.ones(1), "deep": data})
    leaf[0] = 7
    assert mark.has_changed({"x": torch.ones(1), "deep": data}) == (depth <= 12)


def test_a_column_is_looked_at() -> None:
    column = Column(np.arange(4.0))
    mark = Mark((column, "text"))
    assert not mark.has_changed((column, "text"))
    column.held = np.arange(4.0)
    assert not mark.has_changed((column, "text"))
    column.held[2] = 7
    assert mark.has_changed((column, "text"))
