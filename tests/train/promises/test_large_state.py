"""State in large and deep containers, cached functions, tensors' attributes and cells; what isn't compared is told."""

from __future__ import annotations

import array
import copy
import multiprocessing
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train import values
from cosmati.train.config import RunConfig
from cosmati.train.held import remember
from cosmati.train.trainer import Trainer
from cosmati.train.values import content_of, read
from tests.train.promises.swapped import NUM_STEPS, Case, leaked, promised, trained

pytestmark = pytest.mark.long

Get = Callable[[Any], float]
Put = Callable[[Any, float], object]


class Box:
    def __init__(self) -> None:
        self.mean = 1.0


@cache
def box() -> Box:
    return Box()


@lru_cache(maxsize=2)
def by_name(name: str, *, start: float = 1.0) -> dict[str, float]:
    return {name: start}


def nested(depth: int, innermost: Any) -> Any:
    for _ in range(depth):
        innermost = {"within": innermost}
    return innermost


def innermost(value: Any) -> Any:
    while "within" in value:
        value = value["within"]
    return value


def at(key: Any) -> tuple[Get, Put]:
    return lambda kept: float(kept[key]), lambda kept, value: kept.__setitem__(key, value)


def of(find: Callable[[Any], Any], key: Any) -> tuple[Get, Put]:
    return lambda kept: float(find(kept)[key]), lambda kept, value: find(kept).__setitem__(key, value)


def named(find: Callable[[Any], Any], name: str) -> tuple[Get, Put]:
    return lambda kept: getattr(find(kept), name, 1.0), lambda kept, value: setattr(find(kept), name, value)


def bank(kind: Any) -> Any:
    """Give a container that keeps a mean beside its items."""

    class Bank(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = 1.0

    return Bank()


def unnamed(kept: Any) -> tuple[Callable[..., Any], ...]:
    """Give a container by two of its methods alone."""
    return kept.append, kept.__getitem__


ALIVE: list[Any] = []


def weakly(kept: Any) -> Any:
    ALIVE[:] = [kept]
    return weakref.ref(kept)


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.ones(1), requires_grad=False)


def itself(kept: Any) -> Any:
    return kept


FOUND: dict[str, tuple[Callable[[], Any], tuple[Get, Put]]] = {
    "an array of 25 MB": (lambda: np.ones((50_000, 128), np.float32), at((20_000, 5))),
    "an array of objects": (lambda: np.array([{"n": 1.0}, {}], object), of(lambda kept: kept[0], "n")),
    "a long list": (lambda: [1.0] * 50_000, at(20_000)),
    "a long list of lists": (lambda: [[1.0] for _ in range(15_000)], of(lambda kept: kept[7_000], 0)),
    "a large dict": (lambda: dict.fromkeys(range(50_000), 1.0), at(20_000)),
    "a deep dict": (lambda: nested(12, {"n": 1.0}), of(innermost, "n")),
    "the 500th object": (lambda: [SimpleNamespace(mean=1.0) for _ in range(800)], named(lambda k: k[500], "mean")),
    "array.array": (lambda: array.array("d", [1.0]), at(0)),
    "bytearray": (lambda: bytearray(b"\x01"), (lambda k: float(k[0]), lambda k, v: k.__setitem__(0, 1 + int(v) % 99))),
    "a context variable": (
        lambda: ContextVar("mean", default=1.0),
        (lambda kept: kept.get(), lambda kept, value: kept.set(value)),
    ),
    "shared memory": (lambda: multiprocessing.Value("d", 1.0), named(itself, "value")),
    "a parameter's attribute": (frozen, named(itself, "ema")),
    "a tensor's attribute": (lambda: torch.ones(1), named(itself, "ema")),
    "a list of parameters": (lambda: [frozen()], of(lambda kept: kept[0].data, 0)),
    "a dict of parameters": (lambda: {"ema": frozen()}, of(lambda kept: kept["ema"].data, 0)),
    "a list's attribute": (lambda: bank(list), named(itself, "mean")),
    "a dict's attribute": (lambda: bank(dict), named(itself, "mean")),
    "a deque's attribute": (lambda: bank(deque), named(itself, "mean")),
    "a deque's methods": (
        lambda: unnamed(deque([1.0], maxlen=1)),
        (lambda kept: kept[1](0), lambda kept, value: kept[0](value)),
    ),
    "an object that is weakly held": (lambda: weakly(Box()), named(lambda kept: kept(), "mean")),
    "a cached object": (box.cache_clear, named(lambda kept: box(), "mean")),
    "a cached dict": (by_name.cache_clear, of(lambda kept: by_name("mean"), "mean")),
    "one of two cached dicts": (
        by_name.cache_clear,
        of(lambda kept: (by_name("other"), by_name("mean", start=1.0))[1], "mean"),
    ),
}


