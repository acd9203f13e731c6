"""A step has the bits of one tree over its leaves on any number of ranks, in whichever way its backward passes run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout import whole, whole_step
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.whole import Whole
from cosmati.train.layout.whole_step import WholeStep
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

V = 4
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
REGIONS = Regions(("body", "head"), (NAMES[:2], NAMES[2:]), (("0",), ("2",)))
ALL = frozenset(range(4))
ONES = ((1.0, 1.0),) * V
MIXED = ((0.5, 1.0), (0.0, 1.0), (1.0, 0.25), (2.0, 0.0))
LossOf = Callable[[Any, int], Tensor]


def model_of(kind: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(kind)


def rows(microbatch: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(microbatch)).to(kind)


def squares(model: Any, microbatch: int) -> Tensor:
    found: Tensor = model(rows(microbatch, model[0].weight.dtype)).square().sum()
    return found


def leaves(
    routes: Sequence[tuple[float, float]], kind: torch.dtype = torch.float32, loss: LossOf = squares
) -> list[list[Tensor | None]]:
    model, found = model_of(kind), []
    for m, route in enumerate(routes):
        own = torch.autograd.grad(loss(model, m), list(model.parameters()))
        wide = [one.float() if kind is torch.bfloat16 else one for one in own]
        factors = [route[REGIONS.region_of[name]] for name in NAMES]
        found.append([None if f == 0 else g if f == 1 else g * f for g, f in zip(wide, factors, strict=True)])
    return found


def pairwise(values: Sequence[Tensor | None]) -> Tensor | None:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def is_tree(root: Pieces, own: Sequence[Sequence[Tensor | None]]) -> bool:
    wanted = {name: pairwise([leaf[i] for leaf in own]) for i, name in enumerate(NAMES)}
    taught = {name: one for name, one in wanted.items() if one is not None}
    return root.names == tuple(taught) and all(torch.equal(root.tensors[name], one) for name, one in taught.items())


def sweep(
    step: WholeStep, layout: Whole, routes: Sequence[tuple[float, float]], loss: LossOf = squares, **how: Any
) -> dict[int, list[Tensor]]:
    """Norms by microbatch, or directions."""
    found = {}
    for m in layout.mine:
        with step.slot(m) as slot:
            if any(routes[m]):
                slot.backward(loss(layout._model, m), **how)
        found[m] = slot.norms or slot.sketches
    return found


def on_ranks(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    return [work(Ranks())] if world == 1 else on_threads(world, work)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's two and the first one's two."""
    monkeypatch.setattr(whole, "BUCKET_ELEMENTS", 9)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("routes", [ONES, MIXED])
@pytest.mark.usefixtures("small_buckets")
def test_every_step_has_the_bits_of_the_tree(
    world: int, kind: torch.dtype, routes: Sequence[tuple[float, float]]
) -> None:
    own, sketch = leaves(routes, kind), DirectionSketch(4)

    def work(ranks: Ranks) -> int:
        layout = Whole(model_of(kind), REGIONS, ranks, V)
        for measure, directions in ((False, None), (False, None), (True, None), (False, sketch), (False, None)):
            with layout.step(routes, ALL, measure=measure, sketch=directions) as step:
                assert not step.is_finite
                found = sweep(step, layout, routes)
                assert is_tree(step.root(None), own)
                assert step.is_finite == (world > 1)
            for m, told in found.items() if measure or directions else ():
                for region, members in enumerate(((0, 1), (2, 3))):
                    there = [(NAMES[i], one) for i in members if (one := own[m][i]) is not None]
                    if not there:
                        assert told[region].isnan().all()
                    elif measure:
                        squared = torch.stack([one.double().square().sum() for _, one in there]).sum()
                        torch.testing.assert_close(told[region], squared.sqrt(), rtol=1e-5, atol=1e-6)
                    else:
                        wanted = torch.stack([sketch.of(*one) for one in there]).sum(0)
                        torch.testing.assert_close(told[region], wanted, rtol=1e-5, atol=1e-6)
            assert measure or directions or not any(found.values())
        return ranks.num_early

    early = on_ranks(world, work)
    # All but a run's first step send their two buckets while the last leaf comes, but for what's brought to float32.
    assert early == [0 if world == 1 or kind is torch.bfloat16 else 8] * world


