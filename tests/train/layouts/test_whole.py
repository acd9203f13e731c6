"""What holds for gradients that every rank has whole: memory, types, layouts in memory, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.routing.regions import partition_parameters
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks

ALL = ((1.0,),)


def layout_of(model: nn.Module, num_microbatches: int) -> Whole:
    return Whole(model, partition_parameters(model), Ranks(), num_microbatches)


def root_of(model: nn.Module, data: list[Any], loss: Any, *, measure: bool = False) -> dict[str, Tensor]:
    layout = layout_of(model, len(data))
    with layout.step(ALL * len(data), frozenset(range(len(layout.parameters))), measure=measure) as step:
        for index, rows in enumerate(data):
            with step.slot(index) as slot:
                slot.backward(loss(model, rows))
        return dict(step.root(None).tensors)


def pairwise(leaves: list[Tensor]) -> Tensor:
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def square(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().sum()


class Reused(nn.Module):
    """One matrix tied to another, one used twice, and one used in half of the microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.first(x))))
        hidden = self.tied(hidden)
        return self.sometimes(hidden) if x.sum() > 0 else hidden


class Products(nn.Module):
    """Gradients that come with strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))
        self.kernel = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(2, 2, 6, 1).expand(2, 2, 6, 6).contiguous(memory_format=torch.channels_last)
        mixed = torch.einsum("hij,bj->bhi", self.weight, x.reshape(-1)[:10].view(2, 5))
        return mixed.flatten().sum() * self.kernel(images)


CASES = {
    "reused": (Reused, (6, 4), torch.float32),
    "products": (Products, (24,), torch.float32),
    "bfloat16 parameters": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), (6, 5), torch.bfloat16),
    "float64 parameters": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), (6, 5), torch.float64),
}


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_pairwise_sum_of_leaves(name: str, num: int) -> None:
    make, shape, dtype = CASES[name]
    torch.manual_seed(num)
    model = make().to(dtype)
    data = [torch.randn(shape, dtype=dtype) for _ in range(num)]
    found = {measure: root_of(model, data, square, measure=measure) for measure in (False, True)}
    named = dict(model.named_parameters())
    columns: dict[str, list[Tensor | None]] = {n: [] for n in named}
    for rows in data:
        gradients = torch.autograd.grad(square(model, rows), list(named.values()), allow_unused=True)
        for n, gradient in zip(named, gradients, strict=True):
            columns[n].append(gradient if gradient is None or dtype is torch.float64 else gradient.float())
    for n, column in columns.items():
        if all(g is None for g in column):
            assert n not in found[False]
        elif all(g is not None for g in column):
            expected = pairwise([g for g in column if g is not None])
            for root in found.values():
                assert root[n].dtype is expected.dtype
                assert torch.equal(root[n], expected)


def test_each_gradient_is_divided_by_a_denominator_of_its_own_precision() -> None:
    """Rounded to float32, a denominator is up to 6e-8 off; float32 gradients keep the bits that they had."""
    model = nn.ModuleList([nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2)])
    denominator = torch.tensor([0.1 + 1.0], dtype=torch.float64)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        assert isinstance(model, nn.ModuleList)
        return square(model[0], rows.double()).float() + square(model[1], rows)

    found: list[dict[str, Tensor]] = []
    for divisor in (None, denominator):
        torch.manual_seed(0)
        with layout_of(model, 2).step(ALL * 2, frozenset(range(4)), measure=False) as step:
            for index in range(2):
                with step.slot(index) as slot:
                    slot.backward(loss(model, torch.randn(4, 3)))
            found.append({name: step_root.clone() for name, step_root in step.root(divisor).tensors.items()})
    for name, total in found[0].items():
        expected = total / (denominator[0] if total.dtype is torch.float64 else denominator[0].float())
        assert torch.equal(found[1][name], expected), name
    assert {gradient.dtype for gradient in found[1].values()} == {torch.float32, torch.float64}


@pytest.mark.parametrize("num", [2, 4])
def test_roots_are_laid_out_as_their_parameters(num: int) -> None:
    torch.manual_seed(0)
    model = Products()
    root = root_of(model, [torch.randn(24) for _ in range(num)], square)
    assert all(root[name].stride() == parameter.stride() for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("num", "further"), [(2, 0), (4, 1), (8, 2), (64, 5)])
def test_memory_beside_plain_accumulation(num: int, further: int) -> None:
    """Copies of the gradients that are alive at the end of any slot: one is plain accumulation's own."""
    model = nn.Linear(64, 64, bias=False)
    layout = layout_of(model, num)
    data = [torch.randn(2, 64) for _ in range(num)]
    most = 0
    with layout.step(ALL * num, frozenset({0}), measure=False) as step:
        for index, rows in enumerate(data):
            with step.slot(index) as slot:
                slot.backward(square(model, rows))
                levels = step._sum._tree._levels
                held = sum(node is not None for node in levels) + (model.weight.grad is not None)
                most = max(most, held)
        step.root(None)
    assert most - 1 == further


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layout = layout_of(model, 2)
    model[0].weight.grad = torch.ones(3, 3)
    learns = frozenset(range(4))

    def fail_in_mid_step() -> None:
        with layout.step(ALL * 2, learns, measure=True) as step:
            with step.slot(0) as slot:
                slot.backward(square(model, torch.ones(1, 3)))
                assert model[0].weight.grad is not None
            with step.slot(1) as slot:
                slot.backward(square(model, torch.ones(1, 3)))
                raise RuntimeError("in mid-step")

    with pytest.raises(RuntimeError, match="in mid-step"):
        fail_in_mid_step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not parameter._backward_hooks for parameter in model.parameters())


