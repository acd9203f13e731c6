"""Of a module those places are told that it has beside what every module has, and those that its code names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm

from cosmati.train.held import Place, places_in

COUNT = 0
TABLE: dict[str, Any] = {}
Hook = Callable[[nn.Module, Callable[..., Any]], Any]


def found(root: object, name: str = "") -> dict[str, Place]:
    """Return the places in a model by name; each name is there once."""
    places = list(places_in({name: root}))
    by_name = {place.name: place for place in places}
    assert len(by_name) == len(places), [place.name for place in places]
    return by_name


def named(root: object) -> list[str]:
    return [*found(root)]


def test_parameters_and_buffers_are_told_with_their_owners() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].register_buffer("kept", torch.zeros(2))
    model[1].register_buffer("lost", torch.ones(2), persistent=False)
    model[1].register_buffer("empty", None)
    for name in ("", "model"):
        prefix = f"{name}." if name else ""
        places = {key.removeprefix(prefix): place for key, place in found(model, name).items()}
        tensors = {key: place for key, place in places.items() if place.kind != "attribute"}
        assert [(key, place.kind, place.is_persistent) for key, place in tensors.items()] == [
            ("0.weight", "parameter", False),
            ("1.weight", "parameter", False),
            ("1.bias", "parameter", False),
            ("1.running_mean", "buffer", True),
            ("1.running_var", "buffer", True),
            ("1.num_batches_tracked", "buffer", True),
            ("1.kept", "buffer", True),
            ("1.lost", "buffer", False),
            ("1.empty", "buffer", True),
        ]
        assert [place.owner for place in tensors.values()] == [model[0], *[model[1]] * 8]
        held = [model[0].weight, *model[1].parameters(), *model[1]._buffers.values()]
        assert all(place.value is one for place, one in zip(tensors.values(), held, strict=True))


def test_a_buffer_can_be_set_and_a_parameter_cannot() -> None:
    model = nn.BatchNorm1d(2)
    places = found(model)
    assert places["weight"].put is None
    put, mean = places["running_mean"].put, torch.ones(2)
    assert put is not None
    put(mean)
    assert model.running_mean is mean


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_script_takes_no_other_buffer() -> None:
    model = torch.jit.script(nn.BatchNorm1d(2))
    places = found(model)
    assert places["running_mean"].kind == "buffer"
    assert places["running_mean"].put is None


def test_a_layer_in_two_places_is_told_once() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.note = 3  # type: ignore[assignment]
    both = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])
    assert [name for name in named(both) if "note" in name or "weight" in name] == ["0.0.weight", "0.0.note"]
    assert [place.name for place in places_in({"a": layer, "b": layer}) if "weight" in place.name] == ["a.weight"]


def test_tensors_of_modules_may_have_attributes() -> None:
    model: Any = nn.BatchNorm1d(2)
    for tensor in (model.weight, model.running_mean):
        tensor.note = 3
    places = found(model)
    assert [name for name in places if "note" in name] == ["weight.note", "running_mean.note"]
    put = places["weight.note"].put
    assert put is not None
    put(4)
    assert model.weight.note == 4


@pytest.mark.parametrize(
    "add",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ],
)
def test_what_a_module_s_hook_names_is_told(add: Hook) -> None:
    mean = torch.zeros(())

    def hook(*_: object) -> None:
        assert mean is not None

    for hook_or_bound in (hook, partial(hook, 1)):
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        add(model[0], hook_or_bound)
        expected = ["0.(hook).mean"] if hook_or_bound is hook else []
        assert [name for name in named(model) if "hook" in name] == expected


def test_the_loop_s_own_hooks_are_left_out() -> None:
    mean = torch.zeros(())

    def hook(*_: object) -> None:
        assert mean is not None

    model = nn.Linear(2, 2)
    for module, is_told in (("cosmati.train.somewhere", False), ("cosmatics.hooks", True), (__name__, True)):
        hook.__module__ = module
        handle = model.register_forward_hook(hook)
        assert ("(hook).mean" in named(model)) == is_told
        handle.remove()


@pytest.mark.parametrize("add", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_what_a_parameter_s_hook_names_is_told(add: Callable[[Tensor, Callable[..., None]], Any]) -> None:
    norm = torch.zeros(())

    def hook(_: Tensor) -> None:
        assert norm is not None

    model = nn.Linear(2, 2)
    add(model.weight, hook)
    assert [name for name in named(model) if "hook" in name] == ["weight.(hook).norm"]


def test_what_every_module_has_is_no_state() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.problem_type = None

    model = Layer()
    places = found(model)
    assert [*places] == ["scale"]
    assert found(model, "loss")["loss.scale"].kind == "attribute"


def test_what_torch_computes_anew_before_each_pass_is_no_state() -> None:
    with pytest.warns(FutureWarning):
        normed = weight_norm(nn.Linear(2, 2, bias=False))
    pruned = prune.l1_unstructured(nn.Linear(2, 2, bias=False), "weight", amount=1)
    assert [name for name in named(normed) if name.startswith("weight")] == ["weight_g", "weight_v"]
    assert [name for name in named(pruned) if name.startswith("weight")] == ["weight_orig", "weight_mask"]

    class Named:
        name = "scale"

        def __call__(self, *_: object) -> None: ...

    hooked = nn.Linear(2, 2)
    hooked.scale = 3  # type: ignore[assignment]
    hooked.register_forward_pre_hook(Named())
    assert "scale" in named(hooked)  # A hook of the user's own.


class Reads(nn.Module):
    """Names a global in forward, in what forward calls, and in what nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, rows: object) -> object:
        return self.inner.encode(rows), COUNT

    def decode(self, rows: object) -> object:
        return TABLE


class Inner(nn.Module):
    def encode(self, rows: object) -> object:
        return TABLE

    def forward(self, rows: object) -> object:
        return rows

    def outer(self, rows: object) -> object:
        return COUNT


def test_what_forward_calls_is_followed_into_the_layers_within() -> None:
    assert named(Reads()) == ["forward.COUNT", "inner.encode.TABLE"]
    assert named(nn.Sequential(Reads())) == ["0.forward.COUNT", "0.inner.encode.TABLE"]
    assert named(Inner()) == []


def test_an_instance_s_own_forward_and_a_library_s_are_no_methods() -> None:
    model = nn.Identity()
    assert named(model) == []
    own = Inner()
    own.forward = lambda rows: (rows, COUNT)  # type: ignore[method-assign]
    assert named(own) == ["forward.COUNT"]


def test_what_a_class_declares_holds_for_its_forward() -> None:
    class Declares(Reads):
        forward_caches = ("TABLE",)

        def forward(self, rows: object) -> object:
            return COUNT, TABLE

    assert named(Declares()) == ["forward.COUNT", "inner.encode.TABLE"]
