"""Ranks that step their own pieces of parameters come to the bits of one that steps all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.pieces import Uncut
from cosmati.optim import Muon
from cosmati.optim.piecewise import Demands
from cosmati.optim.sharing import Sharing
from cosmati.routing.regions import Regions
from cosmati.train.layout import optimizer_sharded
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.pair_sum import PairSum
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

V = 4
NAMES = ("gap", "conv.weight", "conv.bias", "wide.weight", "wide.bias", "head.weight")
REGIONS = Regions(("body", "head"), (NAMES[1:4], (NAMES[0], *NAMES[4:])), (("conv",), ("head",)))
ALL = frozenset(range(6))
ROUTES = ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (1.0, 0.0))
ONES = ((1.0, 1.0),) * V


class Mixed(nn.Module):
    """Weights of several layouts, of which the wide one is cut; one is frozen, and there's a buffer."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.wide = nn.Linear(4, 50)
        self.head = nn.Linear(50, 1, bias=False)
        self.gap = nn.Parameter(torch.zeros(4, 6))
        self.register_buffer("scale", torch.tensor(2.0))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.to(kind)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.gap.data = self.gap.data.repeat_interleave(2, 1)[:, ::2]

    def forward(self, rows: Tensor) -> Tensor:
        # Of the convolution's own the last bits follow from the thread.
        seen = (rows[:, None] * self.conv.weight).sum((2, 3, 4)) + self.conv.bias
        hidden = self.wide(torch.tanh(seen) * self.frozen + self.gap.sum(1))
        return self.head(torch.tanh(hidden)) * self.scale.to(hidden.dtype)


def loss_of(model: Mixed, microbatch: int) -> Tensor:
    rows = torch.randn(3, 3, 2, 2, generator=torch.Generator().manual_seed(microbatch))
    found: Tensor = model(rows.to(model.gap.dtype)).square().sum()
    return found


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = [p for name, p in model.named_parameters() if "wide" not in name]
    return [
        torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False),
        torch.optim.AdamW([p for name, p in model.named_parameters() if "wide" in name], lr=0.01, foreach=False),
    ]


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def named(model: Any) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def pairwise(values: Sequence[Tensor | None]) -> Tensor | None:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def sums(model: Mixed, routes: Sequence[tuple[float, float]]) -> dict[str, Tensor]:
    """The tree over a step's leaves."""
    leaves = []
    for m, route in enumerate(routes):
        own = torch.autograd.grad(loss_of(model, m), trained(model))
        wide = [one.float() if one.dtype is torch.bfloat16 else one for one in own]
        factors = [route[REGIONS.region_of[name]] for name in NAMES]
        leaves.append([None if not f else g if f == 1 else g * f for g, f in zip(wide, factors, strict=True)])
    found = {name: pairwise([leaf[i] for leaf in leaves]) for i, name in enumerate(NAMES)}
    return {name: one for name, one in found.items() if one is not None}


def swept(layout: OptimizerSharded, routes: Sequence[tuple[float, float]], learns: frozenset[int] = ALL) -> Any:
    with layout.step(routes, learns, measure=False) as step:
        for m in layout.mine:
            with step.slot(m) as slot:
                slot.backward(loss_of(layout._model, m))  # type: ignore[arg-type]
        return step.root(None)


