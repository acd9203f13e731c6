"""What Composer documents and was once another thing here: one-hot integers, a longer ALiBi, torch.fx, times."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cosmati.methods.functional as cf
from cosmati import Classification, InMemory, LanguageModel, RunConfig, Trainer, accuracy
from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time, Unit
from cosmati.core.loss import MixedTarget
from cosmati.core.method import Method, Position
from cosmati.errors import BatchError, PlanError
from cosmati.methods import BlurPool, CutMix, Factorize, LabelSmoothing, MixUp, SqueezeExcite
from cosmati.methods.factorize import FactorizedConv2d, FactorizedLinear
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, Constant, Cosine

CLASSES = 4
LABELS = torch.tensor([3, 0, 2, 2, 1, 3])
ONE_HOT = torch.eye(CLASSES, dtype=torch.int64)[LABELS]
IMAGES = torch.linspace(-1, 1, 6 * 3 * 8 * 8).view(6, 3, 8, 8)


def position(loss: Any = None) -> Position:
    loss = Classification(CLASSES) if loss is None else loss
    return Position(Clock(), Budget(Time.parse("2ba")), 0, 0, nn.Identity(), loss)


def changed(method: Method, target: Tensor, loss: Any = None) -> Tensor:
    """Return the target that a method makes; an interpolated one is what its loss is linear in."""
    batch = Batch((IMAGES[: len(target)], target), Lineage.of_rows(0, len(target)))
    new: Any = method.batch(batch, position(loss)).target
    return new.mixing * new.first + (1 - new.mixing) * new.second if isinstance(new, MixedTarget) else new


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "method",
    [
        LabelSmoothing(smoothing=0.1),
        MixUp(alpha=0.5),
        MixUp(alpha=0.5, interpolate_loss=True),
        CutMix(alpha=1.0),
        CutMix(alpha=1.0, interpolate_loss=True),
    ],
    ids=str,
)
def test_integer_one_hot_targets_are_probabilities(method: Method, dtype: torch.dtype) -> None:
    torch.testing.assert_close(changed(method, ONE_HOT.to(dtype)), changed(method, ONE_HOT.float()))


def test_one_hot_maps_are_probabilities_too() -> None:
    labels = torch.arange(2 * 5 * 5).view(2, 5, 5) % CLASSES
    maps = F.one_hot(labels, CLASSES).movedim(-1, 1)
    expected = changed(LabelSmoothing(smoothing=0.2), labels)
    torch.testing.assert_close(changed(LabelSmoothing(smoothing=0.2), maps), expected)


def test_rows_without_a_label_stay_without() -> None:
    """A tombstone's target is zeros, and so is an ignored row's: neither is class 0."""
    targets = ONE_HOT.clone()
    targets[1:3] = 0
    smooth = changed(LabelSmoothing(smoothing=0.1), targets)
    assert (smooth.sum(1) > 0).tolist() == [True, False, False, True, True, True]
    assert not changed(LabelSmoothing(smoothing=0.1), torch.zeros_like(ONE_HOT)).any()


def test_indices_whose_shape_is_that_of_one_hot_targets_stay_indices() -> None:
    for tokens in ([[0, 1, 2, 3], [3, 3, 0, 0]], [[-100, 0, 1, 0], [0, 1, 0, -100]], [[0, 1, 0, 0], [1, 1, 0, 0]]):
        assert changed(LabelSmoothing(smoothing=0.1), torch.tensor(tokens)).shape == (2, CLASSES, 4)
    positions = torch.zeros(2, 4, dtype=torch.int64)
    assert changed(LabelSmoothing(smoothing=0.1), positions, LanguageModel(num_classes=4)).shape == (2, 4, 4)


def test_losses_and_accuracy_take_integer_one_hot_targets() -> None:
    logits = torch.linspace(-2, 2, 24).view(6, CLASSES).requires_grad_()
    loss = Classification(CLASSES).compare(logits, ONE_HOT)
    torch.testing.assert_close(loss.mean(), F.cross_entropy(logits, LABELS))
    square = torch.eye(CLASSES)
    assert accuracy(nn.Identity(), (square, torch.arange(4))).mean() == 1
    assert accuracy(nn.Identity(), (square, square.long())).mean() == 1, "as many rows as classes: once broadcast"
    assert accuracy(nn.Identity(), (square, square.roll(1, 0))).mean() == 0


def test_a_run_on_integer_one_hot_targets_is_the_run_on_indices() -> None:
    def trained(targets: Tensor) -> Tensor:
        layer = nn.Linear(192, CLASSES, bias=False)
        nn.init.constant_(layer.weight, 0.01)
        methods = [MixUp(alpha=0.5), LabelSmoothing(smoothing=0.1)]
        data = InMemory((IMAGES, targets), rows_per_step=6)
        model = nn.Sequential(nn.Flatten(), layer)
        Trainer(model, Classification(CLASSES), data, optimizers=SGD(lr=0.1), methods=methods).fit()
        return layer.weight.detach()

    torch.testing.assert_close(trained(ONE_HOT), trained(LABELS))


@pytest.mark.parametrize("family", ["own", "gpt2", "bert"])
def test_a_second_and_longer_alibi_takes_longer_sequences(family: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "attn_implementation": "eager"}
    model: Any
    if family == "own":
        model = GPT(GPTConfig(width=12, num_blocks=1, num_heads=3, sequence_length=8, rotary=False))
    else:
        transformers = pytest.importorskip("transformers")
        if family == "gpt2":
            config = transformers.GPT2Config(n_embd=12, n_layer=1, n_head=3, n_positions=8, **sizes)
            model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                hidden_size=12,
                num_hidden_layers=1,
                num_attention_heads=3,
                intermediate_size=24,
                max_position_embeddings=8,
                **sizes,
            )
            model = transformers.BertForMaskedLM(config)
    cf.apply_alibi(model, 12)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(0, 50, (1, 20))
    assert cf.apply_alibi(model, 20) is model
    output = model(tokens)
    assert getattr(output, "logits", output).shape[:2] == (1, 20)
    cf.apply_alibi(model, 9)  # A shorter one takes nothing back.
    model(tokens)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


class ResidualUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.act(self.first(x)))
        return output


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.MaxPool2d(2, stride=(1, 2)),
        ResidualUnit(),
        nn.GroupNorm(4, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Dropout(0.5),
        nn.Linear(16, 16),
    )


SURGERY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "blurpool": lambda model: cf.apply_blurpool(model, min_channels=1),
    "blurpool after": lambda model: cf.apply_blurpool(model, min_channels=1, blur_first=False),
    "squeeze_excite": lambda model: cf.apply_squeeze_excite(model, 4, 1),
    "factorization": lambda model: cf.apply_factorization(model, min_channels=1, min_features=1),
    "ghost_batchnorm": lambda model: cf.apply_ghost_batchnorm(model, 2),
    "gyro_dropout": lambda model: cf.apply_gyro_dropout(model, 4, 4),
    "layernorm": cf.apply_low_precision_layernorm,
    "groupnorm": cf.apply_low_precision_groupnorm,
    "stochastic block": lambda model: cf.apply_stochastic_depth(model, "ResidualUnit"),
    "stochastic sample": lambda model: cf.apply_stochastic_depth(model, "ResidualUnit", "sample"),
    "weight_standardization": cf.apply_weight_standardization,
    "channels_last": cf.apply_channels_last,
}


@pytest.mark.parametrize("name", SURGERY)
@torch.no_grad()
def test_torch_fx_traces_every_surgery_in_evaluation(name: str) -> None:
    plain = network().eval()
    model = SURGERY[name](copy.deepcopy(plain))
    traced = torch.fx.symbolic_trace(model)
    for rows, side in ((2, 16), (5, 21)):  # The shapes of one batch aren't written down.
        images = torch.randn(rows, 3, side, side)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                assert torch.equal(traced(images), model(images))


def test_torch_fx_keeps_statistics_of_the_batch_where_none_are_kept() -> None:
    model = cf.apply_ghost_batchnorm(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), 2).eval()
    x = torch.randn(5, 3)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("name", ["ghost_batchnorm", "gyro_dropout", "stochastic block", "stochastic sample"])
def test_torch_fx_refuses_what_training_draws_or_counts(name: str) -> None:
    model = SURGERY[name](network()).train()
    with pytest.raises(BatchError, match=r"torch\.fx .*model\.eval\(\)"):
        torch.fx.symbolic_trace(model)


def test_torch_fx_traces_gated_feed_forwards() -> None:
    model = cf.apply_gated_linear_units(nn.Sequential(FeedForward()), target_layer_name="FeedForward")
    x = torch.randn(3, 4)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h20m40s", Time(4840, Unit.SECOND)),
        ("90s", Time(90, Unit.SECOND)),
        ("1d", Time(86400, Unit.SECOND)),
        (" 2h30m ", Time(9000, Unit.SECOND)),
        ("4_000tok", Time(4000, Unit.TOKEN)),
        ("1_000_000sp", Time(1_000_000, Unit.ROW)),
    ],
)
def test_composers_time_strings(text: str, expected: Time) -> None:
    assert Time.parse(text) == expected


@pytest.mark.parametrize("text", ["20m1h", "1h1h", "1_tok", "_1tok", "1__0tok", "hms", "1.5h", "1h20", "5mo"])
def test_times_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not a time"):
        Time.parse(text)


def test_composers_iterations_are_explained() -> None:
    with pytest.raises(PlanError, match=r"'3iter' is not a time.*'ba'.*'ep'"):
        Time.parse("3iter")


def test_a_run_in_hours_ends_by_the_clock() -> None:
    assert Budget(Time.parse("1h30m")).elapsed(Clock(seconds=2700.0)) == 0.5


@pytest.mark.parametrize("warmup", ["1dur", "2ba", "5ba"])
def test_a_warm_up_as_long_as_the_run_is_refused_before_it(warmup: str) -> None:
    """Composer takes it, and its decay has no room; here the Trainer says so before a folder or a step is there."""
    data = InMemory((torch.randn(4, 3), torch.arange(4) % CLASSES), rows_per_step=4)
    for schedule in (Cosine(warmup=warmup), Constant(warmup=warmup)):
        with pytest.raises(PlanError, match="takes the whole run of '2ba'"):
            Trainer(
                nn.Linear(3, CLASSES),
                Classification(CLASSES),
                data,
                optimizers=SGD(lr=0.1, schedule=schedule),
                config=RunConfig(budget="2ba"),
            )


def test_a_factorized_layer_that_is_no_smaller_is_refused() -> None:
    for latent in (4, 64, 0.9):
        with pytest.raises(PlanError, match=r"latent_features=.* smaller"):
            FactorizedLinear(8, 8, latent_features=latent)
    with pytest.raises(PlanError, match=r"latent_channels=.* smaller"):
        FactorizedConv2d(8, 8, 3, latent_channels=8)
    assert FactorizedLinear(8, 8, latent_features=3)(torch.ones(1, 8)).shape == (1, 8)
    assert FactorizedConv2d(8, 8, 3, latent_channels=6)(torch.ones(1, 8, 3, 3)).shape == (1, 8, 1, 1)
    layer = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="that would get smaller"):
        assert cf.apply_factorization(layer, min_features=1, latent_features=64) is layer


def test_a_box_and_a_length_at_once_are_refused() -> None:
    with pytest.raises(BatchError, match="bbox or length"):
        cf.cutmix_batch(IMAGES, LABELS, length=0.5, bbox=(0, 0, 4, 4))
    assert cf.cutmix_batch(IMAGES, LABELS, bbox=(0, 0, 4, 4))[2] == 0.75


def test_why_no_block_is_always_skipped() -> None:
    with pytest.raises(PlanError, match=r"drop_rate=1\.0.*never learns"):
        cf.apply_stochastic_depth(network(), "ResidualUnit", drop_rate=1.0)


class Precision(enum.Enum):
    """Composer's page on low-precision norms gives its own enumeration's members."""

    AMP_BF16 = "amp_bf16"
    FP32 = "fp32"
    AMP_FP8 = "amp_fp8"


def test_precisions_may_be_members_of_an_enumeration() -> None:
    norm: Any = cf.apply_low_precision_layernorm(nn.LayerNorm(4), cast("Any", Precision.AMP_BF16))
    assert norm(torch.randn(2, 4)).dtype == torch.float32, "without autocast the native layer"
    with torch.autocast("cpu", torch.float16):
        assert norm(torch.randn(2, 4)).dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="changes nothing"):
        cf.apply_low_precision_groupnorm(nn.GroupNorm(2, 4), cast("Any", Precision.FP32))
    with pytest.raises(PlanError, match="knows no precision='amp_fp8'"):
        cf.apply_low_precision_groupnorm(nn.GroupNorm(2, 4), cast("Any", Precision.AMP_FP8))


def test_a_loss_function_that_takes_no_reduction_is_told_what_is_missing() -> None:
    with pytest.raises(TypeError, match="must take a keyword argument `reduction`"):
        cf.select_using_loss(torch.ones(2, 1), torch.zeros(2).long(), nn.Linear(1, 2), lambda output, _: output.mean())

    def broken(*_: Tensor, **__: str) -> Tensor:
        raise TypeError("something else")

    with pytest.raises(TypeError, match=r"^something else$"):
        cf.select_using_loss(torch.ones(2, 1), torch.zeros(2).long(), nn.Linear(1, 2), broken)


@pytest.mark.parametrize(
    "method",
    [
        BlurPool(min_channels=0),
        SqueezeExcite(latent_channels=2, min_channels=0),
        Factorize(min_channels=0, min_features=0, latent_channels=1, latent_features=1),
    ],
)
def test_no_layer_is_too_small_for_a_smallest_size_of_zero(method: Method) -> None:
    model = method.apply(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(4, 4)))
    assert type(next(model.children())) is not nn.Conv2d
    assert model(torch.ones(2, 3, 3, 3)).shape == (2, 4)


def test_factorized_layers_know_their_sizes() -> None:
    layer: Any = cf.apply_factorization(nn.Linear(12, 10), min_features=1, latent_features=3)
    assert (layer.in_features, layer.latent_features, layer.out_features) == (12, 3, 10)
    conv: Any = cf.apply_factorization(nn.Conv2d(8, 6, 3, stride=2), min_channels=1, latent_channels=0.5)
    assert (conv.in_channels, conv.latent_channels, conv.out_channels) == (8, 3, 6)
    assert conv(torch.ones(1, conv.in_channels, 7, 7)).shape == (1, conv.out_channels, 3, 3)
