"""Models and losses that meddle with gradients: the step's mean is still the one taken by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from cosmati import SubStep
from cosmati.core.batch import Data
from cosmati.core.loss import LossFunction
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.trainer import Trainer

Rows = tuple[Tensor, Tensor]
POLICY = """
version: 1
taxonomy: t
rules:
  - {class: open, weight: 0.75}
"""


class SharedMemory(nn.Module):
    """Autograd hands views of one tensor to several parameters; some of them in one microbatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(6))
        self.same = nn.Parameter(torch.randn(6))
        self.low, self.high = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(4))
        self.rare, self.rarer = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, input: Tensor) -> Tensor:
        shift = self.whole.view(2, 3) + self.same.view(2, 3)
        if input[0, 0] < 0:
            shift = shift + (self.rare.view(2, 3) + self.rarer.view(2, 3))
        cut = self.whole.view(2, 3) + torch.cat([self.low, self.high]).view(2, 3)
        return self.head(torch.tanh(self.body(input) + shift.flatten()) * cut.flatten())


class HalfSilent(torch.autograd.Function):
    """Has a gradient for some microbatches, and None for the others."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return input * weight

    @staticmethod
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, *outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        return outputs[0] * weight, (outputs[0] * input).sum(0) if input[0, 0] > 0 else None


class Silent(nn.Module):
    """A model around `HalfSilent`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, input: Tensor) -> Tensor:
        scaled: Tensor = HalfSilent.apply(input, self.scale)  # type: ignore[no-untyped-call]
        return self.head(scaled)


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

    def forward(self, input: Tensor) -> Tensor:
        return (input.to(torch.complex64) @ self.weight).abs()


class Segments(nn.Module):
    """Reentrant checkpoints, which run backward within backward."""

    def __init__(self, *, shared: bool, reentrant: bool = True) -> None:
        super().__init__()
        self.shared, self.reentrant = shared, reentrant
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        segment = self.first if self.shared else self.second
        return self.head(checkpoint(segment, hidden, use_reentrant=self.reentrant))


def plain(model: nn.Module, data: Data) -> Tensor:
    """Return the mean over the microbatch."""
    return cross_entropy(model(data[0]), data[1])


def attacked(model: nn.Module, data: Data) -> Tensor:
    """Find the worst input with a backward of its own, and clear the gradients after it: the usual FGSM."""
    input = data[0].clone().requires_grad_()
    plain(model, (input, data[1])).backward()
    assert input.grad is not None
    worst = (input + 0.1 * input.grad.sign()).detach()
    model.zero_grad()
    return plain(model, (worst, data[1]))


def littered(model: nn.Module, data: Data) -> Tensor:
    """Leave gradients behind."""
    plain(model, data).backward()
    return plain(model, data)


def one_number(model: nn.Module, data: Data) -> Tensor:
    """Return a loss of shape [1], which backward takes."""
    return plain(model, data).view(1)


