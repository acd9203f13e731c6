"""Writes the ledger of a run: entry 0, then one entry for each commit, never before it.

Rank 0 writes. What the other ranks know of their microbatches reaches it with the step's one gather; the commitments
to their rows are gathered here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import time

import torch

from cosmati.core.batch import Batch
from cosmati.core.clock import Budget, Clock
from cosmati.core.method import Stage
from cosmati.ledger.files import is_unbegun
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.row_blinds import secret_commitments
from cosmati.ledger.row_secrets import RowsAt, RowSecrets, SaltedRows, commit, open_secrets
from cosmati.ledger.rows import ROWS_VERSION, SALTED_VERSION
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.provenance.kept_vouchers import keep_vouchers
from cosmati.provenance.voucher import FOLDER
from cosmati.records.ledger import (
    DIGEST_SIZE,
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    EvaluationEntry,
    RunEntry,
    StepEntry,
    TimeEntry,
)
from cosmati.storage.atomic import replace_files
from cosmati.train.facts import RunFacts
from cosmati.train.identity import Change
from cosmati.train.observers.entry_facts import kinds_told, vouched_for
from cosmati.train.observers.ledger_checks import forgotten_in, rare_entries, refuse_readmission, refuse_unsigned
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.observers.pack_cells import are_packs, by_cell, cell_of, class_columns, packed_cells
from cosmati.train.observers.row_leaves import rows_in
from cosmati.train.observers.rows_salt import keep_secrets, refuse_forgotten, refuse_other_secrets
from cosmati.train.observers.sealing import StepSealing
from cosmati.train.observers.step_details import finite, kept_details, places_of, step_details, written_columns
from cosmati.train.observers.witnessing import AskedWitnesses
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks

_NO_POLICY = bytes(32)
_TIME_SECONDS = 60.0
"""Between entries of the clock, where there's no checkpoint."""


