"""Pictures of the methods that change layers or how they compute, each made by the method's own function or layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosmati.methods.functional as cf
from cards.drawing import MUTED, STONES, Canvas, Frame, floors
from cosmati.core.isolated import isolated_modules
from cosmati.methods.alibi import alibi_bias, alibi_slopes
from cosmati.methods.layers import GatedFeedForward, SqueezeExcite2d

Drawn = tuple[Canvas, str]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def alibi() -> Drawn:
    """Draw the weights of three heads whose scores are all alike."""
    canvas = Canvas("Attention of three heads: the first looks near, the last looks far", 168)
    bias = alibi_bias(alibi_slopes(8), 14, 14, is_causal=True)
    for place, head in enumerate((0, 2, 7)):
        weights = bias[head].softmax(-1)
        left = place * 158
        canvas.cells(left, 22, 9.6, weights.where(weights > 0, torch.nan) / weights.max(-1, keepdim=True).values)
        canvas.text(left, 14, f"head {head + 1} of 8", colour=MUTED)
    return (
        canvas,
        "How 14 tokens (rows) attend to those before them (columns) where all scores are alike: only the bias differs.",
    )


def channels_last() -> Drawn:
    """Draw the order in memory of an image's values."""
    canvas = Canvas("Values of three channels in memory: channel by channel, and pixel by pixel", 118)
    image = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 3, 4).contiguous()
    last = cf.apply_channels_last(nn.Conv2d(3, 1, (3, 4), bias=False))
    with torch.no_grad():
        last.weight.copy_(image)
    assert isinstance(last.weight, Tensor)
    orders = (image.flatten(), torch.as_strided(last.weight.detach(), (36,), (1,)))
    for place, (name, order) in enumerate(zip(("as PyTorch has it", "channels last"), orders, strict=True)):
        y = 20 + 52 * place
        canvas.text(0, y - 6, name, colour=MUTED)
        for spot, channel in enumerate(order.int().tolist()):
            canvas.rect(spot * 12.7, y, 11.2, 22, STONES[channel])
    return (
        canvas,
        "The 36 values of a 3 × 4 filter over three channels (colours) as they lie in memory, before and after.",
    )


def factorize() -> Drawn:
    """Draw a matrix and its two factors to scale."""
    model = cf.apply_factorization(
        nn.Sequential(nn.Linear(512, 512, bias=False)), min_features=512, latent_features=0.25
    )
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2]
    canvas, unit = Canvas("A square matrix, and the two thin ones that replace it", 150), 110 / 512
    canvas.rect(32, 10, 110, 110, STONES[3], opacity=0.85)
    canvas.text(87, 138, f"512 × 512: {512 * 512:,} weights", anchor="middle", colour=MUTED)
    canvas.text(176, 70, "≈", anchor="middle", size=22)
    x = 226.0
    for rows, columns in reversed(shapes):
        canvas.rect(x, 10 + (110 - rows * unit) / 2, columns * unit, rows * unit, STONES[0], opacity=0.85)
        x += columns * unit + 16
    count = sum(rows * columns for rows, columns in shapes)
    canvas.text(230, 138, f"two of rank {min(map(min, shapes))}: {count:,} weights", colour=MUTED)
    return canvas, "A linear layer of 512 features with `latent_features=0.25`, to scale."


def gated_linear_units() -> Drawn:
    """Draw a hidden unit over its input, plain and gated."""
    canvas = Canvas("A hidden unit over its input: one curve without a gate, many with gates", 178)
    frame = Frame(canvas, (-2, 2), (-2.6, 4.6))
    frame.axes("input", "hidden unit", [(0, "0")])
    xs = torch.linspace(-2, 2, 60)
    frame.curve(xs.tolist(), F.gelu(xs).tolist(), MUTED, width=3)
    unit = GatedFeedForward(1, 1, activation=F.gelu)
    for slope, colour in ((-0.6, STONES[1]), (0.4, STONES[2]), (1.1, STONES[0])):
        with torch.no_grad():
            for layer, weight in ((unit.up, 1.0), (unit.gate, slope), (unit.down, 1.0)):
                layer.weight.fill_(weight)
            frame.curve(xs.tolist(), unit(xs[:, None]).flatten().tolist(), colour)
    canvas.text(60, 36, "grey: GELU alone", colour=MUTED)
    canvas.text(60, 52, "colours: GELU times three gates", colour=MUTED)
    return (
        canvas,
        "What one hidden unit gives over its input: `gelu(x)`, and `gelu(x) * gate(x)` with gates of three slopes.",
    )


