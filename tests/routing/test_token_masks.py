"""Masked weight gradients: each token by itself, in float64; and every way around them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from cosmati.errors import PlanError
from cosmati.routing.token_layers import TokenMask
from cosmati.routing.token_masks import TokenMasks, UntappedError

WIDTH, OUT = 3, 4


class Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens.mT).mT
        return found


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.shift + self.scale * tokens + 2.0 * self.scale


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table[: tokens.shape[1]]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, OUT),
    "linear without a bias": lambda: nn.Linear(WIDTH, OUT, bias=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without a bias": lambda: nn.LayerNorm(WIDTH, bias=False, eps=0.1),
    "RMS norm": lambda: nn.RMSNorm(WIDTH),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, OUT)),
    "convolution": lambda: Transposed(nn.Conv1d(WIDTH, OUT, 1)),
    "product and sum": Affine,
    "half of a table": Half,
}


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def by_token(module: Callable[[Tensor], Tensor], tokens: Tensor, weights: Tensor, parameters: dict[str, Tensor]) -> Any:
    """Differentiate each token's part of the objective by itself, and add them up by weight."""
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for row in range(weights.shape[0]):
        for token in range(weights.shape[1]):
            value = (module(tokens).sin()[row, token]).sum()
            found = torch.autograd.grad(value, list(parameters.values()))
            for name, gradient in zip(parameters, found, strict=True):
                total[name] += weights[row, token] * gradient
    return total


@pytest.mark.long
@given(data=st.data(), kind=st.sampled_from(sorted(LAYERS)), rows=st.integers(1, 3), length=st.integers(1, 4))
def test_a_layer_learns_from_each_token_by_its_weight(data: st.DataObject, kind: str, rows: int, length: int) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module = LAYERS[kind]().double()
    parameters = named(module)
    weight = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.25, 0.3, 1.5])
    weights = torch.tensor(data.draw(st.lists(weight, min_size=rows * length, max_size=rows * length)))
    weights = weights.double().view(rows, length)
    tokens = torch.randn(rows, length, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = by_token(module, tokens, weights, parameters)
    plain = torch.autograd.grad(module(tokens).sin().sum(), tokens)[0]
    masks = TokenMasks(dict.fromkeys(parameters, TokenMask.of(weights)), parameters)
    with masks:
        objective = module(tokens).sin().sum()
    with masks.differentiating(objective):
        objective.backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-13)
    # What flows on towards the input is what it was, in bits.
    assert tokens.grad is not None
    assert torch.equal(tokens.grad, plain)


@pytest.mark.long
@given(rows=st.integers(1, 3), length=st.integers(1, 5), seed=st.integers(0, 99), padding=st.sampled_from([None, 0, 2]))
def test_an_embedding_learns_from_each_token_by_its_weight(
    rows: int, length: int, seed: int, padding: int | None
) -> None:
    torch.manual_seed(seed)
    module = nn.Embedding(5, WIDTH, padding_idx=padding).double()
    tokens, weights = torch.randint(5, (rows, length)), torch.randint(3, (rows, length)).double() / 2
    expected = by_token(module, tokens, weights, named(module))
    with TokenMasks({"weight": TokenMask.of(weights)}, named(module)):
        module(tokens).sin().sum().backward()
    torch.testing.assert_close(module.weight.grad, expected["weight"], rtol=1e-12, atol=1e-13)


def test_denied_tokens_that_are_not_finite_reach_no_gradient() -> None:
    linear, tokens = nn.Linear(WIDTH, OUT), torch.randn(2, 3, WIDTH)
    weights = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 1.0]])
    with TokenMasks(dict.fromkeys(named(linear), TokenMask.of(weights)), named(linear)):
        output = linear(tokens)
        (output * torch.where(weights == 0, torch.inf, 1.0)[..., None]).sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    assert linear.weight.grad.isfinite().all()
    assert linear.bias.grad.tolist() == [4.5] * OUT


def test_only_some_parameters_of_a_layer_may_be_masked() -> None:
    linear, tokens = nn.Linear(WIDTH, OUT), torch.randn(2, 3, WIDTH)
    linear(tokens).sin().sum().backward()
    bias = linear.bias.grad
    linear.zero_grad()
    with TokenMasks({"weight": TokenMask.of(torch.zeros(2, 3))}, named(linear)):
        linear(tokens).sin().sum().backward()
    assert linear.weight.grad is not None
    assert not linear.weight.grad.any()
    assert bias is not None
    assert torch.equal(bias, linear.bias.grad)  # type: ignore[arg-type]


