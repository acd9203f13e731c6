"""Leaves as they arrive in their slots: attenuated, measured, brought to float32; and the commit's gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.core.state import model_tensors, parameter_root
from cosmati.errors import CheckpointError
from cosmati.routing.regions import Regions
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
REGIONS = Regions(("body", "head"), (NAMES[:2], NAMES[2:]), (("body",), ("head",)))
ROUTES = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.3), (0.0, 0.0))
ALL = frozenset(range(4))


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def _layout(model: nn.Module) -> Whole:
    return Whole(model, REGIONS, Ranks(), len(ROUTES))


def _objective(model: nn.Module, microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(microbatch)).to(dtype)
    return model(rows).float().square().mean()


def _leaf(model: nn.Module, microbatch: int, dtype: torch.dtype, learns: frozenset[int]) -> dict[str, Tensor]:
    """A microbatch's gradients by themselves, in float32, attenuated; what is denied or frozen isn't there."""
    gradients = torch.autograd.grad(_objective(model, microbatch, dtype), list(model.parameters()))
    weights = [ROUTES[microbatch][REGIONS.region_of[name]] for name in NAMES]
    return {
        name: gradient.float() * weight
        for index, (name, gradient, weight) in enumerate(zip(NAMES, gradients, weights, strict=True))
        if weight and index in learns
    }


@pytest.mark.parametrize("learns", [ALL, frozenset({0, 3})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_slot_measures_its_own_leaf(dtype: torch.dtype, learns: frozenset[int]) -> None:
    model = _model(dtype)
    layout = _layout(model)
    found = []
    with layout.step(ROUTES, learns, measure=True) as step:
        for microbatch in range(len(ROUTES)):
            with step.slot(microbatch) as slot:
                slot.backward(_objective(model, microbatch, dtype))
            found.append(torch.stack(list(slot.norms)))
    assert all(norms.dtype is torch.float64 for norms in found)
    for microbatch, norms in enumerate(found):
        leaf = _leaf(model, microbatch, dtype, learns)
        for names, norm in zip(REGIONS.parameters, norms, strict=True):
            own = [leaf[name].double().flatten() for name in names if name in leaf]
            assert bool(norm.isnan()) == (not own)
            if own:
                torch.testing.assert_close(norm, torch.cat(own).norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_root_is_the_tree_over_attenuated_leaves(dtype: torch.dtype, measure: bool) -> None:
    model = _model(dtype)
    layout = _layout(model)
    denominators = torch.tensor([1.0, 7.0], dtype=torch.float64)
    with layout.step(ROUTES, ALL, measure=measure) as step:
        for microbatch in range(len(ROUTES)):
            with step.slot(microbatch) as slot:
                slot.backward(_objective(model, microbatch, dtype))
            assert measure or list(slot.norms) == []
        root = step.root(denominators).tensors
    leaves = [_leaf(model, microbatch, dtype, ALL) for microbatch in range(4)]
    for name in NAMES:
        (a, b), (c, d) = ([leaf.get(name) for leaf in pair] for pair in (leaves[:2], leaves[2:]))
        left, right = (y if x is None else x if y is None else x + y for x, y in ((a, b), (c, d)))
        assert left is not None
        total = left if right is None else left + right
        expected = total / 7.0 if name in REGIONS.parameters[1] else total
        assert root[name].dtype is torch.float32
        assert torch.equal(root[name], expected)


def test_what_nothing_taught_is_absent_from_the_root() -> None:
    model = _model()
    with _layout(model).step(((0.0, 1.0),) * 4, frozenset({0, 1, 2}), measure=False) as step:
        for microbatch in range(4):
            with step.slot(microbatch) as slot:
                slot.backward(_objective(model, microbatch))
        assert step.root(None).names == ("1.weight",)


def test_a_slot_that_fails_hands_no_leaf_on() -> None:
    model = _model()

    def fails() -> None:
        raise ZeroDivisionError

    with _layout(model).step(ROUTES, ALL, measure=True) as step:
        slot = step.slot(0)
        with pytest.raises(ZeroDivisionError), slot:
            fails()
        assert step._sum._waiting is None
        assert slot.norms == []


def test_an_objective_without_a_graph_leaves_an_empty_leaf() -> None:
    model = _model()
    with _layout(model).step(ROUTES, ALL, measure=True) as step:
        for microbatch in range(4):
            with step.slot(microbatch) as slot:
                slot.backward(torch.tensor(1.0))
            assert all(norm.isnan() for norm in slot.norms)
        assert step.root(None).names == ()


def test_the_gate_puts_gradients_in_place_and_says_what_moved() -> None:
    model = _model()
    model[1].bfloat16()
    layout = _layout(model)
    given = {"0.weight": torch.ones(4, 3), "1.bias": torch.full((2,), 1.0 + 2**-12), "0.bias": torch.ones(4)}
    model[1].weight.grad = torch.ones(2, 4, dtype=torch.bfloat16)  # of an earlier sub-step
    model[0].bias.grad = torch.zeros(4)
    seen: list[dict[str, Tensor | None]] = []

    def step() -> None:
        seen.append({name: parameter.grad for name, parameter in model.named_parameters()})

    assert layout.commit(layout.weights().having(given), (0, 2, 3), step) == {"0.weight", "1.bias"}
    (gradients,) = seen
    assert gradients["0.weight"] is given["0.weight"]
    assert gradients["1.weight"] is None
    assert gradients["1.bias"] is not None
    assert (gradients["1.bias"].dtype, gradients["1.bias"].tolist()) == (torch.bfloat16, [1.0, 1.0])
    assert gradients["0.bias"] is not None
    assert gradients["0.bias"].tolist() == [0.0] * 4, "another optimizer's"


@pytest.mark.parametrize("way", ["perturbed", "replaced"])
def test_other_values_stand_for_a_while(way: str) -> None:
    model = _model()
    layout, before = _layout(model), {name: value.clone() for name, value in model.state_dict().items()}
    values = {"0.bias": torch.full((4,), 1e9), "1.weight": torch.full((2, 4), 2.0)}
    own = dict(model.named_parameters())
    with layout.perturbed(Pieces(values)) if way == "perturbed" else layout.replaced(values):
        for name, value in values.items():
            assert torch.equal(own[name].data, before[name] + value if way == "perturbed" else value)
        assert torch.equal(own["0.weight"].data, before["0.weight"])
    # 1e9 swallows the bias: only a saved copy brings it back.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_layout_saves_loads_and_digests_the_whole_model() -> None:
    one, two = _model(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = _layout(one), _layout(two)
    assert first.digest() == parameter_root(model_tensors(one)) != second.digest()
    second.load(dict(first.save()))
    assert second.digest() == first.digest()
    with pytest.raises(CheckpointError, match="weights don't fit the model"):
        second.load({"0.weight": torch.zeros(4, 3)})


def test_parameters_are_numbered_in_the_models_order() -> None:
    model = _model()
    model[0].bias.requires_grad_(False)
    layout = _layout(model)
    assert [(p.index, p.name, p.region) for p in layout.parameters] == [
        (0, "0.weight", 0), (1, "1.weight", 1), (2, "1.bias", 1)
    ]  # fmt: skip
    assert layout.pieces() == [(name, parameter) for name, parameter in model.named_parameters() if name != "0.bias"]
    assert layout.weights().regions == {"0.weight": 0, "1.weight": 1, "1.bias": 1}
    assert list(layout.mine) == [0, 1, 2, 3]
