"""The functional interface has the signatures that users of Composer know, and every method a method's form."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import cosmati.methods.functional as cf
from cosmati import methods
from cosmati.core.method import Method

FOLDER = Path(methods.__file__).parent

SIGNATURES: dict[str, dict[str, Any]] = {
    "apply_alibi": {"optimizers": None},
    "apply_blurpool": {
        "replace_convs": True,
        "replace_maxpools": True,
        "blur_first": True,
        "min_channels": 16,
        "optimizers": None,
    },
    "apply_channels_last": {},
    "apply_gradient_clipping": {"fsdp_enabled": False},
    "apply_factorization": {
        "factorize_convs": True,
        "factorize_linears": True,
        "min_channels": 512,
        "latent_channels": 0.25,
        "min_features": 512,
        "latent_features": 0.25,
        "optimizers": None,
    },
    "apply_gated_linear_units": {
        "optimizers": None,
        "act_fn": None,
        "gated_layer_bias": False,
        "non_gated_layer_bias": False,
    },
    "apply_gyro_dropout": {"p": 0.5, "sigma": 256, "tau": 16},
    "apply_low_precision_groupnorm": {"precision": None, "optimizers": None},
    "apply_low_precision_layernorm": {"precision": None, "optimizers": None},
    "apply_ghost_batchnorm": {"ghost_batch_size": 32, "optimizers": None},
    "apply_squeeze_excite": {"latent_channels": 64, "min_channels": 128, "optimizers": None},
    "apply_stochastic_depth": {
        "stochastic_method": "block",
        "drop_rate": 0.2,
        "drop_distribution": "linear",
        "optimizers": None,
    },
    "apply_weight_standardization": {"n_last_layers_ignore": 0},
    "augmix_image": {"severity": 3, "depth": -1, "width": 3, "alpha": 1.0, "augmentation_set": "all"},
    "randaugment_image": {"severity": 9, "depth": 2, "augmentation_set": "all"},
    "colout_batch": {"p_row": 0.15, "p_col": 0.15, "resize_target": "auto"},
    "compute_ema": {"smoothing": 0.99},
    "cutmix_batch": {"length": None, "alpha": 1.0, "bbox": None, "indices": None, "uniform_sampling": False},
    "cutout_batch": {"num_holes": 1, "length": 0.5, "uniform_sampling": False},
    "freeze_layers": {"freeze_start": 0.5, "freeze_level": 1.0},
    "mixup_batch": {"mixing": None, "alpha": 0.2, "indices": None},
    "resize_batch": {},
    "select_using_loss": {},
    "set_batch_sequence_length": {},
    "should_selective_backprop": {},
    "smooth_labels": {"smoothing": 0.1},
}


def sources() -> list[Path]:
    return [path for path in FOLDER.glob("*.py") if path.stem not in {"__init__", "functional", "layers"}]


def test_siblings_do_not_import_siblings() -> None:
    for path in sources():
        imported = {
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        siblings = [name for name in imported if name.startswith("cosmati.methods")]
        assert all(name.startswith("cosmati.methods.building_blocks.") for name in siblings), path.name


@pytest.mark.parametrize("method", methods.ALL, ids=lambda method: method.__name__)
def test_methods_are_frozen_keyword_only_and_staged(method: type[Method]) -> None:
    fields = [field for field in dataclasses.fields(method) if field.init]
    assert all(field.kw_only for field in fields)
    assert method.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert method.stage is not None
    assert (method.__doc__ or "").strip()


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_the_known_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(cf, name)).parameters
    for option, default in SIGNATURES[name].items():
        assert parameters[option].default == default
        assert parameters[option].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