@pytest.mark.long
def test_what_comes_behind_may_work_in_place() -> None:
    for module in (nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT, bias=False)):
        tokens, weights = torch.randn(2, 3, WIDTH), torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 1.0]])
        expected = by_token(nn.Sequential(module, nn.ReLU()), tokens, weights, named(module))
        with TokenMasks(dict.fromkeys(named(module), TokenMask.of(weights)), named(module)):
            F.relu_(module(tokens)).sin().sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_checkpointed_layers_are_masked_when_they_are_computed_anew(backward: Callable[[Tensor], None]) -> None:
    module, tokens = nn.Sequential(nn.Linear(WIDTH, OUT), nn.Tanh(), nn.Linear(OUT, OUT)), torch.randn(2, 3, WIDTH)
    weights = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 1.0]])
    expected = by_token(module, tokens, weights, named(module))
    masks = TokenMasks(dict.fromkeys(named(module), TokenMask.of(weights)), named(module))
    with masks:
        objective = checkpoint(module, tokens, use_reentrant=False).sin().sum()
    with masks.differentiating(objective):
        backward(objective)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_backward_for_what_is_not_reached_gives_no_gradient_as_elsewhere() -> None:
    module, tokens, elsewhere = nn.Linear(WIDTH, OUT), torch.randn(2, 3, WIDTH), nn.Parameter(torch.ones(2))
    masks = TokenMasks(dict.fromkeys(named(module), TokenMask.of(torch.ones(2, 3))), named(module))
    with masks:
        objective = module(tokens).sin().sum()
    with masks.differentiating(objective):
        torch.autograd.backward(objective, inputs=[elsewhere], retain_graph=True)
        assert [one.grad for one in (elsewhere, module.weight)] == [None, None]
        torch.autograd.backward(objective, inputs=[elsewhere, module.bias])
    assert elsewhere.grad is module.weight.grad is None
    assert module.bias.grad is not None


@pytest.mark.parametrize("module", [nn.Linear(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, 2)], ids=["known", "unknown"])
def test_a_backward_within_the_backward_is_refused(module: nn.Module) -> None:
    """Its graph isn't seen, and what is unknown in it would reach parameters unmasked."""
    tokens = torch.randn(2, 3, WIDTH, requires_grad=True)
    masks = TokenMasks(dict.fromkeys(named(module), TokenMask.of(torch.eye(2, 3))), named(module))
    inputs = [tokens] * (1 if isinstance(module, nn.Linear) else 2)
    with masks:
        objective = checkpoint(module, *inputs, use_reentrant=True).sum()
    with masks.differentiating(objective), pytest.raises(PlanError, match="use_reentrant=False"):
        objective.backward()


