"""Batches with a tensor for each row, cut by row, or refused where columns may be meant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from cosmati.core.batch import Batch, Lineage, bury, count_rows, count_rows_and_tokens
from cosmati.core.nest import select_rows
from cosmati.errors import BatchError
from cosmati.train.config import RunConfig
from cosmati.train.cutting import refuse_uncut
from cosmati.train.trainer import Trainer

SOUND = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(8)]
CLASSES = [0, 1, 2, 0, 1, 2, 0, 1]
VIEWS = [torch.arange(16.0).view(16, 1), -torch.arange(16.0).view(16, 1)]


def _boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [
        {"boxes": torch.full((n, 4), float(i)), "label": torch.tensor([CLASSES[i]] * n)} for i, n in enumerate(counts)
    ]


ROWS: dict[str, tuple[Any, Callable[[Any], list[tuple[Tensor, int]]]]] = {
    "dictionary": ({"audio": SOUND, "t": CLASSES}, lambda d: list(zip(d["audio"], d["t"], strict=True))),
    "tensor beside": (
        {"audio": tuple(SOUND), "t": torch.tensor(CLASSES)},
        lambda d: list(zip(d["audio"], d["t"].tolist(), strict=True)),
    ),
    "detection": (
        (tuple(SOUND), tuple(_boxes(1, 2, 3, 1, 2, 1, 5, 1))),
        lambda d: [(x, int(y["label"][0])) for x, y in zip(*d, strict=True)],
    ),
    "detection with plain dictionaries": (
        (SOUND, [{"label": label} for label in CLASSES]),
        lambda d: [(x, y["label"]) for x, y in zip(*d, strict=True)],
    ),
    "arrays": (
        {"audio": [sound.numpy() for sound in SOUND], "t": np.array(CLASSES)},
        lambda d: [(torch.from_numpy(x), int(t)) for x, t in zip(d["audio"], d["t"], strict=True)],
    ),
    "stated": (
        Batch(list(zip(SOUND, CLASSES, strict=True)), Lineage.of_rows(0, 8)),
        lambda d: [(x, t) for x, t in d],
    ),
}  # fmt: skip


def _step(data: Any, read: Callable[[Any], list[tuple[Tensor, int]]], num_microbatches: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def loss(model: nn.Module, data: Any) -> Tensor:
        found = [F.cross_entropy(model(x).mean(0), torch.tensor(t)) for x, t in read(data)]
        return torch.stack(found).mean()

    config = RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1)
    Trainer(model, loss, [data], optimizers=[torch.optim.SGD(model.parameters(), lr=1.0)], config=config).fit()
    return list(model.parameters())


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_in_lists_give_the_gradient_of_the_whole(kind: str, num_microbatches: int) -> None:
    data, read = ROWS[kind]
    whole = _step(data, read, 1)
    for one, other in zip(_step(copy.copy(data), read, num_microbatches), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", sorted(set(ROWS) - {"stated"}))
def test_rows_in_lists_are_counted_for_the_clock(kind: str) -> None:
    data, _ = ROWS[kind]
    assert (count_rows(data), count_rows_and_tokens(data)) == (8, (8, 8))


COLUMNS: dict[str, Any] = {
    "two views": {"views": VIEWS, "y": torch.arange(16)},
    "collated views": default_collate([((VIEWS[0][i], VIEWS[1][i]), i) for i in range(16)]),
    "views and masks": ((VIEWS[0], VIEWS[1]), (VIEWS[1], VIEWS[0])),
    "alone": {"views": VIEWS},
    "columns": list(VIEWS),
    "with strings": {"views": VIEWS, "name": [str(i) for i in range(16)]},
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_in_lists_are_cut_as_columns(kind: str) -> None:
    data = COLUMNS[kind]
    assert count_rows(data) == count_rows(data, 4) == count_rows_and_tokens(data)[0] == 16
    part = Batch(data, Lineage.of_rows(0, 16)).select(slice(4, 8)).data
    views = part if isinstance(data, list) and isinstance(part[0], Tensor) else part["views" if "views" in part else 0]
    assert [view.flatten().tolist() for view in views] == [[4, 5, 6, 7], [-4, -5, -6, -7]]


UNCLEAR: dict[str, Any] = {
    "alone": {"audio": SOUND},
    "two lists": (SOUND, [-sound for sound in SOUND]),
    "both are named": {"audio": SOUND, "t": CLASSES, "channels": ["a", "b", "c", "d"]},
    "nothing collated": list(zip([x[:, 0] for x in SOUND], CLASSES, strict=True)),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_where_lists_may_be_rows_or_columns_they_are_refused_or_stated(kind: str) -> None:
    data = UNCLEAR[kind]
    with pytest.raises(BatchError, match=r"4 or 8 rows\. Stack .*Batch\(data, Lineage\.of_rows\("):
        count_rows(data, 4)
    with pytest.raises(BatchError, match="4 or 8 rows"):
        _step(data, lambda data: [], 4)
    assert count_rows(data) == 4, "with V = 1, nothing is cut"
    assert count_rows(data, 8) == 8, "four rows aren't cut in eight"
    batch = Batch(data, Lineage.of_rows(0, 8))
    part = batch.select(slice(2, 4)).data
    kept = part["audio"] if isinstance(part, dict) else [row[0] for row in part] if kind[0] == "n" else part[0]
    assert len(kept) == 2
    assert (kept[0] is SOUND[2]) == (kind != "nothing collated")
    rows = Batch(data, Lineage.of_rows(0, 4)).select(slice(0, 1)).data
    assert len(rows["audio"] if isinstance(rows, dict) else rows) == len(
        data["audio"] if isinstance(data, dict) else data
    )


def test_as_many_columns_as_rows_are_refused_when_they_are_cut() -> None:
    data = {"views": [torch.zeros(2, 3), torch.zeros(2, 3)], "y": torch.zeros(2)}
    assert count_rows(data, 2) == 2
    with pytest.raises(BatchError, match=r"list in the batch holds 2 arrays of 2: .*Stack rows"):
        select_rows(data, slice(0, 1), 2)


def test_what_is_unclear_is_not_cut_where_memory_is_short_either() -> None:
    batch = Batch(UNCLEAR["alone"], Lineage.of_rows(0, 4))
    with pytest.raises(RuntimeError, match="4 or 8 rows"):
        refuse_uncut([batch], 1, 3, "too much")


def test_a_buried_row_of_a_list_is_empty_and_of_its_shape() -> None:
    data = {"audio": SOUND, "t": torch.tensor(CLASSES), "boxes": _boxes(1, 2, 3, 1, 2, 1, 5, 1), "np": [np.ones(3)] * 8}
    gone = torch.arange(8) == 2
    buried = bury(Batch(data, Lineage.of_rows(0, 8)), gone).data
    for i in range(8):
        assert torch.equal(buried["audio"][i], SOUND[i] * (not gone[i]))
        assert buried["boxes"][i]["boxes"].shape == data["boxes"][i]["boxes"].shape  # type: ignore[call-overload, index]
        assert bool(buried["np"][i].any()) == (not gone[i])
    assert float(buried["boxes"][2]["boxes"].sum()) == 0
    assert float(buried["boxes"][1]["boxes"].sum()) == 8
    texts = (["a", "b"], ["c", "d"])
    assert bury(Batch(texts, Lineage.of_rows(0, 2)), torch.tensor([True, False])).data == (["", "b"], ["", "d"])


class Plain:
    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "node",
    [
        SimpleNamespace(x=VIEWS[0]),
        Plain(x=VIEWS[0].numpy()),
        Plain(own={"x": [VIEWS[0]]}),
        Plain(own=Plain(x=VIEWS[0])),
        Slotted(VIEWS[0]),
    ],
)
def test_objects_that_hold_arrays_are_refused_and_not_given_whole_to_each(node: Any) -> None:
    for data in (node, {"x": VIEWS[0], "meta": node}):
        with pytest.raises(
            BatchError, match=rf"{type(node).__name__} in the batch can't be cut .*dataclasses\. Take V"
        ):
            select_rows(data, slice(0, 4), 16)


def test_objects_without_arrays_are_the_same_for_all_rows() -> None:
    same = {"a": SimpleNamespace(scale=torch.tensor(2.0), name="a"), "b": len, "c": Plain(own=[1, 2])}
    part = select_rows(same | {"x": VIEWS[0]}, slice(0, 4), 16)
    assert all(part[name] is same[name] for name in same)
