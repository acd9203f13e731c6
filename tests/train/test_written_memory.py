"""What steps have written to is known by where it lies and what it holds, and for no longer than somebody keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cosmati.core.batch import Batch, Lineage
from cosmati.train import written
from cosmati.train.written import WRITTEN, Region, Written, WrittenHere


def test_a_region_spans_its_elements_in_each_direction_and_holds_their_bytes() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    start = table.ctypes.data
    spans = {
        "whole": (table, 0, 96),
        "rows backwards": (table[::-1], 0, 96),
        "both backwards": (table[:0:-1, 4:1:-2], 32, 92),
        "one column": (table[:, 1], 4, 80),
        "one row": (table[2], 48, 72),
    }
    for name, (view, first, last) in spans.items():
        region = Region.of(view)
        assert (region.start - start, region.stop - start) == (first, last), name
        assert region.key == (view.ctypes.data, view.shape, view.strides, 4)
        assert region.view is not None
        assert (region.view.shape, region.view.strides, region.view.itemsize) == (view.shape, view.strides, 4)
        assert region.view.tobytes() == view.tobytes(), name
        assert not region.view.flags.writeable


def test_a_tensors_region_is_that_of_its_array() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    for view in (tensor, tensor.T, tensor[1:3, ::2], tensor[3, 5], tensor[:, 2].expand(3, 4), tensor.double()):
        own, arrays = Region.of(view), Region.of(view.numpy())
        assert own[1:] == arrays[1:]
        assert own.view is not None
        assert own.view.tobytes() == view.numpy().tobytes()


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0, 3),
        lambda: np.empty((2, 0)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
def test_what_has_no_one_place_is_known_by_itself(make: Callable[[], Any]) -> None:
    part, other = make(), make()
    region, whole = Region.of(part), Region.of(torch.ones(3))
    assert tuple(region) == (None, id(part), 0, 0)
    assert region.shares_memory(Region.of(part))
    assert not region.shares_memory(Region.of(other))
    assert not region.shares_memory(whole)
    assert not whole.shares_memory(region)
    known = Written()
    known.add([part])
    assert known.has_part_of([part])
    assert not known.has_part_of([other])


def test_a_place_is_compared_alone_where_one_has_no_view() -> None:
    part, other = np.ones(3), np.ones(3)
    region = Region.of(part)
    assert region._replace(view=None).shares_memory(region)
    assert not region._replace(view=None).shares_memory(Region.of(other))
    assert not Region.of(other).shares_memory(region._replace(view=None))


def test_a_part_is_as_a_step_left_it_until_somebody_writes_to_any_of_that() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    known = Written()
    known.add([table[1:]])
    for part in (table, table[1], table[1:], table[:2], table[2, 3:], table.numpy(), table.numpy()[2]):
        assert known.has_part_of([part])
    for part in (table[0], table[:1], table[:1].numpy(), table.clone(), torch.arange(12.0)):
        assert not known.has_part_of([part])
    table[0] = 7.0
    assert known.has_part_of([table])
    table[2, 3] = 7.0
    assert not known.has_part_of([table[1]])
    table[2, 3] = 11.0
    assert known.has_part_of([table[1]]), "it holds the same again"
    table.numpy()[1, 0] = -1.0
    assert not known.has_part_of([table])


def test_what_is_added_again_is_known_as_it_is_now() -> None:
    known, part = Written(), torch.zeros(4)
    known.add([part])
    part.fill_(1.0)
    known.add([part, part.view(2, 2)])
    assert known.has_part_of([part])
    assert len(known._known) == len(known._numbers) == 2
    part.fill_(0.0)
    assert not known.has_part_of([part])


def test_only_tensors_and_arrays_of_a_batch_are_looked_at() -> None:
    known, part = Written(), torch.ones(3)
    known.add(["text", 3, None, [part]])
    assert not known.has_part_of([part])
    assert not known._known
    known.add(["text", part])
    assert known.has_part_of({"x": "text", "y": (torch.zeros(2), part)})
    assert known.has_part_of(Batch([part], Lineage.of_rows(0, 3), None))
    assert not known.has_part_of({"x": "text", "y": (torch.zeros(2), 3)})
    assert not known.has_part_of("text")


class Thing:
    """An object of the user's: its plain fields are no arrays, and no memory."""

    def __init__(self, part: torch.Tensor) -> None:
        self.part, self.name = part, "name"


def test_tensors_in_objects_are_found() -> None:
    known, part = Written(), torch.ones(3)
    known.add([part])
    assert known.has_part_of([Thing(part)])
    assert not known.has_part_of([Thing(part.clone())])


def test_what_nobody_keeps_is_forgotten_alone() -> None:
    known, kept = Written(), torch.ones(4)
    gone: Any = torch.ones(5)
    view = gone[1:3]
    known.add([kept, gone])
    del gone
    assert len(known._known) == 2, "a view keeps the memory"
    assert known.has_part_of([view])
    del view
    assert [k.region.key for k in known._known.values()] == [*known._numbers] == [Region.of(kept).key]
    assert known.has_part_of([kept])


def test_an_earlier_owner_that_goes_takes_no_word_of_a_later_one() -> None:
    known, part = Written(), torch.ones(4)
    known.add([part])
    ((number, one),) = known._known.items()
    known._forget(number + 5, one.region.key, None)
    assert known._numbers == {one.region.key: number}
    assert [*known._known] == [number]
    known._forget(number, one.region.key, None)
    assert (known._known, known._numbers) == ({}, {})
    known._forget(number, one.region.key, None)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_what_a_look_at_every_pair_finds(seed: int) -> None:
    draws, known = random.Random(seed), Written()
    table = np.arange(400, dtype=np.uint8)
    noted: list[np.ndarray[Any, Any]] = []
    for _ in range(200):
        start = draws.randrange(390)
        part = table[start : start + draws.choice([1, 2, 3, 5, 40])]
        if draws.random() < 0.3:
            known.add([part])
            noted.append(part)
        else:
            assert known.has_part_of([part]) == any(np.shares_memory(part, one) for one in noted)
    assert len(known._known) == len({Region.of(one).key for one in noted})


