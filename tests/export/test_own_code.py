"""What an export can't hold, since it's the user's own code or lies past the weights: it's named, or refused."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import Tensor, nn

from cosmati import Classification, InMemory, Method, RunConfig, Stage, Trainer
from cosmati.errors import ExportError
from cosmati.export import publishing
from cosmati.export.comparison import _distance, check_metrics
from cosmati.methods import EMA, BlurPool, StochasticDepth
from cosmati.optim import SGD
from cosmati.train.exporting import other_model
from tests.export.test_export_command import run, said
from tests.export.test_export_controls import net, refused, rows, trainer_in


class Louder(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 1.3 * F.gelu(x)


@dataclasses.dataclass(frozen=True)
class OwnSurgery(Method):
    stage: ClassVar[Stage] = Stage.REPLACE

    def apply(self, model: nn.Module, optimizers: object = ()) -> nn.Module:
        for module in model.modules():
            if type(module) is nn.ReLU:
                module.__class__ = Louder
        return model


def with_relu() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.parametrize("blurs", [False, True])
def test_surgery_of_the_users_own_is_named(blurs: bool, tmp_path: Path) -> None:
    methods: list[Method] = [OwnSurgery(), *([BlurPool(min_channels=1)] if blurs else [])]
    trainer = trainer_in(tmp_path / "run", with_relu(), methods=methods)
    trainer.fit()
    trainer.export(tmp_path / "out", to="safetensors")
    card = (tmp_path / "out/README.md").read_text()
    assert "by the names of the model's own class" not in card
    assert "`OwnSurgery()` | a method of the run's own code: apply it before loading" in card
    # As the card says it, it's the model that was measured.
    plain = OwnSurgery().apply(with_relu())
    if blurs:
        assert "Apply `OwnSurgery()` to a model of its own class first" in card
        plain = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](plain)
    assert load_model(plain, tmp_path / "out/model.safetensors") == (set(), [])
    with trainer.averaged() as measured, torch.no_grad():
        assert torch.equal(plain.eval()(rows()[0]), measured.eval()(rows()[0]))


class Doubled(nn.Module):
    """A residual block whose output a hook of its own doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)
        self.register_forward_hook(lambda _, given, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.convolution(x))


def test_a_hook_of_the_users_own_comes_after_a_share(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Doubled(), Doubled(), nn.Flatten(), nn.Linear(81, 2))

    depth = StochasticDepth(target_layer_name="Doubled", stochastic_method="block", drop_rate=0.4)
    trainer = trainer_in(tmp_path / "run", build(), methods=[depth])
    trainer.fit()
    trainer.export(tmp_path / "out", to="safetensors")
    rebuilt = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](build())
    load_model(rebuilt, tmp_path / "out/model.safetensors")
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(rows()[0]), trainer.model.eval()(rows()[0]))


RECIPE = """
import torch
from torch import nn
from cosmati import Classification, InMemory, RunConfig
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(nn.functional.relu(self.first(x)))

def rows():
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    return x, (x.mean(1) > 0).long()

def recipe():
    return Recipe(name="net", model=Net, loss=Classification(2), data=lambda: InMemory(rows(), 8),
                  optimizers=(SGD(lr=0.1),), methods=(EMA(half_life="2ba"),), config=RunConfig(budget="4ba"))
"""


