"""What is offered when: deferred rows come again, what never does is said, and bands reach the ledger's cells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cosmati.core.batch import Batch, Lineage, bury
from cosmati.core.loss import Classification, Loss
from cosmati.data.in_memory import InMemory
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.records.ledger import StepEntry
from cosmati.routing.policy_analysis import explain
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

TAXONOMY = Taxonomy("t", "1", (("early", "from the start"), ("late", "from the second phase on")))
POLICY = """
version: 1
taxonomy: t
phases: [{name: first, until: UNTIL}, {name: second}]
rules:
  - {class: early, weight: 1}
  - {class: late, phase: first, decision: defer}
  - {class: late, phase: second, weight: 1}
"""


class Rows(Observer):
    """Which rows were trained on, by step."""

    def __init__(self) -> None:
        self.by_step: list[list[int]] = []

    def on_step(self, report: StepReport) -> None:
        self.by_step.append(
            [
                row
                for b, r in zip(report.batches, report.routes, strict=True)
                if r.offered
                for row in b.lineage.row_ids.tolist()
            ]
        )


def _run(until: str, *, share: int = 4, budget: str = "1ep") -> tuple[Trainer, list[list[int]]]:
    classes = (torch.arange(64) % share == 0).long()
    source = InMemory((torch.randn(64, 3), torch.zeros(64).long()), 8, class_ids=classes, class_names=("early", "late"))
    seen = Rows()
    trainer = Trainer(
        nn.Linear(3, 2),
        Classification(2),
        source,
        optimizers=[SGD(lr=0.1)],
        policy=load_policy(POLICY.replace("UNTIL", until)),
        taxonomy=TAXONOMY,
        observers=[seen],
        config=RunConfig(budget=budget, num_microbatches=4, num_threads=1),
    )
    trainer.fit()
    return trainer, seen.by_step


def test_deferred_rows_come_again() -> None:
    trainer, steps = _run("3ba")
    assert sorted(row for step in steps for row in step) == list(range(64)), "each row once in the epoch"
    assert all(row % 4 for step in steps[:3] for row in step), "none of the class while it's deferred"
    assert all(len(step) == 8 for step in steps), "no step is short of rows"
    assert "never offered" not in str(trainer.plan)


def test_what_the_run_has_no_room_for_is_said() -> None:
    trainer, steps = _run("7ba", share=2)
    seen = Counter(row for step in steps for row in step if row % 2 == 0)
    line = next(line for line in trainer.plan.lines if line.startswith("never offered"))
    # Classes take turns, so 27 microbatches of it lie before the other's 28th; the last step makes up for two, beside
    # the one that is next.
    assert line == "never offered, being deferred: late, 25 microbatches"
    assert sum(seen.values()) == 2 * (2 + 1)


def test_explain_says_when_deferred_rows_come_again() -> None:
    policy = load_policy(POLICY.replace("UNTIL", "3ba"))
    assert "come again in phase second" in explain(policy, "late", "all", "first", taxonomy=TAXONOMY).why
    never = load_policy("version: 1\ntaxonomy: t\nrules:\n  - {class: '**', decision: defer}\n")
    assert "no later phase offers its rows" in explain(never, "late", "all", "main", taxonomy=TAXONOMY).why


def _mean(model: nn.Module, data: torch.Tensor) -> Loss:
    per_row = model(data.float()[:, None]).square().sum(1)
    return Loss(per_row.sum(), float(len(per_row)), per_row)


def test_bands_reach_the_cells(tmp_path: Path) -> None:
    names = {0: "plain", 3: "fine"}
    for band, name in names.items():
        columns = {"number": "int"}
        with ShardWriter(tmp_path / name, columns, class_path="early", source=name, band=band) as writer:
            for number in range(32):
                writer.write({"number": 100 * band + number})
    dataset = StreamingDataset([tmp_path / name for name in names.values()], columns=["number"])
    run = tmp_path / "run"
    Trainer(
        nn.Linear(1, 1),
        _mean,
        StreamingSource(dataset, 16),
        optimizers=[SGD(lr=1e-6)],
        policy=load_policy("version: 1\ntaxonomy: t\nrules:\n  - {class: '**', weight: 1}\n"),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="4ba", num_microbatches=4, num_threads=1, run_folder=run),
    ).fit()
    ledger = run / "ledger"
    entries = [item.entry for item in Scan(ledger, read_head(ledger, read_verifier_key(ledger)))]
    found = [cell.band for entry in entries if isinstance(entry, StepEntry) for cell in entry.microbatches]
    order = StreamingSource(dataset, 16).order(seed=0, num_microbatches=4, route_pure=True)
    expected = [3 if int(order.microbatch(s, m).data[0]) >= 300 else 0 for s in range(4) for m in range(4)]
    assert found == expected
    assert Counter(found) == {0: 8, 3: 8}


@pytest.mark.parametrize("change", ["select", "replace", "to", "bury"])
def test_a_batch_keeps_its_band(change: str) -> None:
    batch = Batch((torch.zeros(4, 2), torch.zeros(4)), Lineage(torch.arange(4), torch.zeros(4).long()), 1, 2)
    changed = {
        "select": lambda: batch.select(slice(0, 2)),
        "replace": lambda: batch.replace(input=torch.ones(4, 2)),
        "to": lambda: batch.to(torch.device("cpu")),
        "bury": lambda: bury(batch, torch.from_numpy(np.array([True, False, False, False]))),
    }[change]()
    assert (changed.class_id, changed.band) == (1, 2)
