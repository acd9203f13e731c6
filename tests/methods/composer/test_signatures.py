"""Functions take what Composer's documentation (0.32) says, in its order, by its names and with its defaults."""

from __future__ import annotations

import inspect

import pytest

import cosmati.methods.functional as cf

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


@pytest.mark.parametrize("name", DOCUMENTED)
def test_calls_by_position_and_by_name_mean_the_same(name: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def documented({DOCUMENTED[name]}): ...", scope)
    theirs = inspect.signature(scope["documented"]).parameters  # type: ignore[arg-type]
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