def test_weights_come_back_after_an_error() -> None:
    model = nn.Linear(3, 3)
    layout = layout_of(model, 1)
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def fail_there() -> None:
        with layout.perturbed(layout.weights().copied()):
            assert torch.equal(model.weight, 2 * kept["weight"])
            raise RuntimeError("there")

    with pytest.raises(RuntimeError, match="there"):
        fail_there()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    # w + e - e isn't w: the law is about a copy.
    offset = torch.full((3, 3), 1e8)
    assert not torch.equal(kept["weight"] + offset - offset, kept["weight"])
    with layout.perturbed(layout.weights().only(["weight"]).having({"weight": offset})):
        pass
    assert torch.equal(model.weight, kept["weight"])


def test_a_loss_that_differentiates_by_parameters_itself() -> None:
    """Attenuation is of the leaf, not of what the loss computes on its way there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    data = [torch.randn(5, 3) for _ in range(2)]

    def penalized(model: nn.Module, rows: Tensor) -> Tensor:
        value = model(rows).square().sum()
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + sum(g.square().sum() for g in gradients)

    layout = layout_of(model, 2)
    norms = []
    with layout.step(((0.5,), (0.25,)), frozenset(range(4)), measure=True) as step:
        for index, rows in enumerate(data):
            with step.slot(index) as slot:
                slot.backward(penalized(model, rows))
            norms.append(float(slot.norms[0]))
        root = step.root(None).tensors
    first, second = (torch.autograd.grad(penalized(model, rows), list(model.parameters())) for rows in data)
    for found, a, b in zip(root.values(), first, second, strict=True):
        torch.testing.assert_close(found, 0.5 * a + 0.25 * b)
    expected = [
        rho * sum(float(g.double().square().sum()) for g in leaf) ** 0.5 for rho, leaf in ((0.5, first), (0.25, second))
    ]
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("measure", [False, True])
def test_hooks_that_are_gone_are_not_asked(measure: bool) -> None:
    """PyTorch asks an empty dictionary of hooks in each backward pass; whose hooks are still there are asked."""
    model, seen = Reused(), list[Tensor]()
    model.first.bias.register_hook(seen.append)
    model.tied.bias.register_hook(seen.append).remove()
    handle = model.sometimes.bias.register_hook(seen.append)
    data = [torch.randn(2, 4).abs() for _ in range(4)]
    root_of(model, data, square, measure=measure)
    held = {name: parameter._backward_hooks for name, parameter in model.named_parameters()}
    assert {name for name, hooks in held.items() if hooks is not None} == {"first.bias", "sometimes.bias"}
    assert len(seen) == 2 * len(data)
    handle.remove()
    root_of(model, data, square, measure=measure)
    assert len(seen) == 3 * len(data)
    later = model.tied.bias.register_hook(seen.append)
    root_of(model, data, square, measure=measure)
    assert len(seen) == 5 * len(data)
    later.remove()
