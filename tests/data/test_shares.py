"""Shares of classes: what is asked for is what comes, however little it is."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cosmati.data.shares import Span, repeats_of
from cosmati.data.streaming import StreamingDataset
from tests.data.shard_files import write_data_set

NUM_ROWS = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = {"open/big": [NUM_ROWS], "open/thin": [NUM_ROWS]}
    return write_data_set(tmp_path_factory.mktemp("shares"), classes)


@pytest.mark.parametrize(
    ("repeats", "due"),
    [(0.0004, 4), (Fraction(1, 2500), 4), (0.0006, 6), (2.0004, 20_004), (2.5, 25_000), (Decimal("0.0003"), 3)],
)
def test_a_thin_class_comes_as_often_as_is_asked(folder: Path, repeats: float, due: int) -> None:
    data = StreamingDataset(folder, repeats={"open/thin": repeats})
    assert len(data) == NUM_ROWS + due
    assert np.bincount(data.locate(range(len(data))).sources).tolist() == [NUM_ROWS, due]


def test_a_thin_class_has_its_share_of_a_curriculum(folder: Path) -> None:
    data = StreamingDataset(folder, curriculum=[Span({"open/big": 0.9996, "open/thin": 0.0004})])
    assert np.bincount(data.locate(range(25_000)).sources).tolist() == [24_990, 10]


def test_a_float_is_the_simple_fraction_that_it_is_the_float_of_or_the_decimal_that_it_prints() -> None:
    told = {"a": 1 / 3, "b": 0.1, "c": 2.5, "d": 0.12345, "e": np.float32(0.1), "f": np.int64(3)}
    told |= {"g": Fraction(2, 7001)}
    found = repeats_of(told, list(told))
    assert list(found.values()) == [
        *(Fraction(1, 3), Fraction(1, 10), Fraction(5, 2), Fraction(12345, 100_000)),
        *(Fraction(1, 10), Fraction(3), Fraction(2, 7001)),
    ]
    assert {type(value.numerator) for value in found.values()} == {int}
