"""The fixed microbatch leaves no trace: a run has the weights of one without a folder, wherever its code counts."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati.train.apart import SharedError, apart
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.timing import Stopwatch
from tests.train import counting_file
from tests.train.test_other_run_more import make_model, run

pytestmark = pytest.mark.long

COUNTS: dict[str, Any] = {"steps": 0, "nested": [0]}
step = 0
noise = np.random.default_rng(0)


class Means:
    mean = 1.0
    all: ClassVar[list[float]] = []

    @staticmethod
    def take(loss: Tensor) -> Tensor:
        Means.mean = 0.9 * Means.mean + 0.1 * float(loss.detach())
        Means.all.append(Means.mean)
        return loss / Means.mean


def by_class(model: nn.Module, data: Any) -> Tensor:
    return Means.take(cross_entropy(model(data[0]), data[1]))


def by_own_file(model: nn.Module, data: Any) -> Tensor:
    return counting_file.normalised(cross_entropy(model(data[0]), data[1]))


def by_attribute(model: nn.Module, data: Any) -> Tensor:
    by_attribute.count += 1  # type: ignore[attr-defined]
    return cross_entropy(model(data[0]), data[1]) / by_attribute.count  # type: ignore[attr-defined]


def by_default(model: nn.Module, data: Any, seen: list[int] = []) -> Tensor:  # noqa: B006  (what users do)
    seen.append(1)
    return cross_entropy(model(data[0]), data[1]) / len(seen)


def by_generator(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1]) * float(noise.uniform(0.5, 1.5))


def by_new_global(model: nn.Module, data: Any) -> Tensor:
    global first  # noqa: PLW0603
    if "first" not in globals():
        first = float(data[0].sum())
    return cross_entropy(model(data[0]), data[1]) * first


def by_namespace() -> Callable[..., Tensor]:
    state = types.SimpleNamespace(mean=1.0)

    def loss(model: nn.Module, data: Any) -> Tensor:
        found = cross_entropy(model(data[0]), data[1])
        state.mean = 0.9 * state.mean + 0.1 * float(found.detach())
        return found / state.mean

    return loss


def by_nonlocal() -> Callable[..., Tensor]:
    count = 0

    def loss(model: nn.Module, data: Any) -> Tensor:
        nonlocal count
        count += 1
        return cross_entropy(model(data[0]), data[1]) / count

    return loss


class CountsInGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, rows: Tensor) -> Tensor:
        global step  # noqa: PLW0603
        step += 1
        return self.layers(rows) / step


class CountsInHelper(CountsInGlobal):
    def encode(self, rows: Tensor) -> Tensor:
        COUNTS["nested"][0] += 1
        return rows / COUNTS["nested"][0]

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(self.encode(rows))


@cache
def kept(start: float = 0.0) -> dict[str, float]:
    return {"calls": start}


class Kept:
    @staticmethod
    @cache
    def counted() -> dict[str, float]:
        return {"calls": 0.0}


class Own:
    @cache  # noqa: B019
    def own(self) -> dict[str, float]:
        return {"calls": 0.0}


def by_cached(model: nn.Module, data: Any) -> Tensor:
    kept()["calls"] += 1
    return cross_entropy(model(data[0]), data[1]) / kept()["calls"]


def by_cached_method(model: nn.Module, data: Any) -> Tensor:
    Kept.counted()["calls"] += 1
    return cross_entropy(model(data[0]), data[1]) / Kept.counted()["calls"]


OWN = Own()


def by_cached_own_method(model: nn.Module, data: Any) -> Tensor:
    OWN.own()["calls"] += 1
    return cross_entropy(model(data[0]), data[1]) / OWN.own()["calls"]


@cache
def teacher() -> types.SimpleNamespace:
    return types.SimpleNamespace(calls=0)


def by_cached_object(model: nn.Module, data: Any) -> Tensor:
    teacher().calls += 1
    return cross_entropy(model(data[0]), data[1]) / teacher().calls


SCALES: list[float] = []


@cache
def scale_of(rows: float) -> Tensor:
    SCALES.append(1.0 + len(SCALES))
    return torch.tensor(SCALES[-1])


def by_cached_list(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1]) / scale_of(float(data[0].sum()))


class Itself:
    """A loss that gives itself for its copy."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: object) -> Itself:
        return self

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        self.count += 1
        return cross_entropy(model(data[0]), data[1]) / self.count


def plain(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


FORMS: dict[str, dict[str, Any]] = {
    "a class as a namespace": {"loss": lambda: by_class},
    "a file of one's own": {"loss": lambda: by_own_file},
    "an attribute of the function": {"loss": lambda: by_attribute},
    "a default": {"loss": lambda: by_default},
    "a generator": {"loss": lambda: by_generator},
    "a global that isn't there yet": {"loss": lambda: by_new_global},
    "a namespace that is closed over": {"loss": by_namespace},
    "a number that is closed over": {"loss": by_nonlocal},
    "what a function caches": {"loss": lambda: by_cached},
    "what a class's function caches": {"loss": lambda: by_cached_method},
    "what a method caches": {"loss": lambda: by_cached_own_method},
    "what a function that caches fills": {"loss": lambda: by_cached_list},
    "an object that a function caches": {"loss": lambda: by_cached_object},
    "an object that gives itself for its copy": {"loss": Itself},
    "a global of a model's": {"model": CountsInGlobal},
    "a dictionary of a model's helper": {"model": CountsInHelper},
}


NOT_APART = ("what a class's function caches", "an object that gives itself for its copy")


def _begin() -> None:
    globals().update(step=0, noise=np.random.default_rng(0))
    globals().pop("first", None)
    COUNTS.update(steps=0, nested=[0])
    Means.mean, counting_file.average = 1.0, 1.0
    Means.all.clear()
    SCALES.clear()
    for cached in (kept, Kept.counted, Own.own, teacher, scale_of):
        cached.cache_clear()
    by_attribute.count = 0  # type: ignore[attr-defined]
    by_default.__defaults__[0].clear()  # type: ignore[index]


@pytest.mark.parametrize("name", FORMS)
def test_the_weights_are_those_without_a_folder(tmp_path: Path, name: str) -> None:
    form = FORMS[name]

    def weights(folder: Path | None, **config: Any) -> list[Tensor]:
        _begin()
        found = run(
            folder, model=form.get("model", make_model), loss=form.get("loss", lambda: plain)(), budget="5ba", **config
        )
        return [p.detach().clone() for p in found.model.parameters()]

    alone = weights(None)
    calls = len(Means.all)
    assert all(map(torch.equal, alone, weights(tmp_path / "run")))
    assert all(map(torch.equal, alone, weights(tmp_path / "often", checkpoint_every="1ba", num_checkpoints=9)))
    assert len(Means.all) == calls
    first = read_checkpoint(list_checkpoints(tmp_path / "often" / "checkpoints")[-1])
    assert (first.facts["probe"]["losses"] is None) == (name in NOT_APART)
    _begin()


def test_what_belongs_to_the_run_is_not_copied_with_the_code_that_holds_it() -> None:
    """A loss may hold its trainer, of which there is one."""

    class Holding:
        def __init__(self, held: object) -> None:
            self.held = held

    own = Holding([1])
    with apart(own) as copied:
        assert copied.held == [1]
        assert copied.held is not own.held
    with pytest.raises(SharedError), apart(Holding(Stopwatch())):
        pass
