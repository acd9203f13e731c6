"""What token masks keep, leave and refuse around a backward pass: names, graphs, nested modules and exact shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.errors import PlanError
from cosmati.routing.split_forward import is_by_token
from cosmati.routing.token_layers import Read, TokenMask, behind
from cosmati.routing.token_masks import TokenMasks, UntappedError

WIDTH = 3
MASK = TokenMask.of(torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]]))


def masks_of(module: nn.Module, apart: tuple[str, ...] = (), **options: Any) -> TokenMasks:
    named = dict(module.named_parameters())
    return TokenMasks(
        dict.fromkeys(named, MASK), named, {name: module.get_submodule(name) for name in apart}, **options
    )


def test_a_graph_is_differentiated_once_unless_more_was_asked_for() -> None:
    module, tokens = nn.Linear(WIDTH, WIDTH), torch.randn(2, 3, WIDTH)
    masks = masks_of(module)
    with masks:
        kept, dropped = module(tokens).sin().sum(), module(tokens).sin().sum()
        torch.autograd.backward(kept, retain_graph=True)
        kept.backward()
        dropped.backward()
        with pytest.raises(RuntimeError, match="second time"):
            dropped.backward()
    assert module.weight.grad is not None
    assert not module.weight.grad.requires_grad


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_gradients_is_made_where_it_was_asked_for() -> None:
    module, tokens = nn.Linear(WIDTH, WIDTH), torch.randn(2, 3, WIDTH, requires_grad=True)
    with masks_of(module):
        module(tokens).sin().sum().backward(create_graph=True)
    found, tokens.grad, module.weight.grad, module.bias.grad = tokens.grad, None, None, None
    assert found is not None
    assert found.requires_grad


@pytest.mark.parametrize("given", [torch.tensor(2.0), None])
def test_what_an_objective_is_weighed_by_is_handed_on(given: Tensor | None) -> None:
    module, tokens = nn.Linear(WIDTH, WIDTH).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    found = []
    for backward in (lambda one: one.backward(gradient=given), lambda one: torch.autograd.backward(one, given)):
        module.zero_grad()
        with masks_of(module):
            backward(module(tokens).sum())
        assert module.bias.grad is not None
        found.append(module.bias.grad.tolist())
    assert found == [[3.5 * (1.0 if given is None else 2.0)] * WIDTH] * 2


def test_of_several_objectives_those_without_a_weight_count_once_and_have_to_be_numbers() -> None:
    module, tokens = nn.Linear(WIDTH, WIDTH).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    with masks_of(module):
        torch.autograd.backward([module(tokens).sum(), module(tokens).sum()], [None, torch.tensor(2.0)])
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [3.5 * 3] * WIDTH
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            module(tokens).sum(0).backward()


@pytest.mark.parametrize(
    "way",
    [
        lambda weight, rows: F.linear(rows, weight),
        lambda weight, rows: weight * rows,
        lambda weight, rows: weight[0] + rows,
    ],
    ids=["linear", "product", "sum"],
)
def test_rows_of_numbers_are_no_tokens_though_there_are_as_many(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    masks = TokenMasks({"w": TokenMask.of(torch.eye(3))}, {"w": weight})
    with masks:
        total = way(weight, torch.randn(3, WIDTH)).sum()
    with pytest.raises(UntappedError, match=r"w \(\w+ gives \[3, 3\]\)"), masks.differentiating(total):
        pass


def test_a_line_of_numbers_is_none_of_tokens_whatever_a_parameter_makes_of_it() -> None:
    weight = nn.Parameter(torch.randn(2, 3, WIDTH))
    masks = TokenMasks({"w": MASK}, {"w": weight})
    with masks:
        total = (torch.randn(WIDTH) * weight).sum()
    with pytest.raises(UntappedError, match=r"w \(mul gives \[2, 3, 3\]\)"), masks.differentiating(total):
        pass


def test_what_is_made_of_a_parameter_lives_as_long_as_its_name_is_known() -> None:
    """Another tensor would be taken for it otherwise: an id is used again."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    masks = TokenMasks({"w": MASK}, {"w": weight})
    with masks:
        made = weakref.ref(weight * 2.0)
        alike = weakref.ref(torch.zeros(3) * 2.0)
    assert made() is not None
    assert alike() is None
    del masks


