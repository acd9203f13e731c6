"""A small U-Net for segmentation (Ronneberger, Fischer and Brox, 2015, arXiv 1505.04597)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cosmati.errors import BatchError, PlanError


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Shape of a `UNet`.

    Args:
        num_classes: outputs of each pixel, the background's among them.
        in_channels: 1 for grey images, 3 for colour.
        widths: channels at each resolution; each after the first has half the resolution of the one before.

    Raises:
        PlanError: a size isn't positive, or there is one resolution only.
    """

    num_classes: int = 11
    in_channels: int = 1
    widths: tuple[int, ...] = (16, 32, 64)

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.num_classes, self.in_channels, *self.widths) < 1:
            msg = f"All sizes of a U-Net are at least 1, and it has two resolutions or more; this is {self}."
            raise PlanError(msg)


class UNet(nn.Module):
    """Convolutions at falling resolutions, then at rising ones, each beside what the falling side had there.

    Two things differ from 2015: convolutions are padded, so that there's an output for every pixel, and are followed by
    BatchNorm. Modules are named `encoder.N`, `pool`, `upsampling.N`, `decoder.N` and `head`; within encoder and decoder
    `{convolution,norm}_{1,2}`. Convolutions are initialised for ReLU (He et al., 2015, arXiv 1502.01852).
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        inputs = (config.in_channels, *widths)
        self.encoder = nn.ModuleList(TwoConvolutions(i, width) for i, width in zip(inputs, widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        rising = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.upsampling = nn.ModuleList(nn.ConvTranspose2d(wide, width, 2, stride=2) for wide, width in rising)
        self.decoder = nn.ModuleList(TwoConvolutions(2 * width, width) for _, width in rising)
        self.head = nn.Conv2d(widths[0], config.num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module is not self.head:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [rows, num_classes, height, width] of images [rows, in_channels, height, width].

        Raises:
            BatchError: a side can't be halved as often as there are resolutions after the first.
        """
        step = 2 ** (len(self.encoder) - 1)
        if images.shape[-2] % step or images.shape[-1] % step:
            msg = (
                f"A U-Net of {len(self.encoder)} resolutions needs sides that are multiples of {step}; the images are "
                f"{images.shape[-2]} x {images.shape[-1]}. Pad or resize them."
            )
            raise BatchError(msg)
        kept: list[Tensor] = []
        hidden = images
        for index, stage in enumerate(self.encoder):
            hidden = stage(self.pool(hidden) if index else hidden)
            kept.append(hidden)
        for upsampling, stage, beside in zip(self.upsampling, self.decoder, reversed(kept[:-1]), strict=True):
            hidden = stage(torch.cat([beside, upsampling(hidden)], dim=1))
        logits: Tensor = self.head(hidden)
        return logits


class TwoConvolutions(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm and ReLU; the size stays."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.convolution_1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.convolution_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [rows, in_channels, height, width] to [rows, width, height, width]."""
        hidden = torch.relu(self.norm_1(self.convolution_1(hidden)))
        return torch.relu(self.norm_2(self.convolution_2(hidden)))
