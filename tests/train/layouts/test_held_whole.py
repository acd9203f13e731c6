"""Where each rank holds all parameters: what is admitted, committed, put elsewhere for a while, saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.state import parameter_root
from cosmati.errors import CheckpointError
from cosmati.routing.regions import Regions
from cosmati.train.layout import whole
from cosmati.train.layout.pair_sum import PairSum
from cosmati.train.layout.piece import alignment_of, evenly, in_buckets
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks

NAMES = ("first.weight", "first.bias", "half.weight", "wide.weight")
REGIONS = Regions(("body", "head"), (NAMES[:2], NAMES[2:]), (("body",), ("head",)))


class Mixed(nn.Module):
    """Parameters of three types, one that's frozen, and two buffers, one of which isn't kept."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2,), 1.001), requires_grad=False)
        self.first = nn.Linear(2, 3)
        self.half = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        self.register_buffer("seen", torch.full((2,), 5.0))
        self.register_buffer("lost", torch.ones(1), persistent=False)


def ranks_of(world: int, rank: int = 0) -> Ranks:
    ranks = Ranks.alone()
    ranks.world, ranks.rank, ranks.is_parallel = world, rank, world > 1
    return ranks


def layout(world: int = 1, rank: int = 0, num: int = 4, *, rounds: bool = False) -> tuple[Whole, Any]:
    model = Mixed()
    return Whole(model, REGIONS, ranks_of(world, rank), num, rounds=rounds), model


def test_parameters_are_those_that_train_in_the_models_order_with_their_regions() -> None:
    made, model = layout()
    own = dict(model.named_parameters())
    assert [(p.index, p.name, p.region) for p in made.parameters] == [
        (0, NAMES[0], 0), (1, NAMES[1], 0), (2, NAMES[2], 1), (3, NAMES[3], 1)
    ]  # fmt: skip
    assert all(p.tensor is own[p.name] for p in made.parameters)
    assert all(tensor is own[name] for tensor, name in zip(made.tensors, NAMES, strict=True))
    assert [(name, tensor is own[name]) for name, tensor in made.pieces()] == [(name, True) for name in NAMES]
    assert (made.num_regions, made.members, made.narrow) == (2, [[0, 1], [2, 3]], {2})
    assert (list(made.mine), made.is_cut, made.looked, made.nests, made.has_warned) == (
        [0, 1, 2, 3], False, set(), False, False,
    )  # fmt: skip
    assert made.weights().names == NAMES
    assert made.weights() is made.weights()
    assert all(made.weights().tensors[name] is own[name] for name in NAMES)
    given = {name: torch.ones(1) for name in NAMES[1:3]}
    assert made.gradients(given).tensors == given
    assert made.weights().regions == dict(zip(NAMES, (0, 0, 1, 1), strict=True))


def test_microbatches_are_those_of_the_rank() -> None:
    assert list(layout(2, 1)[0].mine) == [2, 3]


def test_weights_are_read_as_they_are_unless_somebody_asks() -> None:
    made = Whole(Mixed(), REGIONS, ranks_of(1), 4)
    with made.step(((1.0, 1.0),) * 4, frozenset(range(4)), measure=False):
        made.tensors[1].data.fill_(1.001)
    kept = made.tensors[1].detach().clone()
    with made.step(((1.0, 1.0),) * 4, frozenset(range(4)), measure=False):
        assert torch.equal(made.tensors[1], kept)


def test_complex_parameters_are_neither_narrow_nor_rounded() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2,), 1.001 + 1j))
    kept = model.weight.detach().clone()
    made = Whole(model, Regions(("all",), (("weight",),), (("all",),)), ranks_of(1), 1, rounds=True)
    assert made.narrow == frozenset()
    with made.step(((1.0,),), frozenset({0}), measure=False):
        assert torch.equal(model.weight, kept)


