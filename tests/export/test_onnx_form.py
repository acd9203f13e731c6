"""How a model goes to ONNX and is asked again. Without the packages, a torch.export program stands in for the file."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from cosmati.errors import ExportError
from cosmati.export import formats
from cosmati.export.formats import write_onnx

pytestmark = pytest.mark.long

is_there = all(importlib.util.find_spec(name) for name in formats._ONNX_PACKAGES)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(x) * scale, "sum": x.sum(1)}


class Session:
    """As onnxruntime's, over a program of torch.export's."""

    def __init__(self, path: str, providers: list[str]) -> None:
        assert providers == ["CPUExecutionProvider"]
        program = torch.export.load(path)
        self._names = list(program.graph_signature.user_inputs)
        self._run, self._spec = program.module(), program.call_spec.in_spec

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._names]

    def run(self, outputs: None, given: dict[str, Any]) -> list[Any]:
        assert self._spec is not None
        args, kwargs = _pytree.tree_unflatten([torch.from_numpy(value) for value in given.values()], self._spec)
        found = self._run(*args, **kwargs)
        return [value.numpy() for value in found.values()]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_there:
        return

    def export(model: nn.Module, args: Any, f: Path, *, kwargs: Any, dynamic_shapes: Any, **options: Any) -> None:
        assert options == {"dynamo": True, "external_data": False}
        torch.export.save(torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes), f"{f}.pt2")
        Path(f"{f}.pt2").rename(f)

    # What exporting loads looks whether onnxruntime is there, and a stand-in would leave it half loaded.
    torch.export.save(torch.export.export(nn.Identity(), (torch.zeros(1),)), io.BytesIO())
    runtime = ModuleType("onnxruntime")
    runtime.InferenceSession = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setattr(torch.onnx, "export", export)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.filterwarnings("ignore:Expect archive file to be a file ending in .pt2")
def test_a_model_is_asked_through_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Two().eval()
    x, scale = torch.randn(4, 3), torch.full((4, 1), 2.0)
    read = write_onnx(model, ((x,), {"scale": scale}), tmp_path)
    assert (tmp_path / "model.onnx").is_file()
    for rows in (4, 3):
        with torch.no_grad():
            found, expected = (one(x[:rows], scale=scale[:rows]) for one in (read, model))
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


def test_without_rows_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--recipe"):
        write_onnx(Two(), None, tmp_path)


@pytest.mark.skipif(is_there, reason="the packages are installed")
def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"torch\.onnx can't write this model: ModuleNotFoundError"):
        write_onnx(Two(), ((torch.randn(4, 3), torch.ones(4, 1)), {}), tmp_path)
