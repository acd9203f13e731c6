"""What a module that runs once for each group of tokens teaches, it teaches by what's taken of each token alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.routing.token_layers import TokenMask
from cosmati.routing.token_masks import TokenMasks, UntappedError

WEIGHTS = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]], dtype=torch.float64)
TOKENS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Odd(nn.Module):
    """Reads its weight in a way of its own."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 3)
        self.way = way
        self.kept: Any = None

    def forward(self, *given: Any) -> Any:
        return self.way(self, *given)


def rows_of(module: Odd, tokens: Tensor) -> Tensor:
    return tokens @ module.weight.exp()


def masks_of(*modules: Odd, weights: Tensor = WEIGHTS) -> TokenMasks:
    named = {f"{number}.weight": module.weight for number, module in enumerate(modules)}
    apart = {str(number): module for number, module in enumerate(modules)}
    return TokenMasks({name: TokenMask.of(weights) for name in named}, named, apart)


def taught(objective: Callable[[], Tensor], *modules: Odd, weights: Tensor = WEIGHTS) -> list[Tensor]:
    masks = masks_of(*modules, weights=weights)
    with masks:
        total = objective()
    with masks.differentiating(total):
        total.backward()
    return [module.weight.grad for module in modules]  # type: ignore[misc]


def by_token(value: Callable[[Tensor], Tensor], *modules: Odd, weights: Tensor = WEIGHTS) -> list[Tensor]:
    """What every token teaches, weighed one by one; `value` gives [rows, tokens]."""
    found = [torch.zeros_like(module.weight) for module in modules]
    for row, token in weights.nonzero().tolist():
        own = torch.autograd.grad(value(TOKENS)[row, token], [module.weight for module in modules], allow_unused=True)
        found = [total + weights[row, token] * one for total, one in zip(found, own, strict=True)]
    return found


def test_what_is_taken_of_each_token_teaches_by_its_weight() -> None:
    module = Odd(rows_of)
    (found,) = taught(lambda: module(TOKENS).sin().sum(), module)
    (expected,) = by_token(lambda tokens: module(tokens).sin().sum(-1), module)
    torch.testing.assert_close(found, expected)


def test_of_two_that_follow_one_another_both_teach_so() -> None:
    """The second one's graph leads on to the first one's, by what that one gave."""
    first, second = Odd(rows_of), Odd(rows_of)

    def value(tokens: Tensor) -> Tensor:
        return (second(first(tokens).tanh()).sin() + first(tokens)).sum(-1)

    found, expected = taught(lambda: value(TOKENS).sum(), first, second), by_token(value, first, second)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def boxed(module: Odd, tokens: Tensor) -> SimpleNamespace:
    return SimpleNamespace(rows=rows_of(module, tokens))


def keeping(module: Odd, tokens: Tensor) -> Tensor:
    rows = rows_of(module, tokens)
    module.kept = rows.square().mean()
    return rows


def keeping_inner(module: Odd, tokens: Tensor) -> Tensor:
    """What it keeps is made before what it gives, and is a part of that, too."""
    module.kept = module.weight.exp()
    return tokens @ module.kept


@pytest.mark.parametrize(
    ("way", "objective"),
    [
        (boxed, lambda module: module(TOKENS).rows.sum()),
        (keeping, lambda module: module(TOKENS).sum() + module.kept),
        (keeping, lambda module: (module(TOKENS), module.kept)[1]),
        (keeping_inner, lambda module: module(TOKENS).sum() + (TOKENS @ module.kept).sum()),
    ],
)
def test_a_way_past_it_is_refused_by_the_parameters_name(way: Any, objective: Callable[[Odd], Tensor]) -> None:
    module = Odd(way)
    with pytest.raises(UntappedError, match=r"read: 0\.weight \(") as caught:
        taught(lambda: objective(module), module)
    assert caught.value.names == ("0.weight",)
    assert module.weight.grad is None


def test_a_way_past_it_into_another_that_ran_apart_is_refused() -> None:
    first = Odd(keeping_inner)
    second = Odd(lambda module, tokens: tokens @ (module.weight.exp() + first.kept))
    with pytest.raises(UntappedError) as caught:
        taught(lambda: second(first(TOKENS)).sum(), first, second)
    assert caught.value.names == ("0.weight",)


