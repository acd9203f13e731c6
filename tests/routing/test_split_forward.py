"""Modules that run once for each route: each token by itself, in float64, whatever the module does with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.errors import PlanError
from cosmati.routing.split_forward import groups_of
from cosmati.routing.token_layers import TokenMask
from cosmati.routing.token_masks import TokenMasks, UntappedError
from tests.routing.test_token_masks import Squared

pytestmark = pytest.mark.long

WIDTH = 4


class Reads(nn.Module):
    """Reads two parameters in some way; the two are of two regions."""

    def __init__(self, way: Callable[[nn.Parameter, nn.Parameter, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.way = way

    def forward(self, tokens: Tensor) -> Any:
        return self.way(self.weight, self.other, tokens)


def first_of_cell(weight: Tensor, other: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Several results in a nest."""
    return tokens @ weight, {"more": (tokens * other).sum(-1), "none": None}


WAYS: dict[str, Callable[[nn.Parameter, nn.Parameter, Tensor], Any]] = {
    "flattened": lambda w, o, t: F.linear(t.flatten(0, 1), w, o).view_as(t),
    "tokens first": lambda w, o, t: (F.linear(t.transpose(0, 1), w) + o).transpose(0, 1),
    "einsum": lambda w, o, t: torch.einsum("rtd,de,e->rte", t, w, o),
    "in a list": lambda w, o, t: t @ torch.cat([w, o[None]])[1:],
    "by hand": lambda w, o, t: t @ w.square().softmax(0) * o.exp(),
    "by keyword": lambda w, o, t: torch.matmul(input=t, other=w) - o,
    "a nest": first_of_cell,
    "all alike": lambda w, o, t: (t, w.sum() * o.sum() * t),
}


def objective(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return each token's part of an objective, [rows, tokens]."""
    found = module(tokens)
    parts = (
        [found]
        if isinstance(found, Tensor)
        else [found[0], found[1]["more"] if isinstance(found[1], dict) else found[1]]
    )
    total = torch.zeros(tokens.shape[:2], dtype=tokens.dtype)
    for part in parts:
        total = total + part.sin().view(*tokens.shape[:2], -1).sum(-1)
    return total


def masks_of(module: nn.Module, *weights: Tensor, **options: Any) -> TokenMasks:
    named = dict(module.named_parameters())
    return TokenMasks(dict(zip(named, map(TokenMask.of, weights), strict=True)), named, {"": module}, **options)


@given(data=st.data(), way=st.sampled_from(sorted(WAYS)), rows=st.integers(1, 3), length=st.integers(2, 4))
def test_a_module_learns_from_each_token_by_its_weight(data: st.DataObject, way: str, rows: int, length: int) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module = Reads(WAYS[way]).double()
    number = st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.3]), min_size=rows * length, max_size=rows * length)
    weights = [torch.tensor(data.draw(number)).double().view(rows, length) for _ in range(2)]
    tokens = torch.randn(rows, length, WIDTH, dtype=torch.float64, requires_grad=True)
    plain = objective(module, tokens)
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for row in range(rows):
        for token in range(length):
            value = plain[row, token]
            found = torch.autograd.grad(value, list(module.parameters()), retain_graph=True)
            for own, weight, gradient in zip(expected, weights, found, strict=True):
                own.add_(weight[row, token] * gradient)
    (towards,) = torch.autograd.grad(plain.sum(), tokens, retain_graph=True)
    masks = masks_of(module, *weights)
    with masks:
        given = objective(module, tokens)
        total = given.sum()
    assert torch.equal(given, plain)
    with masks.differentiating(total):
        total.backward()
    for parameter, own in zip(module.parameters(), expected, strict=True):
        gradient = torch.zeros_like(own) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, own, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(tokens.grad, towards, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_parts_are_computed_anew_as_they_ran(*, inside: bool) -> None:
    def body(weight: nn.Parameter, other: nn.Parameter, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(tokens @ weight), weight, other)

    def way(*read: Any) -> Tensor:
        found: Tensor = checkpoint(body, *read, use_reentrant=False) if inside else body(*read)
        return found

    torch.manual_seed(0)
    module, tokens = Reads(body), torch.randn(2, 3, WIDTH, requires_grad=True)
    found: list[tuple[Tensor, Tensor]] = []
    for is_checkpointed in (False, True):
        module.way, module.weight.grad, module.other.grad = way if is_checkpointed else body, None, None
        masks = masks_of(module, HALF, 1 - HALF)
        with masks:
            outside = is_checkpointed and not inside
            given = checkpoint(module, tokens, use_reentrant=False) if outside else module(tokens)
            total = given.sin().sum()
        with masks.differentiating(total):
            total.backward()
        assert module.weight.grad is not None
        assert module.other.grad is not None
        found.append((module.weight.grad, module.other.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_groups_are_tokens_that_may_teach_alike() -> None:
    one, other = (
        TokenMask.of(torch.tensor([[0.0, 1, 1], [1, 0, 0.5]])),
        TokenMask.of(torch.tensor([[1.0, 1, 0], [1, 1, 1]])),
    )
    found = {
        tuple(group.weights[id(m)] for m in (one, other)): group.members.tolist() for group in groups_of([one, other])
    }
    assert found == {
        (0, 1): [[True, False, False], [False, True, False]],
        (1, 1): [[False, True, False], [True, False, False]],
        (1, 0): [[False, False, True], [False, False, False]],
        (0.5, 1): [[False, False, False], [False, False, True]],
    }


HALF = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]])


