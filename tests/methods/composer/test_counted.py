"""What Composer's own tests, run against this library, showed to differ by decision: docs/from-composer.md says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosmati.methods.functional as cf
from cosmati import Classification
from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position
from cosmati.core.pieces import Pieces
from cosmati.errors import BatchError, PlanError
from cosmati.methods import EMA, SWA, AugMix, LayerFreezing, ProgressiveResizing, RandAugment, SeqLengthWarmup
from cosmati.methods.building_blocks.image_operations import augment, operation_names
from cosmati.methods.factorize import FactorizedLinear
from cosmati.models.gpt import GPTConfig
from cosmati.optim import AdamW, Linear


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(x) + x
        return output


def test_alibi_refuses_models_that_it_does_not_know() -> None:
    with pytest.raises(PlanError, match="no attention that is known"):
        cf.apply_alibi(nn.Sequential(nn.Linear(4, 4)), 8)


class BiasedAttention(nn.Module):
    """What it adds to its scores is a method of its own, so nothing has to be registered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.project = 2, nn.Linear(4, 4)

    def bias(self, query: Tensor) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2)
        output = F.scaled_dot_product_attention(heads, heads, heads, self.bias(heads))
        return output.transpose(1, 2).flatten(2)


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = GPTConfig(width=4, num_blocks=1, num_heads=2, sequence_length=4, rotary=False)
        self.position: nn.Embedding | None = nn.Embedding(4, 4)
        self.attention = BiasedAttention()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x if self.position is None else x + self.position.weight[: x.shape[1]])
        return output


def test_attention_that_asks_for_its_bias_needs_no_registry() -> None:
    model = cf.apply_alibi(Positioned(), 8)
    assert model.position is None
    assert model(torch.ones(1, 8, 4)).shape == (1, 8, 4), "longer than its positions were"
    assert type(model.attention) is not BiasedAttention


@pytest.mark.parametrize("method", [AugMix(), RandAugment()])
def test_images_are_changed_within_a_range_of_pixels(method: Any) -> None:
    at = Position(Clock(), Budget(Time.parse("2ba")), 0, 0, nn.Identity(), Classification(2))
    batch = Batch((torch.linspace(-2, 2, 2 * 3 * 8 * 8).view(2, 3, 8, 8), torch.arange(2)), Lineage.of_rows(0, 2))
    with pytest.raises(BatchError, match="value_range"):
        method.batch(batch, at)
    changed: Any = replace(method, value_range=(-2.0, 2.0)).batch(batch, at).input
    assert changed.min() >= -2
    assert changed.max() <= 2
    assert not torch.equal(changed, batch.input)


def test_colout_returns_a_pair_for_a_pair() -> None:
    images, labels = torch.rand(2, 3, 8, 8), torch.arange(2)
    smaller, same = cf.colout_batch((images, labels), 0.25, 0.5)
    assert smaller.shape == (2, 3, 6, 4)
    assert same is labels
    assert isinstance(cf.colout_batch(images), Tensor)


def test_a_lower_rank_is_factorized_anew_and_needs_no_data() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 10).requires_grad_(False)
    assert not hasattr(FactorizedLinear.of(layer, 4), "set_rank")
    errors = [float((FactorizedLinear.of(layer, rank).weight - layer.weight).norm().detach()) for rank in (2, 3, 4)]
    assert errors == sorted(errors, reverse=True)


def test_adaptive_clipping_lets_weights_of_zero_learn() -> None:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.grad = torch.full_like(layer.weight, 3.0)
    cf.apply_gradient_clipping(layer, "adaptive", 0.5)
    assert float(layer.weight.grad.norm()) == pytest.approx(0.5 * 0.001)


def test_a_warm_up_of_k_steps_begins_at_one_kth_and_is_scaled_with_the_run() -> None:
    for ratio, k in ((1.0, 4), (2.0, 8), (0.5, 2)):
        budget = Budget(Time.parse("20ba"), ratio=ratio)
        num_steps = budget.num_steps
        assert num_steps == 5 * k
        rates = [Linear(warmup="4ba").multiplier(step / num_steps, budget) for step in range(num_steps)]
        assert rates[:k] == pytest.approx([(step + 1) / k for step in range(k)])
        assert max(rates) == pytest.approx(rates[k - 1])


def test_after_t_max_the_last_value_stays_with_a_warm_up_too() -> None:
    budget = Budget(Time.parse("20ba"))
    schedule = Linear(warmup="2ba", t_max="10ba", final=0.25)
    assert [schedule.multiplier(step / 20, budget) for step in (10, 15, 19)] == [0.25] * 3


