"""What a resume compares by name where no fixed microbatch can be drawn, and what of one process it leaves alone."""

from __future__ import annotations

import argparse
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu

from cosmati.core.batch import Batch, Lineage
from cosmati.core.state import parameter_root
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.train.identity import describe_source
from cosmati.train.options import DECLARED, Described
from tests.train import counting_file
from tests.train.test_other_run_more import batches, is_refused, run

pytestmark = pytest.mark.long


def data() -> list[Any]:
    """Return batches with strings, of which no fixed microbatch is drawn: names alone tell."""
    return [(*batch, ["row"] * 8) for batch in batches()]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@dataclass
class Settings:
    """Settings of a model, and where its run is kept: another place in each process."""

    scale: float = 1.0
    out: str = field(default_factory=lambda: uuid4().hex[:9])


class Net(nn.Module):
    """Has settings of every kind."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.act: Callable[..., Tensor] = relu
        self.settings: Any = Settings()
        self.kept: Any = None
        self.pid, self.label = os.getpid(), uuid4().hex[:9]
        self.hparams = {"out": uuid4().hex[:9]}
        self.table = torch.ones(6)
        self.register_buffer("mask", torch.ones(6), persistent=False)
        for name, value in given.items():
            setattr(self, name, value)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows * self.table * self.mask / counting_file.temperature
        return self.act(self.layer(rows)) * self.settings.scale


class Keyed(Net):
    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows) * self.kept["scale"]


class Caching(Net):
    """Keeps what forward has computed last."""

    cache: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.cache = rows.detach()
        return super().forward(rows)


def by(scale: float) -> Callable[..., Tensor]:
    return lambda *given: given[-1] * scale


def hooked(scale: float, *, is_forward: bool) -> nn.Module:
    model = Net()
    if is_forward:
        model.layer.register_forward_hook(by(scale))
    else:
        model.layer.weight.register_hook(by(scale))
    return model


def attributed(scale: float) -> Any:
    def own(model: nn.Module, batch: Any) -> Tensor:
        own.calls += 1  # type: ignore[attr-defined]
        return loss(model, batch) * own.scale  # type: ignore[attr-defined]

    own.scale, own.calls = scale, int(scale * 10)  # type: ignore[attr-defined]
    return own


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "a library's function": (Net, lambda: Net(act=gelu), r"model options \(model\): act .*gelu, was .*relu"),
    "a function of one's own": (
        lambda: Net(act=lambda x: x * 2.0), lambda: Net(act=lambda x: x * 3.0), r"options \(model\) act: code"),
    "settings in a dataclass": (
        Net, lambda: Net(settings=Settings(2.0)), r"options \(model\) settings: scale 2.0, was 1.0"),
    "settings in a namespace": (
        lambda: Net(settings=types.SimpleNamespace(scale=1.0, out="a")),
        lambda: Net(settings=types.SimpleNamespace(scale=2.0, out="b")),
        r"options \(model\) settings: scale 2.0, was 1.0\. Resume"),
    "settings in a dictionary": (
        lambda: Keyed(kept={"scale": 1.0, "out": "a"}), lambda: Keyed(kept={"scale": 2.0, "out": "b"}),
        r"options \(model\) kept: scale 2.0, was 1.0\. Resume"),
    "a plain tensor": (Net, lambda: Net(table=torch.full((6,), 2.0)), r"contents \(model\): table"),
    "a buffer that no checkpoint holds": (Net, lambda: Net(mask=torch.full((6,), 2.0)), r"contents \(model\): mask"),
    "a gradient hook": (
        lambda: hooked(1.0, is_forward=False), lambda: hooked(0.1, is_forward=False),
        "hooks layer weight 0 closure: scale 0.1, was 1.0"),
    "a forward hook": (
        lambda: hooked(1.0, is_forward=True), lambda: hooked(0.1, is_forward=True),
        "hooks layer 0 closure: scale 0.1, was 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_holds_is_compared(tmp_path: Path, name: str) -> None:
    first, other, told = MODELS[name]
    rest = {"loss": loss, "data": data}
    is_refused(tmp_path / "run", told, {"model": first, **rest}, {"model": other, **rest})


def test_what_forward_writes_is_no_option(tmp_path: Path) -> None:
    model = Caching()
    run(tmp_path / "run", stop_at=3, model=lambda: model, loss=loss, data=data)
    assert model.cache is not None
    assert run(tmp_path / "run", model=lambda: model, loss=loss, data=data).changed == []


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_what_follows_from_parameters_is_no_option(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    def drawn() -> nn.Module:
        torch.seed()
        return nn.Sequential(wrap(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))

    run(tmp_path / "run", stop_at=3, model=drawn, loss=loss, data=data)
    assert run(tmp_path / "run", model=drawn, loss=loss, data=data).changed == []


def test_a_module_of_settings_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> nn.Module:
        monkeypatch.setattr(counting_file, "temperature", 3.0)
        return Net()

    def usual() -> nn.Module:
        monkeypatch.setattr(counting_file, "temperature", 1.0)
        return Net()

    told = "model globals counting_file: temperature 3.0, was 1.0"
    is_refused(
        tmp_path / "run", told, {"model": usual, "loss": loss, "data": data},
        {"model": changed, "loss": loss, "data": data},
    )  # fmt: skip


def test_an_attribute_of_a_function_is_an_option(tmp_path: Path) -> None:
    told = r"loss 0 attributes: scale 2.0, was 1.0\. Resume"
    run(tmp_path / "run", stop_at=3, loss=attributed(1.0), data=data)
    with pytest.raises(Exception, match=told):
        run(tmp_path / "run", loss=attributed(2.0), data=data)
    # What its own code writes is no option.
    again = attributed(1.0)
    again.calls = 99
    assert run(tmp_path / "run", loss=again, data=data).changed == []


class Scaling:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * self.settings.scale


def scaling(model: nn.Module, batch: Any, args: Any) -> Tensor:
    return loss(model, batch) * args.scale


def scaling_by_key(model: nn.Module, batch: Any, args: Any) -> Tensor:
    return loss(model, batch) * args["scale"]


LOSSES: dict[str, Callable[[float], Any]] = {
    "a dataclass in an object": lambda scale: Scaling(Settings(scale)),
    "a namespace of a partial": lambda scale: partial(scaling, args=argparse.Namespace(**vars(Settings(scale)))),
    "a dictionary of a partial": lambda scale: partial(scaling_by_key, args=vars(Settings(scale))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_of_settings_what_is_read_counts(tmp_path: Path, name: str) -> None:
    make = LOSSES[name]
    run(tmp_path / "run", stop_at=3, loss=make(1.0), data=data)
    with pytest.raises(Exception, match=r"scale 2.0, was 1.0\. Resume"):
        run(tmp_path / "run", loss=make(2.0), data=data)
    assert run(tmp_path / "run", loss=make(1.0), data=data).changed == []


def transform(batch: Any, scale: float) -> Any:
    numbers = batch.tensor("number").float()
    return torch.stack([torch.sin(scale * numbers * k / 8) for k in range(6)], 1), batch.tensor("label").long()


class Transform:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, batch: Any) -> Any:
        return transform(batch, self.scale)


class OtherTransform(Transform):
    def __call__(self, batch: Any) -> Any:
        return transform(batch, self.scale * 2)


OtherTransform.__qualname__ = "Transform"
TRANSFORMS: dict[str, tuple[Any, Any, str]] = {
    "a closure": (lambda b: transform(b, 1.0), lambda b: transform(b, 2.0), "data transform: code"),
    "a partial": (partial(transform, scale=1.0), partial(transform, scale=2.0), "data transform given 0: scale 2.0"),
    "an object": (Transform(1.0), Transform(2.0), "data transform: scale 2.0, was 1.0"),
    "an object's code": (Transform(1.0), OtherTransform(1.0), "data transform: code"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_sources_transform_is_compared(tmp_path: Path, name: str) -> None:
    with ShardWriter(tmp_path / "rows", {"number": "int", "label": "int"}, class_path="open/a", source="x") as writer:
        for index in range(48):
            writer.write({"number": index, "label": index % 3})
    first, other, told = TRANSFORMS[name]

    def source(made: Any) -> dict[str, Any]:
        return {"data": lambda: StreamingSource(StreamingDataset(tmp_path / "rows", transform=made), 8), "loss": loss}

    is_refused(tmp_path / "run", told, source(first), source(other))


def test_rows_and_classes_of_batches_in_a_list_are_told() -> None:
    rows, classes = torch.arange(4), torch.zeros(4, dtype=torch.int64)

    def told(rows: Tensor, classes: Tensor) -> object:
        return describe_source([Batch((torch.ones(4, 6),), Lineage(rows, classes))])["content"]

    assert told(rows, classes) == told(rows.clone(), classes.clone())
    assert len({told(rows, classes), told(rows + 1, classes), told(rows, classes + 1)}) == 3


def test_types_sets_and_the_models_own_tensors_are_described() -> None:
    own, other = torch.ones(3), torch.ones(3)
    described = Described((own,))
    assert [described.value(one, None) for one in (torch.float16, torch.Size([2, 3]))] == [
        "torch.float16",
        "torch.Size([2, 3])",
    ]
    assert described.value({3, 1, 2}, None) == described.value(frozenset({2, 3, 1}), None) == [1, 2, 3]
    assert described.value(own, None) == "of the model"
    assert described.value(other, None) == Described(()).value(own, None) == parameter_root({"": own}).hex()
    assert described.value(torch.empty(3, device="meta"), None) == "torch.float32[3]"
    arrays = [described.value(np.asarray(values), None) for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [])]
    assert arrays[0] == arrays[1] is not None
    assert len({*arrays}) == 3


class Counting(nn.Linear):
    forward_caches = ("calls",)

    def __init__(self, calls: int) -> None:
        super().__init__(2, 2)
        self.calls, self.scale = calls, 2.0


def test_what_a_module_declares_to_count_is_named_without_its_value() -> None:
    told = [Described().module(Counting(calls), frozenset({"scale", "calls"}), frozenset()) for calls in (1, 2)]
    assert told == [{"calls": DECLARED, "scale": 2.0}] * 2


class Holding(nn.Module):
    """Tensors of many kinds beside what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.table, self.rows, self._own, self.name = torch.arange(3.0), np.arange(4), torch.ones(1), "layer"
        self.gain_g, self.gain = nn.Parameter(torch.zeros(2)), torch.ones(2)  # as weight_norm makes a weight
        self.register_buffer("mask", torch.ones(5), persistent=False)
        self.register_buffer("_hidden", torch.ones(6), persistent=False)
        self.register_buffer("kept", torch.ones(7))


def test_a_modules_tensors_that_no_checkpoint_holds_are_told() -> None:
    told, module = Described(), Holding()
    found = told.contents(module, frozenset())
    assert found == {n: told.value(getattr(module, n)) for n in ("table", "rows", "mask", "_hidden")}
    assert None not in found.values()
    assert told.contents(module, frozenset({"table", "mask"})).keys() == {"rows", "_hidden"}
    module.table[1] = 7
    assert told.contents(module, frozenset())["table"] != found["table"]
    declared = type("Declared", (Holding,), {"forward_caches": ("rows", "_hidden")})()
    assert told.contents(declared, frozenset()).keys() == {"table", "mask"}
