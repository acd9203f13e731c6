"""Of other libraries' memory a reader holds the first parts up to a bound, one at least; each is counted once."""

from __future__ import annotations

import numpy as np
import pytest

from cosmati.train import written
from cosmati.train.written import WrittenHere


@pytest.mark.parametrize(("bound", "num_held"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (1 << 20, 4)])
def test_parts_are_held_until_they_reach_the_bound(bound: int, num_held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_MAX_HELD", bound)
    parts = [np.frombuffer(bytearray([n] * 16), np.uint8) for n in range(4)]
    here = WrittenHere()
    for part in parts:
        here.add([part, part])
    assert [id(part) for part in here._held.values()] == [id(part) for part in parts[:num_held]]
