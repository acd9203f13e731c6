"""The denoising U-Net and its loss against the papers' formulas, recomputed place by place in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import History, InMemory, RunConfig, Trainer
from cosmati.core.rng import position_key
from cosmati.corpora.digits import load_digits_images
from cosmati.errors import BatchError, PlanError
from cosmati.models.diffusion import Denoising, DiffusionConfig, DiffusionUNet, ImageAttention, time_embedding
from cosmati.optim import AdamW


def build(**changes: Any) -> DiffusionUNet:
    torch.manual_seed(0)
    options: dict[str, Any] = {"widths": (4, 8), "num_groups": 2, "num_heads": 2}
    return DiffusionUNet(DiffusionConfig(**options | changes))


def disturbed(model: nn.Module) -> nn.Module:
    """Branches begin at zero: give them something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("channels", "widths", "size"), [(1, (4, 8), 8), (3, (4, 8, 6), 12)])
def test_the_noise_has_the_shape_of_the_images(channels: int, widths: tuple[int, ...], size: int) -> None:
    model = disturbed(build(channels=channels, widths=widths))
    images = torch.randn(5, channels, size, size)
    assert model(images, torch.arange(5)).shape == images.shape


def test_it_begins_at_zero_and_rows_stay_apart() -> None:
    images, times = torch.randn(4, 1, 8, 8), torch.tensor([3, 500, 3, 999])
    assert not build()(images, times).any()
    model = disturbed(build().double())
    whole = model(images.double(), times)
    for row in range(4):
        alone = model(images[row : row + 1].double(), times[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-12, atol=1e-12)


def test_the_time_reaches_the_output() -> None:
    model, images = disturbed(build()), torch.randn(1, 1, 8, 8)
    assert not torch.equal(model(images, torch.tensor([1])), model(images, torch.tensor([2])))


def test_noise_is_added_step_by_step() -> None:
    """x_t = sqrt(1 - beta_t) x_(t-1) + sqrt(beta_t) e_t: its mean and variance, unrolled."""
    loss = Denoising(num_steps=7, beta_first=0.01, beta_last=0.3)
    mean, variance = 1.0, 0.0
    for step in range(7):
        beta = 0.01 + (0.3 - 0.01) * step / 6
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        times = torch.tensor([step])
        one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
        assert loss.noisy(one, times, zero).item() == pytest.approx(mean, rel=1e-12)
        assert loss.noisy(zero, times, one).item() ** 2 == pytest.approx(variance, rel=1e-12)


def test_the_loss_is_the_mean_squared_error_of_the_noise() -> None:
    model, loss = disturbed(build().double()), Denoising(num_steps=10)
    images, noise = torch.randn(2, 3, 1, 8, 8, dtype=torch.float64)
    times = torch.tensor([0, 4, 9])
    found = loss.compare(model, images, times, noise)
    assert found.per_row is not None
    for row, time in enumerate(times.tolist()):
        kept = math.prod(1 - (1e-4 + (0.02 - 1e-4) * step / 9) for step in range(time + 1))
        given = math.sqrt(kept) * images[row] + math.sqrt(1 - kept) * noise[row]
        error = model(given[None], times[row : row + 1])[0] - noise[row]
        assert found.per_row[row].item() == pytest.approx(sum(e**2 for e in error.flatten().tolist()) / 64, rel=1e-12)
    assert found.sum.item() == pytest.approx(found.per_row.sum().item())
    assert found.weight == 3


@pytest.mark.parametrize("width", [2, 5, 8])
def test_the_time_embedding(width: int) -> None:
    found = time_embedding(torch.tensor([0, 3, 999]), width)
    half = width // 2
    for row, time in enumerate((0, 3, 999)):
        for index in range(half):
            angle = time * 10_000 ** (-index / half)
            assert found[row, index].item() == pytest.approx(math.cos(angle), abs=1e-4)
            assert found[row, half + index].item() == pytest.approx(math.sin(angle), abs=1e-4)
    assert not found[:, 2 * half :].any()


def test_attention_looks_at_all_places_of_one_image() -> None:
    layer = ImageAttention(DiffusionConfig(widths=(4, 4), num_groups=2, num_heads=2), 4).double()
    disturbed(layer)
    hidden = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    found = layer(hidden)
    for row in range(2):
        # Group norm by hand: two groups of two channels.
        groups = hidden[row].view(2, -1)
        normed = (groups - groups.mean(1, keepdim=True)) / (groups.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        normed = normed.view(4, 6) * layer.norm.weight[:, None] + layer.norm.bias[:, None]

        def of(linear: nn.Conv2d, content: Tensor) -> Tensor:
            assert linear.bias is not None
            return linear.weight[:, :, 0, 0] @ content + linear.bias[:, None]

        query, key, value = (of(part, normed) for part in (layer.query, layer.key, layer.value))
        mixed = torch.zeros_like(normed)
        for head in (slice(0, 2), slice(2, 4)):
            for place in range(6):
                scores = torch.stack([query[head, place] @ key[head, other] / 2**0.5 for other in range(6)]).softmax(0)
                mixed[head, place] = (value[head] * scores).sum(1)
        expected = hidden[row] + of(layer.projection, mixed).view(4, 2, 3)
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"widths": (4,)}, "two resolutions"), ({"num_groups": 3}, "num_groups"), ({"num_heads": 3}, "num_heads")],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build(**changes)
    with pytest.raises(PlanError, match="can't be"):
        Denoising(beta_first=0.5)
    with pytest.raises(BatchError, match="multiples of 2, not 7 x 8"):
        build()(torch.randn(1, 1, 7, 8), torch.tensor([0]))


@pytest.mark.long
def test_it_learns_to_denoise_digits_with_draws_that_follow_from_the_position() -> None:
    images = load_digits_images(8).train.images[:256]
    seen: list[Tensor] = []

    class Looking(DiffusionUNet):
        def forward(self, images: Tensor, times: Tensor) -> Tensor:
            seen.append(times.clone())
            return super().forward(images, times)

    torch.manual_seed(0)
    model, history = Looking(DiffusionConfig(widths=(16, 32), num_groups=4)), History()
    config = RunConfig(budget="60ba", num_threads=1, seed=5)
    data = InMemory(images, 32)
    Trainer(model, Denoising(), data, optimizers=AdamW(lr=3e-3), observers=history, config=config).fit()
    losses = [loss for _, loss in history.losses]
    # Of noise of unit variance, predicting nothing costs 1.
    assert losses[0] > 0.9
    assert sum(losses[-8:]) / 8 < 0.5
    for step in (0, 30):
        torch.manual_seed(position_key(5, "forward", step, 0))
        assert torch.equal(seen[step], torch.randint(1000, (32,)))
