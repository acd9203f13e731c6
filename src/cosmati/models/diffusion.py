"""A small U-Net that denoises images, and the loss it's trained by (Ho, Jain and Abbeel, 2020, arXiv 2006.11239)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Data, input_of
from cosmati.core.loss import Loss
from cosmati.errors import BatchError, PlanError

_LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Shape of a `DiffusionUNet`.

    Args:
        channels: of the images: 1 for grey, 3 for colour.
        widths: channels at each resolution; each after the first has half the resolution of the one before.
        num_groups: of the group norms; they divide each width.
        num_heads: of the attention at the lowest resolution; they divide its width.

    Raises:
        PlanError: sizes that don't fit together.
    """

    channels: int = 1
    widths: tuple[int, ...] = (32, 64)
    num_groups: int = 8
    num_heads: int = 4

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.channels, self.num_groups, self.num_heads, *self.widths) < 1:
            msg = f"All sizes of a U-Net are at least 1, and it has two resolutions or more; this is {self}."
            raise PlanError(msg)
        if any(width % self.num_groups for width in self.widths) or self.widths[-1] % self.num_heads:
            msg = (
                f"num_groups={self.num_groups} has to divide each of the widths {self.widths}, and num_heads="
                f"{self.num_heads} the last one. Change {self}."
            )
            raise PlanError(msg)


class DiffusionUNet(nn.Module):
    """Predicts the noise in images, given how noisy they are.

    No layer reads more than one image: norms are by group of channels, so that rows stay apart. Modules are named
    `time.{0,2}`, `stem`, `falling.N`, `shrinking.N`, `middle`, `attention`, `growing.N`, `rising.N`, `norm` and `head`;
    within `falling`, `middle` and `rising` `{norm,convolution}_{1,2}`, `time` and `shortcut`. What comes last in a
    branch starts at zero, and so does the head.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        widths, first, last = config.widths, config.widths[0], config.widths[-1]
        self.time = nn.Sequential(nn.Linear(first, 4 * first), nn.SiLU(), nn.Linear(4 * first, 4 * first))
        self.stem = nn.Conv2d(config.channels, first, 3, padding=1)
        falling = list(zip((first, *widths), widths, strict=False))
        self.falling = nn.ModuleList(TimedBlock(config, wide, width) for wide, width in falling)
        self.shrinking = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.middle = TimedBlock(config, last, last)
        self.attention = ImageAttention(config, last)
        rising = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.growing = nn.ModuleList(nn.Conv2d(wide, width, 3, padding=1) for wide, width in rising)
        self.rising = nn.ModuleList(TimedBlock(config, 2 * width, width) for _, width in rising)
        self.norm = nn.GroupNorm(config.num_groups, first)
        self.head = nn.Conv2d(first, config.channels, 3, padding=1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(_bias_of(self.head))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the predicted noise, of the images' shape.

        Args:
            images: [rows, channels, height, width].
            times: steps of noise, [rows].

        Raises:
            BatchError: a side can't be halved as often as there are resolutions after the first.
        """
        step = 2 ** len(self.shrinking)
        if images.shape[-2] % step or images.shape[-1] % step:
            size = f"{images.shape[-2]} x {images.shape[-1]}"
            msg = f"A U-Net of {len(self.falling)} resolutions needs sides that are multiples of {step}, not {size}."
            raise BatchError(f"{msg} Pad or resize the images.")
        time = self.time(time_embedding(times, self.config.widths[0]).to(images.dtype))
        hidden = self.stem(images)
        kept: list[Tensor] = []
        for index, block in enumerate(self.falling):
            hidden = block(self.shrinking[index - 1](hidden) if index else hidden, time)
            kept.append(hidden)
        hidden = self.attention(self.middle(hidden, time))
        for growing, block, beside in zip(self.growing, self.rising, reversed(kept[:-1]), strict=True):
            larger = growing(F.interpolate(hidden, scale_factor=2.0, mode="nearest"))
            hidden = block(torch.cat([beside, larger], dim=1), time)
        noise: Tensor = self.head(F.silu(self.norm(hidden)))
        return noise


class TimedBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, with the time added between them; the size stays."""

    def __init__(self, config: DiffusionConfig, in_channels: int, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(config.num_groups, in_channels)
        self.convolution_1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.time = nn.Linear(4 * config.widths[0], width)
        self.norm_2 = nn.GroupNorm(config.num_groups, width)
        self.convolution_2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if in_channels == width else nn.Conv2d(in_channels, width, 1)
        nn.init.zeros_(self.convolution_2.weight)
        nn.init.zeros_(_bias_of(self.convolution_2))

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Map [rows, in_channels, height, width] to [rows, width, height, width]."""
        branch = self.convolution_1(F.silu(self.norm_1(hidden))) + self.time(F.silu(time))[:, :, None, None]
        kept: Tensor = self.shortcut(hidden)
        found: Tensor = kept + self.convolution_2(F.silu(self.norm_2(branch)))
        return found


class ImageAttention(nn.Module):
    """Self-attention between the places of an image; it reads a norm and adds to it."""

    def __init__(self, config: DiffusionConfig, width: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.GroupNorm(config.num_groups, width)
        self.query = nn.Conv2d(width, width, 1)
        self.key = nn.Conv2d(width, width, 1)
        self.value = nn.Conv2d(width, width, 1)
        self.projection = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(_bias_of(self.projection))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [rows, width, height, width] to the same shape."""
        normed = self.norm(hidden)
        query, key, value = (
            layer(normed).flatten(2).unflatten(1, (self.num_heads, -1)).mT
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).mT.flatten(1, 2).view_as(hidden)
        added: Tensor = self.projection(mixed)
        return hidden + added


@dataclass(frozen=True)
class Denoising:
    """Squared error of the predicted noise, averaged over rows; each row's error is the mean over its values.

    Reads images [rows, channels, height, width]: a tensor, or the input of the batch. Each row is given one of
    `num_steps` amounts of noise, all as likely. Times and noise are drawn where any draw of a loss comes from, so a
    step's are a function of the run's seed and the microbatch's position alone.

    Args:
        num_steps: of noise.
        beta_first: variance of the noise that the first step adds to an image of unit variance.
        beta_last: of the last step's; those between lie on a line.

    Raises:
        PlanError: no step, or variances that aren't between 0 and 1 and rising.
    """

    num_steps: int = 1000
    beta_first: float = 1e-4
    beta_last: float = 0.02

    def __post_init__(self) -> None:
        if self.num_steps < 1 or not 0 < self.beta_first <= self.beta_last < 1:
            msg = f"{self} can't be: there's one step at least, and 0 < beta_first <= beta_last < 1."
            raise PlanError(msg)

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        """Draw times and noise, and return the summed squared error, weighted by rows."""
        images = data if isinstance(data, Tensor) else input_of(data)
        times = torch.randint(self.num_steps, images.shape[:1], device=images.device)
        return self.compare(model, images, times, torch.randn_like(images))

    def compare(self, model: nn.Module, images: Tensor, times: Tensor, noise: Tensor) -> Loss:
        """Return the loss at given times [rows], with given noise of the images' shape."""
        error = model(self.noisy(images, times, noise), times) - noise
        per_row = error.to(torch.promote_types(error.dtype, torch.float32)).square().flatten(1).mean(1)
        return Loss(per_row.sum(), float(per_row.shape[0]), per_row)

    def noisy(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Return images with what steps 0 to `times` have added."""
        kept = self.signal(images.device).to(images.dtype)[times].view(-1, *[1] * (images.ndim - 1))
        return kept.sqrt() * images + (1 - kept).sqrt() * noise

    def signal(self, device: torch.device | None = None) -> Tensor:
        """Return how much of an image's variance is left after each step, float64 [num_steps]."""
        betas = torch.linspace(self.beta_first, self.beta_last, self.num_steps, dtype=torch.float64, device=device)
        return (1 - betas).cumprod(0)


def time_embedding(times: Tensor, width: int) -> Tensor:
    """Return cosines and sines of times at `width` / 2 periods from 2 pi to 20,000 pi: float32 [rows, width].

    Args:
        times: [rows].
        width: 2 at least; an odd one has a 0 at its end.
    """
    half = width // 2
    rates = torch.exp(-math.log(_LONGEST_PERIOD) * torch.arange(half, device=times.device) / max(1, half))
    angles = times.float()[:, None] * rates
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, width - 2 * half))


def _bias_of(layer: nn.Conv2d) -> Tensor:
    assert layer.bias is not None, "made so"
    return layer.bias
