"""What microbatches may teach follows from the policy's table, by class and kind of rows, and of packs by token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.isolated import Isolated
from cosmati.errors import BatchError, PlanError, RunError
from cosmati.routing.measures import RowKind
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.routes import Route, Router, refuse_measured
from tests.train.hand_made import POLICY, REGIONS, rows

CPU = torch.device("cpu")
CLASSES, KINDS = ("a", "b", "unknown"), (RowKind("low"), RowKind("high"))
# By class, kind and phase.
CELLS: dict[tuple[int, int, int], tuple[tuple[float, float], Any]] = {
    (0, 0, 0): ((1.0, 1.0), "admit"), (0, 0, 1): ((1.0, 0.0), "admit"),
    (0, 1, 0): ((0.5, 1.0), "gate"), (0, 1, 1): ((0.0, 0.0), "reject"),
    (1, 0, 0): ((0.0, 1.0), "admit"), (1, 0, 1): ((0.0, 0.25), "gate"),
    (1, 1, 0): ((0.0, 0.0), "defer"), (1, 1, 1): ((1.0, 1.0), "admit"),
    (2, 0, 0): ((1.0, 1.0), "admit"), (2, 0, 1): ((0.75, 0.5), "admit"),
    (2, 1, 0): ((0.0, 0.0), "reject"), (2, 1, 1): ((0.0, 0.0), "defer"),
}  # fmt: skip
ROWS = list(product(range(3), range(2)))
KINDED = replace(
    POLICY,
    classes=CLASSES,
    kinds=KINDS,
    weight=tuple(tuple(CELLS[c, k, p][0] for p in range(2)) for c, k in ROWS),
    decision=tuple(tuple(CELLS[c, k, p][1] for p in range(2)) for c, k in ROWS),
)
PLAIN = replace(
    POLICY,
    classes=CLASSES,
    weight=tuple(tuple(CELLS[c, 0, p][0] for p in range(2)) for c in range(3)),
    decision=(("admit", "reject"), ("defer", "gate"), ("admit", "admit")),
)
CLASS_MAP = (1, 0, 2, 0)
NUMBERS = {weights: number for number, weights in enumerate(sorted({weights for weights, _ in CELLS.values()}))}


def other(band: int) -> int:
    """Bands are numbered from the highest here, and kinds from the lowest."""
    return 1 - band


def router(policy: CompiledPolicy | None = KINDED, class_map: Sequence[int] = CLASS_MAP, **given: Any) -> Router:
    return Router(policy, REGIONS, class_map, other, **given)


@pytest.mark.parametrize(("class_id", "band", "step"), [*product(range(4), range(2), (0, 9, 10, 19))])
def test_rows_are_looked_up_by_class_kind_and_phase(class_id: int, band: int, step: int) -> None:
    own, kind, phase = CLASS_MAP[class_id], 1 - band, step // 10
    weights, decision = CELLS[own, kind, phase]
    expected = Route(NUMBERS[weights], phase, own, weights, decision in ("admit", "gate"), None, 0, 0, kind)
    assert router().route_of(class_id, step, band) == expected
    assert router().route_of(class_id, step, band, is_empty=True) == expected._replace(offered=False)
    assert router().decision(class_id, step, band) == decision


def test_where_kinds_are_one_the_band_is_kept_and_nothing_asked() -> None:
    one = router(PLAIN)
    assert one.route_of(0, 0, 7) == Route(one.route_of(0, 0).id, 0, 1, (0.0, 1.0), offered=False, kind=7)
    assert (one.route_of(0, 0).kind, one.decision(0, 0, 7), one.decision(1, 0)) == (0, "defer", "admit")
    assert Router(None, REGIONS, ()).route_of(1, 0, 7) == Route(0, 0, 0, (1.0, 1.0), offered=True, kind=7)
    assert router().route_of(1, 0).kind == 1


def test_another_policy_takes_the_place_of_one() -> None:
    one = router(class_names=["w", "x", "y", "z"], token_kinds=(1, 1, 1, 1))
    assert (one.num_classes, one.class_names) == (4, ("w", "x", "y", "z"))
    assert (Router(None, REGIONS, ()).num_classes, Router(None, REGIONS, ()).class_names) == (0, ())
    stricter = replace(KINDED, decision=(("reject", "reject"),) * 6)
    one.tighten(stricter)
    assert (one.decision(1, 0, 0), one.route_of(1, 0, 1).offered, one.route_of(1, 0, 1).kind) == ("reject", False, 0)
    one.tighten(KINDED)
    assert one.decision(1, 10, in_packs=True) == "reject"
    one.go_by(KINDED, int)
    assert (one.route_of(1, 0, 1).kind, one.decision(1, 10, in_packs=True)) == (1, "admit")
    one.go_by(KINDED, other, (0, 1, 0, 0))
    assert (one.route_of(1, 0, 1).kind, one.decision(1, 10, in_packs=True)) == (0, "reject")


def expected_of_packs(tokens: Sequence[int], phase: int, kinds: Sequence[int]) -> dict[str, Any]:
    """Combine cells by hand, region by region."""
    present = [c for c, num in enumerate(tokens) if num > 0]
    cells = [CELLS[CLASS_MAP[c], kinds[c], phase] for c in range(4)]
    weights, mixed = [], []
    for region in range(2):
        found = {cells[c][0][region] for c in present}
        weights.append(0.0 if not found else 1.0 if len(found) > 1 else found.pop())
        mixed += [region] if len({cells[c][0][region] for c in present}) > 1 else []
    admitted = [c for c in present if cells[c][1] in ("admit", "gate")]
    return {
        "weights": tuple(weights),
        "offered": bool(admitted),
        "table": [[*cell[0]] for cell in cells] + [[0.0, 0.0]],
        "mixed": frozenset(mixed),
        "withheld": tuple(c for c in present if c not in admitted),
        "cells": tuple((CLASS_MAP[c], kinds[c], NUMBERS[cells[c][0]]) for c in range(4)),
    }


@pytest.mark.parametrize("token_kinds", [(), (1, 0, 1, 1), (0, 1, 0, 0)])
@pytest.mark.parametrize("step", [9, 10])
def test_of_packs_the_cells_of_their_tokens_are_combined(step: int, token_kinds: tuple[int, ...]) -> None:
    one = router(token_kinds=token_kinds)
    for tokens in product((0, 3), repeat=4):
        expected = expected_of_packs(tokens, step // 10, token_kinds or (0,) * 4)
        found = one.route_of(None, step, 1, tokens=tokens)
        assert found.tokens is not None
        assert found.tokens.weights.dtype == torch.float64
        assert {
            "weights": found.weights,
            "offered": found.offered,
            "table": found.tokens.weights.tolist(),
            "mixed": found.tokens.mixed,
            "withheld": found.tokens.withheld,
            "cells": found.tokens.cells,
        } == expected
        assert (found.id, found.phase, found.class_id) == (-1, step // 10, -1)
    for class_id, phase in product(range(4), range(2)):
        kind = (token_kinds or (0,) * 4)[class_id]
        decision = CELLS[CLASS_MAP[class_id], kind, phase][1]
        assert one.decision(class_id, 10 * phase, 1, in_packs=True) == decision


def test_packs_under_one_kind_have_their_rows_band() -> None:
    found = router(PLAIN, token_kinds=(1, 1, 1, 1)).route_of(None, 0, 5, tokens=(1, 1, 0, 0))
    assert found.tokens is not None
    assert [(own, kind) for own, kind, _ in found.tokens.cells] == [(1, 5), (0, 5), (2, 5), (0, 5)]
    assert (found.tokens.withheld, found.offered) == ((0,), True)
    assert found.kind == 0


def packed(ids: Sequence[Sequence[int]], **given: Any) -> Batch:
    tokens = torch.tensor(ids)
    none = torch.full((len(ids),), -1)
    lineage = Lineage(torch.arange(len(ids)), none, token_class_ids=tokens, **given)
    return Batch((torch.ones_like(tokens),), lineage)


def test_tokens_are_counted_where_a_policy_meets_packs() -> None:
    mine = [packed([[0, 0, 3], [1, TOMBSTONE, 3]]), packed([[2, 2, 2]])]
    found = router().found(mine, [None, 1], 4, CPU)
    assert found.dtype == torch.float64
    assert found.tolist() == [[4, 0, 0, 2, 6, 2, 1, 0, 2], [4, 0, 0, 1, 3, 0, 0, 3, 0]]
    assert router().found(mine, [2, 1], 4, CPU).tolist() == [[4, 0, 0, 2, 6], [4, 0, 0, 1, 3]]
    assert Router(None, REGIONS, ()).found(mine, [None, 1], 4, CPU).shape == (2, 5)


def test_routes_of_a_step_are_those_of_its_microbatches_each() -> None:
    found = torch.tensor([[9, 0, 1, 3, 30, 0, 0, 0, 0], [9, 1, 0, 2, 2, 0, 0, 0, 0], [9, 0, 0, 5, 6, 1, 0, 1, 0]])
    one = router()
    told = one.routes([1, 3, None], 9, found.double())
    assert told[:2] == [
        one.route_of(1, 9, 1)._replace(num_rows=3, num_tokens=30),
        one.route_of(3, 9, 0)._replace(num_rows=2, num_tokens=2, offered=False),
    ]
    assert told[2]._replace(tokens=None) == Route(-1, 0, -1, (1.0, 1.0), offered=True, num_rows=5, num_tokens=6)
    assert told[0].offered is told[2].offered is True
    plain = Router(None, REGIONS, ()).routes([None], 3, torch.tensor([[3, 0, 2, 4, 8]]).double())
    assert plain == [Route(0, 0, 0, (1.0, 1.0), offered=True, num_rows=4, num_tokens=8, kind=2)]


def test_ranks_at_different_steps_are_refused() -> None:
    found = torch.tensor([[12, 0, 0, 1, 1], [9, 0, 0, 1, 1], [12, 0, 0, 1, 1]]).double()
    with pytest.raises(RunError, match="Ranks are at steps 9 and 12: one has failed"):
        router().routes([1, 1, 1], 9, found)


def of_unknown(class_id: int | None = None) -> Batch:
    return Batch((torch.ones(2, 1),), Lineage.of_rows(0, 2), class_id)


def test_a_made_batch_is_of_its_rows_class_or_of_the_unknown_one() -> None:
    one = router()
    assert one.class_of(of_unknown()) == 2
    assert one.class_of(of_unknown(3)) == 3
    for policy, class_map in ((KINDED, (1, 0)), (replace(KINDED, classes=("a", "b", "c")), CLASS_MAP)):
        with pytest.raises(PlanError, match="has no class 'unknown' for such rows"):
            router(policy, class_map).class_of(of_unknown())
    assert router(replace(KINDED, classes=("unknown", "b", "c"))).class_of(of_unknown()) == 1


@pytest.mark.parametrize("class_id", [-1, 4])
def test_a_class_id_outside_is_refused(class_id: int) -> None:
    with pytest.raises(PlanError, match=f"Class id {class_id} names no class: ids go from 0 to 3"):
        router().class_of(of_unknown(class_id))
    assert [router().class_of(of_unknown(known)) for known in (0, 3)] == [0, 3]


def test_rows_of_two_classes_are_refused_with_what_the_batch_says() -> None:
    lineage = Lineage(torch.arange(2), torch.tensor([0, 1]))
    for class_id, said in ((None, r"\[0, 1\], and"), (3, r"\[0, 1, 3\] \(class_id = 3 is one of them\), and")):
        with pytest.raises(PlanError, match=said):
            router().class_of(Batch((torch.ones(2, 1),), lineage, class_id))


def test_packs_have_no_class_and_are_no_measures_to_go_by() -> None:
    mine = packed([[0, 1]])
    assert router(PLAIN).class_of(mine) is None
    with pytest.raises(PlanError, match=r"The policy has bands or grades \(low, high\), and packs"):
        router().class_of(mine)
    assert router().class_of(replace(packed([[1, 1]]), class_id=1)) == 1
    refuse_measured(PLAIN)
    many = replace(KINDED, kinds=tuple(RowKind(str(n)) for n in range(6)))
    with pytest.raises(PlanError, match=r"\(0, 1, 2, 3, 4\)"):
        refuse_measured(many)


def of_bands(bands: Sequence[int], band: int) -> Batch:
    return replace(rows(*range(len(bands)), bands=torch.tensor(bands)), band=band)


def test_a_sources_microbatch_is_of_the_band_and_class_it_says() -> None:
    one = router()
    one.check(rows(0, 1), 0)
    one.check(of_bands([1, 1], 1), 0)
    with pytest.raises(PlanError, match=r"A microbatch of band 1 holds rows of bands \[0, 1\], and"):
        one.check(of_bands([1, 0], 1), 0)
    with pytest.raises(PlanError, match=r"announces a microbatch of class 1, and its rows' lineage says \[0\]"):
        one.check(rows(0, 1), 1)
    one.check(of_unknown(), 1)
    with pytest.raises(PlanError, match="announces a microbatch of several classes, and its lineage doesn't tell"):
        one.check(rows(0, 1), None)
    with pytest.raises(PlanError, match="of several classes"):
        one.check(of_unknown(), None)
    with pytest.raises(BatchError, match="have 3 rows, and its lineage 2"):
        one.check(replace(rows(0, 1), data=torch.ones(3, 1)), 0)


def test_without_a_policy_nothing_is_compared() -> None:
    Router(None, REGIONS, ()).check(replace(of_bands([1, 0], 1), data=torch.ones(3, 1)), 5)


@pytest.mark.parametrize(
    ("ids", "said"), [([0, 3], None), ([-1, 2], None), ([-1, -1], None), ([0, 4], "[0, 4]"), ([-2, 1], "[-2, 1]")]
)
def test_tokens_are_of_classes_that_there_are(ids: list[int], said: str | None) -> None:
    if said is None:
        router().check(packed([ids]), None)
    else:
        with pytest.raises(PlanError) as caught:
            router().check(packed([ids]), None)
        assert str(caught.value) == f"Tokens have class ids {said}, and ids go from 0 to 3: mend the source."


def test_packs_of_one_class_are_compared_with_what_is_announced() -> None:
    router().check(packed([[1, 1]]), 1)
    router().check(packed([[-1, -1]]), 1)
    with pytest.raises(PlanError, match=r"of class 1, and its rows' lineage says \[0, 1\]"):
        router().check(packed([[0, 1]]), 1)


def own_modules(**names: str) -> tuple[dict[str, Isolated], dict[str, Isolated]]:
    made = {name: Isolated(of) for name, of in names.items()}
    return made, {f"model.{name}": module for name, module in made.items()}


def test_what_a_class_has_of_its_own_runs_for_its_rows_alone() -> None:
    made, isolated = own_modules(first="a", second="b")
    one = router(isolated=isolated)
    with one.running(one.route_of(1, 0, 1), rows(0), CPU):
        assert [made["first"].rows, made["second"].rows] == [True, False]
    with one.running(one.route_of(0, 0, 1), rows(0), CPU):
        assert [made["first"].rows, made["second"].rows] == [False, True]
    assert not made["second"].is_enabled


def test_of_packs_it_runs_at_the_classs_tokens_that_are_not_withheld() -> None:
    made, isolated = own_modules(first="a", second="b", third="unknown", last="unknown")
    one = router(PLAIN, isolated=isolated)
    mine = packed([[0, 1, TOMBSTONE], [3, 3, 1]])
    # Class b is deferred in the first phase.
    with one.running(one.route_of(None, 0, tokens=(1, 2, 0, 2)), mine, CPU):
        first = made["first"].rows
        assert isinstance(first, Tensor)
        assert first.tolist() == [[False, True, False], [True, True, True]]
        assert made["second"].rows is made["third"].rows is made["last"].rows is False
    # And class a rejected in the second.
    with one.running(one.route_of(None, 10, tokens=(1, 2, 0, 2)), mine, CPU):
        second = made["second"].rows
        assert isinstance(second, Tensor)
        assert second.tolist() == [[True, False, False], [False, False, False]]
        assert made["first"].rows is False


def test_without_a_policy_what_is_enabled_stays_so() -> None:
    made, isolated = own_modules(first="a")
    made["first"].rows = True
    free = Router(None, REGIONS, (), isolated=isolated)
    with free.running(free.route_of(None, 0), rows(0), CPU):
        assert made["first"].rows is True
    bare = router()
    assert isinstance(bare.running(bare.route_of(1, 0), rows(0), CPU), nullcontext)
