"""What a resume compares besides: options that nothing prints, what loaders give, where a run is kept."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cosmati import InMemory, Method, RunConfig, Trainer
from cosmati.core.method import Stage
from cosmati.errors import CheckpointError, DataError
from cosmati.optim import SGD
from cosmati.optim.schedules import Constant
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(48, 6, generator=GENERATOR), torch.randint(3, (48,), generator=GENERATOR)


class Doing(Observer):
    """Does something after a step."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step, self.what = step, what

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step:
            self.what()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(ROWS[i : i + 8].clone(), LABELS[i : i + 8].clone()) for i in range(0, 48, 8)]


def loss(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def run(
    folder: Path | str | None,
    *,
    stop_at: int = 0,
    model: Callable[[], nn.Module] = make_model,
    loss: Any = loss,
    data: Any = None,
    optimizers: Any = None,
    methods: Sequence[Any] = (),
    observers: Sequence[Observer] = (),
    given: dict[str, Any] | None = None,
    **config: Any,
) -> Trainer:
    """Train, up to a step or to the end; return the trainer."""
    made = model()
    config = {"budget": "6ba", "num_threads": 1, "run_folder": folder} | config
    optimizers = [SGD(lr=0.1, schedule=Constant())] if optimizers is None else optimizers(made)
    data = batches() if data is None else data()
    kept = list(observers)
    trainer = Trainer(
        made, loss, data, optimizers=optimizers, methods=methods, observers=kept, config=RunConfig(**config),
        **given or {},
    )  # fmt: skip
    if stop_at:
        trainer.observers.append(Doing(stop_at, trainer.stop))
    trainer.fit()
    return trainer


def is_refused(folder: Path, name: str, first: dict[str, Any], other: dict[str, Any], *, stop_at: int = 3) -> None:
    """Resume with something else, which is refused by name; then as it was, to the bits of a run never stopped."""
    run(folder, stop_at=stop_at, **first)
    with pytest.raises(CheckpointError, match=name):
        run(folder, **other)
    assert_goes_on(folder, first)


def assert_goes_on(folder: Path, first: dict[str, Any]) -> None:
    found = run(folder, **first)
    assert found.plan.holds("resume")
    whole = run(None, **first | ({"ledger": None} if "ledger" in first else {}))
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), whole.model.parameters(), strict=True))


TAXONOMY = Taxonomy("t", "1", (("cold", "c"), ("hot", "h")))
POLICY = load_policy(
    'version: 1\ntaxonomy: t\nregions:\n  low: {params: "0.*"}\n  high: {params: "*", exclude: ["0.*"]}\n'
    'phases:\n  - {name: main}\nrules:\n  - {class: "**", weight: 1}\n  - {class: hot, region: low, weight: 0}\n'
    "default: reject\n"
)


