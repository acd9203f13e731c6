"""Of a cached function whose results can't be read it's said that more may change there than is compared."""

from __future__ import annotations

from functools import cache, lru_cache

import pytest
from torch import nn

from cosmati.train import held
from cosmati.train.held import places_in
from cosmati.train.reach import cached_results


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


@pytest.mark.parametrize("size", [None, 8])
def test_results_are_found_though_one_is_the_function_itself(size: int | None) -> None:
    @lru_cache(size)
    def told(number: int) -> object:
        return [number] if number else told.__wrapped__

    assert cached_results(told) == []
    assert [told(number) for number in (3, 0, 4)] == [[3], told.__wrapped__, [4]]
    found = cached_results(told)
    assert found is not None
    assert [result for _, result in found] == [told.__wrapped__, [3], [4]]
