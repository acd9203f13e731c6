"""A run that is over, as its folder and its verified ledger have it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmati.core.source import Source
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import CheckpointError, ForgetError, RunError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.roots import CERTIFICATE, FORGOTTEN
from cosmati.ledger.row_blinds import Substituted
from cosmati.ledger.tables import Tables, in_force
from cosmati.records.joint_classes import joint_name
from cosmati.records.ledger import CheckpointEntry, EndEntry, StepEntry
from cosmati.records.run import RunRecord, training_seconds
from cosmati.storage.atomic import create_secret
from cosmati.train.observers.ledger_checks import signed_entries
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint, step_of
from cosmati.train.run.folder import SUCCEEDED

__all__ = ["CERTIFICATE", "FORGOTTEN", "Gone", "PastRun", "Start"]

_GONE = "forgotten.json"


@dataclass(frozen=True)
class Start:
    """Where a replay begins.

    Attributes:
        step: commits before it.
        checkpoint: to begin from; None begins anew.
        tables: in force there.
        passed_over: checkpoints that would have been nearer, with what's wrong with them.
    """

    step: int
    checkpoint: Checkpoint | None
    tables: Tables
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gone:
    """Classes and rows in whose place a run has tombstones."""

    classes: frozenset[str] = frozenset()
    rows: frozenset[int] = field(default=frozenset(), repr=False)

    def and_also(self, classes: Collection[str], rows: Collection[int]) -> Gone:
        """Return it with more."""
        return Gone(self.classes | {*classes}, self.rows | {*rows})

    def of(self, source: object, key: bytes) -> Source:
        """Return a recipe's source without them.

        Raises:
            ForgetError: it isn't a source, whose rows can be told apart.
        """
        if not isinstance(source, Source):
            msg = (
                f"The recipe's data are a {type(source).__name__}, and only a Source's rows are told apart. "
                "Which rows such data gave is nowhere; train anew without them."
            )
            raise ForgetError(msg)
        if not (self.classes or self.rows):
            return source
        # A taxonomy has classes of which the data have no row, and joint ones in another order.
        own = [name for name in source.class_names if joint_name([name]) in self.classes]
        return Tombstoned(source, own, self.rows, key)

    @classmethod
    def told(cls, substituted: Mapping[str, Substituted], asked: str, source: object) -> Source:
        """Return a recipe's source without what a file of blinds says was forgotten, by a request's digest.

        That the file says it truly is shown by the steps, whose digests are others over other rows.

        Raises:
            ForgetError: the file says nothing of the request, or it isn't a source.
        """
        one = substituted.get(asked)
        if one is None:
            msg = (
                f"The file of blinds doesn't say what the request {asked[:16]} had forgotten. Ask the operator for one "
                "of these steps."
            )
            raise ForgetError(msg)
        without = cls(frozenset(one.classes), one.rows).of(source, b"")
        return replace(without, named=one.data.encode()) if isinstance(without, Tombstoned) else without

    def keep(self, folder: Path, asked: str, before: Path) -> None:
        """Write them into a run's private folder, which the run has to have again to go on.

        Args:
            folder: of the run.
            asked: digest of the last request.
            before: folder of the run that it succeeds, which knows what was gone after each request before.
        """
        now = {"classes": sorted(self.classes), "rows": sorted(self.rows)}
        told = {**now, "after": {**_read_gone(before).get("after", {}), asked: now}}
        create_secret(folder / "private" / _GONE, json.dumps(told).encode())

    @staticmethod
    def is_kept(folder: Path) -> bool:
        """Say whether a run's private folder is here, and says what's gone."""
        return (folder / "private" / _GONE).exists()

    @classmethod
    def after(cls, folder: Path, asked: str = "") -> Gone:
        """Return what a run's private folder says is gone: after a request, or after the last one."""
        told = _read_gone(folder)
        told = told.get("after", {}).get(asked, told)
        return cls(frozenset(told.get("classes", ())), frozenset(told.get("rows", ())))


