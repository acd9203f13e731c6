"""What fixes a run's bits is told by name, and what only says where it's kept or how it's shown isn't."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati import RunConfig
from cosmati.core.clock import Budget, Time
from cosmati.core.method import Method, Stage
from cosmati.core.plan import Facts, make_plan
from cosmati.methods import LabelSmoothing
from cosmati.optim import SGD, AdamW
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train import settings
from cosmati.train.assembly import ScheduledOptimizer, Turn
from cosmati.train.identity import (
    CADENCES,
    describe_loss,
    describe_model,
    describe_source,
    identify,
)
from cosmati.train.ingredients import Ingredients
from cosmati.train.options import DECLARED, describe_option
from cosmati.train.settings import identity_of, settings_of
from cosmati.train.user_code import code_digest

HERE = __name__
POLICY = PolicyFile(version=1, taxonomy="t", rules=())
TAXONOMY = Taxonomy("t", "1", (("a", ""),))
FACTOR, SEEN = 0.5, [1]


def loss(model: nn.Module, data: Any) -> Tensor:
    return model(data).sum()  # type: ignore[no-any-return]


def other_loss(model: nn.Module, data: Any, gain: float = 2.0) -> Tensor:
    return model(data).mean() * gain  # type: ignore[no-any-return]


def given(config: RunConfig | None = None, **changed: Any) -> Ingredients:
    usual: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "loss": loss,
        "data": [torch.ones(1, 2)],
        "optimizers": [SGD(lr=0.1)],
        "methods": [],
        "policy": None,
        "taxonomy": None,
        "config": config or RunConfig(budget="3ba"),
    }
    return Ingredients(**usual | changed)


BUDGET = Budget(Time.parse("3ba"), rows_per_step=8, ratio=2.0)


# Settings


def test_settings_are_what_fixes_bits_and_nothing_else() -> None:
    optimizers = [SGD(lr=0.1), AdamW(lr=0.2)]
    assert settings_of(given(optimizers=optimizers), BUDGET, 4) == {
        "budget": "3ba",
        "seed": 0,
        "precision": "float32",
        "compile_blocks": False,
        "num_threads": None,
        "deterministic": True,
        "device": None,
        "ledger": None,
        "num_microbatches": 4,
        "num_steps": 6,
        "rows_per_step": 8,
        "optimizers": [str(settings._describe(one)) for one in optimizers],
        "policy": None,
    }


def test_a_policy_is_told_by_its_digest_and_later_settings_where_they_are_used() -> None:
    config = RunConfig(budget="3ba", seed=3, gather_precision="bfloat16", num_microbatches=8)
    told = settings_of(given(config, policy=POLICY), BUDGET, 4)
    assert (told["policy"], told["gather_precision"], told["seed"]) == (POLICY.digest.hex(), "bfloat16", 3)
    assert told["num_microbatches"] == 4
    assert "virtual_shards" not in told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "mine"),
        ("task", "digits"),
        ("run_folder", "elsewhere"),
        ("progress", True),
        ("max_ranks", 8),
        ("sharding", "full"),
        ("elastic", True),
        ("change", "policy"),
        ("load_weights", "elsewhere"),
        ("resume_from", "whole"),
        ("checkpoint_async", True),
        ("checkpoint_to", "s3://there"),
        ("require_signed", True),
        ("trusted_roots", "ab"),
        ("sensitive", "a"),
        ("artifacts", (Artifact("tokenizer", "ab"),)),
        ("checkpoint_every", "2ba"),
        ("num_checkpoints", 5),
        ("evaluate_every", "2ba"),
        ("details_every", 3),
        ("check_every", 2),
        ("on_divergence", "skip"),
        ("digests_every", 2),
    ],
)
def test_a_setting_of_where_and_how_often_changes_nothing(name: str, value: object) -> None:
    changed = RunConfig(budget="3ba", **{name: value})  # type: ignore[arg-type]
    assert settings_of(given(changed), BUDGET, 1) == settings_of(given(), BUDGET, 1)


# Identity


@dataclass(frozen=True, kw_only=True)
class Changing(Method):
    """Of the user's own, with options of its own."""

    stage: ClassVar[Stage] = Stage.GRADIENT
    function: Any = None
    names: frozenset[str] = frozenset()
    scale: float = 1.0
    made: int = field(default=3, init=False)

    def own(self) -> float:
        return FACTOR


def turn(own: Callable[..., Tensor], parameters: dict[int, str], every: int, *built: torch.optim.Optimizer) -> Turn:
    scheduled = tuple(ScheduledOptimizer(one, None, (0.1,), frozenset()) for one in built)
    return Turn("turn", own, parameters, scheduled, every)


