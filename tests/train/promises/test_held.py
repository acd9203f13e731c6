"""State is found wherever models and losses of other people's keep it, and promises that it breaks are withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.held import places_in
from cosmati.train.trainer import Trainer
from cosmati.train.values import content_of
from tests.train.promises.swapped import NUM_STEPS, Case, leaked, promised, trained

NEAR = ("first.*",), ("second.*",)
TABLE: dict[str, Tensor] = {}


class Body(nn.Module):
    """Two linear layers, and something between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.between(self.first(rows)))
        return output


class Frozen(Body):
    """A codebook that is a parameter, moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.zeros(8), requires_grad=False)

    def between(self, hidden: Tensor) -> Tensor:
        self.book.data.lerp_(hidden.detach().mean(0), 0.1)
        return hidden + self.book


class Scaled(Body):
    """A trainable scale that the first rows set."""

    def between(self, hidden: Tensor) -> Tensor:
        self.first.bias.data.sub_(hidden.detach().mean(0), alpha=0.1)
        return hidden


class Teachers(Body):
    """A module hidden in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Linear(8, 8)]

    def between(self, hidden: Tensor) -> Tensor:
        teacher = self.teachers[0]
        teacher.bias.data.lerp_(hidden.detach().mean(0), 0.1)
        return hidden + teacher.bias.detach()


class Bank(Body):
    """A buffer too large to be compared whole, written past its version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1 << 14, 8))

    def between(self, hidden: Tensor) -> Tensor:
        self.bank.data[5].lerp_(hidden.detach().mean(0), 0.1)
        return hidden + self.bank[5]


class Registry(Body):
    """A global that forward names."""

    def between(self, hidden: Tensor) -> Tensor:
        before = TABLE.get("mean", torch.zeros(8))
        TABLE["mean"] = hidden.detach().mean(0)
        return hidden + before

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + 0 * len(TABLE)


class Hooked(Body):
    """A forward hook that remembers."""

    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(8)

        def add(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
            nonlocal mean
            before, mean = mean, output.detach().mean(0)
            return output + before

        self.first.register_forward_hook(add)


class Shared(Body):
    """A mean that the class keeps."""

    mean = torch.zeros(8)

    def between(self, hidden: Tensor) -> Tensor:
        before = Shared.mean
        Shared.mean = hidden.detach().mean(0)
        return hidden + before


class Late(Body):
    """A module that is made in the first forward pass."""

    def between(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(8, affine=False)
        normed: Tensor = self.norm(hidden)
        return normed


class Backward(torch.autograd.Function):
    """The identity; divides gradients by a norm that it remembers."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, seen: Tensor) -> Tensor:
        context.seen = seen
        return hidden.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        scaled = gradients[0] / (1 + context.seen)
        context.seen.lerp_(gradients[0].norm(), 0.5)
        return scaled, None


