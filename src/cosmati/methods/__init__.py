"""Training methods. This list is all there is: no registry."""

from __future__ import annotations

from cosmati.core.method import Method
from cosmati.methods.blurpool import BlurPool
from cosmati.methods.channels_last import ChannelsLast
from cosmati.methods.cutmix import CutMix
from cosmati.methods.cutout import CutOut
from cosmati.methods.ema import EMA
from cosmati.methods.gradient_clipping import GradientClipping
from cosmati.methods.label_smoothing import LabelSmoothing
from cosmati.methods.layer_freezing import LayerFreezing
from cosmati.methods.mixup import MixUp
from cosmati.methods.progressive_resizing import ProgressiveResizing
from cosmati.methods.sam import SAM
from cosmati.methods.scale_schedule import ScaleSchedule
from cosmati.methods.selective_backprop import SelectiveBackprop
from cosmati.methods.seq_length_warmup import SeqLengthWarmup

ALL: tuple[type[Method], ...] = (
    BlurPool,
    ChannelsLast,
    CutMix,
    CutOut,
    EMA,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    SAM,
    ScaleSchedule,
    SelectiveBackprop,
    SeqLengthWarmup,
)

__all__ = [
    "ALL",
    "EMA",
    "SAM",
    "BlurPool",
    "ChannelsLast",
    "CutMix",
    "CutOut",
    "GradientClipping",
    "LabelSmoothing",
    "LayerFreezing",
    "MixUp",
    "ProgressiveResizing",
    "ScaleSchedule",
    "SelectiveBackprop",
    "SeqLengthWarmup",
]