def identity(ingredients: Ingredients, parent: dict[str, object] | None = None, **changed: Any) -> dict[str, Any]:
    plan = make_plan(
        ingredients.methods,
        Facts(num_microbatches=4, rows_per_microbatch=2, positional_data=True, **{"has_ledger": True} | changed),
    )
    model = ingredients.model
    turns = [
        turn(loss, {0: "weight"}, 1, torch.optim.SGD([model.weight], lr=0.1)),  # type: ignore[list-item]
        turn(other_loss, {1: "bias"}, 2, torch.optim.SGD([{"params": [model.bias]}, {"params": []}], lr=0.1)),
    ]
    return identity_of(ingredients, plan, turns, model, BUDGET, parent or {})


def test_an_identity_holds_all_that_fixes_bits_and_the_cadences() -> None:
    methods = [LabelSmoothing(smoothing=0.1), Changing(function=loss)]
    config = RunConfig(budget="3ba", details_every=7)
    ingredients = given(config, methods=methods, policy=POLICY, taxonomy=TAXONOMY)
    known = dict.fromkeys(("budget", "num_steps", "optimizers", "policy", "num_threads", "device"), 1)
    told = identity(ingredients, {"run": "x"}, settings={**known, "seed": 5, "precision": "float32", "ledger": None})
    model = ingredients.model
    expected = identify(
        model=describe_model(model, [loss, other_loss]),
        loss=[
            {"parameters": ["weight"], "every": 1, **describe_loss(loss, model)},
            {"parameters": ["bias"], "every": 2, **describe_loss(other_loss, model)},
        ],
        data=describe_source(ingredients.data),
        taxonomy=TAXONOMY.digest.hex(),
        policy=POLICY.digest.hex(),
        optimizers=[settings._describe(SGD(lr=0.1))],
        groups=[[["weight"]], [["bias"], []]],
        # In the order of their stages.
        methods=["LabelSmoothing()", told["methods.1"]],
        method_options=[{}, settings._options(methods[1])],
        settings={"seed": 5, "precision": "float32", "ledger": True},
        budget={"span": "3ba", "ratio": 2.0},
        cadence={name: getattr(config, name) for name in CADENCES},
        parent={"run": "x"},
    )
    assert told == expected
    assert told["cadence.details_every"] == 7
    assert told["methods.1"].startswith("Changing(function=<function loss")
    assert told["settings.ledger"] is True


def test_a_taxonomy_counts_only_under_a_policy_and_artifacts_where_there_are_any() -> None:
    told = identity(given(taxonomy=TAXONOMY), has_ledger=False)
    assert (told["taxonomy"], told["policy"], told["settings.ledger"]) == (None, None, False)
    assert not [name for name in told if name.startswith("artifacts")]
    assert identity(given(policy=POLICY))["taxonomy"] is None
    named = RunConfig(budget="3ba", artifacts=(Artifact("tokenizer", "ab"), Artifact("base weights", "cd", name="x")))
    found = {name: value for name, value in identity(given(named)).items() if name.startswith("artifacts")}
    assert found == {"artifacts.tokenizer": "ab", "artifacts.base weights x": "cd"}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (None, {}),
        (Path("/runs/first"), {"asked": "first"}),
        (Path("/runs/first/checkpoints/step-70012"), {"asked": "first", "asked_step": 70012}),
        (Path("/runs/first/checkpoints/step-last"), {"asked": "first", "asked_step": None}),
        (Path("/runs/first/checkpoints/step-x3"), {"asked": "first", "asked_step": None}),
        (Path("weights.safetensors"), {"asked": "weights.safetensors"}),
    ],
)
def test_weights_that_are_asked_for_are_told_by_run_and_step(path: Path | None, told: dict[str, object]) -> None:
    assert settings._asked_parent(path) == told
    parent = {n.removeprefix("parent."): v for n, v in identity(given()).items() if n.startswith("parent")}
    assert parent == {"parent": None}


def test_a_parent_whose_weights_were_loaded_is_told_before_the_one_that_is_asked_for() -> None:
    config = RunConfig(budget="3ba", load_weights="/runs/first")  # type: ignore[arg-type]
    assert identity(given(config))["parent.asked"] == "first"
    told = identity(given(config), {"run": "x"})
    assert (told["parent.run"], "parent.asked" in told) == ("x", False)


# Methods


def test_of_a_method_what_its_call_does_not_tell_is_told() -> None:
    assert settings._options(LabelSmoothing(smoothing=0.1)) == {}
    told = settings._options(Changing(function=loss, names=frozenset("ba"), scale=2.0))
    assert told == {
        "function": describe_option(loss),
        "names": ["'a'", "'b'"],
        "code": code_digest(Changing.own),
        "globals": {"FACTOR": 0.5},
    }


class Falling:
    """A schedule of the user's own, which prints nothing."""

    def __init__(self, power: float) -> None:
        self.power = power

    def multiplier(self, elapsed: float, budget: Any) -> float:
        return elapsed**self.power


