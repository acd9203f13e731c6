"""Where Composer differs and this library keeps its own way: what docs/from-composer.md says, held by tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosmati.methods.functional as cf
from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position
from cosmati.errors import PlanError
from cosmati.methods import EMA, SWA, ColOut, LabelSmoothing, SelectiveBackprop
from cosmati.methods.factorize import FactorizedLinear
from cosmati.methods.stochastic_depth import StochasticBlock
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW, Constant, Linear


class Bottleneck(nn.Module):
    """A residual block that may end in an activation."""

    def __init__(self, *, ends_in_relu: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.ends_in_relu = ends_in_relu

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(x) + x
        return output.relu() if self.ends_in_relu else output


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.MaxPool2d(2),
        nn.GroupNorm(4, 16),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.LayerNorm(144),
        nn.Linear(144, 32),
    )


IN_PLACE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "blurpool": cf.apply_blurpool,
    "channels_last": cf.apply_channels_last,
    "factorization": lambda model: cf.apply_factorization(model, min_channels=3, min_features=8),
    "ghost_batchnorm": cf.apply_ghost_batchnorm,
    "gyro_dropout": lambda model: cf.apply_gyro_dropout(model, 4, 4),
    "low_precision_groupnorm": cf.apply_low_precision_groupnorm,
    "low_precision_layernorm": cf.apply_low_precision_layernorm,
    "squeeze_excite": lambda model: cf.apply_squeeze_excite(model, 4, 3),
    "weight_standardization": cf.apply_weight_standardization,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_surgery_is_in_place_returns_the_model_and_keeps_names(name: str) -> None:
    model = network()
    before = dict(model.named_parameters())
    assert IN_PLACE[name](model) is model, "code that ignores what is returned, as Composer's does, works too"
    after = dict(model.named_parameters())
    if name == "factorization":
        assert {"7.reduce.weight", "7.expand.weight", "7.expand.bias"} <= after.keys()
        return
    assert all(after[key] is value for key, value in before.items()), "the same names, the same parameters"
    missing, unexpected = model.load_state_dict(network().state_dict(), strict=name != "squeeze_excite")
    assert not unexpected
    assert all("squeeze_excite" in key for key in missing)


def test_a_layer_that_is_the_model_comes_back() -> None:
    layer = nn.Linear(32, 32)
    assert isinstance(cf.apply_factorization(layer, min_features=8), FactorizedLinear)


def test_a_blurred_convolution_is_the_convolution() -> None:
    model = network()
    weight = model[0].weight
    cf.apply_blurpool(model, min_channels=1)
    blurred: Any = model[0]
    assert isinstance(blurred, nn.Conv2d)
    assert blurred.weight is weight
    assert not hasattr(blurred, "conv")


def test_blur_reflects_its_edges_so_flat_images_stay_flat() -> None:
    pool = cf.apply_blurpool(nn.MaxPool2d(2))
    torch.testing.assert_close(pool(torch.ones(1, 2, 6, 6)), torch.ones(1, 2, 3, 3))
    zero_padded = F.conv2d(torch.ones(1, 1, 5, 5), torch.full((1, 1, 3, 3), 1 / 9), padding=1)
    assert zero_padded[0, 0, 0, 0] < 0.5, "padded with zeros, as Composer does, the corner would be darker"


@pytest.mark.parametrize("ends_in_relu", [False, True])
@torch.no_grad()
def test_stochastic_depth_evaluates_the_mean_of_what_training_draws(ends_in_relu: bool) -> None:
    torch.manual_seed(0)
    block = Bottleneck(ends_in_relu=ends_in_relu)
    x = torch.randn(2, 4, 3, 3).relu()
    whole = block(x)
    model = cf.apply_stochastic_depth(nn.Sequential(block), "Bottleneck", drop_rate=0.25)
    torch.testing.assert_close(model.eval()(x), 0.25 * x + 0.75 * whole)
    inside = x + 0.75 * block.conv(x)  # Where the branch alone is scaled, before what ends the block.
    inside = inside.relu() if ends_in_relu else inside
    assert torch.allclose(model(x), inside, atol=1e-6) == (not ends_in_relu), "a plain addition is the paper's formula"
    draws = {bool(torch.equal(model.train()(x), whole)) for _ in range(40)}
    assert draws == {False, True}, "training takes the block as it is, or leaves it out"


def test_any_class_of_block_may_be_named() -> None:
    for target in ("Bottleneck", "ResNetBottleneck", Bottleneck):
        block = Bottleneck(ends_in_relu=True)
        cf.apply_stochastic_depth(nn.Sequential(block), target)
        assert isinstance(block, StochasticBlock)


def test_every_image_has_holes_of_its_own() -> None:
    holed = cf.cutout_batch(torch.ones(16, 1, 8, 8), length=0.25, generator=torch.Generator().manual_seed(0))
    assert len({tuple(image.flatten().tolist()) for image in holed}) > 8


@torch.no_grad()
def test_ghosts_move_the_running_statistics_once_to_their_mean() -> None:
    layer: Any = cf.apply_ghost_batchnorm(nn.BatchNorm1d(1, momentum=0.5), 2)
    layer(torch.tensor([[0.0], [2.0], [10.0], [14.0]]))
    assert layer.running_mean.tolist() == [0.5 * (1 + 12) / 2]
    assert layer.running_var.tolist() == [0.5 * 1 + 0.5 * (2 + 8) / 2]
    assert layer.num_batches_tracked == 1
    assert layer(torch.randn(3, 1)).shape == (3, 1), "a last batch of any size"


def test_factors_are_the_best_of_their_rank() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 10)
    new: Any = cf.apply_factorization(layer, min_features=1, latent_features=3)
    tail = torch.linalg.svdvals(layer.weight.detach())[3:]
    error = torch.linalg.norm(new.weight - layer.weight)
    torch.testing.assert_close(error.detach(), tail.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "keep", "kept"), [(7, 0.5, 4), (100, 0.29, 29), (1, 0.1, 1), (10, 0.24, 2)])
def test_rows_to_keep_are_rounded_and_never_none(rows: int, keep: float, kept: int) -> None:
    inputs = torch.arange(float(rows))[:, None]
    model = nn.Linear(1, 2)
    input, target = cf.select_using_loss(inputs, torch.zeros(rows).long(), model, F.cross_entropy, keep)
    assert len(input) == len(target) == kept
    assert input[:, 0].tolist() == sorted(input[:, 0].tolist()), "in their order"


def test_a_loss_function_without_reduction_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="reduction"):
        cf.select_using_loss(torch.ones(2, 1), torch.zeros(2).long(), nn.Linear(1, 2), lambda output, _: output.mean())


def test_no_precision_is_that_of_autocast() -> None:
    norm = cf.apply_low_precision_layernorm(nn.LayerNorm(4), None)
    x = torch.randn(2, 4)
    assert norm(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="changes nothing"):
        cf.apply_low_precision_layernorm(nn.LayerNorm(4), "fp32")


def test_resizing_reaches_from_edge_to_edge() -> None:
    columns = torch.arange(11.0).expand(1, 1, 11, 11)
    small, _ = cf.resize_batch(columns, torch.zeros(1), 0.7)
    expected = [int(i * 11 / 7) for i in range(7)]
    assert small[0, 0, 0].tolist() == expected
    steps_of_its_own = F.interpolate(columns, scale_factor=0.7, mode="nearest")
    assert steps_of_its_own[0, 0, 0].tolist() != expected


def test_rows_take_turns_among_subnetworks() -> None:
    model = cf.apply_gyro_dropout(nn.Sequential(nn.Dropout(0.5)), 100, 1, 0.5, 8, 4)
    masks = model.train()(torch.ones(12, 64))
    assert torch.equal(masks[:4], masks[4:8])
    assert torch.equal(masks[:4], masks[8:])
    assert len({tuple(row.tolist()) for row in masks}) > 1


@pytest.mark.long
def test_berts_gate_is_in_its_first_half_and_the_second_stays() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    model: Any = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).eval()
    first, second = model.encoder.layer[0].intermediate, model.encoder.layer[0].output
    kept = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cf.apply_gated_linear_units(model, optimizer)
    assert type(first).__name__ == "GatedBertIntermediate"
    assert model.encoder.layer[0].output is second
    assert all(dict(model.named_parameters())[name] is value for name, value in kept.items()), "what is trained stays"
    x = torch.randn(1, 2, 12)
    gated = F.gelu(first.dense(x)) * first.gate(x)
    torch.testing.assert_close(second(first(x), x), second.LayerNorm(second.dense(gated) + x))


def test_a_share_of_the_run_is_not_rounded_to_its_unit() -> None:
    """Composer rounds 0.2dur of 7ep down to one epoch."""
    budget = Budget(Time.parse("7ep"), steps_per_epoch=10)
    assert budget.step_of("0.2dur") == 14
    rates = [Constant(warmup="0.2dur").multiplier(step / 70, budget) for step in range(15)]
    assert next(i for i, rate in enumerate(rates) if rate > 0.999) == 13


def test_sets_of_operations_are_named() -> None:
    image = torch.rand(3, 8, 8)
    assert cf.randaugment_image(image, augmentation_set="safe").shape == image.shape
    with pytest.raises(ValueError, match="'all', 'safe', 'original'"):
        cf.augmix_image(image, augmentation_set=[print])  # type: ignore[arg-type]


def test_settings_have_names_and_generators_too() -> None:
    """A setting without its name is told by which."""
    with pytest.raises(TypeError, match=r"LabelSmoothing\(smoothing=0\.2\)"):
        LabelSmoothing(0.2)  # type: ignore[call-arg]
    drawing = "mixup_batch cutmix_batch cutout_batch colout_batch randaugment_image augmix_image resize_batch"
    for name in [*drawing.split(), "select_using_loss"]:
        assert inspect.signature(getattr(cf, name)).parameters["generator"].kind is inspect.Parameter.KEYWORD_ONLY


def test_one_convolution_has_one_surgery_that_adds_to_what_it_computes() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.Conv2d(16, 16, 3))
    cf.apply_blurpool(model)
    cf.apply_squeeze_excite(model, 4, 16)
    assert [type(layer).__name__ for layer in model] == ["BlurConv2d", "SqueezeExciteConv2d"]


def test_squeeze_excite_asks_for_channels_on_both_sides() -> None:
    layer = nn.Conv2d(8, 16, 3)
    with pytest.warns(UserWarning, match="changes nothing"):
        cf.apply_squeeze_excite(layer, 4, 16)
    assert type(cf.apply_squeeze_excite(layer, 4, 8)).__name__ == "SqueezeExciteConv2d"


@pytest.mark.long
def test_adamw_decays_times_the_learning_rate() -> None:
    """Composer's takes its share of a weight itself: the learning rate over that is what PyTorch's takes."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    rate, share = 0.02, 0.001
    optimizers = AdamW(lr=rate, weight_decay=share / rate, schedule=Linear())
    rows = InMemory((torch.ones(1, 1), torch.ones(1, 1)), rows_per_step=1)
    config = RunConfig(budget="2ba")
    Trainer(model, lambda *_: (model.weight * 0).sum(), rows, optimizers=optimizers, config=config).fit()
    assert model.weight.item() == pytest.approx((1 - share) * (1 - share / 2), abs=1e-7)


