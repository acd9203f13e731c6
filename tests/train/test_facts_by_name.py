"""Facts of a run come back from JSON under dotted names, and tell of model and data what fixes the bits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import ChangedRunError
from cosmati.train.identity import (
    Change,
    _attribute,
    changes,
    check_resume,
    describe_loss,
    describe_model,
    flatten,
    identify,
    schedules_in,
)
from cosmati.train.options import Described

SCALE = 2.0
LAYER = nn.Linear(1, 1)


def test_a_fact_has_a_label_in_words_and_values_that_fit_a_line() -> None:
    assert Change("seed", 1, None).label == "seed"
    assert Change("optimizers.0.lr", 1, None).label == "optimizers 0: learning rate"
    assert Change("num_microbatches", 4, 2).label == "V"
    assert Change("a.rows_per_step", 4, 2).label == "a: rows a step"
    assert str(Change("lr", None, 0.1)) == "learning rate 0.1, was absent"
    exact, longer = "a" * 30 + "b" * 30, "a" * 30 + "b" * 31
    assert str(Change("x", exact, longer)) == f"x {'a' * 24}...{'b' * 24}, was {exact}"
    assert str(Change("x", 0, False)) == "x False, was 0"


def test_changes_come_in_the_order_of_names_and_a_missing_one_is_as_none() -> None:
    was, now = {"c": 1, "a": None, "d": 4, "same": 1}, {"b": 2, "c": 3, "same": 1, "gone": None}
    assert changes(was, now) == [Change("b", None, 2), Change("c", 1, 3), Change("d", 4, None)]


def test_a_value_that_is_no_number_is_the_same_as_before() -> None:
    was = identify(data={"fill": float("nan"), "scales": [1.0, float("nan")], "by": {"x": float("nan")}})
    now = identify(data={"fill": float("nan"), "scales": [1.0, float("nan")], "by": {"x": float("nan")}})
    assert changes(was, now) == []
    assert [change.name for change in changes(was, {**now, "data.fill": 1.0, "data.scales.0": float("nan")})] == [
        "data.fill",
        "data.scales.0",
    ]


def test_schedules_are_told_by_the_number_of_their_optimizer() -> None:
    recipe = {
        "optimizers.0.schedule": "Cosine()",
        "optimizers.12.schedule": "Linear()",
        "optimizers.0.schedule.warmup": "x",
        "my.optimizers.0.schedule": "x",
        "optimizers.1234567890.schedule": "x",
        "optimizers.123456789.schedule": "y",
        "optimizers.a.schedule": "x",
    }
    assert schedules_in(recipe) == {0: "Cosine()", 12: "Linear()", 123456789: "y"}
    assert schedules_in({}) == {}


def test_several_wrong_facts_offer_the_first_that_may_count() -> None:
    was = {"seed": 1, "loss.options.first": 1, "model.options.0.is": "A", "model.options.0.second": 1}
    with pytest.raises(ChangedRunError, match="forward_caches") as caught:
        check_resume(was, dict.fromkeys(was, 2), asked=(), where="It")
    assert str(caught.value).endswith("say so in its class or function: forward_caches = ('first',).")


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("model.options.0.kept", "kept"),
        ("loss.0.closure.scale.1.deep", "scale"),
        ("loss.globals.TABLE.key", "TABLE"),
        ("loss.closure.globals.x", "x"),
        ("loss.owner.globals", "globals"),
        ("loss.0.scale.3", "scale"),
    ],
)
def test_a_change_is_a_globals_or_else_the_last_attributes(name: str, attribute: str) -> None:
    assert _attribute(name) == attribute


def test_leaves_have_dotted_names_and_what_is_empty_is_none() -> None:
    tree = {"a": [1, (2, {"b": 3})], "c": {}, "d": [], 5: "x", "e": {"f": ()}}
    assert dict(flatten(tree)) == {"a.0": 1, "a.1.0": 2, "a.1.1.b": 3, "c": None, "d": None, "5": "x", "e.f": None}
    assert [*flatten(3)] == [("", 3)]
    assert [*flatten([], "p")] == [("p", None)]
    assert [*flatten([7], "p")] == [("p.0", 7)]


def test_facts_come_as_json_has_them_without_addresses_and_sets_in_order() -> None:
    told = identify(
        a={"b": "<f at 0x7f00ab> and <g at 0xff>"}, s={"c", "a", "b"}, f=frozenset({2, 10}), d=torch.float16, n=(1, 2.5)
    )
    assert told == {
        "a.b": "<f> and <g>",
        "s": ["a", "b", "c"],
        "f": ["10", "2"],
        "d": "torch.float16",
        "n.0": 1,
        "n.1": 2.5,
    }


class Blocks(nn.Module):
    """Layers that are frozen, evaluated, transposed, buffered and hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
        self.again = self.last
        self.first.bias.requires_grad_(False)
        self.last.weight = nn.Parameter(torch.zeros(3, 2).t())
        self.first.eval()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.scale = 2.0
        self.seen = 0
        self.kept = torch.ones(1)
        self.written = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.written = x
        return self.last(self.first(x)) * self.scale * SCALE