class InBackward(Body):
    """State that moves when gradients pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, hidden: Tensor) -> Tensor:
        output: Tensor = Backward.apply(hidden, self.seen)
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parameters book": Frozen,
    "parameters first.bias": Scaled,
    "parameters teachers[0].bias": Teachers,
    "buffers bank": Bank,
    "attributes forward.TABLE": Registry,
    "attributes first.(hook).mean": Hooked,
    "attributes Shared.mean": Shared,
    "buffers norm": Late,
    "buffers seen": InBackward,
}


@pytest.mark.parametrize("place", MODELS)
def test_what_a_model_moves_is_found_wherever_it_is(place: str) -> None:
    TABLE.clear()
    Shared.mean = torch.zeros(8)
    case = Case(MODELS[place], *NEAR, loss=Classification(3))
    trainer = trained(case, [SGD(lr=0.1)])
    assert f"forward changes the {place}" in str(trainer.plan)
    assert not promised(trainer)
    assert not trainer.plan.holds(Promise.ELASTIC)
    TABLE.clear()
    if place != "buffers seen":  # No gradient of a denied row passes there.
        # The control: rows of the denied class do get through.
        Shared.mean = torch.zeros(8)
        assert leaked(trainer, trained(case, [SGD(lr=0.1)], swapped=NUM_STEPS - 1))
    TABLE.clear()


class Centred(nn.Module):
    """A criterion that keeps a centre (DINO's)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(scores - self.centre, labels)
        self.centre.lerp_(scores.detach().mean(0), 0.3)
        return loss


class Task:
    """A loss that is a method, with state in plain attributes."""

    def __init__(self) -> None:
        self.centre, self.criterion, self.scales = torch.zeros(3), Centred(), {"n": 0}

    def training_step(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(data[0])
        before, self.centre = self.centre, scores.detach().mean(0)
        return cross_entropy(scores - before, data[1])

    def by_criterion(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self.criterion(model(data[0]), data[1])
        return loss

    def counted(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        self.scales["n"] += 1
        return cross_entropy(model(data[0]) / (1 + 0.1 * self.scales["n"]), data[1])


CRITERION = Centred()


def by_global(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = CRITERION(model(data[0]), data[1])
    return loss


def by_argument(criterion: nn.Module, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = criterion(model(data[0]), data[1])
    return loss


def by_default(model: nn.Module, data: tuple[Tensor, Tensor], seen: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006
    seen["n"] += 1
    return cross_entropy(model(data[0]) / (1 + 0.1 * seen["n"]), data[1])


def closed() -> Callable[..., Tensor]:
    criterion = Centred()
    return lambda model, data: criterion(model(data[0]), data[1])


def in_pairs() -> Callable[..., Tensor]:
    criteria = [(Centred(), 1.0)]
    return lambda model, data: torch.stack([w * each(model(data[0]), data[1]) for each, w in criteria]).sum()


def in_dicts() -> Callable[..., Tensor]:
    criteria = {"heads": {"main": [Centred(), 1.0]}}
    return lambda model, data: criteria["heads"]["main"][0](model(data[0]), data[1])  # type: ignore[operator,no-any-return]


def far_within() -> Callable[..., Tensor]:
    nest: Any = Centred()
    for _ in range(9):
        nest = [0.0, nest]

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        criterion = nest
        while isinstance(criterion, list):
            criterion = criterion[1]
        return criterion(model(data[0]), data[1])  # type: ignore[no-any-return]

    return loss


def among_many() -> Callable[..., Tensor]:
    criteria = [[0.0] * 1000 + [Centred()]]
    return lambda model, data: criteria[0][1000](model(data[0]), data[1])  # type: ignore[operator]


def annealed() -> Callable[..., Tensor]:
    step = 0

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal step
        step += 1
        return cross_entropy(model(data[0]) / (1 + 0.1 * step), data[1])

    return loss


LOSSES: dict[str, tuple[Callable[[], Any], bool]] = {
    "attributes loss.centre": (lambda: Task().training_step, False),
    "buffers loss.criterion.centre": (lambda: Task().by_criterion, True),
    "attributes loss.scales": (lambda: Task().counted, False),
    "buffers loss.CRITERION.centre": (lambda: by_global, True),
    "buffers loss(0).centre": (lambda: partial(by_argument, Centred()), True),
    "attributes loss.default 0": (lambda: by_default, False),
    "buffers loss.criterion.centre ": (closed, True),
    "buffers loss.criteria[0][0].centre": (in_pairs, True),
    "buffers loss.criteria[heads][main][0].centre": (in_dicts, True),
    f"buffers loss.nest{'[1]' * 9}.centre": (far_within, True),
    "attributes loss.step": (annealed, False),
}


@pytest.mark.parametrize("place", LOSSES)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_a_loss_moves_is_found_wherever_it_is(place: str, num_microbatches: int) -> None:
    make, is_kept = LOSSES[place]
    trainer = trained(Case(Body, *NEAR, loss=make()), [SGD(lr=0.1)], num_microbatches=num_microbatches)
    assert f"forward changes the {place.strip()}" in str(trainer.plan)
    assert not promised(trainer)
    assert trainer.plan.holds(Promise.RESUME) == is_kept


@pytest.mark.parametrize("place", [place for place, (_, is_kept) in LOSSES.items() if is_kept])
def test_buffers_that_a_loss_reaches_come_back(place: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)

    def run(folder: Path | None, budget: str) -> Trainer:
        CRITERION.centre.zero_()
        config = RunConfig(budget=budget, num_threads=1, run_folder=folder, change=("budget",))
        trainer = Trainer(Body(), LOSSES[place][0](), InMemory(rows, 8), optimizers=[SGD(lr=0.1)], config=config)
        trainer.fit()
        return trainer

    whole = run(None, "9ba")
    run(tmp_path, "5ba")
    again = run(tmp_path, "9ba")
    assert again.plan.holds("resume")
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_criterion_that_nothing_trains_is_told_of() -> None:
    head = nn.Linear(3, 3)
    for loss in (
        lambda model, data: cross_entropy(head(model(data[0])), data[1]),
        partial(lambda layer, model, data: cross_entropy(layer(model(data[0])), data[1]), head),
    ):
        with pytest.warns(UserWarning, match=r"Gradients reach loss.*weight.*no optimizer of this run"):
            trained(Case(Body, *NEAR, loss=loss), [SGD(lr=0.1)])


def test_nothing_is_told_of_losses_and_models_that_keep_nothing() -> None:
    weights = torch.ones(3)
    scale = {"temperature": 2.0}
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        smooth: Tensor = criterion(model(data[0]) / scale["temperature"], data[1])
        return smooth + cross_entropy(model(data[0]), data[1], weights)

    trainer = trained(Case(Body, *NEAR, loss=loss), [SGD(lr=0.1)])
    assert promised(trainer)
    assert trainer.plan.holds(Promise.ELASTIC)
    assert trainer.plan.holds(Promise.RESUME)


def test_a_history_for_plots_may_be_declared() -> None:
    history: list[float] = []

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        found = cross_entropy(model(data[0]), data[1])
        history.append(found.item())
        return found

    assert not promised(trained(Case(Body, *NEAR, loss=loss), [SGD(lr=0.1)]))
    loss.forward_caches = ("history",)  # type: ignore[attr-defined]
    assert promised(trained(Case(Body, *NEAR, loss=loss), [SGD(lr=0.1)]))


class Tempered(Body):
    """A temperature that somebody else sets."""

    tau = 1.0

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.tau


@pytest.mark.parametrize("from_step", [0, 5])
def test_what_a_loop_or_an_observer_changes_is_found(from_step: int) -> None:
    model = Tempered()
    model.tau = 1.0
    config = RunConfig(budget="12ba", num_threads=1)
    with Trainer(model, Classification(3), optimizers=[SGD(lr=0.1)], config=config) as trainer:
        for step in range(12):
            trainer.step((torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
            if step >= from_step:
                model.tau *= 0.9
    assert not trainer.plan.holds("resume")
    assert "tau changes between steps, and no checkpoint holds it" in str(trainer.plan)


def test_a_layer_that_is_put_in_after_the_plan_is_watched() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
    config = RunConfig(budget="3ba", num_threads=1, num_microbatches=2)
    trainer = Trainer(model, Classification(3), optimizers=[SGD(lr=0.1)], config=config)
    assert trainer.plan.holds("elastic")
    model[1] = nn.BatchNorm1d(8, affine=False)
    with trainer:
        trainer.step((torch.randn(8, 6), torch.zeros(8, dtype=torch.int64)))
    assert "forward changes the buffers 1." in str(trainer.plan)
    assert not trainer.plan.holds("elastic")


def test_circles_and_odd_objects_end() -> None:
    class Odd:
        def __init__(self) -> None:
            self.me, self.all = self, [self, {"me": self}]
            self.types, self.empty = (int, torch, len), None
            self.sparse = torch.eye(3).to_sparse()
            self.half, self.complex, self.one = torch.ones(3).half(), torch.ones(3) * 1j, torch.tensor(1.0)
            self.big = torch.zeros(1 << 17, dtype=torch.complex128)
            self.long = list(range(100_000))

        def __call__(self, model: nn.Module, data: Any) -> Tensor:
            raise NotImplementedError

    odd = Odd()
    before = {place.name: content_of(place.value) for place in places_in({"loss": odd})}
    assert before == {place.name: content_of(place.value) for place in places_in({"loss": odd})}
    odd.big[77777] = 1
    odd.long.append(1)
    after = {place.name: content_of(place.value) for place in places_in({"loss": odd})}
    assert {name for name, content in after.items() if before[name] != content} >= {"loss.big", "loss.long"}


@lru_cache(maxsize=1)
def table() -> dict[str, Tensor]:
    return TABLE


class Cached(Body):
    """Asks a cached function, which has read a global table."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * table()["scale"]


def test_what_a_cached_function_reads_is_looked_at() -> None:
    table.cache_clear()
    TABLE["scale"] = torch.ones(1)
    try:
        model = Cached()
        before = {place.name: content_of(place.value) for place in places_in({"": model})}
        TABLE["scale"] = torch.full((1,), 2.0)
        after = {place.name: content_of(place.value) for place in places_in({"": model})}
    finally:
        del TABLE["scale"]
    assert any("TABLE" in name and before[name] != content for name, content in after.items()), [*after]


def test_a_criterion_behind_more_items_than_are_followed_withdraws_promises() -> None:
    trainer = trained(Case(Body, *NEAR, loss=among_many()), [SGD(lr=0.1)])
    assert not promised(trainer)
    assert not trainer.plan.holds(Promise.ELASTIC)


def test_a_list_that_holds_itself_leads_nowhere() -> None:
    around: list[Any] = [1.0]
    around.append(around)
    assert [place.name for place in places_in({"loss": lambda: around})] == ["loss.around"]
