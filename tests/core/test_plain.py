"""Plain states as JSON and tensors: what comes back is what went in, type for type and bit for bit."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, UserDict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cosmati.core.plain import decode, encode
from cosmati.errors import CheckpointError

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024  (what a user may have)


def _same(one: Any, other: Any) -> bool:  # noqa: PLR0911  (one line a type)
    """Compare types and bits, and the order of dictionaries."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and raw[0] == raw[1]
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            _same(a, b) for a, b in zip([*one.items()], [*other.items()], strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _there_and_back(value: object, folder: Path) -> Any:
    """Through a file of JSON and one of safetensors, as a checkpoint does."""
    text, tensors = encode(value)
    (folder / "state.json").write_text(json.dumps(text, allow_nan=False))
    save_file(tensors, folder / "state.safetensors")
    return decode(json.loads((folder / "state.json").read_text()), load_file(folder / "state.safetensors"))


_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
    | st.floats().map(np.float64) | st.integers(-128, 127).map(np.int8) | st.booleans().map(np.bool_)
    | st.lists(st.floats(), max_size=3).map(np.array) | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
    | st.integers(-9, 9).map(torch.tensor) | st.complex_numbers().map(torch.tensor)
)  # fmt: skip
_KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.none() | st.tuples(st.integers(0, 2)) | st.just("$")
_NESTS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=2), max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.long
@given(_NESTS)
def test_every_plain_nest_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert _same(_there_and_back(value, tmp_path_factory.mktemp("plain")), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan, -math.nan, math.inf, -0.0, 2**200, (), ((),), {}, {1: "a", "1": "b"}, {"$": "tuple", "items": []},
        {1: torch.ones(2), "1": torch.zeros(2)}, {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        b"", np.array([["a"]]), np.zeros((0, 3)), np.array(3.0), np.datetime64("2020-01-01"), np.arange(6)[::2],
        np.arange(3, dtype=">i4"), np.float16(math.nan), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        torch.zeros(0, 3, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.float8_e4m3fn), torch.ones(2, 3).t(),
        torch.tensor([1, 2], dtype=torch.uint32), torch.ones(2, requires_grad=True).detach(), torch.tensor(True),
        torch.zeros(2, 0, dtype=torch.complex128),
    ],
    ids=repr,
)  # fmt: skip
def test_odd_ones_come_back(tmp_path: Path, value: Any) -> None:
    assert _same(_there_and_back(value, tmp_path), value)


def test_states_of_generators_come_back(tmp_path: Path) -> None:
    states = {
        "random": random.Random(3).getstate(),
        "legacy": np.random.RandomState(3).get_state(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        "torch": torch.Generator().manual_seed(3).get_state(),
    }
    assert _same(_there_and_back(states, tmp_path), states)


def test_what_json_can_hold_stands_for_itself() -> None:
    plain = {"loader": {"place": 3, "names": ["a", None, True, 1.5]}}
    assert encode(plain) == (plain, {})
    assert decode(plain, {}) == plain


def test_nothing_is_shared_with_the_state_that_lives_on() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    text, tensors = encode([tensor, array])
    tensor.zero_()
    array[:] = 0
    first, second = decode(text, tensors), decode(text, tensors)
    assert (first[0].tolist(), first[1].tolist()) == ([1, 1], [1, 1])
    first[0].zero_()
    first[1][:] = 0
    assert (second[0].tolist(), second[1].tolist()) == ([1, 1], [1, 1])


class _Size(IntEnum):
    BIG = 2


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, object()]}, r"at 'a/1' is a builtins\.object, which only pickle could write\. .*state_dict\(\)"),
        (_Size.BIG, r"its root.*_Size"),
        (Pair(1, 2), "Pair"),
        (Counter("aa"), "Counter"),
        (UserDict(a=1), "UserDict"),
        (torch.Size([1]), "Size"),
        (nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (np.array([object()]), "ndarray"),
        (np.zeros(1, dtype=[("a", "i4")]), "ndarray"),
        (torch.Generator(), "Generator"),
        (lambda: 1, "function"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        encode(value)


def test_a_state_that_holds_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(CheckpointError, match=r"at '1/again' is a builtins\.list, which holds itself"):
        encode(loop)
    shared = [1]
    assert decode(*encode([shared, shared])) == [[1], [1]], "the same one twice is no loop"


@pytest.mark.parametrize("json", [{"$": "tensor", "name": "gone"}, {"$": "unheard"}, {"$": "tuple"}])
def test_what_encode_did_not_make_is_refused(json: Any) -> None:
    with pytest.raises(CheckpointError, match="can't be put together"):
        decode(json, {})