def test_a_graph_with_as_many_ways_as_you_like_is_walked_node_by_node() -> None:
    module, total = nn.Linear(WIDTH, WIDTH), torch.zeros((), requires_grad=True) + 1.0
    for _ in range(60):
        total = total + total
    with masks_of(module).differentiating(total):
        assert total.requires_grad


def test_at_most_five_parameters_are_told_and_all_are_named() -> None:
    module = nn.ParameterList([torch.randn(WIDTH) for _ in range(7)])
    masks = masks_of(module)
    with masks:
        total = sum((one.exp().sum() for one in module), torch.zeros(()))
    with pytest.raises(UntappedError) as refused, masks.differentiating(total):
        pass
    assert sorted(refused.value.names) == [str(index) for index in range(7)]
    assert sum(f"{index} (" in str(refused.value) for index in range(7)) == 5


def test_what_needs_no_gradient_is_not_walked() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with masks_of(module).differentiating(torch.zeros(())):
        pass
    module.weight.requires_grad_(False)
    tokens, masks = torch.randn(2, 3, WIDTH), masks_of(module)
    with masks:
        total = module(tokens).sum()
    with masks.differentiating(total):
        total.backward()
    assert module.weight.grad is None
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [3.5] * WIDTH
    assert not module.bias._backward_hooks


# ---------------------------------------------------------------------------------------- modules within modules apart


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(torch.einsum("rtd,de->rte", tokens, self.weight)) @ self.weight


class Outer(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Parameter(torch.randn(WIDTH))
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, tokens, use_reentrant=False) if self.checkpoints else self.inner(tokens)
        return inner * self.scale.exp()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_module_within_one_that_runs_apart_runs_once_in_each_of_its_runs(*, checkpoints: bool) -> None:
    torch.manual_seed(0)
    module, tokens = Outer(checkpoints=checkpoints).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    weights = MASK.admits.double() if MASK.scale is None else MASK.scale.double()
    parameters = list(module.parameters())
    plain = module(tokens)
    expected = torch.autograd.grad((plain.sin() * weights[..., None]).sum(), parameters)
    module.inner.calls = 0
    masks = masks_of(module, ("", "inner"))
    with masks:
        found = module(tokens)
        total = found.sin().sum()
    assert module.inner.calls == 3
    assert torch.equal(found, plain)
    with masks.differentiating(total):
        total.backward()
    assert module.inner.calls == 3 * (1 + checkpoints)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-13)


def test_what_ran_apart_is_no_longer_computed_anew_for_zeros() -> None:
    module, tokens = Outer(checkpoints=True), torch.randn(2, 3, WIDTH)
    names = dict(module.named_parameters())
    masks = masks_of(module, ("", "inner"), zeroed=names)
    with masks:
        total = module(tokens).sin().sum()
    said = r"^inner\.weight is computed anew in the backward pass, within a module that runs once for each route"
    with masks.differentiating(total), pytest.raises(PlanError, match=said):
        total.backward()


