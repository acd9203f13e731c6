"""The folder of a run: one process at a time, one record of what it was.

run.json            the record: plan, guarantees, environment, outcome
steps.jsonl         losses            evaluations.jsonl   metrics
checkpoints/        see checkpoint.py
ledger/             see cosmati.ledger
private/            the operator's key and the rows' salt: never part of what is handed on
"""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from cosmati.core.plan import describe
from cosmati.core.state import model_tensors, parameter_root
from cosmati.errors import RunError
from cosmati.records.run import GuaranteeRecord, PlanLine, RunRecord
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock

if TYPE_CHECKING:
    from cosmati.train.session import RunResult
    from cosmati.train.trainer import Trainer


class RunFolder:
    """An open run folder; `open` locks it and `close` writes the final record.

    Raises:
        RunError: another process has it open, or it can't be written.
    """

    def __init__(self, path: Path, trainer: Trainer, lock: FileLock) -> None:
        self.path = path
        self._trainer = trainer
        self._lock = lock
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        # Of the model before its first step; a resumed run keeps the record's own.
        self._model_digest = parameter_root(model_tensors(trainer.model)).hex()

    @classmethod
    def open(cls, path: Path, trainer: Trainer) -> Self:
        """Make or open a run folder and lock it; the kernel frees the lock when the process dies."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            lock = FileLock(path / "lock")
        except BlockingIOError as error:
            msg = f"Another process is training in {path}. Wait for it, stop it, or give this run a folder of its own."
            raise RunError(msg) from error
        except OSError as error:
            msg = f"The run folder {path} can't be written: {error}. Give another one."
            raise RunError(msg) from error
        folder = cls(path, trainer, lock)
        try:
            folder._resume_record()
            folder.write("running", None)
        except BaseException:
            folder.unlock()
            raise
        return folder

    def _resume_record(self) -> None:
        record = self.path / "run.json"
        if record.exists():
            earlier = RunRecord.from_json(record.read_text())
            self._started = earlier.started
            self._model_digest = earlier.digests["model"]

    def close(self, outcome: str, result: RunResult) -> None:
        """Write the final record and unlock."""
        try:
            self.write(outcome, result)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let another process have the folder."""
        self._lock.release()

    def write(self, outcome: str, result: RunResult | None) -> None:
        """Write `run.json`, atomically."""
        record = run_record(self._trainer, self.path.name, self._started, self._model_digest, outcome, result)
        try:
            replace_file(self.path / "run.json", record.to_json().encode())
        except OSError as error:
            msg = f"{self.path}/run.json can't be written: {error}. Free space, and start the run again: it goes on."
            raise RunError(msg) from error


def run_record(
    trainer: Trainer, run_id: str, started: str, model_digest: str, outcome: str, result: RunResult | None
) -> RunRecord:
    """Gather the facts of a run."""
    a, plan = trainer.assembly, trainer.plan
    source = getattr(trainer.given.data, "digest", "")
    recipe = {"methods": [describe(m) for m in plan.methods], **plan.facts.settings}
    return RunRecord(
        run_id=run_id,
        recipe_name=a.config.name,
        recipe_text=json.dumps(recipe, indent=1, sort_keys=True, default=str),
        digests={
            "plan": plan.digest,
            "model": model_digest,
            "data": source,
            "policy": a.policy.policy_digest.hex() if a.policy else "",
        },
        environment=describe_environment(a.device),
        plan=tuple(
            PlanLine(m.stage.name.lower(), describe(m), (type(m).__doc__ or "").strip().splitlines()[0])
            for m in plan.methods
        ),
        guarantees=tuple(GuaranteeRecord(g.name, g.holds, g.because) for g in plan.guarantees),
        seed=a.config.seed,
        num_microbatches=a.num_microbatches,
        num_steps=trainer.clock.step,
        hardware=describe_hardware(a.device),
        cost=None,
        seconds_by_part=dict(result.seconds_by_part) if result else {},
        outcome=outcome,
        started=started,
        ended=datetime.now(UTC).isoformat(timespec="seconds") if result else None,
        metrics=dict(result.metrics) if result else {},
    )


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return everything outside the recipe that may change bits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": describe_hardware(device),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "",
        "platform": platform.platform(),
    }


def describe_hardware(device: torch.device) -> str:
    """Return the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
