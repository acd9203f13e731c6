"""The ResNet and the MLP against the formulas, written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.models.mlp import MLP
from cosmati.models.resnet import ResidualBlock, ResNet, ResNetConfig

torch.set_num_threads(1)


def normalised(images: Tensor) -> Tensor:
    """Return what a fresh BatchNorm does in training."""
    mean = images.mean((0, 2, 3), keepdim=True)
    variance = (images - mean).square().mean((0, 2, 3), keepdim=True)
    return (images - mean) / (variance + 1e-5).sqrt()


@pytest.mark.parametrize(("in_channels", "width", "stride"), [(4, 4, 1), (4, 6, 2), (4, 6, 1)])
@pytest.mark.parametrize("pre_activation", [False, True])
def test_block_is_the_formula(in_channels: int, width: int, stride: int, *, pre_activation: bool) -> None:
    torch.manual_seed(0)
    block = ResidualBlock(in_channels, width, stride=stride, pre_activation=pre_activation).double()
    images = torch.randn(3, in_channels, 8, 8, dtype=torch.float64)
    first, second = block.convolution_1.weight, block.convolution_2.weight
    entry = F.relu(normalised(images)) if pre_activation else images
    branch = F.conv2d(entry, first, stride=stride, padding=1)
    branch = F.conv2d(F.relu(normalised(branch)), second, padding=1)
    same = in_channels == width and stride == 1
    if same:
        kept = images
    else:
        assert isinstance(block.shortcut, nn.Conv2d)
        kept = F.conv2d(entry, block.shortcut.weight, stride=stride)
    expected = kept + branch if pre_activation else F.relu(kept + normalised(branch))
    torch.testing.assert_close(block(images), expected)


@pytest.mark.parametrize("pre_activation", [False, True])
@pytest.mark.parametrize("stem_max_pool", [False, True])
def test_shapes_and_stages(*, pre_activation: bool, stem_max_pool: bool) -> None:
    config = ResNetConfig(
        in_channels=3,
        widths=(4, 8, 8),
        blocks_per_stage=2,
        num_classes=7,
        pre_activation=pre_activation,
        stem_max_pool=stem_max_pool,
    )
    model = ResNet(config)
    hidden = model.stem(torch.randn(2, 3, 32, 32))
    sides = []
    for block in model.blocks:
        hidden = block(hidden)
        sides.append(hidden.shape[-1] * (2 if stem_max_pool else 1))
    assert sides == [32, 32, 16, 16, 8, 8]
    for side in (32, 20):
        assert model(torch.randn(2, 3, side, side)).shape == (2, 7)
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert len(strided) == 4
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == int(stem_max_pool)


def test_head_reads_the_mean_of_the_last_map() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(widths=(4, 8))).eval()
    images = torch.randn(2, 1, 8, 8)
    hidden = model.stem(images)
    for block in model.blocks:
        hidden = block(hidden)
    expected = hidden.clamp(min=0).flatten(2).mean(-1) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), expected)


def test_parameters_stand_in_the_order_of_the_forward_pass() -> None:
    names = [name for name, _ in ResNet(ResNetConfig(pre_activation=True)).named_parameters()]
    tops = list(dict.fromkeys(name.split(".")[0] for name in names))
    assert tops == ["stem", "blocks", "norm", "head"]
    assert "blocks.1.shortcut.weight" in names


def test_equal_seeds_give_equal_bits() -> None:
    def gradients(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        model = ResNet(ResNetConfig(widths=(4, 8)))
        images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
        F.cross_entropy(model(images), torch.arange(4)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, second, other = gradients(0), gradients(0), gradients(1)
    assert len(first) > 8
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_resnet_refuses_sizes_below_one() -> None:
    with pytest.raises(PlanError, match="at least 1"):
        ResNetConfig(widths=())


def test_mlp_is_the_formula() -> None:
    torch.manual_seed(0)
    model = MLP((12, 5, 4, 3)).double()
    inputs = torch.randn(7, 3, 4, dtype=torch.float64)
    weights = dict(model.named_parameters())
    hidden = inputs.reshape(7, 12)
    for index in range(3):
        hidden = hidden @ weights[f"layers.{index}.weight"].T + weights[f"layers.{index}.bias"]
        hidden = hidden.clamp(min=0) if index < 2 else hidden
    torch.testing.assert_close(model(inputs), hidden)


def test_mlp_refuses_one_width() -> None:
    with pytest.raises(PlanError, match="no layer"):
        MLP((4,))


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 1, 28), (4, 2, 14), (5, 2, 14), (3, 2, 14), (4, 4, 7)])
def test_stem_reads_with_its_kernel_and_stride(kernel: int, stride: int, side: int) -> None:
    torch.manual_seed(0)
    stem = ResNet(ResNetConfig(widths=(6,), stem_kernel=kernel, stem_stride=stride)).stem.double()
    images = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    padding = (kernel - 1) // 2
    windows = F.unfold(images, kernel, padding=padding, stride=stride)
    out = torch.einsum("ok,rkn->ron", stem.convolution.weight.flatten(1), windows).view(2, 6, side, side)
    torch.testing.assert_close(stem(images), F.relu(normalised(out)))


@pytest.mark.parametrize("pre_activation", [False, True])
def test_zero_init_starts_blocks_as_their_shortcuts(*, pre_activation: bool) -> None:
    torch.manual_seed(0)
    plain, zeroed = (
        ResNet(ResNetConfig(widths=(4,), pre_activation=pre_activation, zero_init_residual=is_on)).blocks[0]
        for is_on in (False, True)
    )
    hidden = torch.rand(3, 4, 6, 6)
    assert torch.equal(zeroed(hidden), hidden)
    assert not torch.equal(plain(hidden), hidden)


def test_zero_init_draws_the_same_weights() -> None:
    states = []
    for is_on in (False, True):
        torch.manual_seed(0)
        states.append(ResNet(ResNetConfig(zero_init_residual=is_on)).state_dict())
    changed = {name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])}
    assert changed == {f"blocks.{i}.norm_2.weight" for i in range(3)}
