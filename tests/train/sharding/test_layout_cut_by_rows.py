"""A layout cut over ranks holds each row once, under the user's names, and is as it was when a change to it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import CheckpointError, PlanError
from cosmati.routing.regions import Regions
from cosmati.train.layout.shard_groups import tree_reduce_scatter
from cosmati.train.layout.sharded import Sharded
from cosmati.train.layout.span import HeldSpan
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

V = 4
NAMES = ("gain", "blocks.0._orig_mod.weight", "blocks.0._orig_mod.bias", "blocks.1.weight", "blocks.1.bias")
OWN = ("gain", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias")
LEARN = (*NAMES[:4],)
REGIONS = Regions(("body", "rest"), (LEARN[1:3], (LEARN[0], LEARN[3])), (("blocks.0",), ("blocks.1",)))
ONES = ((1.0, 1.0),) * V
ALL = frozenset(range(4))
# Rows of the two ranks that hold a copy: three are two and one, one is one and none.
FIRST = {"gain": (0, 1), "weight": (0, 2), "bias": (0, 2)}
SECOND = {"gain": (1, 1), "weight": (2, 3), "bias": (2, 3)}


class Wrapped(nn.Module):
    """As torch.compile wraps a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self._orig_mod(rows)
        return found


class Model(nn.Module):
    """A parameter of its own, a wrapped block, a bias that is frozen, and two buffers, of which one isn't kept."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wrapped(nn.Linear(2, 3)), nn.Linear(3, 3)])
        self.gain = nn.Parameter(torch.empty(1))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.blocks[1].bias.requires_grad_(requires_grad=False)
        self.to(kind)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.blocks[1](torch.tanh(self.blocks[0](rows))) * self.gain * self.scale.sum()
        return found


def loss_of(model: nn.Module, microbatch: int) -> Tensor:
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(microbatch))
    found: Tensor = model(rows.to(next(model.parameters()).dtype)).square().sum()
    return found


def layout_of(ranks: Ranks, *given: Any, **named: Any) -> Sharded:
    return Sharded(Model(*given), REGIONS, ranks, V, **named)


def values(add: float = 0.0) -> dict[str, Tensor]:
    """What the whole model holds, as the user names it."""
    return {name.replace("_orig_mod.", ""): one + add for name, one in Model().state_dict().items()}


def rows(name: str, rank: int) -> slice:
    return slice(*(FIRST, SECOND)[rank][name.rpartition(".")[2]])


def now(layout: Sharded) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in layout.weights().tensors.items()}


def all_equal(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize(("world", "given"), [(2, None), (2, 2), (4, 2)])
def test_each_rank_has_its_rows_of_what_learns_in_the_models_order(world: int, given: int | None) -> None:
    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks, num_shards=given)
        model: Any = layout._model
        planned = dict(model.named_parameters())
        assert [(p.index, p.name, p.region) for p in layout.parameters] == list(
            zip(range(4), LEARN, (1, 0, 0, 1), strict=True)
        )
        for p in layout.parameters:
            assert layout.model_parameter(p.name) is p.tensor is planned[p.name]
        assert layout.model_parameter("blocks.1.bias") is planned["blocks.1.bias"]
        assert (layout.is_cut, layout.members, layout.device) == (True, [[1, 2], [0, 3]], torch.device("cpu"))
        assert layout.index_of == {name: index for index, name in enumerate(LEARN)}
        assert layout.group_of == {**dict.fromkeys(NAMES[1:3], 0), **dict.fromkeys(NAMES[3:], 1), "gain": 2}
        assert (layout.shards.world, layout.replicas.world) == (2, world // 2)
        assert (ranks.run, ranks.num_together) == (1, 2)
        weights = layout.weights()
        assert (weights.names, weights.regions, weights.cut) == (LEARN, dict.fromkeys(LEARN[1:3], 0)
            | {"gain": 1, "blocks.1.weight": 1}, layout.cut)  # fmt: skip
        pieces = layout.pieces()
        assert [name for name, _ in pieces] == list(LEARN)
        for name, piece in pieces:
            assert piece.requires_grad
            assert piece.data_ptr() == weights.tensors[name].data_ptr() or not piece.numel()
        return layout.mine, now(layout), {name: layout.gather(torch.tensor(layout.mine)) for name in "a"}

    everyone = on_threads(world, work)
    assert [mine for mine, _, _ in everyone] == ([[0, 2], [1, 3]] if world == 2 else [[0], [1], [2], [3]])
    whole = values()
    for rank, (_, found, gathered) in enumerate(everyone):
        assert gathered["a"].tolist() == list(range(V))
        for name, own in zip(LEARN, OWN, strict=False):
            assert torch.equal(found[name], whole[own][rows(name, rank % 2)])


def spans(held: dict[str, HeldSpan]) -> dict[str, tuple[list[float], tuple[int, ...], int]]:
    return {key: (one.tensor.flatten().tolist(), one.shape, one.start) for key, one in held.items()}


def test_the_whole_is_named_as_the_user_names_it_and_has_one_digest_however_it_is_cut() -> None:
    whole = values()
    alone = Whole(Model(), REGIONS, Ranks.alone(), V)

    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        saved = {name: one.clone() for name, one in layout.save()}
        digests = [layout.digest()]
        layout._model.scale.add_(1)  # type: ignore[operator, union-attr]
        return saved, [*digests, layout.digest()], spans(layout.held()), layout.ranks.rank

    for saved, digests, held, rank in on_threads(2, work):
        assert list(saved) == list(whole)
        assert all_equal(saved, whole)
        assert digests[0] == alone.digest() != digests[1]
        wanted = {
            name: (whole[name][rows(name, rank)].flatten().tolist(), tuple(whole[name].shape),
                   rows(name, rank).start * whole[name][0].numel())
            for name in OWN
        }  # fmt: skip
        # The layout writes to the buffer above, and a span shows what is there.
        assert held == wanted | ({"scale": ([3.0], (1,), 0)} if rank == 0 else {})


def test_what_is_loaded_fits_or_nothing_of_it_is_taken() -> None:
    moved = values(1.0)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({k: v for k, v in moved.items() if k != "blocks.0.bias"}, "blocks.0.bias is missing."),
        (moved | {"gain": torch.zeros(2)}, "gain is torch.float32 (1,), and was torch.float32 (2,)."),
        (moved | {"gain": torch.zeros(1).half()}, "gain is torch.float32 (1,), and was torch.float16 (1,)."),
        ({"scale": moved["scale"]}, "; ".join(f"{name} is missing" for name in sorted(OWN)) + "."),
        ({k: v for k, v in moved.items() if k != "scale"}, "scale is missing."),
        (moved | {"other": torch.zeros(1)}, "other isn't in the model."),
        (moved | {"blocks.0._orig_mod.bias": torch.zeros(3)}, "blocks.0._orig_mod.bias isn't in the model."),
    ]
    many = {f"z{i}": torch.zeros(1) for i in range(3)} | {name: torch.zeros(7) for name in OWN}

    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        before, told = dict(now(layout)), []
        for given in (*(one for one, _ in wrong), many):
            with pytest.raises(CheckpointError) as error:
                layout.load(given)
            told.append(str(error.value))
        assert all_equal(now(layout), before)
        assert layout._model.scale.tolist() == [2.0]  # type: ignore[operator, union-attr]
        model: Any = layout._model
        places = [one.to_local().data_ptr() for one in model.parameters()]
        layout.load(moved | {"scale": torch.tensor([1.0, 4.0])})
        assert places == [one.to_local().data_ptr() for one in model.parameters()]
        return told, {name: one.clone() for name, one in layout.save()}

    for told, saved in on_threads(2, work):
        begins = "The checkpoint's weights don't fit the model: "
        assert told[:-1] == [begins + why for _, why in wrong]
        assert told[-1].count(" is torch.float32") == 5
        assert told[-1].startswith(begins + "blocks.0.bias is torch.float32 (3,), and was torch.float32 (7,); ")
        assert all_equal(saved, moved | {"scale": torch.tensor([1.0, 4.0])}), "a buffer may have grown"


def test_weights_are_put_back_in_place_whatever_happens() -> None:
    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        weights, before, name = layout.weights(), now(layout), LEARN[3]
        offset = weights.only([name]).map(lambda one: torch.full_like(one, 0.1))
        # Not what subtracting would give back.
        weights.tensors[name].fill_(1e8)
        with pytest.raises(KeyError), layout.perturbed(offset.map(lambda one: one * 1e9)):  # noqa: PT012
            assert (weights.tensors[name] == torch.tensor(1e8) + torch.tensor(0.1) * 1e9).all()
            assert all(torch.equal(weights.tensors[other], before[other]) for other in LEARN[:3])
            raise KeyError
        assert (weights.tensors[name] == 1e8).all()
        with pytest.raises(KeyError), layout.replaced({name: offset.tensors[name]}):  # noqa: PT012
            assert (weights.tensors[name] == torch.tensor(0.1)).all()
            raise KeyError
        assert (weights.tensors[name] == 1e8).all()
        return all(torch.equal(weights.tensors[other], before[other]) for other in LEARN[:3])

    assert on_threads(2, work) == [True, True]


def swept(layout: Sharded) -> Any:
    with layout.step(ONES, ALL, measure=False) as step:
        assert layout._step is step
        for m in layout.mine:
            with step.slot(m) as slot:
                slot.backward(loss_of(layout._model, m))
        return step.root(None)


def gradients(kind: torch.dtype) -> dict[str, Tensor]:
    model = Model(kind)
    learning = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(torch.stack([loss_of(model, m) for m in range(V)]).sum(), learning)
    return dict(zip(LEARN, found, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("staged", [(), LEARN[1:3], LEARN])
def test_a_commit_brings_gradients_and_values_and_takes_back_what_moved(
    staged: tuple[str, ...], kind: torch.dtype
) -> None:
    wanted, whole = gradients(kind), dict(Model(kind).named_parameters())

    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks, kind)
        layout.stage(staged)
        pieces = dict(layout.pieces())
        owner_of = layout.cut.owner_of
        root = swept(layout)
        root = root.only(name for name in root.names if name != "gain")
        times: list[int] = []
        for name in pieces.keys() - {*staged}:
            pieces[name].grad = torch.full_like(pieces[name], 7.0)

        def step() -> None:
            times.append(1)
            for name, piece in pieces.items():
                if name == "gain" and name not in staged:
                    assert piece.grad is None, "it has no gradient in this step"
                elif name == "blocks.1.weight":
                    continue
                elif name not in staged:
                    own = rows(name, ranks.rank)
                    torch.testing.assert_close(piece.grad, wanted[name][own])
                    assert torch.equal(piece, whole[name][own])
                elif owner_of[name] == ranks.rank and name != "gain":
                    torch.testing.assert_close(piece.grad, wanted[name])
                    assert torch.equal(piece, whole[name])
                elif owner_of[name] != ranks.rank:
                    assert piece.grad is None
                    assert piece.shape == whole[name].shape
                    continue
                else:
                    assert piece.grad is None, "nor has it one as a whole"
                piece.data.copy_(piece * 2 + 1)

        # The last one learns elsewhere: it keeps what it had.
        moved = layout.commit(root, frozenset({2, 0, 1}), step)
        last = pieces["blocks.1.weight"]
        assert (last.grad is None) is ("blocks.1.weight" in staged)
        assert last.grad is None or (last.grad == 7).all()
        return moved, times, dict(layout.save())

    for moved, times, saved in on_threads(2, work):
        assert (moved, times) == ({*LEARN[1:3]}, [1])
        for name, own in zip(NAMES, OWN, strict=True):
            is_stepped = name in moved or (name == "gain" and "gain" not in staged)
            assert torch.equal(saved[own], whole[name] * 2 + 1 if is_stepped else whole[name])


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        model: Any = layout._model
        for parameter in layout.parameters:
            parameter.tensor.grad = torch.zeros_like(parameter.tensor)
        with pytest.raises(KeyError), layout.step(ONES, ALL, measure=False):
            raise KeyError
        assert layout._step is None
        assert all(one.grad is None for one in model.parameters())
        with layout.step(ONES, ALL, measure=True, sketch=None) as step:
            assert (step.measures, step.sketch) == (True, None)
        given: Any = object()
        with layout.step(ONES, ALL, measure=False, sketch=given) as step:
            assert (step.measures, step.sketch) == (False, given)
        # What a pass has gathered may stand there yet.
        gathered = nn.Parameter(torch.zeros(1))
        model._parameters["gain"] = gathered
        layout.arrivals.gathered["gain"] = gathered
        with layout.step(ONES, ALL, measure=False):
            pass
        layout.arrivals.gathered.clear()
        with pytest.raises(PlanError, match="isn't what was planned: gain is another tensor"):
            layout.step(ONES, ALL, measure=False).__enter__()
        return True

    assert on_threads(2, work) == [True, True]


def test_who_keeps_company_adds_nothing_and_gathers_what_others_gather() -> None:
    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        taken: list[Any] = []
        for group in layout.groups:
            nothing = layout.nothing(group)
            assert nothing.shape == (sum(layout.cut.rows[name].padded for name in group.trained),)
            assert nothing.view(torch.int32).tolist() == [-(2**31)] * len(nothing), "-0.0"
            layout._take(group, nothing)
            assert layout._accompany(2 * group.number)() is None  # type: ignore[func-returns-value]
            assert taken == []
            take = layout._accompany(2 * group.number + 1)
            take()
            layout._step = SimpleNamespace(take=lambda *given: taken.append(given))  # type: ignore[assignment]
            take()
            layout._step = None
            ((of, part),) = taken
            assert of is group
            assert torch.equal(part.view(torch.int32), nothing.view(torch.int32))
            taken.clear()
        # What another rank has to sum arrives at the rank that keeps it company.
        group = layout.groups[1]
        if ranks.rank == 0:
            flat = torch.arange(2.0 * group.num_summed)
            tree_reduce_scatter(flat.new_empty(group.num_summed), flat, None)
        else:
            layout._step = SimpleNamespace(take=lambda _, part: taken.append(part.tolist()))  # type: ignore[assignment]
            layout._accompany(3)()
            assert taken == [list(range(group.num_summed, 2 * group.num_summed))]
        layout._step = None
        if ranks.rank == 0:
            # It runs a block by itself, and the other one, who knows its exchanges, keeps company.
            with layout.lockstep.together():
                return loss_of(layout._model, 0).detach()
        with layout.lockstep.together():
            return None

    found, none = on_threads(2, work)
    assert none is None
    assert found is not None
    torch.testing.assert_close(found, loss_of(Model(), 0).detach())


def test_weights_are_exact_again_when_a_step_that_rounds_ends() -> None:
    def work(ranks: Ranks) -> Any:
        found = []
        for rounds in (True, False):
            layout = layout_of(ranks, rounds=rounds)
            found.append(layout._rounds())
            with layout.step(ONES, ALL, measure=False):
                found.append(layout._rounds())
                sent = layout.groups[1].gathered_from(layout._locals)
                layout._accompany(2)()
            found.append(layout._rounds())
            assert sent.dtype is torch.float32
        return found, layout_of(ranks)._rounds()

    assert on_threads(2, work) == [([False, True, False, False, False, False], False)] * 2


def test_state_of_staged_matrices_is_their_owners_where_it_is_an_optimizers() -> None:
    name, plain = "blocks.1.weight", LEARN[1]
    whole = {f"{name}/m": torch.arange(9.0).view(3, 3), f"{plain}/m": torch.arange(6.0).view(3, 2)}

    def work(ranks: Ranks) -> Any:
        layout = layout_of(ranks)
        layout.stage([name])
        owner, found = layout.cut.owner_of[name], []
        for of_optimizers in (True, False):
            own = layout.own_state(whole, of_optimizers=of_optimizers)
            assert (f"{name}/m" in own) is (owner == ranks.rank or not of_optimizers)
            assert all_equal(layout.whole_state(own, of_optimizers=of_optimizers), whole)
            found.append(spans(layout.held_state(own, of_optimizers=of_optimizers)))
        return owner, found

    for rank, (owner, (optimizers, methods)) in enumerate(on_threads(2, work)):
        own = {
            key: (
                one[rows("weight", rank)].flatten().tolist(),
                tuple(one.shape),
                rows("weight", rank).start * len(one[0]),
            )
            for key, one in whole.items()
        }
        assert methods == own
        mine = {f"{name}/m": (list(range(9)), (3, 3), 0)} if owner == rank else {}
        assert optimizers == {f"{plain}/m": own[f"{plain}/m"]} | mine
