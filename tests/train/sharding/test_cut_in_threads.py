"""Where ranks hold parts of every parameter, a step's gradients have the bits of one tree over whole leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.layout.sharded import Sharded
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

V = 4
NAMES = ("blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "head.weight")
REGIONS = Regions(("body", "head"), (NAMES[:2], NAMES[2:]), (("blocks.0",), ("blocks.1", "head")))
ALL = frozenset(range(5))
ONES = ((1.0, 1.0),) * V


class Blocks(nn.Module):
    """Two blocks of a list, one of which is left out where asked, and a head outside of them, with a buffer."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1, bias=False)
        self.register_buffer("scale", torch.tensor(2.0, dtype=kind))
        generator = torch.Generator().manual_seed(3)
        self.to(kind)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, rows: Tensor, *, skips: bool = False) -> Tensor:
        hidden = torch.tanh(self.blocks[0](rows))
        return self.head(hidden if skips else torch.tanh(self.blocks[1](hidden))) * self.scale


def rows(microbatch: int) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(microbatch))


def loss_of(model: nn.Module, microbatch: int, *, skips: bool = False, kind: torch.dtype = torch.float32) -> Tensor:
    found: Tensor = model(rows(microbatch).to(kind), skips=skips).square().sum()
    return found


def leaves(
    routes: Sequence[tuple[float, float]], *, skipping: Sequence[int] = (), kind: torch.dtype = torch.float32
) -> list[list[Tensor | None]]:
    """What each microbatch teaches each parameter, None where nothing."""
    model, found = Blocks(kind), []
    for m, route in enumerate(routes):
        own = torch.autograd.grad(
            loss_of(model, m, skips=m in skipping, kind=kind), list(model.parameters()), allow_unused=True
        )
        factors = [route[REGIONS.region_of[name]] for name in NAMES]
        found.append(
            [None if g is None or f == 0 else g if f == 1 else g * f for g, f in zip(own, factors, strict=True)]
        )
    return found


def pairwise(values: Sequence[Tensor | None]) -> Tensor | None:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def same_bits(own: Tensor, other: Tensor) -> bool:
    kind = torch.int64 if own.dtype is torch.float64 else torch.int32
    return own.dtype == other.dtype and torch.equal(own.contiguous().view(kind), other.contiguous().view(kind))


