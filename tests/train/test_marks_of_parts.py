"""A mark tells each change of a batch's tensors and arrays, wherever they lie, and nothing else."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmati.core.batch import Batch, Lineage
from cosmati.errors import DataError
from cosmati.train import marks
from cosmati.train.marks import Mark, Repeated, StepRows, _is_it, parts_of, state_of, with_own_containers

ONE, TWO = torch.ones(2), torch.zeros(3)


class Holder:
    """An object of somebody's own."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Reading(Mapping[str, Any]):
    """A mapping that is no dictionary."""

    def __init__(self, **held: Any) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Frame:
    """As a data frame: makes an array over a column each time that it's asked."""

    def __init__(self, **columns: Any) -> None:
        self.held = columns

    @property
    def columns(self) -> list[str]:
        return [*self.held]

    def __getitem__(self, name: str) -> Any:
        return self.held[name][:]

    def to_numpy(self) -> None:
        raise AssertionError("columns are looked at")


class Series:
    """As a column of one."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return self.values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values[:]


def of_batch(data: Any) -> Batch:
    return Batch(data, Lineage.of_rows(0, 2))


def test_parts_are_told_by_the_way_to_them() -> None:
    array = np.ones(2)
    assert parts_of(ONE) == {(): ONE}
    assert parts_of((ONE, TWO)) == {0: ONE, 1: TWO}
    assert parts_of([ONE]) == {0: ONE}
    assert parts_of({"a": ONE, 3: TWO}) == {"a": ONE, 3: TWO}
    assert parts_of(of_batch([ONE, {"b": TWO}])) == {0: ONE, (1, "b"): TWO}
    assert parts_of([1, "a", [ONE, (TWO, 2.5)], array]) == {(2, 0): ONE, (2, 1, 0): TWO, 3: array}
    assert parts_of(Reading(x=ONE, y=[TWO])) == {"x": ONE, ("y", 0): TWO}
    assert parts_of(Holder(x=ONE, n=3, deep=Holder(y=TWO, s="a"))) == {
        ("is",): {"n": 3}, "x": ONE, ("deep", "is"): {"s": "a"}, ("deep", "y"): TWO,
    }  # fmt: skip
    column = np.zeros(2)
    found = parts_of(Frame(a=array, b=column))
    assert {*found} == {(0, "a"), (1, "b")}
    assert {*parts_of([Frame(a=array)])} == {(0, (0, "a"))}
    assert found[0, "a"].base is array
    assert parts_of(Series(column))["values"].base is column
    assert {*parts_of([])} == {*parts_of(3)} - {("is",)} == set()


def test_what_is_called_or_plain_or_deep_is_not_looked_into() -> None:
    assert parts_of([Holder, len, ["a"] * 5000, 3, None]) == {}
    looped: list[Any] = [ONE, None]
    looped[1] = looped
    assert parts_of(looped) == {0: ONE}
    assert len(parts_of([ONE, [TWO] * 3000])) == 2000
    assert len(parts_of([[TWO] * 2, 1])) == 2


def test_a_tuple_of_tensors_is_the_same_by_itself() -> None:
    pair = (torch.ones(2), torch.zeros(2))
    mark = Mark(of_batch(pair))
    assert mark.is_same(pair)
    assert mark.is_same(of_batch(pair))
    assert mark.is_same((pair[0], pair[1]))
    assert not mark.is_same((pair[1], pair[0]))
    assert not mark.is_same((*pair, ONE))
    assert not mark.is_same((pair[0],))
    assert mark.changed_in(of_batch(pair)) == []
    pair[1].add_(1)
    assert not mark.is_same(pair)
    assert [part is pair[1] for part in mark.changed_in(pair)] == [True]
    assert mark.has_changed(pair)


def test_what_stands_where_something_has_changed_is_told() -> None:
    first, second, other = torch.ones(2), np.ones(2), torch.full((2,), 5.0)
    data = {"a": first, "b": second, "c": torch.zeros(1)}
    mark = Mark(data)
    data["a"] = other
    second[0] = 3
    data["d"] = torch.zeros(1)
    found = mark.changed_in(data)
    assert len(found) == 2
    assert found[0] is other
    assert found[1] is second
    assert mark.changed_in({}) == [None] * 3
    assert not Mark({"a": first}).has_changed({"a": torch.ones(2)})
    assert Mark({"a": first}).changed_in([first]) == [None]


def test_fields_beside_tensors_make_another_batch_and_no_change() -> None:
    holder = Holder(x=ONE, n=1)
    mark = Mark([holder])
    holder.n = 2  # type: ignore[attr-defined]
    assert not mark.is_same([holder])
    assert mark.changed_in([holder]) == []


def test_columns_are_the_same_through_other_arrays() -> None:
    column = np.ones(3)
    mark = Mark(Frame(a=column))
    assert mark.is_same(Frame(a=column))
    column[1] = 2
    assert mark.has_changed(Frame(a=column))
    assert not mark.is_same(Frame(a=column))


def test_arrays_of_one_state_are_one_where_form_and_kind_agree() -> None:
    array = np.zeros(4, dtype=np.int32)
    assert _is_it(array, array)
    assert _is_it(np.zeros(4, dtype=np.int32), array)
    assert not _is_it(np.zeros((2, 2), dtype=np.int32), array)
    assert not _is_it(np.zeros(4, dtype=np.float32), array)
    assert not _is_it(ONE.clone(), ONE)
    assert not _is_it(np.ones(2), ONE)
    assert not _is_it(ONE, np.ones(2))
    assert _is_it(ONE, ONE)
    assert not Mark([array]).is_same([array.view(np.float32)])
    assert Mark([array]).is_same([array.copy()])


def test_the_state_of_a_part() -> None:
    counted = torch.zeros(2)
    assert state_of(counted) == 0
    counted.add_(1)
    assert state_of(counted) == 1
    with torch.inference_mode():
        assert state_of(torch.zeros(2)) is None
    assert state_of("text") == "text"
    assert state_of(np.arange(3, dtype=np.uint8)) == b"\0\1\2"
    assert state_of(np.arange(8, dtype=np.uint8).reshape(2, 4)[:, ::2]) == b"\0\2\4\6"
    objects = np.array([[1], "a"], dtype=object)
    assert state_of(objects) == state_of(np.array([[1], "a"], dtype=object)) != state_of(np.array([[2], "a"], object))


@pytest.mark.parametrize("num_bytes", [1 << 16, (1 << 16) + 1, (1 << 16) + 32767, 1 << 17, (1 << 18) + 5])
def test_a_large_arrays_state_follows_from_each_of_its_bytes(num_bytes: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    state = state_of(array)
    assert isinstance(state, bytes)
    assert state == state_of(array.copy())
    if num_bytes == 1 << 16:
        assert state == array.tobytes()
    else:
        rest = num_bytes % (4 * 4096)
        assert len(state) == 8 * 4096 + rest
        assert state.endswith(bytes(array[num_bytes - rest :]))
    for place in (0, 7, num_bytes // 2, num_bytes - 1):
        array[place] ^= 1
        assert state_of(array) != state
        array[place] ^= 1


@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "uint8"])
@pytest.mark.parametrize("axis", [0, 1])
def test_another_order_of_rows_or_columns_is_a_change(kind: str, axis: int) -> None:
    # Signs and small whole numbers have zeros in most of their bits.
    array = np.random.default_rng(0).choice([-1, 1], (4000, 96)).astype(kind)
    assert array.nbytes > 1 << 16
    mark = Mark([array])
    array[:] = np.roll(array, 1, axis)
    assert mark.has_changed([array])
    array[:] = np.roll(array, -1, axis)
    assert not mark.has_changed([array])
    array[:] = np.flip(array, axis)
    assert mark.has_changed([array])


@pytest.mark.parametrize("distance", [1, 2, 64, 300])
@pytest.mark.parametrize("pair", [(1.0, -1.0), (1.0, 2.0), (0.0, 1.0)])
def test_two_values_that_change_places_are_a_change(pair: tuple[float, float], distance: int) -> None:
    array = np.zeros(1 << 21)
    one, other = pair
    for first in range(0, 8 * distance, 2 * distance):
        array[first], array[first + distance] = one, other
        state = state_of(array)
        array[first], array[first + distance] = other, one
        assert state_of(array) != state


def test_two_pairs_that_change_places_against_each_other_are_a_change() -> None:
    array = np.tile([1.0, 2.0, 2.0, 1.0], 1 << 15)
    state = state_of(array)
    array[:] = np.tile([2.0, 1.0, 1.0, 2.0], 1 << 15)
    assert state_of(array) != state


@dataclass
class Rows:
    x: Tensor
    names: list[str]


NESTS: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(2), torch.zeros(2)],
    "dict": lambda: {"x": torch.ones(2)},
    "tuple": lambda: (torch.ones(2),),
}


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("name", NESTS)
def test_containers_are_ones_own_and_tensors_the_same(name: str, is_batch: bool) -> None:
    nest = NESTS[name]()
    given = Batch(nest, Lineage.of_rows(0, 2), 3, 5) if is_batch else nest
    made = with_own_containers(given)
    inner = made.data if is_batch else made
    assert type(inner) is type(nest)
    assert parts_of(inner).keys() == parts_of(nest).keys()
    assert all(parts_of(inner)[path] is part for path, part in parts_of(nest).items())
    assert (inner is nest) <= isinstance(nest, tuple)
    if is_batch:
        assert (made.lineage, made.class_id, made.band) == (given.lineage, 3, 5)


def test_each_pass_has_containers_of_its_own_until_a_row_is_changed() -> None:
    batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
    repeated = Repeated(iter(batches))
    first = repeated.given_to("The evaluation")
    first[0]["more"] = 1
    del first[1]["x"]
    batches[0]["x"] = torch.full((2,), 9.0)
    second = repeated.given_to("The evaluation")
    assert [{*one} for one in second] == [{"x"}, {"x"}]
    assert second[0]["x"].tolist() == [1, 1]
    second[1]["x"].add_(1)
    with pytest.raises(DataError, match=r"^The next pass would read other rows than were given: a loss"):
        repeated.given_to("The next pass")


def test_a_steps_rows_are_watched_whole_or_each_microbatch() -> None:
    whole = [torch.ones(2), torch.zeros(2)]
    one = StepRows(whole)
    assert (one.have_changed(), one.changed()) == (False, [])
    whole[1].add_(1)
    assert one.have_changed()
    assert [part is whole[1] for part in one.changed()] == [True]
    parts = [torch.ones(2), torch.ones(2)]
    several = StepRows([of_batch((part,)) for part in parts])
    assert not several.have_changed()
    parts[0].add_(1)
    assert several.have_changed()
    parts[1].add_(1)
    assert [part is own for part, own in zip(several.changed(), parts, strict=True)] == [True, True]
    single = of_batch((torch.ones(1),))
    watched = StepRows(single)
    single.data[0].add_(1)
    assert watched.changed() == [single.data[0]]
    assert not StepRows([]).have_changed()


def test_no_more_parts_than_are_looked_at_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_MAX_PARTS", 3)
    pair, three = [[torch.ones(1)] * 2, 1], [[torch.ones(1)] * 3, 1]
    assert Mark(pair).is_same(pair)
    assert not Mark(three).is_same(three)
    assert not Mark(three).has_changed(three)


def test_a_namespace_is_looked_into() -> None:
    held = types.SimpleNamespace(x=torch.ones(1), n=1)
    mark = Mark(held)
    assert mark.is_same(held)
    held.x.add_(1)
    assert mark.has_changed(held)


def test_a_tuple_of_other_things_is_looked_into() -> None:
    within = torch.ones(1)
    data = (ONE, [within])
    mark = Mark(data)
    assert mark.is_same(data)
    within.add_(1)
    assert mark.has_changed(data)
