"""What can't be placed in a run whose epochs nobody can measure."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati.core.clock import Budget, Time
from cosmati.errors import PlanError
from cosmati.optim import Constant, Cosine, Linear, MultiStep
from cosmati.train.epochs import _is_in_epochs, _moves, refuse_endless


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("1ep", True),
        ("0.5ep", True),
        ("0ep", False),
        ("10ba", False),
        ("0.5dur", False),
        ("64sp", False),
        ("ep", False),
        ("a text", False),
        ("", False),
        (3, False),
        (None, False),
        (("10ba", "2ep"), True),
        (("10ba", "0ep"), False),
        ((), False),
    ],
)
def test_spans_in_epochs_are_known(value: object, is_one: bool) -> None:
    assert _is_in_epochs(value) is is_one


def budget(span: str, ratio: float = 1.0) -> Budget:
    return Budget(Time.parse(span), ratio=ratio)


@pytest.mark.parametrize(
    ("schedule", "span", "moves"),
    [
        (None, "4ep", False),
        (Constant(), "4ep", False),
        (Cosine(), "4ep", True),
        (Linear(), "0.5ep", True),
        (MultiStep(milestones=("0.25dur", "0.5dur"), factor=0.1), "4ep", False),
        (MultiStep(milestones=("0.3dur",), factor=0.1), "4ep", True),
        (MultiStep(milestones=("0.95dur",), factor=0.1), "4ep", True),
        (MultiStep(milestones=("0.96dur",), factor=0.1), "2.5ep", True),
    ],
)
def test_a_schedule_that_steps_between_epochs_does_not_move_within_one(schedule: Any, span: str, moves: bool) -> None:
    assert _moves(schedule, budget(span)) is moves


def test_a_loop_of_ones_own_has_no_epochs() -> None:
    refuse_endless(budget("4ep"), own_loop=False)
    refuse_endless(budget("400ba"), own_loop=True)
    with pytest.raises(PlanError, match=r"A budget of '4ep' never ends here: .*1000ba.*64000sp"):
        refuse_endless(budget("4ep"), own_loop=True)
