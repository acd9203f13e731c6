"""BlurPool against a loop in float64, its surgery, and what it's for: shifts."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from cosmati.core.method import Stage
from cosmati.errors import PlanError
from cosmati.methods.blurpool import (
    BlurConv2d,
    BlurMaxPool2d,
    BlurPool,
    BlurPool2d,
    _binomial_kernel,
    _reflected,
    apply_blurpool,
    blur_2d,
)

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reflect(index: int, size: int) -> int:
    if size == 1:
        return 0
    return -index if index < 0 else 2 * (size - 1) - index if index >= size else index


def blur_by_hand(image: NDArray[np.float64], stride: tuple[int, int]) -> NDArray[np.float64]:
    """Blur one channel [height, width] position by position."""
    height, width = image.shape
    weight = (1, 2, 1)
    return np.array(
        [
            [
                sum(
                    weight[a] * weight[b] / 16 * image[reflect(y + a - 1, height), reflect(x + b - 1, width)]
                    for a in range(3)
                    for b in range(3)
                )
                for x in range(0, width, stride[1])
            ]
            for y in range(0, height, stride[0])
        ]
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_blur_against_a_loop(height: int, width: int, down: int, across: int, seed: int) -> None:
    image = random(2, 3, height, width, seed=seed)
    ours = blur_2d(image, (down, across))
    expected = [[blur_by_hand(channel.double().numpy(), (down, across)) for channel in row] for row in image]
    torch.testing.assert_close(ours.double(), torch.from_numpy(np.array(expected)), atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 7), st.integers(1, 7), st.floats(-100, 100))
def test_a_constant_stays_constant(height: int, width: int, value: float) -> None:
    image = torch.full((1, 2, height, width), value)
    torch.testing.assert_close(BlurPool2d(2)(image), torch.full_like(image, value)[..., ::2, ::2])


@pytest.mark.long
def test_both_ways_of_reflecting_agree() -> None:
    image = random(2, 3, 5, 4)
    kernel = _binomial_kernel(None)
    by_slices = _reflected(image.to("meta")).shape
    assert by_slices == (2, 3, 7, 6)
    narrow = torch.cat([image[..., 1:2, :], image, image[..., -2:-1, :]], -2)
    sliced = torch.cat([narrow[..., 1:2], narrow, narrow[..., -2:-1]], -1)
    assert torch.equal(_reflected(image), sliced)
    torch.testing.assert_close(blur_2d(image), F.conv2d(sliced, kernel.expand(3, 1, 3, 3), groups=3))


@pytest.mark.gpu
def test_on_an_accelerator() -> None:
    """The edges are reflected there by slices, whose gradient is deterministic."""
    image = random(2, 3, 5, 4)
    moved = image.cuda().requires_grad_()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        blurred = blur_2d(moved, 2)
        blurred.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    here = image.clone().requires_grad_()
    blur_2d(here, 2).square().sum().backward()
    torch.testing.assert_close(blurred.cpu(), blur_2d(image, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.grad.cpu(), here.grad, atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]
    net = apply_blurpool(Net().cuda())
    assert all(tensor.is_cuda for tensor in [*net.parameters(), *net.buffers()])


def test_types_gradients_and_layouts() -> None:
    image = random(1, 2, 5, 5)
    assert blur_2d(image.bfloat16()).dtype == torch.bfloat16
    double = image.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: blur_2d(x, 2), (double,))
    last = image.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(blur_2d(last), blur_2d(image))
    with torch.autocast("cpu", torch.bfloat16):
        assert BlurConv2d(2, 3, 3)(image).dtype == torch.bfloat16


CONVOLUTIONS = {
    "plain": nn.Conv2d(16, 8, 3, 2, 1),
    "tall stride": nn.Conv2d(16, 8, 3, (2, 1), 1),
    "no bias": nn.Conv2d(16, 8, 1, 2, bias=False),
    "grouped and dilated": nn.Conv2d(16, 8, 3, 3, 2, dilation=2, groups=4),
    "reflecting": nn.Conv2d(16, 8, 3, 2, 1, padding_mode="reflect"),
    "circular": nn.Conv2d(16, 8, 3, 2, 1, padding_mode="circular"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("size", [7, 8])
def test_convolution_before_and_after_the_blur(name: str, size: int) -> None:
    conv = CONVOLUTIONS[name]
    image = random(2, 16, size, size)
    first = apply_blurpool(copy.deepcopy(conv))
    assert isinstance(first, BlurConv2d)
    torch.testing.assert_close(first(image), conv(blur_2d(image)))
    after = apply_blurpool(copy.deepcopy(conv), blur_first=False)
    dense = copy.deepcopy(conv)
    dense.stride = (1, 1)
    torch.testing.assert_close(after(image), blur_2d(dense(image), conv.stride))  # type: ignore[arg-type]
    assert first(image).shape == after(image).shape == conv(image).shape


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(4, 13),
    kernel=st.integers(1, 4),
    stride=st.integers(2, 4),
    padding=st.integers(0, 2),
    ceil=st.booleans(),
)
def test_max_pool_keeps_the_shape_and_pools_densely(
    size: int, kernel: int, stride: int, padding: int, ceil: bool
) -> None:
    pool = nn.MaxPool2d(kernel, stride, min(padding, kernel // 2), ceil_mode=ceil)
    blurred = apply_blurpool(copy.deepcopy(pool))
    image = random(1, 2, size, size + 1)
    assert blurred(image).shape == pool(image).shape
    assert bool(blurred(image).isfinite().all())
    if not ceil:
        dense = F.max_pool2d(image, kernel, 1, pool.padding)
        torch.testing.assert_close(blurred(image), blur_2d(dense, stride))


def test_a_constant_stays_constant_through_the_pool() -> None:
    image = torch.full((1, 2, 7, 7), 0.3)
    pool = BlurMaxPool2d(3, 2, 1, ceil_mode=True)
    torch.testing.assert_close(pool(image), torch.full((1, 2, 4, 4), 0.3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.pool = nn.MaxPool2d(2)
        self.dense_pool = nn.MaxPool2d(3, 1, 1)
        self.twin = self.body[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(self.twin(self.dense_pool(self.body(self.stem(x)))))
        return y


def test_surgery_shares_everything() -> None:
    net = Net().eval()
    before = dict(net.named_parameters())
    keys = list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    old = net.body[0]
    seen: list[int] = []
    handle = old.register_forward_hook(lambda *_: seen.append(1))
    assert apply_blurpool(net, optimizers=optimizer) is net
    assert isinstance(net.body[0], BlurConv2d)
    assert net.twin is net.body[0]
    assert isinstance(net.pool, BlurMaxPool2d)
    assert type(net.stem) is nn.Conv2d, "3 channels are fewer than 16"
    assert type(net.body[2]) is nn.Conv2d, "a stride of 1 needs no blur"
    assert type(net.dense_pool) is nn.MaxPool2d
    assert list(net.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
    assert not net.body[0].training
    net(random(1, 3, 32, 32)).sum().backward()
    assert len(seen) == 2, "the layer stands in two places"
    handle.remove()
    net(random(1, 3, 32, 32))
    assert len(seen) == 2, "the user's handle still removes the hook"
    kept = net.body[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(net.body[0].weight, kept)


def test_idempotent_and_exact_where_nothing_is_asked() -> None:
    net = Net()
    layers = [type(module) for module in apply_blurpool(net).modules()]
    image = random(1, 3, 32, 32)
    output = net(image)
    assert [type(module) for module in apply_blurpool(net).modules()] == layers
    assert torch.equal(net(image), output)
    plain = Net()
    modules = list(plain.modules())
    assert BlurPool(replace_convs=False, replace_maxpools=False).apply(plain) is plain
    assert all(a is b for a, b in zip(plain.modules(), modules, strict=True))


def test_options_choose_layers() -> None:
    only_pools = apply_blurpool(Net(), replace_convs=False)
    assert type(only_pools.body[0]) is nn.Conv2d  # type: ignore[index,union-attr]
    assert isinstance(only_pools.pool, BlurMaxPool2d)
    only_convs = apply_blurpool(Net(), replace_maxpools=False, min_channels=1)
    assert isinstance(only_convs.stem, BlurConv2d)
    assert type(only_convs.pool) is nn.MaxPool2d


def test_leaves_alone_what_it_does_not_know() -> None:
    class Own(nn.Conv2d):
        pass

    net = nn.Sequential(Own(16, 16, 3, 2), nn.MaxPool2d(2, return_indices=True))
    with pytest.warns(UserWarning, match="changes nothing: Sequential has no strided Conv2d of 16"):
        apply_blurpool(net)
    assert type(net[0]) is Own
    with pytest.warns(UserWarning, match=r"no strided MaxPool2d\.$"):
        apply_blurpool(net, replace_convs=False)


@pytest.mark.long
def test_follows_the_model_to_types_and_copies() -> None:
    net = copy.deepcopy(apply_blurpool(Net())).double()
    assert net(random(1, 3, 32, 32).double()).dtype == torch.float64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = torch.export.export(net, (random(1, 3, 32, 32).double(),))
    torch.testing.assert_close(exported.module()(random(1, 3, 32, 32).double()), net(random(1, 3, 32, 32).double()))


def test_makes_pooling_less_sensitive_to_shifts() -> None:
    image = random(8, 4, 32, 32)
    shifted = image.roll(1, -1)

    def change(pool: nn.Module) -> float:
        return float((pool(image) - pool(shifted)).norm() / pool(image).norm())

    assert change(BlurMaxPool2d(2)) < 0.7 * change(nn.MaxPool2d(2))


def test_method_equals_function() -> None:
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    by_method = BlurPool(blur_first=False, min_channels=3).apply(net)
    by_function = apply_blurpool(twin, blur_first=False, min_channels=3)
    image = random(1, 3, 32, 32)
    assert torch.equal(by_method(image), by_function(image))
    assert BlurPool.stage is Stage.REPLACE
    for wrong in (-1, 0.5):
        with pytest.raises(PlanError, match=f"min_channels={wrong}"):
            BlurPool(min_channels=wrong)  # type: ignore[arg-type]


def test_layers_show_themselves() -> None:
    assert "stride=2" in repr(BlurPool2d(2))
    assert "kernel_size=3" in repr(BlurMaxPool2d(3))
    assert BlurConv2d(3, 4, 3).stride == (2, 2)