class PastRun:
    """A run that nobody trains.

    Args:
        folder: of the run.
        vkey: the operator's verifier key from a source that you trust.

    Attributes:
        folder: its folder.
        record: what `run.json` says.
        ledger: verified.
        salt: of its rows.

    Raises:
        RunError: no run folder, or a damaged record. ForgetError: it keeps no ledger, or lacks its salt.
        TamperError: the ledger doesn't verify.
    """

    def __init__(self, folder: Path, vkey: str | None = None) -> None:
        self.folder = folder
        try:
            self.record = RunRecord.from_json((folder / "run.json").read_text())
        except OSError as error:
            msg = f"{folder} is no run folder: {error}. Give what --run-folder or RunConfig named."
            raise RunError(msg) from error
        if not (folder / "ledger" / "checkpoint").exists():
            msg = (
                f"{folder} keeps no ledger, so nobody can tell what learnt from which rows. A run keeps one with "
                "RunConfig(ledger=True), or under a policy; train it again so."
            )
            raise ForgetError(msg)
        signed_entries(folder)  # What a crash has left unsigned counts too.
        self.ledger = VerifiedLedger(folder / "ledger", vkey)
        try:
            self.salt = (folder / "private" / "rows.salt").read_bytes()
        except OSError as error:
            msg = f"{folder}/private/rows.salt can't be read: {error}. Only the operator, who has it, can forget."
            raise ForgetError(msg) from error

    @property
    def seconds_per_step(self) -> float | None:
        """Measured, evaluation and checkpoints left out; None where nobody measured."""
        seconds = training_seconds(self.record.seconds_by_part)
        return seconds / self.num_steps if seconds and self.num_steps else None

    @property
    def num_steps(self) -> int:
        """Steps that stand."""
        return len(self.ledger.standing)

    @property
    def is_governed(self) -> bool:
        """Whether its ledger tells classes apart, as it does under a policy."""
        return any(tables.policy for tables in self.ledger.tables)

    @property
    def gone(self) -> Gone:
        """What was forgotten before, in this run or those that it succeeds."""
        return Gone.after(self.folder)

    def first_contact(self, classes: Collection[str]) -> int | None:
        """Return the first step, superseded ones among them, that ran rows of some classes; None where none did."""
        steps = (
            entry.step for item, entry, tables in self.ledger.steps() if _ran(item, entry, tables, frozenset(classes))
        )
        return min(steps, default=None)

    def start(self, contact: int) -> Start:
        """Return where to begin so that nothing has learnt from a step on, and nothing is lost before it.

        Args:
            contact: the first step with rows that are to be forgotten.

        Raises:
            ForgetError: no checkpoint is early enough, or whole, and the weights of the beginning aren't kept either.
        """
        damaged = []
        signed = self._signed()
        for path in list_checkpoints(self.folder / "checkpoints"):
            if step_of(path) > contact:
                continue
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            tables = signed.get((checkpoint.step, checkpoint.signed_digest))
            if tables is not None:
                return Start(checkpoint.step, checkpoint, tables, tuple(damaged))
            damaged.append(f"{path.name} isn't one that the ledger has signed")
        return Start(0, None, self.ledger.tables[0], tuple(damaged))

    def _signed(self) -> dict[tuple[int, bytes], Tables]:
        """Return the checkpoints that the ledger has signed, by step and digest, with the tables in force there."""
        found = {}
        for item, tables in in_force(self.ledger.entries()):
            if isinstance(item.entry, CheckpointEntry):
                found[item.entry.step, item.entry.state_digest] = tables
        return found

    def end(self) -> EndEntry | None:
        """Return the last end that the ledger has."""
        found = [item.entry for item in self.ledger.entries() if isinstance(item.entry, EndEntry)]
        return found[-1] if found else None

    def final_checkpoint(self) -> tuple[Path, Checkpoint]:
        """Return the newest checkpoint, which the ledger has to have signed.

        Raises:
            ForgetError: there's none. CheckpointError: it's damaged, or isn't one that the ledger has signed.
        """
        found = list_checkpoints(self.folder / "checkpoints")
        if not found:
            raise ForgetError(f"{self.folder} holds no checkpoint, so there are no weights to take anything out of.")
        checkpoint = read_checkpoint(found[0])
        if (checkpoint.step, checkpoint.signed_digest) not in self._signed():
            msg = f"{found[0]} isn't one that the ledger has signed. Put the run's own checkpoint back."
            raise CheckpointError(msg)
        return found[0], checkpoint

    def any_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint that's whole, to compare a recipe with; None where none is."""
        for path in list_checkpoints(self.folder / "checkpoints"):
            with suppress(CheckpointError):
                return read_checkpoint(path)
        return None

    def broken(self, promise: str) -> str:
        """Return why a promise isn't the run's, throughout; empty where it is.

        The record says it at the end, the last checkpoint where a kill came before that, and entry 0 and each
        amendment for the span that they begin.
        """
        said = {one.name: "" if one.holds else one.because for one in self.record.guarantees}
        if promise not in said:
            return f"the run promises no {promise}"
        if because := said[promise] or self._withdrawn.get(promise, ""):
            return f"{promise} was taken back: {because}"
        for tables in self.ledger.tables:
            lines = tables.details.get("plan") or []
            if not any(str(line).startswith(f"holds   {promise}:") for line in lines):
                step = getattr(tables.entry, "step", 0)
                return f"entry {tables.index} of the ledger (from step {step} on) doesn't promise {promise}"
        return ""

    @cached_property
    def _withdrawn(self) -> dict[str, str]:
        """What the newest checkpoint says was taken back, and why."""
        for path in list_checkpoints(self.folder / "checkpoints")[:1]:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return dict(json.loads((path / "state.json").read_text())["withdrawn"])
        return {}

    def artifacts(self) -> Iterator[dict[str, object]]:
        """Yield what was prepared before the run, as the ledger names it."""
        for one in self.ledger.tables[-1].artifacts.values():
            yield dict(one)

    def refuse_succeeded(self) -> None:
        """Refuse a run whose ledger another folder goes on with: there would be two ends of one log.

        Raises:
            ForgetError: it is such a run.
        """
        path = self.folder / SUCCEEDED
        if path.exists():
            by = json.loads(path.read_text())["by"]
            msg = (
                f"{self.folder} was succeeded by {by}, which goes on with its ledger. Ask that run to forget; a second "
                "successor would be a fork of one log."
            )
            if not Path(by).exists():
                msg += (
                    f" It isn't there: if it was deleted before anybody had its ledger, delete {path}, and ask again."
                )
            raise ForgetError(msg)


def _read_gone(folder: Path) -> dict[str, Any]:
    path = folder / "private" / _GONE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _ran(item: ScannedEntry, entry: StepEntry, tables: Tables, classes: frozenset[str]) -> bool:
    """Say whether a step ran rows of some classes, as far as an entry can tell: where it can't, it did."""
    details = decode_details(item.details) if item.details is not None else {}
    # Rows that were scored and not kept, or left out with their step, have had their say about the others.
    is_hidden = "kept_rows" in details or "left_out" in details
    if is_hidden and "cell_microbatches" in details:
        return True  # Of packs that weren't kept nothing says which classes were in them.
    return any(tables.class_of(cell, item) in classes and (cell.num_rows or is_hidden) for cell in entry.microbatches)