def test_a_length_without_unit_is_asked_for_one() -> None:
    with pytest.raises(PlanError, match="'5ba' for steps, '5ep' for epochs"):
        RunConfig(budget=5)  # type: ignore[arg-type]


def test_a_warm_up_dilates_with_the_run() -> None:
    for ratio, steps in ((0.5, 5), (1.0, 10), (2.0, 20)):
        budget = Budget(Time.parse("100ba"), ratio=ratio)
        rates = [Constant(warmup="10ba").multiplier(step / (100 * ratio), budget) for step in range(2 * steps)]
        assert next(i for i, rate in enumerate(rates) if rate > 0.999) == steps - 1


def test_two_methods_that_set_one_thing_are_named() -> None:
    rows = InMemory((torch.ones(2, 1), torch.zeros(2).long()), rows_per_step=2)
    with pytest.raises(PlanError, match=r"(?s)EMA.*SWA"):
        Trainer(nn.Linear(1, 2), Classification(2), rows, optimizers=AdamW(lr=0.1), methods=[EMA(), SWA()])


def test_averages_leave_the_models_own_weights_alone() -> None:
    rows = InMemory((torch.ones(2, 1), torch.zeros(2).long()), rows_per_step=2)
    model, methods = nn.Linear(1, 2), [EMA(half_life="2ba")]
    trainer = Trainer(
        model, Classification(2), rows, optimizers=AdamW(lr=0.1), methods=methods, config=RunConfig(budget="4ba")
    )
    trainer.fit()
    own = model.weight.detach().clone()
    with trainer.averaged() as averaged:
        assert not torch.equal(averaged.get_parameter("weight"), own)
    assert torch.equal(model.weight, own)


