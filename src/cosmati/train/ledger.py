"""Writes the ledger of a run: entry 0, then one entry for each commit, never before it.

Rank 0 writes. What the other ranks know of their microbatches reaches it with the step's one gather; the commitments
to their rows are gathered here.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.clock import Budget, Clock
from cosmati.core.state import model_tensors, parameter_root
from cosmati.errors import LedgerError
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import CheckpointEntry, EndEntry, MicrobatchCell, RunEntry, StepEntry
from cosmati.train.observers import Observer, StepReport
from cosmati.train.run_folder import describe_environment

if TYPE_CHECKING:
    from cosmati.train.trainer import Trainer

_NO_POLICY = bytes(32)


class LedgerObserver(Observer):
    """Keeps the ledger in `<run>/ledger`, the operator's key and the rows' salt in `<run>/private`.

    Args:
        trainer: whose commits are recorded.
        run_folder: the run's folder.
    """

    def __init__(self, trainer: Trainer, run_folder: Path) -> None:
        self._t = trainer
        self._a = trainer.assembly
        self._is_writer = self._a.ranks.rank == 0
        self.attempt = 0
        private = run_folder / "private"
        directory = run_folder / "ledger"
        if self._is_writer:
            private.mkdir(mode=0o700, exist_ok=True)
            key = load_or_create_key(private / "operator.key", name=f"cosmati/{run_folder.name}")
            exists = (directory / "wal").exists() or (directory / "checkpoint").exists()
            _load_or_create_salt(private / "rows.salt", may_create=not exists)
            if (directory / "checkpoint").exists():
                _refuse_another_salt(directory, private / "rows.salt")
            origin = f"cosmati/{run_folder.name}"
            self._writer = (
                LedgerWriter.open(directory, key=key)
                if exists
                else LedgerWriter.create(directory, origin=origin, key=key)
            )
            if self._writer.size == 0:
                self._append_run(run_folder.name)
            else:
                self._append_resume()
        self._a.ranks.barrier()
        self._salt = (private / "rows.salt").read_bytes()

    def _append_run(self, run_id: str) -> None:
        a = self._a
        policy, plan = a.policy, a.plan
        details = {
            "run_id": run_id,
            "seed": a.config.seed,
            "classes": list(policy.classes if policy else ("all",)),
            "regions": list(a.regions.names),
            "routes": [list(route) for route in policy.routes] if policy else [[1.0] * len(a.regions.names)],
            "phases": [[p.name, p.start_step, p.end_step] for p in policy.phases]
            if policy
            else [["main", 0, a.budget.num_steps or 0]],
            "policy": [
                [list(map(list, policy.weight[c])), list(policy.decision[c])] for c in range(len(policy.classes))
            ]
            if policy
            else [],
            "plan": list(plan.lines),
            "environment": describe_environment(a.device),
            "num_microbatches": a.num_microbatches,
        }
        environment = "\n".join(f"{k}={v}" for k, v in sorted(describe_environment(a.device).items()))
        source = str(getattr(self._t.given.data, "digest", ""))
        commitments = {
            "data": hashlib.sha256(source.encode()).digest(),
            "environment": hashlib.sha256(environment.encode()).digest(),
            "model": parameter_root(model_tensors(a.model)),
            "plan": bytes.fromhex(plan.digest),
            "policy": policy.policy_digest if policy else _NO_POLICY,
            "rows_salt": _salt_commitment(self._private() / "rows.salt"),
            "taxonomy": policy.taxonomy_digest if policy else _NO_POLICY,
        }
        self._writer.append(RunEntry(run_id, tuple(sorted(commitments.items())), details_digest(details)), details)
        self._writer.checkpoint()

    def _private(self) -> Path:
        assert self._a.config.run_folder is not None, "a ledger lives in a run folder"
        return self._a.config.run_folder / "private"

    def _append_resume(self) -> None:
        """Say from which step the run goes on; what stands after that step is superseded, and stays."""
        self.attempt = self._writer.next_attempt()
        self._writer.append(self._writer.resume_entry(self._t.clock.step))

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Do nothing: entry 0 stands already."""

    def on_step(self, report: StepReport) -> None:
        """Append the entry of a commit."""
        a = self._a
        step = report.clock.step - 1
        mine = list(a.ranks.mine(a.num_microbatches))
        commitments = [self._commit(batch, step, index) for batch, index in zip(report.batches, mine, strict=True)]
        table = torch.tensor([list(c) for c in commitments], dtype=torch.uint8, device=a.device)
        table = a.ranks.gather(table)
        if not self._is_writer:
            return
        details = self._details(report, step)
        cells = self._cells(report, table)
        policy = a.policy.policy_digest if a.policy else _NO_POLICY
        self._writer.append(StepEntry(step, self.attempt, policy, details_digest(details), None, cells), details)

    def _cells(self, report: StepReport, commitments: Tensor) -> tuple[MicrobatchCell, ...]:
        rows = commitments.cpu().numpy()
        if report.weights is None or report.num_rows is None:
            num_rows = report.batches[0].num_rows
            return (MicrobatchCell(0, 0, 0, 0, num_rows, float(num_rows), rows[0].tobytes()),)
        facts = torch.stack([report.weights, report.num_rows.double()]).tolist()
        return tuple(
            MicrobatchCell(route.class_id, 0, route.phase, route.id, int(num), weight, rows[m].tobytes())
            for m, (route, weight, num) in enumerate(zip(report.routes, *facts, strict=True))
        )

    def _details(self, report: StepReport, step: int) -> dict[str, object]:
        norms = (
            {}
            if report.norms is None
            else {str(m): [_finite(v) for v in row] for m, row in enumerate(report.norms.tolist())}
        )
        update = None if report.update_norms is None else [_finite(v) for v in report.update_norms.tolist()]
        return {
            "step": step,
            "gradient_norm": norms,
            "update_norm": update,
            "loss": _finite(float(report.loss)),
        }

    def _commit(self, batch: Batch, step: int, microbatch: int) -> bytes:
        """Return the commitment to the rows that took part: a hash over salted row leaves, in order."""
        prefix = f"{step}/{microbatch}/".encode()
        total = hashlib.sha256()
        digests = batch.lineage.digests
        contents: Sequence[bytes] = [] if digests is None else [row.tobytes() for row in digests.numpy()]
        parents = batch.lineage.parents
        rows = batch.lineage.row_ids[:, None] if parents is None else parents
        for slot, ids in enumerate(rows.tolist()):
            if ids[0] == TOMBSTONE:
                continue
            blind = hmac.digest(self._salt, prefix + str(slot).encode(), "sha256")
            total.update(
                hashlib.sha256(b"\x00" + blind + repr(ids).encode() + (contents[slot] if contents else b"")).digest()
            )
        return total.digest()

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Put a signed tree head on disk that covers the model checkpoint."""
        if self._is_writer:
            self._writer.append(CheckpointEntry(clock.step, state_digest, parameter_root))
            self._writer.checkpoint()

    def on_end(self, clock: Clock, outcome: str) -> None:
        """Append the end and close."""
        if self._is_writer:
            try:
                if outcome == "completed" and not self._writer.has_ended():
                    self._writer.append(EndEntry(clock.step, outcome, parameter_root(model_tensors(self._a.model))))
            finally:
                self._writer.close()


def _salt_commitment(path: Path) -> bytes:
    return hashlib.sha256(b"cosmati rows salt" + path.read_bytes()).digest()


def _refuse_another_salt(ledger: Path, path: Path) -> None:
    """Compare the salt with what entry 0 commits to: with another one, nobody could open the rows of later steps."""
    first = next(iter(Scan(ledger, read_head(ledger, read_verifier_key(ledger)))), None)
    if first is None or not isinstance(first.entry, RunEntry):
        return
    if dict(first.entry.commitments).get("rows_salt") != _salt_commitment(path):
        msg = f"{path} isn't the salt that entry 0 of the ledger commits to. Put the run's own salt back."
        raise LedgerError(msg)


def _load_or_create_salt(path: Path, *, may_create: bool) -> bytes:
    if not path.exists():
        if not may_create:
            raise LedgerError(f"{path} is gone, and the ledger's rows are salted with it. Put the run's own salt back.")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
    return path.read_bytes()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
