"""Watchers of a run with sensitive classes are told of a step what doesn't tell of these alone."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.clock import Clock
from cosmati.errors import PlanError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.provenance.voucher import VouchedData
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.train.config import RunConfig
from cosmati.train.outcome import StepOutcome
from cosmati.train.routes import Route
from cosmati.train.sensitive import Withholding, is_withheld, sensitive_of, withholding_of
from cosmati.train.token_routes import TokenRoute
from tests.routing.samples import PARTITION, TAXONOMY, compiled, policy_of

CLASSES = ("a/b/c", "a/b/d", "a/e", "f")
ALL = [{"class": "**", "weight": 1}]
POLICY = compiled(ALL)


def asked(own: tuple[str, ...] = (), taxonomy: Taxonomy | None = TAXONOMY) -> Any:
    config = RunConfig(budget="1ba", sensitive=own)
    return SimpleNamespace(config=config, taxonomy=taxonomy)


def vouched(*names: str) -> VouchedData:
    return VouchedData("", (), {"root/targets/taxonomy/t.json": json.dumps({"sensitive": names}).encode()})


def test_classes_are_sensitive_that_the_run_the_taxonomy_or_the_authority_calls_so() -> None:
    marked = Taxonomy("t", "1", TAXONOMY.meanings, ("a/e",))
    assert sensitive_of(asked(), POLICY, None) == ()
    assert sensitive_of(asked(("f",)), POLICY, None) == ("f",)
    assert sensitive_of(asked(taxonomy=marked), POLICY, None) == ("a/e",)
    assert sensitive_of(asked(taxonomy=None), POLICY, vouched("a/b")) == ("a/b/c", "a/b/d")
    assert sensitive_of(asked(("f",), marked), POLICY, vouched("a/b/d")) == ("a/b/d", "a/e", "f")
    assert sensitive_of(asked(taxonomy=marked), None, vouched("f")) == ()


def test_a_class_or_a_branch_that_the_run_has_not_is_refused() -> None:
    assert sensitive_of(asked(("a/b",)), POLICY, None) == ("a/b/c", "a/b/d")
    with pytest.raises(PlanError) as caught:
        sensitive_of(asked(("f", "z")), POLICY, None)
    assert str(caught.value) == (
        "RunConfig.sensitive names 'z', and the run has no such class. It has a/b/c, a/b/d, a/e, f."
    )
    with pytest.raises(PlanError) as caught:
        sensitive_of(asked(("f",)), None, None)
    assert str(caught.value) == (
        "RunConfig.sensitive names 'f', and the run has no such class. Classes come with a policy: give one."
    )


def joint() -> CompiledPolicy:
    """Classes of which one has a sensitive member."""
    return compile_policy(policy_of(ALL), taxonomy=TAXONOMY, regions=PARTITION, num_steps=2, joint=["a/e&f"])


def route(class_id: int, *, is_offered: bool = True, tokens: tuple[int, ...] | None = None) -> Route:
    packs = None
    if tokens is not None:
        weights = torch.ones(len(tokens) + 1, 2, dtype=torch.float64)
        packs = TokenRoute(weights, frozenset(), (), tuple((one, 0, 0) for one in tokens))
    return Route(0, 0, -1 if packs else class_id, (1.0, 1.0), is_offered, packs)


def outcome(*routes: Route) -> StepOutcome:
    one = torch.ones(2)
    return StepOutcome(
        clock=Clock(),
        loss=torch.tensor(2.0, dtype=torch.float64),
        sub_losses=[torch.tensor(2.0), torch.tensor(3.0)],
        routes=routes,
        weights=one,
        norms=one,
        sketches=one,
        entropies=one,
        update_norms=one,
        update_sketches=one,
        gradient_norm=lambda: 4.0,
    )


def told(*routes: Route, policy: CompiledPolicy = POLICY) -> str:
    """Return what is withheld, once it's checked that exactly that is."""
    given = outcome(*routes)
    found = Withholding(policy, ("f",)).of(given)
    gone = {name for name in StepOutcome._fields if getattr(found, name) is not getattr(given, name)} - {"withheld"}
    updates = {"update_norms", "update_sketches"}
    norms = updates | {"norms", "sketches", "entropies", "gradient_norm"}
    losses = norms | {"loss", "sub_losses"}
    assert gone == {("updates",): updates, ("norms",): norms, ("norms", "loss"): losses}[tuple(found.withheld)]
    assert all(getattr(found, name) is None for name in gone - {"gradient_norm", "loss", "sub_losses"})
    if "norms" in found.withheld:
        assert math.isnan(found.gradient_norm())
    if "loss" in found.withheld:
        assert len(found.sub_losses) == 2
        assert all(math.isnan(one) and one.dtype == torch.float64 for one in (found.loss, *found.sub_losses))
        assert found.loss.shape == ()
    return " ".join(found.withheld)


def test_a_step_without_a_sensitive_class_hides_its_updates_alone() -> None:
    assert told(route(0), route(2)) == "updates"
    assert told(route(0), route(3, is_offered=False)) == "updates"
    assert told() == "updates"


def test_a_step_in_which_a_sensitive_class_taught_hides_its_norms() -> None:
    assert told(route(0), route(3)) == "norms"
    assert told(route(3), route(1)) == "norms"


def test_a_step_of_sensitive_classes_alone_hides_its_loss_too() -> None:
    assert told(route(3)) == "norms loss"
    assert told(route(3), route(0, is_offered=False), route(3)) == "norms loss"


def test_rows_of_several_classes_are_hidden_where_one_of_these_is_sensitive() -> None:
    assert told(route(4), policy=joint()) == "norms loss"
    assert told(route(2), policy=joint()) == "updates"


def test_packs_are_hidden_by_the_classes_of_their_tokens() -> None:
    assert told(route(0, tokens=(0, 1))) == "updates"
    assert told(route(0, tokens=(0, 3))) == "norms"
    assert told(route(0, tokens=(3, 3))) == "norms loss"
    assert told(route(0, tokens=(3,)), route(0, tokens=(2,))) == "norms"


def test_a_run_without_sensitive_classes_withholds_nothing() -> None:
    assert withholding_of(None, ("f",)) is None
    assert withholding_of(POLICY, ()) is None
    assert isinstance(withholding_of(POLICY, ("f",)), Withholding)


def test_values_of_monitors_are_withheld_by_how_their_names_begin() -> None:
    names = ("gradient_norm", "update_norm_ratio", "activation/0", "loss", "my gradient_norm", "norms")
    told_of = {withheld: [is_withheld(name, withheld) for name in names] for withheld in ((), ("updates",), ("norms",))}
    assert told_of == {
        (): [False] * 6,
        ("updates",): [False, True, False, False, False, False],
        ("norms",): [True, True, True, False, False, False],
    }
    assert is_withheld("activation", ("norms", "loss"))