def batch_and_position(data: Any, model: nn.Module) -> tuple[Batch, Position]:
    at = Position(Clock(step=5), Budget(Time.parse("10ba")), 0, 0, model, Classification(2))
    return Batch(data, Lineage.of_rows(0, 4)), at


def test_rows_are_scored_in_evaluation_mode_and_keep_their_ids() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    batch, at = batch_and_position((torch.randn(4, 3), torch.arange(4) % 2), model)
    kept = SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0).batch(batch, at)
    statistics: Any = model[0]
    assert statistics.num_batches_tracked == 0
    assert model.training
    ids = kept.lineage.row_ids.tolist()
    assert torch.equal(kept.input, batch.input[ids])


def test_a_batch_may_be_a_dictionary() -> None:
    batch, at = batch_and_position({"input": torch.rand(4, 3, 8, 8), "target": torch.arange(4) % 2}, nn.Identity())
    smooth = LabelSmoothing(smoothing=0.2).batch(batch, at)
    torch.testing.assert_close(smooth.target[0], torch.tensor([0.9, 0.1]))
    images = ColOut(per_image=True).batch(batch, at).input
    assert images.shape == (4, 3, 6, 6)


def test_half_a_length_is_half_a_side() -> None:
    images, labels = torch.zeros(2, 1, 64, 64), torch.arange(2)
    boxes = [cf.cutmix_batch(images, labels, length=0.5)[3] for _ in range(40)]
    assert max(bottom - top for top, _, bottom, _ in boxes) == 32


def test_alibi_takes_the_positions_out() -> None:
    model = GPT(GPTConfig(width=12, num_blocks=1, num_heads=3, sequence_length=8, rotary=False))
    positions: Any = model.position
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cf.apply_alibi(model, 16, optimizer)
    held = optimizer.param_groups[0]["params"]
    assert not any(parameter is positions.weight for parameter in held)
    assert "position.weight" not in model.state_dict()