def governed() -> dict[str, Any]:
    def data() -> InMemory:
        return InMemory((ROWS, LABELS), 8, class_ids=torch.arange(48) // 4 % 2, class_names=("cold", "hot"))

    return {"data": data, "given": {"policy": POLICY, "taxonomy": TAXONOMY}, "num_microbatches": 2}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_ledger_neither_begins_nor_ends_in_the_middle(tmp_path: Path, is_kept: bool) -> None:
    first = governed() | ({} if is_kept else {"ledger": False})
    other = governed() | {"ledger": None if not is_kept else False}
    is_refused(tmp_path / "run", f"settings: ledger {not is_kept}, was {is_kept}", first, other)


def test_a_run_stays_in_its_folder_when_the_process_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, other = tmp_path / "begun", tmp_path / "other"
    begun.mkdir()
    other.mkdir()
    monkeypatch.chdir(begun)
    observer = Doing(2, lambda: monkeypatch.chdir(other))
    trainer = run("r", stop_at=5, observers=[observer], checkpoint_every="2ba", num_checkpoints=9)
    assert not list(other.iterdir())
    steps = [int(path.name[5:]) for path in list_checkpoints(begun / "r" / "checkpoints")]
    assert sorted(steps) == [0, 2, 4, 5]
    assert json.loads((begun / "r" / "run.json").read_text())["outcome"] == "stopped"
    # The record knows no place.
    kept = [*(begun / "r").rglob("*.json*")]
    assert not any(str(begun) in path.read_text() for path in kept)
    # A folder that was moved, and is named in another way, goes on.
    monkeypatch.chdir(tmp_path)
    begun.rename(tmp_path / "moved")
    assert_goes_on(Path("moved/r"), {"checkpoint_every": "2ba"})
    assert trainer.assembly.config.run_folder == begun / "r"


# What `globals` of a loss are, for the tests below.
crit: nn.Module = nn.CrossEntropyLoss(label_smoothing=0.1)
args = argparse.Namespace(alpha=1.0, resume=False, device="cuda:0")
SETTINGS: dict[str, Any] = {"alpha": 1.0, "folder": "runs/1"}
history: list[float] = []
metrics: dict[str, list[float]] = {"loss": []}
num_calls = 0


class Settings:
    alpha = 1.0
    folder = "runs/1"


def by_criterion(model: nn.Module, data: Any) -> Tensor:
    return crit(model(data[0]), data[1])


def by_namespace(model: nn.Module, data: Any) -> Tensor:
    return args.alpha * loss(model, data)


def by_dictionary(model: nn.Module, data: Any) -> Tensor:
    return SETTINGS["alpha"] * loss(model, data)


def by_class(model: nn.Module, data: Any) -> Tensor:
    return Settings.alpha * loss(model, data)


def by_helper(model: nn.Module, data: Any) -> Tensor:
    return by_namespace(model, data)


def closing_over(value: Any) -> Callable[..., Tensor]:
    def closed(model: nn.Module, data: Any) -> Tensor:
        return value(model(data[0]), data[1])

    return closed


def closing_over_settings(value: Any) -> Callable[..., Tensor]:
    def closed(model: nn.Module, data: Any) -> Tensor:
        return value.alpha * loss(model, data)

    return closed


class Task:
    def __init__(self, alpha: float, **more: Any) -> None:
        self.alpha, self.weights = alpha, {"ce": alpha}
        vars(self).update(more)

    def loss(self, model: nn.Module, data: Any) -> Tensor:
        return self.alpha * loss(model, data)

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        return self.weights["ce"] * loss(model, data)


class Within(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        return self.ce(model(data[0]), data[1])


def setting(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], object]:
    def set_it(patch: pytest.MonkeyPatch) -> None:
        (patch.setitem if isinstance(target, dict) else patch.setattr)(target, name, value)

    return set_it


OTHER_GLOBALS: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], object], str]] = {
    "a criterion": (by_criterion, setting(globals(), "crit", nn.CrossEntropyLoss(label_smoothing=0.3)),
                    r"globals crit options \(root\): label_smoothing 0.3, was 0.1"),
    "a namespace": (by_namespace, setting(args, "alpha", 2.0), "globals args: alpha 2.0, was 1.0"),
    "a dictionary": (by_dictionary, setting(SETTINGS, "alpha", 2.0), "globals SETTINGS: alpha 2.0, was 1.0"),
    "a class": (by_class, setting(Settings, "alpha", 2.0), "globals Settings: alpha 2.0, was 1.0"),
    "a helper's": (by_helper, setting(args, "alpha", 2.0), "globals by_namespace globals args: alpha 2.0, was 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_GLOBALS)
def test_a_global_of_a_loss_is_compared(tmp_path: Path, name: str) -> None:
    used, change, told = OTHER_GLOBALS[name]
    run(tmp_path / "run", stop_at=3, loss=used)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(CheckpointError, match=told):
            run(tmp_path / "run", loss=used)
    assert_goes_on(tmp_path / "run", {"loss": used})


OTHER_LOSSES: dict[str, tuple[Callable[[float], Any], str]] = {
    "a criterion that is closed over": (
        lambda a: closing_over(nn.CrossEntropyLoss(label_smoothing=a)), r"closure value options \(root\): label_sm"),
    "a namespace that is closed over": (
        lambda a: closing_over_settings(argparse.Namespace(alpha=a)), "closure value: alpha 0.3, was 0.1"),
    "an object that is closed over": (lambda a: closing_over_settings(Task(a)), "closure value: alpha 0.3, was 0.1"),
    "the owner of a method": (lambda a: Task(a).loss, "owner: alpha 0.3, was 0.1"),
    "a dictionary of an object": (Task, "weights: ce 0.3, was 0.1"),
    "a module of a module": (Within, "module options ce: label_smoothing 0.3, was 0.1"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_an_option_of_a_loss_is_compared(tmp_path: Path, name: str) -> None:
    make, told = OTHER_LOSSES[name]

    # With a string in the batch no fixed microbatch can be drawn: names alone tell.
    def data() -> list[Any]:
        return [(*batch, ["row"] * 8) for batch in batches()]

    is_refused(tmp_path / "run", told, {"loss": make(0.1), "data": data}, {"loss": make(0.3), "data": data})


class Endless:
    """Holds itself, raises when it's looked at, and leads to a great many values."""

    def __init__(self) -> None:
        self.itself, self.many, self.by_name = self, list(range(100_000)), {"again": self}
        self.started = time.time()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def weigh(self) -> float:
        return (self.itself, self.many, self.by_name, self.started)[1][1]


endless = Endless()


def noted(model: nn.Module, data: Any) -> Tensor:
    global num_calls  # noqa: PLW0603
    num_calls += 1
    history.append(float(num_calls))
    metrics["loss"].append(0.0)
    assert args.device.startswith("cuda")
    return loss(model, data) * endless.weigh() * args.alpha * SETTINGS["alpha"]


@dataclass(frozen=True)
class Filled(InMemory):
    """A source that says what stands for a value that is missing."""

    fill: float = float("nan")
    fills: tuple[float, ...] = (0.0, float("nan"))


def test_a_run_goes_on_over_a_source_that_holds_a_nan(tmp_path: Path) -> None:
    first: dict[str, Any] = {"data": lambda: Filled((ROWS, LABELS), 8)}
    is_refused(tmp_path, "data: fill 0.0, was nan", first, {"data": lambda: Filled((ROWS, LABELS), 8, fill=0.0)})


def test_what_decides_nothing_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run", stop_at=3, loss=noted)
    assert history
    for name, value in (("resume", True), ("device", "cuda:1"), ("rank", 3)):
        monkeypatch.setattr(args, name, value, raising=False)
    monkeypatch.setitem(SETTINGS, "folder", "runs/2")
    endless.started = time.time() + 0.5
    assert run(tmp_path / "run", loss=noted).changed == []


class Counting(Task):
    forward_caches = ()


def test_what_counts_can_be_declared_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run", stop_at=3, loss=Counting(1.0, num_calls=0, cache={}))
    with pytest.raises(CheckpointError, match=r"num_calls 7, was 0.*forward_caches = \('num_calls',\)"):
        run(tmp_path / "run", loss=Counting(1.0, num_calls=7, cache={}))
    monkeypatch.setattr(Counting, "forward_caches", ("num_calls", "cache"))
    found = run(tmp_path / "run", loss=Counting(1.0, num_calls=7, cache={"a": 1}))
    assert found.changed == []


def volatile() -> tuple[object, ...]:
    """Return what a script sets anew in each process."""
    now = datetime.now(tz=UTC)
    with tempfile.TemporaryDirectory() as folder:
        return time.time_ns(), str(uuid.uuid4()), str(now), now.isoformat(), f"{folder}/cache", now


def test_what_belongs_to_one_process_is_free(tmp_path: Path) -> None:
    run(tmp_path / "run", stop_at=3, loss=Task(1.0, label=volatile()))
    assert run(tmp_path / "run", loss=Task(1.0, label=volatile())).changed == []


def test_a_function_declares_what_it_counts(tmp_path: Path) -> None:
    def make(num_seen: int) -> Any:
        seen = {"rows": num_seen}

        def counting(model: nn.Module, data: Any) -> Tensor:
            seen["rows"] += len(data[0])
            return loss(model, data)

        counting.forward_caches = ("seen",)  # type: ignore[attr-defined]
        return counting

    run(tmp_path / "run", stop_at=3, loss=make(0))
    undeclared = [make(0), make(5)]
    for one in undeclared:
        del one.forward_caches
    run(tmp_path / "other", stop_at=3, loss=undeclared[0])
    with pytest.raises(CheckpointError, match=r"closure seen: rows 5, was 0.*forward_caches = \('seen',\)"):
        run(tmp_path / "other", loss=undeclared[1])
    assert run(tmp_path / "other", loss=make(5)).changed == []
    assert run(tmp_path / "run", loss=make(5)).changed == []


class Tempered(nn.Module):
    forward_caches = ("num_seen",)

    def __init__(self, temperature: float, num_seen: int = 0) -> None:
        super().__init__()
        self.layers, self.temperature, self.num_seen, self._num_kept = make_model(), temperature, num_seen, num_seen
        self.device, self.scales = f"cuda:{num_seen}", (1.0, temperature)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows) / self.temperature


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows[:, None].expand(-1, 4, -1)
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Attending, "model options attention: dropout 0.5, was 0.1"),
        (
            Tempered,
            r"model options \(model\) scales: 1 0.5, was 0.1; .*: temperature 0.5, was 0.1",
        ),
    ],
)
def test_options_that_a_module_does_not_print(tmp_path: Path, make: Callable[[float], nn.Module], told: str) -> None:
    is_refused(tmp_path / "run", told, {"model": lambda: make(0.1)}, {"model": lambda: make(0.5)})