def test_a_models_structure_is_told() -> None:
    told: Any = describe_model(Blocks())
    assert list(told) == ["modules", "options", "parameters", "buffers", "contents", "globals"]
    assert told["modules"] == {
        "(model)": "Blocks()",
        "first": "Linear(in_features=2, out_features=3, bias=True) in eval mode",
        "last": "Linear(in_features=3, out_features=2, bias=False)",
    }
    assert told["options"]["(model)"]["scale"] == 2.0
    assert {*told["options"]} == {"(model)"}
    assert told["parameters"] == {
        "first.weight": "float32[3, 2]",
        "first.bias": "float32[3] frozen",
        "last.weight": "float32[2, 3] strides [1, 2]",
        "again.weight": "float32[2, 3] strides [1, 2]",
    }
    assert told["buffers"] == {"steps": "int32[2]", "table": "float32[2]"}
    assert told["contents"] == {
        "(model)": {n: Described().value(torch.ones(k)) for n, k in (("kept", 1), ("table", 2))}
    }
    assert told["globals"] == {"SCALE": 2.0}


def test_of_a_plain_model_nothing_empty_is_told() -> None:
    assert list(describe_model(nn.Linear(1, 1))) == ["modules", "options", "parameters", "buffers"]
    assert describe_model(nn.Linear(1, 1))["options"] == {}


class Settable(nn.Module):
    """Has an attribute that only a loss reads."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.weight, self.temperature = nn.Parameter(torch.ones(1)), temperature


def heated(model: Any, data: Any) -> Tensor:
    return model.weight * model.temperature * data


def test_what_a_loss_reads_of_the_model_counts() -> None:
    assert describe_model(Settable(3.0))["options"] == {}
    assert describe_model(Settable(3.0), [heated])["options"] == {"(model)": {"temperature": 3.0}}


def remember(model: Any, data: Any) -> Tensor:
    model.table = data
    return model.weight


def test_what_a_loss_writes_to_the_model_is_no_content_of_it() -> None:
    model = Settable(3.0)
    model.table = torch.ones(2)
    assert describe_model(model)["contents"] == {"(model)": {"table": Described().value(torch.ones(2))}}
    assert "contents" not in describe_model(model, [remember])


def halve(*given: Any) -> Any:
    return given[-1] * 0.5


class Halving:
    """A hook that is an object."""

    __slots__ = ()

    def __call__(self, *given: Any) -> Any:
        return given[-1] * 0.5


def test_hooks_of_each_kind_are_told_in_their_order() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.register_forward_pre_hook(lambda _, given: given)
    model.register_forward_hook(halve)
    model.register_full_backward_pre_hook(halve)
    model.register_full_backward_hook(Halving())
    cast("nn.Linear", model[1]).weight.register_post_accumulate_grad_hook(halve)
    told: Any = describe_model(model)["hooks"]
    here = "tests.train.test_facts_by_name"
    assert {*told} == {"(model)", "1.weight"}
    assert [one["is"] if isinstance(one, dict) else one for one in told["(model)"]] == [
        f"{here}.test_hooks_of_each_kind_are_told_in_their_order.<locals>.<lambda>",
        f"{here}.halve",
        f"{here}.halve",
        f"{here}.Halving",
    ]
    assert "code" in told["1.weight"][0]


class Holding:
    """A loss that holds a part of the model, and a table of its own."""

    def __init__(self, model: nn.Linear) -> None:
        self.part, self.table, self.scale = model.weight, torch.ones(2), 3.0
        self.statistics: Any = getattr(model, "statistics", None)

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        return self.part.sum() * self.scale


def test_a_loss_is_told_without_what_it_holds_of_the_model() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("statistics", torch.ones(1))
    told = describe_loss(Holding(model), model)
    assert told["is"] == "tests.train.test_facts_by_name.Holding"
    assert told["part"] == told["statistics"] == "of the model"
    assert told["table"] == Described().value(torch.ones(2))
    assert told["scale"] == 3.0
    assert "code" not in told


def test_a_sparse_parameter_has_no_order_in_memory() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    assert describe_model(model)["parameters"] == {"weight": "float32[2, 2]"}


class Naming(nn.Module):
    """Names, by a global, the very layer that it holds; and has one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYER
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("second", self.first)

    def forward(self, x: Tensor) -> Tensor:
        return LAYER(x)


def test_a_layer_that_is_named_by_a_global_is_told_once_and_a_shared_buffer_under_each_name() -> None:
    told = describe_model(Naming())
    assert "globals" not in told
    assert told["buffers"] == {"first": "float32[3]", "second": "float32[3]"}
