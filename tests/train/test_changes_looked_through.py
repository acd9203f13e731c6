"""A resume has changes of policy and budget looked through, and ranks tell one another the form of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosmati import RunConfig
from cosmati.errors import PlanError
from cosmati.train import continuity
from cosmati.train.identity import Change
from tests.train.test_continuity_by_hand import IDENTITY, PLAN, ROWS, Made, Told, begun, checkpoint, facts_of, of_ranks


def test_a_policys_change_is_looked_through_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    anchor, by = {"text": {}, "root": "r", "number": 3}, [Change("policy.changed_by", None, "the operator")]
    monkeypatch.setattr(continuity, "change_policy", lambda *given: asked.append(given) or (anchor, by))
    made = Made()
    one = begun(made)
    one.resume(checkpoint(7, signed_policy={"number": 2}), PLAN)
    assert asked == [({"number": 2}, None, made, 7)]
    assert (one.anchor, one.changed) == (anchor, by)


@pytest.mark.parametrize(("change", "is_new"), [(("budget",), False), (("budget", "schedule"), True)])
def test_another_budget_is_held_against_the_past(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, ...], is_new: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(continuity, "check_past", lambda *given, **named: asked.append((given, named)))
    made, kept = Made(config=RunConfig(budget="8ba", change=change)), checkpoint()
    begun(made).resume(kept, PLAN)
    assert asked == []
    one = begun(made, {**IDENTITY, "budget.span": "8ba"})
    one.resume(kept, PLAN)
    assert asked == [((made, kept), {"schedule_is_new": is_new})]
    assert one.changed == [Change("budget.span", "4ba", "8ba")]


def test_each_rank_tells_the_form_of_its_own_rows() -> None:
    heard: list[Any] = []

    class Hearing(Told):
        def told_by_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
            heard.append(told.get("specs"))
            return super().told_by_all(told)

    one = begun(Made(ranks=Hearing({})))
    one.see(torch.zeros(2, 2, dtype=torch.int64))
    assert [specs for specs in heard if specs] == [[([2, 2], "int64", 1)]]


def test_the_first_rank_that_differs_is_named_beside_rank_0() -> None:
    one = begun()
    one.see(ROWS)
    own = float.fromhex(facts_of(one)["probe"]["losses"][0])
    with pytest.raises(PlanError, match=rf"has the loss {own!r} on rank 0, and 8\.0 on rank 1, from"):
        of_ranks({"losses": ["0x1p+3"]}, {"losses": ["0x1p+4"]}).see(ROWS)
