"""What surgery leaves is a module like any other: it's saved whole, opened in another process, and trains on there."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import methods as m
from cosmati.methods.building_blocks.surgery import Graft, graft
from cosmati.models.mlp import MLP
from tests.methods.cases import network
from tests.methods.test_surgery_contract import SURGERY, applied, each_case, example
from tests.processes import run_python

ELSEWHERE = """
import sys, torch
from pathlib import Path

torch.set_num_threads(1)
for path in Path(sys.argv[1]).glob("*.model"):
    model, input = torch.load(path, weights_only=False)
    found = {"before": model.eval()(input)}
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(input).square().sum().backward()
    optimizer.step()
    found |= {"kinds": [type(module).__name__ for module in model.modules()], "after": model.eval()(input)}
    torch.save(found, path.with_suffix(".found"))
"""


def used(model: nn.Module, input: Tensor) -> dict[str, Any]:
    """Return what a model gives before and after a step, and what it's made of."""
    found: dict[str, Any] = {"before": model.eval()(input)}
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(input).square().sum().backward()
    optimizer.step()
    return found | {"kinds": [type(module).__name__ for module in model.modules()], "after": model.eval()(input)}


def several() -> nn.Module:
    """Return a model with grafts upon grafts."""
    methods = [m.SqueezeExcite(latent_channels=2, min_channels=4), m.StochasticDepth(target_layer_name="ResidualBlock")]
    model = network(is_text=False)
    for method in (*methods, m.WeightStandardization(), m.NoOpModel()):
        model = applied(method, model)
    return model


def language() -> nn.Module:
    model = network(is_text=True)
    for method in (m.Alibi(max_sequence_length=15), m.GatedLinearUnits(), m.StochasticDepth(target_layer_name="Block")):
        model = applied(method, model)
    return model


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Save every changed model, use it in another process, and return what it gave here and there."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        str(case): (applied(case.on, network(is_text=case.is_text, group_norm=case.group_norm)), example(case))
        for case in SURGERY
    }
    models |= {"several": (several(), models["BlurPool"][1]), "language": (language(), models["Alibi"][1])}
    for name, pair in models.items():
        torch.save(pair, folder / f"{name}.model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = run_python(["-c", ELSEWHERE, folder], env=environment, is_anew=True)
    assert done.returncode == 0, done.stderr
    return {name: (used(*pair), torch.load(folder / f"{name}.found")) for name, pair in models.items()}


@pytest.mark.parametrize("name", [*map(str, SURGERY), "several", "language"])
def test_saved_whole_it_is_the_same_in_another_process(name: str, opened: dict[str, Any]) -> None:
    here, there = opened[name]
    assert there["kinds"] == here["kinds"]
    assert torch.equal(there["before"], here["before"])
    assert torch.equal(there["after"], here["after"])
    moves = name not in ("NoOpModel", "several")
    assert torch.equal(there["before"], there["after"]) is not moves


@each_case
def test_a_copy_is_of_the_same_class_and_has_weights_of_its_own(case: Any) -> None:
    model = applied(case.on, network(is_text=case.is_text, group_norm=case.group_norm))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        # A second surgery finds that the first has been.
        assert str(applied(case.on, copied)) == str(model)


class Doubled(Graft):
    prefix = "Doubled"

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = 2 * super().forward(input)
        return output


class Counted(MLP):
    """A user's own model that says itself how it's pickled, and keeps something else than modules."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self.sizes, self.calls = sizes, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Counted, (self.sizes,), {**self.__getstate__(), "calls": self.calls + 1}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_grafts_keep_what_a_class_does_of_its_own(protocol: int) -> None:
    model = Counted((3, 2))
    graft(model, Doubled)
    again = pickle.loads(pickle.dumps(model, protocol))
    assert type(again) is type(model)
    assert again.calls == 1
    input = torch.ones(1, 3)
    assert torch.equal(again(input), model(input))
    assert torch.equal(model(input), 2 * MLP.forward(model, input))


def test_a_class_that_nobody_could_import_is_still_named_by_pickle() -> None:
    """A control: the graft hides nothing that's the user's own."""

    class Local(MLP):
        pass

    model = Local((3, 2))
    graft(model, Doubled)
    with pytest.raises((pickle.PicklingError, AttributeError), match="Local"):
        pickle.dumps(model)