class Keeping(nn.Module):
    """Divides by a running mean that it keeps somewhere."""

    def __init__(self, kept: Any, held: tuple[Get, Put]) -> None:
        super().__init__()
        self.first, self.second, self.kept = nn.Linear(6, 8), nn.Linear(8, 3), kept
        self.get, self.put = held

    def forward(self, rows: Tensor) -> Tensor:
        self.put(self.kept, 0.9 * self.get(self.kept) + 0.1 * float(rows.abs().mean()))
        output: Tensor = self.second(self.first(rows / self.get(self.kept)).relu())
        return output


NEAR = ("first.*", "kept"), ("second.*",)


@pytest.mark.parametrize("place", FOUND)
def test_what_is_large_deep_or_hidden_is_found(place: str) -> None:
    make, held = FOUND[place]
    runs = []
    for swapped in (None, NUM_STEPS - 1):
        near = NEAR if make is frozen else (("first.*",), ("second.*",))
        runs.append(trained(Case(lambda: Keeping(make(), held), *near), [SGD(lr=0.1)], swapped=swapped))
    assert leaked(*runs), "the control"
    assert "forward changes the attributes" in str(runs[0].plan)
    assert not promised(runs[0])
    assert not runs[0].plan.holds(Promise.RESUME)
    assert not runs[0].plan.holds(Promise.ELASTIC)


