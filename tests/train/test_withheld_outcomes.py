"""Watchers are told nothing that tells of sensitive classes alone: by what each microbatch of a step may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.errors import PlanError
from cosmati.train.config import RunConfig
from cosmati.train.outcome import StepOutcome
from cosmati.train.routes import Route
from cosmati.train.sensitive import Withholding, is_withheld, sensitive_of, withholding_of
from cosmati.train.token_routes import TokenRoute
from tests.train.hand_made import POLICY, outcome

MEASURED = ("norms", "sketches", "entropies", "update_norms", "update_sketches")
SENSITIVE = ("bound", "late")
"""Of free, bound and late: the last two."""
KINDS = {
    "free": (False, False),
    "bound": (True, True),
    "late": (True, True),
    "free in packs": (False, False),
    "bound in packs": (True, True),
    "bound and late": (True, True),
    "free and bound": (True, False),
    "late and free": (True, False),
}
"""Microbatches: whether they may hold a sensitive class, and whether they can hold no other."""


def route_of(kind: str, *, offered: bool = True) -> Route:
    ids = [POLICY.classes.index(name) for name in kind.removesuffix(" in packs").split(" and ")]
    if kind in POLICY.classes:
        return Route(1, 0, ids[0], (1.0, 1.0), offered)
    cells = tuple((class_id, 0, class_id) for class_id in ids)
    weights = torch.ones(len(cells) + 1, 2, dtype=torch.float64)
    return Route(-1, 0, -1, (1.0, 1.0), offered, TokenRoute(weights, frozenset(), (), cells))


def step_of(routes: Sequence[Route]) -> StepOutcome:
    measured = {name: torch.ones(len(routes), 2) for name in MEASURED}
    losses = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)]
    told = outcome(3, routes=routes, gradient_norm=lambda: 2.0, **measured)
    return told._replace(loss=losses[0], sub_losses=losses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_microbatch_is_hidden_by_the_classes_that_it_may_hold(kind: str) -> None:
    assert Withholding(POLICY, SENSITIVE)._is_hidden(route_of(kind)) == KINDS[kind]


@pytest.mark.parametrize("kinds", [(one,) for one in KINDS] + list(product(KINDS, repeat=2)), ids=str)
def test_a_step_tells_what_is_not_of_sensitive_classes_alone(kinds: tuple[str, ...]) -> None:
    given = step_of([*map(route_of, kinds)])
    found = Withholding(POLICY, SENSITIVE).of(given)
    has_some, has_no_other = any(KINDS[k][0] for k in kinds), all(KINDS[k][1] for k in kinds)
    hidden = MEASURED if has_some else ("update_norms", "update_sketches")
    for name in MEASURED:
        assert getattr(found, name) is (None if name in hidden else getattr(given, name))
    if has_no_other:
        assert found.withheld == ("norms", "loss")
        assert [math.isnan(one) for one in (found.loss, *found.sub_losses)] == [True] * 3
        assert (found.loss.shape, found.loss.dtype) == (given.loss.shape, given.loss.dtype)
    else:
        assert found.withheld == (("norms",) if has_some else ("updates",))
        assert found.loss is given.loss
        assert found.sub_losses is given.sub_losses
    assert math.isnan(found.gradient_norm()) if has_some else found.gradient_norm() == 2.0
    left = {"loss", "sub_losses", "gradient_norm", "withheld", *MEASURED}
    assert all(getattr(found, name) is getattr(given, name) for name in StepOutcome._fields if name not in left)
    assert (given.withheld, given.gradient_norm(), given.loss.item()) == ((), 2.0, 0.5)


def test_what_was_not_offered_hides_nothing() -> None:
    watched = Withholding(POLICY, SENSITIVE)
    assert watched.of(step_of([route_of("free"), route_of("bound", offered=False)])).withheld == ("updates",)
    alone = step_of([route_of("free", offered=False), route_of("bound")])
    assert watched.of(alone).withheld == ("norms", "loss")
    assert watched.of(step_of([])).withheld == ("updates",)


def test_rows_of_a_sensitive_class_and_another_are_hidden() -> None:
    classes = ("bound", "bound&free", "free", "free&late")
    policy: Any = SimpleNamespace(classes=classes)
    watched = Withholding(policy, ("bound",))
    routes = [Route(0, 0, class_id, (1.0,), offered=True) for class_id in range(4)]
    assert [watched._is_hidden(route)[0] for route in routes] == [True, True, False, False]


def test_a_run_withholds_where_it_has_a_policy_and_a_sensitive_class() -> None:
    assert withholding_of(None, ()) is None
    assert withholding_of(None, ("bound",)) is None
    assert withholding_of(POLICY, ()) is None
    assert isinstance(withholding_of(POLICY, ("bound",)), Withholding)


@pytest.mark.parametrize(
    ("name", "telling"),
    [
        ("gradient_norm", ("norms",)),
        ("gradient_norm/head", ("norms",)),
        ("activation_mean", ("norms",)),
        ("update_norm/head", ("norms", "updates")),
        ("update_ratio", ()),
        ("loss_mean", ()),
        ("my_gradient_norm", ()),
    ],
)
def test_a_value_is_withheld_by_its_name(name: str, telling: tuple[str, ...]) -> None:
    assert not is_withheld(name, ())
    assert is_withheld(name, ("norms",)) is ("norms" in telling)
    assert is_withheld(name, ("norms", "loss")) is ("norms" in telling)
    assert is_withheld(name, ("updates",)) is ("updates" in telling)


def asked(*, own: tuple[str, ...] = (), taxonomy: tuple[str, ...] | None = None, archive: Any = None) -> Any:
    given = SimpleNamespace(
        config=RunConfig(sensitive=own),
        taxonomy=None if taxonomy is None else SimpleNamespace(sensitive=taxonomy),
    )
    return given, None if archive is None else SimpleNamespace(archive=archive)


def test_sensitive_classes_are_those_of_the_run_its_taxonomy_and_its_authority() -> None:
    archive = {"root/targets/taxonomy/t/1.json": b'{"sensitive": ["late"]}'}
    policy: Any = SimpleNamespace(classes=("branch/a", "branch/b", "free", "free&late", "late"))

    def found(**options: Any) -> tuple[str, ...]:
        given, vouched = asked(**options)
        return sensitive_of(given, policy, vouched)

    assert found() == found(taxonomy=()) == found(archive={}) == ()
    assert found(own=("free",)) == ("free",)
    assert found(own=("branch",)) == ("branch/a", "branch/b")
    assert found(taxonomy=("branch/b",)) == ("branch/b",)
    assert found(archive=archive) == ("late",)
    assert found(own=("free",), taxonomy=("branch/a",), archive=archive) == ("branch/a", "free", "late")
    assert found(taxonomy=("nowhere",)) == (), "a taxonomy may have more classes than a run"


@pytest.mark.parametrize("own", [("gone",), ("free", "gone"), ("gone", "free")])
def test_a_sensitive_class_that_a_run_has_not_is_refused(own: tuple[str, ...]) -> None:
    given, _ = asked(own=own)
    with pytest.raises(PlanError, match=r"names 'gone', and .* no such class\. It has free, bound, late\.$"):
        sensitive_of(given, POLICY, None)


def test_a_sensitive_class_without_a_policy_is_refused() -> None:
    given, _ = asked(own=("free",))
    with pytest.raises(PlanError, match=r"names 'free'.* Classes come with a policy: give one\.$"):
        sensitive_of(given, None, None)
    assert sensitive_of(asked(taxonomy=("free",))[0], None, None) == ()