@pytest.mark.parametrize("why", ["met", "hook", "again", "alone", "frozen"])
@pytest.mark.usefixtures("small_buckets")
def test_nothing_leaves_early_where_others_may_not_expect_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "may_meet", lambda: why != "alone")
    own = leaves(ONES)

    def work(ranks: Ranks) -> int:
        layout = Whole(model_of(), REGIONS, ranks, V)
        for _ in range(2):
            if why == "hook":
                layout.tensors[1].register_post_accumulate_grad_hook(lambda _: None)
            ranks.has_met = why == "met"
            learns = ALL - {0} if why == "frozen" else ALL
            with layout.step(ONES, learns, measure=False) as step:
                for m in layout.mine:
                    with step.slot(m) as slot:
                        slot.backward(squares(layout._model, m), is_final=why != "again")
                root = step.root(None)
                assert is_tree(root, [[None if i not in learns else g for i, g in enumerate(leaf)] for leaf in own])
        return ranks.num_early

    # What doesn't learn isn't waited for.
    assert on_threads(2, work) == [2 if why == "frozen" else 0] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_far_below_infinity_are_known_to_be_finite(world: int) -> None:
    def work(ranks: Ranks) -> Any:
        found, layout = [], Whole(model_of(), REGIONS, ranks, V)
        for size, by in (
            (1.0, (1.0, 1.0)),
            (1.0, (0.0, 1.0)),
            (1.0, (1e-32, 1.0)),
            (1.0, (-1e-32, 1.0)),
            (1e31, (1.0, 1.0)),
            (1e31, (1e30, 1e30)),
            (float("nan"), (1.0, 1.0)),
        ):
            with layout.step(ONES, ALL, measure=False) as step:
                sweep(step, layout, ONES, lambda model, m, size=size: squares(model, m) * size)
                root = step.root(torch.tensor(by, dtype=torch.float64))
                found.append(step.is_finite)
                assert root.names == (NAMES[2:] if by[0] == 0 else NAMES)
        return found

    wanted = [True, True, False, False, False, False, False] if world > 1 else [False] * 7
    assert on_ranks(world, work) == [wanted] * world


@pytest.mark.parametrize("world", [1, 2])
def test_sums_are_divided_by_each_regions_weight(world: int) -> None:
    own = leaves(ONES)

    def work(ranks: Ranks) -> None:
        layout = Whole(model_of(), REGIONS, ranks, V)
        with layout.step(ONES, ALL, measure=False) as step:
            sweep(step, layout, ONES)
            found = step.root(torch.tensor([3.0, 0.7], dtype=torch.float64))
        for i, name in enumerate(NAMES):
            total: Any = pairwise([leaf[i] for leaf in own])
            assert torch.equal(found.tensors[name], total / torch.tensor(3.0 if i < 2 else 0.7))

    on_ranks(world, work)


def within(model: Any, microbatch: int) -> Tensor:
    """All of the model in a backward pass within its own."""
    given = rows(microbatch).requires_grad_()
    found: Tensor = checkpoint(model, given, use_reentrant=True).square().sum()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("first", [squares, within])
def test_passes_within_passes_teach_what_they_may(world: int, first: LossOf) -> None:
    own = leaves(MIXED)

    def work(ranks: Ranks) -> int:
        layout = Whole(model_of(), REGIONS, ranks, V)
        for loss in (first, squares, first):
            with layout.step(MIXED, ALL, measure=False) as step:
                sweep(step, layout, MIXED, loss)
                assert is_tree(step.root(None), own)
        assert layout.nests == (first is within)
        return ranks.num_early

    on_ranks(world, work)


