"""Squeeze-and-excitation against the formula, and its surgery."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.method import Stage
from cosmati.errors import PlanError
from cosmati.methods.squeeze_excite import (
    SqueezeExcite,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
    apply_squeeze_excite,
)

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, 2), nn.ReLU(), nn.Conv2d(12, 12, 1, groups=2))
        self.twin = self.body[2]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.twin(self.body(self.stem(x)))
        return y


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 7), st.integers(0, 99))
def test_layer_against_the_formula(rows: int, channels: int, side: int, latent: float, seed: int) -> None:
    layer = SqueezeExcite2d(channels, latent, generator=torch.Generator().manual_seed(seed))
    image = random(rows, channels, side, side + 1, seed=seed)
    squeeze, excite, pixels = (t.detach().double().numpy() for t in (layer.squeeze, layer.excite, image))
    assert squeeze.shape == (max(1, int(latent * channels)) if latent < 1 else int(latent), channels)
    for row in range(rows):
        means = np.array([pixels[row, channel].sum() / pixels[row, channel].size for channel in range(channels)])
        gates = 1 / (1 + np.exp(-(excite @ np.maximum(squeeze @ means, 0))))
        expected = pixels[row] * gates[:, None, None]
        np.testing.assert_allclose(layer(image)[row].detach().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_new_weights_are_drawn_as_a_linear_layer_does() -> None:
    torch.manual_seed(0)
    ours = SqueezeExcite2d(200, 100)
    for weight in (ours.squeeze.detach(), ours.excite.detach()):
        bound = weight.shape[1] ** -0.5
        assert float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
        assert float(weight.mean()) == pytest.approx(0, abs=0.01 * bound)


def test_surgery_shares_everything() -> None:
    net = Net().double().eval()
    before, keys = dict(net.named_parameters()), list(net.state_dict())
    image = random(1, 3, 9, 9).double()
    convolved = net.body[0](net.stem(image))
    seen: list[int] = []
    handle = net.twin.register_forward_hook(lambda *_: seen.append(1))
    layer = net.body[0]
    groups = [{"params": [net.stem.weight], "lr": 0.1}, {"params": [layer.weight, layer.bias], "lr": 0.3}]
    first = torch.optim.SGD(groups)
    second = torch.optim.Adam([("body.2.weight", net.twin.weight)])
    assert apply_squeeze_excite(net, 4, 8, [first, second]) is net
    assert net.body[0] is layer
    assert net.twin is net.body[2]
    assert type(net.stem) is nn.Conv2d, "3 channels are fewer than 8"
    assert all(dict(net.named_parameters())[name] is parameter for name, parameter in before.items())
    assert [key for key in net.state_dict() if "squeeze_excite" not in key] == keys
    assert isinstance(layer, SqueezeExciteConv2d)
    assert layer.squeeze_excite.squeeze.dtype == torch.float64
    assert not layer.squeeze_excite.training
    assert first.param_groups[0]["params"] == [net.stem.weight]
    assert len(first.param_groups[1]["params"]) == 4
    assert first.param_groups[1]["params"][2] is layer.squeeze_excite.squeeze
    assert second.param_groups[0]["param_names"] == [
        "body.2.weight",
        "body.2.squeeze_excite.squeeze",
        "body.2.squeeze_excite.excite",
    ]
    torch.testing.assert_close(layer(net.stem(image)), layer.squeeze_excite(convolved))
    with torch.no_grad():
        # Otherwise one draw in 16 has no unit above zero, and the gates' weights no gradient.
        layer.squeeze_excite.squeeze.copy_(torch.eye(4, 12) / 100)
        layer.bias.fill_(100.0)
    net(image).sum().backward()
    assert len(seen) == 2, "the layer stands in two places"
    handle.remove()
    kept = layer.squeeze_excite.excite.detach().clone()
    first.step()
    second.step()
    assert not torch.equal(layer.squeeze_excite.excite, kept)
    assert net.twin.squeeze_excite.excite in second.state


def test_root_and_idempotence() -> None:
    root = nn.Conv2d(4, 4, 1)
    optimizer = torch.optim.SGD([("weight", root.weight)], 0.1)
    assert apply_squeeze_excite(root, 0.5, 4, optimizer) is root
    assert optimizer.param_groups[0]["param_names"][1:] == ["squeeze_excite.squeeze", "squeeze_excite.excite"]
    keys, image = list(root.state_dict()), random(1, 4, 3, 3)
    output = root(image)
    apply_squeeze_excite(root, 0.5, 4, optimizer)
    assert list(root.state_dict()) == keys
    assert len(optimizer.param_groups[0]["params"]) == 3
    assert torch.equal(root(image), output)


def test_nothing_to_change_warns_and_changes_nothing() -> None:
    class Own(nn.Conv2d):
        pass

    net = nn.Sequential(Own(256, 256, 1), nn.Conv2d(64, 256, 1), nn.Linear(256, 256))
    kinds = [type(module) for module in net]
    with pytest.warns(UserWarning, match="SqueezeExcite changes nothing: Sequential has no Conv2d of 128"):
        apply_squeeze_excite(net)
    assert [type(module) for module in net] == kinds


def test_method_equals_function_and_leaves_the_default_generator() -> None:
    torch.manual_seed(0)
    net = Net()
    twin, third = copy.deepcopy(net), copy.deepcopy(net)
    state = torch.get_rng_state()
    image = random(2, 3, 9, 9)
    output = SqueezeExcite(latent_channels=4, min_channels=8).apply(net)(image)
    assert torch.equal(SqueezeExcite(latent_channels=4, min_channels=8).apply(twin)(image), output)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(SqueezeExcite(latent_channels=4, min_channels=8, seed=1).apply(third)(image), output)
    plain = copy.deepcopy(Net())
    apply_squeeze_excite(plain, 4, 8)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(plain(image), output)
    assert SqueezeExcite.stage is Stage.REPLACE


def test_copies_exports_and_low_precision() -> None:
    net = copy.deepcopy(apply_squeeze_excite(Net(), 0.25, 8)).eval()
    image = random(2, 3, 9, 9)
    exported = torch.export.export(net, (image,)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    torch.testing.assert_close(exported(image), net(image))
    with torch.autocast("cpu", torch.bfloat16):
        assert net(image).dtype == torch.bfloat16
    assert "12, latent_channels=3" in repr(net)


@pytest.mark.parametrize(
    "options", [{"latent_channels": 0}, {"latent_channels": float("inf")}, {"min_channels": -1}, {"min_channels": 0.5}]
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="SqueezeExcite can't"):
        SqueezeExcite(**options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no width"):
        SqueezeExcite2d(3, -1.0)
