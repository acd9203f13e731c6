"""A value's content equals that of its like, bit for bit and item by item, and no other's, as far as it's compared."""

from __future__ import annotations

import enum
import hashlib
import random
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing import Value
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from cosmati.train import values
from cosmati.train.values import content_of, is_container, items_of, read


class Row:
    """Can be referred to weakly."""


class Backwards(dict[str, int]):
    """Gives others its items as it likes."""

    def items(self) -> Any:
        return [("none", 0)]


class BackwardsInOrder(OrderedDict[str, int]):
    def items(self) -> Any:
        return [("none", 0)]


class Lazy(Mapping[str, int]):
    """Reads its items when they're asked for."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise FileNotFoundError

    def __getitem__(self, key: str) -> int:
        raise FileNotFoundError


class OwnUserDict(UserDict[str, int]):
    """May read them from a file, too."""


class Step(enum.IntEnum):
    ONE = 1


# Containers


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        *((one, True) for one in ({}, [], (), set(), frozenset(), deque(), Counter(), defaultdict(int))),
        *((one, True) for one in (OrderedDict(), Backwards(), ChainMap(), UserDict(), MappingProxyType({}))),
        *((one, True) for one in (WeakKeyDictionary(), WeakValueDictionary())),
        *((one, False) for one in (Lazy(), OwnUserDict(), "text", b"", range(3), np.zeros(1), torch.zeros(1), None)),
    ],
)
def test_containers_are_pythons_own_and_what_derives_from_those_whose_items_are_in_memory(
    value: object, is_one: bool
) -> None:
    assert is_container(value) is is_one


def test_items_of_a_dict_are_those_that_it_holds_in_its_order() -> None:
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    assert [*items_of(ordered)] == [("b", 2), ("a", 1)]
    assert [*items_of(Backwards(a=1))] == [*items_of(BackwardsInOrder(a=1))] == [*items_of({"a": 1})] == [("a", 1)]
    assert [*items_of(UserDict(a=1))] == [*items_of(ChainMap({"a": 1}, {"a": 2}))] == [("a", 1)]


def test_a_mapping_is_its_keys_and_values_in_their_order() -> None:
    assert content_of({"a": 1, "b": None}) == (dict, (2, "['a', 1, 'b', None]"))
    assert content_of({"a": [1]}) == (dict, (1, [(str, "'a'"), (list, (1, "[1]"))]))
    assert content_of(MappingProxyType({"a": 1})) == (MappingProxyType, (1, "['a', 1]"))
    assert content_of({"a": 1, "b": 2}) != content_of({"b": 2, "a": 1})


def test_items_without_parts_are_told_at_once_and_others_by_themselves() -> None:
    assert content_of([1, "a", None]) == (list, (3, "[1, 'a', None]"))
    of_each = [None, True, 1, 1.5, 1j, "a", b"b"]
    assert content_of(of_each) == (list, (7, repr(of_each)))
    assert content_of([(1, "a"), (2, "b")]) == (list, (2, "[(1, 'a'), (2, 'b')]"))
    assert content_of([()]) == (list, (1, "[()]"))
    assert content_of([]) == (list, (0, "[]"))
    assert content_of(((1, [2]),)) == (tuple, (1, [(tuple, (2, [(int, "1"), (list, (1, "[2]"))]))]))
    assert content_of([(1,), 2]) == (list, (2, [(tuple, (1, "[1]")), (int, "2")]))


def test_a_sets_items_are_sorted_and_a_lists_are_not() -> None:
    assert content_of({10, 9, 1}) == (set, (3, "[1, 10, 9]"))
    assert content_of(frozenset({"b", "a"})) == (frozenset, (2, "['a', 'b']"))
    assert content_of([10, 9, 1]) == (list, (3, "[10, 9, 1]"))
    assert content_of({(Step.ONE, 2), (Step.ONE, 1)}) == (
        set,
        (2, [(tuple, (2, [(Step, "<Step.ONE: 1>"), (int, f"{i}")])) for i in (1, 2)]),
    )
    told: Any = content_of([[10], [9]])
    assert told == (list, (2, [(list, (1, "[10]")), (list, (1, "[9]"))]))


def test_a_list_in_itself_is_told_by_its_object_and_one_that_is_there_twice_is_read_twice() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert content_of(circle) == (list, (2, [(int, "1"), (list, id(circle))]))
    twice = [1]
    assert content_of([twice, twice]) == (list, (2, [(list, (1, "[1]"))] * 2))
    assert read(circle)[1]


def by_hand(items: list[Any]) -> bytes:
    """Return the digest of a long list of plain values, 10,000 at a time."""
    digest = hashlib.sha256()
    for first in range(0, len(items), 10_000):
        digest.update(repr(repr(items[first : first + 10_000])).encode())
    return digest.digest()


def is_told_as(value: object, kind: type, told: object) -> bool:
    """Say whether a long value's content is this: nobody wants to read in what long ones differ."""
    return content_of(value) == (kind, told)


