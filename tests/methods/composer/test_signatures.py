"""Functions and settings have the names, the order and the defaults that Composer's documentation (0.32) has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

import cosmati.methods.functional as cf
from cosmati import methods

DOCUMENTED = {
    "apply_alibi": "model, max_sequence_length, optimizers=None",
    "apply_blurpool": (
        "model, replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=16, optimizers=None"
    ),
    "apply_channels_last": "model",
    "apply_factorization": (
        "model, factorize_convs=True, factorize_linears=True, min_channels=512, latent_channels=0.25, "
        "min_features=512, latent_features=0.25, optimizers=None"
    ),
    "apply_gated_linear_units": "model, optimizers, act_fn=None, gated_layer_bias=False, non_gated_layer_bias=False",
    "apply_ghost_batchnorm": "model, ghost_batch_size=32, optimizers=None",
    "apply_gradient_clipping": "model, clipping_type, clipping_threshold, fsdp_enabled",
    "apply_gyro_dropout": "model, iters_per_epoch, max_epoch, p, sigma, tau",
    "apply_low_precision_groupnorm": "model, precision=None, optimizers=None",
    "apply_low_precision_layernorm": "model, precision=None, optimizers=None",
    "apply_squeeze_excite": "model, latent_channels=64, min_channels=128, optimizers=None",
    "apply_stochastic_depth": (
        "model, target_layer_name, stochastic_method='block', drop_rate=0.2, drop_distribution='linear'"
    ),
    "apply_weight_standardization": "module, n_last_layers_ignore=0",
    "augmix_image": "img, severity=3, depth=-1, width=3, alpha=1.0, augmentation_set='all'",
    "colout_batch": "sample, p_row=0.15, p_col=0.15, resize_target='auto'",
    "compute_ema": "model, ema_model, smoothing=0.99",
    "cutmix_batch": "input, target, length=None, alpha=1.0, bbox=None, indices=None, uniform_sampling=False",
    "cutout_batch": "input, num_holes=1, length=0.5, uniform_sampling=False",
    "freeze_layers": "model, optimizers, current_duration, freeze_start=0.5, freeze_level=1.0",
    "mixup_batch": "input, target, mixing=None, alpha=0.2, indices=None",
    "randaugment_image": "img, severity=9, depth=2, augmentation_set='all'",
    "resize_batch": "input, target, scale_factor, mode='resize', resize_targets=False",
    "select_using_loss": "input, target, model, loss_fun, keep=0.5, scale_factor=1",
    "set_batch_sequence_length": "batch, curr_seq_len, truncate=True, preserve_end_of_sequence=False",
    "should_selective_backprop": "current_duration, batch_idx, start=0.5, end=0.9, interrupt=2",
    "smooth_labels": "logits, target, smoothing=0.1",
}

SETTINGS = {
    "Alibi": "max_sequence_length, train_sequence_length_scaling=0.25",
    "AugMix": "severity=3, depth=-1, width=3, alpha=1.0, augmentation_set='all'",
    "BlurPool": "replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=16",
    "ChannelsLast": "",
    "ColOut": "p_row=0.15, p_col=0.15, resize_target='auto'",
    "CutMix": "alpha=1.0, interpolate_loss=False, uniform_sampling=False",
    "CutOut": "num_holes=1, length=0.5, uniform_sampling=False",
    "EMA": "half_life='1000ba', smoothing=None, ema_start='0.0dur', update_interval=None",
    "Factorize": (
        "factorize_convs=True, factorize_linears=True, min_channels=256, latent_channels=0.25, min_features=256, "
        "latent_features=128"
    ),
    "GatedLinearUnits": "act_fn=None, gated_layer_bias=False, non_gated_layer_bias=False",
    "GhostBatchNorm": "ghost_batch_size=32",
    "GradientClipping": "clipping_type, clipping_threshold",
    "GyroDropout": "p=0.5, sigma=256, tau=16",
    "LabelSmoothing": "smoothing=0.1",
    "LayerFreezing": "freeze_start=0.5, freeze_level=1.0",
    "LowPrecisionGroupNorm": "",
    "LowPrecisionLayerNorm": "",
    "MixUp": "alpha=0.2, interpolate_loss=False",
    "NoOpModel": "",
    "ProgressiveResizing": (
        "mode='resize', initial_scale=0.5, finetune_fraction=0.2, delay_fraction=0.5, size_increment=4, "
        "resize_targets=False"
    ),
    "RandAugment": "severity=9, depth=2, augmentation_set='all'",
    "SAM": "rho=0.05, epsilon=1e-12, interval=1",
    "SWA": (
        "swa_start='0.7dur', swa_end='0.97dur', update_interval='1ep', schedule_swa_lr=False, "
        "anneal_strategy='linear', anneal_steps=10, swa_lr=None"
    ),
    "SelectiveBackprop": "start=0.5, end=0.9, keep=0.5, scale_factor=1.0, interrupt=2",
    "SeqLengthWarmup": (
        "duration=0.3, min_seq_length=8, max_seq_length=1024, step_size=8, truncate=True, "
        "preserve_end_of_sequence=False"
    ),
    "SqueezeExcite": "latent_channels=64, min_channels=128",
    "StochasticDepth": (
        "target_layer_name, stochastic_method='block', drop_rate=0.2, drop_distribution='linear', drop_warmup=0.0"
    ),
    "WeightStandardization": "n_last_layers_ignore=0",
}
"""Of the algorithms; what only says which part of a batch is meant, or when, isn't a setting here."""


def parameters_of(documented: str) -> Mapping[str, inspect.Parameter]:
    scope: dict[str, Any] = {}
    exec(f"def documented({documented}): ...", scope)
    return inspect.signature(scope["documented"]).parameters


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_their_names_and_defaults(name: str) -> None:
    theirs, ours = parameters_of(SETTINGS[name]), inspect.signature(getattr(methods, name)).parameters
    for option, parameter in theirs.items():
        assert ours[option].default == parameter.default
    for option in ours.keys() - theirs.keys():
        assert ours[option].default is not inspect.Parameter.empty, "whatever is added may be left out"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_calls_by_position_and_by_name_mean_the_same(name: str) -> None:
    theirs = parameters_of(DOCUMENTED[name])
    ours = inspect.signature(getattr(cf, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for option, parameter in theirs.items():
        assert ours[option].kind is parameter.kind
        if parameter.default is not parameter.empty:
            assert ours[option].default == parameter.default
    for option in list(ours)[len(theirs) :]:
        assert ours[option].default is not inspect.Parameter.empty, "whatever is added may be left out"


def test_no_function_is_missing() -> None:
    assert set(cf.__all__) >= DOCUMENTED.keys()
