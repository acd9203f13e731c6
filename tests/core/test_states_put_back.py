"""Weights and optimizers' states go back into their places whole, in place where tensors are shared, or not at all."""

from __future__ import annotations

from typing import Any

import blake3
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.state import (
    chunk_hashes,
    distinct_tensors,
    load_model_tensors,
    model_tensors,
    optimizer_tensors,
    parameter_root,
    restore_optimizer,
    root_of_chunks,
    tensor_root,
)
from cosmati.errors import CheckpointError


class Bank(nn.Module):
    """A weight, a buffer that is None at first, one that isn't kept, and one of two names."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("memory", None)
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.register_buffer("count", torch.zeros(3))
        self.inner = nn.Module()
        self.inner.register_buffer("same", self.count if tied else torch.zeros(3))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model_tensors(model).items()}


def test_tied_tensors_are_named_once_by_their_first_name() -> None:
    model = Bank()
    assert list(model_tensors(model)) == ["weight", "count"]
    assert list(model_tensors(Bank(tied=False))) == ["weight", "count", "inner.same"]
    x = torch.arange(6.0)
    views = {
        "x": x,
        "half": x[:3],
        "row": x.view(2, 3),
        "turned": x.view(3, 2).t(),
        "bits": x.view(torch.int32),
        "n": 3,
    }
    assert list(distinct_tensors(views)) == ["x", "half", "row", "turned", "bits"]
    assert list(distinct_tensors({"a": x, "b": x[:], "_orig_mod.c._orig_mod.d": x.clone()})) == ["a", "c.d"]
    empty = torch.ones(0)
    assert list(distinct_tensors({"a": empty, "b": empty})) == ["a", "b"]


def test_what_is_loaded_is_copied_in_place_and_what_is_tied_stays_tied() -> None:
    model = Bank()
    weight, count = model.weight, model.count
    saved = {"weight": torch.tensor([3.0, 4.0]), "count": torch.tensor([1.0, 2.0, 3.0])}
    load_model_tensors(model, saved)
    assert model.weight is weight
    assert model.count is model.inner.same is count
    assert (weight.tolist(), model.inner.same.tolist()) == ([3, 4], [1, 2, 3])
    saved["weight"].zero_()
    assert weight.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": None}, "fit the model: weight is missing."),
        ({"other": torch.ones(1)}, "fit the model: other isn't in the model."),
        ({"weight": torch.ones(3)}, r"weight is torch.float32 \(2,\), and was torch.float32 \(3,\)"),
        ({"weight": torch.ones(2).double()}, r"weight is torch.float32 \(2,\), and was torch.float64 \(2,\)"),
        ({"count": torch.ones(4), "weight": None}, r"count is .* \(3,\), and was .* \(4,\); weight is missing"),
        ({"scratch": torch.ones(1)}, "scratch isn't in the model"),
        ({"memory": torch.ones(1)}, "memory isn't in the model"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: dict[str, Tensor | None], said: str) -> None:
    model = Bank()
    saved = {name: value + 5 for name, value in copies(model).items()} | change
    before = copies(model)
    with pytest.raises(CheckpointError, match=said):
        load_model_tensors(model, {name: value for name, value in saved.items() if value is not None})
    assert all(torch.equal(value, before[name]) for name, value in model_tensors(model).items())


def test_five_problems_are_named_in_the_order_of_their_names() -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model_tensors(nn.Module(), {f"n{i}": torch.ones(1) for i in reversed(range(7))})
    assert str(caught.value).endswith("model: " + "; ".join(f"n{i} isn't in the model" for i in range(5)) + ".")


def test_a_run_that_goes_on_takes_buffers_that_have_grown_or_were_none() -> None:
    model = Bank()
    saved = copies(model) | {"memory": torch.tensor([7.0]), "count": torch.arange(5.0)}
    load_model_tensors(model, saved, resumes=True)
    assert model.memory is not None
    assert (model.memory.tolist(), model.count.tolist()) == ([7], [0, 1, 2, 3, 4])
    assert model.inner.same is model.count, "both names have the new one"
    assert model.memory is not saved["memory"]
    saved["count"].zero_()
    assert model.count.tolist() == [0, 1, 2, 3, 4]
    for wrong in ({"weight": torch.ones(3)}, {"scratch": torch.ones(2)}, {"other": torch.ones(1)}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            load_model_tensors(Bank(), copies(Bank()) | wrong, resumes=True)
    kinds = Bank()
    load_model_tensors(kinds, copies(Bank()) | {"count": torch.ones(3).double()}, resumes=True)
    assert (kinds.count.dtype, kinds.inner.same.dtype) == (torch.float64, torch.float64)
    kept = Bank()
    count = kept.count
    load_model_tensors(kept, copies(Bank()), resumes=True)
    assert kept.count is count, "what fits stays the very tensor"


def test_a_part_of_the_model_is_loaded_by_itself() -> None:
    model = Bank()
    load_model_tensors(model, {"weight": torch.tensor([5.0, 6.0])}, own={"weight": model.weight})
    assert (model.weight.tolist(), model.count.tolist()) == ([5, 6], [0, 0, 0])


def test_an_expanded_buffer_stays_as_it_is_or_becomes_one_of_its_own() -> None:
    model = nn.Module()
    wide = torch.ones(1, 2).expand(3, 2)
    model.register_buffer("wide", wide)
    load_model_tensors(model, {"wide": torch.ones(3, 2)})
    assert model.wide is wide
    load_model_tensors(model, {"wide": torch.arange(6.0).view(3, 2)})
    assert model.wide.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert wide.tolist() == [[1, 1]] * 3, "elements that share memory aren't written to"
    single = torch.ones(1, 2).expand(1, 2).as_strided((1, 2), (0, 1))
    model.register_buffer("wide", single)
    load_model_tensors(model, {"wide": torch.zeros(1, 2)})
    assert model.wide is single
    assert single.tolist() == [[0, 0]], "a single row repeats nothing"


def test_a_compiled_models_buffers_are_found_by_the_models_names() -> None:
    model = nn.Module()
    model.add_module("_orig_mod", Bank())
    load_model_tensors(model, copies(Bank()) | {"memory": torch.ones(2)}, resumes=True)
    assert model.get_submodule("_orig_mod").memory.tolist() == [1, 1]  # type: ignore[operator,union-attr]


class Plain(torch.optim.Optimizer):
    """An optimizer of which only the state counts."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        raise AssertionError(closure)


