"""Training methods. This list is all there is: no registry."""

# Written by tools/list_methods.py: run `make methods` after a change of a method's `__all__`.

from __future__ import annotations

from cosmati.core.method import Method
from cosmati.methods.alibi import Alibi
from cosmati.methods.augmix import AugMix
from cosmati.methods.blurpool import BlurPool
from cosmati.methods.channels_last import ChannelsLast
from cosmati.methods.colout import ColOut
from cosmati.methods.crop_and_flip import CropAndFlip
from cosmati.methods.cutmix import CutMix
from cosmati.methods.cutout import CutOut
from cosmati.methods.depth_curriculum import DepthCurriculum
from cosmati.methods.ema import EMA
from cosmati.methods.factorize import Factorize
from cosmati.methods.gated_linear_units import GatedLinearUnits
from cosmati.methods.ghost_batchnorm import GhostBatchNorm
from cosmati.methods.gradient_clipping import GradientClipping
from cosmati.methods.gyro_dropout import GyroDropout
from cosmati.methods.isolated_adapters import IsolatedAdapters
from cosmati.methods.label_smoothing import LabelSmoothing
from cosmati.methods.layer_freezing import LayerFreezing
from cosmati.methods.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from cosmati.methods.mixup import MixUp
from cosmati.methods.no_op_model import NoOpModel
from cosmati.methods.progressive_resizing import ProgressiveResizing
from cosmati.methods.randaugment import RandAugment
from cosmati.methods.sam import SAM
from cosmati.methods.scale_schedule import ScaleSchedule
from cosmati.methods.selective_backprop import SelectiveBackprop
from cosmati.methods.seq_length_warmup import SeqLengthWarmup
from cosmati.methods.squeeze_excite import SqueezeExcite
from cosmati.methods.stochastic_depth import StochasticDepth
from cosmati.methods.swa import SWA
from cosmati.methods.weight_standardization import WeightStandardization

ALL: tuple[type[Method], ...] = (
    Alibi,
    AugMix,
    BlurPool,
    ChannelsLast,
    ColOut,
    CropAndFlip,
    CutMix,
    CutOut,
    DepthCurriculum,
    EMA,
    Factorize,
    GatedLinearUnits,
    GhostBatchNorm,
    GradientClipping,
    GyroDropout,
    IsolatedAdapters,
    LabelSmoothing,
    LayerFreezing,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    MixUp,
    NoOpModel,
    ProgressiveResizing,
    RandAugment,
    SAM,
    ScaleSchedule,
    SelectiveBackprop,
    SeqLengthWarmup,
    SqueezeExcite,
    StochasticDepth,
    SWA,
    WeightStandardization,
)

__all__ = [
    "ALL",
    "EMA",
    "SAM",
    "SWA",
    "Alibi",
    "AugMix",
    "BlurPool",
    "ChannelsLast",
    "ColOut",
    "CropAndFlip",
    "CutMix",
    "CutOut",
    "DepthCurriculum",
    "Factorize",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "IsolatedAdapters",
    "LabelSmoothing",
    "LayerFreezing",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "NoOpModel",
    "ProgressiveResizing",
    "RandAugment",
    "ScaleSchedule",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SqueezeExcite",
    "StochasticDepth",
    "WeightStandardization",
]