def ghost_batchnorm() -> Drawn:
    """Draw the rows of one channel, and the means that they're normalised by."""
    values = torch.randn(64, 1, generator=_seeded(4)) + torch.linspace(-0.2, 0.4, 64)[:, None]
    canvas = Canvas("Values of 64 rows: one mean over all, and one for each sixteen", 178)
    frame = Frame(canvas, (0, 64), (float(values.min()) - 0.2, float(values.max()) + 0.2))
    frame.axes("64 rows", "one channel", [(0, "0")])
    layer = cf.apply_ghost_batchnorm(nn.BatchNorm1d(1), ghost_batch_size=16)
    normalised = layer(values).detach().flatten()
    for row, value in enumerate(values.flatten().tolist()):
        canvas.dot(*frame.at(row + 0.5, value), MUTED, radius=2.2)
    whole = float(values.mean())
    canvas.dashed([frame.at(0, whole), frame.at(64, whole)])
    for start in range(0, 64, 16):
        mean = _mean_taken(values[start : start + 16].flatten(), normalised[start : start + 16])
        canvas.line([frame.at(start + 0.6, mean), frame.at(start + 15.4, mean)], STONES[0], width=3)
    return (
        canvas,
        "One channel of 64 rows: the mean of all (dashed), and the means that ghosts of 16 rows are normalised by.",
    )


def _mean_taken(before: Tensor, after: Tensor) -> float:
    """Return what was taken off, of values that were normalised: `after = (before - mean) / spread`."""
    spread = (before[0] - before[1]) / (after[0] - after[1])
    return float(before[0] - after[0] * spread)


def _rounding(
    words: str, build: Callable[[], nn.Module], apply: Callable[[nn.Module], nn.Module], rows: Tensor
) -> Canvas:
    """Draw how far a norm's outputs are off in float32 and in the precision of autocast."""
    exact = build()(rows.double().to(torch.float32)).detach().flatten()
    with torch.autocast("cpu", torch.bfloat16):
        low = apply(nn.Sequential(build()))(rows).detach()
    canvas = Canvas(words, 178)
    errors = (low.float().flatten() - exact).tolist()
    limit = max(map(abs, errors)) * 1.5
    frame = Frame(canvas, (float(exact.min()), float(exact.max())), (-limit, limit))
    frame.axes("normalised value", f"off by, in {str(low.dtype).removeprefix('torch.')}", [(0, "0")])
    canvas.dashed([frame.at(frame.x[0], 0), frame.at(frame.x[1], 0)])
    for value, error in zip(exact.tolist(), errors, strict=True):
        canvas.dot(*frame.at(value, error), STONES[0], radius=1.8)
    canvas.text(444, 14, f"{low.element_size()} bytes a value for {exact.element_size()}", anchor="end")
    return canvas


def low_precision_layernorm() -> Drawn:
    """Draw what low precision costs a layer norm."""
    rows = torch.randn(4, 64, generator=_seeded(2))
    canvas = _rounding("How far values are off", lambda: nn.LayerNorm(64), cf.apply_low_precision_layernorm, rows)
    return canvas, "What `LayerNorm` gives under autocast to bfloat16 with the method, less what it gives in float32."


def low_precision_groupnorm() -> Drawn:
    """Draw what low precision costs a group norm."""
    rows = torch.randn(1, 8, 5, 6, generator=_seeded(3))
    canvas = _rounding("How far values are off", lambda: nn.GroupNorm(2, 8), cf.apply_low_precision_groupnorm, rows)
    return canvas, "What `GroupNorm` gives under autocast to bfloat16 with the method, less what it gives in float32."


