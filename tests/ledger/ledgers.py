"""Small ledgers for the tests, and their content by plain arithmetic."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cosmati.ledger.keys import SigningKey
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import CheckpointEntry, EndEntry, Entry, MicrobatchCell, RunEntry, StepEntry

ORIGIN = "example.com/run-1"
CLASSES = ["open", "news", "private"]
REGIONS = ["near_input", "near_output"]
ROUTES = [[1.0, 1.0], [0.0, 0.5], [0.0, 0.0]]
POLICY = hashlib.sha256(b"policy").digest()


def digest(text: str) -> bytes:
    """Return 32 bytes that depend on a text."""
    return hashlib.sha256(text.encode()).digest()


def run_entry() -> tuple[RunEntry, dict[str, object]]:
    """Return entry 0 and its details."""
    details: dict[str, object] = {
        "classes": CLASSES,
        "regions": REGIONS,
        "routes": ROUTES,
        "phases": [["main", 0, 100]],
        "seed": 7,
    }
    return RunEntry("run-1", (("plan", digest("plan")), ("data", digest("data"))), details_digest(details)), details


def step_entry(step: int, attempt: int = 0, salt: str = "") -> tuple[StepEntry, dict[str, object]]:
    """Return a step with four microbatches: classes and routes alternate, every third step logs no norms."""
    cells = []
    norms: dict[str, list[float | None]] = {}
    for index in range(4):
        class_id = (step + index) % 3
        cells.append(MicrobatchCell(class_id, 0, 0, class_id, 2 + index, 2.0 + index, digest(f"{step}/{index}{salt}")))
        norms[str(index)] = [
            None if ROUTES[class_id][r] == 0 else (step + 1) * 0.25 + index + r for r in range(len(REGIONS))
        ]
    details: dict[str, object] = {
        "step": step,
        "gradient_norm": {} if step % 3 == 2 else norms,
        "update_norm": None,
        "loss": 1.0 / (step + 1),
    }
    root = digest(f"root {step}") if step % 5 == 0 else None
    return StepEntry(step, attempt, POLICY, details_digest(details), root, tuple(cells)), details


def write_run(directory: Path, key: SigningKey, num_steps: int, *, every: int = 64) -> LedgerWriter:
    """Write a run of that many steps with a checkpoint entry after each fourth; leave it open."""
    writer = LedgerWriter.create(directory, origin=ORIGIN, key=key, checkpoint_every=every, checkpoint_seconds=10_000.0)
    writer.append(*run_entry())
    append_steps(writer, range(num_steps))
    return writer


def append_steps(writer: LedgerWriter, steps: range, attempt: int = 0, salt: str = "") -> None:
    """Append steps, with a checkpoint entry after each fourth."""
    for step in steps:
        writer.append(*step_entry(step, attempt, salt))
        if step % 4 == 3:
            writer.append(CheckpointEntry(step + 1, digest(f"state {step}"), digest(f"root {step}")))


def end_entry(num_steps: int) -> Entry:
    """Return an end."""
    return EndEntry(num_steps, "completed", digest("end"))