@pytest.mark.parametrize(("heads", "is_before"), [(2, True), (3, True), (3, False), (2, False)])
def test_heads_are_never_taken_for_tokens(heads: int, is_before: bool) -> None:
    norm, tokens = nn.RMSNorm(4).double(), torch.randn(1, 3, heads * 4, dtype=torch.float64)
    mask = TokenMask.of(torch.tensor([[1.0, 0.0, 0.0]]))

    def output() -> Tensor:
        split = tokens.view(1, 3, heads, 4)
        found: Tensor = norm(split) if is_before else norm(split.transpose(1, 2)).transpose(1, 2)
        return found.sin()

    (expected,) = torch.autograd.grad(output()[:, 0].sum(), norm.weight)
    masks = TokenMasks({"weight": mask}, {"weight": norm.weight})
    with masks:
        objective = output().sum()
    if heads == 2 and is_before:
        with masks.differentiating(objective):
            objective.backward()
        torch.testing.assert_close(norm.weight.grad, expected, rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(UntappedError, match=r"rms_norm gives \[1, "), masks.differentiating(objective):
            objective.backward()


class Scaled(nn.Module):
    """Reads its parameter as no layer does, and so runs once for each route."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens * self.weight.exp()).tanh()


@pytest.mark.parametrize(("heads", "is_before"), [(2, True), (3, True), (3, False), (2, False)])
def test_a_module_that_runs_apart_never_takes_heads_for_tokens(heads: int, is_before: bool) -> None:
    module, tokens = Scaled(), torch.randn(1, 3, heads * 4, dtype=torch.float64)
    mask = TokenMask.of(torch.tensor([[1.0, 0.0, 0.0]]))

    def output() -> Tensor:
        split = tokens.view(1, 3, heads, 4)
        found: Tensor = module(split) if is_before else module(split.transpose(1, 2)).transpose(1, 2)
        return found.sin()

    (expected,) = torch.autograd.grad(output()[:, 0].sum(), module.weight)
    masks = TokenMasks({"weight": mask}, {"weight": module.weight}, {"scaled": module})
    with masks:
        objective = output().sum()
    if heads == 2 and is_before:
        with masks.differentiating(objective):
            objective.backward()
        torch.testing.assert_close(module.weight.grad, expected, rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(UntappedError, match=r"no other dimension \(heads\)"), masks.differentiating(objective):
            objective.backward()


def test_tokens_are_told_by_their_place_unless_heads_are_as_many() -> None:
    shape = torch.Size([2, 3])
    by_token = [(2, 3), (2, 3, 5), (2, 3, 3), (2, 3, 4, 5), (2, 3, 4, 3), (2, 3, 0)]
    assert all(is_by_token(torch.ones(one), shape) for one in by_token)
    others = [(2,), (3, 2), (2, 4), (2, 4, 3), (2, 3, 3, 5), (2, 3, 4, 3, 5), (1, 3, 5)]
    assert not any(is_by_token(torch.ones(one), shape) for one in others)
    assert is_by_token(torch.ones(2, 1, 1, 5), torch.Size([2, 1])), "one head, one token: either way"


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("by itself", lambda whole: whole),
        ("all of it, seen otherwise", lambda whole: whole.view(2, 3, 1, 4).view(2, 3, 4)),
        ("a part", lambda whole: whole[:, :, :4]),
    ],
)
def test_what_a_layer_gives_is_tapped_though_it_is_a_view(name: str, view: Callable[[Tensor], Tensor]) -> None:
    """The gradient by the parameter is the formula's, of admitted tokens alone; that by the input is left alone."""
    tokens, parameter = torch.randn(2, 3, 5), nn.Parameter(torch.randn(5))
    admits = torch.tensor([[True, False, True], [False, True, True]])
    source = torch.randn(2, 3, 8 if name == "a part" else 4, requires_grad=True)
    output = view(source * 1.0)
    seen: list[Tensor] = []

    def formula(gradient: Tensor, read_tokens: Tensor, _: Read) -> Tensor:
        seen.append(gradient)
        return torch.einsum("rtw,rti->i", gradient, read_tokens)

    read = Read(parameter.shape, TokenMask.of(admits.double()), {}, formula, output.shape, 1)
    found = behind(output, parameter, tokens, read)
    assert found.shape == output.shape
    assert torch.equal(found, output)
    factor = torch.randn_like(found)
    (found * factor).sum().backward()
    (gradient,), admitted = seen, factor * admits[..., None]
    assert torch.equal(gradient, admitted)
    torch.testing.assert_close(parameter.grad, torch.einsum("rtw,rti->i", admitted, tokens))
    (expected,) = torch.autograd.grad((view(source * 1.0) * factor).sum(), source)
    assert torch.equal(source.grad, expected)  # type: ignore[arg-type]
