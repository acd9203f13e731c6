"""The policy that the user gave, compiled for the run, and the classes of the source in it."""

from __future__ import annotations

from collections.abc import Sequence

from cosmati.core.clock import Budget, Time
from cosmati.core.source import Source
from cosmati.data.packed import PackedSource
from cosmati.data.tombstoned import beneath
from cosmati.errors import PlanError, PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.records.joint_classes import is_joint, joint_name
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.routing.regions import Regions
from cosmati.routing.starvation import check_kinds, described_by
from cosmati.train.ingredients import Ingredients


def _taxonomy(given: Ingredients) -> Taxonomy:
    if given.taxonomy is None:
        msg = "A policy speaks of classes: give the taxonomy too, Trainer(..., taxonomy=software_licences())."
        raise PlanError(msg)
    return given.taxonomy


def _class_map(given: Ingredients, classes: Sequence[str]) -> tuple[int, ...]:
    names = [joint_name([name]) for name in given.data.class_names] if isinstance(given.data, Source) else classes
    unknown = sorted(set(names) - set(classes))
    if unknown:
        msg = f"The data have classes that the taxonomy lacks: {', '.join(unknown)}. It has {', '.join(classes)}."
        raise PlanError(msg)
    return tuple(classes.index(name) for name in names)


def _joint(given: Ingredients) -> list[str]:
    return [name for name in given.data.class_names if is_joint(name)] if isinstance(given.data, Source) else []


def offered(given: Ingredients, regions: Regions) -> frozenset[int] | None:
    """Return the source's classes that the policy admits in some phase; None means all."""
    if given.policy is None:
        return None
    draft = compile_policy(
        given.policy,
        taxonomy=_taxonomy(given),
        regions=regions,
        num_steps=1 << 30,
        resolve=_Counter(),
        joint=_joint(given),
    )
    class_map = _class_map(given, draft.classes)
    return frozenset(c for c, own in enumerate(class_map) if draft.ever_admits(own))


class _Counter:
    """Stands for a resolver where the steps aren't known yet: phases end one after another."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, text: str) -> int:
        Time.parse(text)
        self._step += 1
        return self._step


def compile_given(
    given: Ingredients, regions: Regions, budget: Budget
) -> tuple[CompiledPolicy | None, tuple[int, ...]]:
    """Compile the policy for the run, and say which of its classes each of the source's is.

    Raises:
        PlanError, PolicyError: it doesn't fit the run, the model or the data.
    """
    if given.policy is None:
        return None, ()
    if budget.num_steps is None:
        msg = (
            f"A policy's phases need a run whose number of steps is known; {given.config.budget!r} has "
            "none. Give it in steps ('1000ba'), or rows with classes in a Source."
        )
        raise PlanError(msg)
    policy = compile_policy(
        given.policy,
        taxonomy=_taxonomy(given),
        regions=regions,
        num_steps=budget.num_steps,
        resolve=budget.step_of,
        joint=_joint(given),
    )
    class_map = _class_map(given, policy.classes)
    _refuse_measured_packs(policy, given.data)
    check_kinds(policy, given.data, class_map, on_starvation=given.policy.starvation)
    return policy, class_map


def _refuse_measured_packs(policy: CompiledPolicy, data: object) -> None:
    """Refuse packs whose shards say that something was measured which the policy goes by: it's of no document."""
    packs, _ = beneath(data)
    if not isinstance(packs, PackedSource):
        return
    told = described_by(packs.source)
    for _, number in getattr(packs.source, "kinds", ()):
        band, grades = told(number)
        if policy.kind_of(band, grades, "Packs"):
            what = ", ".join([f"band {band}", *(f"{name} {grade}" for name, grade in sorted(grades.items()))])
            msg = (
                f"The packs' shards say {what}, and the policy goes by that; but the documents of a pack are of "
                "kinds of their own. Write packs without band= and grades=, and say those of their rows with "
                "PackedSource(..., row_kinds=...)."
            )
            raise PolicyError(msg)