def isolated_adapters() -> Drawn:
    """Draw which parts of a layer the rows of three classes read."""
    canvas = Canvas(
        "Rows of three classes, and the parts of a layer that they read: each the shared one and its own", 168
    )
    names = ("open", "news", "pii")
    layer = cf.apply_isolated(nn.Linear(8, 8), names[1:], rank=2)
    parts = list(isolated_modules(layer).values())
    for place, name in enumerate(("the shared weights", *(f"{part.class_name}'s own" for part in parts))):
        canvas.text(144 + place * 116, 14, name, anchor="middle", colour=MUTED)
    for row, name in enumerate(names):
        y = 24 + row * 48
        canvas.text(0, y + 24, f"rows of {name}", colour=MUTED)
        with cf.enabled_classes(layer, *({name} & {part.class_name for part in parts})):
            read = [True, *(part.is_enabled for part in parts)]
        for place, is_read in enumerate(read):
            stone = STONES[0] if place == 0 else STONES[place + 1]
            canvas.rect(94 + place * 116, y, 100, 38, stone if is_read else MUTED, opacity=0.85 if is_read else 0.12)
    return (
        canvas,
        "What rows of three classes read in a layer. What is one class's own can go, and other rows don't notice.",
    )


def squeeze_excite() -> Drawn:
    """Draw the channels' gates for two images."""
    canvas = Canvas("How much of each of sixteen channels is let through, for two images", 160)
    generator = _seeded(5)
    filters = torch.randn(16, 3, 5, 5, generator=generator)
    layer = SqueezeExcite2d(16, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    for place, image in enumerate(floors()):
        channels = F.conv2d(image[None], filters).relu()
        gates = (layer(channels).detach() / channels.clamp_min(1e-6)).amax((0, 2, 3)).tolist()
        y = 12 + 76 * place
        canvas.image(0, y, 1.5, image)
        for channel, gate in enumerate(gates):
            x = 92 + channel * 23
            canvas.rect(x, y, 17, 58, MUTED, opacity=0.2)
            canvas.rect(x, y + 58 * (1 - gate), 17, 58 * gate, STONES[0])
    canvas.text(456, 157, "16 channels", anchor="end", colour=MUTED, size=12)
    return (
        canvas,
        "How much of each of 16 channels an untrained gate lets through, for two images: it looks at the whole image.",
    )


def weight_standardization() -> Drawn:
    """Draw the mean and spread of eight filters before and after."""
    filters = (
        torch.randn(8, 27, generator=_seeded(6)) * torch.linspace(0.3, 1.6, 8)[:, None]
        + torch.linspace(0.9, -0.6, 8)[:, None]
    )
    after = cf_standardize(filters)
    canvas = Canvas("Eight filters' means and spreads, before and after: all 0 and 1", 178)
    for left, name, values in ((40, "as learnt", filters), (270, "as used", after)):
        frame = Frame(canvas, (0, 8), (-3, 3), left=left, width=180)
        frame.axes("8 filters", name, [(0, "0")] if left == 40 else [])
        canvas.dashed([frame.at(0, 0), frame.at(8, 0)])
        for place, row in enumerate(values):
            mean, spread = float(row.mean()), float(row.std(unbiased=False))
            canvas.line(
                [frame.at(place + 0.5, mean - spread), frame.at(place + 0.5, mean + spread)], STONES[0], width=5
            )
            canvas.dot(*frame.at(place + 0.5, mean), STONES[2], radius=4)
    return (
        canvas,
        "Mean (dot) and standard deviation (bar) of eight filters, as learnt and as the convolution uses them.",
    )


def cf_standardize(filters: Tensor) -> Tensor:
    """Return filters [filters, weights] as the method's convolution uses them."""
    layer = nn.Conv2d(3, len(filters), 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(filters.view(-1, 3, 3, 3))
    cf.apply_weight_standardization(layer)
    return layer.weight.detach().flatten(1)


PICTURES: dict[str, Callable[[], Drawn]] = {
    "Alibi": alibi,
    "ChannelsLast": channels_last,
    "Factorize": factorize,
    "IsolatedAdapters": isolated_adapters,
    "GatedLinearUnits": gated_linear_units,
    "GhostBatchNorm": ghost_batchnorm,
    "LowPrecisionGroupNorm": low_precision_groupnorm,
    "LowPrecisionLayerNorm": low_precision_layernorm,
    "SqueezeExcite": squeeze_excite,
    "WeightStandardization": weight_standardization,
}