# ------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("limit", [1, 8, 1 << 20])
def test_gradients_are_summed_over_replicas_in_even_buckets(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    assert whole.BUCKET_ELEMENTS == 1 << 20
    monkeypatch.setattr(whole, "BUCKET_ELEMENTS", limit)
    alone, many = layout()[0], layout(2)[0]
    assert alone._buckets == ()
    assert isinstance(alone.new_sum(4), PairSum)
    sizes = [6, 3, 6, 6]
    alignment = alignment_of(many.tensors)
    assert alignment == 32
    assert many._buckets == tuple(evenly(group, sizes, 2, alignment) for group in in_buckets(sizes, limit))
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(whole, "RankSum", lambda *given: told.append(given))
    many.new_sum(4)
    assert told == [(many.ranks, many.tensors, 4, many._buckets)]


# --------------------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("weights", "learns", "admitted", "attenuated"),
    [
        ((1.0, 1.0), {0, 1, 2, 3}, [0, 1, 2, 3], {}),
        ((0.5, 1.0), {0, 2, 3}, [0, 2, 3], {0: 0.5}),
        ((0.0, 0.25), {0, 1, 3}, [3], {3: 0.25}),
        ((1.0, 0.0), {2}, [], {}),
        ((2.0, -1.0), {1, 2}, [1, 2], {1: 2.0, 2: -1.0}),
    ],
)
def test_a_route_admits_what_learns_where_it_has_weight(
    weights: tuple[float, float], learns: set[int], admitted: list[int], attenuated: dict[int, float]
) -> None:
    made, _ = layout()
    found = made.admission(weights, frozenset(learns))
    assert [id(tensor) for tensor in found.tensors] == [id(made.tensors[index]) for index in admitted]
    assert (found.indices, found.attenuation) == (set(admitted), attenuated)
    assert made.admission(weights, frozenset(learns)) is found, "worked out once"


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_begins_and_ends_without_gradients_and_may_read_rounded_weights(rounds: bool, fails: bool) -> None:
    made, model = layout(rounds=rounds)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in made.tensors:
        parameter.grad = torch.ones_like(parameter)
    closed: list[bool] = []

    def a_pass() -> None:
        with made.step(((1.0, 1.0),) * 4, frozenset(range(4)), measure=False) as step:
            real = step.close
            step.close = lambda: (closed.append(True), real())  # type: ignore[method-assign,assignment,return-value]
            assert all(parameter.grad is None for parameter in made.tensors)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, kept[name].bfloat16().to(parameter.dtype) if rounds else kept[name])
            made.tensors[0].grad = torch.ones_like(made.tensors[0])
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            a_pass()
    else:
        a_pass()
    assert closed == [True]
    assert all(parameter.grad is None for parameter in made.tensors)
    assert all(torch.equal(value, kept[name]) for name, value in model.named_parameters())


def test_a_pass_is_told_what_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = layout()
    told: list[Any] = []

    class Told:
        def __init__(self, *given: Any, **named: Any) -> None:
            told.append((given, named))

        def close(self) -> None: ...

    monkeypatch.setattr(whole, "WholeStep", Told)
    routes, sketch = ((1.0, 1.0),), object()
    for named in ({"measure": True}, {"measure": False, "sketch": sketch}):
        with made.step(routes, frozenset({1}), **named) as step:  # type: ignore[arg-type]
            assert isinstance(step, Told)
    assert told == [
        ((made, routes, {1}), {"measure": True, "sketch": None}),
        ((made, routes, {1}), {"measure": False, "sketch": sketch}),
    ]


def test_rows_are_gathered_by_the_ranks() -> None:
    made, _ = layout()
    rows, other = torch.ones(2), torch.zeros(2)
    made.ranks.gather = lambda given: other if given is rows else given  # type: ignore[method-assign]
    assert made.gather(rows) is other


# -------------------------------------------------------------------------------------------------------------- commit