@pytest.mark.parametrize("how", ["measured", "early"])
def test_gradients_that_arrive_in_parts_are_refused(how: str) -> None:
    def both(model: Any, microbatch: int) -> Tensor:
        return squares(model, microbatch) + within(model, microbatch)

    def work(ranks: Ranks) -> str:
        layout = Whole(model_of(), REGIONS, ranks, 2)
        if how == "early":
            with layout.step(ONES[:2], ALL, measure=False) as step:
                sweep(step, layout, ONES)
                step.root(None)
        with pytest.raises(PlanError) as told, layout.step(ONES[:2], ALL, measure=how == "measured") as step:
            sweep(step, layout, ONES, both)
        assert all(one.grad is None for one in layout.tensors)
        return str(told.value)

    for told in on_threads(2, work) if how == "early" else [work(Ranks())]:
        assert told.startswith("The gradient of ")
        assert told.endswith(
            "arrives in parts: backward runs within backward. With torch.utils.checkpoint, pass use_reentrant=False."
        )


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    layout = Whole(model, Regions(("all",), (("0.weight",),), (("0",),)), Ranks(), 2)
    with pytest.raises(PlanError, match=r"The gradient of 0\.weight is sparse, and several"):  # noqa: SIM117
        with layout.step([(1.0,)] * 2, frozenset({0}), measure=True) as step, step.slot(0) as slot:
            slot.backward(model(torch.tensor([1, 2])).sum())


@pytest.mark.parametrize("since", [0, V - 1])
@pytest.mark.parametrize("frozen", [(3,), (0, 1, 2, 3)])
def test_what_the_forward_pass_freezes_is_named_where_all_learn(since: int, frozen: tuple[int, ...]) -> None:
    layout = Whole(model_of(), REGIONS, Ranks(), V)
    reached: list[int] = []

    def freezes(model: Any, microbatch: int) -> Tensor:
        reached.append(microbatch)
        for index in frozen:
            layout.tensors[index].requires_grad_(requires_grad=microbatch < since)
        return squares(model, microbatch)

    told = rf"^{NAMES[frozen[0]]} trained, and doesn't now: a loss has frozen it, or the forward pass"
    with pytest.raises(PlanError, match=told), layout.step(ONES, ALL, measure=False) as step:
        sweep(step, layout, ONES, freezes)
    assert reached == [*range(since + 1)]


def test_what_a_loss_has_frozen_is_named() -> None:
    layout = Whole(model_of(), REGIONS, Ranks(), V)

    def freezes(model: Any, microbatch: int) -> Tensor:
        found = squares(model, microbatch)
        model[2].bias.requires_grad_(requires_grad=False)
        return found

    with pytest.raises(PlanError, match=r"^2\.bias trained, and doesn't now: a loss has frozen it"):  # noqa: SIM117
        with layout.step(ONES, ALL - {0}, measure=False) as step:
            sweep(step, layout, ONES, freezes)
    assert step.in_backward is None

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(_: Any, *_given: Any) -> Any:
            raise RuntimeError("its own")

    layout.tensors[3].requires_grad_()
    with pytest.raises(RuntimeError, match="its own"), layout.step(ONES, ALL, measure=False) as step:
        sweep(step, layout, ONES, lambda model, m: Fails.apply(squares(model, m)))
    assert step.in_backward is None


def test_what_is_thawed_by_the_loss_that_teaches_it_is_measured() -> None:
    own, layout = leaves(ONES), Whole(model_of(), REGIONS, Ranks(), V)
    first = layout.tensors[0]
    first.requires_grad_(requires_grad=False)

    def thaws(model: Any, microbatch: int) -> Tensor:
        first.requires_grad_()
        return squares(model, microbatch)

    with layout.step(ONES, ALL, measure=True) as step:
        assert not first.requires_grad
        norms = sweep(step, layout, ONES, thaws)
        assert first.requires_grad
        assert is_tree(step.root(None), own)
    for m, told in norms.items():
        there: Any = own[m][:2]
        torch.testing.assert_close(told[0], torch.cat([one.flatten() for one in there]).norm().double())


