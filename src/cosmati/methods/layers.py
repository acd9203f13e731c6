"""The methods' layers, to build models with: `from cosmati.methods.layers import BlurPool2d`."""

# Written by tools/list_methods.py: run `make methods` after a change of a method's `__all__`.

from __future__ import annotations

from cosmati.methods.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d
from cosmati.methods.factorize import FactorizedConv2d, FactorizedLinear
from cosmati.methods.gated_linear_units import GatedFeedForward
from cosmati.methods.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from cosmati.methods.gyro_dropout import GyroDropoutLayer
from cosmati.methods.low_precision_norms import GroupNormInAutocast, LayerNormInAutocast
from cosmati.methods.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from cosmati.methods.stochastic_depth import StochasticBlock

__all__ = [
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "FactorizedConv2d",
    "FactorizedLinear",
    "GatedFeedForward",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "GroupNormInAutocast",
    "GyroDropoutLayer",
    "LayerNormInAutocast",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticBlock",
]