class Counting(nn.Module):
    """Draws, and counts in a buffer how often it ran: in place, or by another tensor."""

    runs: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("runs", torch.zeros(()))
        self.in_place = in_place
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.in_place:
            self.runs += 1
        else:
            self.runs = self.runs + 1
        return F.dropout(tokens @ self.weight, 0.5) * self.runs


@pytest.mark.parametrize("in_place", [True, False])
def test_draws_and_buffers_are_those_of_one_run(*, in_place: bool) -> None:
    torch.manual_seed(0)
    module, tokens = Counting(in_place=in_place), torch.randn(2, 3, WIDTH)
    torch.manual_seed(1)
    plain, after = module(tokens), torch.rand(3)
    module.runs.zero_()
    buffer = module.runs
    torch.manual_seed(1)
    with masks_of(module, HALF):
        given = module(tokens)
    assert torch.equal(given, plain)
    assert torch.equal(torch.rand(3), after)
    assert module.runs == 1
    assert (module.runs is buffer) == in_place
    assert module.calls == 1 + 3


def test_hooks_run_once_and_the_forward_pass_is_put_back() -> None:
    module, seen = Reads(WAYS["flattened"]), []
    module.register_forward_hook(lambda *_: seen.append(1))
    own = module.forward
    with masks_of(module, HALF, HALF) as masks, masks:
        assert module.forward != own
        module(torch.randn(2, 3, WIDTH))
    assert seen == [1]
    assert "forward" not in vars(module)
    patched = module.__dict__["forward"] = own
    with masks_of(module, HALF, HALF):
        module(torch.randn(2, 3, WIDTH))
    assert module.__dict__["forward"] is patched


def test_what_a_module_gives_is_kept_to_be_looked_at() -> None:
    module, tokens = Reads(first_of_cell), torch.randn(2, 3, WIDTH)
    masks = masks_of(module, HALF, HALF, keep=True)
    with masks:
        output, more = module(tokens)
    assert [tap.name for tap in masks.tapped] == ["the model"] * 2
    assert all(tap.tokens is not None and torch.equal(tap.tokens, tokens) for tap in masks.tapped)
    assert masks.tapped[0].output is output
    assert masks.tapped[1].output is more["more"]


def test_a_module_that_changes_what_it_is_given_is_refused() -> None:
    module = Reads(lambda w, o, t: t.relu_() @ w + o)
    with masks_of(module, HALF, HALF), pytest.raises(PlanError, match="The model changes in place what it is given"):
        module(torch.randn(2, 3, WIDTH))


def test_a_module_that_keeps_what_it_makes_of_parameters_is_refused() -> None:
    """The second route's tokens would teach by the first one's weight."""
    kept: list[Tensor] = []

    def way(weight: nn.Parameter, other: nn.Parameter, tokens: Tensor) -> Tensor:
        if not kept:
            kept.append(weight.exp())
        return tokens @ kept[0] + other

    module = Reads(way)
    with masks_of(module, HALF, HALF), pytest.raises(PlanError, match=r"keeps from one run to the next .* 2 times"):
        module(torch.randn(2, 3, WIDTH))


REFUSED: dict[str, Callable[[nn.Parameter, nn.Parameter, Tensor], Any]] = {
    "a function of one's own": lambda w, o, t: t @ Squared.apply(w) + o,  # type: ignore[no-untyped-call]
    "a sum over tokens": lambda w, o, t: (t @ w + o).sum((0, 1)),
    "tokens last": lambda w, o, t: (t @ w + o).transpose(1, 2),
    "a number beside": lambda w, o, t: (t @ w + o, w.square().sum()),
}


@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_apart_is_refused_by_name(way: Any) -> None:
    module = Reads(way)
    masks = masks_of(module, HALF, HALF)
    with masks:
        found = module(torch.randn(2, 3, WIDTH))
    total = found.sum() if isinstance(found, Tensor) else found[0].sum() + found[1]
    with pytest.raises(UntappedError, match=r"run once for each route") as refused, masks.differentiating(total):
        pass
    assert "weight" in refused.value.names


def test_rows_of_as_many_numbers_as_there_are_tokens_are_no_tokens() -> None:
    module = Reads(lambda w, o, t: t @ w[:3, :3] + o[:3])
    masks = masks_of(module, HALF, HALF)
    with masks:
        total = module(torch.randn(2, 3)).sum()
    with pytest.raises(UntappedError, match="weight"), masks.differentiating(total):
        pass


def test_without_a_graph_a_module_runs_once() -> None:
    module = Counting(in_place=True)
    with masks_of(module, HALF), torch.no_grad():
        module(torch.randn(2, 3, WIDTH))
    assert module.calls == 1