def test_what_a_module_counts_is_free(tmp_path: Path) -> None:
    run(tmp_path / "run", stop_at=3, model=lambda: Tempered(0.5))
    assert run(tmp_path / "run", model=lambda: Tempered(0.5, num_seen=5)).changed == []


class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """Rows, of which some from a row on have other labels, and noise that is drawn while a row is made."""

    def __init__(self, other_from: int = 48, noise: float = 0.0) -> None:
        self.labels, self.noise = LABELS.clone(), noise
        self.labels[other_from:] = (self.labels[other_from:] + 1) % 3

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return ROWS[index] + self.noise * torch.randn(6), self.labels[index]


@pytest.mark.parametrize("stop_at", [3, 6, 9])
def test_the_last_batch_that_a_loader_gave_is_compared(tmp_path: Path, stop_at: int) -> None:
    def loading(other_from: int) -> dict[str, Any]:
        return {"data": lambda: DataLoader(Labelled(other_from, 0.1), 8), "budget": "12ba", "checkpoint_every": "2ba"}

    run(tmp_path / "run", stop_at=stop_at, **loading(48))
    with pytest.raises(DataError, match=rf"batch {(stop_at - 1) % 6} of this pass, the last one seen, is another one"):
        run(tmp_path / "run", **loading(8))
    assert_goes_on(tmp_path / "run", loading(48))


