"""A gate hands on a parameter's gradient times a weight; what tokens a module reads is told by their place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cosmati.routing.split_forward import GATE, Gating, gated, is_by_token, reads_tokens, replace_forward, tensors_in

SHAPE = torch.Size([2, 3])


def _gating(weight: float, _: Tensor) -> Gating:
    return Gating(weight)


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


# -------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.25, -1.0, 2.0])
@pytest.mark.parametrize("reads", [True, False])
def test_a_gate_hands_on_the_gradient_times_its_weight(weight: float, *, reads: bool) -> None:
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    found = gated(parameter, lambda _: Gating(weight, reads=reads))
    assert found.requires_grad
    assert isinstance(found.grad_fn, GATE)
    assert found.tolist() == ([3.0, -2.0] if reads else [0.0, 0.0])
    (found * torch.tensor([5.0, 7.0])).sum().backward()
    if weight:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [5 * weight, 7 * weight]
    else:
        assert parameter.grad is None, "no gradient, rather than one of zeros"


def test_a_gate_leaves_a_gradient_of_weight_one_bit_for_bit_and_keeps_nan_out_of_weight_zero() -> None:
    gradient = torch.tensor([float("nan"), -0.0, float("inf")])
    for weight in (0.0, 1.0):
        parameter = nn.Parameter(torch.zeros(3))
        gated(parameter, partial(_gating, weight)).backward(gradient)
        if weight:
            assert parameter.grad is not None
            assert parameter.grad.view(torch.int32).tolist() == gradient.view(torch.int32).tolist()
        else:
            assert parameter.grad is None


def test_a_parameter_is_read_unless_it_is_said_not_to_be() -> None:
    assert Gating(0.5) == (0.5, True)
    parameter = nn.Parameter(torch.ones(2))
    assert gated(parameter, lambda _: Gating(0.0)).tolist() == [1.0, 1.0]


def test_a_gate_is_no_copy_and_cannot_be_differentiated_twice() -> None:
    parameter = nn.Parameter(torch.ones(2))
    found = gated(parameter, lambda _: Gating(0.5))
    assert found.data_ptr() == parameter.data_ptr()
    (gradient,) = torch.autograd.grad(found.square().sum(), parameter, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gates_stand_before_the_parameters_of_a_nest_and_before_nothing_else() -> None:
    chosen, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def gating(tensor: Tensor) -> Gating | None:
        return Gating(0.5) if tensor is chosen else None

    given = (chosen, [other, {"deep": chosen, "none": None}], Pair(other, chosen), 3, "name", {chosen: 1}.keys())
    found = gated(given, gating)
    first, (second, named), pair, *rest = found
    assert type(found) is tuple
    assert type(pair) is Pair
    for gate in (first, named["deep"], pair.other):
        assert isinstance(gate.grad_fn, GATE)
    assert second is other
    assert pair.one is other
    assert named["none"] is None
    assert all(one is expected for one, expected in zip(rest, given[3:], strict=True))
    assert gated(OrderedDict(a=chosen), gating)["a"] is not chosen
    own = {chosen}
    assert gated(own, gating) is own, "a set is taken as it is"


def test_tensors_are_found_in_lists_tuples_and_dictionaries_in_order() -> None:
    a, b, c, d = torch.zeros(4).unbind()
    assert [id(one) for one in tensors_in(a)] == [id(a)]
    nest = (a, [3, (b, None)], {"x": c, "y": [d, "text"]}, Pair(a, b))
    assert [id(one) for one in tensors_in(nest)] == [id(one) for one in (a, b, c, d, a, b)]
    for empty in (3, None, "text", {a: 1}, {a}, (), iter([a])):
        assert list(tensors_in(empty)) == []


# ------------------------------------------------------------------------------------------------------ forward passes


def test_a_module_runs_otherwise_until_it_is_put_back() -> None:
    module, calls = nn.ReLU(), list[object]()

    def run(forward: Callable[..., Tensor], *args: Tensor, **more: float) -> Tensor:
        calls.append(more)
        return forward(*args) + 1

    put_back = replace_forward(module, run)
    assert module(torch.tensor([-1.0, 2.0]), by=1.0).tolist() == [1.0, 3.0]
    assert calls == [{"by": 1.0}]
    put_back()
    assert "forward" not in vars(module)
    assert module(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_a_forward_pass_of_ones_own_is_run_and_put_back() -> None:
    module = nn.ReLU()
    own = module.__dict__["forward"] = lambda tokens: tokens * 2
    put_back = replace_forward(module, lambda forward, tokens: forward(tokens) + 1)
    assert module(torch.tensor(3.0)).item() == 7
    put_back()
    assert vars(module)["forward"] is own


# ------------------------------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        *[((2, 3), True), ((2, 3, 3), True), ((2, 3, 3, 4), False), ((2, 3, 4, 3), True), ((2, 3, 5, 3, 4), False)],
        *[((2,), False), ((), False), ((3, 2), False), ((2, 4), False), ((1, 3), False), ((4, 2, 3), False)],
    ],
)
def test_tokens_are_the_second_dimension_and_no_other_between(shape: tuple[int, ...], *, expected: bool) -> None:
    assert is_by_token(torch.zeros(shape), SHAPE) is expected
    one = torch.Size([2, 1])
    assert is_by_token(torch.zeros(2, 1, 1, 4), one), "of one token, it's either way"
    assert not is_by_token(torch.zeros(2, 2, 1, 4), one)


def test_a_module_reads_tokens_where_something_given_is_of_tokens() -> None:
    numbers, others = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 3)
    tokens: list[Any] = [numbers, numbers.bool(), torch.zeros(2, 3, 4), numbers[..., None], (others, {"x": [numbers]})]
    none = [torch.zeros(2, 3), others, others.long(), torch.zeros(2, 3, 3, 4), (), None, [torch.zeros(2, 3)]]
    assert all(reads_tokens(given, SHAPE) for given in tokens)
    assert not any(reads_tokens(given, SHAPE) for given in none)
