"""Models that are odd: traced or not, tied, hooked, counted, in two places, made by functions; and how they leave."""

from __future__ import annotations

import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, accuracy, batches
from cosmati.errors import ExportError
from cosmati.export import formats
from cosmati.export.card import code, text
from cosmati.export.folding import fold
from cosmati.methods import EMA, BlurPool, WeightStandardization
from cosmati.methods.blurpool import apply_blurpool
from cosmati.optim import SGD
from tests.export.test_export_controls import net, refused, rows, trainer_in


class Branching(nn.Module):
    """Its way follows from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(81, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.linear(x if x.sum() > 0 else -x)


@pytest.mark.long
def test_a_model_that_cannot_be_traced_leaves_without_a_program(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", Branching(), methods=[])
    trainer.fit()
    trainer.export(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "model.safetensors"}
    card = (tmp_path / "out/README.md").read_text()
    assert "There is no `model.pt2`: torch.export can't trace this model" in card
    assert "by the names of the model's own class" in card


def test_without_rows_it_is_unchecked_and_no_program(tmp_path: Path) -> None:
    trainer = Trainer(
        net(),
        Classification(2),
        DataLoader(TensorDataset(*rows()), 8),
        optimizers=[SGD(lr=0.1)],
        methods=[BlurPool(min_channels=1)],
        config=RunConfig(budget="2ba"),
    )
    trainer.fit()
    exported = trainer.export(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "**Unchecked**" in card
    assert "there were no rows to trace the model with" in card
    # The pool's channels aren't known then: two averages are the same filter, to rounding.
    with torch.no_grad():
        own = trainer.model.eval().double()(rows()[0].double())
        torch.testing.assert_close(exported.double()(rows()[0].double()), own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_are_those_that_the_loss_gives_the_model_where_it_can_be_asked(tmp_path: Path, fails: bool) -> None:
    """A loss that fails outside of training has shown none, also where it has called the model before."""

    def loss(model: nn.Module, data: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(data[0]), data[1])
        if fails and not model.training:
            raise ValueError("it's for training")
        return found

    model = net()
    trainer = Trainer(model, loss, InMemory(rows(), 8), optimizers=[SGD(lr=0.1)], config=RunConfig(budget="2ba"))
    trainer.fit()
    draws, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    trainer.export(tmp_path / "out", to="safetensors")
    is_compared = "Outputs beside those of the model as it was trained" in (tmp_path / "out/README.md").read_text()
    assert is_compared is not fails
    assert torch.equal(torch.get_rng_state(), draws)
    assert [module.training for module in model.modules()] == modes


def test_images_too_small_for_plain_layers_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """One position a side is its own reflection for BlurPool, and none for PyTorch."""
    small = (torch.randn(16, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1, 2), nn.Flatten(), nn.Linear(2, 2))
    trainer = Trainer(
        model,
        Classification(2),
        InMemory(small, 8),
        optimizers=[SGD(lr=0.1)],
        methods=[BlurPool(min_channels=1)],
        evaluation=Evaluation(batches(small, 8), {"accuracy": accuracy}),
        config=RunConfig(budget="2ba"),
    )
    trainer.fit()
    refused(trainer, tmp_path, r"can't be run on the rows.*fold=False")
    trainer.export(tmp_path / "out", to="safetensors", fold=False)


def test_a_layer_in_two_places_and_a_tied_weight_stay_one(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 3, 2, 1)
            self.second = self.first
            self.third = nn.Conv2d(1, 1, 3, 2, 1)
            self.third.weight = self.first.weight
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.third(self.second(self.first(x))).flatten(1))
            return logits

    trainer = trainer_in(tmp_path / "run", Twice())
    trainer.fit()
    exported: Any = trainer.export(tmp_path / "out", to="safetensors")
    assert exported.first is exported.second
    assert exported.third.convolution.weight is exported.first.convolution.weight
    rebuilt: Any = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](Twice())
    assert load_model(rebuilt, tmp_path / "out/model.safetensors") == (set(), [])
    assert rebuilt.first is rebuilt.second
    assert rebuilt.third.convolution.weight is rebuilt.first.convolution.weight
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(rows()[0]), exported(rows()[0]))


def test_a_tie_that_surgery_reads_in_two_ways_is_undone(tmp_path: Path) -> None:
    """One convolution reads the weight standardised, the other as it is: two weights, once they're plain."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 3, 3)
            self.second = nn.Conv2d(1, 1, 3)
            self.second.weight = self.first.weight
            self.head = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.second(self.first(x)).flatten(1))
            return logits

    surgery = WeightStandardization(n_last_layers_ignore=1)
    trainer = trainer_in(tmp_path / "run", Tied(), methods=[surgery])
    trainer.fit()
    exported = trainer.export(tmp_path / "out", to="safetensors")
    rebuilt = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](Tied())
    assert load_model(rebuilt, tmp_path / "out/model.safetensors") == (set(), [])
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(rows()[0]), exported(rows()[0]))
        assert torch.equal(trainer.model.eval()(rows()[0]), exported(rows()[0]))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_models_that_are_hard_to_copy_leave_too(tmp_path: Path) -> None:
    """Compiled blocks, and a weight that a hook computes from others."""
    model = nn.Sequential(nn.Flatten(), torch.nn.utils.weight_norm(nn.Linear(81, 4)), nn.ReLU(), nn.Linear(4, 2))
    model[3].compile(backend="eager")
    trainer = trainer_in(tmp_path / "run", model, methods=[EMA(half_life="2ba")])
    trainer.fit()
    exported = trainer.export(tmp_path / "out", to="safetensors")
    with trainer.averaged() as measured, torch.no_grad():
        assert torch.equal(exported(rows()[0]), measured.eval()(rows()[0]))


