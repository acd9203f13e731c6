"""The entropy of a region is that of its last module's output: which module, which samples, and what has none."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.train.entropy_profile import (
    MAX_SAMPLES,
    EntropyProfile,
    _first_tensor,
    _samples_of,
    places_of_regions,
    spectral_entropy,
)


def brute(samples: np.ndarray[Any, Any]) -> float:
    """By the singular values of the centred samples."""
    values = np.linalg.svd(samples - samples.mean(0), compute_uv=False) ** 2
    shares = values / values.sum()
    return float(-sum(p * math.log(p) for p in shares if p > 0))


@pytest.mark.parametrize("shape", [(2, 9), (9, 2), (5, 5), (40, 7), (7, 40), (3, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_entropy_is_that_of_the_shares_of_directions(shape: tuple[int, int], scale: float) -> None:
    samples = np.random.default_rng(0).normal(3.0, 2.0, shape)
    found = spectral_entropy(torch.from_numpy(samples) * scale)
    assert found == pytest.approx(brute(samples), abs=1e-9)
    assert 0 <= found <= math.log(min(shape[0] - 1, shape[1])) + 1e-12


def test_equal_shares_have_the_logarithm_of_their_number() -> None:
    corners = torch.cat([torch.eye(3), -torch.eye(3)])
    assert spectral_entropy(corners) == pytest.approx(math.log(3))
    assert spectral_entropy(corners.half().requires_grad_()) == pytest.approx(math.log(3))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 4), (5, 4)])
def test_samples_that_do_not_differ_have_none(shape: tuple[int, int]) -> None:
    found = spectral_entropy(torch.full(shape, 2.5))
    assert found == 0.0
    assert math.copysign(1.0, found) == 1.0
    assert spectral_entropy(torch.tensor([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_says_nothing(bad: float) -> None:
    assert math.isnan(spectral_entropy(torch.tensor([[1.0, bad], [0.0, 1.0]])))


class Net(nn.Module):
    """Modules of one region, of two, of none, in containers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.pair = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.pair["b"](self.pair["a"](x))) * self.scale  # type: ignore[no-any-return]


NAMES = ("stem", "blocks", "a", "b", "scale")
REGION_OF = {
    **{f"stem.{i}.{p}": 0 for i in (0, 2) for p in ("weight", "bias")},
    **{f"blocks.{i}.{p}": 1 for i in (0, 1) for p in ("weight", "bias")},
    **{f"pair.{k}.{p}": r for r, k in ((2, "a"), (3, "b")) for p in ("weight", "bias")},
    "scale": 4,
}


def regions(names: tuple[str, ...] = NAMES, **changed: int) -> Any:
    known = REGION_OF | {name.replace("__", "."): own for name, own in changed.items()}
    return SimpleNamespace(names=names, region_of={name: own for name, own in known.items() if own >= 0})


def test_places_are_the_largest_modules_that_run_with_one_regions_parameters() -> None:
    found = places_of_regions(Net(), regions())
    assert found == {"stem": 0, "blocks.0": 1, "blocks.1": 1, "pair.a": 2, "pair.b": 3}
    assert list(found) == ["stem", "blocks.0", "blocks.1", "pair.a", "pair.b"]
    split = places_of_regions(Net(), regions(stem__2__weight=1, stem__2__bias=1, blocks__0__weight=-1))
    assert split == {"stem.0": 0, "stem.2": 1, "blocks.0": 1, "blocks.1": 1, "pair.a": 2, "pair.b": 3}
    mixed = places_of_regions(Net(), regions(blocks__0__weight=3))
    assert "blocks.0" not in mixed
    assert mixed["blocks.1"] == 1


@pytest.fixture
def profiled() -> tuple[Net, EntropyProfile, Tensor]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return (net := Net()), EntropyProfile(net, regions()), torch.randn(6, 4)


def missing() -> Any:
    return pytest.warns(UserWarning, match="No module has parameters of scale alone, so nothing is said")


