"""The methods' functions, for a loop of your own: `import cosmati.methods.functional as cf`."""

# Written by tools/list_methods.py: run `make methods` after a change of a method's `__all__`.

from __future__ import annotations

from cosmati.methods.alibi import apply_alibi
from cosmati.methods.augmix import augmix_image
from cosmati.methods.blurpool import apply_blurpool
from cosmati.methods.channels_last import apply_channels_last
from cosmati.methods.colout import colout_batch
from cosmati.methods.crop_and_flip import crop_and_flip_batch
from cosmati.methods.cutmix import cutmix_batch
from cosmati.methods.cutout import cutout_batch
from cosmati.methods.ema import compute_ema
from cosmati.methods.factorize import apply_factorization
from cosmati.methods.gated_linear_units import apply_gated_linear_units
from cosmati.methods.ghost_batchnorm import apply_ghost_batchnorm
from cosmati.methods.gradient_clipping import apply_gradient_clipping
from cosmati.methods.gyro_dropout import apply_gyro_dropout
from cosmati.methods.isolated_adapters import apply_isolated, drop_isolated, enabled_classes
from cosmati.methods.label_smoothing import smooth_labels
from cosmati.methods.layer_freezing import freeze_layers
from cosmati.methods.low_precision_norms import apply_low_precision_groupnorm, apply_low_precision_layernorm
from cosmati.methods.mixup import mixup_batch
from cosmati.methods.progressive_resizing import resize_batch
from cosmati.methods.randaugment import randaugment_image
from cosmati.methods.selective_backprop import select_using_loss, should_selective_backprop
from cosmati.methods.seq_length_warmup import set_batch_sequence_length
from cosmati.methods.squeeze_excite import apply_squeeze_excite
from cosmati.methods.stochastic_depth import apply_stochastic_depth
from cosmati.methods.weight_standardization import apply_weight_standardization

__all__ = [
    "apply_alibi",
    "apply_blurpool",
    "apply_channels_last",
    "apply_factorization",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gradient_clipping",
    "apply_gyro_dropout",
    "apply_isolated",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_squeeze_excite",
    "apply_stochastic_depth",
    "apply_weight_standardization",
    "augmix_image",
    "colout_batch",
    "compute_ema",
    "crop_and_flip_batch",
    "cutmix_batch",
    "cutout_batch",
    "drop_isolated",
    "enabled_classes",
    "freeze_layers",
    "mixup_batch",
    "randaugment_image",
    "resize_batch",
    "select_using_loss",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
]
