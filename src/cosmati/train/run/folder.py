"""The folder of a run: one process at a time, one record of what it was.

run.json            the record: plan, guarantees, environment, outcome
steps.jsonl         losses            evaluations.jsonl   metrics
monitors.jsonl      what monitors have measured
attempts.jsonl      each start and end of the run           superseded.jsonl    lines that a restart took anew
changes.jsonl       what each resume has changed
checkpoints/        see checkpoints.py
copies.jsonl        places to which they're copied: see cosmati.records.copies
ledger/             see cosmati.ledger
private/            the operator's key and the rows' salt: never part of what is handed on
lock, epoch         who may write: see cosmati.storage.fence
succeeded.json      which folder goes on with the ledger, where a deletion has made one
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cosmati.core.clock import Clock
from cosmati.core.plan import Plan, describe
from cosmati.errors import RunError
from cosmati.records.artifacts import ARTIFACT
from cosmati.records.attempts import read_attempts
from cosmati.records.launched import NOTE_VARIABLE, LaunchedRun
from cosmati.records.run import GuaranteeRecord, PlanLine, RunRecord
from cosmati.storage.atomic import replace_file
from cosmati.storage.fence import LOCK, Fence
from cosmati.storage.lock import FileLock, is_held_here
from cosmati.train.facts import RunFacts
from cosmati.train.identity import Change
from cosmati.train.run.checkpoints import list_checkpoints
from cosmati.train.run.result import RunResult

SUCCEEDED = "succeeded.json"
_MOST_SECONDS = 10.0
"""That another thread's collection is waited for; its finalizers may take their time."""


def _locked(path: Path) -> FileLock:
    """Lock a file; a trainer that nobody refers to any more (a notebook's cell that is run again) lets go of it."""
    with contextlib.suppress(BlockingIOError):
        return FileLock(path)
    _collect_garbage()
    return FileLock(path)


def _collect_garbage() -> None:
    """Let go of all that nobody refers to.

    While another thread collects, `gc.collect` does nothing; what that one has found may not have come to its end yet.
    """
    own, has_collected, until = threading.get_ident(), False, time.monotonic() + _MOST_SECONDS

    def tell(phase: str, info: dict[str, int]) -> None:
        nonlocal has_collected
        has_collected |= phase == "stop" and info["generation"] == 2 and threading.get_ident() == own

    gc.callbacks.append(tell)
    try:
        while True:
            gc.collect()
            if has_collected or time.monotonic() > until:
                return
            time.sleep(0.01)
    finally:
        gc.callbacks.remove(tell)


