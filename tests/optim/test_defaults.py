"""Defaults are bits: those of the papers and of PyTorch, and the same in a configuration and in what it builds."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from cosmati import optim
from cosmati.optim import Optimizer
from cosmati.optim.stepping import GroupedOptimizer

DEFAULTS: dict[str, dict[str, Any]] = {
    # torch.optim.SGD and AdamW
    "SGD": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "decay_vectors": True, "fused": False},
    # 1711.05101, with the options of torch.optim.SGD
    "SGDW": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "decay_vectors": True},
    "AdamW": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decay_vectors": True,
        "fused": False,
        "cautious": False,
        "hyperball": False,
    },
    # 2302.06675, table 11
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0, "decay_vectors": True, "cautious": False},
    # kellerjordan.github.io/posts/muon
    "Muon": {
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.0,
        "num_iterations": 5,
        "scale": "aspect",
        "bfloat16": False,
        "cautious": False,
        "hyperball": False,
    },
    # 2510.05491
    "NorMuon": {
        "momentum": 0.95,
        "beta2": 0.95,
        "eps": 1e-8,
        "nesterov": True,
        "weight_decay": 0.0,
        "num_iterations": 5,
        "cautious": False,
    },
    # 2606.27715: the authors' release
    "Aurora": {
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.025,
        "num_iterations": 5,
        "num_rounds": 2,
        "damping": 0.5,
        "cautious": False,
        "hyperball": False,
    },
    # 2409.11321, section 6
    "SOAP": {
        "betas": (0.95, 0.95),
        "gram_beta": None,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decay_vectors": True,
        "precondition_frequency": 10,
        "max_precondition_dim": 10_000,
    },
    # 2305.14342: k = 10
    "Sophia": {
        "betas": (0.96, 0.99),
        "gamma": 0.04,
        "update_interval": 10,
        "eps": 1e-12,
        "weight_decay": 0.1,
        "decay_vectors": True,
    },
    # 2405.15682, and the authors' library
    "ScheduleFreeAdamW": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decay_vectors": True,
        "weight_lr_power": 2.0,
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_papers(name: str) -> None:
    fields = dataclasses.fields(getattr(optim, name))
    own = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    assert {key: value for key, value in own.items() if key not in ("schedule", "parameters")} == DEFAULTS[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_built_has_the_configurations_defaults(name: str) -> None:
    required = {"num_labels": 1} if name == "Sophia" else {}
    configuration: Optimizer = getattr(optim, name)(lr=0.1, **required)
    weight = Parameter(torch.zeros(4, 3))
    built = configuration.build([("weight", weight)])
    if not isinstance(built, GroupedOptimizer):  # PyTorch's: against its own defaults, but for the implementation
        direct = getattr(torch.optim, name)([weight], lr=0.1, foreach=True)
        assert built.defaults == direct.defaults
        return
    parameters = inspect.signature(type(built)).parameters
    defaults = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}
    defaults.pop("lr", None)
    # The configuration decays by default where the bare optimizer of the paper's does too.
    assert {key: defaults[key] for key in defaults if key in DEFAULTS[name]} == {
        key: value for key, value in DEFAULTS[name].items() if key in defaults
    }
    assert defaults.get("num_labels", 1) == 1
    direct = type(built)([weight], 0.1)
    assert built.param_groups[0].keys() == direct.param_groups[0].keys()
    assert {k: v for k, v in built.param_groups[0].items() if k != "params"} == {
        k: v for k, v in direct.param_groups[0].items() if k != "params"
    }


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("Constant", {"warmup": "0ba"}),
        ("Linear", {"warmup": "0ba", "t_max": "1dur", "final": 0.0}),
        ("Cosine", {"warmup": "0ba", "t_max": "1dur", "final": 0.0}),
        ("WSD", {"warmup": "0ba", "decay": "0.2dur", "final": 0.0, "shape": "linear"}),
        ("Step", {"warmup": "0ba", "factor": 0.1}),
        ("MultiStep", {"warmup": "0ba", "factor": 0.1}),
        ("Exponential", {"warmup": "0ba", "every": "1ep", "factor": 0.95}),
        ("CosineWarmRestarts", {"warmup": "0ba", "growth": 1.0, "final": 0.0}),
        ("Polynomial", {"warmup": "0ba", "t_max": "1dur", "power": 2.0, "final": 0.0}),
        ("LinearToZero", {"warmup": "0ba"}),
    ],
)
def test_schedules_start_from_nothing(name: str, defaults: dict[str, Any]) -> None:
    fields = dataclasses.fields(getattr(optim, name))
    assert {field.name: field.default for field in fields if field.default is not dataclasses.MISSING} == defaults