def test_a_loader_goes_on_where_the_loss_has_changed_its_batch(tmp_path: Path) -> None:
    def halved(model: nn.Module, data: Any) -> Tensor:
        data[0].mul_(0.5)
        return loss(model, data)

    first = {"data": lambda: DataLoader(Labelled(), 8, shuffle=True), "loss": halved}
    run(tmp_path / "run", stop_at=3, **first)
    assert_goes_on(tmp_path / "run", first)


def test_workers_draw_rows_of_their_own(tmp_path: Path) -> None:
    def loading(num_workers: int) -> dict[str, Any]:
        return {"data": lambda: DataLoader(Labelled(noise=0.1), 8, num_workers=num_workers)}

    is_refused(tmp_path / "run", "data: num_workers 1, was 0", loading(0), loading(1))
    # Where a row is what it is, whoever makes it, their number is free.
    first = {"data": lambda: DataLoader(TensorDataset(ROWS, LABELS), 8, shuffle=True)}
    run(tmp_path / "tensors", stop_at=3, **first)
    first["data"] = lambda: DataLoader(TensorDataset(ROWS, LABELS), 8, shuffle=True, num_workers=1)
    assert_goes_on(tmp_path / "tensors", first)


class Falling:
    """A schedule of the user's own, which prints nothing."""

    def __init__(self, power: float) -> None:
        self.power = power

    def multiplier(self, elapsed: float, budget: Any) -> float:
        return (1 - elapsed) ** self.power


