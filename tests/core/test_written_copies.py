"""Whether a copy of somebody's container shares its items is found out by trying, and both are left as they were."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from cosmati.core.containers import _writes_to


class Shares(UserDict[str, Any]):
    """Its copies hold its own items."""

    def __copy__(self) -> Shares:
        made = Shares()
        made.data = self.data
        return made


class Refuses(UserDict[str, Any]):
    """Takes no other value."""

    def __setitem__(self, key: str, item: Any) -> None:
        if self.data.get(key) is not None:
            raise TypeError("sealed")
        self.data[key] = item


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2)], ids=["tensor", "array"])
@pytest.mark.parametrize(("kind", "is_shared"), [(UserDict, False), (Shares, True), (Refuses, False)])
def test_a_copy_that_shares_its_items_is_told(kind: Any, is_shared: bool, value: Any) -> None:
    data = kind({"name": "x", "rows": value, "more": torch.zeros(1)})
    made = copy.copy(data)
    assert _writes_to(made, data) == is_shared
    assert data["rows"] is value
    assert made["rows"] is value


def test_without_arrays_nothing_can_be_told() -> None:
    data = Shares({"name": "x", "number": 3})
    assert _writes_to(copy.copy(data), data) is False