class LedgerObserver(Observer):
    """Keeps the ledger in `<run>/ledger`, the operator's key and the rows' keys in `<run>/private`.

    Args:
        run_folder: the run's folder.
        facts: what the run is.
        ranks: the data-parallel ranks; the first one writes.
        digest: gives the model's Merkle root as it is now. Every rank calls it.
        changed: since the run was stopped.
        state_digest: of the checkpoint from which it goes on, if it does.
        witnesses: who are asked to cosign it; None for nobody.
    """

    def __init__(
        self,
        run_folder: Path,
        facts: RunFacts,
        ranks: Ranks,
        digest: Callable[[], bytes],
        changed: Sequence[Change] = (),
        state_digest: bytes | None = None,
        witnesses: AskedWitnesses | None = None,
    ) -> None:
        self._facts = facts
        self._witnesses = witnesses
        self._stop: Callable[[str], None] = lambda _: None
        self._timed = 0.0
        self._ranks = ranks
        self._digest = digest
        self._changed = changed
        self._state_digest = state_digest
        self._policy = facts.policy.policy_digest if facts.policy else _NO_POLICY
        self._directory = run_folder / "ledger"
        self._private = run_folder / "private"
        exists = (self._directory / "checkpoint").exists()
        # A log keeps its name when its folder gets another one.
        name = re.sub(r"[\s+]+", "-", run_folder.name)  # A log's name has no spaces and no plus.
        self._origin = read_verifier_key(self._directory).name if exists else f"cosmati/{name}"
        self._is_writer = ranks.rank == 0
        self._attempt, self._gone = 0, dict[str, object]()
        self._sealing = StepSealing()
        self._secrets: RowSecrets | None = None

    def on_open(self, run: WatchedRun) -> None:
        """Keep how the run is stopped."""
        self._stop = run.stop

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Open the ledger: with entry 0, or saying from which step the run goes on."""
        if self._is_writer:
            exists = (self._directory / "checkpoint").exists()
            entries = list(rare_entries(self._directory)) if exists else []
            if exists:
                if self._state_digest is not None:
                    refuse_unsigned(entries, clock.step, self._state_digest)
                refuse_readmission(entries, self._facts.withdrawn)
                self._gone = forgotten_in(entries)
            self._sealing = StepSealing.of_run(self._private, self._origin, self._facts.sensitive, entries)
            self._writer = self._open()
            self._keep_archive()
            if self._writer.size == 0:
                self._append_run()
            else:
                self._resume(clock)
            self._note_time(clock.step)
            self._begin_witnessing()
        self._ranks.barrier()
        if not self._is_writer:
            self._secrets = open_secrets(self._private, self._origin)

    def _begin_witnessing(self) -> None:
        if self._witnesses is None:
            return
        self._writer.checkpoint()
        try:
            self._witnesses.begin()
        except BaseException:
            self._writer.close()
            raise

    def _note_time(self, step: int) -> None:
        """Put on record what the clock says: nobody else has seen it."""
        self._timed = time()
        self._writer.append(TimeEntry(step, int(self._timed)))

    def _open(self) -> LedgerWriter:
        directory = self._directory
        self._private.mkdir(mode=0o700, exist_ok=True)
        key = load_or_create_key(self._private / "operator.key", name=self._origin)
        exists = not is_unbegun(directory)
        keep_secrets(self._private, may_create=not exists)
        if (directory / "checkpoint").exists():
            refuse_other_secrets(directory, self._private)
        self._secrets = open_secrets(self._private, self._origin)
        if exists:
            return LedgerWriter.open(directory, key=key)
        return LedgerWriter.create(directory, origin=self._origin, key=key)

    def _keep_archive(self) -> None:
        """Put what bears out the provenance of data and policy beside the ledger, before an entry names it."""
        facts = self._facts
        prepared = [one.vouched for one in facts.artifacts]
        for part in (facts.vouched, facts.withdrawn, facts.vouched_policy, facts.policy_changes, *prepared):
            if part is not None and part.files:
                replace_files(self._directory / FOLDER, part.files)
        if facts.vouched is not None:
            keep_vouchers(self._directory.parent, facts.vouched)
        for one in facts.artifacts:
            if one.vouched is not None:
                keep_vouchers(self._directory.parent, one.vouched, one.label)

    def _resume(self, clock: Clock) -> None:
        """Say from which step the run goes on, and what it commits to from now on where that has changed."""
        # What stands after that step is superseded, and stays.
        self._attempt = self._writer.next_attempt()
        self._writer.append(self._writer.resume_entry(clock.step))
        earlier = self._writer.in_force
        assert earlier is not None, "there is an entry 0"
        was = dict(earlier.commitments)
        # Where no checkpoint was written, the run begins anew, from weights of its own.
        begins = self._state_digest is None and clock.step == 0
        now = self._commitments() | ({} if begins else {"model": was.get("model", self._facts.model_root)})
        if now != was or self._changed:
            texts = [[c.name, _text(c.was), _text(c.now)] for c in self._changed]
            known = {name.partition(".")[0] for name, _, _ in texts}
            texts += [
                [name, was.get(name, b"").hex(), now[name].hex()]
                for name in sorted(now)
                if now[name] != was.get(name) and name not in known
            ]
            details = self._details() | {"changes": texts}
            self._writer.append(AmendEntry(clock.step, tuple(sorted(now.items())), details_digest(details)), details)

    def _append_run(self) -> None:
        details = self._details()
        commitments = tuple(sorted(self._commitments().items()))
        self._writer.append(RunEntry(str(details["run_id"]), commitments, details_digest(details)), details)
        self._writer.checkpoint()

    def _details(self) -> dict[str, object]:
        """Return the tables with which the entries that follow are read, and who vouched for data and policy."""
        facts, policy = self._facts, self._facts.policy
        governed: dict[str, object] = {}
        if facts.vouched is not None:
            governed |= {"provenance": facts.vouched.facts, "data_text": facts.data_text}
        if facts.withdrawn is not None:
            governed["withdrawn"] = facts.withdrawn.facts
        if facts.plan.facts.provenance:
            governed["signed"] = dict(facts.plan.facts.provenance)
        if facts.vouched_policy is not None:
            governed["policy_provenance"] = facts.vouched_policy.facts
        if self._witnesses is not None:
            governed["witnessing"] = self._witnesses.profile.facts
        if facts.artifacts:
            governed["artifacts"] = [one.facts for one in facts.artifacts]
        if facts.policy_changes.told:
            governed["policy_changes"] = list(facts.policy_changes.told)
        return {**governed, **self._gone} | {
            "run_id": self._origin.removeprefix("cosmati/"),
            "seed": facts.seed,
            "classes": list(policy.classes if policy else ("all",)),
            "regions": list(facts.regions),
            "routes": [list(route) for route in policy.routes] if policy else [[1.0] * len(facts.regions)],
            "phases": [[p.name, p.start_step, p.end_step] for p in policy.phases]
            if policy
            else [["main", 0, facts.num_steps or 0]],
            "policy": [
                [list(map(list, weight)), list(decision)]
                for weight, decision in zip(policy.weight, policy.decision, strict=True)
            ]
            if policy
            else [],
            **(kinds_told(policy) if policy and len(policy.kinds) > 1 else {}),
            **self._sealing.table,
            "plan": list(facts.plan.lines),
            "environment": dict(facts.environment),
            "num_microbatches": facts.num_microbatches,
            "rows_version": SALTED_VERSION if isinstance(self._secrets, SaltedRows) else ROWS_VERSION,
            "parameters": [list(names) for names in facts.parameters],
            "policy_text": facts.policy_text,
            "recipe": {name: _text(value) for name, value in facts.identity.items()},
        }

    def _commitments(self) -> dict[str, bytes]:
        facts = self._facts
        environment = "\n".join(f"{k}={v}" for k, v in sorted(facts.environment.items()))
        witnessing = {} if self._witnesses is None else {"witnessing": details_digest(self._witnesses.profile.facts)}
        own = {
            "data": hashlib.sha256(facts.data_digest.encode()).digest(),
            "environment": hashlib.sha256(environment.encode()).digest(),
            "model": facts.model_root,
            "plan": bytes.fromhex(facts.plan.digest),
            "policy": self._policy,
            "taxonomy": facts.policy.taxonomy_digest if facts.policy else _NO_POLICY,
        }
        return own | secret_commitments(self._private) | vouched_for(facts) | witnessing | self._sealing.commitment

    def amend(self, clock: Clock, changes: Sequence[Change], facts: RunFacts) -> None:
        """Say what is different from the step on at which the clock stands; it's on disk, and signed, on return."""
        self._facts = facts
        self._policy = facts.policy.policy_digest if facts.policy else _NO_POLICY
        if self._is_writer:
            self._keep_archive()
            self._attempt = self._writer.next_attempt()
            self._writer.append(self._writer.resume_entry(clock.step))
            details = self._details() | {"changes": [[c.name, _text(c.was), _text(c.now)] for c in changes]}
            in_force = self._writer.in_force
            assert in_force is not None, "there is an entry 0"
            before = {name: one for name, one in in_force.commitments if name != "policy_provenance"}
            commitments = tuple(sorted((before | vouched_for(facts) | {"policy": self._policy}).items()))
            self._writer.append(AmendEntry(clock.step, commitments, details_digest(details)), details)
            self._writer.checkpoint()

    def on_step(self, outcome: StepOutcome) -> None:
        """Append the entry of a commit."""
        step, ours = outcome.clock.step - 1, self._ranks.mine(self._ranks.num_replicas * len(outcome.batches))
        commitments = [
            self._commit_batch(batch, outcome, step, m) for m, batch in zip(ours, outcome.batches, strict=True)
        ]
        kept = self._kept(outcome)
        packed = self._packed(outcome, step)
        table = torch.tensor(
            [
                [*c, batch.band, *p, *k]
                for c, batch, p, k in zip(commitments, outcome.given or outcome.batches, packed, kept, strict=True)
            ],
            dtype=torch.int32,
            device=outcome.loss.device,
        )
        table = self._ranks.gather(table).cpu()
        if not self._is_writer:
            return
        widths = [DIGEST_SIZE + 1, len(packed[0]), table.shape[1] - len(packed[0]) - DIGEST_SIZE - 1]
        table, columns, places = table.split(widths, dim=1)
        details = step_details(outcome, step, len(self._facts.regions)) | kept_details(places)
        if packed[0]:
            told = packed_cells(outcome, partial(cell_of, outcome, table), columns)
            details, cells = by_cell(details, told), tuple(one.cell for one in told)
            owners: Sequence[int] = [one.microbatch for one in told]
        else:
            cells = tuple(cell_of(outcome, table, m) for m in range(len(table)))
            owners = range(len(cells))
        details = self._sealing.seal(details | written_columns(outcome, owners), cells, step, self._facts.policy)
        self._writer.append(StepEntry(step, self._attempt, self._policy, details_digest(details), None, cells), details)
        if time() - self._timed >= _TIME_SECONDS:
            self._note_time(step + 1)
        if self._witnesses is not None and (why := self._witnesses.refuse()):
            self._stop(why)

    def evaluated(self, clock: Clock, metrics: Mapping[str, float], root: bytes, weights: str) -> None:
        """Append what was measured, and of which weights.

        Args:
            clock: where the run stands.
            metrics: by their names.
            root: over parameters and buffers as they were measured.
            weights: `trained`, or `averaged` where averages stood in for them.
        """
        if self._is_writer:
            values = {name: finite(float(value)) for name, value in metrics.items()}
            details: dict[str, object] = {"step": clock.step, "metrics": values, "weights": weights}
            self._writer.append(EvaluationEntry(clock.step, root, details_digest(details)), details)

    def _kept(self, outcome: StepOutcome) -> list[list[int]]:
        """Say of each row that the data gave at which place of its microbatch it took part, from 1; 0 where it didn't.

        Without methods that select rows, say nothing. Microbatches of fewer rows than others are filled with -1.
        """
        if not outcome.given or not self._facts.plan.at(Stage.SELECT):
            return [[] for _ in outcome.batches]
        width = max(route.num_rows for route in outcome.routes)
        pairs = zip(outcome.given, outcome.batches, strict=True)
        return [places_of(given.lineage.row_ids, kept.lineage.row_ids, width) for given, kept in pairs]

    def _packed(self, outcome: StepOutcome, step: int) -> list[list[int]]:
        """Return what the cells of packs are made from; nothing where no microbatch of the step is routed by token."""
        if not are_packs(outcome.routes):
            return [[] for _ in outcome.batches]
        ours = self._ranks.mine(len(outcome.routes))
        return [
            class_columns(batch, outcome.routes, self._commit, self._classes, step, m)
            for m, batch in zip(ours, outcome.batches, strict=True)
        ]

    @property
    def _classes(self) -> Sequence[str]:
        return self._facts.policy.classes if self._facts.policy else ("all",)

    def _commit_batch(self, batch: Batch, outcome: StepOutcome, step: int, m: int) -> bytes:
        """Return the commitment to a microbatch's rows; nothing of packs that are routed by token, which have cells."""
        is_short = outcome.weights is None or outcome.num_rows is None
        if not is_short and outcome.routes[m].tokens is not None:
            return bytes(DIGEST_SIZE)
        class_id = 0 if is_short or self._facts.policy is None else outcome.routes[m].class_id
        return self._commit(rows_in(batch, step, m, self._classes[class_id]))

    def _commit(self, rows: RowsAt) -> bytes:
        """Return the commitment to rows that took part.

        Raises:
            LedgerError: one of them was forgotten, and is given again.
        """
        blinds = None if self._secrets is None else self._secrets.blinds(rows)
        found = None if blinds is None else commit(rows, blinds)
        return refuse_forgotten(rows) if found is None else found

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Put a signed tree head on disk that covers the model checkpoint."""
        if self._is_writer:
            self._note_time(clock.step)
            self._writer.append(CheckpointEntry(clock.step, state_digest, parameter_root))
            self._writer.checkpoint()

    def on_end(self, clock: Clock, ended: str) -> None:
        """Append the end and close."""
        root = self._digest() if ended == "completed" else None
        if self._is_writer:
            try:
                if root is not None and not self._writer.has_ended():
                    self._note_time(clock.step)
                    self._writer.append(EndEntry(clock.step, ended, root))
            finally:
                self._writer.close()
            if self._witnesses is not None and ended == "failed":
                self._witnesses.close()
            elif self._witnesses is not None:
                self._witnesses.end(must=ended == "completed")


def _text(value: object) -> str:
    return "" if value is None else str(value)