def test_above_10_000_items_a_digest_stands_for_them() -> None:
    few, many = list(range(10_000)), list(range(20_001))
    assert is_told_as(few, list, (10_000, repr(few)))
    assert is_told_as(many[:10_001], list, (10_001, by_hand(many[:10_001])))
    assert is_told_as(many, list, (20_001, by_hand(many)))
    assert is_told_as(set(many), set, (20_001, by_hand(sorted(many, key=repr))))
    pairs = [one for i in few for one in (i, None)]
    assert is_told_as(dict.fromkeys(few), dict, (10_000, by_hand(pairs)))


# How far


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_lies_in_more_than_32_lists_is_not_compared() -> None:
    assert read(nested(32))[1]
    content, is_whole = read(nested(33))
    assert not is_whole
    for _ in range(32):
        _, (_, (content,)) = content  # type: ignore[misc]
    assert content == (list, None)


@pytest.mark.parametrize(
    ("value", "cost"),
    [
        ([1, 2, 3], 3),
        ([(1, 2, 3), (4,)], 2),
        ({"a": 1}, 2),
        ([[]], 16),
        ([[], []], 32),
        ([[1, 2], 3], 34),
        ([1.5, np.float32(1)], 32),
        (set("abc"), 3),
    ],
)
def test_plain_items_count_once_and_others_16_times(monkeypatch: pytest.MonkeyPatch, value: object, cost: int) -> None:
    whole = content_of(value)
    monkeypatch.setattr(values, "MAX_VALUES", cost)
    assert read(value) == (whole, True)
    monkeypatch.setattr(values, "MAX_VALUES", cost - 1)
    content, is_whole = read(value)
    assert not is_whole
    assert content != whole


class Long(list[int]):
    """Says that it's longer than it is."""

    length = 0

    def __len__(self) -> int:
        return self.length


def test_of_16_million_items_all_are_compared_and_of_more_none() -> None:
    value = Long([1, 2])
    value.length = 1 << 24
    assert read(value) == ((Long, (1 << 24, "[1, 2]")), True)
    value.length += 1
    assert read(value) == ((Long, None), False)


def test_bytes_of_arrays_are_counted_together() -> None:
    half = np.broadcast_to(np.zeros(1, np.uint8), 1 << 29)  # of one byte in memory
    reader = values._Reader(())
    for _ in range(2):
        with suppress(ValueError, BufferError):  # Its bytes don't lie in a row, and nothing has to read them.
            reader._bytes(half)
    assert reader.is_whole
    assert reader._bytes(np.zeros(0, np.uint8)) == b""
    assert reader._bytes(np.zeros(1, np.uint8)) is None
    assert not reader.is_whole


def test_a_digest_stands_for_more_than_10_000_bytes() -> None:
    few, many = bytes(range(100)) * 100, bytes(range(100)) * 100 + b"x"
    assert is_told_as(bytearray(few), bytearray, few)
    assert is_told_as(bytearray(many), bytearray, hashlib.sha256(many).digest())
    assert content_of(np.frombuffer(many, np.uint8)) == (
        np.ndarray,
        ("|u1", (10_001,), hashlib.sha256(many).digest()),
    )


