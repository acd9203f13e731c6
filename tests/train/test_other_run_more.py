"""What a resume compares besides: options that nothing prints, what loaders give, where a run is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import InMemory, RunConfig, Trainer
from cosmati.errors import CheckpointError
from cosmati.optim import SGD
from cosmati.optim.schedules import Constant
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints

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