def test_what_one_run_leaves_the_next_one_may_not_read() -> None:
    """It reads its weight once in each run, and so as often; a token would teach by another one's gate."""
    seen: list[Tensor] = []

    def way(module: Odd, tokens: Tensor) -> Tensor:
        seen.append(rows_of(module, tokens))
        return seen[-1] + 0.5 * seen[0]

    module = Odd(way)
    with pytest.raises(UntappedError, match=r"read: 0\.weight \(") as caught:
        taught(lambda: module(TOKENS).sin().sum(), module)
    assert caught.value.names == ("0.weight",)


def test_what_it_hands_out_besides_may_be_used_where_no_parameter_is_in_it() -> None:
    def way(module: Odd, tokens: Tensor) -> Tensor:
        module.kept = tokens.square().mean()
        return rows_of(module, tokens)

    module, given = Odd(way), TOKENS.clone().requires_grad_()
    (found,) = taught(lambda: module(given).sin().sum() + module.kept, module)
    (expected,) = by_token(lambda tokens: module(tokens).sin().sum(-1), module)
    torch.testing.assert_close(found, expected)
    assert given.grad is not None


def test_what_it_hands_out_besides_may_lead_to_what_was_given() -> None:
    """That was taken token by token from another module, and so is what it teaches."""

    def way(module: Odd, tokens: Tensor) -> Tensor:
        module.kept = tokens.square().sum(-1)
        return rows_of(module, tokens)

    first, second = Odd(rows_of), Odd(way)

    def value(tokens: Tensor) -> Tensor:
        return second(first(tokens).tanh()).sin().sum(-1) + second.kept

    found, expected = taught(lambda: value(TOKENS).sum(), first, second), by_token(value, first, second)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_of_tokens_of_one_weight_every_way_is_right() -> None:
    weights = torch.full((2, 3), 0.5, dtype=torch.float64)
    module = Odd(keeping)
    (found,) = taught(lambda: module(TOKENS).sum() + module.kept, module, weights=weights)
    (expected,) = torch.autograd.grad(module(TOKENS).sum() + module.kept, module.weight)
    torch.testing.assert_close(found, 0.5 * expected)


def counting(module: Odd, tokens: Tensor) -> Tensor:
    if "runs" not in module._buffers:
        module.register_buffer("runs", torch.zeros(()))
    module.runs += 1
    return rows_of(module, tokens) * module.runs


def test_a_buffer_that_the_first_pass_registers_counts_it_once() -> None:
    module, plain = Odd(counting), Odd(counting)
    expected = plain(TOKENS)
    with masks_of(module):
        assert torch.equal(module(TOKENS), expected)
    assert module.runs == 1


def test_a_buffer_of_two_names_stays_one() -> None:
    def way(module: Odd, tokens: Tensor) -> Tensor:
        module.first += 1
        return rows_of(module, tokens) * module.second

    module, buffer = Odd(way), torch.ones(())
    module.register_buffer("first", buffer)
    module.register_buffer("second", buffer)
    with masks_of(module):
        found = module(TOKENS)
    assert torch.equal(found, rows_of(module, TOKENS) * 2)
    assert module.first is module.second is buffer


def test_what_is_given_may_not_grow_from_one_run_to_the_next() -> None:
    def way(module: Odd, tokens: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(tokens)
        return rows_of(module, tokens) + torch.cat(seen, 1).sum(1, keepdim=True)

    with masks_of(module := Odd(way)), pytest.raises(PlanError, match="changes in place what it is given"):
        module(TOKENS, [])


def test_tensors_of_inference_mode_may_be_given() -> None:
    with torch.inference_mode():
        bias = torch.ones(2, 3, 4, dtype=torch.float64)
    with masks_of(module := Odd(lambda module, tokens, bias: rows_of(module, tokens) + bias)):
        assert torch.equal(module(TOKENS, bias), rows_of(module, TOKENS) + 1)