def pair(**group: Any) -> tuple[Plain, list[nn.Parameter], dict[int, str]]:
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    optimizer = Plain([{"params": parameters[:1], **group}, {"params": parameters[1:], "lr": 2.0}])
    return optimizer, parameters, {id(parameters[0]): "a/w", id(parameters[1]): "w"}


def test_state_goes_by_names_and_a_name_that_ends_like_another_gets_none_of_its() -> None:
    optimizer, parameters, names = pair()
    optimizer.state[parameters[0]] = {
        "m": torch.full((2, 3), 2.0),
        "step": torch.tensor(4.0),
        "k": 3,
        "l": [torch.ones(1)],
    }
    optimizer.state[parameters[1]] = {"m": torch.full((4,), 5.0), "short": torch.tensor([1.0, 2.0])}
    tensors, facts = optimizer_tensors(optimizer, names)
    assert [name for name in tensors if not name.startswith("$")] == ["a/w/m", "a/w/step", "w/m", "w/short"]
    assert len(tensors) == 5
    again, own, named = pair()
    again.state[own[1]] = {"old": 1}
    again.state["left"] = 3  # type: ignore[index]
    restore_optimizer(again, named, tensors, facts)
    assert list(again.state) == own
    assert list(again.state[own[0]]) == ["m", "step", "k", "l"]
    assert (again.state[own[0]]["k"], again.state[own[0]]["l"][0].tolist()) == (3, [1])
    assert {key: value.tolist() for key, value in again.state[own[1]].items()} == {"m": [5] * 4, "short": [1, 2]}
    for key in ("m", "short"):
        assert again.state[own[1]][key] is not tensors[f"w/{key}"]
    tensors["a/w/m"].zero_()
    tensors["a/w/step"].zero_()
    assert (float(again.state[own[0]]["m"].sum()), float(again.state[own[0]]["step"])) == (12, 4)
    assert not again.state[own[0]]["m"].requires_grad


