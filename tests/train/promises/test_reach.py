"""State that's reached by way of code: namespaces, slots, functions' attributes, other files, classes and methods."""

from __future__ import annotations

import argparse
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.held import places_in, remember
from cosmati.train.trainer import Trainer
from cosmati.train.values import content_of
from tests.train.promises import kept_elsewhere
from tests.train.promises.swapped import NUM_STEPS, Case, leaked, promised, trained

NEAR = ("first.*",), ("second.*",)
GLOBAL = {"mean": 1.0}


class Body(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(rows).relu())
        return output


def plain(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def divided(loss: Tensor, kept: Any) -> Tensor:
    """Divide by a running mean that some object keeps."""
    result = loss / kept.mean
    kept.mean = 0.9 * kept.mean + 0.1 * float(loss.detach())
    return result


@dataclass(slots=True)
class Slotted:
    mean: float = 1.0


class Mangled:
    __slots__ = ("__mean",)

    def __init__(self) -> None:
        self.__mean = 1.0

    @property
    def mean(self) -> float:
        return self.__mean

    @mean.setter
    def mean(self, value: float) -> None:
        self.__mean = value


class Namespaced:
    mean = 1.0


def over(kept: Any) -> Callable[..., Tensor]:
    return lambda model, data: divided(plain(model, data), kept)


def by_own_attribute() -> Callable[..., Tensor]:
    def loss(model: nn.Module, data: Any) -> Tensor:
        return divided(plain(model, data), loss)

    loss.mean = 1.0  # type: ignore[attr-defined]
    return loss


def by_class() -> Callable[..., Tensor]:
    Namespaced.mean = 1.0

    def loss(model: nn.Module, data: Any) -> Tensor:
        result = plain(model, data) / Namespaced.mean
        Namespaced.mean = 0.9 * Namespaced.mean + 0.1 * float(result.detach())
        return result

    return loss


def by_imported() -> Callable[..., Tensor]:
    def loss(model: nn.Module, data: Any) -> Tensor:
        from tests.train.promises import kept_elsewhere as elsewhere

        return elsewhere.normalised(plain(model, data))

    return loss


def through_global(loss: Tensor) -> Tensor:
    result = loss / GLOBAL["mean"]
    GLOBAL["mean"] = 0.9 * GLOBAL["mean"] + 0.1 * float(loss.detach())
    return result


class Task:
    """Objects whose methods name a global."""

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        return self.helper(plain(model, data))

    def helper(self, loss: Tensor) -> Tensor:
        return through_global(loss)

    def step(self, model: nn.Module, data: Any) -> Tensor:
        return self._inner(plain(model, data))

    @staticmethod
    def _inner(loss: Tensor) -> Tensor:
        return through_global(loss)

    @classmethod
    def of_class(cls, model: nn.Module, data: Any) -> Tensor:
        return cls._inner(plain(model, data))

    @cached_property
    def ready(self) -> float:
        return GLOBAL["mean"]


def by_closure() -> Callable[..., Tensor]:
    task = Task()
    return lambda model, data: task.step(model, data) + 0


class Criterion(nn.Module):
    """A loss that is a module."""

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return self.inner(plain(model, data))

    def inner(self, loss: Tensor) -> Tensor:
        return through_global(loss)


LOSSES: dict[str, Callable[[], Any]] = {
    "loss.kept.mean namespace": lambda: over(types.SimpleNamespace(mean=1.0)),
    "loss.kept.mean argparse": lambda: over(argparse.Namespace(mean=1.0)),
    "loss.kept.mean slots": lambda: over(Slotted()),
    "loss.kept._Mangled__mean": lambda: over(Mangled()),
    "loss.mean": by_own_attribute,
    "loss(keyword).mean": lambda: partial(lambda m, d, keyword: divided(plain(m, d), keyword), keyword=Slotted()),
    "Namespaced.mean": by_class,
    "loss.kept_elsewhere.normalised.mean": lambda: lambda m, d: kept_elsewhere.normalised(plain(m, d)),
    "Kept.mean": lambda: lambda m, d: kept_elsewhere.by_class(plain(m, d)),
    "normalised.mean": by_imported,
    "loss.helper.through_global.GLOBAL": Task,
    "GLOBAL step": lambda: Task().step,
    "GLOBAL of_class": lambda: Task.of_class,
    "GLOBAL closure": by_closure,
    "GLOBAL inner": Criterion,
}


def reset() -> None:
    kept_elsewhere.reset()
    GLOBAL["mean"] = 1.0


@pytest.mark.parametrize("place", LOSSES)
def test_what_a_loss_moves_by_way_of_code_is_found(place: str) -> None:
    runs = []
    for swapped in (None, NUM_STEPS - 1):
        reset()
        runs.append(trained(Case(Body, *NEAR, loss=LOSSES[place]()), [SGD(lr=0.1)], swapped=swapped))
    assert leaked(*runs)  # The control: rows of the denied class get through.
    assert place.split(maxsplit=1)[0] in str(runs[0].plan)
    for promise in (Promise.ELASTIC, Promise.RESUME):
        assert not runs[0].plan.holds(promise)
    assert not promised(runs[0])


class InNamespace(Body):
    def __init__(self) -> None:
        super().__init__()
        self.state = argparse.Namespace(mean=0.0)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows).relu()
        output: Tensor = self.second(hidden - self.state.mean)
        self.state.mean = 0.9 * self.state.mean + 0.1 * float(hidden.detach().mean())
        return output


