"""An evaluation is its four arguments and nothing else; what it has seen change in place is its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.errors import DataError
from cosmati.train.evaluation import Evaluation, Stateful
from cosmati.train.written import WRITTEN, WrittenHere


def first(model: nn.Module, data: Data) -> Tensor:
    return model(data[0]).sum()


def second(model: nn.Module, data: Data) -> Tensor:
    return model(data[0]).mean()


class Largest:
    """A metric that isn't a mean."""

    def __init__(self) -> None:
        self.value = -1.0

    def reset(self) -> None:
        self.value = -1.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.value = max(self.value, float(output.max()))

    def compute(self) -> float:
        return self.value


class Again:
    """Gives the same tensors each time, and is no list."""

    def __init__(self, batches: list[Data]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Data]:
        return iter(self.batches)


def rows() -> list[Data]:
    return [(torch.full((2, 3), float(i)), torch.zeros(2)) for i in range(3)]


def test_its_arguments_are_the_data_the_metrics_their_number_and_the_classes() -> None:
    data = rows()
    given = Evaluation(data, {"first": first}, 2, ("a",))
    assert (given.data, given.metrics, given.num_batches, given.classes) == (data, {"first": first}, 2, ("a",))
    with pytest.raises(TypeError, match=r"has no 'colour'\. It has data, metrics, num_batches, classes\.$"):
        Evaluation(data, colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no '_written'"):
        Evaluation(data, _written=WrittenHere())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional arguments"):
        Evaluation(data, {}, 2, (), WrittenHere())  # type: ignore[call-arg]


def test_alone_it_measures_nothing_on_all_batches_for_nobody() -> None:
    plain = Evaluation(rows())
    assert (plain.metrics, plain.num_batches, plain.classes) == ({}, None, ())
    assert len(list(plain.read())) == 3
    assert plain.by_name() == {}


def test_what_was_seen_is_no_part_of_its_value_nor_of_a_copy() -> None:
    data, named = rows(), {"first": first}
    one, like = Evaluation(data, named), Evaluation(data, named)
    assert one == like != replace(one, num_batches=1)
    assert "written" not in repr(one)
    assert f"{replace(one, data=[], metrics={})!r}" == "Evaluation(data=[], metrics={}, num_batches=None, classes=())"
    copied = replace(one, num_batches=1)
    assert copied.num_batches == 1
    assert len({id(each._written) for each in (one, like, copied)}) == 3


@pytest.mark.parametrize(("num_batches", "seen"), [(None, [0, 1, 2]), (1, [0]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_the_first_batches_are_read_each_time(num_batches: int | None, seen: list[int]) -> None:
    given = Evaluation(rows(), num_batches=num_batches)
    for _ in range(2):
        assert [int(batch[0][0, 0]) for batch in given.read()] == seen


def test_data_that_can_be_read_once_are_refused() -> None:
    with pytest.raises(DataError, match=r"A list_iterator can be read only once.*Give list\(\.\.\.\)"):
        Evaluation(iter(rows()))


def test_metrics_are_called_as_they_are_given() -> None:
    largest, own = Largest(), {"a": first, "b": second}
    assert Evaluation(rows(), own).by_name() == own
    assert list(Evaluation(rows(), [second, first]).by_name().items()) == [("second", second), ("first", first)]
    assert Evaluation(rows(), first).by_name() == {"first": first}
    assert Evaluation(rows(), largest).by_name() == {"Largest": largest}
    fed = Stateful(largest)
    assert Evaluation(rows(), [fed, first]).by_name() == {"Largest": fed, "first": first}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([first, second, first], r"no name of their own: first\. Name them"),
        ([Largest(), Stateful(Largest())], r"no name of their own: Largest\. Name them"),
        ([lambda model, data: 0.0], r"no name of their own: <lambda>\. Name them"),
        ({"step": first}, r"A metric is called 'step'.*\{'mean step': \.\.\.\}"),
        ({"first": first, "rows": second}, r"A metric is called 'rows'"),
    ],
)
def test_a_metric_without_a_name_of_its_own_is_refused(metrics: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Evaluation(rows(), metrics)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_of_a_list_that_changes_is_refused_at_once(kind: Any) -> None:
    data = kind(rows())
    given = Evaluation(data)
    with given.unchanged(data[0], 0):
        data[0][0].sum()
    with (
        pytest.raises(DataError, match=r"Batch 2 of the data.*changed in place.*ReLU without inplace"),
        given.unchanged(data[2], 2),
    ):
        data[2][0].add_(1)


def test_a_batch_that_others_give_is_refused_where_it_comes_again_changed() -> None:
    batches = rows()
    given = Evaluation(Again(batches))
    with given.unchanged(batches[1], 1):
        batches[1][0].add_(1)
    assert [WRITTEN.has_part_of(batch) for batch in batches] == [False, True, False]
    measured = []
    for reader in (given, Evaluation(Again(batches))):
        with pytest.raises(DataError, match=re.escape("Batch 7 of the data")), reader.unchanged(batches[1], 7):
            measured.append(7)
    assert measured == []
    batches[1][0].zero_()
    with given.unchanged(batches[1], 1):
        measured.append(1)
    assert measured == [1]
