"""`cosmati export`: from a finished run and its recipe to files, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import cosmati
from cosmati.cli.main import app
from cosmati.storage.lock import FileLock
from tests.processes import run_python

pytestmark = pytest.mark.long

RECIPE = """
from dataclasses import dataclass
import torch
from torch import nn
from cosmati import Classification, Evaluation, InMemory, RunConfig, accuracy, batches
from cosmati.methods import EMA, BlurPool, LabelSmoothing
from cosmati.optim import SGD, Optimizer, ScheduleFreeAdamW
from cosmati.recipes.recipe import Recipe

SHIFT = 0.0

def rows(seed, shift=0.0):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 1, 6, 6, generator=draws)
    return x, ((x.mean((1, 2, 3)) + shift) > 0).long()

def model(width=16):
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                         nn.Conv2d(width, 8, 3, stride=2), nn.Flatten(), nn.Linear(32, 2))

def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 2))

def cross_entropy(model, data):
    return nn.functional.cross_entropy(model(data[0]), data[1])

def made(name="blurred", model=model, methods=(BlurPool(), EMA(half_life="3ba")), optimizer=SGD(lr=0.1), shift=0.0,
         evaluates=True):
    evaluation = Evaluation(batches(rows(1, shift), 16), {"accuracy": accuracy, "cross_entropy": cross_entropy})
    return Recipe(name=name, model=model, loss=Classification(2), data=lambda: InMemory(rows(0), 8),
                  optimizers=(optimizer,), methods=methods, evaluation=(lambda: evaluation) if evaluates else None,
                  config=RunConfig(budget="8ba", checkpoint_every="5ba"))

def recipe():
    return made()

def wider():
    return made(model=lambda: model(24))

def unblurred():
    return made(methods=(EMA(half_life="3ba"),))

class Table(nn.Flatten):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("table", torch.tensor(value), persistent=False)

def other_table(value=2.0):
    layers = [Table(value), nn.Linear(36, 2)]
    return made(model=lambda: nn.Sequential(*layers), methods=())

def table():
    return other_table(1.0)

def other_rows():
    return made(shift=0.2)

def unmeasured():
    return made(evaluates=False)

def plain():
    return made(model=mlp, methods=(EMA(half_life="3ba"), LabelSmoothing()))

class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(Optimizer):
    def build(self, named):
        return Own([parameter for _, parameter in named], lr=self.lr)

def own_optimizer():
    return made(model=mlp, methods=(), optimizer=OwnOptimizer(lr=0.1))

def schedule_free():
    return made(model=mlp, methods=(), optimizer=ScheduleFreeAdamW(lr=1e-2))
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, and runs of them; tests copy what they change."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.py").write_text(RECIPE)
    for name, run_name in (
        ("recipe", "run"),
        ("plain", "plain"),
        ("schedule_free", "free"),
        ("own_optimizer", "own"),
        ("table", "table"),
    ):
        result = run("train", f"{folder}/recipe.py:{name}", "--run-folder", folder / run_name)
        assert result.exit_code == 0, result.output
    return folder


def copied(trained: Path, tmp_path: Path, name: str = "run") -> Path:
    shutil.copytree(trained / name, tmp_path / name)
    return tmp_path / name


