"""A run starts where it trains, on one root for all ranks, with another run's weights unless it has begun already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cosmati.core.state import parameter_root
from cosmati.errors import CheckpointError, PlanError
from cosmati.train import warm_start
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.content import content_digest
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, write_checkpoint
from cosmati.train.warm_start import load_weights, place

CPU = torch.device("cpu")


class Noted:
    """Ranks that take note of what they're given to share, and say which names are unlike."""

    def __init__(self, unlike: Iterable[str] = ()) -> None:
        self.shared: list[Tensor] = []
        self.compared: list[dict[str, bytes]] = []
        self._unlike = list(unlike)

    def share(self, tensors: Iterable[Tensor]) -> None:
        assert not self.shared, "once"
        self.shared += tensors

    def unlike_names(self, digests: Mapping[str, bytes]) -> list[str]:
        self.compared.append(dict(digests))
        return self._unlike


def given(loss: Any = None, **config: Any) -> Any:
    plain = lambda model, data: model(data).sum()  # noqa: E731
    return SimpleNamespace(config=RunConfig(**config), loss=plain if loss is None else loss)


def linear(value: float, *, has_statistics: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)) if has_statistics else nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def values(model: nn.Module) -> set[float]:
    return {float(one) for tensor in model.state_dict().values() for one in tensor.flatten()}


def a_run(folder: Path, *steps: int) -> Path:
    """A run whose checkpoint of each step has the step for all its weights; return its folder."""
    for step in steps:
        checkpoint = Checkpoint(step, dict(linear(float(step)).state_dict()), {}, {})
        publish_checkpoint(write_checkpoint(folder / "checkpoints", checkpoint), keep=9)
    return folder


def root(value: float) -> str:
    return parameter_root(dict(linear(value).state_dict())).hex()


# --------------------------------------------------------------------------------------------------------------- load


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    model = linear(0.0)
    assert load_weights(model, a_run(tmp_path / "parent", 2, 5)) == {"run": "parent", "step": 5, "root": root(5.0)}
    assert values(model) == {5.0}


def test_a_checkpoint_by_itself_is_taken_whatever_is_newer(tmp_path: Path) -> None:
    model, run = linear(0.0), a_run(tmp_path / "parent", 2, 5)
    (path,) = (run / "checkpoints").glob("step-*2")
    assert load_weights(model, path) == {"run": "parent", "step": 2, "root": root(2.0)}
    assert values(model) == {2.0}


def test_a_file_is_taken_and_told_by_its_name(tmp_path: Path) -> None:
    model, path = linear(0.0), tmp_path / "weights.safetensors"
    save_file(dict(linear(3.0).state_dict()), path)
    assert load_weights(model, path) == {"file": "weights.safetensors", "root": root(3.0)}
    assert values(model) == {3.0}


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"pickled")
    model = linear(1.0)
    with pytest.raises(
        CheckpointError, match=r"weights\.safetensors can't be read as safetensors: .*Give another file"
    ):
        load_weights(model, path)
    assert values(model) == {1.0}


@pytest.mark.parametrize("make", [lambda _: None, Path.mkdir, lambda path: (path / "checkpoints").mkdir(parents=True)])
def test_where_there_is_nothing_to_load_it_is_said(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"none holds no weights\. Give a run's folder, one of its checkpoints"):
        load_weights(linear(1.0), tmp_path / "none")


@pytest.mark.parametrize("is_file", [True, False])
def test_weights_of_another_model_are_refused_and_leave_it_as_it_was(tmp_path: Path, is_file: bool) -> None:
    path = a_run(tmp_path / "parent", 2)
    if is_file:
        path = tmp_path / "w.safetensors"
        save_file(dict(linear(2.0).state_dict()), path)
    model = linear(1.0, has_statistics=False)
    with pytest.raises(CheckpointError, match="don't fit the model"):
        load_weights(model, path)
    assert values(model) == {1.0}


# -------------------------------------------------------------------------------------------------------------- place


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_put_on_its_device_and_derived_from_nothing(device: str) -> None:
    model: nn.Module = linear(1.0)
    assert place(model, torch.device(device), given(), Noted()) == {}  # type: ignore[arg-type]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device}


