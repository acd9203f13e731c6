"""A given policy is compiled for the run's length and the source's classes, or refused with what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Time
from cosmati.core.source import Source
from cosmati.data.graded import SourceKind
from cosmati.data.packed import PackedSource
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import PlanError, PolicyError
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import RunConfig
from cosmati.train.given_policy import (
    _class_map,
    _Counter,
    _joint,
    _refuse_measured_packs,
    compile_given,
    offered,
)
from cosmati.train.ingredients import Ingredients
from tests.routing.samples import PARTITION, TAXONOMY, compiled, policy_of
from tests.routing.test_bands import BANDS

ALL = [{"class": "**", "weight": 1}]
EVIDENCE = {"evidence": {"grades": ["report", "trial"]}}


class Rows:
    """A source that only says what its rows are."""

    digest = "d"

    def __init__(self, *class_names: str, **more: object) -> None:
        self.class_names = class_names
        vars(self).update(more)

    def order(self, **_: object) -> Any:
        raise NotImplementedError


def given(policy: PolicyFile | None, data: object = None, *, has_taxonomy: bool = True) -> Ingredients:
    return Ingredients(
        model=nn.Identity(),
        loss=lambda model, data: torch.zeros(()),
        data=data,  # type: ignore[arg-type]
        optimizers=(),
        methods=(),
        policy=policy,
        taxonomy=TAXONOMY if has_taxonomy else None,
        config=RunConfig(budget="40ba"),
    )


def steps(text: str = "40ba", **known: Any) -> Budget:
    return Budget(Time.parse(text), **known)


# Which classes are offered.


def test_without_a_policy_all_classes_are_offered_and_nothing_is_compiled() -> None:
    assert offered(given(None), PARTITION) is None
    assert compile_given(given(None), PARTITION, steps("1sec")) == (None, ())


def test_classes_are_offered_that_some_phase_admits_by_their_place_in_the_source() -> None:
    policy = policy_of(
        [
            {"class": "a/e", "weight": 1, "phase": "late"},
            {"class": "a/e", "decision": "defer", "phase": "early"},
            {"class": "f", "weight": 0.5, "region": "head"},
            {"class": "a/b/c", "decision": "reject"},
        ]
    )
    names = ("f", "a/b/d", "a/e", "a/b/c")
    assert offered(given(policy, Rows(*names)), PARTITION) == {0, 2}
    # Who gives batches by hand speaks of the taxonomy's classes.
    assert offered(given(policy), PARTITION) == {2, 3}


def test_rows_of_several_classes_are_offered_where_all_of_these_are() -> None:
    policy = policy_of([{"class": "a/e", "weight": 1}, {"class": "f", "weight": 1}])
    assert offered(given(policy, Rows("a/e&f", "a/b/c&f", "f")), PARTITION) == {0, 2}


def test_phases_of_any_length_are_offered_before_steps_are_known() -> None:
    phases = [{"name": "one", "until": "3ep"}, {"name": "two", "until": "5ep"}, {"name": "three"}]
    policy = policy_of([{"class": "f", "weight": 1, "phase": "three"}], phases=phases)
    assert offered(given(policy), PARTITION) == {3}


@pytest.mark.parametrize("ask", [offered, lambda one, regions: compile_given(one, regions, steps())])
def test_a_policy_without_a_taxonomy_is_refused(ask: Any) -> None:
    with pytest.raises(PlanError, match=r"give the taxonomy too, Trainer\(\.\.\., taxonomy=software_licences\(\)\)"):
        ask(given(policy_of(ALL), has_taxonomy=False), PARTITION)


@pytest.mark.parametrize("ask", [offered, lambda one, regions: compile_given(one, regions, steps())])
def test_classes_that_the_taxonomy_lacks_are_refused_by_name(ask: Any) -> None:
    with pytest.raises(PlanError) as caught:
        ask(given(policy_of(ALL), Rows("z", "f", "b")), PARTITION)
    assert str(caught.value) == ("The data have classes that the taxonomy lacks: b, z. It has a/b/c, a/b/d, a/e, f.")


def test_a_member_of_a_joint_class_that_the_taxonomy_lacks_is_refused() -> None:
    with pytest.raises(PolicyError, match="there's no class 'z'"):
        compile_given(given(policy_of(ALL), Rows("f&z")), PARTITION, steps())


def test_a_counter_puts_each_phase_after_the_one_before_and_reads_what_it_is_given() -> None:
    counter = _Counter()
    assert [counter(text) for text in ("0.5dur", "3ep", "0.1dur")] == [1, 2, 3]
    assert _Counter()("1ba") == 1
    with pytest.raises(PlanError):
        counter("soon")


def test_names_of_the_sources_joint_classes_and_no_others_are_asked_for() -> None:
    assert _joint(given(None, Rows("f", "f&a/e"))) == ["f&a/e"]
    assert _joint(given(None, [1])) == []
    assert isinstance(Rows(), Source)


def test_members_of_a_joint_class_may_be_told_in_any_order() -> None:
    assert _class_map(given(None, Rows("f&a/e", "f")), ("a/e", "f", "a/e&f")) == (2, 1)
    assert _class_map(given(None), ("a/e", "f")) == (0, 1)


# What is compiled.


def test_a_policy_is_compiled_for_the_steps_of_the_run() -> None:
    policy, class_map = compile_given(given(policy_of(ALL), Rows("f", "a/e&f", "a/e")), PARTITION, steps())
    assert policy is not None
    assert policy.classes == ("a/b/c", "a/b/d", "a/e", "f", "a/e&f")
    assert class_map == (3, 4, 2)
    assert [phase.end_step for phase in policy.phases] == [20, 40]
    epochs = policy_of(ALL, phases=[{"name": "early", "until": "1ep"}, {"name": "late"}])
    policy, class_map = compile_given(given(epochs), PARTITION, steps("3ep", steps_per_epoch=7))
    assert policy is not None
    assert [phase.end_step for phase in policy.phases] == [7, 21]
    assert class_map == (0, 1, 2, 3)


def test_a_run_whose_steps_are_unknown_has_no_phases() -> None:
    with pytest.raises(
        PlanError, match=r"whose number of steps is known; '40ba' has none\. Give it in steps \('1000ba'"
    ):
        compile_given(given(policy_of(ALL)), PARTITION, steps("3ep"))


@pytest.mark.parametrize("starvation", ["alarm", "stop"])
def test_regions_that_the_data_starve_are_told_as_the_policy_says(starvation: str) -> None:
    rules = [{"class": "f", "weight": 1}, {"class": "a/e", "weight": 1, "region": "head"}]
    one = given(policy_of(rules, starvation=starvation), Rows("a/e"))
    if starvation == "stop":
        with pytest.raises(PolicyError, match=r"no rows that may teach tail in phase early"):
            compile_given(one, PARTITION, steps())
    else:
        with pytest.warns(UserWarning, match=r"no rows that may teach tail in phase early"):
            compile_given(one, PARTITION, steps())


# Packs that were measured.

MEASURED = Rows("f", kinds=((0, 0), (0, 1)), measured={0: (0, {}), 1: (2, {"evidence": "trial", "age": "old"})})


def test_packs_that_were_measured_are_refused_where_the_policy_goes_by_that() -> None:
    packs = PackedSource(MEASURED, ("f",))  # type: ignore[arg-type]
    told = r"The packs' shards say band 2, age old, evidence trial, and the policy goes by that"
    for fields in ({"bands": BANDS}, {"measures": EVIDENCE}):
        policy = compiled(ALL, **fields)
        for data in (packs, Tombstoned(packs, ["f"])):  # type: ignore[arg-type]
            with pytest.raises(PolicyError, match=told):
                _refuse_measured_packs(policy, data)
        # Of what's no pack, nothing is refused here.
        _refuse_measured_packs(policy, MEASURED)
        _refuse_measured_packs(policy, [1])
    _refuse_measured_packs(compiled(ALL), packs)


def test_packs_of_which_nothing_was_measured_are_taken() -> None:
    policy = compiled(ALL, bands=BANDS, measures=EVIDENCE)
    _refuse_measured_packs(policy, PackedSource(Rows("f"), ("f",)))  # type: ignore[arg-type]
    lowest = Rows("f", kinds=((0, 0),), measured={0: (0, {"age": "old"})})
    _refuse_measured_packs(policy, PackedSource(lowest, ("f",)))  # type: ignore[arg-type]


def test_packs_of_a_band_that_the_policy_lacks_are_named_packs() -> None:
    far = Rows("f", kinds=((0, 3),))
    with pytest.raises(PolicyError, match=r"^Packs say band 3, and the policy has 3"):
        _refuse_measured_packs(compiled(ALL, bands=BANDS), PackedSource(far, ("f",)))  # type: ignore[arg-type]


def test_compiling_refuses_measured_packs_and_reads_what_packs_say_of_their_rows() -> None:
    policy = policy_of(ALL, bands=BANDS)
    with pytest.raises(PolicyError, match=r"packs. shards say band 2"):
        compile_given(given(policy, PackedSource(MEASURED, ("f",))), PARTITION, steps())  # type: ignore[arg-type]
    kinds = (SourceKind(band=2),)
    found, class_map = compile_given(
        given(policy, PackedSource(Rows("f"), ("f",), kinds)),  # type: ignore[arg-type]
        PARTITION,
        steps(),
    )
    assert found is not None
    assert class_map == (3,)