class Squared(torch.autograd.Function):
    """A function of the user's own: PyTorch shows it to no mode."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        found: Tensor = 2 * weight * gradient
        return found


def squared(weight: Tensor) -> Tensor:
    found: Tensor = Squared.apply(weight)  # type: ignore[no-untyped-call]
    return found


def flattened(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.linear(tokens.flatten(0, 1), weight).sum()


WAYS_AROUND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "rows and tokens flattened": (flattened, r"linear gives \[6, 3\]"),
    "tokens first": (lambda w, t: F.linear(t.transpose(0, 1), w).sum(), r"linear gives \[3, 2, 3\]"),
    "heads between": (lambda w, t: F.linear(t.unflatten(1, (1, 3)), w).sum(), "linear gives"),
    "a product of matrices": (lambda w, t: (t @ w).sum(), "matmul"),
    "einsum": (lambda w, t: torch.einsum("rtd,de->rte", t, w).sum(), "einsum"),
    "a penalty": (lambda w, t: F.linear(t, w).sum() + w.square().sum(), "add"),
    "a function of one's own": (lambda w, t: F.linear(t, squared(w)).sum(), "Squared"),
    "among others in a list": (lambda w, t: F.linear(t, torch.cat([w, w])).sum(), "Cat"),
    "mixed with tokens in place": (lambda w, t: F.linear(t, w.clone().add_(t[0])).sum(), "add_"),
    "as tokens": (lambda w, t: F.linear(w[None], t[0]).sum(), "."),
    "a product with the wrong shape": (lambda w, t: (w * t[:, None]).sum(), r"mul gives \[2, 1, 3, 3\]"),
}


@pytest.mark.parametrize(("way", "by"), WAYS_AROUND.values(), ids=WAYS_AROUND)
def test_a_gradient_by_another_way_is_refused_by_name(way: Callable[[Tensor, Tensor], Tensor], by: str) -> None:
    weight, tokens = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(2, 3, WIDTH)
    masks = TokenMasks({"body.weight": TokenMask.of(torch.tensor([[0.0, 1, 1], [1, 1, 1]]))}, {"body.weight": weight})
    with masks:
        objective = way(weight, tokens)
    with pytest.raises(PlanError, match=rf"body\.weight \(.*({by})"), masks.differentiating(objective):
        pass


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_whose_gradient_follows_from_other_tokens_is_refused(option: Any) -> None:
    module = nn.Embedding(5, WIDTH, **option)
    masks = TokenMasks({"weight": TokenMask.of(torch.tensor([[0.0, 1.0]]))}, named(module))
    with masks:
        objective = module(torch.tensor([[1, 2]])).sum()
    with pytest.raises(PlanError, match="weight"), masks.differentiating(objective):
        pass


def test_without_a_graph_nothing_is_tapped() -> None:
    linear, tokens = nn.Linear(WIDTH, OUT), torch.randn(2, 3, WIDTH)
    with TokenMasks(dict.fromkeys(named(linear), TokenMask.of(torch.zeros(2, 3))), named(linear)), torch.no_grad():
        assert torch.equal(linear(tokens), F.linear(tokens, linear.weight, linear.bias))


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_that_lie_otherwise_in_memory_are_given_the_same_bits(bias: bool) -> None:
    """PyTorch takes another kernel for such tokens where the weight needs no gradient."""
    torch.manual_seed(0)
    for width, length, rows in ((8, 12, 4), (7, 5, 3)):
        linear, tokens = nn.Linear(width, width, bias=bias), torch.randn(rows, width, length).mT.requires_grad_()
        plain = linear(tokens)
        (expected,) = torch.autograd.grad(plain.sin().sum(), tokens)
        mask = TokenMask.of(torch.randint(2, (rows, length)).double())
        with TokenMasks(dict.fromkeys(named(linear), mask), named(linear)):
            found = linear(tokens)
            (gradient,) = torch.autograd.grad(found.sin().sum(), tokens)
        assert torch.equal(plain, found)
        assert torch.equal(expected, gradient)


@pytest.mark.parametrize("kind", LAYERS)
def test_denied_tokens_read_zeros_or_the_layer_is_refused(kind: str) -> None:
    """There are as many tokens as channels, so that a convolution's could be taken for one another."""
    torch.manual_seed(0)
    module, without = LAYERS[kind]().double(), LAYERS[kind]().double()
    with torch.no_grad():
        for parameter in without.parameters():
            parameter.zero_()
    tokens, admits = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64), torch.rand(2, WIDTH) > 0.5
    mask = TokenMask(admits)
    masks = TokenMasks(dict.fromkeys(named(module), mask), named(module), zeroed=named(module))
    if kind in ("weight norm", "product and sum", "half of a table"):
        with masks, pytest.raises(UntappedError, match="can't be told apart where these parameters are read"):
            module(tokens)
        return
    with masks:
        found = module(tokens)
    torch.testing.assert_close(found, torch.where(admits[..., None], module(tokens), without(tokens)), rtol=0, atol=0)
    assert not torch.equal(found, module(tokens))
    objective = found.sin().sum()
    with masks.differentiating(objective):
        objective.backward()
    expected = by_token(module, tokens, admits.double(), named(module))
    for name, parameter in named(module).items():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("read", [lambda p: p.sum(), lambda p: torch.cat([p, p]), Tensor.tolist, lambda p: p.detach()])
def test_nothing_else_reads_what_some_tokens_read_as_zeros(read: Any) -> None:
    weight = nn.Parameter(torch.randn(OUT, WIDTH))
    mask = TokenMask(torch.tensor([[True, False]]))
    with TokenMasks({"w": mask}, {"w": weight}, zeroed=["w"]), torch.no_grad():
        assert (weight.shape, weight.dtype) == ((OUT, WIDTH), torch.float32)
        with pytest.raises(UntappedError, match=r"w \("):
            read(weight)


@pytest.mark.parametrize("options", [{}, {"keep": False}, {"keep": True}], ids=str)
def test_what_is_tapped_is_kept_where_that_was_asked_for(options: dict[str, bool]) -> None:
    """In the order of the forward pass, with what was read, apart from its graph, and what was given."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Transposed(nn.Conv1d(WIDTH, OUT, 1, bias=False)))
    tokens = torch.randn(2, 3, WIDTH, requires_grad=True)
    masks = TokenMasks(dict.fromkeys(named(module), TokenMask.of(torch.eye(2, 3))), named(module), **options)
    assert masks.tapped == []
    with masks:
        between = module[0](tokens)
        output = module[1](between)
    if not options.get("keep"):
        assert masks.tapped == []
        return
    assert [(tap.name, tap.axis) for tap in masks.tapped] == [("0.weight", 1), ("0.bias", 1), ("1.inner.weight", 2)]
    assert all(torch.equal(tap.tokens, tokens) for tap in masks.tapped[:2])
    assert torch.equal(masks.tapped[2].tokens, between.mT)
    assert not any(tap.tokens.requires_grad for tap in masks.tapped)
    assert masks.tapped[1].output is between
    assert torch.equal(masks.tapped[2].output.mT, output)