def test_another_forward_of_the_same_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "was.py").write_text(RECIPE)
    (tmp_path / "now.py").write_text(RECIPE.replace("functional.relu", "functional.gelu"))
    (tmp_path / "moved.py").write_text("# As it was, a line lower.\n" + RECIPE)
    trained = run("train", tmp_path / "was.py", "--run-folder", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    given = ("export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "out", "--recipe")
    result = run(*given, tmp_path / "now.py")
    assert result.exit_code == 1
    assert "a fixed microbatch has the loss" in said(result)
    assert not (tmp_path / "out").exists()
    for name in ("was", "moved"):
        result = run(*given[:-2], tmp_path / name, "--recipe", tmp_path / f"{name}.py")
        assert result.exit_code == 0, result.output


class Tied(nn.Module):
    """A head tied to the embedding by a closure, which a copy keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 81, bias=False)
        self.body = nn.Linear(81, 81)
        embedding = self.embedding
        self.head = lambda latent: latent @ embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits


def test_a_copy_that_reads_the_original_is_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", Tied(), methods=[EMA(half_life="4ba")])
    trainer.fit()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    refused(trainer, tmp_path, "still reads weights of the original")
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.long
def test_a_program_that_the_disk_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    own = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "model.pt2":
            raise OSError(28, "No space left on device")
        return own(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match="No space left"):
        trainer.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_program_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    own = torch.export.load

    def other(file: Any) -> Any:
        program = own(file)
        with torch.no_grad():
            program.state_dict["0.weight"].mul_(2)
        return program

    monkeypatch.setattr(torch.export, "load", other)
    trainer.export(tmp_path / "out")
    assert not (tmp_path / "out/model.pt2").exists()
    assert "There is no `model.pt2`" in (tmp_path / "out/README.md").read_text()


class Centred(nn.Module):
    """Its mean is no persistent buffer, and its scale none at all; training moves both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(81, 2)
        self.register_buffer("mean", torch.zeros(81), persistent=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            self.scale = 1.5 * self.scale
        return self.linear(x - self.mean) * self.scale


def test_state_past_the_weights_is_named(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", Centred(), methods=[])
    trainer.fit()
    trainer.export(tmp_path / "out", to="safetensors")
    card = (tmp_path / "out/README.md").read_text()
    assert "**Training moved what no file of weights holds**: forward changes the buffers mean" in card
    assert "scale" in card
    assert "What is evaluated is what is here" not in card
    assert "has to make: `mean`" in card
    plain = trainer_in(tmp_path / "plain")
    plain.fit()
    plain.export(tmp_path / "other", to="safetensors")
    assert "Not in the weights" not in (tmp_path / "other/README.md").read_text()


METRICS = """
from cosmati import Evaluation, Loss, batches

def measured(name, value):
    def recipe_of():
        def metric(model, data):
            model(data[0])
            return Loss(torch.tensor(value), 1.0)
        made = recipe()
        evaluation = Evaluation(batches(rows(), 16), {name: metric})
        return dataclasses.replace(made, evaluation=lambda: evaluation)
    return recipe_of

infinite = measured("odd", float("inf"))
plain = measured("odd", 0.625)
"""


def test_an_infinite_metric_is_compared(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import dataclasses\n" + RECIPE + METRICS)
    recipe = f"{tmp_path}/recipe.py:infinite"
    trained = run("train", recipe, "--run-folder", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    result = run("export", tmp_path / "run", "--recipe", recipe, "--to", "safetensors", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    line = json.loads((tmp_path / "run/exports.jsonl").read_text())
    assert line["checked"]
    assert line["metrics"] == {"odd": None}


def test_nothing_recorded_is_nothing_checked(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    trainer._metrics = {}
    trainer.export(tmp_path / "out", to="safetensors")
    assert json.loads((tmp_path / "run/exports.jsonl").read_text())["checked"] is False


def test_what_was_measured_is_told(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import dataclasses\n" + RECIPE + METRICS)
    recipe = f"{tmp_path}/recipe.py:plain"
    trained = run("train", recipe, "--run-folder", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    evaluations = tmp_path / "run/evaluations.jsonl"
    last = json.loads(evaluations.read_text().splitlines()[-1]) | {"odd": 0.5}
    evaluations.write_text(f"{evaluations.read_text()}{json.dumps(last)}\n7\n")  # Damaged, and still JSON.
    given = ("export", tmp_path / "run", "--recipe", recipe, "--to", "safetensors", "--out", tmp_path / "out")
    refusal = run(*given)
    assert refusal.exit_code == 1
    assert "recorded 0.5, exported 0.625" in said(refusal)
    result = run(*given, "--tolerance", "0.2")
    assert result.exit_code == 0, result.output
    assert "Measured again on the export: odd 0.6250" in said(result)


@pytest.mark.parametrize(
    ("recorded", "found", "agree"),
    [
        (math.nan, 1.0, False),
        (math.nan, math.nan, True),
        (math.nan, math.inf, True),
        (1.0, math.nan, False),
        (math.inf, math.nan, False),
        (math.inf, math.inf, True),
        (math.nan, None, False),
        (1.0, None, False),
        (1.0, 1.0 + 1e-6, True),
        (1.0, 1.0 + 1e-4, False),
    ],
)
def test_figures_that_are_no_numbers(recorded: float, found: float | None, agree: bool) -> None:
    given = {} if found is None else {"m": found}
    if agree:
        check_metrics({"m": recorded}, given, 1e-5, lambda: given, "rows")
        return
    with pytest.raises(ExportError, match="isn't the one that was measured"):
        check_metrics({"m": recorded}, given, 1e-5, lambda: given, "rows")


def test_the_distance_of_outputs() -> None:
    one = torch.tensor([1.0, 2.0])
    assert _distance([one], [one.clone()]) == 0
    assert _distance([one], [one[:1]]) == math.inf
    assert _distance([one], [one, one]) == math.inf
    assert _distance([one], [torch.tensor([1.0, math.nan])]) == math.inf
    assert _distance([torch.tensor([1.0, math.nan])], [one]) == math.inf
    masked = torch.tensor([math.nan, -math.inf, 4.0])
    assert _distance([masked], [masked.clone()]) == 0
    assert _distance([masked], [torch.tensor([math.nan, -math.inf, 5.0])]) == 0.25


def test_outputs_are_those_of_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    own = publishing.write_weights

    def other(model: nn.Module, folder: Path) -> nn.Module:
        read = own(model, folder)
        with torch.no_grad():
            read.get_parameter("5.bias").add_(1e-6)
        return read

    monkeypatch.setattr(publishing, "write_weights", other)
    refused(trainer, tmp_path, "outputs differ by")


def test_other_rows_and_precision_are_another_run() -> None:
    """BatchNorm's statistics of averaged weights follow from them, and the model's own facts don't say so."""

    def identity_of(data: Any = None, **options: Any) -> Any:
        config = RunConfig(budget="6ba", **options)
        data = data or InMemory(rows(), 8)
        return Trainer(net(), Classification(2), data, optimizers=[SGD(lr=0.1)], config=config).prepared.identity

    def told(now: Any) -> str:
        return str(other_model(identity_of(), now, is_elsewhere=False))

    images, labels = rows()
    assert told(identity_of()) == "[]"
    assert "precision" in told(identity_of(precision="bfloat16"))
    assert "num_microbatches" in told(identity_of(num_microbatches=2))
    assert "digest" in told(identity_of(InMemory((images + 1, labels), 8)))
    batches = identity_of([(images[:8], labels[:8])])
    other = identity_of([(images[8:16], labels[8:16])])
    assert "content" in str(other_model(batches, other, is_elsewhere=False))
