"""A run under a policy with bands: one that's rejected teaches nothing, and the ledger holds each step against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from cosmati import RunConfig, Taxonomy, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import PolicyError
from cosmati.explorer.run_view import read_run
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.optim.optimizers import SGD
from cosmati.routing.bands import Bands

TAXONOMY = Taxonomy("t", "1", (("letters", ""), ("news", "")))
BANDS = Bands(measure="readability", names=("low", "high"), thresholds=(0.5,))
POLICY = """
version: 1
taxonomy: t
bands: {measure: readability, names: [low, high], thresholds: [0.5]}
rules:
  - {class: news, weight: 1}
  - {class: letters, weight: 1}
  - {class: letters, band: low, %s}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """News of one band, and letters of two: the low ones are a thousand times as large."""
    folder = tmp_path_factory.mktemp("corpus")
    kinds = (("news", 0.9, 1), ("letters", 0.1, 1000), ("letters", 0.9, 1))
    for number, (name, measured, scale) in enumerate(kinds):
        rows = [{"number": scale * (row + 1)} for row in range(16)]
        place = folder / str(number)
        write_dataset(rows, place, {"number": "int"}, class_of=name, source=f"s{number}", band=BANDS.band_of(measured))
    return folder


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None])
    return output.square().mean()


def train(corpus: Path, what: str, *, folder: Path | None = None, policy: str = POLICY) -> Trainer:
    torch.manual_seed(0)
    data = StreamingDataset([corpus / name for name in "012"], columns=("number",))
    trainer = Trainer(
        nn.Linear(1, 1),
        loss,
        StreamingSource(data, 8),
        optimizers=SGD(lr=1e-6),
        policy=load_policy(policy % what),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="6ba", num_threads=1, num_microbatches=2, run_folder=folder),
    )
    trainer.fit()
    return trainer


def size(trainer: Trainer) -> float:
    return max(float(parameter.detach().abs().max()) for parameter in trainer.model.parameters())


def test_a_rejected_band_teaches_nothing(corpus: Path, tmp_path: Path) -> None:
    rejected = train(corpus, "decision: reject", folder=tmp_path / "run")
    assert size(rejected) < 2 < size(train(corpus, "weight: 1"))
    result = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    (tables,) = ledger.tables
    assert tables.bands == ("low", "high")
    assert [kind for ((_, kind),) in tables.policy] == ["reject", "admit", "admit", "admit"]
    cells = [cell for _, step, _ in ledger.steps() for cell in step.microbatches]
    kinds = {(tables.classes[cell.class_id], cell.band, bool(cell.num_rows)) for cell in cells}
    assert kinds == {("news", 1, True), ("letters", 0, False), ("letters", 1, True)}
    rows = {cell.class_name: cell.num_rows for cell in contributions(ledger).cells}
    assert rows["letters"] == sum(cell.num_rows for cell in cells if cell.band == 1 and cell.class_id == 0) > 0
    governance = read_run(tmp_path / "run").governance
    assert governance is not None
    assert governance.decision["letters"] == {"main": "admit"}, "of the class: the most that a band of it may"


def test_a_floor_does_as_a_rule_does(corpus: Path) -> None:
    floor = f"{POLICY}floors: [{{class: letters, band: high}}]\n"
    by_floor, by_rule = train(corpus, "weight: 1", policy=floor), train(corpus, "decision: reject")
    assert all(map(torch.equal, by_floor.model.parameters(), by_rule.model.parameters()))


def test_a_deferred_band_comes_again(corpus: Path) -> None:
    phases = POLICY.replace("bands:", "phases: [{name: start, until: 2ba}, {name: rest}]\nbands:")
    deferred = train(corpus, "phase: start, decision: defer", policy=phases)
    assert size(deferred) > 2
    order = deferred.feed._order  # type: ignore[union-attr]
    assert all(order.band(step, index) == 1 for step in range(2) for index in range(2))
    assert any(order.band(step, index) == 0 for step in range(2, 6) for index in range(2))


def test_a_band_that_the_policy_lacks_is_refused_before_anything_runs(corpus: Path, tmp_path: Path) -> None:
    write_dataset([{"number": 1}] * 16, tmp_path / "more", {"number": "int"}, class_of="news", source="more", band=2)
    data = StreamingDataset([corpus / "0", tmp_path / "more"], columns=("number",))
    config = RunConfig(budget="6ba", num_threads=1, num_microbatches=2)
    given: dict[str, Any] = {"policy": load_policy(POLICY % "weight: 0.5"), "taxonomy": TAXONOMY, "config": config}
    with pytest.raises(PolicyError, match=r"Rows of news say band 2, and the policy has 2: low, high"):
        Trainer(nn.Linear(1, 1), loss, StreamingSource(data, 8), optimizers=SGD(lr=0.1), **given)