def made(
    ranks: Ranks, kind: torch.dtype = torch.float32
) -> tuple[Mixed, OptimizerSharded, list[torch.optim.Optimizer]]:
    model = Mixed(kind)
    layout = OptimizerSharded(model, REGIONS, ranks, V)
    assert layout.pieces() == list(named(model).items())
    optimizers = optimizers_of(model)
    layout.rehome(optimizers)
    return model, layout, optimizers


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_steps_of_pieces_are_those_of_whole_parameters(world: int, kind: torch.dtype) -> None:
    whole = Mixed(kind)
    assert tuple(named(whole)) == NAMES
    plain, roots, after = optimizers_of(whole), [], []
    for routes in (ONES, ROUTES, ONES):
        roots.append(sums(whole, routes))
        for name, parameter in named(whole).items():
            # Laid out as autograd lays it out: bfloat16's bits follow from that.
            own = torch.empty_like(parameter, requires_grad=False)
            parameter.grad = own.copy_(roots[-1][name]) if name in roots[-1] else None
        for optimizer in plain:
            optimizer.step()
        after.append({name: one.detach().clone() for name, one in whole.named_parameters()})

    def work(ranks: Ranks) -> Any:
        model, layout, optimizers = made(ranks, kind)
        assert layout.is_cut
        for routes, wanted, then in zip((ONES, ROUTES, ONES), roots, after, strict=True):
            root = swept(layout, routes)
            assert set(root.names) == set(wanted)
            for found, norm in zip(root.cut.norms(root.tensors), Uncut().norms(wanted), strict=True):
                torch.testing.assert_close(found, norm)
            for name, tensor in root.cut.wholes(root.tensors).items():
                assert torch.equal(tensor, wanted[name])
            moved = layout.commit(root, ALL, lambda: [one.step() for one in optimizers])  # type: ignore[arg-type, return-value]
            assert moved == set(wanted)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, then[name]), name
        held = dict(layout.pieces())
        assert all((one.grad is None) == (not one.numel()) for one in held.values())
        assert {id(p) for o in optimizers for g in o.param_groups for p in g["params"]} == set(map(id, held.values()))
        assert all(vars(one)["holds_pieces"] for one in optimizers)
        nothing = layout.commit(root.having({}), frozenset({0, 2}), lambda: None)
        assert nothing == frozenset()
        assert all((one.grad is None) == (name in (NAMES[0], NAMES[2])) for name, one in held.items())
        return {name: one.numel() for name, one in held.items()}

    everyone = on_threads(world, work)
    for name, parameter in named(whole).items():
        assert sum(own.get(name, 0) for own in everyone) == parameter.numel()
    assert sum("wide.weight" in own for own in everyone) == world, "cut"
    assert sum("gap" in own for own in everyone) == 1, "with gaps, and whole"


def test_what_an_optimizer_needs_together_stays_with_one_rank() -> None:
    def work(ranks: Ranks) -> Any:
        model = Mixed()
        layout = OptimizerSharded(model, REGIONS, ranks, V)
        matrices = [("wide.weight", model.wide.weight), ("head.weight", model.head.weight)]
        muon: Any = Muon(lr=0.1).build(matrices)
        muon.sharing = Sharing(1, 2)
        # Where another one holds it too, which needs it whole, it isn't cut.
        rest = torch.optim.SGD([p for p in trained(model) if p is not model.head.weight], lr=0.1)
        assert model.wide.weight.numel() > sum(p.numel() for p in trained(model)) / 8
        layout.rehome([muon, rest])
        assert (muon.sharing.rank, muon.sharing.world) == (0, 1)
        return [name for name, _ in layout.pieces()], {n: len(p) for n, p in layout._cut.pieces.items()}

    first, second = on_threads(2, work)
    assert first[1] == second[1]
    assert first[1]["wide.weight"] == first[1]["head.weight"] == first[1]["gap"] == 1
    assert ("wide.weight" in first[0]) != ("wide.weight" in second[0])