@dataclass(frozen=True, kw_only=True)
class Changing(Method):
    """Puts gradients through a function."""

    stage = Stage.GRADIENT
    function: Any = None

    def gradients(self, gradients: Any, weights: Any, at: Any) -> Any:
        return gradients.having({name: self.function(one) for name, one in gradients.tensors.items()})


def by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * factor


def halved(gradient: Tensor, factor: float = 0.5) -> Tensor:
    """Halve."""
    return gradient * factor


def halved_otherwise(gradient: Tensor, factor: float = 0.5) -> Tensor:
    """Halve, as it was written on another day."""
    return gradient * factor


class Scaling(torch.optim.SGD):
    """An optimizer with an option of its own."""

    def __init__(self, parameters: Any, factor: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self.factor
        return super().step(closure)


OTHER_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a schedule's": (
        {"optimizers": lambda _: [SGD(lr=0.1, schedule=Falling(1))]},
        {"optimizers": lambda _: [SGD(lr=0.1, schedule=Falling(3))]},
        "optimizers 0 schedule: power 3, was 1.*change=.*schedule"),
    "a function of a method": (
        {"methods": [Changing(function=lambda gradient: gradient * 0.5)]},
        {"methods": [Changing(function=lambda gradient: gradient * -0.1)]}, "method_options 0 function: code"),
    "what a function of a method closes over": (
        {"methods": [Changing(function=by(0.5))]}, {"methods": [Changing(function=by(0.1))]},
        "method_options 0 function closure: factor 0.1, was 0.5"),
    "a torch optimizer's": (
        {"optimizers": lambda model: [Scaling(model.parameters(), 1.0)]},
        {"optimizers": lambda model: [Scaling(model.parameters(), 3.0)]}, "optimizers 0 options: factor 3.0, was 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_an_option_that_is_an_object_is_compared(tmp_path: Path, name: str) -> None:
    first, other, told = OTHER_OPTIONS[name]
    is_refused(tmp_path / "run", told, first, other)


class Counted(Scaling):
    """It tells how many steps it took, as what it keeps."""

    def __init__(self, parameters: Any, factor: float, num_calls: int = 0) -> None:
        super().__init__(parameters, factor)
        self.num_calls = num_calls

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "num_calls": self.num_calls}


def test_a_count_that_an_optimizer_keeps_in_its_state_is_no_option(tmp_path: Path) -> None:
    run(tmp_path / "run", stop_at=3, optimizers=lambda model: [Counted(model.parameters(), 1.0)])
    with pytest.raises(CheckpointError, match=r"optimizers 0 options: factor 3\.0, was 1\.0"):
        run(tmp_path / "run", optimizers=lambda model: [Counted(model.parameters(), 3.0)])
    assert run(tmp_path / "run", optimizers=lambda model: [Counted(model.parameters(), 1.0, 7)]).changed == []


def test_a_docstring_and_another_python_change_no_code(tmp_path: Path) -> None:
    from cosmati.train.identity import check_resume
    from cosmati.train.options import describe_option

    was, now = describe_option(halved), describe_option(halved_otherwise)
    assert isinstance(was, dict)
    assert isinstance(now, dict)
    assert was["code"] == now["code"] != describe_option(lambda gradient, factor=0.5: gradient + factor)["code"]  # type: ignore[index]
    facts = {"method_options.0.function.code": was["code"]}
    elsewhere = {"method_options.0.function.code": "00 of Python 2.7"}
    assert check_resume(elsewhere, facts, asked=(), where="The checkpoint") == []


def test_a_schedule_of_ones_own_may_be_changed_by_name(tmp_path: Path) -> None:
    run(tmp_path / "run", stop_at=3, optimizers=lambda _: [SGD(lr=0.1, schedule=Falling(1))])
    found = run(tmp_path / "run", optimizers=lambda _: [SGD(lr=0.1, schedule=Falling(3))], change="schedule")
    assert [change.name for change in found.changed] == ["optimizers.0.schedule.power"]


def masked(model: nn.Module, data: Any) -> Tensor:
    """Mask labels, and scale rows, in place."""
    data[1][torch.rand(len(data[1])) < 0.3] = -100
    data[0].mul_(0.5)
    return loss(model, data)


