"""Shards of classes, streamed: with bands, a ledger, and a class that is tombstoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cosmati import Loss, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.plan import Promise
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tombstoned import Tombstoned
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.methods import IsolatedAdapters
from cosmati.optim import AdamW

TAXONOMY = Taxonomy("t", "1", (("letters", ""), ("news", "")))
POLICY = """
version: 1
taxonomy: t
bands: {measure: readability, names: [low, high], thresholds: [0.5]}
regions: {trunk: {params: '*', exclude: '*.isolated.*'}, own: {tag: isolated/letters}}
rules:
  - {class: news, region: trunk, weight: 1}
  - {class: news, region: own, weight: 0}
  - {class: letters, region: trunk, weight: 0}
  - {class: letters, region: own, weight: 1}
  - {class: letters, band: low, region: own, weight: 0.5}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, (name, band) in enumerate((("news", 1), ("letters", 0), ("letters", 1))):
        rows = [{"number": number * 100 + row, "label": row % 3} for row in range(18)]
        columns = {"number": "int", "label": "int"}
        write_dataset(rows, folder / str(number), columns, class_of=name, source=f"s{number}", band=band)
    return folder


def loss(model: nn.Module, rows: Any) -> Loss:
    number, label = rows
    values = F.cross_entropy(model(number.float()[:, None] / 100), label, reduction="none")
    return Loss(values.sum(), float(len(values)), per_row=values)


def train(corpus: Path, folder: Path | None = None, *, gone: bool = False) -> Trainer:
    torch.manual_seed(0)
    source = StreamingSource(StreamingDataset([corpus / name for name in "012"], columns=("number", "label")), 8)
    trainer = Trainer(
        nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3)),
        loss,
        Tombstoned(source, ["letters"]) if gone else source,
        optimizers=[AdamW(lr=0.01)],
        methods=[IsolatedAdapters(classes="letters", rank=2)],
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="8ba", num_threads=1, num_microbatches=2, run_folder=folder),
    )
    trainer.fit()
    return trainer


@pytest.mark.long
def test_delete_and_ledger(corpus: Path, tmp_path: Path) -> None:
    present, gone = train(corpus, tmp_path / "present"), train(corpus, tmp_path / "gone", gone=True)
    assert present.plan.holds(Promise.ISOLATED, ("letters", "own"))
    one, two = present.model.state_dict(), gone.model.state_dict()
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {name for name in one if "isolated" in name}
    assert taught(tmp_path / "present") == {("news", "trunk"), ("letters", "own")}
    assert taught(tmp_path / "gone") == {("news", "trunk")}


def taught(run: Path) -> set[tuple[str, str]]:
    """Return which class has taught which region, as the ledger has it."""
    return {(c.class_name, c.region) for c in contributions(VerifiedLedger(run / "ledger")).cells if c.weight}
