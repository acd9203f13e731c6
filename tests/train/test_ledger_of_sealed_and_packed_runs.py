"""A ledger seals what sensitive classes measured, tells packs by class, and says on what was deleted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import LedgerError
from cosmati.ledger.details import details_digest
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import Scan, ScannedEntry, read_head, read_verifier_key
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import AmendEntry, StepEntry
from cosmati.train.facts import RunFacts
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.routes import Route
from cosmati.train.token_routes import TokenRoute
from tests.ledger.row_oracle import Rows
from tests.train.hand_made import POLICY, outcome, rows, run_facts

BUDGET = Budget(Time.parse("20ba"))
SENSITIVE = run_facts(policy=POLICY, sensitive=("bound",))


def write(folder: Path, *outcomes: StepOutcome, facts: RunFacts, step: int = 0, ranks: Ranks | None = None) -> None:
    """Open the ledger at a step, append some steps, and stop."""
    folder.mkdir(exist_ok=True)
    observer = LedgerObserver(folder, facts, ranks or Ranks(), lambda: b"R" * 32)
    observer.on_start(Clock(step=step), BUDGET)
    for one in outcomes:
        observer.on_step(one)
    observer.on_end(Clock(step=step + len(outcomes)), "stopped")


def scan(folder: Path) -> list[tuple[ScannedEntry, dict[str, Any]]]:
    ledger = folder / "ledger"
    items = Scan(ledger, read_head(ledger, read_verifier_key(ledger)))
    return [(item, json.loads(item.details or b"{}")) for item in items]


def steps(folder: Path) -> list[tuple[StepEntry, dict[str, Any]]]:
    return [(item.entry, said) for item, said in scan(folder) if isinstance(item.entry, StepEntry)]


def test_what_sensitive_classes_measured_is_sealed(tmp_path: Path) -> None:
    norms = torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.float64)
    write(tmp_path, outcome(0, norms=norms), facts=SENSITIVE)
    (first, said), *_ = scan(tmp_path)
    ((_, step),) = steps(tmp_path)
    assert said["sealed"]["classes"] == ["bound"]
    assert dict(first.entry.commitments)["sealed"] == details_digest({"sealed": said["sealed"]})  # type: ignore[union-attr]
    assert (step["gradient_norm"], [*step["sealed"]]) == ({"0": [1.5, 2.5]}, ["bound"])


def test_what_was_sealed_stays_so(tmp_path: Path) -> None:
    write(tmp_path, facts=SENSITIVE)
    secret = (tmp_path / "private" / "columns.key").read_bytes()
    with pytest.raises(LedgerError, match="Columns of bound are sealed in this ledger"):
        write(tmp_path, facts=run_facts(policy=POLICY))
    write(tmp_path, facts=SENSITIVE)
    assert (tmp_path / "private" / "columns.key").read_bytes() == secret
    assert not any(isinstance(item.entry, AmendEntry) for item, _ in scan(tmp_path))


def packed() -> StepOutcome:
    """A step of a pack of two classes, documents 7, 8 and 9, and of a microbatch of plain rows."""
    classes, documents = torch.tensor([[0, 0, 1, 1, 0, -1]]), torch.tensor([[7, 7, 8, 8, 9, -1]])
    pack = rows(5, token_class_ids=classes, token_row_ids=documents)
    weights = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    tokens = TokenRoute(weights, frozenset({0}), (), ((0, 0, 3), (1, 0, 1)))
    return outcome(
        0,
        batches=[pack, rows(3, 4)],
        routes=[Route(-1, 0, -1, (1.0, 1.0), offered=True, tokens=tokens), Route(2, 1, 1, (0.0, 1.0), offered=True)],
        labels=torch.tensor([[3.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        weights=torch.tensor([4.0, 2.0], dtype=torch.float64),
        norms=torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.float64),
    )


def test_packs_have_a_cell_for_each_class_with_its_documents(tmp_path: Path) -> None:
    write(tmp_path, packed(), facts=run_facts(policy=POLICY))
    own = Rows(tmp_path)

    def commitment(name: str, *documents: tuple[int, int]) -> bytes:
        """Of slot and row of documents of the pack 5."""
        leaves = [own.leaf(name, 0, 0, slot, [5, row], owners=[row]) for slot, row in documents]
        return hashlib.sha256(b"".join(leaves)).digest()

    ((step, said),) = steps(tmp_path)
    found = [(c.class_id, c.phase, c.route_id, c.num_rows, c.weight, c.row_commitment) for c in step.microbatches]
    assert found == [
        (0, 0, 3, 2, 3.0, commitment("free", (0, 7), (2, 9))),
        (1, 0, 1, 1, 1.0, commitment("bound", (1, 8))),
        (1, 1, 2, 2, 2.0, own.commitment("bound", 0, 1, [(0, 3), (1, 4)])),
    ]
    assert said["cell_microbatches"] == [0, 0, 1]
    assert (said["gradient_norm"], said["packed_gradient_norm"]) == ({"2": [3.5, 4.5]}, {"0": [1.5, 2.5]})


def test_packs_of_a_later_step_are_blinded_by_its_number(tmp_path: Path) -> None:
    observer = LedgerObserver(tmp_path, run_facts(policy=POLICY), Ranks(), lambda: b"R" * 32)
    observer.on_start(Clock(), BUDGET)
    for step in range(2):
        observer.on_step(packed()._replace(clock=Clock(step=step + 1)))
    observer.on_end(Clock(step=2), "stopped")
    leaf = Rows(tmp_path).leaf("bound", 1, 0, 1, [5, 8], owners=[8])
    assert steps(tmp_path)[1][0].microbatches[1].row_commitment == hashlib.sha256(leaf).digest()


def test_what_was_deleted_is_said_on(tmp_path: Path) -> None:
    write(tmp_path, facts=run_facts())
    key = load_or_create_key(tmp_path / "private" / "operator.key", name=f"cosmati/{tmp_path.name}")
    first, said = scan(tmp_path)[0]
    told = said | {"changes": [], "forgotten": {"certificate": "ab"}}
    with LedgerWriter.open(tmp_path / "ledger", key=key) as writer:
        writer.append(writer.resume_entry(0))
        writer.append(AmendEntry(0, first.entry.commitments, details_digest(told)), told)  # type: ignore[union-attr]
    write(tmp_path, facts=run_facts(data_digest="d2"))
    _, later = [said for item, said in scan(tmp_path) if isinstance(item.entry, AmendEntry)]
    assert later["forgotten"] == {"certificate": "ab"}


def test_the_other_ranks_wait_until_the_secrets_are_drawn(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Meets(Ranks):
        def barrier(self) -> None:
            seen.append(sorted(path.name for path in (tmp_path / "private").iterdir()))

    write(tmp_path, facts=run_facts(), ranks=Meets())
    assert seen == [["operator.key", "rows.keys", "rows.salt"]]
