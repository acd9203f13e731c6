"""(l) What a ledger costs a step, and what asking one of a million steps takes.

Each question is a process of its own, as a person starts it; CPU time is of all its threads, and says what a quiet
machine would take where others work on this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.ledger_scale import CLASSES, NORMS_EVERY, ORIGIN, REGIONS, ROWS, V, tables, write_ledger
from benchmarks.measure import RESULTS, surroundings
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.row_secrets import KeyedRows, RowsAt, commit
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import MicrobatchCell, RunEntry, StepEntry

NUM_STEPS, STEP_SECONDS, ROUNDS = 1_000_000, 0.1, 2
SQL = "SELECT class, region, count(*), sum(rows), sum(weight) FROM taught WHERE stands GROUP BY ALL"
QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "query": ("query",),
    "query --region": ("query", "--region", "embedding"),
    "query --class --steps": ("query", "--class", CLASSES[0], "--steps"),
    "query --each phase": ("query", "--each", "phase"),
    "query --checkpoint": ("query", "--checkpoint", "{half}"),
    "policy-effect": ("policy-effect",),
    "show": ("show",),
    "sql, all cells and regions": ("sql", SQL),
    "statement of exclusion (all entries)": ("query", "--class", CLASSES[2], "--region", REGIONS[0]),
    "query --prove (all entries)": ("query", "--prove"),
    "verify (all entries)": ("verify",),
}


def writing(folder: Path, num_steps: int) -> tuple[float, float]:
    """Return seconds a step in the training thread, and in all threads: rows committed to, entry made, and written."""
    details = tables(False, num_steps)
    policy, secrets = hashlib.sha256(b"first").digest(), KeyedRows(RowKeys(bytes(32)), ORIGIN)
    commitments = (("data", policy), ("policy", policy))
    with LedgerWriter.create(folder, origin=ORIGIN, key=SigningKey.generate(ORIGIN)) as writer:
        writer.append(RunEntry("r", commitments, details_digest(details)), details)
        began, thread = time.process_time(), time.thread_time()
        for step in range(num_steps):
            cells = []
            for m in range(V):
                rows = np.arange(ROWS)[:, None] + step * V
                at = RowsAt(step, m, CLASSES[0], np.arange(ROWS), rows)
                phase = int(step >= num_steps // 10)
                digest = commit(at, secrets.blinds(at)) or b""
                cells.append(MicrobatchCell(0, 0, phase, 4, ROWS, float(ROWS), digest))
            norms = {str(m): [1.5] * len(REGIONS) for m in range(V)} if step % NORMS_EVERY == 0 else {}
            told: dict[str, object] = {"step": step, "gradient_norm": norms, "update_norm": None, "loss": 1.25}
            writer.append(StepEntry(step, 0, policy, details_digest(told), None, tuple(cells)), told)
        writer.flush()
        return (time.thread_time() - thread) / num_steps, (time.process_time() - began) / num_steps


def asked(folder: Path, question: tuple[str, ...], half: int) -> tuple[float, float]:
    """Return seconds on the clock and of all cores for one question."""
    command, *rest = (part.format(half=half) for part in question)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "cosmati", "ledger", command, str(folder), *rest], check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(*, quick: bool = False) -> str:
    """Measure, write the results and return the tables."""
    if find_spec("duckdb") is None:
        return "# ledger_queries\n\nLeft out: it needs another package (duckdb): pip install 'cosmati[queries]'.\n"
    num_steps, rounds = (20_000, 1) if quick else (NUM_STEPS, ROUNDS)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as place:
        own, whole = writing(Path(place) / "written", 500 if quick else 5000)
        folder = Path(place) / "run"
        write_ledger(folder / "ledger", num_steps)
        found = {"first derivation (all entries)": [asked(folder, ("derive", "--anew"), 0) for _ in range(rounds)]}
        for name, question in QUESTIONS.items():
            found[name] = [asked(folder, question, num_steps // 2) for _ in range(rounds)]
        sizes = {
            what: sum(path.stat().st_size for path in (folder / what).rglob("*") if path.is_file()) / num_steps
            for what in ("ledger", "derived")
        }
    load.append(os.getloadavg()[0])
    facts = {
        **surroundings(),
        "load": f"{load[0]:.1f} jobs in the minute before and {load[1]:.1f} in the last one, this one's own included",
        "what": f"{num_steps:,} steps of {V} microbatches, {len(CLASSES)} classes, {len(REGIONS)} regions, norms every "
        f"{NORMS_EVERY} steps, three resumes, a change of policy, 200 checkpoints",
        "bytes a step": f"{sizes['ledger']:.0f} in the ledger, {sizes['derived']:.0f} in derived tables",
        "us a step": f"{own * 1e6:.0f} in the training thread, {whole * 1e6:.0f} in all threads: "
        f"{own / STEP_SECONDS:.2%} and {whole / STEP_SECONDS:.2%} of a step of {STEP_SECONDS * 1e3:.0f} ms",
    }
    lines = ["# ledger_queries", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| question | seconds, least to most | of all cores, least to most | n |", "|---|---|---|---|"]
    for name, seen in found.items():
        clock, cores = (sorted(column) for column in zip(*seen, strict=True))
        spans = " | ".join(f"{column[0]:.1f} to {column[-1]:.1f}" for column in (clock, cores))
        lines.append(f"| {name} | {spans} | {len(seen)} |")
    table, name = "\n".join(lines) + "\n", f"ledger_queries{'_quick' if quick else ''}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(table)
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "seconds": found}, indent=1) + "\n")
    return table