def test_gradients_are_put_in_place_before_the_optimizers_step() -> None:
    made, _ = layout()
    stepped: list[Sequence[Tensor | None]] = []
    for parameter in made.tensors:
        parameter.grad = torch.full_like(parameter, 9.0)
    root = made.gradients(
        {
            NAMES[0]: torch.full((3, 2), 0.5),
            NAMES[2]: torch.full((2, 3), 1.001),
            NAMES[3]: torch.full((2, 3), 1.001, dtype=torch.float64),
        }
    )
    moved = made.commit(root, [0, 1, 2], lambda: stepped.append([p.grad for p in made.tensors]))
    assert moved == {NAMES[0], NAMES[2]}
    ((first, absent, half, other),) = stepped
    assert first is root.tensors[NAMES[0]]
    assert absent is None, "what no leaf has reached isn't stepped"
    assert half is not None
    assert torch.equal(half, torch.full((2, 3), 1.001).bfloat16())
    assert other is not None
    assert other.eq(9.0).all(), "what doesn't learn is left"
    assert made.commit(made.gradients({}), [], lambda: stepped.append([])) == frozenset()
    assert len(stepped) == 2


# ------------------------------------------------------------------------------------------------------ other weights


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["perturbed", "replaced"])
def test_other_weights_stand_in_for_a_while(kind: str, fails: bool) -> None:
    made, _ = layout()
    kept = [tensor.detach().clone() for tensor in made.tensors]
    given = {NAMES[0]: torch.full((3, 2), 1e8), NAMES[3]: torch.full((2, 3), 0.5, dtype=torch.float64)}

    def look() -> None:
        with made.perturbed(made.gradients(given)) if kind == "perturbed" else made.replaced(given):
            for name, tensor, own in zip(NAMES, made.tensors, kept, strict=True):
                other = given.get(name)
                assert torch.equal(tensor, own if other is None else own + other if kind == "perturbed" else other)
                assert tensor.requires_grad
            made.tensors[1].data.zero_()  # What isn't replaced is whoever's who writes to it.
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            look()
    else:
        look()
    kept[1] = torch.zeros(3)
    assert all(torch.equal(tensor, own) for tensor, own in zip(made.tensors, kept, strict=True))


# ---------------------------------------------------------------------------------------------------------- and state


def test_what_is_saved_is_all_of_the_model_and_is_held_whole() -> None:
    made, model = layout()
    saved = dict(made.save())
    assert saved.keys() == model.state_dict().keys() == {"frozen", *NAMES, "seen"}
    held = made.held()
    assert held.keys() == saved.keys()
    for name, span in held.items():
        assert (span.start, span.shape) == (0, tuple(saved[name].shape))
        assert torch.equal(span.tensor, model.state_dict()[name])
    assert made.digest() == parameter_root(saved)
    before = made.digest()
    model.seen.add_(1)
    assert made.digest() != before


def test_what_is_loaded_is_all_of_the_model_of_this_very_run() -> None:
    made, model = layout()
    saved = {name: value + 1 for name, value in made.save()}
    model.seen = torch.ones(5)  # A buffer may have grown since.
    made.load(saved)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    with pytest.raises(CheckpointError, match=r"first\.bias is missing"):
        made.load({name: value for name, value in saved.items() if name != "first.bias"})


@pytest.mark.parametrize("of_optimizers", [False, True])
def test_state_is_each_ranks_whole(of_optimizers: bool) -> None:
    made, _ = layout()
    state = {"first.bias/step": torch.ones(()), "other": torch.ones(3)}
    held = made.held_state(state, of_optimizers=of_optimizers)
    assert {name: (span.tensor is state[name], span.shape, span.start) for name, span in held.items()} == {
        "first.bias/step": (True, (), 0), "other": (True, (3,), 0),
    }  # fmt: skip
    for given in (made.whole_state, made.own_state):
        found = given(state, of_optimizers=of_optimizers)
        assert found is not state
        assert {name: value is state[name] for name, value in found.items()} == dict.fromkeys(state, True)
