"""A resume goes on where every change is free or was asked for, and is refused with the names of all that aren't."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati.errors import ChangedRunError
from cosmati.train.config import CHANGEABLE
from cosmati.train.identity import Change, check_resume, differences, is_other_python, kind_of

KINDS = {
    "cadence.checkpoint_every": "free",
    "parent.run": "free",
    "parent": "free",
    "optimizers.0.schedule": "schedule",
    "optimizers.12.schedule.warmup": "schedule",
    "optimizers.0.lr": "fixed",
    "optimizers.schedule": "fixed",
    "policy.digest": "policy",
    "policy": "policy",
    "budget": "budget",
    "schedule": "schedule",
    "artifacts.0": "artifacts",
    "model.contents.0.table": "fixed",
    "policies": "fixed",
    "seed": "fixed",
}
TABLE = "model.contents.0.table"


def resumed(was: dict[str, Any], now: dict[str, Any], *asked: str, **told: Any) -> list[Change]:
    return check_resume(was, now, asked=asked, where="The checkpoint", **told)


def refused(was: dict[str, Any], now: dict[str, Any], *asked: str, **told: Any) -> str:
    with pytest.raises(ChangedRunError) as caught:
        resumed(was, now, *asked, **told)
    return str(caught.value)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_each_fact_has_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith(("parent", "artifacts"))])
def test_a_change_goes_on_record_where_it_is_free_or_asked_for(name: str) -> None:
    change = Change(name, 1, 2)
    same = {"other": 0}
    for asked in ((), *[(one,) for one in CHANGEABLE], CHANGEABLE):
        if KINDS[name] in ("free", *asked):
            assert resumed({name: 1, **same}, {name: 2, **same}, *asked) == [change]
        else:
            message = refused({name: 1, **same}, {name: 2, **same}, *asked)
            assert message.startswith(f"The checkpoint is of another run: {change}. Resume with the recipe")
            offer = f"To change the {KINDS[name]} on purpose, say so: RunConfig(change=('{KINDS[name]}',))."
            assert message.endswith(offer) == (KINDS[name] in CHANGEABLE)
    assert resumed({name: 1}, {name: 1}) == []


def test_what_has_come_and_what_has_gone_is_a_change_too() -> None:
    assert "b 2, was absent; seed absent, was 1" in refused({"seed": 1}, {"b": 2})
    assert resumed({"budget": 1}, {"policy": 2}, "budget", "policy") == [
        Change("budget", 1, None),
        Change("policy", None, 2),
    ]


def test_several_are_named_in_order_and_offered_together() -> None:
    message = refused({"seed": 1, "policy": 1, "budget": 1, "cadence.x": 1}, dict.fromkeys(("seed", "policy"), 2))
    assert "another run: budget absent, was 1; policy 2, was 1; seed 2, was 1. " in message
    assert message.endswith(
        "To change the budget and the policy on purpose, say so: RunConfig(change=('budget', 'policy'))."
    )


def test_artifacts_may_be_named_later_and_then_stay() -> None:
    assert resumed({}, {"artifacts.0": "a"}) == [Change("artifacts.0", None, "a")]
    assert "artifacts: 0 b, was a" in refused({"artifacts.0": "a"}, {"artifacts.0": "b"})
    assert "artifacts: 1 b, was absent" in refused({"artifacts.0": "a"}, {"artifacts.0": "a", "artifacts.1": "b"})
    assert "on purpose" not in refused({"artifacts.0": "a"}, {})


@pytest.mark.parametrize("told", [{}, {"is_elsewhere": False}])
def test_where_nothing_is_said_the_machine_is_the_same_and_tables_count(told: dict[str, bool]) -> None:
    was, now = {TABLE: "1", "model.contents": "1"}, {TABLE: "2", "model.contents": "1"}
    assert "model contents 0: table 2, was 1" in refused(was, now, **told)
    assert differences(was, now, is_elsewhere=False) == [Change(TABLE, "1", "2")]


def test_elsewhere_tables_may_differ_and_nothing_beside_them() -> None:
    was, now = {TABLE: "1", "budget": 1, "model.contentsx": 1}, {TABLE: "2", "budget": 1, "model.contentsx": 1}
    assert resumed(was, now, is_elsewhere=True) == []
    for name in ("model.contents", "model.contentsx", "loss.contents.0", "model.options.0"):
        assert differences({name: 1, **was}, {**now, name: 2}, is_elsewhere=True) == [Change(name, 1, 2)]
        refused({**was, name: 1}, {**now, name: 2}, is_elsewhere=True)


@pytest.mark.parametrize(
    ("parent", "asked", "change"),
    [
        ({}, {}, None),
        ({"parent.run": "r", "parent.step": 3}, {}, None),
        ({"parent.run": "r", "parent.step": 3}, {"parent.asked": "r"}, None),
        ({"parent.run": "r", "parent.step": 3}, {"parent.asked": "r", "parent.asked_step": 3}, None),
        ({"parent.file": "f"}, {"parent.asked": "f"}, None),
        ({"parent.run": "r"}, {"parent.asked": "q"}, "load_weights q, was r"),
        ({"parent.run": "r", "parent.file": "f"}, {"parent.asked": "f"}, "load_weights f, was r"),
        ({}, {"parent.asked": "q"}, "load_weights q, was absent"),
        ({"parent.run": "r", "parent.step": 3}, {"parent.asked_step": 4}, "load_weights: step 4, was 3"),
        ({"parent.run": "r", "parent.step": 3}, {"parent.asked": "q", "parent.asked_step": 4}, "load_weights q, was r"),
        ({"parent.run": "r"}, {"parent.asked_step": 0}, "load_weights: step 0, was absent"),
    ],
)
def test_a_resume_may_ask_for_the_weights_that_the_run_began_with(
    parent: dict[str, Any], asked: dict[str, Any], change: str | None
) -> None:
    if change is None:
        assert resumed(parent, {**asked, "cadence.x": 1}) == [Change("cadence.x", None, 1)]
    else:
        assert f"of another run: {change}. " in refused(parent, asked)


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("model.options.0.seen", "seen"),
        ("model.contents.layer.cache", "cache"),
        ("loss.options.count", "count"),
        ("method_options.0.function.globals.table.1", "table"),
        ("model.options.0.is", None),
        ("seed", None),
    ],
)
def test_what_may_only_count_is_offered_to_be_declared(name: str, attribute: str | None) -> None:
    message = refused({name: 1}, {name: 2})
    if attribute is None:
        assert "forward_caches" not in message
    else:
        assert f"say so in its class or function: forward_caches = ('{attribute}',)." in message


@pytest.mark.parametrize(
    ("name", "was", "now", "is_other"),
    [
        ("loss.code", "ab of Python 3.11", "cd of Python 3.12", True),
        ("loss.code", "ab of Python 3.11", "cd of Python 3.11", False),
        ("loss.name", "ab of Python 3.11", "cd of Python 3.12", False),
        ("loss.code", None, "cd of Python 3.12", False),
        ("loss.code", "ab of Python 3.11", None, False),
    ],
)
def test_code_that_another_python_has_compiled_is_no_change(
    name: str, was: str | None, now: str | None, is_other: bool
) -> None:
    assert is_other_python(Change(name, was, now)) == is_other
    assert differences({name: was}, {name: now}, is_elsewhere=False) == ([] if is_other else [Change(name, was, now)])