def test_what_cannot_be_read_is_told_by_its_object_and_memory_that_is_missing_raises() -> None:
    view = memoryview(b"abc")
    view.release()
    assert read(view) == ((memoryview, id(view)), False)
    assert read([view, 1]) == ((list, (2, [(memoryview, id(view)), (int, "1")])), False)

    class Full(int):
        def __repr__(self) -> str:
            raise MemoryError

    class FullDevice(int):
        def __repr__(self) -> str:
            raise torch.OutOfMemoryError

    for value, error in ((Full(1), MemoryError), (FullDevice(1), torch.OutOfMemoryError)):
        with pytest.raises(error):
            content_of(value)


# Scalars, bytes, arrays


@pytest.mark.parametrize("value", [None, True, 3, -0.0, 1 + 2j, "a", b"ab", Step.ONE, np.float64(1.5)])
def test_a_scalar_is_told_as_printed(value: object) -> None:
    assert read(value) == ((type(value), repr(value)), True)


def test_other_objects_are_told_by_themselves() -> None:
    for value in (Row(), len, Row, Lazy(), OwnUserDict(a=1), np.float32(1)):
        assert read(value) == ((type(value), id(value)), True)


def test_bytes_that_can_be_written_to_are_told_by_what_they_hold() -> None:
    assert content_of(bytearray(b"abc")) == (bytearray, b"abc")
    assert content_of(memoryview(b"abcdef")[::2]) == (memoryview, b"ace")
    assert content_of(array("h", [1, 2])) == (array, array("h", [1, 2]).tobytes())


def test_an_array_is_its_type_shape_and_bytes() -> None:
    one = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert content_of(one) == (np.ndarray, ("<i2", (2, 3), one.tobytes()))
    assert content_of(one.T) == (np.ndarray, ("<i2", (3, 2), one.T.tobytes()))
    assert content_of(np.array(5.0)) == (np.ndarray, ("<f8", (), np.array(5.0).tobytes()))
    objects = np.array([None, "a"], dtype=object)
    assert content_of(objects) == (np.ndarray, ("|O", (2,), (list, (2, "[None, 'a']"))))


def test_a_files_array_is_told_by_itself_where_nobody_can_write_to_it(tmp_path: Path) -> None:
    np.arange(10.0).tofile(tmp_path / "file")
    read_only, written = (np.memmap(tmp_path / "file", np.float64, mode) for mode in ("r", "r+"))
    locked, in_memory = written[:3], np.arange(3.0)
    locked.flags.writeable = in_memory.flags.writeable = False
    for value in (read_only, np.asarray(read_only), np.asarray(read_only)[2:5], locked):
        assert content_of(value) == (type(value), (value.dtype.str, value.shape, id(value)))
    for value in (written, np.asarray(written), in_memory, in_memory[1:]):
        assert content_of(value) == (type(value), (value.dtype.str, value.shape, value.tobytes()))


# What holds state


def drawn(value: Any) -> object:
    """Draw from a generator."""
    if isinstance(value, torch.Generator):
        return torch.rand(1, generator=value)
    return value.draw(1) if isinstance(value, SobolEngine) else value.random()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(1),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        lambda: random.Random(1),
        lambda: SobolEngine(2),
    ],
    ids=["torch", "numpy", "numpy's old", "random", "sobol"],
)
def test_a_generator_is_told_by_where_it_stands(make: Callable[[], Any]) -> None:
    one, other = make(), make()
    before = content_of(one)
    assert read(other) == (before, True)
    drawn(one)
    assert content_of(one) != before
    drawn(other)
    assert content_of(other) == content_of(one)
    assert type(one) is before[0]  # type: ignore[index]


def test_a_context_variable_is_told_by_what_it_holds() -> None:
    variable: ContextVar[Any] = ContextVar("variable")
    assert content_of(variable) == (ContextVar, (type(None), "None"))
    token = variable.set([1])
    assert content_of(variable) == (ContextVar, (list, (1, "[1]")))
    variable.set(variable)
    content: Any = content_of(variable)
    for _ in range(33):
        kind, content = content
        assert kind is ContextVar
    assert content == id(variable)
    variable.set(nested(31))
    assert read(variable)[1]
    variable.set(nested(32))
    assert not read(variable)[1]
    variable.reset(token)


