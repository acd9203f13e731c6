"""What is done for each microbatch before a step, on ranks of which some have none of those that others run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import PlanError
from cosmati.train import collectives
from cosmati.train.collectives import MetAloneError, run_alike


def ranks(*, can_tell: bool = True, has_met: bool = False, others_say: bool = False) -> Any:
    """The first of two ranks, whose microbatches are 0 and 1."""
    return SimpleNamespace(
        mine=lambda _num: (0, 1), has_met=has_met, can_tell=can_tell, agree=lambda flag: flag or others_say
    )


def meets() -> int:
    raise MetAloneError


def fails() -> int:
    raise ZeroDivisionError


@pytest.fixture(params=[frozenset({0}), frozenset({1}), frozenset()], ids=["0 alone", "1 alone", "none alone"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> frozenset[int]:
    monkeypatch.setattr(collectives, "unmet", lambda _ranks, _offered: request.param)
    found: frozenset[int] = request.param
    return found


def test_what_meets_nobody_is_done(alone: frozenset[int]) -> None:
    for runs_model in (False, True):
        assert run_alike(ranks(), [True] * 4, [lambda: 5, lambda: 6], runs_model=runs_model) == ([5, 6], None)


def test_what_waits_for_ranks_that_do_not_run_it_is_refused(alone: frozenset[int]) -> None:
    for own, given in (([meets, lambda: 6], ranks()), ([lambda: 5, lambda: 6], ranks(others_say=True))):
        if alone:
            with pytest.raises(PlanError):
                run_alike(given, [True] * 4, own, runs_model=True)
    if alone:
        with pytest.raises(PlanError):
            run_alike(ranks(has_met=True), [True] * 4, [lambda: 5, lambda: 6], runs_model=False)
    else:
        assert run_alike(ranks(has_met=True), [True] * 4, [lambda: 5, lambda: 6], runs_model=True) == ([5, 6], None)


def test_a_failure_is_told_where_others_can_be_told_of_it(alone: frozenset[int]) -> None:
    found, failure = run_alike(ranks(), [True] * 4, [lambda: 5, fails], runs_model=True)
    assert (found, type(failure)) == ([], ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        run_alike(ranks(can_tell=False), [True] * 4, [lambda: 5, fails], runs_model=True)
