"""At which place each row of a microbatch was kept: against a search for each row by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.train.observers.step_details import kept_details, places_of

IDS = st.integers(0, 5) | st.just(TOMBSTONE)


@pytest.mark.long
@given(rows=st.lists(IDS, max_size=8), order=st.randoms(), num=st.integers(0, 8), more=st.integers(0, 3))
def test_each_place_is_one_rows(rows: list[int], order: object, num: int, more: int) -> None:
    shuffled = list(rows)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    kept = shuffled[:num]
    found = places_of(torch.tensor(rows, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64), len(rows) + more)
    assert found[len(rows) :] == [-1] * more
    taken: set[int] = set()
    for row, place in zip(rows, found[: len(rows)], strict=True):
        free = [at for at, one in enumerate(kept, 1) if one == row and at not in taken]
        expected = min(free) if free and row != TOMBSTONE else 0
        assert place == expected
        taken.add(place)


def test_only_microbatches_that_kept_not_all_are_told() -> None:
    places = torch.tensor([[1, 2, 3], [0, 2, 1], [1, 2, -1], [0, 0, -1]])
    assert kept_details(places) == {"kept_rows": {"1": [2, 1], "3": []}}
    assert kept_details(places[:1]) == {}