def test_a_cell_that_processes_share_is_told_by_its_bytes() -> None:
    cell: Any = Value("i", 5)
    assert read(cell) == ((type(cell), bytes([5, 0, 0, 0])), True)


# Tensors


def bits(value: Tensor) -> object:
    """Return what stands for a small dense tensor."""
    return value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_tensor_is_its_type_shape_and_bits() -> None:
    one = torch.arange(6.0).reshape(2, 3)
    for value in (one, one.T, one[:, 1:], torch.tensor(5, dtype=torch.int8), torch.zeros(0), torch.tensor([True])):
        assert content_of(value) == (Tensor, bits(value))
    parameter = nn.Parameter(one)
    assert content_of(parameter) == (nn.Parameter, bits(one))
    assert content_of(torch.tensor([0.0])) != content_of(torch.tensor([-0.0]))


def test_views_that_conjugate_or_negate_are_told_as_they_read() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    for view in (value.conj(), value.conj().imag):
        assert content_of(view) == content_of(view.clone().resolve_conj().resolve_neg()) == (Tensor, bits(view * 1))


def test_a_parameter_in_training_counts_by_itself_and_in_a_container_by_its_object() -> None:
    one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    trained = {id(one)}
    assert read(one, trained)[0] == (nn.Parameter, bits(one.detach()))
    assert read([one, other], trained)[0] == (
        list,
        (2, [(nn.Parameter, id(one)), (nn.Parameter, bits(other.detach()))]),
    )
    assert content_of([one], trained) == (list, (1, [(nn.Parameter, id(one))]))
    plain = torch.ones(1)
    assert content_of([plain], {id(plain)}) == (list, (1, [(Tensor, bits(plain))]))


def test_up_to_65536_elements_a_tensor_is_kept_whole_and_above_as_sums() -> None:
    for size, num_bytes in ((1 << 16, 4 << 16), ((1 << 16) + 1, 8 * 4096 + 8)):
        value = torch.arange(size, dtype=torch.int32)
        kind, shape, content = content_of(value)[1]  # type: ignore[index]
        assert (kind, shape, len(content)) == (torch.int32, (size,), num_bytes)
    assert is_told_as(value[1:], Tensor, bits(value[1:]))


@pytest.mark.parametrize("kind", ["<i1", "<i2", "<f4", "<f8", "<c16"])
def test_above_65536_elements_the_sums_of_4096_parts_and_the_rest_stand_for_the_bits(kind: str) -> None:
    made = np.random.default_rng(1).integers(-100, 100, 4096 * 20 + 3).astype(kind)
    words = made.view({1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "i8"}[made.itemsize])
    whole = len(words) // 4096 * 4096
    with np.errstate(over="ignore"):
        sums = words[:whole].reshape(4096, -1).astype("i8").sum(1)
    expected = np.concatenate([sums, words[whole:].astype("i8")]).tobytes()
    tensor = torch.from_numpy(made)
    assert is_told_as(tensor, Tensor, (tensor.dtype, (len(made),), expected))


class Sharded(Tensor):
    """Has a part on this rank."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)[:1]


def test_of_a_sharded_tensor_this_ranks_part_is_told() -> None:
    value = torch.arange(3.0).as_subclass(Sharded)
    assert content_of(value) == (Sharded, bits(torch.zeros(1)))


def test_a_sparse_tensor_is_its_layout_shape_and_parts() -> None:
    value = torch.eye(2).roll(1, 0)
    indices = torch.tensor([[0, 1], [1, 0]])
    assert content_of(value.to_sparse()) == (
        Tensor,
        (torch.sparse_coo, (2, 2), bits(indices), bits(torch.ones(2))),
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_nested_tensor_is_its_parts_and_what_has_no_bits_its_object_and_version() -> None:
    parts = [torch.ones(2), torch.zeros(3)]
    assert content_of(torch.nested.nested_tensor(parts)) == (Tensor, [bits(part) for part in parts])
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    for value in (torch.zeros(3, device="meta"), quantized):
        assert content_of(value) == (Tensor, (id(value), value._version))
