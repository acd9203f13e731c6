"""What FSDP2 would sum in another order is looked for in a run's first microbatch, and not in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosmati.core.virtual_shards import Alone
from cosmati.errors import PlanError
from cosmati.train.layout import sharded_step
from cosmati.train.layout.sharded_step import Arrivals


@pytest.mark.parametrize("is_within", [False, True])
def test_the_first_objective_is_looked_at(is_within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(sharded_step, "runs_within", lambda _: looked.append("within") or is_within)
    monkeypatch.setattr(sharded_step, "regrouped", lambda *_: looked.append("order") or ())
    arrivals: Any = object.__new__(Arrivals)
    arrivals._has_looked, arrivals._inputs = False, [(0, torch.ones(1))]
    for _ in range(3):
        if is_within:
            with pytest.raises(PlanError, match="runs a backward pass within its own"):
                arrivals.look(torch.ones(()))
        else:
            arrivals.look(torch.ones(()))
    assert looked == (["within"] * 3 if is_within else ["within", "order"])
    assert len(arrivals._inputs) == is_within


def test_a_process_that_has_all_parts_hands_on_what_it_has() -> None:
    alone, own = Alone(), torch.ones(2)
    assert alone.total(own) is own
    assert alone.everyone(own) == [own]
    assert not alone.puts_off(0, 0)
    assert (alone.degree, alone.place) == (1, 0)
