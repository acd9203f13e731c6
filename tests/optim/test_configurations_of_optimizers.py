"""What a configuration of an optimizer refuses, takes and builds, each option by itself, and who has a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from cosmati import optim
from cosmati.errors import PlanError
from cosmati.optim import SGD, AdamW, Constant, Cosine, Muon, Optimizer, assign_parameters, matrices
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.optimizers import _has_narrow, _implementation, parameter_groups

MATRIX, VECTOR = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
NAMED = [("w", MATRIX), ("b", VECTOR)]


def options_of(optimizer: torch.optim.Optimizer, place: int = 0) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[place].items() if key != "params"}


def test_sgd_gives_pytorch_all_that_it_is_told() -> None:
    built = SGD(lr=0.5, momentum=0.25, nesterov=True, weight_decay=0.125).build(NAMED)
    assert type(built) is torch.optim.SGD
    told = {"lr": 0.5, "momentum": 0.25, "nesterov": True, "weight_decay": 0.125, "foreach": True, "fused": None}
    assert {key: options_of(built)[key] for key in told} == told
    assert [len(group["params"]) for group in built.param_groups] == [2]
    usual = options_of(SGD(lr=0.5).build(NAMED))
    assert usual == options_of(torch.optim.SGD([MATRIX], lr=0.5, foreach=True))
    split = SGD(lr=0.5, weight_decay=0.125, decay_vectors=False).build(NAMED)
    assert [options_of(split, place)["weight_decay"] for place in (0, 1)] == [0.125, 0.0]
    fused = options_of(SGD(lr=0.5, fused=True).build(NAMED))
    assert (fused["fused"], fused["foreach"]) == (True, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_narrow_momentum_on_a_processor_takes_the_plain_loop(dtype: torch.dtype, momentum: float) -> None:
    narrow = dtype in (torch.float16, torch.bfloat16)
    for named in (
        [*NAMED, ("n", Parameter(torch.ones(2, dtype=dtype)))],
        [("n", Parameter(torch.ones(2, dtype=dtype)))],
    ):
        assert _has_narrow(named) is narrow
        built = SGD(lr=0.5, momentum=momentum).build(named)
        assert options_of(built)["foreach"] is not (narrow and momentum > 0)
        assert options_of(AdamW(lr=0.5).build(named))["foreach"] is True
    assert not _has_narrow([("n", Parameter(torch.ones(2, dtype=dtype, device="meta")))])


def test_an_implementation_is_named_once() -> None:
    assert _implementation(fused=False) == _implementation(fused=False, foreach=True) == {"foreach": True}
    assert _implementation(fused=False, foreach=False) == {"foreach": False}
    assert _implementation(fused=True) == _implementation(fused=True, foreach=False) == {"fused": True}


def test_adamw_is_pytorchs_but_for_what_that_one_lacks() -> None:
    options: dict[str, Any] = {"lr": 0.5, "betas": (0.25, 0.75), "eps": 0.125, "weight_decay": 0.0625}
    plain = AdamW(**options).build(NAMED)
    assert type(plain) is torch.optim.AdamW
    assert {key: options_of(plain)[key] for key in (*options, "foreach", "fused")} == options | {
        "foreach": True,
        "fused": None,
    }
    assert options_of(AdamW(lr=0.5).build(NAMED)) == options_of(torch.optim.AdamW([MATRIX], lr=0.5, foreach=True))
    assert options_of(AdamW(fused=True, **options).build(NAMED))["fused"] is True
    cautious = AdamW(cautious=True, decay_vectors=False, **options).build(NAMED)
    assert type(cautious) is BoundedAdamW
    assert options_of(cautious) == options | {"cautious": True}
    assert options_of(cautious, 1) == options | {"cautious": True, "weight_decay": 0.0}
    round_ = AdamW(hyperball=True, **options | {"weight_decay": 0.0}).build(NAMED[:1])
    assert type(round_) is BoundedAdamW
    assert options_of(round_) == options | {"hyperball": True, "weight_decay": 0.0}


@pytest.mark.parametrize("more", [{"cautious": True}, {"hyperball": True}, {"cautious": True, "hyperball": True}])
def test_fused_adamw_has_neither_of_the_two(more: dict[str, bool]) -> None:
    AdamW(lr=0.1, **more)
    with pytest.raises(PlanError, match=r"^AdamW\(fused=True\) is PyTorch's kernel, which has neither"):
        AdamW(lr=0.1, fused=True, **more)


def test_muon_gives_on_all_that_it_is_told() -> None:
    told: dict[str, Any] = {"lr": 0.5, "momentum": 0.25, "nesterov": False, "weight_decay": 0.125, "num_iterations": 2}
    told |= {"scale": "rms", "bfloat16": True, "cautious": True}
    assert options_of(Muon(**told).build(NAMED[:1])) == told
    usual = {"lr": 0.5, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "num_iterations": 5}
    usual |= {"scale": "aspect", "bfloat16": False}
    assert options_of(Muon(lr=0.5).build(NAMED[:1])) == usual
    assert options_of(Muon(lr=0.5, hyperball=True).build(NAMED[:1])) == usual | {"hyperball": True}
    assert Muon(lr=0.5).takes("w", MATRIX)
    assert not Muon(lr=0.5).takes("b", VECTOR)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_a_configuration_has_a_rate_and_a_schedule_that_is_made(kind: Any) -> None:
    kind(lr=0)
    made = kind(lr=1.0)
    assert (made.schedule, kind(lr=1.0, schedule=Cosine()).schedule) == (Constant(), Cosine())
    for lr in (-1e-9, float("nan")):
        with pytest.raises(PlanError, match=rf"^{kind.__name__}\(lr={lr}\): a learning rate is a number >= 0\.$"):
            kind(lr=lr)
    for schedule in (Cosine, 0.5, None, lambda fraction, budget: 1.0):
        with pytest.raises(PlanError, match=rf"^{kind.__name__}\(schedule=.* is no schedule\. Give one that is made"):
            kind(lr=1.0, schedule=schedule)
    foreign = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([MATRIX], lr=0.1), 10)
    with pytest.raises(PlanError, match=rf"^{kind.__name__}\(schedule=\.\.\.\): ") as caught:
        kind(lr=1.0, schedule=foreign)
    assert "is no schedule" not in str(caught.value)
    assert "Cosine" in str(caught.value)


@pytest.mark.parametrize("name", ["SGDW", "Aurora", "Lion", "NorMuon", "ScheduleFreeAdamW", "Sophia", "SOAP"])
def test_what_has_checks_of_its_own_has_those_of_all(name: str) -> None:
    required = {"num_labels": 1} if name == "Sophia" else {}
    with pytest.raises(PlanError, match=rf"^{name}\(lr=-1\.0\): a learning rate is a number >= 0\.$"):
        getattr(optim, name)(lr=-1.0, **required)
    with pytest.raises(PlanError, match=rf"^{name}\(schedule=0\.5\) is no schedule"):
        getattr(optim, name)(lr=1.0, schedule=0.5, **required)


class Flat:
    def multiplier(self, fraction_elapsed: float, budget: object) -> float:
        return 1.0


def test_a_schedule_of_ones_own_is_taken_and_its_class_is_not() -> None:
    assert isinstance(SGD(lr=1.0, schedule=Flat()).schedule, Flat)
    with pytest.raises(PlanError, match="is no schedule"):
        SGD(lr=1.0, schedule=Flat)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "taken"),
    [
        ("*", ["w", "b", "W"]),
        ("w", ["w"]),
        (("b", "W"), ["b", "W"]),
        ((), []),
        (lambda name, parameter: parameter.ndim == 1 and name != "W", ["b"]),
    ],
)
def test_names_are_matched_by_their_case_and_predicates_see_both(parameters: Any, taken: list[str]) -> None:
    optimizer = SGD(lr=1.0, parameters=parameters)
    assert [name for name, one in [*NAMED, ("W", VECTOR)] if optimizer.takes(name, one)] == taken


def test_the_first_that_takes_a_parameter_has_it_and_orders_are_kept() -> None:
    named = [(name, Parameter(torch.ones(1))) for name in ("a", "b", "c", "d")]
    shares = assign_parameters([SGD(lr=1.0, parameters="[bd]"), SGD(lr=1.0, parameters="[abc]")], named)
    assert shares == [[named[1], named[3]], [named[0], named[2]]]


@pytest.mark.parametrize(("num", "more"), [(1, ""), (12, ""), (13, " and 1 more"), (15, " and 3 more")])
def test_who_is_left_over_is_named_up_to_twelve(num: int, more: str) -> None:
    named = [(f"n{index}", Parameter(torch.ones(1))) for index in range(num)]
    names = ", ".join(f"n{index}" for index in range(min(num, 12)))
    with pytest.raises(PlanError) as caught:
        assign_parameters([SGD(lr=1.0, parameters="w")], [("w", MATRIX), *named])
    assert str(caught.value).startswith(f"No optimizer takes {names}{more}. Add one for the rest at the end")


def only(name: str, parameter: Parameter) -> bool:
    return False


def test_who_gets_nothing_is_named_with_its_place_and_filter() -> None:
    for idle, shown in (
        (SGD(lr=1.0), r"'\*'"),
        (AdamW(lr=1.0, parameters=("x",)), r"\('x',\)"),
        (Muon(lr=1, parameters=only), "only"),
    ):
        kind = type(idle).__name__
        with pytest.raises(PlanError, match=rf"^Optimizer 1, {kind}\(parameters={shown}\), gets no parameter: nothing"):
            assign_parameters([SGD(lr=1.0), idle], NAMED)
    assert assign_parameters([], []) == []


def test_vectors_are_spared_a_decay_that_there_is() -> None:
    for decay, spare, expected in (
        (0.5, False, [(2, 0.5)]),
        (0.5, True, [(1, 0.5), (1, 0.0)]),
        (0.0, True, [(2, 0.0)]),
        (0.0, False, [(2, 0.0)]),
    ):
        groups = parameter_groups(NAMED, decay, decay_vectors=not spare)
        assert [(len(group["params"]), group["weight_decay"]) for group in groups] == expected
    assert parameter_groups(NAMED[1:], 0.5, decay_vectors=False) == [{"params": [VECTOR], "weight_decay": 0.0}]
    assert parameter_groups(NAMED[:1], 0.5, decay_vectors=False) == [{"params": [MATRIX], "weight_decay": 0.5}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.weight", True),
        ("word_embeddings.weight", False),
        ("Embed.weight", False),
        ("reembedded", False),
        ("emb", False),
        ("pos_emb.w", False),
        ("member.weight", True),
        ("wte", False),
        ("wpe.weight", False),
        ("positions", False),
        ("composition.weight", True),
        ("head.weight", False),
        ("lm_heads.0", False),
        ("ahead.weight", True),
        ("classifier.1.weight", False),
        ("classifiers.weight", True),
    ],
)
def test_embeddings_and_heads_are_told_by_a_word_of_their_path(name: str, expected: bool) -> None:
    assert matrices(name, MATRIX) is expected
    assert not matrices(name, VECTOR)


def test_other_names_of_settings_are_answered() -> None:
    for given, meant in (
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("params", "parameters"),
        ("scheduler", "schedule"),
    ):
        with pytest.raises((PlanError, TypeError), match=meant):
            SGD(**{"lr": 0.1, given: 0.1})
    assert Optimizer.owns == Optimizer.couples == frozenset()
