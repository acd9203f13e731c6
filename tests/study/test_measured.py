"""What is measured of a run beside its quality: threads, device, processor time, and what inference costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, accuracy
from cosmati.errors import RunError
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.study import measured as room
from cosmati.study.costs import COSTS_FILE, profile_costs
from cosmati.study.definition import Arm, Study
from cosmati.study.measured import measure
from cosmati.study.runner import LINES_FILE, hardware_of, run_study
from cosmati.train import lifecycle, timing
from tests.train.hand_made import Ticks

pytestmark = pytest.mark.long

X, Y = torch.randn(64, 4), torch.arange(64) % 2


@dataclass
class Watched:
    """A clock that goes by a second in each evaluation and each try-out only, and the weights that these had."""

    ticks: Ticks
    weights: list[Tensor]

    def watching(self, call: Callable[..., object]) -> Callable[..., object]:
        def watched(model: nn.Module, *others: object) -> object:
            self.ticks.pass_by(1)
            self.weights.append(next(model.parameters()).detach().clone())
            return call(model, *others)

        return watched


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(Ticks(), [])
    for module in (room, timing):
        monkeypatch.setattr(module, "perf_counter", made.ticks)
    for module, name in ((room, "evaluate_all"), (lifecycle, "evaluate_all"), (lifecycle, "try_out_all")):
        monkeypatch.setattr(module, name, made.watching(getattr(module, name)))
    return made


def start(budget: float = 1.0, seed: int = 0, *, num_threads: int | None = 1, every: str | None = None) -> Trainer:
    data = [(X[:24], Y[:24]), (X[24:40], Y[24:40])]
    return Trainer(
        nn.Linear(4, 2),
        Classification(2),
        InMemory((X, Y), rows_per_step=8),
        optimizers=[SGD(lr=0.1)],
        methods=[EMA(half_life="4ba")],
        evaluation=Evaluation(data, {"accuracy": accuracy}),
        config=RunConfig(budget=f"{round(6 * budget)}ba", seed=seed, num_threads=num_threads, evaluate_every=every),
    )


def make_study(**changes: object) -> Study:
    arms = {name: Arm(start=start, recipe_text=name) for name in ("baseline", "fast")}
    options = {"name": "s", "task": "t", "arms": arms, "budgets": (0.5, 1.0), "seeds": (0,), "quality": "accuracy"}
    return Study(**{**options, "higher_is_better": True, **changes})  # type: ignore[arg-type]


def test_inference_is_one_more_evaluation_over_its_rows_and_no_training(watched: Watched) -> None:
    found = measure("a", partial(start, every="2ba"), "accuracy", inference=True)
    assert (found.evaluation_seconds, found.evaluated_rows) == (1, 24 + 16)
    # It's the averages that are shipped, as in the evaluation at the end of training.
    assert torch.equal(watched.weights[-1], watched.weights[-2])
    assert not torch.equal(watched.weights[-1], watched.weights[-3])
    assert [point.seconds for point in found.points] == [0, 0, 0]
    assert found.seconds_by_part["evaluation"] == len(watched.weights) - 2
    assert 0 < found.points[0].cpu_seconds < found.points[1].cpu_seconds < found.final.cpu_seconds
    assert measure("a", start, "accuracy").evaluated_rows == 0


def test_what_is_tried_out_before_the_first_step_is_no_waiting_for_data(watched: Watched) -> None:
    found = measure("a", start, "accuracy")
    assert len(watched.weights) == 2  # a try-out and the evaluation
    assert found.seconds_by_part["data"] == 0
    assert found.final.seconds == 0


def test_threads_are_those_that_trained() -> None:
    before = torch.get_num_threads()
    assert measure("a", start, "accuracy").num_threads == 1
    assert measure("a", partial(start, num_threads=2), "accuracy").num_threads == 2
    assert measure("a", partial(start, num_threads=None), "accuracy").num_threads == before
    assert torch.get_num_threads() == before


def test_profiles_have_as_many_threads_as_are_asked_for_and_never_a_mixture(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    arms = {name: Arm(start=partial(start, num_threads=None)) for name in ("baseline", "fast")}
    profile = partial(profile_costs, folder=tmp_path, hardware="machine")
    found = profile(make_study(arms=arms, cost_turns=2), num_threads=3)
    assert {one.num_threads for one in found} == {3}
    assert torch.get_num_threads() == before
    assert {one.evaluated_rows for one in found} == {40}
    one_thread = make_study(arms={n: Arm(start=start) for n in arms}, cost_turns=2)
    profile(one_thread)
    other = make_study(arms={n: Arm(start=partial(start, num_threads=2)) for n in arms}, cost_turns=3)
    with pytest.raises(RunError, match=rf"profiled with 1 threads a run, and now it's 2.*{COSTS_FILE}"):
        profile(other)


def test_the_hardware_is_that_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []

    def describe(device: torch.device) -> str:
        seen.append(device)
        return f"a machine with {device.type}"

    monkeypatch.setattr(room, "describe_hardware", describe)
    assert hardware_of(make_study()) == "a machine with cpu"
    assert seen == [torch.device("cpu")]
    assert run_study(make_study(), tmp_path).hardware == "a machine with cpu"

    class Elsewhere:
        device = torch.device("cuda")

    made = start()
    made.assembly = Elsewhere()  # type: ignore[assignment]
    assert room.hardware_of(made) == "a machine with cuda"


def test_arms_on_different_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "hardware_of", lambda run: f"machine {run.assembly.config.num_threads}")
    arms = {"baseline": Arm(start=start), "fast": Arm(start=partial(start, num_threads=2))}
    with pytest.raises(RunError, match="'fast' trains on machine 2, and 'baseline' on machine 1: use one device"):
        run_study(make_study(arms=arms), tmp_path)
    assert len((tmp_path / LINES_FILE).read_text().splitlines()) == 1
    # Who says in words what all of it is has said it.
    assert run_study(make_study(arms=arms), tmp_path, hardware="one machine").hardware == "one machine"
