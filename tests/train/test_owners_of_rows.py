"""Whose content a pack is: each document once, against the sets of what stands in its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.train.observers.row_leaves import _owners

IDS = st.integers(0, 9) | st.just(TOMBSTONE)


@pytest.mark.long
@given(data=st.data(), num=st.integers(0, 4), length=st.integers(1, 6))
def test_owners_are_the_documents_of_each_pack_rising_and_filled_up_before(
    data: st.DataObject, num: int, length: int
) -> None:
    tokens = [[data.draw(IDS) for _ in range(length)] for _ in range(num)]
    slots = data.draw(st.permutations(range(num)))[: data.draw(st.integers(0, num))]
    lineage: Any = SimpleNamespace(token_row_ids=torch.tensor(tokens, dtype=torch.int64).view(num, length))
    found = _owners(lineage, np.array(slots, np.int64))
    assert found is not None
    sets = [sorted({one for one in tokens[slot] if one != TOMBSTONE}) for slot in slots]
    width = max((len(own) for own in sets), default=0)
    if width:
        assert found.tolist() == [[TOMBSTONE] * (width - len(own)) + own for own in sets]
    else:
        assert set(found.reshape(-1).tolist()) <= {TOMBSTONE}
        assert len(found) == len(slots)


def test_other_rows_are_their_own() -> None:
    lineage: Any = SimpleNamespace(token_row_ids=None)
    assert _owners(lineage, np.arange(3)) is None