def scaled(model: nn.Module, data: Any) -> Tensor:
    data["rows"][0].mul_(0.5)
    return loss(model, (data["rows"][0], data["labels"]))


def masked_copy(model: nn.Module, data: Any) -> Tensor:
    return masked(model, [part.clone() for part in data])


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_list_that_a_loss_changes_in_place_is_refused(tmp_path: Path, num_microbatches: int) -> None:
    def data() -> list[Any]:
        return [{"rows": (rows,), "labels": labels} for rows, labels in batches()]

    settings = {"budget": "10ba", "num_microbatches": num_microbatches, "checkpoint_every": "1ba"}
    with pytest.raises(DataError, match=r"Batch 0 of the data was changed in place.*clone\(\)"):
        run(tmp_path / "run", loss=scaled, data=data, **settings)
    # Once is as good as a copy: a resume has the rows that it hasn't seen.
    run(tmp_path / "once", loss=masked, stop_at=3)
    assert_goes_on(tmp_path / "once", {"loss": masked})


def test_a_list_goes_on_where_the_loss_changes_a_copy(tmp_path: Path) -> None:
    first = {"loss": masked_copy, "budget": "10ba"}
    run(tmp_path / "run", stop_at=7, **first)
    assert_goes_on(tmp_path / "run", first)


def test_weights_of_another_parent_are_refused(tmp_path: Path) -> None:
    for name in ("parent", "other"):
        run(tmp_path / name)
    parent, other = tmp_path / "parent", tmp_path / "other"
    run(tmp_path / "own", stop_at=3)
    run(tmp_path / "child", stop_at=3, load_weights=parent)
    run(tmp_path / "of step", stop_at=3, load_weights=parent / "checkpoints" / "step-00000006")
    with pytest.raises(CheckpointError, match="load_weights other, was parent"):
        run(tmp_path / "child", load_weights=other)
    with pytest.raises(CheckpointError, match="load_weights parent, was absent"):
        run(tmp_path / "own", load_weights=parent)
    with pytest.raises(CheckpointError, match="load_weights: step 0, was 6"):
        run(tmp_path / "of step", load_weights=parent / "checkpoints" / "step-00000000")
    whole = run(None, load_weights=parent)
    parent.rename(tmp_path / "gone")
    # The same command goes on, and so does one that doesn't speak of weights any more.
    for name, given in (("child", {"load_weights": parent}), ("of step", {})):
        found = run(tmp_path / name, **given)
        assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), whole.model.parameters(), strict=True))


def test_the_order_in_memory_is_compared(tmp_path: Path) -> None:
    def convolving(memory_format: torch.memory_format) -> dict[str, Any]:
        def make() -> nn.Module:
            torch.manual_seed(0)
            layers = (nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(6, 3))
            return nn.Sequential(*layers).to(memory_format=memory_format)

        return {"model": make}

    usual, other = (convolving(kind) for kind in (torch.contiguous_format, torch.channels_last))
    is_refused(
        tmp_path / "run", r"parameters 2: weight float32\[3, 4, 2, 2\] strides \[16, 1, 8, 4\], was", usual, other
    )


def test_hooks_are_a_fact_of_the_model() -> None:
    from cosmati.train.identity import describe_model

    def halve(gradient: Tensor) -> Tensor:
        return gradient * 0.5

    model = nn.Linear(2, 2)
    assert "hooks" not in describe_model(model)
    model.weight.register_hook(halve)
    model.register_forward_hook(lambda *_: None)
    found = describe_model(model)["hooks"]
    assert isinstance(found, dict)
    assert {name: [hook["is"].rpartition(".")[2] for hook in hooks] for name, hooks in found.items()} == {
        "weight": ["halve"],
        "(model)": ["<lambda>"],
    }


def test_switches_of_kernels_are_surroundings() -> None:
    from cosmati.train.facts import describe_environment

    was = describe_environment(torch.device("cpu"))["kernels"]
    torch.set_float32_matmul_precision("high")
    try:
        assert describe_environment(torch.device("cpu"))["kernels"] != was
    finally:
        torch.set_float32_matmul_precision("highest")
