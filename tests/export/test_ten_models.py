"""Models with surgery, averages and ties: what leaves computes what was measured, also rebuilt from files alone."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, LanguageModel, Method, RunConfig, Trainer, batches
from cosmati.methods import (
    EMA,
    SWA,
    Alibi,
    BlurPool,
    Factorize,
    GatedLinearUnits,
    GhostBatchNorm,
    GyroDropout,
    LowPrecisionLayerNorm,
    SqueezeExcite,
    StochasticDepth,
    WeightStandardization,
)
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResidualBlock, ResNet, ResNetConfig
from cosmati.models.unet import UNet, UNetConfig
from cosmati.optim import SGD, AdamW, ScheduleFreeAdamW

pytestmark = pytest.mark.long


def images(rows: int = 32, side: int = 12, classes: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return torch.randn(rows, 1, side, side, generator=draws), torch.arange(rows) % classes


def maps() -> tuple[Tensor, Tensor]:
    x, _ = images(16)
    return x, (x[:, 0] > 0).long()


def tokens() -> Tensor:
    return torch.randint(0, 32, (16, 16), generator=torch.Generator().manual_seed(5))


def cross_entropy(model: nn.Module, data: Any) -> Tensor:
    x, y = data if isinstance(data, tuple | list) else (data[:, :-1], data[:, 1:])
    logits = model(x)
    return F.cross_entropy(logits if logits.ndim != 3 else logits.transpose(1, 2), y)


class BasicBlock(nn.Module):
    """As torchvision has it."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            None
            if stride == 1
            else nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def torchvision_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        BasicBlock(16, 16),
        BasicBlock(16, 24, 2),
        BasicBlock(24, 24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


class Encoder(nn.Module):
    """PyTorch's own transformer block, which reads its linear layers' weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(x[:, 0])).mean(1))
        return logits


def resnet(**options: Any) -> Callable[[], nn.Module]:
    return lambda: ResNet(ResNetConfig(num_classes=3, widths=(8, 16), **options))


def gpt(**options: Any) -> Callable[[], nn.Module]:
    small = {"vocabulary_size": 32, "sequence_length": 16, "width": 16, "num_blocks": 2, "num_heads": 2}
    return lambda: GPT(GPTConfig(**{**small, **options}))


CLASSES, DESCENT = Classification(3), SGD(lr=0.05)


@dataclass(frozen=True)
class Case:
    """A model and how it's trained; `moved` where a sum is taken in another order."""

    model: Callable[[], nn.Module]
    methods: Sequence[Method]
    data: Callable[[], Any] = images
    loss: Any = CLASSES
    optimizer: Any = DESCENT
    moved: bool = False
    kept: Sequence[str] = ()
    precision: Any = "float32"
    near: float = 1e-5


EMA_ = EMA(half_life="2ba")
CASES = {
    "ghost batch norm, SWA": Case(
        resnet(), [GhostBatchNorm(ghost_batch_size=4), SWA(swa_start="0.3dur", swa_end="1dur", update_interval="1ba")]
    ),
    "squeeze-excite, standardized weights, EMA": Case(
        resnet(), [SqueezeExcite(latent_channels=4, min_channels=1), WeightStandardization(), EMA_]
    ),
    "stochastic depth by blocks, schedule-free": Case(
        resnet(pre_activation=True, blocks_per_stage=2),
        [StochasticDepth(target_layer_name=ResidualBlock, drop_rate=0.5)],
        optimizer=ScheduleFreeAdamW(lr=1e-2),
    ),
    "a ResNet as torchvision's, blurred after, stochastic by rows": Case(
        torchvision_like,
        [
            BlurPool(blur_first=False),
            StochasticDepth(target_layer_name="BasicBlock", stochastic_method="sample"),
            WeightStandardization(),
            EMA_,
        ],
    ),
    "a convolution factorized, then blurred": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.Linear(128, 3)),
        [Factorize(min_channels=4, latent_channels=2, min_features=512), BlurPool(min_channels=1), EMA_],
    ),
    "PyTorch's transformer, factorized": Case(
        Encoder, [Factorize(min_features=16, latent_features=4, factorize_convs=False), EMA_], moved=True
    ),
    "a U-Net, blurred": Case(
        lambda: UNet(UNetConfig(num_classes=2, widths=(4, 8))),
        [BlurPool(min_channels=1), EMA_],
        data=maps,
        loss=Classification(2),
    ),
    "a pool with ceil_mode, which stays": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(100, 3)),
        [BlurPool(min_channels=1), EMA_],
        kept=["1"],
    ),
    "a tied GPT, factorized, gated": Case(
        gpt(tied=True, dropout=0.1),
        [Factorize(min_features=16, latent_features=4), GatedLinearUnits(), GyroDropout(sigma=4, tau=2), EMA_],
        data=tokens,
        loss=LanguageModel(),
        optimizer=AdamW(lr=1e-2),
        kept=["blocks.0.feed_forward", "blocks.1.feed_forward"],
    ),
    "a GPT with ALiBi": Case(
        gpt(rotary=False, tied=True),
        [Alibi(max_sequence_length=32, train_sequence_length_scaling=1.0), EMA_],
        data=tokens,
        loss=LanguageModel(),
        kept=["blocks.0.attention", "blocks.1.attention"],
    ),
    "a GPT with n-grams and value embeddings": Case(
        gpt(tied=True, ngrams=(2, 3), ngram_rows=64, value_embeddings=1),
        [LowPrecisionLayerNorm(), EMA_],
        data=tokens,
        loss=LanguageModel(),
        optimizer=AdamW(lr=1e-2),
    ),
    "a GPT in bfloat16, norms too": Case(
        gpt(), [LowPrecisionLayerNorm(), EMA_], data=tokens, loss=LanguageModel(), precision="bfloat16", near=2e-2
    ),
    "a GPT in bfloat16": Case(gpt(), [EMA_], data=tokens, loss=LanguageModel(), precision="bfloat16"),
}