class Criterion(nn.Module):
    """A loss with a buffer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, model: nn.Module, data: Tensor) -> Tensor:
        result: Tensor = model(data).sum()
        return result


def test_ranks_share_all_that_the_model_and_the_losses_hold() -> None:
    model, first, second = linear(1.0), Criterion(), Criterion()
    plain = given().loss
    for loss, modules in (
        (plain, [model]),
        (first, [model, first]),
        (partial(first.forward), [model, first]),
        ([SubStep("a", plain), SubStep("b", second, "*"), SubStep("c", first)], [model, second, first]),
    ):
        ranks: Any = Noted()
        place(model, CPU, given(loss), ranks)
        expected = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        assert [id(tensor) for tensor in ranks.shared] == [id(tensor) for tensor in expected]
        assert ranks.compared == [], "nothing is sparse"


def sparse_model() -> tuple[nn.Module, dict[str, Tensor]]:
    model, held = linear(1.0), {f"adjacency{i}": torch.eye(2).mul(i + 1).to_sparse() for i in range(7)}
    for name, tensor in held.items():
        model.register_buffer(name, tensor)
    return model, held


def test_what_is_sparse_is_compared_by_content_and_not_sent() -> None:
    (model, held), ranks = sparse_model(), Noted()
    assert place(model, CPU, given(), ranks) == {}  # type: ignore[arg-type]
    assert ranks.compared == [{name: content_digest(tensor) for name, tensor in held.items()}]
    assert {tensor.layout for tensor in ranks.shared} == {torch.strided}
    assert len(ranks.shared) == len(linear(1.0).state_dict())


def test_what_is_sparse_and_unlike_is_refused_by_name_five_at_most() -> None:
    model, held = sparse_model()
    with pytest.raises(PlanError, match=r"^adjacency3 \(sparse\) differs from rank to rank.*Seed what it's made from"):
        place(model, CPU, given(), Noted(["adjacency3"]))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^adjacency0, adjacency1, adjacency2, adjacency3, adjacency4 \(sparse\)"):
        place(model, CPU, given(), Noted(held))  # type: ignore[arg-type]


def placed(**config: Any) -> tuple[set[float], Mapping[str, object]]:
    """What a model of ones has after it was placed, and what it's derived from."""
    model, ranks = linear(1.0), Noted()
    parent = place(model, CPU, given(**config), ranks)  # type: ignore[arg-type]
    assert {float(one) for tensor in ranks.shared for one in tensor.detach().flatten()} == values(model), (
        "shared once loaded"
    )
    return values(model), parent


def test_another_runs_weights_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    parent = a_run(tmp_path / "parent", 4)
    derived = {"run": "parent", "step": 4, "root": root(4.0)}
    (tmp_path / "empty").mkdir()
    assert placed(load_weights=parent) == ({4.0}, derived)
    assert placed(load_weights=parent, run_folder=tmp_path / "not yet") == ({4.0}, derived)
    assert placed(load_weights=parent, run_folder=tmp_path / "empty") == ({4.0}, derived)
    assert placed(run_folder=tmp_path / "empty") == ({1.0}, {})
    # What stands in the checkpoints' folder and is none doesn't make a beginning.
    (tmp_path / "empty" / "checkpoints" / "other").mkdir(parents=True)
    assert placed(load_weights=parent, run_folder=tmp_path / "empty") == ({4.0}, derived)


def test_a_run_that_has_begun_goes_on_from_its_own(tmp_path: Path) -> None:
    parent, own = a_run(tmp_path / "parent", 4), a_run(tmp_path / "own", 1)
    assert placed(load_weights=parent, run_folder=own) == ({1.0}, {})
    # Nothing is read of the other one, which may be gone.
    assert placed(load_weights=tmp_path / "gone", run_folder=own) == ({1.0}, {})


def test_a_run_whose_checkpoints_are_only_where_they_are_copied_to_has_begun(tmp_path: Path) -> None:
    parent, run = a_run(tmp_path / "parent", 4), tmp_path / "own"
    run.mkdir()
    copied = {"load_weights": parent, "run_folder": run, "checkpoint_to": str(tmp_path / "copies")}
    assert placed(**copied)[0] == {4.0}, "nothing is there yet"
    (copy,) = (a_run(tmp_path / "copies" / "own", 2) / "checkpoints").iterdir()
    copy.rename(tmp_path / "copies" / "own" / copy.name)
    assert placed(**copied) == ({1.0}, {})
    assert placed(**copied | {"run_folder": tmp_path / "another"})[0] == {4.0}, "a run's copies are below its name"


@pytest.mark.parametrize("error", [CheckpointError("no"), OSError("no"), ValueError("no"), KeyError("no")])
def test_where_copies_cannot_be_listed_who_fetches_them_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(url: str) -> None:
        raise error

    monkeypatch.setattr(warm_start, "CopyPlace", refuse)
    asked = {"load_weights": a_run(tmp_path / "parent", 4), "run_folder": tmp_path / "own", "checkpoint_to": "s3://b"}
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            placed(**asked)
    else:
        assert placed(**asked) == ({1.0}, {})