class Helped(Body):
    """A global that a helper of forward's names."""

    def encode(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.first(rows).relu()
        mean = GLOBAL["mean"]
        GLOBAL["mean"] = 0.9 * mean + 0.1 * float(hidden.detach().mean())
        return hidden - mean

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.encode(rows))
        return output


class CalledByParent(Body):
    """A global that a child's method names, which isn't its forward."""

    class Encoder(nn.Linear):
        def encode(self, rows: Tensor) -> Tensor:
            hidden = self(rows).relu()
            mean = GLOBAL["mean"]
            GLOBAL["mean"] = 0.9 * mean + 0.1 * float(hidden.detach().mean())
            return hidden - mean

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Encoder(6, 8)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.first.encode(rows))
        return output


class Backward(torch.autograd.Function):
    """The identity; adds a class's running number to gradients."""

    seen = torch.zeros(())

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        before = Backward.seen
        Backward.seen = hidden.detach().mean()
        return hidden + before

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class ByFunction(Body):
    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(Backward.apply(self.first(rows)))  # type: ignore[no-untyped-call]
        return output


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "state.mean": (InNamespace, Classification(3)),
    "encode.GLOBAL": (Helped, Classification(3)),
    "first.encode.GLOBAL": (CalledByParent, Classification(3)),
    "encode.GLOBAL by the loss": (
        Helped,
        lambda model, data: cross_entropy(model.second(model.encode(data[0])), data[1]),
    ),
    "Backward.seen": (ByFunction, Classification(3)),
}


@pytest.mark.parametrize("place", MODELS)
def test_what_a_model_moves_by_way_of_code_is_found(place: str) -> None:
    runs = []
    for swapped in (None, NUM_STEPS - 1):
        reset()
        Backward.seen = torch.zeros(())
        build, loss = MODELS[place]
        runs.append(trained(Case(build, *NEAR, loss=loss), [SGD(lr=0.1)], swapped=swapped))
    assert leaked(*runs)
    assert f"forward changes the attributes {place.split(maxsplit=1)[0]}" in str(runs[0].plan)
    assert not promised(runs[0])
    assert not runs[0].plan.holds(Promise.RESUME)


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(0),
    "numpy": lambda: np.random.default_rng(0),
    "legacy": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_ones_own_is_seen_to_draw(kind: str, tmp_path: Path) -> None:
    class Noisy(Body):
        def __init__(self) -> None:
            super().__init__()
            self.drawn_from = GENERATORS[kind]()

        def forward(self, rows: Tensor) -> Tensor:
            own = self.drawn_from
            noise = torch.rand((), generator=own) if kind == "torch" else own.uniform(0, 1)
            return super().forward(rows + noise)

    def run(folder: Path | None, budget: str) -> Trainer:
        torch.manual_seed(0)
        rows = torch.ones(8, 6), torch.arange(8) % 3
        config = RunConfig(budget=budget, num_threads=1, run_folder=folder, change=("budget",))
        trainer = Trainer(Noisy(), Classification(3), [rows] * 9, optimizers=[SGD(lr=0.1)], config=config)
        trainer.fit()
        return trainer

    run(tmp_path, "3ba")
    again, whole = run(tmp_path, "6ba"), run(None, "6ba")
    assert not torch.equal(again.model.first.weight, whole.model.first.weight)  # The control.
    assert not again.plan.holds(Promise.RESUME)
    assert "forward changes the attributes drawn_from" in str(whole.plan)


