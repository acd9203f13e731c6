"""Whole numbers are kept exactly, or refused; a fraction may be rounded to a narrower type, and stays finite."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.shards.encodings import encoding
from cosmati.errors import DataError

FORMATS = {"float16": "<e", "float32": "<f", "float64": "<d"}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def held(number: int, dtype: str) -> bool:
    """Whether a type holds a whole number, by Python's own numbers."""
    if dtype in INTEGERS:
        bits, is_signed = int(dtype.lstrip("uint")), dtype.startswith("i")
        return -(1 << bits - 1) * is_signed <= number < 1 << bits - is_signed
    with contextlib.suppress(OverflowError, struct.error):
        return bool(struct.unpack(FORMATS[dtype], struct.pack(FORMATS[dtype], number))[0] == number)
    return False


def back(kind: str, value: Any) -> list[Any]:
    return np.asarray(encoding(kind).decode(memoryview(encoding(kind).encode(value)))).reshape(-1).tolist()


@pytest.mark.long
@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from([*INTEGERS, *FORMATS]))
def test_whole_numbers_of_an_array_are_exact_or_refused(data: st.DataObject, own: str, dtype: str) -> None:
    info = np.iinfo(own)
    near = st.sampled_from([11, 15, 16, 24, 31, 32, 53, 63]).flatmap(
        lambda bits: st.integers((1 << bits) - 3, (1 << bits) + 3)
    )
    number = st.integers(info.min, info.max) | near.filter(lambda n: n <= info.max)
    numbers = data.draw(st.lists(number, min_size=2, max_size=4))
    array = np.asarray(numbers, own)
    for kind in (f"ndarray:{dtype}", f"ndarray:{dtype}:{len(numbers)}"):
        if all(held(n, dtype) for n in numbers) and np.can_cast(own, dtype, "same_kind"):
            assert back(kind, array) == numbers
        else:
            with pytest.raises(DataError, match=r"isn't ndarray"):
                encoding(kind).encode(array)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("ndarray:int16", np.array([70000, 1])),
        ("ndarray:uint16", np.array([70000, 1], np.uint32)),
        ("ndarray:int32:2", np.array([2**40, 1])),
        ("ndarray:int64", np.array([2**63], np.uint64)),
        ("ndarray:float16:2", np.array([1e6, 1.0])),
        ("ndarray:float32", [1e39]),
        ("ndarray:float64", [9007199254740993, 0.5]),
        ("ndarray:float64:2", [9007199254740993, 0.5]),
        ("ndarray", [9007199254740993, 0.5]),
        ("ndarray", [2**63 + 1, -1]),
        ("ndarray:float32", [[16777217], [0.5]]),
        ("float16", 70000.0),
        ("float32", 1e300),
        ("float32", np.float64(-1e300)),
        ("float32", 16777217),
        ("float16", np.int16(2049)),
        ("float64", 2**60 + 1),
        ("float64", 2**64 - 1),
        ("float64", np.uint64(2**64 - 1)),
        ("str_float", 9007199254740993),
        ("str", "a \ud83d"),
        ("ndarray", [[1], [1, 2]]),
        ("ndarray:int64:2", [[1], [1, 2]]),
    ],
)
def test_what_a_type_cant_hold_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"isn't {kind}: "):
        encoding(kind).encode(value)


@pytest.mark.parametrize("kind", ["int", "float64", "str_int", "str_float", "ndarray:float64"])
def test_a_number_too_long_to_print_is_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"isn't {kind}: "):
        encoding(kind).encode([10**5000] if "ndarray" in kind else 10**5000)


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("ndarray:float32", np.array([0.1, -0.0, 1e-60]), [float(np.float32(0.1)), -0.0, 0.0]),
        ("ndarray:float16", np.array([np.inf, -np.inf, 65504.0]), [np.inf, -np.inf, 65504.0]),
        ("ndarray:float32:2", np.array([16777216, -16777216]), [16777216.0, -16777216.0]),
        ("ndarray:float32", [2**24, 0.5], [16777216.0, 0.5]),
        ("ndarray:float64", np.array([2**63], np.uint64), [2.0**63]),
        ("ndarray:float32:2", np.array([True, False]), [1.0, 0.0]),
        ("ndarray:int16:2", np.array([[-32768, 32767]])[0], [-32768, 32767]),
        ("float32", 2**40, [2.0**40]),
        ("float16", float("inf"), [np.inf]),
        ("float32", 0.1, [float(np.float32(0.1))]),
        ("str_float", 2**70, [2.0**70]),
    ],
)
def test_what_a_type_holds_is_kept(kind: str, value: Any, found: list[Any]) -> None:
    assert back(kind, value) == found


@pytest.mark.parametrize("kind", ["ndarray:float16", "float16", "ndarray:float16:1"])
def test_no_number_stays_no_number(kind: str) -> None:
    value = float("nan")
    assert np.isnan(back(kind, value if kind == "float16" else np.array([value]))).all()