def test_a_teacher_in_a_list_of_parameters_ends_no_resume(tmp_path: Path) -> None:
    """No checkpoint holds it, so after a resume the loss is another one: the code isn't."""

    class Consistency:
        def __init__(self, model: nn.Module) -> None:
            self.ema = list(copy.deepcopy(model).parameters())

        def __call__(self, model: nn.Module, rows: Tensor) -> Tensor:
            with torch.no_grad():
                for mean, parameter in zip(self.ema, model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
            return (model(rows) - rows @ self.ema[0].T).square().mean()

    for budget in ("3ba", "6ba"):
        torch.manual_seed(0)
        model, data = nn.Linear(4, 4), [torch.ones(8, 4)] * 6
        config = RunConfig(budget=budget, num_threads=1, run_folder=tmp_path, change=("budget",))
        trainer = Trainer(model, Consistency(model), data, optimizers=[SGD(lr=0.1)], config=config)
        assert trainer.fit().outcome == "completed"
        assert "resume: forward changes the attributes loss.ema" in str(trainer.plan)


UNSEEN: dict[str, Callable[[], Any]] = {
    "an array beyond the bound": lambda: np.zeros((1 << 30) + 1, np.uint8),
    "40 levels": lambda: nested(40, {"n": 1.0}),
    "1,500 objects": lambda: [SimpleNamespace(mean=1.0) for _ in range(1500)],
}


@pytest.mark.parametrize("place", UNSEEN)
def test_what_is_not_compared_is_told_by_name(place: str) -> None:
    idle: tuple[Get, Put] = (lambda kept: 1.0), (lambda kept, value: None)
    trainer = trained(Case(lambda: Keeping(UNSEEN[place](), idle), ("first.*",), ("second.*",)), [SGD(lr=0.1)])
    assert "of kept more could change unseen than is compared" in str(trainer.plan)
    assert not promised(trainer)
    assert not trainer.plan.holds(Promise.RESUME)
    assert not trainer.plan.holds(Promise.ELASTIC)


@lru_cache(maxsize=2)
def mask(size: int) -> Tensor:
    return torch.ones(size)


@cache
def settings() -> SimpleNamespace:
    return SimpleNamespace(scale=2.0, many={"n": [1]})


class Quiet(nn.Module):
    """Looks into much, and changes nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        np.arange(1000.0).tofile(path)
        self.first, self.second, self.calls = nn.Linear(6, 8), nn.Linear(8, 3), iter(range(10**6))
        self.table, self.rows = np.ones((2000, 2000)), [(f"{index}.png", index % 3) for index in range(200_000)]
        self.lookup, self.file = {str(index): index for index in range(100_000)}, np.memmap(path, np.float64, "r")
        self.first.weight.is_embedding = False  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        size = 1 + next(self.calls) % 3
        hidden = self.first(rows * settings().scale).relu() * mask(8)
        output: Tensor = self.second(hidden) * mask(size).mean() * float(self.table[0, 0]) * self.lookup["1"]
        return output


def test_what_is_large_or_cached_and_rests_keeps_the_promises(tmp_path: Path) -> None:
    settings.cache_clear()
    mask.cache_clear()
    trainer = trained(Case(lambda: Quiet(tmp_path / "file"), ("first.*",), ("second.*",)), [SGD(lr=0.1)])
    assert promised(trainer), str(trainer.plan)
    for promise in (Promise.RESUME, Promise.ELASTIC):
        assert trainer.plan.holds(promise), str(trainer.plan)


def test_sobol_draws_are_told_by_name() -> None:
    """A checkpoint doesn't hold where the sequence stands."""

    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.engine = torch.quasirandom.SobolEngine(6)

        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows + self.engine.draw(len(rows)))

    config = RunConfig(budget="2ba", num_threads=1)
    steps = [(torch.randn(8, 6), torch.arange(8) % 3)] * 2
    trainer = Trainer(Noisy(), Classification(3), steps, optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    assert "resume: forward changes the attributes engine" in str(trainer.plan)


def test_content_is_the_same_for_the_same_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    circle: list[Any] = [1.0]
    circle.append(circle)
    wide: Any = [0]
    for _ in range(31):
        wide = [wide, wide]
    with monkeypatch.context() as patch:
        patch.setattr(values, "MAX_VALUES", 1 << 16)
        told, is_whole = read(wide)
    assert not is_whole, "2^31 values"
    for value in (circle, {3, 1, 2}, np.array(5.0), np.zeros((0, 3)), {"a": {1.5, "b", None}}, memoryview(b"abc")):
        assert content_of(value) == content_of(value)
        assert read(value)[1]
    assert content_of([0.0]) != content_of([-0.0])
    assert content_of([1]) != content_of([1.0]) != content_of([True])
    assert told is not None


def test_what_lies_deeper_is_put_back() -> None:
    model = nn.Linear(2, 2)
    large, inner, held = np.zeros((1 << 22) + 1), {"n": [1, torch.zeros(2)]}, array.array("d", [1.0])
    model.large, model.inner, model.held = large, {"a": inner}, held  # type: ignore[assignment]
    put_back = remember({"": model})
    large[7], held[0], model.weight.mean_seen = 1.0, 2.0, 3.0  # type: ignore[attr-defined]
    inner["n"][1].add_(1)  # type: ignore[attr-defined]
    inner["n"].append(2)
    inner["more"] = []
    put_back()
    assert large[7] == 0
    assert held[0] == 1
    assert list(inner) == ["n"]
    assert len(inner["n"]) == 2
    assert not inner["n"][1].any()  # type: ignore[attr-defined]
    assert not hasattr(model.weight, "mean_seen")


@pytest.mark.parametrize(("limit", "is_copied"), [(95, False), (96, True)])
def test_frozen_weights_are_copied_as_far_as_they_are_few(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_copied: bool
) -> None:
    """Three of 16 bytes and two of 24 (a bias and weights of float64): what trains isn't counted."""
    monkeypatch.setattr("cosmati.train.held._MAX_STATE_BYTES", limit)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(3, 1, bias=False).double()])
    model.extend([nn.Linear(3, 1, bias=False).double(), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    for layer in model[1:]:
        layer.requires_grad_(False)
    before = [layer.weight.detach().clone() for layer in model]  # type: ignore[union-attr, operator]
    put_back = remember({"": model})
    with torch.no_grad():
        for layer in model:
            layer.weight.add_(1)  # type: ignore[union-attr, operator]
    put_back()
    found = [torch.equal(layer.weight, was) for layer, was in zip(model, before, strict=True)]  # type: ignore[arg-type]
    assert found == [False, *[is_copied] * 5]


def test_a_files_array_that_nobody_can_write_to_is_told_by_itself_and_not_read(tmp_path: Path) -> None:
    np.arange(10.0).tofile(tmp_path / "file")
    read_only, written = (np.memmap(tmp_path / "file", np.float64, mode) for mode in ("r", "r+"))
    for part in (read_only, read_only[2:5], np.asarray(read_only)):
        (_, (_, _, told)), is_whole = cast("Any", read(part))
        assert (told, is_whole) == (id(part), True)
    for part in (written, written[2:5], np.arange(10.0)):
        (_, (_, _, told)), is_whole = cast("Any", read(part))
        assert (told, is_whole) == (part.tobytes(), True)


def test_the_order_of_what_is_long_counts_where_it_has_one() -> None:
    items = list(range(70_000))
    swapped = [1, 0, *items[2:]]
    for kind in (list, tuple, deque):
        assert read(kind(items))[0] != read(kind(swapped))[0]
    assert read(set(items))[0] == read(set(swapped))[0]
    assert read(dict.fromkeys(items))[0] != read(dict.fromkeys(swapped))[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "quantized"],
)
def test_what_has_no_bytes_to_read_is_told_by_its_object_and_how_often_it_was_written_to(
    make: Callable[[], Any],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch is going to have no quantized tensors.
        one, other = make(), make()
        assert content_of(one) == content_of(one) != content_of(other)
        before = content_of(one)
        one.zero_() if one.device.type == "meta" else one.copy_(other)
        assert content_of(one) != before
