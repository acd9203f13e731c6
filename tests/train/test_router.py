"""Which regions a microbatch may teach: class and step looked up in a policy, without a trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.errors import PlanError, PolicyError
from cosmati.routing.regions import Regions
from cosmati.train.routes import Route, Router, empty_flags
from tests.train.hand_made import POLICY, REGIONS, rows

# The source's classes 0, 1, 2 are the policy's "late", "free", "bound".
ROUTER = Router(POLICY, REGIONS, (2, 0, 1))
# POLICY.routes, sorted: (0, 0), (0, 0.5), (0, 1), (1, 1)
ROUTES = {
    (1, 0): Route(3, 0, 0, (1.0, 1.0), offered=True),
    (1, 19): Route(3, 1, 0, (1.0, 1.0), offered=True),
    (2, 9): Route(2, 0, 1, (0.0, 1.0), offered=True),
    (2, 10): Route(1, 1, 1, (0.0, 0.5), offered=True),
    (0, 9): Route(0, 0, 2, (0.0, 0.0), offered=False),  # deferred
    (0, 10): Route(3, 1, 2, (1.0, 1.0), offered=True),
}


@pytest.mark.parametrize(("class_id", "step"), ROUTES)
def test_a_class_is_looked_up_at_its_step(class_id: int, step: int) -> None:
    expected = ROUTES[class_id, step]
    assert ROUTER.route_of(class_id, step) == expected
    assert ROUTER.route_of(class_id, step, is_empty=True) == expected._replace(offered=False)


@pytest.mark.parametrize("router", [ROUTER, Router(None, REGIONS, ())])
def test_of_no_microbatch_a_route_counts_nothing(router: Router) -> None:
    found = router.route_of(1, 0)
    assert (found.num_rows, found.num_tokens) == (0, 0)


def test_a_step_outside_the_run_has_no_route() -> None:
    with pytest.raises(PolicyError, match="Step 20"):
        ROUTER.route_of(1, 20)


@pytest.mark.parametrize("class_id", [None, 0, 4])
def test_without_a_policy_every_region_learns(class_id: int | None) -> None:
    router = Router(None, REGIONS, ())
    assert router.route_of(class_id, 99) == Route(0, 0, 0, (1.0, 1.0), offered=True)
    assert router.route_of(class_id, 99, is_empty=True) == Route(0, 0, 0, (1.0, 1.0), offered=False)


def _of_classes(*class_ids: int, class_id: int | None = None) -> Batch:
    ids = torch.tensor(class_ids)
    return Batch(ids.float()[:, None], Lineage(torch.arange(len(class_ids)), ids), class_id)


def test_the_class_of_a_batch_is_the_one_of_its_rows() -> None:
    assert ROUTER.class_of(_of_classes(2, 2, 2)) == 2
    assert ROUTER.class_of(_of_classes(0)) == 0
    assert ROUTER.class_of(_of_classes(2, 2, class_id=2)) == 2
    with pytest.raises(PlanError, match=r"classes \[1, 2\] \(class_id = 1"):
        ROUTER.class_of(_of_classes(2, 2, class_id=1))
    with pytest.raises(PlanError, match=r"rows of classes \[0, 1\], and a governed microbatch holds rows of one"):
        ROUTER.class_of(_of_classes(1, 0))


def test_without_a_policy_no_class_is_asked_for() -> None:
    router = Router(None, REGIONS, ())
    assert router.class_of(_of_classes(1, 0)) is None
    assert router.class_of(_of_classes(1, 0, class_id=1)) == 1
    assert [router.decision(1, step, in_packs=packed) for step in (0, 9) for packed in (False, True)] == ["admit"] * 4


def test_statistics_are_taught_by_whom_teaches_their_region() -> None:
    regions = Regions(("body", "head"), (("0.norm.weight",), ("1.norm.weight",)), (("body",), ("head",)))
    router = Router(POLICY, regions, (0, 1, 2))
    both, head, attenuated, none = ((1.0, 1.0), (0.0, 1.0), (0.5, 0.0), (0.0, 0.0))

    def teaches(weights: tuple[float, float], layer: str, *, offered: bool = True) -> bool:
        return router.teaches(Route(0, 0, 0, weights, offered), layer)

    assert [teaches(weights, "0.norm") for weights in (both, head, attenuated, none)] == [True, False, True, False]
    assert [teaches(weights, "1.norm") for weights in (both, head, attenuated, none)] == [True, True, False, False]
    # A layer that two regions could claim follows every microbatch that is offered.
    assert teaches(none, "norm")
    assert not teaches(both, "norm", offered=False)
    assert not teaches(both, "0.norm", offered=False)


def test_a_microbatch_is_empty_where_all_its_rows_are_tombstones() -> None:
    batches = [rows(0, 1), rows(0, TOMBSTONE), rows(TOMBSTONE, TOMBSTONE), rows(TOMBSTONE, 5)]
    flags = empty_flags([*batches, replace(batches[0], band=65535)], 7, torch.device("cpu"))
    assert flags[:, 0].tolist() == [7.0] * 5, "the step"
    flags = flags[:, 1:]
    assert flags[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0], "empty"
    assert flags[:, 1].tolist() == [0.0, 0.0, 0.0, 0.0, 65535.0], "the band"
    assert flags[:, 2].tolist() == [batch.num_rows for batch in batches] + [2.0]
    assert flags[:, 3].tolist() == [batch.num_tokens for batch in batches] + [2.0]