@dataclass(frozen=True)
class Printed:
    """Prints itself."""

    power: float

    def multiplier(self, elapsed: float, budget: Any) -> float:
        return elapsed**self.power


class FallingLess(Falling):
    """Its code is written in both classes."""

    forward_caches = ("SEEN",)

    @functools.lru_cache  # noqa: B019
    def above(self) -> Any:
        return FACTOR, SEEN

    @torch.no_grad()
    def wrapped(self) -> int:
        return 3


def test_an_option_of_a_class_of_ones_own_is_told_with_that_classs_code() -> None:
    code = code_digest(Falling.multiplier)
    assert settings._told(Falling(2)) == {"is": f"{HERE}.Falling", "power": 2, "code": code}
    assert settings._told(Printed(2.0)) == {"is": "Printed(power=2.0)", "code": code_digest(Printed.multiplier)}
    assert settings._told(3) == 3
    assert settings._told(loss) == describe_option(loss)


def test_the_code_of_a_class_is_that_of_its_bases_too_as_written_in_the_order_of_names() -> None:
    assert settings._code_of(int) == settings._code_of(torch.optim.SGD) == settings._code_of(SGD) == {}
    above, wrapped = FallingLess.above.__wrapped__, FallingLess.wrapped.__wrapped__  # type: ignore[attr-defined]
    assert settings._code_of(FallingLess) == {
        "code": code_digest(Falling.multiplier, above, wrapped),
        "globals": {"FACTOR": 0.5, "SEEN": DECLARED},
    }
    assert settings._code_of(Falling) == {"code": code_digest(Falling.multiplier)}


# Optimizers


class Own(torch.optim.SGD):
    """Has options and a count of its own."""

    def __init__(self, parameters: Any, factor: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor, self.num_calls, self._hidden = factor, 3, 4

    def state_dict(self) -> Any:
        return {**super().state_dict(), "num_calls": self.num_calls}


class Failing(torch.optim.SGD):
    """Can't tell its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor = 2

    def state_dict(self) -> Any:
        raise RuntimeError


def test_a_built_optimizer_is_told_by_its_groups_without_their_parameters() -> None:
    model = nn.Linear(2, 1)
    built = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1, momentum=0.9)
    told = settings._describe(built)
    groups: Any = told["groups"]
    assert told.keys() == {"is", "groups"}
    assert told["is"] == "SGD"
    assert [(one["lr"], one["momentum"], "params" in one) for one in groups] == [(0.1, 0.9, False), (0.2, 0.9, False)]
    assert [one.keys() for one in groups] == [built.param_groups[0].keys() - {"params"}] * 2


def test_an_optimizer_of_ones_own_is_told_by_its_options_and_code_but_for_what_its_state_counts() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    told = settings._describe(Own(parameters, 2.0))
    assert (told["is"], told["options"]) == ("Own", {"factor": 2.0})
    assert told["code"] == code_digest(Own.state_dict)
    assert settings._describe(Failing(parameters))["options"] == {"factor": 2}
    assert settings._kept(Failing(parameters)) == {"defaults", "state", "param_groups"}
    assert settings._kept(Own(parameters, 2.0)) == {"defaults", "state", "param_groups", "num_calls"}
    plain = torch.optim.SGD(parameters)
    assert settings._kept(plain) == {"defaults", "state", "param_groups"}


def takes(name: str, parameter: nn.Parameter) -> bool:
    return "weight" in name


def test_a_configuration_is_told_by_its_fields_and_whom_it_takes_by_name() -> None:
    told = settings._describe(SGD(lr=0.1, momentum=0.9, schedule=Falling(2), parameters=takes))
    assert told == {
        "is": "SGD",
        "lr": 0.1,
        "schedule": {"is": f"{HERE}.Falling", "power": 2, "code": code_digest(Falling.multiplier)},
        "parameters": "takes",
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "decay_vectors": True,
        "fused": False,
    }
    assert "cautious" not in settings._describe(AdamW(lr=0.1))
    assert settings._describe(AdamW(lr=0.1, cautious=True))["cautious"] is True

    class OwnConfiguration(SGD):
        def extra(self) -> int:
            return 3

    told = settings._describe(OwnConfiguration(lr=0.1))
    assert told["is"] == OwnConfiguration.__qualname__
    assert told["code"] == code_digest(OwnConfiguration.extra)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("*.weight", "*.weight"),
        (("a", "b"), "('a', 'b')"),
        (None, None),
        (True, True),
        (3, 3),
        (1.5, 1.5),
        (takes, "takes"),
        (Falling, "Falling"),
    ],
)
def test_whom_an_optimizer_takes_is_told_without_an_address(value: object, told: object) -> None:
    assert settings._name(value) == told