def test_what_can_be_called_stays_the_recipes_and_tensors_of_a_group_stay_theirs() -> None:
    rate, saved = torch.tensor(1.0), torch.tensor(0.25)
    optimizer, _, names = pair(rate=saved, schedule=abs, note="kept", only=torch.tensor(1.0))
    tensors, facts = optimizer_tensors(optimizer, names)
    again, _, named = pair(rate=rate, schedule=max, note="other", only=3)
    restore_optimizer(again, named, tensors, facts)
    first, second = again.param_groups
    assert (first["rate"] is rate, float(rate), first["schedule"], first["note"]) == (True, 0.25, max, "kept")
    assert (float(first["only"]), first["lr"], second["lr"], len(first["params"])) == (1.0, 1.0, 2.0, 1)
    with pytest.raises(CheckpointError, match=r"optimizer has 2 parameter groups, and this one 1. Resume with"):
        restore_optimizer(Plain([nn.Parameter(torch.ones(1))]), {}, tensors, facts)


def test_a_frozen_parameter_has_no_state_and_those_after_it_have_theirs() -> None:
    optimizer, parameters, names = pair()
    optimizer.state[parameters[1]] = {"m": torch.full((4,), 5.0)}
    tensors, facts = optimizer_tensors(optimizer, names)
    again, own, named = pair()
    del named[id(own[0])]
    restore_optimizer(again, named, tensors, facts)
    assert list(again.state) == [own[1]]


def test_what_is_shaped_as_a_parameter_is_laid_out_as_it() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    names, saved = {id(parameter): "w"}, torch.arange(24).view(2, 3, 2, 2)
    for flags in ({}, {"capturable": True}, {"fused": True}):
        optimizer = Plain([{"params": [parameter], **flags}])
        facts = optimizer_tensors(optimizer, names)[1]
        given = {"w/m": saved, "w/other": torch.ones(3, 2).t(), "w/step": torch.tensor(2.0)}
        restore_optimizer(optimizer, names, given, facts)
        state = optimizer.state[parameter]
        assert state["m"].is_contiguous(memory_format=torch.channels_last)
        assert (torch.equal(state["m"], saved), state["m"].dtype, state["other"].shape) == (True, torch.int64, (2, 3))
        assert (float(state["step"]), state["step"] is given["w/step"]) == (2.0, False)


def digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def test_roots_are_of_canonical_bytes_whatever_view_a_tensor_is() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor_root("z", z.conj()) == tensor_root("z", torch.tensor([1 - 2j, 3 + 4j]))
    assert tensor_root("z", z.conj().imag) == tensor_root("z", torch.tensor([-2.0, 4.0]))
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    content = torch.arange(6.0).numpy().tobytes()
    head, chunk = digest(b"\0w\0torch.float32\0(2, 3)"), digest(b"\0" + content)
    assert tensor_root("w", weight) == digest(b"\1" + head + chunk)
    assert chunk_hashes(torch.frombuffer(bytearray(content), dtype=torch.uint8)) == [chunk]
    assert chunk_hashes(torch.zeros(0, dtype=torch.uint8)) == []
    assert root_of_chunks("w", torch.float32, (2, 3), [chunk]) == tensor_root("w", weight)
    scalar = digest(b"\0s\0torch.uint8\0()")
    assert tensor_root("s", torch.tensor(7, dtype=torch.uint8)) == digest(b"\1" + scalar + digest(b"\0\7"))
    both = digest(b"\1" + tensor_root("a", z) + tensor_root("b", weight))
    assert parameter_root({"b": weight, "a": z}) == parameter_root({"a": z, "b": weight}) == both


LAYOUTS = (torch.contiguous_format, torch.channels_last)


def test_state_keeps_its_keys_whatever_they_are() -> None:
    keys: list[Any] = ["m", "ema/fast", "ema%2Ffast", "%int0", "50%", 0, -7, "0", ("t", 1)]
    parameter, again = (nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=layout)) for layout in LAYOUTS)
    optimizer, other = Plain([parameter]), Plain([again])
    optimizer.state[parameter] = {key: torch.full((2, 3, 4, 4), float(n)) for n, key in enumerate(keys)}
    tensors, facts = optimizer_tensors(optimizer, {id(parameter): "w.x"})
    # Each is one of the parameter `w.x`, by which ranks know whose piece it is.
    assert sum(name.rpartition("/")[0] == "w.x" for name in tensors) == len(keys) - 1
    restore_optimizer(other, {id(again): "w.x"}, tensors, facts)
    found = other.state[again]
    assert {key: float(value.mean()) for key, value in found.items()} == {key: float(n) for n, key in enumerate(keys)}
    assert {type(key) for key in found} == {str, int, tuple}
    assert all(found[key].stride() == again.stride() for key in keys[:-1]), "laid out as what they're of"


def test_tensors_that_are_nowhere_are_each_by_itself() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.append(model[0])
    assert list(model_tensors(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
