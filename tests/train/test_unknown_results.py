"""Of a cached function whose results can't be read it's said that more may change there than is compared."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from cosmati.train import held
from cosmati.train.held import places_in


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.told = cache(lambda number: [number])

    def forward(self, number: int) -> list[int]:
        found: list[int] = self.told(number)
        return found


@pytest.mark.parametrize("is_known", [True, False])
def test_results_that_python_does_not_tell_are_not_followed(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reads()
    model(3)
    if not is_known:
        monkeypatch.setattr(held, "cached_results", lambda _function: None)
    found = list(places_in({"": model}))
    assert all(place.is_followed for place in found) == is_known
    assert [place.name for place in found if not place.is_followed] == ([] if is_known else ["told"])
