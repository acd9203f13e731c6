"""Pieces of a model that nobody has cut, against plain tensors."""

import pytest
import torch
from torch import nn

from cosmati.core.pieces import Pieces
from cosmati.testing.pieces import gradients_of, weights_of


def pieces() -> Pieces:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in {"a": (3, 2), "b": (4,), "c": ()}.items()
    }
    return Pieces(tensors, {"a": 0, "b": 1, "c": 1})


def test_norms_against_float64() -> None:
    given = pieces()
    total = sum(float(t.double().square().sum()) for t in given.tensors.values()) ** 0.5
    assert float(given.norm()) == pytest.approx(total, rel=1e-6)
    own = given.norm_by_region()
    assert float(own[0]) == pytest.approx(float(given.tensors["a"].double().norm()), rel=1e-6)
    assert float(own[1]) == pytest.approx(
        float((given.tensors["b"].double().square().sum() + given.tensors["c"].double() ** 2) ** 0.5), rel=1e-6
    )


def test_maps_pair_by_name() -> None:
    given = pieces()
    other = Pieces({name: given.tensors[name] + 1 for name in ("c", "b", "a")}, given.regions)
    difference = given.map(lambda t, o: o - t, other)
    assert difference.names == ("a", "b", "c")
    for name, tensor in difference.tensors.items():
        torch.testing.assert_close(tensor, torch.ones_like(given.tensors[name]))
    assert given.map_whole(lambda t, o: o - t, other).names == ("a", "b", "c")


def test_scaled_as_a_whole_and_by_region() -> None:
    given = pieces()
    for factor in (2.0, torch.tensor(2.0)):
        assert all(torch.equal(t, 2 * given.tensors[name]) for name, t in given.scaled(factor).tensors.items())
    by_region = given.scaled({0: torch.tensor(1.0), 1: torch.tensor(-3.0)})
    assert torch.equal(by_region.tensors["a"], given.tensors["a"])
    assert torch.equal(by_region.tensors["b"], -3 * given.tensors["b"])


def test_absent_is_absent() -> None:
    given = pieces().only(["c", "a"])
    assert given.names == ("c", "a")
    assert "b" not in given
    assert set(given.norm_by_region()) == {0, 1}
    assert not given.only([])
    assert given.only([]).norm_by_region() == {}


def test_weights_and_gradients_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    model[1].weight.grad = torch.ones(2, 2)
    assert weights_of(model).names == ("0.weight", "1.weight", "1.bias")
    found = gradients_of(model)
    assert found.names == ("1.weight",)
    model[1].weight.grad.zero_()
    assert torch.equal(found.tensors["1.weight"], torch.ones(2, 2)), "a copy"