class RunFolder:
    """An open run folder; `open` locks it and `close` writes the final record.

    Raises:
        RunError: another process has it open, or it can't be written.
    """

    def __init__(self, path: Path, facts: RunFacts, fence: Fence) -> None:
        self.path = path
        self._facts = facts
        self._fence = fence
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        # Of the model before its first step; a resumed run keeps the record's own.
        self._model_digest = facts.model_root.hex()

    @classmethod
    def open(cls, path: Path, facts: RunFacts) -> Self:
        """Make or open a run folder and lock it; the kernel frees the lock when the process dies."""
        if (path / SUCCEEDED).exists():
            by = json.loads((path / SUCCEEDED).read_text())["by"]
            msg = (
                f"{path} was succeeded by {by}, which had to forget something. Go on there; "
                "two ends of one ledger would be a fork."
            )
            raise RunError(msg)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            fence = Fence(path, _locked(path / LOCK))
        except BlockingIOError as error:
            msg = f"Another process is training in {path}. Wait for it, stop it, or give this run a folder of its own."
            if is_held_here(path / LOCK):
                msg = (
                    f"Another Trainer of this process has {path} open. End its `with trainer:` first; where step() was "
                    "called without one, nobody closes the run: `del` that trainer. Or give this run another folder."
                )
            raise RunError(msg) from error
        except OSError as error:
            msg = f"The run folder {path} can't be written: {error}. Give another one."
            raise RunError(msg) from error
        folder = cls(path, facts, fence)
        try:
            folder._resume_record()
            folder._tell_launcher()
        except BaseException:
            folder.unlock()
            raise
        return folder

    def _resume_record(self) -> None:
        record = self.path / "run.json"
        if record.exists():
            earlier = RunRecord.from_json(record.read_text())
            if list_checkpoints(self.path / "checkpoints"):
                self._started = earlier.started
                self._model_digest = earlier.digests["model"]

    def check(self) -> None:
        """Refuse to write for a process whose place another one has taken.

        Raises:
            RunError: somebody has opened the folder since, or fenced this process off; or the folder is gone.
        """
        if self._fence.holds():
            return
        if not self._fence.epoch_path.exists():
            msg = (
                f"{self.path} isn't there any more, or {self._fence.epoch_path.name} in it, as where a disk is lost or "
                "somebody moves the folder. Bring it back, and start the run again: it goes on from its checkpoint."
            )
        else:
            msg = (
                f"This process is stale: {self._fence.epoch_path} says that another one trains in {self.path} since, "
                "as after a machine that nobody could reach. It commits nothing more; end it, and follow the other one."
            )
        raise RunError(msg)

    @property
    def epoch(self) -> int:
        """How many have written here, this one included."""
        return self._fence.number

    def _tell_launcher(self) -> None:
        if path := os.environ.get(NOTE_VARIABLE):
            attempts = read_attempts(self.path)
            told = LaunchedRun(
                folder=str(self.path.absolute()),
                attempt=attempts[-1].number + 1 if attempts else 0,
                num_microbatches=self._facts.num_microbatches,
                num_steps=self._facts.num_steps,
                tensor_parallel=self._facts.tensor_parallel,
            )
            replace_file(Path(path), told.to_json().encode())

    def close(self, result: RunResult, plan: Plan) -> None:
        """Write the final record, with the promises that still hold, and unlock."""
        try:
            self.write(result.outcome, plan, result.clock, result)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let another process have the folder."""
        self._fence.release()

    def write(self, outcome: str, plan: Plan, clock: Clock, result: RunResult | None) -> None:
        """Write `run.json`, atomically."""
        self.check()
        record = self._record(outcome, plan, clock, result)
        try:
            replace_file(self.path / "run.json", record.to_json().encode())
        except OSError as error:
            msg = f"{self.path}/run.json can't be written: {error}. Free space, and start the run again: it goes on."
            raise RunError(msg) from error

    def restate(self, facts: RunFacts) -> None:
        """Name from now on what governs the run, and who vouches for it, as the ledger does."""
        governing = {name: getattr(facts, name) for name in ("policy", "vouched", "vouched_policy", "artifacts")}
        self._facts = dataclasses.replace(self._facts, **governing)

    def note(self, clock: Clock, changed: Sequence[Change]) -> None:
        """Append to `changes.jsonl` what a resume has changed."""
        if changed:
            self.check()
            line = {"step": clock.step, "changes": [[c.name, c.was, c.now] for c in changed]}
            with (self.path / "changes.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _record(self, outcome: str, plan: Plan, clock: Clock, result: RunResult | None) -> RunRecord:
        ended = datetime.now(UTC).isoformat(timespec="seconds") if result else None
        record = describe_run(self._facts, plan, clock, run_id=self.path.name, model_digest=self._model_digest)
        return dataclasses.replace(
            record,
            seconds_by_part=dict(result.seconds_by_part) if result else {},
            outcome=outcome,
            started=self._started,
            ended=ended,
            metrics=dict(result.metrics) if result else {},
        )


def _data_root(facts: RunFacts) -> str:
    return ",".join(sorted({one.root for one in facts.vouched.vouchers})) if facts.vouched else "declared"


def _policy_root(facts: RunFacts) -> str:
    return facts.vouched_policy.voucher.root if facts.vouched_policy else "declared"


def describe_run(facts: RunFacts, plan: Plan, clock: Clock, *, run_id: str, model_digest: str) -> RunRecord:
    """Return the record of a run as it stands, without times and metrics.

    Args:
        facts: of the run.
        plan: with the promises that still hold.
        clock: where it stands.
        run_id: its folder's name; empty where it has none.
        model_digest: Merkle root of the model before its first step, hex.
    """
    recipe = {"methods": [describe(m) for m in plan.methods], **plan.facts.settings}
    if facts.task:
        recipe["task"] = facts.task
    return RunRecord(
        run_id=run_id,
        recipe_name=facts.recipe,
        recipe_text=json.dumps(recipe, indent=1, sort_keys=True, default=str),
        digests={
            "plan": plan.digest,
            "model": model_digest,
            "data": facts.data_digest,
            "policy": facts.policy.policy_digest.hex() if facts.policy else "",
        }
        | ({"data_root": _data_root(facts)} if "data" in plan.facts.provenance else {})
        | ({"policy_root": _policy_root(facts)} if facts.policy else {})
        | {ARTIFACT + one.label: str(one) for one in facts.artifacts},
        environment=facts.environment,
        plan=tuple(
            PlanLine(m.stage.name.lower(), describe(m), (type(m).__doc__ or "").strip().partition("\n")[0])
            for m in plan.methods
        ),
        guarantees=tuple(GuaranteeRecord(g.name, g.holds, g.because) for g in plan.guarantees),
        seed=facts.seed,
        num_microbatches=facts.num_microbatches,
        num_steps=clock.step,
        hardware=facts.hardware,
        cost=None,
        seconds_by_part={},
        outcome="running",
        started="",
        ended=None,
        metrics={},
    )