@pytest.mark.long
def test_a_program_that_would_hold_a_pickle_is_known(tmp_path: Path) -> None:
    trainer = trainer_in(None)
    trainer.fit()
    trainer.export(tmp_path / "out")
    path = tmp_path / "out/model.pt2"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    # Pickles of protocol 2 and later begin so, and torch.save's archives as any zip does.
    assert not [name for name, content in contents.items() if content[:1] == b"\x80" or content[:2] == b"PK"]
    assert formats._pickled_parts(path) == []
    (weights,) = [name for name in contents if name.endswith("weights_config.json")]
    told = json.loads(contents[weights])
    told["config"]["0.weight"]["use_pickle"] = True
    (examples,) = [name for name in contents if "sample_inputs" in name]
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        for name, content in (contents | {weights: json.dumps(told).encode(), examples: b"PK"}).items():
            archive.writestr(name, content)
    assert sorted(formats._pickled_parts(tmp_path / "other.pt2")) == ["0.weight", "example inputs"]


def test_what_cannot_be_copied_is_told(tmp_path: Path) -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("cannot pickle '_thread.lock' object")

    trainer = trainer_in(None, nn.Sequential(nn.Flatten(), Locked(81, 2)), methods=[])
    with pytest.raises(ExportError, match=r"can't be copied.*_thread\.lock"):
        trainer.export(tmp_path / "out")


def test_bad_options_are_refused(tmp_path: Path) -> None:
    trainer: Any = trainer_in(None)
    (tmp_path / "file").write_text("")
    for match, options in {
        "no form 'pickle'": {"to": "pickle"},
        "no distance": {"tolerance": -1.0},
        "there already": {"out": tmp_path / "file"},
        "can't be written": {"out": tmp_path / "file/out"},
        "no model of transformers": {"to": "hf"},
    }.items():
        with pytest.raises(ExportError, match=match):
            trainer.export(**({"out": tmp_path / "out"} | options))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_that_counts_in_evaluation_leaves_uncounted(tmp_path: Path) -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(81, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            logits: Tensor = self.linear(x.flatten(1)) * self.calls
            return logits

    trainer = trainer_in(tmp_path / "run", Counting(), methods=[])
    trainer.fit()
    before = trainer.model.calls.clone()
    exported = trainer.export(tmp_path / "out", to="safetensors")
    assert torch.equal(trainer.model.calls, before)
    assert torch.equal(exported.calls, before)


def test_metrics_that_keep_a_state_are_measured_again(tmp_path: Path) -> None:
    class Largest:
        """The largest logit of all rows: no mean."""

        def reset(self) -> None:
            self.value = -torch.inf

        def update(self, logits: Tensor, _: Tensor) -> None:
            self.value = max(self.value, float(logits.max()))

        def compute(self) -> float:
            return self.value

    trainer = trainer_in(tmp_path / "run", evaluation=Evaluation(batches(rows(), 16), {"largest": Largest()}))
    recorded = trainer.fit().metrics
    trainer.export(tmp_path / "out", to="safetensors")
    assert json.loads((tmp_path / "run/exports.jsonl").read_text())["metrics"] == recorded


def test_surgery_by_function_leaves_too(tmp_path: Path) -> None:
    """No method of the plan made these layers: what's plain is rebuilt, and what stays is for the user to put in."""
    model = apply_blurpool(net(), min_channels=1)
    trainer = trainer_in(None, model, methods=[])
    exported = trainer.export(tmp_path / "out", to="safetensors")
    rebuilt = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](net())
    assert load_model(rebuilt, tmp_path / "out/model.safetensors") == (set(), [])
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(rows()[0]), exported(rows()[0]))
    trainer.export(tmp_path / "kept", to="safetensors", fold=False)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"README.md", "model.safetensors"}
    assert "all names may fit a plain model too" in (tmp_path / "kept/README.md").read_text()


def test_a_weight_that_two_standardise_stays_one() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    model[1].weight = model[0].weight
    folded = fold(WeightStandardization().apply(model))
    assert folded.model[1].weight is folded.model[0].weight
    assert not folded.untied


def test_hooks_and_the_root_itself_are_kept() -> None:
    calls = []
    model = nn.Conv2d(1, 4, 3, 2)
    model.register_forward_hook(lambda *given: calls.append(given))
    blurred = apply_blurpool(model, min_channels=1).eval()
    x = rows()[0]
    expected = blurred(x)
    folded = fold(blurred)
    assert isinstance(folded.model, nn.Sequential)
    assert torch.equal(folded.model(x), expected)
    assert len(calls) == 2


def test_a_users_text_is_shown_and_does_nothing() -> None:
    assert text("a_b *c* [x](y) <img>\n# d | e & f") == r"a\_b \*c\* \[x\](y) \<img\> \# d \| e &amp; f"
    assert code("`x` | y\nz") == "`` `x` \\| y z ``"
    assert code("") == "none"