@pytest.mark.parametrize(("text", "step"), [("1.5ep", 15), ("2.5ba", 2), ("0.25ep", 2)])
def test_times_need_not_be_whole(text: str, step: int) -> None:
    assert Budget(Time.parse("7ep"), steps_per_epoch=10).step_of(text) == step


def test_a_standardized_convolution_keeps_its_parameter() -> None:
    layer = nn.Conv2d(3, 4, 3)
    parameter = layer.weight
    cf.apply_weight_standardization(layer)
    assert dict(layer.named_parameters())["weight"] is parameter
    variance, mean = torch.var_mean(layer.weight, dim=(1, 2, 3), correction=0)
    torch.testing.assert_close(variance, torch.ones(4))
    torch.testing.assert_close(mean, torch.zeros(4))


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shortcut = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(x) + self.shortcut(x)
        return output


@pytest.mark.long
@torch.no_grad()
def test_a_block_whose_shape_changes_is_never_skipped() -> None:
    x, block = torch.randn(2, 4, 3, 3), Widening()
    whole = block(x)
    cf.apply_stochastic_depth(nn.Sequential(block), "Widening", drop_rate=0.9)
    for _ in range(8):
        assert torch.equal(block.train()(x), whole)


@torch.no_grad()
def test_rows_that_are_kept_are_scaled_in_training_and_evaluation_is_the_model() -> None:
    torch.manual_seed(0)
    x, block = torch.randn(64, 4, 1, 1), Bottleneck()
    whole = block(x)
    cf.apply_stochastic_depth(nn.Sequential(block), "Bottleneck", "sample", drop_rate=0.5)
    assert torch.equal(block.eval()(x), whole)
    trained = block.train()(x)
    kept = (trained != x).flatten(1).any(1)
    assert 0 < int(kept.sum()) < 64
    torch.testing.assert_close(trained[kept], (x + 2 * (whole - x))[kept])


@pytest.mark.long
@torch.no_grad()
def test_surgery_is_exported_without_torch_script() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), Bottleneck(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    cf.apply_blurpool(model, min_channels=0)
    cf.apply_stochastic_depth(model, "Bottleneck")
    cf.apply_ghost_batchnorm(model, 2)
    cf.apply_squeeze_excite(model, 2, 4)
    assert [type(layer).__name__ for layer in model] == [
        "BlurConv2d",
        "StochasticBottleneck",
        "GhostBatchNorm2d",
        "SqueezeExciteConv2d",
    ]
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model.eval(), (x,)).module()
    torch.testing.assert_close(program(x), model(x))


def test_colout_leaves_a_pixel() -> None:
    assert cf.colout_batch(torch.rand(1, 3, 8, 8), 0.99, 0.99).shape == (1, 3, 1, 1)
    with pytest.raises(BatchError, match="an image needs a pixel"):
        cf.colout_batch(torch.rand(1, 3, 8, 8), 1.0)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_labels_of_rows_are_refused_whether_or_not_sequences_are_cut(length: int) -> None:
    with pytest.raises(BatchError, match="share their length"):
        cf.set_batch_sequence_length({"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2)}, length)


def test_a_smoothing_overrides_the_half_life() -> None:
    at = Position(Clock(step=1), Budget(Time.parse("10ba")), 0, 0, nn.Identity(), Classification(2))
    old, new = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    given = EMA(smoothing=0.75)
    assert given.half_life == "1000ba"
    state = given.after(given.after({}, Pieces(old), at, None), Pieces(new), at, None)
    averages = given.evaluation_weights(state, at)
    assert averages is not None
    assert float(averages["w"]) == 0.25


def test_swa_anneals_to_the_rate_that_is_given() -> None:
    given = SWA(swa_start="0.5dur", update_interval="10ba", schedule_swa_lr=True, anneal_steps=2, swa_lr=0.2)
    budget = Budget(Time.parse("100ba"))
    rates = [given.learning_rate(lambda _: 1.0, elapsed, budget) for elapsed in (0.4, 0.6, 0.7, 0.9)]
    assert rates == pytest.approx([1.0, 0.6, 0.2, 0.2])
    with pytest.raises(PlanError, match="schedule_swa_lr=True"):
        SWA(swa_lr=0.2)


def test_ignored_targets_stay_ignored_when_labels_are_smoothed() -> None:
    smoothed = cf.smooth_labels(torch.zeros(2, 4), torch.tensor([1, -100]), 0.2)
    torch.testing.assert_close(smoothed, torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.0] * 4]))


