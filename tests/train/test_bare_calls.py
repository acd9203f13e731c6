"""A backward pass and an optimizer's step without what surrounds them: the same bits, and who listens hears them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from cosmati.train.bare_calls import run_backward, step_of


def _gradients(differentiate: Callable[[Tensor, list[nn.Parameter]], object]) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    parameters = list(model.parameters())
    for _ in range(2):  # The second one is added to the first.
        differentiate(model(torch.randn(4, 6)).square().mean(), parameters)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("chosen", [None, [0], [1, 2], [3]])
def test_gradients_are_those_of_pytorchs_own_call(chosen: list[int] | None) -> None:
    def inputs(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters if chosen is None else [parameters[i] for i in chosen]

    def theirs(objective: Tensor, parameters: list[nn.Parameter]) -> None:
        objective.backward(inputs=None if chosen is None else inputs(parameters))  # type: ignore[arg-type]

    expected = _gradients(theirs)
    found = _gradients(lambda objective, p: run_backward(objective, () if chosen is None else inputs(p)))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert sum(one is not None for one in found) == (4 if chosen is None else len(chosen))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_scalar_of_any_floating_type_begins_with_its_own_one(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.tensor(3.0, dtype=dtype))
    run_backward(weight * weight)
    assert weight.grad is not None
    assert weight.grad.item() == 6.0
    assert weight.grad.dtype is dtype


def test_what_a_hook_writes_to_is_no_later_steps() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    for _ in range(2):
        weight.grad, objective = None, weight * 2.0
        objective.register_hook(lambda gradient: gradient.mul_(10.0))
        run_backward(objective)
        assert weight.grad is not None
        assert weight.grad.item() == 20.0


def test_a_scalar_parameter_doesnt_share_memory_with_what_it_began_with() -> None:
    first, second = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    run_backward(first + second)
    assert first.grad is not None
    assert second.grad is not None
    first.grad.fill_(7.0)
    assert second.grad.item() == 1.0


class Counting(Tensor):
    """A class of tensors with a backward pass of its own."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.seen += func is Tensor.backward
        return super().__torch_function__(func, types, args, kwargs or {})


class Watching(TorchFunctionMode):
    """A mode that counts backward passes."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is Tensor.backward
        return func(*args, **(kwargs or {}))


def test_a_tensor_of_another_class_is_asked() -> None:
    weight, before = nn.Parameter(torch.tensor(2.0)), Counting.seen
    run_backward((weight * 3.0).as_subclass(Counting))
    assert Counting.seen == before + 1
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


def test_a_mode_is_asked() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    with Watching() as mode:
        run_backward(weight * 3.0)
    assert mode.seen == 1
    assert weight.grad is not None


def test_who_puts_another_backward_into_pytorch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [], Tensor.backward

    def backward(self: Tensor, *args: Any, **more: Any) -> None:
        seen.append(self)
        own(self, *args, **more)

    monkeypatch.setattr(Tensor, "backward", backward)
    weight = nn.Parameter(torch.tensor(2.0))
    run_backward(weight * 3.0)
    assert len(seen) == 1


def test_one_element_is_a_scalar_and_two_are_refused_as_pytorch_refuses_them() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    run_backward(weight * 3.0)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        run_backward(nn.Parameter(torch.ones(2)) * 1.0)
    with pytest.raises(RuntimeError, match="real scalar outputs"):
        run_backward(nn.Parameter(torch.tensor(1j)) * 1.0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        run_backward(torch.tensor(1.0))


def _sgd() -> torch.optim.SGD:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.5)


def _steps(optimizer: torch.optim.Optimizer) -> list[float]:
    step_of(optimizer)()
    held: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return held


def test_an_optimizer_that_nobody_listens_to_steps_without_its_scope() -> None:
    optimizer = _sgd()
    assert torch.optim.SGD.step.__wrapped__ in getattr(step_of(optimizer), "args", ())  # type: ignore[attr-defined]
    assert _steps(optimizer) == [0.5, 0.5, 0.5]


def test_a_profiler_sees_the_step() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert _steps(_sgd()) == [0.5, 0.5, 0.5]
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_a_hook_of_the_optimizer_is_called() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer, called = _sgd(), []
        getattr(optimizer, register)(lambda *_, called=called: called.append(1))
        assert _steps(optimizer) == [0.5, 0.5, 0.5]
        assert called == [1], register


@pytest.mark.parametrize(
    "register", [torch_optimizer.register_optimizer_step_pre_hook, torch_optimizer.register_optimizer_step_post_hook]
)
def test_a_hook_of_all_optimizers_is_called(register: Callable[..., Any]) -> None:
    called: list[int] = []
    handle = register(lambda *_: called.append(1))
    try:
        assert _steps(_sgd()) == [0.5, 0.5, 0.5]
    finally:
        handle.remove()
    assert called == [1]


def test_a_step_put_on_the_optimizer_is_called() -> None:
    optimizer, called = _sgd(), []
    own = optimizer.step
    optimizer.step = lambda: (called.append(1), own())  # type: ignore[assignment, misc, method-assign]
    assert _steps(optimizer) == [0.5, 0.5, 0.5]
    assert called == [1]


def test_a_step_put_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called, own = [], torch.optim.SGD.step

    @functools.wraps(own)  # which copies the marks of PyTorch's wrapper
    def step(self: torch.optim.SGD, closure: Any = None) -> Any:
        called.append(1)
        return own(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    assert _steps(_sgd()) == [0.5, 0.5, 0.5]
    assert called == [1]


def test_a_graph_is_let_go_once_it_was_differentiated() -> None:
    given = torch.ones(3, requires_grad=True)
    objective = given.sin().sum()
    run_backward(objective)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(objective)
