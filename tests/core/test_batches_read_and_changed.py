"""A batch's input, target, rows and tokens are found by the rules for its kind, and a changed batch keeps the rest."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from cosmati.core.batch import (
    TOMBSTONE,
    Batch,
    Lineage,
    bury,
    count_rows,
    count_rows_and_tokens,
    first_tensor,
    input_of,
    iterate_tensors,
    kind_of_input,
    map_tensors,
    target_of,
)
from cosmati.errors import BatchError

X, Y = torch.arange(8).view(4, 2), torch.arange(4)
PACKED = pack_sequence([torch.ones(3), torch.ones(2)])


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Held:
    image: Any
    label: Any


def lineage(num_rows: int = 4) -> Lineage:
    return Lineage(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))


INPUTS = ("input", "inputs", "x", "image", "images", "input_ids", "tokens", "pixel_values")
TARGETS = ("target", "targets", "y", "label", "labels")


@pytest.mark.parametrize(("names", "read"), [(INPUTS, input_of), (TARGETS, target_of)])
def test_the_first_known_name_is_read_of_mappings_and_of_attributes(names: tuple[str, ...], read: Any) -> None:
    for first, name in enumerate(names):
        held = {other: i for i, other in reversed(list(enumerate(names))) if i >= first}
        for data in (held, UserDict(held), SimpleNamespace(**held)):
            assert read(data) == first, name
    word = "input" if read is input_of else "target"
    for nothing in ({"z": 1}, SimpleNamespace(z=1), 3, {}):
        with pytest.raises(
            BatchError, match=rf"No {word} in a batch of type .*Use a tuple \(input, target\), or a f.*'"
        ):
            read(nothing)


def test_places_of_lists_are_read_and_names_of_named_tuples() -> None:
    for data in ((1, 2, 3), [1, 2, 3]):
        assert (input_of(data), target_of(data)) == (1, 2)
    assert input_of((1,)) == 1
    with pytest.raises(BatchError, match="No target in a batch of type tuple"):
        target_of((1,))
    with pytest.raises(BatchError, match="No input in a batch of type list"):
        input_of([])
    turned = NamedTuple("turned", [("y", int), ("x", int)])(1, 2)  # type: ignore[misc]
    assert (input_of(turned), target_of(turned)) == (2, 1)

    class Attributed(dict[str, int]):
        x = 5

    with pytest.raises(BatchError, match="No input"):
        input_of(Attributed(z=1))


@pytest.mark.parametrize(
    "data", [(1, 2), [1, 2], Pair(1, 2), Held(1, 2), {"x": 1, "y": 2}, UserDict({"x": 1, "y": 2})], ids=repr
)
def test_what_is_replaced_is_replaced_in_a_copy(data: Any) -> None:
    batch = Batch(data, lineage(), 3, 2)
    other = lineage()
    found = batch.replace(lineage=other, target=7, input=6)
    assert (found.input, found.target, type(found.data)) == (6, 7, type(data))
    assert (found.class_id, found.band, found.lineage is other) == (3, 2, True)
    assert (batch.input, batch.target) == (1, 2)
    same = batch.replace(target=7)
    assert (same.input, same.target, same.lineage is batch.lineage) == (1, 7, True)


def test_everything_that_is_made_of_a_batch_keeps_its_class_and_band() -> None:
    batch = Batch((X, Y), lineage(), 3, 2)
    gone = torch.tensor([False, True, False, False])
    for made, rows in ((batch.select(slice(1, 3)), [1, 2]), (bury(batch, gone), [0, TOMBSTONE, 2, 3])):
        assert (made.class_id, made.band, made.lineage.row_ids.tolist()) == (3, 2, rows)
    assert batch.select(torch.tensor([3, 1])).data[0].tolist() == [[6, 7], [2, 3]]
    assert bury(batch, gone).data[1].tolist() == [0, 0, 2, 3]
    assert bury(batch, gone).present is not None
    moved = batch.to(torch.device("cpu"))
    assert (moved.class_id, moved.band, moved.lineage is batch.lineage) == (3, 2, True)
    assert (Batch(X, lineage()).class_id, Batch(X, lineage()).band, batch.num_rows) == (None, 0, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.band = 1  # type: ignore[misc]
    assert not hasattr(batch, "__dict__")


def test_rows_that_are_there_are_told_only_where_some_are_not() -> None:
    assert Batch(X, lineage()).present is None
    ids = torch.tensor([TOMBSTONE, 0])
    present = Batch(X[:2], Lineage(ids, ids)).present
    assert present is not None
    assert present.tolist() == [False, True]


def test_classes_are_numbered_by_the_runs_names_in_the_batch_too() -> None:
    named = Lineage(torch.arange(2), torch.tensor([1, 1]), class_names=("a", "b"))
    found = Batch(X[:2], named, 1, 2).numbered_by(("b", "a"))
    assert (found.class_id, type(found.class_id), found.band) == (0, int, 2)
    assert found.lineage.class_ids.tolist() == [0, 0]
    assert found.data.tolist() == X[:2].tolist()
    assert Batch(X[:2], named).numbered_by(("b", "a")).class_id is None
    for same in (Batch(X[:2], named, 1), Batch(X, lineage(), 1)):
        assert same.numbered_by(("a", "b")) is same
    with pytest.raises(BatchError, match="Rows are of b"):
        Batch(X[:2], named, 1).numbered_by(("a",))


@pytest.mark.parametrize("wrong", [True, "a", 1.0, torch.tensor(1)])
def test_a_class_id_is_an_integer(wrong: Any) -> None:
    with pytest.raises(BatchError, match=r"Batch.class_id = .* is no id. Give an int"):
        Batch(X, lineage(), wrong).check()


def test_lineage_and_data_have_to_be_of_as_many_rows() -> None:
    for fine in (None, 2, np.int64(2)):
        Batch((X, Y), lineage(), fine).check()  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"data have 4 rows, and its lineage 3: some would be left out.*for each row"):
        Batch((X, Y), lineage(3)).check()
    with pytest.raises(BatchError, match="data have 4 rows, and its lineage 5"):
        Batch((X, Y), Lineage.of_rows(0, 5)).check()
    Batch((X, torch.ones(3)), lineage(7)).check()
    columns = {"views": [torch.ones(4), torch.ones(4)]}
    for num_rows in (2, 4):
        Batch(columns, lineage(num_rows)).check()
    with pytest.raises(BatchError, match="its lineage 3"):
        Batch(columns, lineage(3)).check()
    broken = Lineage(torch.arange(4), torch.ones(4))
    with pytest.raises(BatchError, match=r"Lineage.class_ids is torch.float32"):
        Batch(X, broken).check()
    Batch(X, dataclasses.replace(broken, is_known=False)).check()


def test_every_tensor_of_a_nest_is_visited_in_order_and_the_rest_left() -> None:
    data = {"a": [X, "word"], "b": Held(Y, 3), "c": Pair(X, None), "n": np.ones(2)}
    assert [one is other for one, other in zip(iterate_tensors(data), (X, Y, X), strict=True)] == [True] * 3
    found = map_tensors(lambda tensor: tensor + 1, data)
    assert found["a"][0].tolist() == (X + 1).tolist()
    assert (found["a"][1], found["b"].label, found["c"].y, found["n"] is data["n"]) == ("word", 3, None, True)
    assert list(iterate_tensors("word")) == []


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (X, X),
        ([[X], Y], X),
        ({"a": {"b": (X,)}, "c": Y}, X),
        (["word", X], X),
        ([[], X], X),
        ({}, None),
        ({"a": {}, "b": X}, X),
        ((torch.tensor(1.0), X), X),
        (torch.tensor(1.0), None),
        (Held("word", X), X),
        ([PACKED, X], X),
        (PACKED, None),
        (np.ones(3), None),
    ],
)
def test_the_first_tensor_is_one_that_holds_rows(data: Any, found: Tensor | None) -> None:
    assert first_tensor(data) is found


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        (X, (4, 8)),
        ((X, Y), (4, 8)),
        (X.float(), (4, 4)),
        (X.view(2, 2, 2), (2, 2)),
        (Y, (4, 4)),
        ({"x": X}, (4, 8)),
        ([[X], Y], (4, 8)),
        ({"x": [X, X]}, (4, 8)),
        ({"x": [torch.ones(1, 2), torch.ones(3, 2), torch.ones(2, 2)]}, (3, 3)),
        (([X[:1], X[:2], X[:3]], Y[:3]), (3, 3)),
        ({"x": [X, torch.ones(3)], "y": Y[:1], "z": torch.ones(5)}, (4, 4)),
        (torch.tensor(3.0), (1, 1)),
        ({"t": torch.tensor(3.0), "w": ["a", "b"]}, (1, 1)),
        (["a", "b", "c"], (3, 3)),
        (np.ones((3, 2)), (3, 3)),
    ],
)
def test_rows_and_tokens_are_counted_as_by_hand(data: Any, counts: tuple[int, int]) -> None:
    assert count_rows_and_tokens(data) == counts
    assert Batch(data, lineage()).num_tokens == counts[1]


def test_what_has_no_number_of_rows_is_refused() -> None:
    assert count_rows((X, Y)) == 4
    for data, lengths in (((X, Y[:3]), "3, 4"), ({"n": 3}, "")):
        with pytest.raises(
            BatchError, match=rf"share their first dimension; found lengths \[{lengths}\] in a {type(data).__name__}"
        ):
            count_rows(data)
    views = {"views": [torch.ones(4), torch.ones(4)]}
    assert count_rows(views) == count_rows(views, 4) == 4
    with pytest.raises(BatchError, match="2 or 4 rows"):
        count_rows(views, 2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (torch.ones(4, 3, 2, 2), "images"),
        (torch.ones(4, 3, 2, 2).byte(), "images"),
        (X, "tokens"),
        (X.bool(), "tokens"),
        (X.half(), "features"),
        (Y, None),
        (torch.ones(4, 3, 2), None),
        (torch.ones(1, 1, 1, 1, 1), None),
        ("word", None),
    ],
)
def test_the_input_is_told_by_its_first_tensor(data: Any, kind: str | None) -> None:
    assert kind_of_input((data, Y) if kind else data) == kind
