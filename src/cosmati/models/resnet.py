"""A small residual network for small images (He et al., 2015, arXiv 1512.03385; 2016, arXiv 1603.05027)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Shape of a `ResNet`.

    Args:
        num_classes: outputs.
        in_channels: 1 for grey images, 3 for colour.
        widths: channels of each stage; every stage after the first halves the resolution with strided
            convolutions.
        blocks_per_stage: residual blocks in each stage.
        pre_activation: normalise and activate before each convolution (2016) instead of after it (2015).
        stem_kernel: side of the stem's kernel.
        stem_stride: of the stem; 2 halves the resolution of everything after it, with a kernel of 4 or more so that no
            pixel is read less often than others.
        stem_max_pool: halve the resolution after the stem with a max pool.
        zero_init_residual: start each block as its shortcut: what comes last in its branch, a norm's weight or with
            pre-activation a convolution, starts at zero (Goyal et al., 2017, arXiv 1706.02677, section 5.1).

    Raises:
        PlanError: a size isn't positive.
    """

    num_classes: int = 10
    in_channels: int = 1
    widths: tuple[int, ...] = (16, 32, 64)
    blocks_per_stage: int = 1
    pre_activation: bool = False
    stem_kernel: int = 3
    stem_stride: int = 1
    stem_max_pool: bool = False
    zero_init_residual: bool = False

    def __post_init__(self) -> None:
        stem = self.stem_kernel, self.stem_stride
        sizes = (self.num_classes, self.in_channels, self.blocks_per_stage, len(self.widths), *self.widths, *stem)
        if min(sizes) < 1:
            msg = f"All sizes of a ResNet are at least 1, and there is a stage at least; this is {self}."
            raise PlanError(msg)


class ResNet(nn.Module):
    """Stem, residual blocks, global average pool, linear head.

    Modules are named `stem.{convolution,norm,pool}`, `blocks.N.{convolution_1,norm_1,convolution_2,norm_2,
    shortcut}`, `norm` (with pre-activation) and `head`, in the order of the forward pass. Convolutions are
    initialised for ReLU (He et al., 2015, arXiv 1502.01852).
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        blocks: list[ResidualBlock] = []
        channels = config.widths[0]
        for stage, width in enumerate(config.widths):
            for index in range(config.blocks_per_stage):
                stride = 2 if stage and index == 0 else 1
                blocks.append(ResidualBlock(channels, width, stride=stride, pre_activation=config.pre_activation))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm2d(channels) if config.pre_activation else nn.Identity()
        self.head = nn.Linear(channels, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if config.zero_init_residual:
            for block in blocks:
                nn.init.zeros_(block.convolution_2.weight if config.pre_activation else block.norm_2.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [rows, num_classes] of images [rows, in_channels, height, width], of any size."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = F.relu(self.norm(hidden))
        logits: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits


class Stem(nn.Module):
    """The first convolution; with norm and ReLU unless the blocks bring their own, and a pool if wanted."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        width = config.widths[0]
        kernel = config.stem_kernel
        self.convolution = nn.Conv2d(
            config.in_channels, width, kernel, stride=config.stem_stride, padding=(kernel - 1) // 2, bias=False
        )
        self.norm = nn.Identity() if config.pre_activation else nn.BatchNorm2d(width)
        self.activation = nn.Identity() if config.pre_activation else nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if config.stem_max_pool else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map [rows, in_channels, height, width] to [rows, widths[0], height, width], less by stride and pool."""
        hidden: Tensor = self.pool(self.activation(self.norm(self.convolution(images))))
        return hidden


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, width: int, *, stride: int, pre_activation: bool) -> None:
        super().__init__()
        self.pre_activation = pre_activation
        self.convolution_1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(in_channels if pre_activation else width)
        self.convolution_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        same = stride == 1 and in_channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, width, 1, stride=stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [rows, in_channels, height, width] to [rows, width, height / stride, width / stride]."""
        if self.pre_activation:
            active = F.relu(self.norm_1(hidden))
            branch: Tensor = self.convolution_2(F.relu(self.norm_2(self.convolution_1(active))))
            # A shortcut that changes the shape reads what the branch reads (2016, section 4.1).
            kept: Tensor = hidden if isinstance(self.shortcut, nn.Identity) else self.shortcut(active)
            return kept + branch
        branch = F.relu(self.norm_1(self.convolution_1(hidden)))
        return F.relu(self.norm_2(self.convolution_2(branch)) + self.shortcut(hidden))