class Norms(Observer):
    """Keeps what was measured."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def _rows(num: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 5, generator=generator), torch.randint(3, (num,), generator=generator)


def _trained(
    make: Callable[[], nn.Module], loss: LossFunction, num_microbatches: int, *, governed: bool, observed: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[StepOutcome]]:
    """Take one step of SGD(lr=1), and return the update, the mean gradient taken by hand, and what was measured."""
    input, target = _rows(4 * num_microbatches)
    order = torch.arange(len(input))
    torch.manual_seed(0)
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = Norms()
    trainer = Trainer(
        model,
        loss,
        InMemory((input, target), len(input), class_ids=torch.zeros_like(order), class_names=("open",)),
        optimizers=[SGD(lr=1.0)],
        policy=load_policy(POLICY) if governed else None,
        taxonomy=Taxonomy("t", "1", (("open", "free"),)) if governed else None,
        observers=[norms] if observed else [],
        config=RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1, update_norm_every=1),
    )
    assert trainer.feed is not None
    microbatches = [batch.data for batch in trainer.feed.again(0)]
    expected = {name: torch.zeros_like(p) for name, p in before.items()}
    for data in microbatches:
        model.zero_grad()
        objective = loss(model, data)
        model.zero_grad()
        objective.sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                expected[name] += p.grad * (0.75 if governed else 1.0) / num_microbatches
    model.zero_grad()
    trainer.fit()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, expected, norms.outcomes


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("governed", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (SharedMemory, plain),
        (Silent, plain),
        (Complex, plain),
        (SharedMemory, attacked),
        (Silent, one_number),
        (lambda: Segments(shared=False), plain),
    ],
)
def test_the_mean_is_the_one_by_hand(
    make: Callable[[], nn.Module], loss: LossFunction, num_microbatches: int, governed: bool, observed: bool
) -> None:
    update, expected, _ = _trained(make, loss, num_microbatches, governed=governed, observed=observed)
    for name, value in expected.items():
        torch.testing.assert_close(update[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("governed", [False, True])
def test_what_a_loss_leaves_in_gradients_is_none_of_ours(governed: bool) -> None:
    with pytest.warns(UserWarning, match="left gradients behind"):
        update, expected, _ = _trained(Silent, littered, 4, governed=governed, observed=False)
    for name, value in expected.items():
        torch.testing.assert_close(update[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("governed", [False, True])
def test_gradients_in_parts_are_refused_by_name(governed: bool) -> None:
    """(a1 + a2) + (b1 + b2) isn't ((a1 + a2) + b1) + b2."""
    with pytest.raises(PlanError, match=r"first\.(weight|bias) arrives in parts.*use_reentrant=False"):
        _trained(lambda: Segments(shared=True), plain, 2, governed=governed, observed=False)
    update, expected, _ = _trained(
        lambda: Segments(shared=True, reentrant=False), plain, 2, governed=governed, observed=True
    )
    torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_a_reentrant_checkpoint_trains_in_any_sub_step(place: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(5, 3) for name in "abc"})
    at_first = {name: value.clone() for name, value in model.state_dict().items()}
    row = torch.randn(4, 5)

    def once(model: Any, data: Tensor) -> Tensor:
        return model["a"](data).square().mean()

    def within(model: Any, data: Tensor) -> Tensor:
        return checkpoint(model["b"], data.clone().requires_grad_(), use_reentrant=True).square().mean()

    steps = [SubStep("once", once, "a.*"), SubStep("within", within, "b.*")]
    optimizers = [SGD(lr=0.5, parameters="a.*"), SGD(lr=0.5, parameters="b.*"), SGD(lr=0.5, parameters="c.*")]
    config = RunConfig(budget="1ba", num_microbatches=2, num_threads=1)
    steps.append(SubStep("rest", lambda model, data: model["c"](data).square().mean(), "c.*"))
    steps.insert(0, steps.pop(place))
    Trainer(model, steps, InMemory(row, 4), optimizers=optimizers, config=config).fit()
    for name in "abc":
        weight = at_first[f"{name}.weight"].double().requires_grad_()
        output = row.double() @ weight.T + at_first[f"{name}.bias"].double()
        (gradient,) = torch.autograd.grad(output.square().mean(), weight)
        torch.testing.assert_close(model[name].weight.double(), weight.detach() - 0.5 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("register", "at_step", "breaks"),
    [
        ("register_post_accumulate_grad_hook", -1, True),
        ("register_post_accumulate_grad_hook", 1, True),
        ("register_hook", -1, False),
    ],
)
def test_a_hook_that_sees_what_a_rank_has_summed_so_far_breaks_what_it_makes_depend_on_ranks(
    register: str, at_step: int, breaks: bool, num_microbatches: int
) -> None:
    model = nn.Linear(5, 3)

    def loss(model: nn.Module, data: Tensor) -> Tensor:
        if at_step == trainer.clock.step:
            getattr(model.weight, register)(lambda _: None)
        return model(data).square().mean()

    if at_step < 0:
        getattr(model.weight, register)(lambda _: None)
    config = RunConfig(budget="2ba", num_microbatches=num_microbatches, num_threads=1)
    trainer = Trainer(model, loss, InMemory(torch.randn(8, 5), 4), optimizers=SGD(lr=0.1), config=config)
    breaks = breaks and num_microbatches > 1
    assert trainer.plan.holds(Promise.PARITY) == (at_step >= 0 or not breaks)
    trainer.fit()
    assert trainer.plan.holds(Promise.PARITY) != breaks
    assert trainer.plan.holds(Promise.ELASTIC) == (num_microbatches > 1 and not breaks)
    assert ("weight has a hook (register_post_accumulate_grad_hook)" in str(trainer.plan)) == breaks


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5, sparse=True), nn.Linear(5, 3)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.words(input.abs().long()).mean(1))


def test_sparse_gradients_are_refused_by_name_and_train_on_the_short_road() -> None:
    with pytest.raises(PlanError, match=r"words\.weight is sparse.*sparse=False"):
        _trained(Words, plain, 2, governed=False, observed=True)
    update, expected, _ = _trained(Words, plain, 1, governed=False, observed=False)
    torch.testing.assert_close(update, expected)


class Broadcast(nn.Module):
    """A bf16 parameter beside float32 ones, and gradients that autograd only expands."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(37, 11) / 100), nn.Linear(5, 3)
        self.narrow = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))

    def forward(self, input: Tensor) -> Tensor:
        return self.head(input * self.table.sum() * self.narrow.float().square().mean())


def test_norms_are_those_of_gradients_in_memory() -> None:
    _, _, [outcome] = _trained(Broadcast, plain, 1, governed=True, observed=True)
    torch.manual_seed(0)
    model = Broadcast()
    input, target = _rows(4)
    order = outcome.batches[0].lineage.row_ids
    plain(model, (input[order], target[order])).backward()
    gradients = [p.grad.float() * 0.75 for p in model.parameters() if p.grad is not None]
    assert outcome.norms is not None
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    assert outcome.norms.item() == expected.double().item()


def test_the_update_norm_of_a_narrow_region_is_as_wide_as_the_others() -> None:
    """The norms of two bf16 parameters were put together in bf16, if they had a region to themselves."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"narrow": nn.Linear(5, 64).bfloat16(), "wide": nn.Linear(64, 3)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = Norms()
    regions = "regions: {narrow: {params: ['narrow.*']}, wide: {params: ['wide.*']}}\nrules:"

    def loss(model: nn.Module, data: Data) -> Tensor:
        hidden = torch.tanh(model.get_submodule("narrow")(data[0].bfloat16()))
        return cross_entropy(model.get_submodule("wide")(hidden.float()), data[1])

    Trainer(
        model,
        loss,
        InMemory(_rows(4), 4, class_names=("open",)),
        optimizers=[SGD(lr=1.0)],
        policy=load_policy(POLICY.replace("rules:", regions)),
        taxonomy=Taxonomy("t", "1", (("open", "free"),)),
        observers=[norms],
        config=RunConfig(budget="1ba", num_microbatches=1, num_threads=1, update_norm_every=1),
    ).fit()
    change = [torch.linalg.vector_norm(p.detach() - before[name]) for name, p in model.named_parameters()][:2]
    expected = torch.linalg.vector_norm(torch.stack([norm.float() for norm in change]))
    assert norms.outcomes[0].update_norms is not None
    assert norms.outcomes[0].update_norms[0] == expected
    assert expected.bfloat16() != expected, "bf16 would have rounded it"
