"""A run's facts of its data: their digest or content, how rows are made and ordered, and not how they're read."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from cosmati import InMemory
from cosmati.core.batch import Batch, Lineage
from cosmati.core.later import later
from cosmati.train import identity
from cosmati.train.identity import (
    _content_digest,
    describe_source,
)
from cosmati.train.options import Described


def turned(rows: Any) -> Any:
    return rows


@dataclass(frozen=True)
class Own(InMemory):
    """A source of somebody's own, with fields of every kind."""

    num_workers: int = 3
    steps_ahead: int = 3
    names: tuple[str, ...] = ("a", "b")
    mixed: tuple[object, ...] = ("a", None)
    listed: Any = None
    turn: Any = turned
    source: Any = None
    ratio: float = 0.5
    is_new: bool = later(default=False)


ROWS = (torch.arange(8.0)[:, None], torch.zeros(8, dtype=torch.int64))


def test_a_source_is_told_by_its_digest_and_fields_but_for_how_it_is_read() -> None:
    inner = InMemory(ROWS, rows_per_step=4)
    own = Own(ROWS, rows_per_step=2, listed=object(), source=inner)
    told: Any = describe_source(own)
    assert (told["is"], told["digest"], told["classes"]) == ("Own", own.digest, [*own.class_names])
    assert (told["names"], told["ratio"], told["rows_per_step"]) == (["a", "b"], 0.5, 2)
    assert told["turn"] == Described(with_code=True).value(turned, None)
    assert "code" in told["turn"]
    assert not {"num_workers", "steps_ahead", "mixed", "listed", "is_new", "data"} & {*told}
    assert told["source"] == describe_source(inner)
    assert describe_source(Own(ROWS, rows_per_step=2, is_new=True))["is_new"] is True
    assert describe_source(Own(ROWS, rows_per_step=2, source="rows"))["source"] == "rows"
    assert {told[name] for name in ("columns", "transform", "on_bad_row")} == {None}


class Reading(InMemory):
    """A source over a data set, as those are that read files."""

    @property
    def dataset(self) -> Any:
        return types.SimpleNamespace(columns=("x", "y"), transform=partial(turned, 1), on_bad_row="skip")


def test_how_a_sources_rows_are_made_is_told() -> None:
    told: Any = describe_source(Reading(ROWS, rows_per_step=2))
    assert told["columns"] == ["x", "y"]
    assert told["on_bad_row"] == "skip"
    assert told["transform"] == Described(with_code=True).value(partial(turned, 1), None)


class Numbers(Dataset[Tensor]):
    """Rows that are made one by one."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Endless(IterableDataset[Tensor]):
    """Rows whose number nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1)])


class Unsized(Endless):
    """Likewise, and it says so."""

    def __len__(self) -> int:
        raise TypeError


def test_a_loader_is_told_by_its_rows_and_order() -> None:
    told: Any = describe_source(DataLoader(Numbers(), batch_size=3, drop_last=True, shuffle=True))
    assert told == {
        "is": "DataLoader",
        "dataset": "tests.train.test_facts_of_data.Numbers",
        "rows": 6,
        "batch_size": 3,
        "drop_last": True,
        "sampler": "torch.utils.data.sampler.RandomSampler",
        "num_workers": 0,
    }
    assert "rows" not in describe_source(DataLoader(Endless()))
    assert "rows" not in describe_source(DataLoader(Unsized()))


def collated(rows: list[Any]) -> Any:
    return default_collate(rows)


class Drawing(TensorDataset):
    """Draws while it makes a row."""


def test_of_tensors_the_content_is_told_and_of_their_workers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(*ROWS)
    told: Any = describe_source(DataLoader(data))
    assert told["content"] == _content_digest([data.tensors])
    assert "num_workers" not in told
    assert describe_source(DataLoader(data, collate_fn=collated))["num_workers"] == 0
    assert describe_source(DataLoader(Drawing(*ROWS)))["num_workers"] == 0
    num_bytes = sum(tensor.nbytes for tensor in ROWS)
    monkeypatch.setattr(identity, "_LARGEST", num_bytes)
    assert "content" in describe_source(DataLoader(data))
    monkeypatch.setattr(identity, "_LARGEST", num_bytes - 1)
    assert "content" not in describe_source(DataLoader(data))


def test_other_data_are_told_by_their_kind_and_number() -> None:
    batches = [ROWS, ROWS]
    assert describe_source(batches) == {"is": "list", "batches": 2, "content": _content_digest(batches)}
    assert describe_source(tuple(batches)) == {"is": "tuple", "batches": 2, "content": _content_digest(batches)}
    assert describe_source(range(3)) == {"is": "range", "batches": 3}
    assert describe_source(iter(batches)) == {"is": "list_iterator"}
    assert describe_source(None) == {"is": "NoneType"}


class Row:
    """An object of somebody's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_the_content_of_batches_is_their_tensors_and_the_rest_each_in_its_place() -> None:
    x, y = torch.arange(3.0), torch.ones(2)
    lineage = Lineage(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    told = [
        _content_digest(batches)
        for batches in (
            [], [(x, y)], [(y, x)], [(x,), (y,)], [(y,), (x,)], [{"a": x, "b": y}], [{"a": y, "b": x}], [(x, y, "s")],
            [(x, y, "t")], [Row(x)], [Row(x + 1)], [x.to_sparse()], [(x + 1).to_sparse()], [Batch((x,), lineage)],
            [Batch((x + 1,), lineage)], [(x,)],
        )
    ]  # fmt: skip
    assert len({*told}) == len(told)
    assert _content_digest([Row(x.clone())]) == _content_digest([Row(x)])
    assert _content_digest([x.to_sparse()]) == _content_digest([x.clone().to_sparse()])
    assert _content_digest([{"b": y, "a": x}]) == _content_digest([{"a": x, "b": y}])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_ragged_rows_are_compared_by_their_content() -> None:
    def ragged(*numbers: float) -> Any:
        return torch.nested.nested_tensor([torch.tensor(numbers), torch.ones(1)])

    assert _content_digest([ragged(1.0, 2.0)]) == _content_digest([ragged(1.0, 2.0)])
    assert _content_digest([ragged(1.0, 2.0)]) != _content_digest([ragged(1.0, 3.0)])
    both = [(ragged(1.0, 2.0), torch.ones(1))]
    assert _content_digest(both) != _content_digest([(ragged(1.0, 3.0), torch.ones(1))])
