"""A slot of a cut layout, on one process with nobody to sum with: what arrives, is filled, refused, folded, divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.layout.sharded_step import add_nodes
from tests.train.sharding.held_whole import ALL, NAMES, REGION, HandMade, loss_of, plainly, swept


@pytest.fixture(autouse=True)
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, object]]:
    """One process has nobody to ask."""
    asked = list[tuple[Tensor, object]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: asked.append((tensor.clone(), op)))
    return asked


# --------------------------------------------------------------------------------------------------------------- nodes


def test_nodes_are_added_in_place_of_the_left_one() -> None:
    left, right = {0: torch.tensor([1.0]), 2: torch.tensor([2.0])}, {2: torch.tensor([10.0]), 1: torch.tensor([5.0])}
    found = add_nodes(left, right)
    assert {key: one.item() for key, one in found.items()} == {0: 1.0, 1: 5.0, 2: 12.0}
    assert found[0] is left[0]
    assert found[2] is left[2]
    assert found[1] is right[1]
    assert right[2].item() == 10.0
    assert add_nodes({}, right) == right
    assert add_nodes(left, {}) == left


# ---------------------------------------------------------------------------------------------------------------- step


def test_a_slot_knows_what_its_microbatch_and_its_company_may_teach() -> None:
    layout = HandMade(slots=((0, 1, 4, 5), (2, 3, 6, 7)))
    layout.ranks.rank, layout.shards.rank, layout.shards.world = 3, 1, 2
    routes = [(0.0, 0.0)] * 8
    routes[4], routes[5], routes[7], routes[0] = (0.5, 0.0), (0.0, 2.0), (1.0, 1.0), (1.0, 1.0)
    step = layout.step(*routes, learns=frozenset({0, 1, 3}))
    found = {m: (dict(s._factors), s._union) for m in (5, 7, 6) for s in [step.slot(m)]}
    assert found == {
        5: ({1: 2.0, 3: 2.0}, frozenset({0, 1, 3})),
        7: ({0: 1.0, 1: 1.0, 3: 1.0}, frozenset({0, 1, 3})),
        6: ({}, frozenset({0, 1, 3})),
    }
    with pytest.raises(StopIteration):
        step.slot(0)
    assert step.present.tolist() == [0, 0, 0, 0]
    assert step.present.dtype is torch.uint8
    assert not step.is_finite


@pytest.mark.parametrize("measure", [True, False])
def test_a_step_is_the_tree_over_what_microbatches_teach(measure: bool, reduced: list[tuple[Tensor, object]]) -> None:
    layout, sketch = HandMade(), DirectionSketch(5)
    routes = ((1.0, 0.5), (0.0, 1.0), (2.0, 0.0), (1.0, 1.0))
    step = layout.step(*routes, measure=measure, sketch=sketch if measure else None)
    slots = swept(layout, step, range(4))
    root = step.root(None)
    for region, names in enumerate((NAMES[:1], NAMES[1:])):
        for name in names:
            leaves: list[Any] = [plainly(m)[name] for m in range(4)]
            leaves = [g * route[region] for g, route in zip(leaves, routes, strict=True)]
            total = (leaves[0] + leaves[1]) + (leaves[2] + leaves[3])
            assert torch.equal(root.tensors[name], total), name
        for m, slot in enumerate(slots):
            assert (len(slot.norms), len(slot.sketches)) == (2 * measure, 2 * measure)
            if not measure:
                continue
            own = {name: g * routes[m][region] for name in names if (g := plainly(m)[name]) is not None}
            norm, direction = slot.norms[region], slot.sketches[region]
            assert (norm.dtype, direction.shape) == (torch.float64, (WIDTH,))
            if routes[m][region]:
                expected = torch.cat([one.flatten().double() for one in own.values()]).norm()
                torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
                torch.testing.assert_close(direction, sum(sketch.of(name, one) for name, one in own.items()))
            else:
                assert norm.isnan()
                assert direction.isnan().all()
    assert root.names == NAMES
    assert root.regions == REGION
    assert [(seen.tolist(), op) for seen, op in reduced] == [([1, 1, 1, 1], dist.ReduceOp.MAX)]
    assert layout.told == [kind for route in routes for kind in (step_union(route), "alone", "clear")]


def step_union(route: tuple[float, float]) -> frozenset[int]:
    return frozenset(i for i, name in enumerate(NAMES) if route[REGION[name]])


def test_what_nobody_was_taught_is_absent_and_what_others_were_is_there() -> None:
    layout = HandMade()
    step = layout.step((1.0, 0.0), (1.0, 0.0))
    swept(layout, step, range(2), skips=True)
    assert step.root(None).names == ("one.weight",)
    step = layout.step((1.0, 1.0))
    swept(layout, step, [0], skips=True)
    step.present[2] = 1  # another rank has seen it
    root = step.root(None)
    assert root.names == ("one.weight", "one.bias", "two.weight")
    assert root.tensors["two.weight"].tolist() == [[-0.0] * 3]
    assert bool(root.tensors["two.weight"].signbit().all())


def test_a_block_s_sum_is_handed_on_once() -> None:
    layout = HandMade()
    step = layout.step((1.0, 1.0), (1.0, 1.0))
    first, second = torch.ones(9), torch.ones(9) * 2
    step.take(layout.groups[0], first)
    with pytest.raises(
        PlanError, match=r"^The gradients of one\.weight and its block arrive in parts: .*use_reentrant"
    ):
        step.take(layout.groups[0], second)
    step.fold()
    step.take(layout.groups[0], second)
    step.fold()
    assert layout.told == ["clear"] * 2
    assert {key: part.tolist() for key, part in step._tree.root().items()} == {0: [3.0] * 9}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_gradients_are_divided_by_their_region_s_weight_in_their_type(kind: torch.dtype) -> None:
    step, odd = HandMade().step((1.0, 1.0)), 3.0 + 1e-9
    root = {name: torch.tensor([1.0, 7.0], dtype=kind) for name in NAMES if name != "two.weight"}
    kept = {name: one.clone() for name, one in root.items()}

    def divided(*by: float) -> dict[str, Tensor]:
        given = {name: one.clone() for name, one in root.items()}
        found = step._divided(given, torch.tensor(by, dtype=torch.float64))
        assert all(one is given[name] for name, one in found.items()), "in place"
        return found

    found = divided(1.0 + 1e-9, odd)
    assert list(found) == ["one.weight", "one.bias", "two.bias"]
    exact = kind is torch.float64
    for name, by in (("one.weight", 1.0 + 1e-9), ("one.bias", odd), ("two.bias", odd)):
        assert torch.equal(found[name], kept[name] / torch.tensor(by, dtype=torch.float64).to(kind)), name
    assert torch.equal(found["one.weight"], kept["one.weight"]) is not exact
    assert list(divided(0.0, 2.0)) == ["one.bias", "two.bias"]
    assert list(divided(2.0, 1e-60)) == ["one.weight"], "rounded, it's nothing"
    assert divided(0.0, 0.0) == {}
    assert step._divided({}, torch.ones(2)) == {}


def test_a_root_is_divided_where_weights_are_given() -> None:
    layout = HandMade()
    step = layout.step((1.0, 1.0))
    swept(layout, step, [0])
    root, plain = step.root(torch.tensor([0.0, 4.0], dtype=torch.float64)), plainly(0)
    assert root.names == NAMES[1:]
    for name in root.names:
        whole = plain[name]
        assert whole is not None
        assert torch.equal(root.tensors[name], whole / 4)


# ---------------------------------------------------------------------------------------------------------------- slot


def test_a_slot_that_fails_hands_nothing_on() -> None:
    layout = HandMade()
    step = layout.step((1.0, 1.0))
    with pytest.raises(ArithmeticError), step.slot(0) as slot:  # noqa: PT012
        assert layout.arrivals.slot is slot
        raise ArithmeticError
    assert layout.arrivals.slot is None
    assert layout.told == [ALL, "failed"]
    assert (slot.norms, slot.sketches) == ([], [])


def test_what_is_not_asked_for_gets_no_gradient() -> None:
    layout = HandMade()
    step = layout.step((1.0, 0.0), learns=frozenset({0}))
    with step.slot(0) as slot:
        slot.backward(loss_of(layout.model, 0))
        assert not slot.in_backward
        grads = {name: layout.model_parameter(name).grad for name in NAMES}
    own = plainly(0)["one.weight"]
    assert grads["one.weight"] is not None
    assert own is not None
    assert torch.equal(grads["one.weight"], own)
    assert grads["one.bias"] is not None
    assert bool((grads["one.bias"] == 0).all() and grads["one.bias"].signbit().all())
    assert (grads["two.weight"], grads["two.bias"]) == (None, None)


def test_nothing_is_differentiated_where_nothing_may_learn() -> None:
    layout = HandMade()
    step = layout.step((0.0, 0.0), (1.0, 1.0))
    with step.slot(0) as slot:
        slot.backward(loss_of(layout.model, 0))
        assert all(p.grad is None for p in layout.model.parameters())
    assert not layout.arrivals._has_looked
    with step.slot(1) as slot:
        loss_of(layout.model, 1)
        slot.backward(torch.ones(()))
        assert all(p.grad is None for p in layout.model.parameters())
    assert step.present.tolist() == [0] * 4


def test_a_pass_that_fails_is_over() -> None:
    layout = HandMade()
    step = layout.step((1.0, 1.0))

    def fail(_: Tensor) -> None:
        assert slot.in_backward
        raise ArithmeticError

    with pytest.raises(ArithmeticError), step.slot(0) as slot:  # noqa: PT012
        loss = loss_of(layout.model, 0)
        layout.model.one.weight.register_hook(fail)
        slot.backward(loss)
    assert not slot.in_backward


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_frozen_in_mid_pass_is_named(when: str) -> None:
    layout = HandMade()
    step, weight = layout.step((1.0, 1.0)), layout.model.two.weight
    said = r"^two\.weight trained, and the forward pass has frozen it\. Freeze it before the Trainer is made"
    with pytest.raises(PlanError, match=said), step.slot(0) as slot:  # noqa: PT012
        if when == "before":
            weight.requires_grad_(False)
        loss = loss_of(layout.model, 0)
        weight.requires_grad_(False)
        slot.backward(loss)


def test_a_block_is_filled_once_and_only_where_the_slot_may_teach_it() -> None:
    layout = HandMade()
    step = layout.step((0.0, 1.0), learns=frozenset({0, 2}))
    with step.slot(0) as slot, torch.enable_grad():
        loss_of(layout.model, 0)
        one, two = layout.groups
        slot.fill(one)
        assert layout.model.one.weight.grad is None, "region 0 teaches nothing"
        layout.model.two.bias.grad = torch.ones(1)
        slot.fill(two)
        filled = layout.model.two.weight.grad
        assert filled is not None
        assert filled.shape == (1, 3)
        assert filled.dtype is torch.float32
        assert bool((filled == 0).all() and filled.signbit().all())
        assert layout.model.two.bias.grad.tolist() == [1.0]
        layout.model.two.weight.grad = None
        slot.fill(two)
        assert layout.model.two.weight.grad is None, "once"
        with pytest.raises(PlanError, match=r"^The gradient of two\.weight arrives in parts, or after those of"):
            slot.arrived(2, torch.ones(1, 3))


def test_a_gradient_that_arrives_is_weighed_noted_and_comes_once() -> None:
    layout = HandMade()
    step = layout.step((0.5, 1.0), learns=frozenset({0, 2}))
    slot, gradient = step.slot(0), torch.tensor([2.0, -4.0])
    half = slot.arrived(0, gradient)
    assert half is not None
    assert half.tolist() == [1.0, -2.0]
    assert gradient.tolist() == [2.0, -4.0]
    assert slot.arrived(2, gradient) is None, "as it is"
    none = slot.arrived(1, gradient)
    assert none is not None
    assert bool((none == 0).all() and none.signbit().all())
    assert step.present.tolist() == [1, 0, 1, 0]
    norms = [one.item() for one in slot._regional_norms()]
    assert norms == pytest.approx([5**0.5, 20**0.5])
    for index in (0, 1, 2):
        with pytest.raises(PlanError, match=r"arrives in parts"):
            slot.arrived(index, gradient)
    with pytest.raises(PlanError, match=r"^The gradient of two\.bias is sparse, .* Use sparse=False"):
        slot.arrived(3, torch.eye(2).to_sparse())
    assert slot.arrived(3, gradient) is not None, "nothing has come yet"