def test_counters_are_copied_into_an_average() -> None:
    model, average = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model(torch.randn(4, 2))
    cf.compute_ema(model, average, 0.5)
    assert int(average.num_batches_tracked) == 1, "half of it is 0 in whole numbers"  # type: ignore[arg-type]


def test_layers_are_frozen_within_an_epoch() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    names, budget = [name for name, _ in model.named_parameters()], Budget(Time.parse("1ep"), steps_per_epoch=8)
    frozen = [
        len(LayerFreezing().frozen(names, Position(Clock(step=step), budget, 0, 0, model, Classification(2))))
        for step in range(8)
    ]
    assert frozen == [0, 0, 0, 0, 0, 2, 4, 6]


def test_images_grow_in_multiples_on_both_sides_to_a_size_of_their_own() -> None:
    given = ProgressiveResizing(size_increment=4)
    assert given.size(23, 30, given.scale(0.0)) == (12, 16)
    assert given.size(23, 30, given.scale(0.9)) == (23, 30), "no multiples of 4"


def test_sequences_grow_in_equal_parts() -> None:
    given = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=64, step_size=8)
    lengths = [given.length(step / 20) for step in range(20)]
    assert lengths == [8, 8, 16, 24, 24, 32, 40, 40, 48, 56] + [64] * 10
    few = [given.length(step / 4) for step in range(4)]
    assert few == [8, 32, 64, 64], "fewer steps than lengths"


def test_sequences_are_cut_up_without_a_remainder() -> None:
    given = SeqLengthWarmup(duration=0.5, min_seq_length=3, max_seq_length=12, step_size=1, truncate=False)
    at = Position(Clock(step=2), Budget(Time.parse("10ba")), 0, 0, nn.Identity(), Classification(2))
    tokens = torch.arange(48).view(4, 12)
    batch = given.batch(Batch({"input_ids": tokens}, Lineage.of_rows(0, 4)), at)
    assert given.length(at.elapsed) == 6
    cut: Any = batch.data
    assert cut["input_ids"].shape == (8, 6)
    assert torch.equal(cut["input_ids"].flatten(), tokens.flatten())
    odd = given.batch(Batch({"input_ids": tokens[:, :10]}, Lineage.of_rows(0, 4)), at)
    assert odd.num_rows == 8, "5 divides 10, and 6 doesn't"


def decoupled_adamw(weights: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Composer's documented step in float64: its default betas, a decay times the schedule and not the rate."""
    first, second, w = torch.zeros_like(weights), torch.zeros_like(weights), weights.clone()
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        w = w * (1 - rate / rates[0] * decay)
        w = w - rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize(("rate", "decay"), [(0.1, 0.02), (0.01, 1e-5)])
def test_the_row_for_decoupled_adamw_is_its_step(rate: float, decay: float) -> None:
    torch.manual_seed(0)
    start = torch.randn(6, dtype=torch.float64)
    gradients = [torch.randn(6, dtype=torch.float64) for _ in range(8)]
    rates = [rate * (1 - step / 10) for step in range(8)]
    weights = nn.Parameter(start.clone())
    own = AdamW(lr=rate, weight_decay=decay / rate, betas=(0.9, 0.95)).build([("w", weights)])
    for gradient, now in zip(gradients, rates, strict=True):
        own.param_groups[0]["lr"] = now
        weights.grad = gradient
        own.step()
    torch.testing.assert_close(weights.detach(), decoupled_adamw(start, gradients, rates, decay))


def test_no_image_is_enhanced_more_than_to_19_tenths() -> None:
    image = torch.full((400, 3, 1, 1), 0.2)  # Of one grey, so that only brightness and solarization change its value.
    draws = torch.rand(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = augment(image, draws, 10, "all")[:, 0, 0, 0]
    enhanced = values[values < 0.75]
    assert 0.3 < float(enhanced.max()) <= 0.38 + 1e-6
    torch.testing.assert_close(values[values >= 0.75].unique(), torch.tensor([0.8]))


@pytest.mark.parametrize("operation", [1, 2])
def test_shears_keep_the_middle(operation: int) -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 4] = 1
    which = (operation + 0.5) / len(operation_names("all"))
    sheared = augment(image.clone(), torch.tensor([[which, 0.99, 0.99]], dtype=torch.float64), 10, "all")
    assert float(sheared[0, 0, 4, 4]) == pytest.approx(1)
    lines = torch.ones(1, 1, 9, 9).tril()
    assert not torch.equal(augment(lines.clone(), torch.tensor([[which, 0.99, 0.99]]).double(), 10, "all"), lines)