def test_hooks_are_gone_with_the_step_and_others_stay() -> None:
    layout, seen = Whole(model_of(), REGIONS, Ranks(), V), list[int]()
    layout.tensors[1].register_hook(lambda _: seen.append(1))
    with layout.step(ONES, ALL, measure=True) as step:
        sweep(step, layout, ONES)
        assert all(one._backward_hooks for one in layout.tensors)
    assert [one._backward_hooks is None for one in layout.tensors] == [True, False, True, True]
    assert len(seen) == V
    squares(layout._model, 0).backward()  # type: ignore[no-untyped-call]
    assert len(seen) == V + 1
    layout.tensors[0]._backward_hooks = {}
    layout.looked |= ALL
    with layout.step(ONES, ALL, measure=False):
        pass
    assert layout.tensors[0]._backward_hooks == {}, "nobody has looked at it"


def test_gradients_that_a_loss_leaves_are_told_of_once_and_no_part_of_the_step() -> None:
    own, layout = leaves(ONES), Whole(model_of(), REGIONS, Ranks(), V)

    def leaves_some(model: Any, microbatch: int) -> Tensor:
        squares(model, microbatch).backward()  # type: ignore[no-untyped-call]
        return squares(model, microbatch)

    for times in (1, 0):
        with warnings.catch_warnings(record=True) as told, layout.step(ONES, ALL, measure=True) as step:
            warnings.simplefilter("always")
            sweep(step, layout, ONES, leaves_some)
            assert is_tree(step.root(None), own)
        assert [str(one.message)[:39] for one in told] == ["The loss has left gradients behind, by "] * times


def test_a_gradient_of_a_loss_s_own_is_neither_measured_nor_attenuated() -> None:
    routes, layout = ((0.5, 0.0),) * V, Whole(model_of(), REGIONS, Ranks(), V)

    def asks(model: Any, microbatch: int) -> Tensor:
        found = squares(model, microbatch)
        (own,) = torch.autograd.grad(found, model[0].weight, create_graph=True)
        return found + own.detach().sum() * 0

    with layout.step(routes, ALL, measure=True) as step:
        norms = sweep(step, layout, routes, squares)
    with layout.step(routes, ALL, measure=True) as step:
        again = sweep(step, layout, routes, asks)
        assert is_tree(step.root(None), leaves(routes))
    assert all(torch.equal(norms[m][0], again[m][0]) for m in norms)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_under_way_is_waited_for_as_a_step_ends(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(RankSum, "close", lambda _: closed.append(1))

    def work(ranks: Ranks) -> None:
        layout = Whole(model_of(), REGIONS, ranks, V)
        with pytest.raises(KeyError) if fails else nullcontext(), layout.step(ONES, ALL, measure=False) as step:
            sweep(step, layout, ONES)
            raise_if(fails)

    on_threads(2, work)
    assert closed == [1, 1]


def raise_if(fails: bool) -> None:
    if fails:
        raise KeyError


def test_passes_within_passes_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(whole_step, "runs_within", lambda _: bool(looked.append(1)))
    layout = Whole(model_of(), REGIONS, Ranks(), V)
    for learns, times in ((ALL - {0}, V), (ALL - {0}, 0), (ALL, V), (ALL, 0)):
        looked.clear()
        with layout.step(ONES, learns, measure=False) as step:
            sweep(step, layout, ONES)
            step.root(None)
        assert len(looked) == times


def test_one_parameter_is_enough() -> None:
    model = nn.Linear(2, 1, bias=False)
    layout = Whole(model, Regions(("all", "none"), (("weight",), ()), (("",), ())), Ranks(), 2)
    with layout.step([(1.0, 1.0)] * 2, frozenset({0}), measure=True, sketch=DirectionSketch(1)) as step:
        for _ in range(2):
            with step.slot(0) as slot:
                slot.backward(model(torch.ones(1, 2)).sum())
            assert [float(one) for one in slot.norms][:1] == [pytest.approx(2**0.5)]
            assert slot.norms[1].isnan()
            assert slot.sketches[1].isnan().all()
        assert torch.equal(step.root(None).tensors["weight"], torch.full((1, 2), 2.0))
        assert step.slot(1).arrived(0, torch.ones(1, 2)) is None, "it stays as it is"
