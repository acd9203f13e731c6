"""What holds rows in a nest, how many they are and what is kept of them, told by hand for each kind of leaf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from cosmati.core.nest import (
    arrays,
    children,
    clear_rows,
    leaves,
    moved,
    nearest_tensor,
    possible_row_counts,
    row_counts,
    select_rows,
)
from cosmati.errors import BatchError

X = torch.arange(8.0).view(4, 2)
PACKED = pack_sequence([torch.ones(3), torch.ones(2)])


class Named(NamedTuple):
    x: Any
    y: Any


@dataclass
class Held:
    x: Any
    y: Any = None


class Own:
    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class OneSlot:
    __slots__ = "held"  # noqa: PLC0205  (as people write it)

    def __init__(self, held: Any) -> None:
        self.held = held


class Sized:
    def __len__(self) -> int:
        return 6


class Gettable:
    def __getitem__(self, index: Any) -> int:
        raise IndexError(index)


class Movable:
    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: Any) -> Movable:
        self.device = device
        return self


def columns(rows: int, num: int) -> list[Tensor]:
    return [torch.arange(float(rows)) + 10 * i for i in range(num)]


def test_children_are_what_containers_hold_in_order() -> None:
    assert list(children({"a": 1, "b": [2]})) == [1, [2]]
    assert list(children([1, (2,)])) == list(children((1, (2,)))) == list(children(Named(1, (2,)))) == [1, (2,)]
    assert list(children(Held(1, 2))) == [1, 2]
    for leaf in (PACKED, Held, X, "word", 3, None, Own(x=1), np.ones(2)):
        assert list(children(leaf)) == []


def test_leaves_are_what_is_no_container_in_order() -> None:
    nest = {"a": [1, (2, "three")], "b": Held(Named(4, X), None)}
    assert list(leaves(nest)) == [1, 2, "three", 4, X, None]
    assert list(leaves(Held)) == [Held]
    assert list(leaves([])) == []


def test_the_nearest_tensor_is_of_the_highest_level_and_has_rows() -> None:
    near, deep = torch.ones(2), torch.zeros(2)
    assert nearest_tensor([[deep], near]) is near
    assert nearest_tensor([torch.tensor(1.0), {"x": [deep]}, "word"]) is deep
    assert nearest_tensor(near) is near
    assert nearest_tensor([torch.tensor(1.0), "word", [], PACKED]) is None


def test_arrays_are_tensors_and_arrays_with_rows() -> None:
    y = np.ones(3)
    assert [id(one) for one in arrays([X, {"y": y, "t": torch.tensor(1.0), "n": np.ones(()), "w": "word"}, b"b"])] == [
        id(X),
        id(y),
    ]
    assert list(arrays("word")) == []


@pytest.mark.parametrize(
    ("data", "counts", "possible"),
    [
        (X, {4}, {4}),
        (np.ones((3, 2)), {3}, {3}),
        (torch.tensor(1.0), set(), set()),
        (np.ones(()), set(), set()),
        (PACKED, {2}, {2}),
        ((X, torch.ones(3)), {3, 4}, set()),
        ({"x": X, "words": ["a", "b"]}, {4}, {4}),
        ({"x": X, "text": "abc", "n": 3, "f": 1.5, "b": b"xx"}, {4}, {4}),
        (columns(4, 2), {4}, {4}),
        (tuple(columns(4, 3)), {4}, {4}),
        ({"views": columns(4, 2)}, {4}, {2, 4}),
        ({"views": columns(4, 2), "names": ["a", "b"]}, {2}, {2, 4}),
        ({"views": columns(4, 2), "names": ["a", "b", "c", "d"]}, {4}, {2, 4}),
        ({"views": columns(4, 2), "y": torch.ones(2)}, {2}, {2}),
        ({"views": columns(4, 2), "y": torch.ones(4)}, {4}, {4}),
        ({"boxes": [torch.ones(2, 4), torch.ones(5, 4)], "y": torch.ones(2)}, {2}, {2}),
        ({"boxes": [torch.ones(2, 4), torch.ones(5, 4), torch.ones(1, 4)]}, {3}, {3}),
        ([{"x": torch.ones(5)}, {"x": torch.ones(5)}], {5}, {2, 5}),
        ([{"x": torch.ones(5)}, {"x": torch.ones(6)}], {2}, {2}),
        ([{"x": torch.ones(5)}, {"y": torch.ones(6)}], {5, 6}, set()),
        ([{"x": torch.ones(5)}], {5}, {5}),
        (Named(columns(4, 2), torch.ones(4)), {4}, {4}),
        (Named(columns(3, 2), None), {3}, {2, 3}),
        (["a", "b", "c"], {3}, set()),
        ([["a", "b", "c"], ["d", "e", "f"]], {3}, set()),
        ([("a", "b"), ("d", "e", "f")], {2, 3}, set()),
        ([["a", "b", "c"], "d"], {2}, set()),
        ([], {0}, set()),
        ({"a": ["x", "y"], "b": {"c": (1, 2, 3)}}, {2, 3}, set()),
        (Named(["a"], ["b", "c"]), {1, 2}, set()),
        ({"a": 3, "b": "word"}, set(), set()),
        (Own(num_graphs=5, batch_size=7), {5}, set()),
        (Own(batch_size=7, x=X), {7}, set()),
        (Own(batch_size=(6, 2)), {6}, set()),
        (Own(batch_size=(), x=X), {4}, set()),
        (Own(x=X, y=torch.ones(3), z={"deep": np.ones(2)}), {2, 3, 4}, set()),
        (Own(x=torch.tensor(1.0)), set(), set()),
        (Sized(), {6}, set()),
        ({"a": Sized(), "b": "word"}, {6}, set()),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), {2}, {2}),
    ],
)
def test_rows_are_counted_as_by_hand(data: Any, counts: set[int], possible: set[int]) -> None:
    assert (row_counts(data), possible_row_counts(data)) == (counts, possible)


def test_a_nest_that_is_cut_has_to_say_which_of_two_numbers_it_has() -> None:
    views = {"views": columns(4, 2)}
    assert row_counts(views, 4) == {4}, "two rows aren't cut into four parts"
    said = r"\(a dict\) may hold a row in each place, or all rows in each: 2 or 4 rows. Stack.*Batch\(data, Lineage.of"
    with pytest.raises(BatchError, match=said):
        row_counts(views, 2)
    assert row_counts(views | {"names": ["a", "b"]}, 2) == {2}
    assert row_counts(views | {"names": ("a",) * 4, "other": ["x"]}, 2) == {4}
    with pytest.raises(BatchError, match="2 or 4 rows"):
        row_counts(views | {"a": ["x"] * 2, "b": ["y"] * 4}, 2)
    assert row_counts({"x": X}, 3) == {4}, "what can't be cut is counted all the same"
    assert row_counts(views, 3) == {2, 4}
    assert row_counts({"x": torch.ones(0)}, 2) == {0}
    lists = {"views": columns(4, 2), "a": [columns(4, 3), "x"]}
    assert row_counts(lists) == {4}
    assert row_counts({"views": [[torch.ones(4), torch.ones(4)], [torch.ones(4)] * 2]}) == {4}


@pytest.mark.parametrize(
    "of", [lambda i: slice(min(i), max(i) + 1), torch.tensor, lambda i: torch.isin(torch.arange(4), torch.tensor(i))]
)
def test_the_same_rows_are_kept_of_every_kind_of_leaf(of: Any) -> None:
    data = {
        "x": X, "n": X.numpy(), "words": ["a", "b", "c", "d"], "ids": ((1,), (2,), (3,), (4,)), "t": torch.tensor(2.0),
        "s": np.ones(()), "other": ["p", "q"], "word": "abcd", "held": Held(X, 4), "none": None, "kind": Own, "f": len,
        "named": Named(1, X), "boxes": [torch.ones(i + 1) for i in range(4)], "np": np.float32(1), "four": Named(*"ab"),
    }  # fmt: skip
    chosen = [1, 2]
    part = select_rows(data, of(chosen), 4)
    assert part["x"].tolist() == part["n"].tolist() == part["held"].x.tolist() == X[chosen].tolist()
    assert part["named"].y.tolist() == X[chosen].tolist()
    assert (part["words"], part["ids"]) == (["b", "c"], ((2,), (3,)))
    assert [len(box) for box in part["boxes"]] == [2, 3]
    assert isinstance(part["n"], np.ndarray)
    for name in ("t", "s", "other", "word", "none", "kind", "f", "np", "four"):
        assert part[name] is data[name] or part[name] == data[name], name
    assert part["held"].y == 4


def test_rows_are_kept_in_the_order_given_and_repeated() -> None:
    picked = torch.tensor([3, 0, 0])
    assert select_rows({"w": ("a", "b", "c", "d")}, picked, 4) == {"w": ("d", "a", "a")}
    assert select_rows(["a", "b", "c", "d"], slice(0, 4, 2), 4) == ["a", "c"]
    assert select_rows(X.numpy(), picked, 4).tolist() == X[picked].tolist()


def test_a_batch_of_columns_is_cut_within_and_a_list_deeper_by_its_places() -> None:
    two = [["a", "b"], ["c", "d"]]
    assert select_rows(two, slice(0, 1), 2) == [["a"], ["c"]]
    assert select_rows({"deep": two}, slice(0, 1), 2) == {"deep": [["a", "b"]]}
    rows = [{"x": torch.ones(3)}, {"x": torch.ones(4)}]
    assert [len(row["x"]) for row in select_rows(rows, slice(1, 2), 2)] == [4]
    pair = (torch.ones(2, 3), torch.ones(2))
    assert [len(part) for part in select_rows(pair, slice(1, 2), 2)] == [1, 1]


@pytest.mark.parametrize("data", [{"v": [torch.ones(2), torch.ones(2)]}, {"v": ([torch.ones(2)], [torch.ones(2)])}])
def test_as_many_arrays_as_rows_in_each_cannot_be_told_apart(data: Any) -> None:
    with pytest.raises(BatchError, match=r"holds 2 arrays of 2: a row in each place, or all rows in each, can't be"):
        select_rows(data, slice(0, 1), 2)
    with pytest.raises(BatchError, match="holds 2 arrays of 2"):
        clear_rows(data, torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (PACKED, "A PackedSequence"),
        (torch.eye(4).to_sparse(), "A torch.sparse_coo tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "A nested tensor"),
    ],
)
def test_what_is_not_dense_cannot_be_cut(leaf: Any, name: str) -> None:
    for data in (leaf, {"deep": [leaf]}):
        with pytest.raises(BatchError, match=rf"{name} in the batch can't be cut into rows. Pad the rows.*V = 1"):
            select_rows(data, slice(0, 1), 4)


@pytest.mark.parametrize(
    "leaf", [Movable(), Gettable(), Own(x=X), Own(deep=Own(deep=Own(x=[X.numpy()]))), Slotted(X), OneSlot([X])]
)
def test_objects_that_may_hold_rows_are_refused(leaf: Any) -> None:
    with pytest.raises(BatchError, match=rf"\.{type(leaf).__name__} in the batch can't be cut into rows: only tensors"):
        select_rows({"leaf": leaf}, slice(0, 1), 4)


@pytest.mark.parametrize(
    "leaf", [Own(x=torch.tensor(1.0)), Own(), Own(n=[1, "a"], f=len), Slotted(3), Slotted(None), OneSlot("word")]
)
def test_objects_without_rows_are_the_same_for_all_rows(leaf: Any) -> None:
    assert select_rows({"leaf": leaf}, slice(0, 1), 4)["leaf"] is leaf


def test_objects_are_looked_into_four_deep() -> None:
    held: Any = Own(x=X)
    for _ in range(3):
        held = Own(held=held)
    with pytest.raises(BatchError, match="Own in the batch"):
        select_rows([held], slice(0, 1), 4)
    deeper = Own(held=held)
    assert select_rows([deeper], slice(0, 1), 4) == [deeper]


def test_cleared_rows_are_nothing_of_their_own_kind() -> None:
    rows = [torch.ones(2), np.ones(2), [torch.ones(1), 3], "a", b"b", 4, 1.5, [1], (2,), {"k": 1}, {3}, Own()]
    gone = torch.ones(len(rows), dtype=torch.bool)
    found = clear_rows({"rows": rows, "other": ["x"], "t": torch.tensor(3.0), "n": np.float64(2)}, gone)
    assert [type(row) for row in found["rows"][:3]] == [Tensor, np.ndarray, list]
    assert (found["rows"][0].tolist(), found["rows"][1].tolist()) == ([0, 0], [0, 0])
    assert [one if i else one.tolist() for i, one in enumerate(found["rows"][2])] == [[0], 0]
    assert found["rows"][3:] == ["", b"", 0, 0.0, [], (), {}, None, None]
    assert (found["other"], float(found["t"]), found["n"]) == (["x"], 3.0, 2)
    assert rows[0].tolist() == [1, 1]  # type: ignore[attr-defined]


def test_only_rows_that_are_gone_are_cleared() -> None:
    gone = torch.tensor([False, True, False, True])
    data = (X + 1, (X + 1).numpy(), np.array(list("abcd")), torch.ones(4, 1, 2))
    found = clear_rows(data, gone)
    assert found[0].tolist() == found[1].tolist() == ((X + 1) * ~gone[:, None]).tolist()
    assert (found[2].tolist(), found[3].sum((1, 2)).tolist()) == (["a", "", "c", ""], [2, 0, 2, 0])
    assert data[1].tolist() == (X + 1).tolist(), "the batch itself stays whole"
    assert clear_rows([["a", "b"], ["c", "d"]], torch.tensor([True, False])) == [["", "b"], ["", "d"]]


def test_what_moves_itself_is_moved_as_a_copy() -> None:
    own, words = Movable(), ["a"]
    device = torch.device("cpu")
    found = moved({"own": own, "x": X, "w": words}, device)
    assert (found["own"].device, own.device, found["own"] is own) == (device, None, False)
    assert (found["x"] is X, found["w"]) == (True, words)


def test_a_mapping_that_moves_itself_is_moved_item_by_item() -> None:
    class Encoding(dict[str, Any]):
        def to(self, device: Any) -> None:
            raise AssertionError(device)

    assert moved(Encoding(x=X), torch.device("cpu"))["x"] is X


def test_a_generator_of_rows_is_no_container() -> None:
    def rows() -> Iterator[int]:
        yield 1

    one = rows()
    assert list(leaves(one)) == [one]
    assert row_counts(one) == set()
