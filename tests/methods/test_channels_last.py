"""Channels last changes the layout, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from cosmati.core.method import Stage
from cosmati.methods.channels_last import ChannelsLast, apply_channels_last

torch.set_num_threads(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv3d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2))


def test_layout_changes_and_values_stay() -> None:
    net = model()
    net.register_buffer("picture", torch.randn(1, 3, 4, 4))
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    assert apply_channels_last(net) is net
    for name, tensor in net.state_dict(keep_vars=True).items():
        same, value = before[name]
        assert tensor is same
        assert torch.equal(tensor, value)
        assert tensor.ndim != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
        assert tensor.ndim == 4 or tensor.is_contiguous()


def test_activations_follow_and_the_function_is_the_same() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    image = torch.randn(2, 3, 9, 9)
    plain = net(image)
    output = ChannelsLast().apply(net)(image)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, plain)
    assert ChannelsLast.stage is Stage.CAST


def test_an_optimizer_built_before_still_trains_it() -> None:
    net = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    apply_channels_last(apply_channels_last(net))
    before = net.weight.detach().clone()
    net(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    assert not torch.equal(net.weight, before)
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
