"""Ghost batch normalisation against sums in float64, and against the native layer."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.method import Stage
from cosmati.errors import PlanError
from cosmati.methods.ghost_batchnorm import (
    GhostBatchNorm,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    apply_ghost_batchnorm,
)

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1


def sizes(rows: int, ghost: int) -> list[int]:
    num = math.ceil(rows / ghost)
    return [rows // num + (index < rows % num) for index in range(num)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 11), st.integers(1, 5), st.integers(0, 2), st.none() | st.floats(0.01, 1), st.integers(0, 99))
def test_each_ghost_has_its_own_statistics(
    rows: int, ghost: int, dimensions: int, momentum: float | None, seed: int
) -> None:
    shape = (rows, 3, *[2, 3][:dimensions], 2)
    layer = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dimensions](3, momentum=momentum)
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias)
    apply_ghost_batchnorm(layer, ghost)
    input = random(*shape, seed=seed)
    for count in (1, 2):
        output = layer(input)
        values = input.double().numpy().reshape(rows, 3, -1)
        expected, means, variances, start = [], [], [], 0
        for size in sizes(rows, ghost):
            part = values[start : start + size]
            start += size
            mean, variance = part.mean((0, 2), keepdims=True), part.var((0, 2), keepdims=True)
            scale, shift = (p.detach().double().numpy()[:, None] for p in (layer.weight, layer.bias))
            expected.append((part - mean) / np.sqrt(variance + 1e-5) * scale + shift)
            means.append(size / rows * mean.ravel())
            num = size * part.shape[2]
            variances.append(size / rows * variance.ravel() * num / (num - 1))
        torch.testing.assert_close(
            output.detach().double().flatten(2), torch.from_numpy(np.concatenate(expected)), atol=1e-3, rtol=1e-3
        )
        factor = 1 / count if momentum is None else momentum
        if count == 1:
            old_mean, old_variance = np.zeros(3), np.ones(3)
        old_mean = (1 - factor) * old_mean + factor * sum(means)
        old_variance = (1 - factor) * old_variance + factor * sum(variances)
        np.testing.assert_allclose(layer.running_mean.numpy(), old_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.running_var.numpy(), old_variance, rtol=1e-4, atol=1e-5)
        assert int(layer.num_batches_tracked) == count


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(0, 5), st.none() | st.floats(0.01, 1))
def test_a_batch_of_one_ghost_has_the_bits_of_the_native_layer(rows: int, more: int, momentum: float | None) -> None:
    native = nn.BatchNorm2d(3, momentum=momentum)
    ghost = apply_ghost_batchnorm(copy.deepcopy(native), rows + more)
    input = random(rows, 3, 2, 2)
    assert torch.equal(ghost(input), native(input))
    assert all(torch.equal(a, b) for a, b in zip(ghost.buffers(), native.buffers(), strict=True))
    for size in (1, 5):
        assert torch.equal(ghost.eval()(random(size, 3, 2, 2)), native.eval()(random(size, 3, 2, 2)))


def test_a_last_batch_of_any_size_works() -> None:
    plain = apply_ghost_batchnorm(nn.BatchNorm1d(4), 4)
    for rows in range(2, 18):
        output = plain(random(rows, 4, seed=rows))
        assert output.shape == (rows, 4)
        assert bool(output.isfinite().all())
    small = apply_ghost_batchnorm(nn.BatchNorm1d(4), 1)
    output = small(random(5, 4))
    torch.testing.assert_close(output[:3].mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(output[3:].mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="more than 1 value"):
        plain(random(1, 4))
    with pytest.raises(ValueError, match="expected 4D"):
        apply_ghost_batchnorm(nn.BatchNorm2d(4), 2)(random(8, 4))


def test_gradients_and_types() -> None:
    layer = apply_ghost_batchnorm(nn.BatchNorm2d(2), 2).double()
    assert torch.autograd.gradcheck(layer, (random(5, 2, 2, 2).double().requires_grad_(),))
    half = apply_ghost_batchnorm(nn.BatchNorm2d(2), 2)
    image = random(5, 2, 2, 2).to(memory_format=torch.channels_last)
    assert half(image).is_contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert half(image.bfloat16()).dtype == torch.bfloat16
    bare = apply_ghost_batchnorm(nn.BatchNorm2d(2, affine=False, track_running_stats=False), 2)
    torch.testing.assert_close(bare(image)[:2].mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    assert not list(bare.buffers())
    lasting = apply_ghost_batchnorm(nn.BatchNorm2d(2, track_running_stats=False), 2).eval()
    torch.testing.assert_close(lasting(image), nn.BatchNorm2d(2, track_running_stats=False)(image))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.BatchNorm1d(4)
        self.volume = nn.BatchNorm3d(2)
        self.twin = self.body[1]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.twin(self.body(x)).mean((2, 3)))
        return y


def test_surgery_shares_everything_and_is_idempotent() -> None:
    net = Net()
    objects, keys, parameters = list(net.modules()), list(net.state_dict()), list(net.parameters())
    seen: list[int] = []
    handle = net.twin.register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert apply_ghost_batchnorm(net, 2, optimizer) is net
    assert all(a is b for a, b in zip(objects, net.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert list(net.state_dict()) == keys
    kinds = [type(module) for module in net.modules()]
    assert {GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d} <= set(kinds)
    net(random(5, 3, 2, 2)).sum().backward()
    assert len(seen) == 2
    handle.remove()
    apply_ghost_batchnorm(net, 3)
    assert [type(module) for module in net.modules()] == kinds
    assert net.twin.ghost_batch_size == 3
    assert "4, eps=1e-05, momentum=0.1" in repr(net)
    assert "ghost_batch_size=3" in repr(net)
    copied = copy.deepcopy(net).double().eval()
    exported = torch.export.export(copied, (random(2, 3, 2, 2).double(),)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    Net().load_state_dict(net.state_dict())


def test_leaves_alone_what_it_does_not_know() -> None:
    class Own(nn.BatchNorm2d):
        pass

    net = nn.Sequential(Own(3), nn.SyncBatchNorm(3), nn.GroupNorm(1, 3))
    with pytest.warns(UserWarning, match="GhostBatchNorm changes nothing: Sequential has no BatchNorm1d"):
        apply_ghost_batchnorm(net)
    assert [type(module) for module in net] == [Own, nn.SyncBatchNorm, nn.GroupNorm]


def test_method_equals_function() -> None:
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_method = GhostBatchNorm(ghost_batch_size=3).apply(net)
    image = random(8, 3, 2, 2)
    assert torch.equal(by_method(image), apply_ghost_batchnorm(twin, 3)(image))
    assert GhostBatchNorm.stage is Stage.REPLACE
    assert GhostBatchNorm().ghost_batch_size == 32
    for refused in (lambda: GhostBatchNorm(ghost_batch_size=0), lambda: apply_ghost_batchnorm(Net(), 0)):
        with pytest.raises(PlanError, match="ghost_batch_size=0"):
            refused()
