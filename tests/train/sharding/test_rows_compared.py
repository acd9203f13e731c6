"""How many rows are computed whole, to be compared with what several ranks compute together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.batch import Batch
from cosmati.train import parts_compared
from cosmati.train.parts_compared import NUM_ROWS, _found, _Seen
from cosmati.train.ranks import Ranks

TELLS, MUTE = _Seen({}, {}, tells=True), _Seen({}, {}, tells=False)


@pytest.mark.parametrize(
    ("few", "every", "differ", "looks"),
    [
        (TELLS, TELLS, [set()], [NUM_ROWS]),
        (TELLS, TELLS, [{"b"}, {"a"}], [NUM_ROWS, 5]),
        (TELLS, MemoryError(), [{"b"}], [NUM_ROWS, 5]),
        (MUTE, TELLS, [{"a"}], [NUM_ROWS, 5]),
        (MUTE, MUTE, [{"a"}], [NUM_ROWS, 5]),
        (ValueError(), TELLS, [{"a"}], [NUM_ROWS, 5]),
        (MemoryError(), TELLS, [], [NUM_ROWS]),
    ],
)
def test_few_rows_come_first_and_all_of_them_where_these_differ_or_say_nothing(
    monkeypatch: pytest.MonkeyPatch, few: Any, every: Any, differ: list[set[str]], looks: list[int]
) -> None:
    seen: list[int] = []

    def look(batch: Batch, _shards: object) -> _Seen:
        seen.append(len(batch.rows))
        answer: _Seen | Exception = few if len(batch.rows) == NUM_ROWS else every
        if isinstance(answer, Exception):
            raise answer
        return answer

    to_come = iter(differ)
    monkeypatch.setattr(parts_compared, "_differing", lambda *_: next(to_come))
    a: Any = SimpleNamespace(ranks=Ranks())
    parts: Any = SimpleNamespace(alone=None)
    batch: Any = Rows(torch.arange(5))
    assert _found(a, parts, look, batch) == (sorted(differ[-1]) if differ else [])
    assert seen == looks
    assert not list(to_come)


class Rows:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def select(self, rows: slice) -> Rows:
        return Rows(self.rows[rows])