@lru_cache
def table(size: int) -> Tensor:
    return torch.ones(size)


class Quiet(Body):
    """Names much, of which forward changes nothing that isn't declared."""

    forward_caches = ("GLOBAL", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.args = argparse.Namespace(tau=2.0, inner=types.SimpleNamespace(width=8))
        self.seen: list[float] = []

    def note(self, hidden: Tensor) -> None:
        self.seen.append(float(hidden.detach().mean()))
        GLOBAL["mean"] += 1

    def validate(self) -> None:
        kept_elsewhere.counted()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) * table(self.args.inner.width)
        self.note(hidden)
        kept_elsewhere.unrelated += 0
        output: Tensor = self.second(hidden) / self.args.tau
        return output


def test_nothing_is_told_of_what_is_declared_or_stays_as_it_is() -> None:
    runs = []
    for swapped in (None, NUM_STEPS - 1):
        reset()
        runs.append(trained(Case(Quiet, *NEAR), [SGD(lr=0.1)], swapped=swapped))
    assert not leaked(*runs)
    assert promised(runs[0])
    for promise in (Promise.ELASTIC, Promise.RESUME):
        assert runs[0].plan.holds(promise)


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Level(IntEnum):
    LOW = 1


class Choosing(Body):
    """Names constants, and a function whose closure isn't filled yet."""

    def __init__(self) -> None:
        super().__init__()
        self.level = Level.LOW

        def scale(hidden: Tensor) -> Tensor:
            return hidden * factor

        self.scale = scale
        if Mode.SLOW in Mode:
            return
        factor = 1.0

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) * (1 if Mode.FAST is Mode.SLOW else self.level)
        output: Tensor = self.second(hidden)
        return output


def test_constants_and_unfilled_closures_are_left_alone() -> None:
    model = Choosing()
    remember({"": model})()
    assert not [place.name for place in places_in({"": model}) if "Mode" in place.name or "factor" in place.name]
    with pytest.raises(NameError):
        model.scale(torch.ones(1))
    assert Mode.FAST.value == "fast"


def test_files_and_modules_that_lead_in_circles_end() -> None:
    names = [f"file{index}" for index in range(12)]
    files = {name: types.ModuleType(name) for name in names}
    for file in files.values():
        vars(file).update(files, seen=1.0)
    loss = eval(f"lambda m, d: ({', '.join(f'{name}.seen' for name in names)})", dict(files))
    assert len(list(places_in({"loss": loss}))) == 12
    blocks = [Helped() for _ in range(300)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.around = [model]
    found = [place.name for place in places_in({"": model, "loss": plain})]
    assert len(found) == len(set(found))
    assert sum("GLOBAL" in name for name in found) == 1


def test_of_a_file_only_what_code_speaks_of_is_followed() -> None:
    names = {place.name for place in places_in({"loss": lambda m, d: kept_elsewhere.normalised(plain(m, d))})}
    assert "loss.kept_elsewhere.normalised.mean" in names
    assert not any("unrelated" in name or "Kept" in name for name in names)


def test_what_is_found_can_be_put_back() -> None:
    """A step that is left out leaves no trace in slots, namespaces, classes, functions and files either."""
    reset()
    roots: dict[str, object] = {name: make() for name, make in LOSSES.items()}
    before = {place.name: content_of(place.value) for place in places_in(roots)}
    put_back = remember(roots)
    torch.manual_seed(0)
    data = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    for loss in roots.values():
        loss(Body(), data)  # type: ignore[operator]
    moved = {place.name for place in places_in(roots) if before[place.name] != content_of(place.value)}
    assert len(moved) >= 9
    put_back()
    assert before == {place.name: content_of(place.value) for place in places_in(roots)}