# Each kind of model, of average and of what is kept stays in the default run.
_SLOW = {
    "squeeze-excite, standardized weights, EMA",
    "a U-Net, blurred",
    "a GPT with n-grams and value embeddings",
    "a GPT in bfloat16",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:LowPrecisionLayerNorm changes nothing")
def test_a_model_leaves_as_it_was_measured(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def build() -> nn.Module:
        torch.manual_seed(1)
        return case.model()

    data = case.data()
    trainer = Trainer(
        build(),
        case.loss,
        InMemory(data, 8),
        optimizers=[case.optimizer],
        methods=list(case.methods),
        evaluation=Evaluation(batches(data, 8), {"cross_entropy": cross_entropy}),
        config=RunConfig(budget="5ba", run_folder=tmp_path / "run", precision=case.precision),
    )
    recorded = trainer.fit().metrics["cross_entropy"]
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    classes = [type(module) for module in trainer.model.modules()]
    exported = trainer.export(tmp_path / "out")
    # The trainer is as it was.
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert [type(module) for module in trainer.model.modules()] == classes
    own = {
        place
        for place, module in exported.named_modules()
        if any(kind.__module__.startswith("cosmati.methods.") for kind in type(module).__mro__)
    }
    assert own == set(case.kept)
    plain = build()
    if (tmp_path / "out/rebuild.py").exists():
        plain = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](plain)
    assert load_model(plain, tmp_path / "out/model.safetensors") == (set(), [])
    x = data[:8, :-1] if isinstance(data, Tensor) else data[0][:8]
    with trainer.averaged() as measured, torch.no_grad():
        expected = measured.eval()(x)
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    for model in (exported, plain.eval(), program):
        with torch.no_grad():
            if case.moved:
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(model(x), expected)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bfloat16"):
            values = [float(cross_entropy(model, batch)) for batch in batches(data, 8)]
        assert sum(values) / len(values) == pytest.approx(recorded, rel=case.near)
    assert f"They have to agree within {case.near:g}," in (tmp_path / "out/README.md").read_text()
    with torch.no_grad():
        assert program(x[:3]).shape == expected[:3].shape
    # Had it been the model in training, the figure would have been another one.
    trainer.model.eval()
    with torch.no_grad():
        assert not torch.equal(trainer.model(x), expected)