@pytest.mark.parametrize("bound", [False, True])
def test_units_of_an_optimizer_stay_with_one_rank(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def demanded(optimizer: torch.optim.Optimizer) -> Demands:
        wide, head, frozen = optimizer.param_groups[0]["params"]
        return Demands([], [[wide, frozen, head]] if bound else [])

    def work(ranks: Ranks) -> Any:
        model = Mixed()
        layout = OptimizerSharded(model, REGIONS, ranks, V)
        layout.rehome([torch.optim.SGD([model.wide.weight, model.head.weight, model.frozen], lr=0.1)])
        return {name for name, _ in layout.pieces()}

    monkeypatch.setattr(optimizer_sharded, "demands_of", demanded)
    both = {"wide.weight", "head.weight"}
    assert sorted(len(own & both) for own in on_threads(2, work)) == ([0, 2] if bound else [1, 1])


def test_state_is_held_once_and_of_methods_by_all() -> None:
    whole = Mixed()

    def work(ranks: Ranks) -> Any:
        _, layout, optimizers = made(ranks)
        root = swept(layout, ONES)
        layout.commit(root, ALL, lambda: [one.step() for one in optimizers])  # type: ignore[arg-type, return-value]
        of = {id(piece): name for name, piece in layout.pieces()}
        state = {
            f"{of[id(p)]}/{key}": value
            for one in optimizers
            for p, own in one.state.items()
            for key, value in own.items()
            if isinstance(value, Tensor)
        }
        full = layout.whole_state(state, of_optimizers=True)
        again = layout.own_state(full, of_optimizers=True)
        assert all(torch.equal(again[key].reshape(-1), one.reshape(-1)) for key, one in state.items() if one.ndim != 4)
        assert set(again) == set(state)
        method = {"average/gap": torch.ones(4, 6), "count": torch.ones(())}
        assert layout.whole_state(method, of_optimizers=False) == method
        assert layout.own_state(method, of_optimizers=False) == method
        assert layout.whole_state(method, of_optimizers=False) is not method
        spans = layout.held_state(state, of_optimizers=True)
        held = layout.held_state(method, of_optimizers=False)
        return (
            {k: v.shape for k, v in full.items()},
            {k: v.tensor.numel() for k, v in spans.items()},
            held,
            layout.held(),
        )

    everyone = on_threads(2, work)
    keys = {f"{name}/momentum_buffer" for name in NAMES if "wide" not in name}
    keys |= {f"wide.{name}/{key}" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq", "step")}
    for shapes, _, held, model in everyone:
        assert set(shapes) == keys
        assert all(shapes[key] == named(whole)[key.rpartition("/")[0]].shape for key in keys if "step" not in key)
        is_first = held is everyone[0][2]
        assert set(held) == ({"average/gap", "count"} if is_first else {"average/gap"})
        assert set(model) == ({*NAMES, "frozen", "scale"} if is_first else {*NAMES})
    for key in keys - {"wide.weight/step", "wide.bias/step"}:
        assert sum(spans.get(key, 0) for _, spans, _, _ in everyone) == named(whole)[key.rpartition("/")[0]].numel()


def test_offsets_of_pieces_are_added_to_whole_parameters_for_a_while() -> None:
    before = Mixed()

    def work(ranks: Ranks) -> None:
        model, layout, _ = made(ranks)
        root = swept(layout, ONES).only(["wide.weight", "conv.weight"])
        with layout.perturbed(root.map(lambda one: torch.full_like(one, 0.25))):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, named(before).get(name, parameter) + 0.25 * (name in root.names))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))

    on_threads(2, work)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_one_replica_cut_what_each_has_whole(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sums(Mixed(), ONES)

    def work(_: Ranks) -> Any:
        ranks = Ranks(2)
        assert (ranks.num_replicas, ranks.replica, ranks.has_replicas) == (world // 2, ranks.rank // 2, world > 2)
        model, layout, optimizers = made(ranks)
        assert isinstance(layout.new_sum(V), PairSum) == (world == 2)
        root = swept(layout, ONES)
        for name, tensor in root.cut.wholes(root.tensors).items():
            assert torch.equal(tensor, wanted[name])
        layout.commit(root, ALL, lambda: [one.step() for one in optimizers])  # type: ignore[arg-type, return-value]
        return [one.detach().clone() for one in model.parameters()], sum(one.numel() for _, one in layout.pieces())

    monkeypatch.setattr(optimizer_sharded, "BUCKET_ELEMENTS", 40)
    everyone = on_threads(world, work)
    assert sum(size for _, size in everyone) == sum(one.numel() for one in trained(Mixed()))
    assert all(all(map(torch.equal, own, everyone[0][0])) for own, _ in everyone)