def swept(
    layout: Sharded,
    routes: Sequence[tuple[float, float]],
    denominators: Tensor | None,
    *,
    learns: frozenset[int] = ALL,
    skipping: Sequence[int] = (),
    sketch: DirectionSketch | None = None,
    measure: bool = True,
) -> tuple[Pieces, dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    """A step's root, and by microbatch norms and sketches."""
    kind = next(layout._model.parameters()).dtype
    norms, sketches = {}, {}
    with layout.step(routes, learns, measure=measure, sketch=sketch) as step:
        assert not step.is_finite
        for m in layout.mine:
            with step.slot(m) as slot:
                if any(routes[m]):
                    slot.backward(loss_of(layout._model, m, skips=m in skipping, kind=kind))
                    assert not slot.in_backward
            assert all(one.grad is None for one in layout.arrivals.gathered.values())
            norms[m], sketches[m] = slot.norms, slot.sketches
        return step.root(denominators), norms, sketches


CASES: dict[str, tuple[Sequence[tuple[float, float]], Sequence[int]]] = {
    "all": (ONES, ()),
    "attenuated": (((0.5, 1.0), (1.0, 0.25), (1.0, 1.0), (2.0, 1.0)), ()),
    "denied to some": (((0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.5, 1.0)), ()),
    "denied to a slot": (((0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)), ()),
    "denied to all": (((0.0, 1.0),) * V, ()),
    "some aren't offered": (((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)), ()),
    "one isn't offered": (((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (1.0, 1.0)), ()),
    "a block is left out in a slot": (ONES, (0, 1)),
    "a block is left out by all": (ONES, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_rows_of_the_tree_over_whole_leaves(case: str) -> None:
    routes, skipping = CASES[case]
    own = leaves(routes, skipping=skipping)
    by = torch.tensor([3.0, 1.0], dtype=torch.float64)
    sums = [pairwise([leaf[i] for leaf in own]) for i in range(5)]
    sketch = DirectionSketch(5)

    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        root, norms, sketches = swept(layout, routes, by, skipping=skipping, sketch=sketch)
        assert all(p.grad is None for p in layout._model.parameters())
        again, none, nothing = swept(layout, routes, None, skipping=skipping, measure=False)
        assert (set(map(len, none.values())), set(map(len, nothing.values()))) == ({0}, {0})
        return root, again, norms, sketches, {name: layout.cut.rows[name].of(ranks.rank) for name in NAMES}

    for root, again, norms, sketches, cut in on_threads(2, work):
        taught = [i for i in range(5) if sums[i] is not None]
        assert root.names == again.names == tuple(NAMES[i] for i in taught)
        for i in taught:
            total: Any = sums[i]
            assert same_bits(again.tensors[NAMES[i]], total[cut[NAMES[i]]])
            divided = total / 3 if i < 2 else total
            assert same_bits(root.tensors[NAMES[i]], divided[cut[NAMES[i]]])
        for m in norms:
            for region, members in enumerate((range(2), range(2, 5))):
                own_of = [(NAMES[i], g) for i in members if (g := own[m][i]) is not None]
                norm, direction = norms[m][region], sketches[m][region]
                assert (norm.dtype, direction.shape) == (torch.float64, (WIDTH,))
                if not own_of:
                    assert norm.isnan()
                    assert direction.isnan().all()
                    continue
                wanted = torch.stack([g.double().square().sum() for _, g in own_of]).sum().sqrt()
                torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=1e-6)
                directions = torch.stack([sketch.of(name, g) for name, g in own_of]).sum(0)
                torch.testing.assert_close(direction, directions, rtol=1e-5, atol=1e-5)


def test_copies_of_shards_add_their_sums_in_the_tree() -> None:
    routes = ((0.5, 1.0), (1.0, 0.0), (1.0, 1.0), (2.0, 0.0))
    own = leaves(routes)
    sums: list[Any] = [pairwise([leaf[i] for leaf in own]) for i in range(5)]

    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V, 2)
        assert (layout.shards.world, layout.replicas.world) == (2, 2)
        root, norms, _ = swept(layout, routes, None)
        mine = layout.shards.rank
        return root, list(norms), {name: layout.cut.rows[name].of(mine) for name in NAMES}, layout.digest()

    everyone = on_threads(4, work)
    assert [mine for _, mine, _, _ in everyone] == [[0], [1], [2], [3]]
    assert len({digest for *_, digest in everyone}) == 1
    for root, _, cut, _ in everyone:
        assert root.names == NAMES
        for name, total in zip(NAMES, sums, strict=True):
            assert same_bits(root.tensors[name], total[cut[name]])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_region_without_weight_rests_and_others_are_divided_in_their_type(kind: torch.dtype) -> None:
    by = torch.tensor([0.0, 1.0 + 1e-12], dtype=torch.float64)
    own = leaves(ONES, kind=kind)
    sums: list[Any] = [pairwise([leaf[i] for leaf in own]) for i in range(5)]

    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(kind), REGIONS, ranks, V)
        return swept(layout, ONES, by)[0], layout

    for root, layout in on_threads(2, work):
        assert root.names == NAMES[2:]
        for i in range(2, 5):
            total = sums[i] / by[1] if kind is torch.float64 else sums[i]
            assert same_bits(root.tensors[NAMES[i]], total[layout.cut.rows[NAMES[i]].of(layout.shards.rank)])


def test_what_may_not_learn_has_no_gradient() -> None:
    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        return swept(layout, ONES, None, learns=frozenset({0, 4}))[0].names, swept(layout, ONES, None)[0].names

    assert on_threads(2, work) == [(("blocks.0.weight", "head.weight"), NAMES)] * 2


def test_what_is_frozen_before_isn_t_the_layouts_to_teach() -> None:
    def work(ranks: Ranks) -> Any:
        model = Blocks()
        model.blocks[0].bias.requires_grad_(requires_grad=False)
        layout = Sharded(model, REGIONS, ranks, V)
        root = swept(layout, ONES, None, learns=frozenset(range(4)))[0]
        return root.names, [name for name, _ in layout.pieces()]

    left = ("blocks.0.weight", *NAMES[2:])
    assert on_threads(2, work) == [(left, list(left))] * 2


def differentiates(model: Any, m: int) -> Tensor:
    loss = loss_of(model, m)
    given = rows(m).requires_grad_()
    torch.autograd.grad(model(given).sum(), given)
    return loss


class Writes(Blocks):
    """Its first block writes to its own weights, past autograd where asked, from its nth pass on."""

    def __init__(self, how: str, since: int = 1) -> None:
        super().__init__()
        times = itertools.count(1)

        class Own(nn.Linear):
            def forward(self, given: Tensor) -> Tensor:
                found = super().forward(given)
                with torch.no_grad():
                    if how == "counted":
                        self.bias.add_(1)
                    elif how == "past autograd" and next(times) >= since:
                        self.bias.data.add_(1)
                return found

        self.blocks[0] = Own(2, 3)


def refused(make: Callable[[], Any], loss: Callable[[Any, int], Tensor] = loss_of) -> list[str]:
    def work(ranks: Ranks) -> str:
        layout, begun = Sharded(make(), REGIONS, ranks, V), list[int]()
        with layout.step(ONES, ALL, measure=False) as step, pytest.raises(PlanError) as told:  # noqa: PT012
            for m in layout.mine:
                begun.append(m)
                with step.slot(m) as slot:
                    slot.backward(loss(layout._model, m))
        assert layout.arrivals.slot is None
        assert begun == layout.mine[:1]
        return str(told.value)

    return on_threads(2, work)


@pytest.mark.parametrize("how", ["counted", "past autograd"])
def test_what_the_forward_pass_writes_to_weights_is_refused(how: str) -> None:
    for told in refused(lambda: Writes(how)):
        assert told.startswith("The forward pass changes blocks.0.bias, and sharding='full' gathers it")


def test_writes_past_autograd_are_looked_for_in_a_runs_first_passes() -> None:
    wanted = swept_alike(Blocks)
    assert swept_alike(lambda: Writes("past autograd", since=2)) == wanted


def swept_alike(make: Callable[[], Blocks]) -> list[tuple[str, ...]]:
    return on_threads(2, lambda ranks: swept(Sharded(make(), REGIONS, ranks, V), ONES, None)[0].names)


def test_what_the_forward_pass_has_frozen_is_named() -> None:
    def freezes(model: Any, m: int) -> Tensor:
        model.blocks[0].bias.requires_grad_(requires_grad=False)
        return loss_of(model, m)

    for told in refused(Blocks, freezes):
        assert told.startswith(
            "blocks.0.bias trained, and the forward pass has frozen it. Freeze it before the Trainer"
        )


class Freezes(nn.Linear):
    """Freezes its own bias, after its weights have been gathered."""

    def forward(self, given: Tensor) -> Tensor:
        self.bias.requires_grad_(requires_grad=False)
        return super().forward(given)


class FreezesItself(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Freezes(self.blocks[0].in_features, self.blocks[0].out_features)  # type: ignore[arg-type]


def test_what_a_block_freezes_in_its_own_forward_pass_is_named() -> None:
    for told in refused(FreezesItself):
        assert told.startswith(
            "blocks.0.bias trained, and the forward pass has frozen it. Freeze it before the Trainer"
        )


class Reads(nn.Linear):
    """Reads what it's given several times."""

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * given


class Shared(Blocks):
    """What its second block reads others read too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks[1] = block

    def forward(self, given: Tensor, *, skips: bool = False) -> Tensor:
        hidden = torch.tanh(self.blocks[0](given))
        return self.head(self.blocks[1](hidden) + hidden) * hidden.sum()


def test_sums_in_another_order_are_refused() -> None:
    for told in refused(lambda: Shared(Reads(3, 3))):
        assert told.startswith("The block of blocks.1.weight reads an input several times, and others read it too")
    assert swept_alike(lambda: Shared(nn.Linear(3, 3))) == [NAMES] * 2


def test_passes_within_passes_are_refused() -> None:
    def within(model: Any, m: int) -> Tensor:
        found: Tensor = checkpoint(torch.square, model(rows(m)), use_reentrant=True).sum()
        return found

    for told in refused(Blocks, within):
        assert told.startswith("A function of the model runs a backward pass within its own")


class Idle(nn.Linear):
    """Leaves a weight of its own out, where asked."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.left_out = True

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, self.weight, None if self.left_out else self.bias)


@pytest.mark.parametrize("used", [(), (2,), (1, 2)])
def test_a_weight_that_a_block_leaves_out_adds_nothing_to_a_sum(used: Sequence[int]) -> None:
    def loss(model: Any, m: int) -> Tensor:
        model.blocks[1].left_out = m not in used
        return loss_of(model, m)

    def made() -> Blocks:
        model = Blocks()
        block = Idle()
        block.load_state_dict(model.blocks[1].state_dict())
        model.blocks[1] = block
        return model

    plain = made()
    own = [torch.autograd.grad(loss(plain, m), list(plain.parameters()), allow_unused=True) for m in range(V)]
    sums = {name: pairwise([leaf[i] for leaf in own]) for i, name in enumerate(NAMES)}

    def work(ranks: Ranks) -> Any:
        layout = Sharded(made(), REGIONS, ranks, V)
        with layout.step(ONES, ALL, measure=False) as step:
            for m in layout.mine:
                with step.slot(m) as slot:
                    slot.backward(loss(layout._model, m))
            return step.root(None), {name: layout.cut.rows[name].of(ranks.rank) for name in NAMES}

    for root, cut in on_threads(2, work):
        assert root.names == tuple(name for name in NAMES if used or name != "blocks.1.bias")
        for name, tensor in root.tensors.items():
            total: Any = sums[name]
            assert same_bits(tensor, total[cut[name]])


def test_a_loss_that_differentiates_by_itself_is_refused() -> None:
    for told in refused(Blocks, differentiates):
        assert told.startswith("The loss differentiates through the model by itself")


def test_a_block_that_runs_twice_is_refused() -> None:
    def twice(model: Any, m: int) -> Tensor:
        return loss_of(model, m) + loss_of(model, m + 1)

    for told in refused(Blocks, twice):
        assert "arrive" in told or "gathers the same blocks in the same order" in told


def test_outside_of_a_step_the_model_is_read_as_it_is() -> None:
    wanted = [loss_of(Blocks(), m) for m in range(2)]

    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        with torch.no_grad():
            found = [loss_of(layout._model, m) for m in range(2)]
        assert layout.arrivals.gathered == {}
        with layout.step(ONES, ALL, measure=False) as step, step.slot(layout.mine[0]) as slot, torch.no_grad():
            slot.backward(loss_of(layout._model, 0))
            assert layout.arrivals.gathered == {}
            assert slot.run == set()
        return found

    for found in on_threads(2, work):
        assert all(map(torch.equal, found, wanted))