def test_neighbours_share_nothing_and_a_long_one_far_before_is_found() -> None:
    table, known = np.arange(100, dtype=np.uint8), Written()
    known.add([table[:90], table[95:96]])
    near = {start: [k.region.start - table.ctypes.data for k in known._near(Region.of(table[start:][:1]))] for start in
            (0, 89, 90, 94, 95, 96)}  # fmt: skip
    assert {start: sorted(set(found) - {95}) for start, found in near.items()} == {
        0: [0], 89: [0], 90: [], 94: [], 95: [], 96: [],
    }  # fmt: skip
    assert 95 in near[95]
    assert 95 not in near[96]
    assert not known.has_part_of([table[90:95]])
    assert not known.has_part_of([table[96:]])


def test_places_of_what_has_gone_are_swept_now_and_then() -> None:
    known, kept = Written(), [torch.ones(3) for _ in range(10)]
    known.add(kept)
    longest = 0
    for _ in range(400):
        known.add([torch.ones(7)])
        longest = max(longest, len(known._places))
    assert longest == 2 * 11 + 64 + 1, "of eleven, one more than twice as many and 64 beside"
    assert known._places == sorted(known._places)
    assert all(known.has_part_of([one]) for one in kept)
    assert known._longest == 28


def test_owners_are_what_views_are_of() -> None:
    memory = bytearray(16)
    array, tensor = np.zeros((4, 4), np.float32), torch.zeros(4, 4)
    over = torch.from_numpy(array)
    assert written._owner_of(array) is array
    assert written._owner_of(array[1:][:, ::2].T) is array
    assert written._owner_of(tensor[1:].T) is written._owner_of(tensor.numpy()[2:]) is tensor.untyped_storage()
    assert written._owner_of(over) is over.untyped_storage()
    assert written._owner_of(over.numpy()) is over.untyped_storage()
    base = np.frombuffer(memory, np.uint8)
    assert written._owner_of(base[3:]) is base
    sparse, empty = torch.eye(2).to_sparse(), torch.empty(0)
    assert written._owner_of(sparse) is sparse
    assert written._owner_of(empty) is empty


def test_memory_of_others_is_what_may_outlive_what_can_be_watched() -> None:
    memory = bytearray(16)
    over = torch.from_numpy(np.zeros(4, np.float32))
    is_of_others = {
        "an array": (np.zeros(4), False),
        "a view": (np.zeros(4)[1:], False),
        "an array over bytes": (np.frombuffer(memory, np.uint8), True),
        "a view of it": (np.frombuffer(memory, np.uint8)[2:], True),
        "a tensor": (torch.zeros(4), False),
        "a tensor that NumPy has seen": (torch.zeros(4).numpy(), True),
        "over an array": (over, True),
        "over bytes": (torch.frombuffer(memory, dtype=torch.uint8), True),
        "shared": (torch.zeros(4).share_memory_(), False),
        "nowhere": (torch.zeros(4, device="meta"), False),
        "sparse": (torch.eye(2).to_sparse(), False),
    }
    assert {name: written._is_of_others(part) for name, (part, _) in is_of_others.items()} == {
        name: expected for name, (_, expected) in is_of_others.items()
    }


def test_a_reader_notes_for_the_process_and_holds_what_cannot_be_watched() -> None:
    here, own = WrittenHere(), torch.full((3,), 5.0)
    memory = np.zeros(8, np.float32)
    here.add([own, "text", torch.from_numpy(memory)])
    here.add([torch.from_numpy(memory)])
    assert WRITTEN.has_part_of([own[:1]])
    assert WRITTEN.has_part_of([torch.from_numpy(memory[4:])])
    assert (len(here._held), here._num_bytes) == (1, 32)
    here.add([torch.from_numpy(memory[:4])])
    assert (len(here._held), here._num_bytes) == (2, 48)
    del here
    assert not WRITTEN.has_part_of([memory])


def test_content_is_of_the_bytes_that_a_region_has() -> None:
    tensor = torch.arange(6.0)
    region = Region.of(tensor[1:4])
    before = written._content(tensor, region)
    assert written._content(tensor.numpy(), region) == before
    tensor[0] = tensor[5] = 9.0
    assert written._content(tensor, region) == before
    tensor.numpy()[2] = 9.0
    assert written._content(tensor, region) != before
    nowhere = torch.zeros(3, device="meta")
    before = written._content(nowhere, Region.of(nowhere))
    nowhere.add_(1)
    assert written._content(nowhere, Region.of(nowhere)) != before


def test_a_storage_that_was_resized_is_no_longer_read() -> None:
    known, part = Written(), torch.arange(8.0)
    known.add([part[:8]])
    (one,) = known._known.values()
    storage = part.untyped_storage()
    for shift, is_within in ((0, True), (-1, False), (1, False)):
        moved = one._replace(region=one.region._replace(start=one.region.start + shift))
        assert moved.is_as_left(part) == (shift >= 0), "it begins within the storage"
        moved = one._replace(region=one.region._replace(stop=one.region.stop + shift))
        assert moved.is_as_left(part) == (is_within or shift < 0), "and ends there"
    assert not one._replace(region=one.region._replace(start=one.region.stop + 1)).is_as_left(part)
    assert storage.nbytes() == 32