def test_a_run_is_exported_with_what_it_recorded(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path), tmp_path / "out"
    result = run("export", folder, "--recipe", trained / "recipe.py", "--to", "safetensors", "--out", out)
    assert result.exit_code == 0, result.output
    recorded = json.loads((folder / "run.json").read_text())["metrics"]
    assert f"accuracy {recorded['accuracy']:.4f}" in said(result)
    line = json.loads((folder / "exports.jsonl").read_text())
    assert line["metrics"] == recorded
    assert line["checked"]
    assert {path.name for path in out.iterdir()} == {"README.md", "model.safetensors", "rebuild.py"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    card = (out / "README.md").read_text()
    for fact in ("blurred", f"{recorded['accuracy']:.6g}", "`BlurPool(), EMA(half_life='3ba')`", "equal bit for bit"):
        assert fact in card
    # A second export of the same run has its own line; the first one's place is nobody else's.
    again = run("export", folder, "--recipe", trained / "recipe.py", "--to", "safetensors", "--out", out)
    assert again.exit_code == 1
    assert "there already" in said(again)


def test_an_earlier_checkpoint_has_nothing_recorded(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path), tmp_path / "out"
    place = folder / "checkpoints/step-00000005"
    result = run("export", place, "--recipe", trained / "recipe.py", "--to", "safetensors", "--out", out)
    assert result.exit_code == 0, result.output
    assert "recorded nothing at this step" in said(result)
    line = json.loads((folder / "exports.jsonl").read_text())
    assert (line["step"], line["checkpoint"], line["checked"]) == (5, "step-00000005", False)
    assert "not at this step" in (out / "README.md").read_text()


def test_without_evaluation_data_the_card_says_unchecked(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path), tmp_path / "out"
    result = run("export", folder, "--recipe", f"{trained}/recipe.py:unmeasured", "--to", "safetensors", "--out", out)
    assert result.exit_code == 0, result.output
    assert "Unchecked" in said(result)
    assert "**Unchecked**" in (out / "README.md").read_text()
    assert "recorded as" not in said(result)


def test_a_run_that_was_broken_off_is_said_to_be(trained: Path, tmp_path: Path) -> None:
    """Killed: nobody holds its lock, and its record says that it runs."""
    folder = copied(trained, tmp_path)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"outcome": "running", "ended": None, "metrics": {}}))
    recipe = trained / "recipe.py"
    result = run("export", folder, "--recipe", recipe, "--to", "safetensors", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "recorded as running: these are the weights after 8 steps" in said(result)


def test_weights_leave_without_a_recipe(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path, "plain"), tmp_path / "out"
    result = run("export", folder, "--to", "safetensors", "--out", out)
    assert result.exit_code == 0, result.output
    by_recipe = tmp_path / "by-recipe"
    made = run("export", folder, "--recipe", f"{trained}/recipe.py:plain", "--to", "safetensors", "--out", by_recipe)
    assert made.exit_code == 0, made.output
    alone, whole = (load_file(path / "model.safetensors") for path in (out, by_recipe))
    assert alone.keys() == whole.keys()
    assert all(torch.equal(alone[name], whole[name]) for name in whole)
    latest = load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")
    assert not torch.equal(alone["1.weight"], latest["1.weight"])
    first, second = [json.loads(text) for text in (folder / "exports.jsonl").read_text().splitlines()]
    assert first["weights"] == second["weights"]
    assert (first["checked"], second["checked"]) == (False, True)
    assert "**Unchecked**" in (out / "README.md").read_text()


WRONG_RECIPES = {
    "wider": "The recipe isn't the one of",
    "unblurred": "The recipe isn't the one of",
    "other_rows": "isn't the one that was measured",
    "nothing_there": "has no function 'nothing_there'",
}


@pytest.mark.parametrize("name", WRONG_RECIPES)
def test_another_recipe_is_refused(name: str, trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path), tmp_path / "out"
    result = run("export", folder, "--recipe", f"{trained}/recipe.py:{name}", "--out", out)
    assert result.exit_code == 1
    assert WRONG_RECIPES[name] in said(result)
    assert not out.exists()
    assert not (folder / "exports.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_of_a_script_is_exported_with_the_script_as_recipe(tmp_path: Path) -> None:
    """Its classes and functions were `__main__`'s then."""
    text = RECIPE + "\ndef act(x):\n    return x.relu()\n\nclass Block(nn.Linear):\n"
    text += "    def __init__(self):\n        super().__init__(36, 36)\n        self.act = act\n\n"
    text += "    def forward(self, x):\n        return x + self.act(super().forward(x))\n\n"
    text += "def script():\n    deep = StochasticDepth(target_layer_name=Block)\n"
    text += "    return made(model=lambda: nn.Sequential(nn.Flatten(), Block(), nn.Linear(36, 2)), methods=(deep,))\n\n"
    text += "if __name__ == '__main__':\n    script().trainer(run_folder='run').fit()\n"
    (tmp_path / "script.py").write_text(text.replace("EMA, BlurPool,", "EMA, BlurPool, StochasticDepth,"))
    environment = {**os.environ, "PYTHONPATH": str(Path(cosmati.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = run_python([tmp_path / "script.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    recipe, out = f"{tmp_path}/script.py:script", tmp_path / "out"
    result = run("export", tmp_path / "run", "--recipe", recipe, "--to", "safetensors", "--out", out)
    assert result.exit_code == 0, result.output
    assert "KeptShare" in (out / "rebuild.py").read_text()


def test_a_table_that_no_checkpoint_holds_is_compared(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path, "table"), tmp_path / "out"

    def exported(name: str) -> Result:
        return run("export", folder, "--recipe", f"{trained}/recipe.py:{name}", "--to", "safetensors", "--out", out)

    assert "model contents 0: table" in said(exported("other_table"))
    assert not out.exists()
    result = exported("table")
    assert result.exit_code == 0, result.output


def test_another_seed_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path)
    result = run("export", folder, "--recipe", trained / "recipe.py", "--set", "config.seed=3", "--out", tmp_path / "o")
    assert result.exit_code == 1
    assert "settings: seed 3, was 0" in said(result)


def test_what_is_no_finished_run_is_refused(trained: Path, tmp_path: Path) -> None:
    folder, recipe = copied(trained, tmp_path), f"{trained}/recipe.py"

    def refused(*arguments: object) -> str:
        result = run("export", *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        return said(result)

    assert "no run folder" in refused(tmp_path, "--recipe", recipe)
    assert "no run folder" in refused(tmp_path / "absent", "--recipe", recipe)
    assert "step-00000008" in refused(folder / "checkpoints/step-00000099", "--recipe", recipe)
    assert "Give the run's recipe" in refused(folder)
    assert "no form 'tensorflow'" in refused(folder, "--to", "tensorflow", "--recipe", recipe)
    assert "no model of transformers" in refused(folder, "--to", "hf", "--recipe", recipe)
    assert "BatchNorm's statistics" in refused(folder, "--to", "safetensors")
    assert "ScheduleFree" in refused(trained / "free", "--to", "safetensors")
    assert "of your own" in refused(trained / "own", "--to", "safetensors")
    with FileLock(folder / "lock"):
        assert "is running" in refused(folder, "--recipe", recipe)
    newest = folder / "checkpoints/step-00000008/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert "damaged" in refused(folder, "--recipe", recipe)
    shutil.rmtree(folder / "checkpoints")
    assert "holds no checkpoint" in refused(folder, "--recipe", recipe)
    (folder / "run.json").write_text("{")
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    assert "Error:" in refused(folder, "--recipe", recipe)
    assert not (tmp_path / "out").exists()


def test_onnx_names_its_extra(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if "onnx" in name else own(name, *a))
    out = tmp_path / "out"
    result = run("export", trained / "run", "--recipe", trained / "recipe.py", "--to", "onnx", "--out", out)
    assert result.exit_code == 1
    assert "pip install 'cosmati[onnx]'" in said(result)


def test_help_teaches() -> None:
    told = said(run("export", "--help"))
    for word in ("--recipe", "rebuild.py", "unchecked", "exports.jsonl", "cosmati export runs/gpt2"):
        assert word in told