def test_each_regions_last_module_is_read_once_for_each_microbatch(
    profiled: tuple[Net, EntropyProfile, Tensor],
) -> None:
    net, profile, x = profiled
    with missing() as told, profile.reading(is_on=True):
        found = [(net(one), profile.read()) for one in (x, 2 * x.flip(0), x[:3])]
    assert len(told) == 1
    for one, (_, (entropies,)) in zip((x, 2 * x.flip(0), x[:3]), found, strict=True):
        with torch.no_grad():
            stem = net.stem(one)
            blocks = net.blocks[1](net.blocks[0](stem))
            a = net.pair["a"](blocks)
            outputs = stem, blocks, a, net.pair["b"](a)
        assert entropies.dtype == torch.float64
        assert entropies.tolist()[:4] == pytest.approx(
            [brute(each.numpy().astype(float)) for each in outputs], rel=1e-6
        )
        assert math.isnan(entropies[4])
    with profile.reading(is_on=True):
        (nothing,) = profile.read()
    assert bool(nothing.isnan().all()), "nothing has run"


def test_nobody_looks_where_nobody_asks_or_after_the_step(profiled: tuple[Net, EntropyProfile, Tensor]) -> None:
    net, profile, x = profiled
    assert profile.read() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile.reading(is_on=False):
            assert not any(module._forward_hooks for module in net.modules())
            net(x)
            assert profile.read() == []

    def fails() -> None:
        with profile.reading(is_on=True):
            assert sum(len(module._forward_hooks) for module in net.modules()) == 5
            net(x)
            raise KeyError

    with pytest.raises(KeyError), missing():
        fails()
    assert not any(module._forward_hooks for module in net.modules())
    net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile.reading(is_on=True):  # the second one: the warning has been given
            assert bool(profile.read()[0].isnan().all()), "what an earlier step has left is gone"
        with profile.reading(is_on=False):
            assert profile.read() == []


def test_what_is_read_is_a_copy_and_no_part_of_a_graph(profiled: tuple[Net, EntropyProfile, Tensor]) -> None:
    net, profile, x = profiled
    net.blocks[1].register_forward_hook(lambda _m, _a, output: output.data.zero_())
    with missing(), profile.reading(is_on=True):
        output = net(x)
        assert not any(one.requires_grad for one in profile._samples.values())
        assert output.requires_grad
        (found,) = profile.read()
    assert found[1] == 0
    assert profile.read()[0].isnan().all()


def test_no_warning_where_each_region_has_a_module() -> None:
    net = Net()
    profile = EntropyProfile(net, regions(("stem", "blocks", "a", "b"), scale=-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile.reading(is_on=True):
            net(torch.ones(2, 4))
            assert profile.read()[0].tolist() == [0.0] * 4


def test_the_first_floating_tensor_of_an_output_is_what_it_hands_on() -> None:
    one, other, whole = torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.long)
    for output in (one, (one, other), [whole, one], {"n": whole, "x": one}, (None, "text", {"x": (3, [one])}, other)):
        assert _first_tensor(output) is one
    assert _first_tensor(OrderedDict(loss=torch.tensor(1.0), logits=one)) is one, "a scalar has no samples"
    nothings: tuple[Any, ...] = (
        whole,
        torch.tensor(2.0),
        torch.ones(2, dtype=torch.complex64),
        "text",
        b"",
        None,
        [],
        {},
        3,
        {one},
    )
    for nothing in nothings:
        assert _first_tensor(nothing) is None
    assert _first_tensor(["text", ["a"]]) is None


def test_samples_are_rows_positions_or_places_of_an_image_with_its_channels() -> None:
    shapes: tuple[tuple[int, ...], ...] = ((5, 3), (2, 5, 3), (7,))
    for shape in shapes:
        output = torch.arange(float(math.prod(shape))).reshape(shape)
        assert torch.equal(_samples_of(output), output.reshape(-1, shape[-1]))
    shapes = ((2, 3, 4, 5), (2, 3, 2, 2, 2))
    for shape in shapes:
        output = torch.randn(shape)
        found = _samples_of(output)
        expected = [output[n][(slice(None), *at)] for n in range(2) for at in np.ndindex(shape[2:])]
        assert torch.equal(found, torch.stack(expected))
    for empty in (torch.empty(0, 3), torch.empty(2, 0, 3), torch.empty(3, 0), torch.empty(2, 0, 4, 5)):
        assert _samples_of(empty).shape == (0, 1)


@pytest.mark.parametrize("num", [255, 256, 257, 300, 512, 1000])
def test_of_many_samples_some_are_taken_evenly(num: int) -> None:
    output = torch.arange(float(num))[:, None]
    found = _samples_of(output)
    wanted = min(num, MAX_SAMPLES)
    assert MAX_SAMPLES == 256
    assert found.flatten().tolist() == [k * num // wanted for k in range(wanted)]
    found.zero_()
    assert output[1] == 1
