"""Weight standardisation against filters standardised one by one, and its surgery."""

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
from cosmati.methods.blurpool import BlurConv2d, apply_blurpool, blur_2d
from cosmati.methods.weight_standardization import (
    StandardizedWeight,
    WeightStandardization,
    apply_weight_standardization,
    standardize_weight,
)

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(weight: Tensor) -> np.ndarray:
    filters = weight.detach().double().numpy()
    return np.stack([(one - one.mean()) / np.sqrt(((one - one.mean()) ** 2).mean() + 1e-10) for one in filters])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.floats(0.01, 100), st.integers(0, 99))
def test_each_filter_is_standardised(out: int, inner: int, dimensions: int, scale: float, seed: int) -> None:
    weight = scale * random(out, inner, *[2, 3, 2][:dimensions], seed=seed) + 1
    np.testing.assert_allclose(standardize_weight(weight).numpy(), reference(weight), rtol=1e-2, atol=2e-3)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.1, 10), st.floats(-1, 1))
def test_scale_and_shift_of_a_filter_do_not_matter(scale: float, shift: float) -> None:
    weight = random(3, 4, 3, 3).double()
    torch.testing.assert_close(standardize_weight(scale * weight + shift), standardize_weight(weight))


def test_constant_filters_become_zero_and_gradients_hold() -> None:
    assert torch.equal(standardize_weight(torch.full((2, 3, 3), 0.5)), torch.zeros(2, 3, 3))
    assert torch.autograd.gradcheck(standardize_weight, (random(2, 3, 2).double().requires_grad_(),))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_convolutions_use_the_standardised_weight(dimensions: int, padding_mode: str) -> None:
    kind = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dimensions - 1]
    plain = kind(4, 6, 3, 2, 1, groups=2, padding_mode=padding_mode).double()
    changed = apply_weight_standardization(copy.deepcopy(plain))
    with torch.no_grad():
        plain.weight.copy_(torch.from_numpy(reference(plain.weight)))
    input = random(2, 4, *[5] * dimensions).double()
    torch.testing.assert_close(changed(input), plain(input))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 16, 3))
        self.head = nn.Conv2d(16, 4, 1, bias=False)
        self.twin = self.body[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.twin(self.body(self.stem(x))))
        return y


def test_surgery_shares_everything_and_is_idempotent() -> None:
    net = Net()
    objects, keys = list(net.modules()), list(net.state_dict())
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    seen: list[int] = []
    handle = net.twin.register_forward_hook(lambda *_: seen.append(1))
    assert apply_weight_standardization(net) is net
    assert all(a is b for a, b in zip(objects, net.modules(), strict=True))
    assert list(net.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    assert isinstance(net.twin, nn.Conv2d)
    assert not isinstance(net.body[2], StandardizedWeight)
    image = random(2, 3, 16, 16)
    net(image).square().sum().backward()
    assert len(seen) == 2
    handle.remove()
    kept = parameters["stem.weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(parameters["stem.weight"], kept)
    kinds, output = [type(module) for module in net.modules()], net(image)
    apply_weight_standardization(net)
    assert [type(module) for module in net.modules()] == kinds
    assert torch.equal(net(image), output)
    net.stem.weight = nn.Parameter(kept)
    assert torch.equal(net._modules["stem"]._parameters["weight"], kept)  # type: ignore[union-attr]


def test_last_layers_are_ignored() -> None:
    for ignored in range(4):
        net = Net()
        if ignored == 3:
            with pytest.warns(UserWarning, match="WeightStandardization changes nothing: Net"):
                apply_weight_standardization(net, ignored)
        else:
            apply_weight_standardization(net, ignored)
        done = [isinstance(layer, StandardizedWeight) for layer in (net.stem, net.twin, net.head)]
        assert done == [index < 3 - ignored for index in range(3)]


def test_what_is_left_alone() -> None:
    single = nn.Conv2d(4, 4, 1, groups=4)
    tied = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    net = nn.Sequential(single, tied, nn.Linear(4, 4))
    kinds = [type(module) for module in net]
    with pytest.warns(UserWarning, match="changes nothing"):
        apply_weight_standardization(net)
    assert [type(module) for module in net] == kinds


@pytest.mark.parametrize("blur_first", [True, False])
def test_composes_with_other_surgery(blur_first: bool) -> None:
    conv = nn.Conv2d(16, 8, 3, 2, 1).double()
    changed = apply_weight_standardization(apply_blurpool(copy.deepcopy(conv), blur_first=blur_first))
    assert isinstance(changed, BlurConv2d)
    with torch.no_grad():
        conv.weight.copy_(torch.from_numpy(reference(conv.weight)))
    image = random(2, 16, 8, 8).double()
    dense = nn.functional.conv2d(image, conv.weight, conv.bias, 1, 1)
    expected = conv(blur_2d(image)) if blur_first else blur_2d(dense, 2)
    torch.testing.assert_close(changed(image), expected)


@pytest.mark.long
def test_copies_exports_and_low_precision() -> None:
    net = copy.deepcopy(apply_weight_standardization(Net())).eval()
    image = random(1, 3, 16, 16)
    exported = torch.export.export(net, (image,)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    torch.testing.assert_close(exported(image), net(image))
    new = {name: value + 1 for name, value in net.named_parameters()}
    shifted = torch.func.functional_call(net, new, (image,))
    bias = torch.func.functional_call(net, {name: new[name] for name in new if "bias" in name}, (image,))
    convolved = [name for name in new if "weight" in name and name != "body.2.weight"]
    same = torch.func.functional_call(net, {name: new[name] for name in convolved}, (image,))
    torch.testing.assert_close(same, net(image), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(shifted, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(image).dtype == torch.bfloat16
    plain = Net()
    plain.load_state_dict(net.state_dict())
    net.load_state_dict(plain.state_dict())


def test_method_equals_function() -> None:
    net = Net()
    twin, image = copy.deepcopy(net), random(1, 3, 16, 16)
    by_method = WeightStandardization(n_last_layers_ignore=1).apply(net)
    assert torch.equal(by_method(image), apply_weight_standardization(twin, 1)(image))
    assert WeightStandardization.stage is Stage.REPLACE
    for refused in (
        lambda: WeightStandardization(n_last_layers_ignore=-1),
        lambda: apply_weight_standardization(net, -1),
    ):
        with pytest.raises(PlanError, match="n_last_layers_ignore=-1"):
            refused()
