"""The folder that goes on where a run is left: its ledger as it stands, a checkpoint, and an entry that says why.

The ledger is the run's own, and nothing in it is rewritten: a resume supersedes the steps that learnt the content, an
amendment says what stands in its place, and a checkpoint signs the state to begin from. Who has pinned the run's
ledger sees that the successor's goes on with it. The folder appears whole, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cosmati.core.state import parameter_root
from cosmati.errors import ForgetError
from cosmati.forget.holds import HOLDS
from cosmati.forget.past_run import CERTIFICATE, FORGOTTEN, Gone, PastRun, Start
from cosmati.ledger.details import details_digest
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE
from cosmati.ledger.sealing import KEY_FILE
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.attempts import read_lines
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EndEntry
from cosmati.storage.atomic import publish, replace_file, sync
from cosmati.train.observers.metrics import FILES
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, write_checkpoint
from cosmati.train.run.folder import SUCCEEDED

REQUEST = "forget.json"
"""In a successor's folder: what was asked of which run, and how it's done."""
EARLIER = "earlier"
"""In it: the runs that this one had succeeded, the last one first; requests of earlier releases don't name them."""
CERTIFICATES = "certificates"
DRAFT_NOTE, _DRAFT = "draft.json", ".draft"
"""In a run's folder while its successor is made: where that is, and how its name ends."""
OF_ROWS = (SALT_FILE, KEY_FILE, HOLDS)
"""Private files that go with the rows, whichever log tells of them."""


class Succession:
    """A successor's folder while it's made.

    Args:
        run: that it succeeds.
        out: where it goes.

    Raises:
        ForgetError: there's something else.
    """

    def __init__(self, run: PastRun, out: Path) -> None:
        run.refuse_succeeded()
        if out.exists():
            raise ForgetError(f"{out} is there already, and a deletion takes nobody's place. Give another --out.")
        self.run, self._out = run, out
        self.folder = draft_folder(run, out, ("operator.key", KEYS_FILE, *OF_ROWS))
        shutil.copytree(run.folder / "ledger", self.folder / "ledger")
        if (run.folder / CERTIFICATES).exists():
            shutil.copytree(run.folder / CERTIFICATES, self.folder / CERTIFICATES)

    def keep_record(self, step: int, *, whole: bool = False) -> None:
        """Take over what was measured before a step, and how microbatches were cut.

        Args:
            step: commits before it.
            whole: the run's own record too, since nothing is trained.
        """
        names = ("cuts.json", *(["run.json", "attempts.jsonl"] if whole else []))
        for name in names:
            if (self.run.folder / name).exists():
                shutil.copy2(self.run.folder / name, self.folder / name)
        for name in FILES:
            kept = [line for line in read_lines(self.run.folder / name) if float(line.get("step", step + 1)) <= step]
            if kept:
                (self.folder / name).write_text("".join(json.dumps(line) + "\n" for line in kept))

    def keep_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint to begin from."""
        (self.folder / "checkpoints").mkdir()
        publish_checkpoint(write_checkpoint(self.folder / "checkpoints", checkpoint), keep=1)

    def amend(
        self, start: Start, told: Mapping[str, Any], changes: list[list[str]], data_digest: str | None = None
    ) -> None:
        """Say in the ledger from which step on the run is another one, and what it begins from.

        Args:
            start: the step, and the tables in force there.
            told: what is forgotten, for the details.
            changes: for people: name, was, now.
            data_digest: of the data from now on; None leaves them.
        """
        details = {name: one for name, one in start.tables.details.items() if name not in ("changes", CERTIFICATE)}
        commitments = dict(start.tables.entry.commitments)
        if data_digest is not None:
            details.pop("data_text", None)  # It's what the digest of the data with the content is of.
            commitments["data"] = hashlib.sha256(data_digest.encode()).digest()
        details |= {FORGOTTEN: dict(told), "changes": changes}
        with writer_of(self.folder) as writer:
            writer.append(writer.resume_entry(start.step))
            entry = AmendEntry(start.step, tuple(sorted(commitments.items())), details_digest(details))
            writer.append(entry, details)
            if start.checkpoint is not None:
                root = parameter_root(start.checkpoint.model)
                writer.append(CheckpointEntry(start.step, start.checkpoint.signed_digest, root))
            writer.checkpoint()

    def publish(self, request: Mapping[str, Any], gone: Gone) -> None:
        """Put the folder in place, and note in the run's own that it's succeeded."""
        publish_folder(self.folder, self._out, request, gone, self.run.folder)
        note_succeeded(self.run.folder, self._out)


def draft_folder(run: PastRun, out: Path, private: Collection[str]) -> Path:
    """Make the folder that becomes `out`, with those of the run's private files that are named."""
    folder = out.with_name(f".{out.name}{_DRAFT}")
    # Of attempts that were killed, here or for another `out`: with them go copies of keys.
    for left in (folder, *_noted_draft(run.folder)):
        shutil.rmtree(left, ignore_errors=True)
    replace_file(run.folder / DRAFT_NOTE, json.dumps({"at": str(folder.resolve())}).encode())
    folder.mkdir(parents=True)
    (folder / "private").mkdir(mode=0o700)
    for name in filter(lambda one: (run.folder / "private" / one).exists(), private):
        shutil.copy2(run.folder / "private" / name, folder / "private" / name)
    return folder


def _noted_draft(run: Path) -> list[Path]:
    """Return the draft that a run's last deletion has left, if any."""
    try:
        draft = Path(json.loads((run / DRAFT_NOTE).read_text())["at"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [draft] if draft.name.startswith(".") and draft.name.endswith(_DRAFT) else []


def publish_folder(draft: Path, out: Path, request: Mapping[str, Any], gone: Gone, run: Path) -> None:
    """Put a folder in place, with what was asked and what has tombstones in it."""
    gone.keep(draft, str(request["told"]["asked"]), run)
    (draft / REQUEST).write_text(json.dumps(request, indent=1) + "\n")
    for path in (*draft.rglob("*"), draft):
        sync(path)
    publish(draft, out)
    (run / DRAFT_NOTE).unlink(missing_ok=True)


def note_succeeded(run: Path, out: Path) -> None:
    """Note in a run's folder which one goes on with its ledger."""
    replace_file(run / SUCCEEDED, json.dumps({"by": str(out.resolve())}).encode())


def writer_of(folder: Path) -> LedgerWriter:
    """Open the ledger of a run that nobody trains, to append."""
    name = read_verifier_key(folder / "ledger").name
    return LedgerWriter.open(folder / "ledger", key=load_or_create_key(folder / "private" / "operator.key", name=name))


def append_certified(folder: Path, told: Mapping[str, Any], changes: list[list[str]]) -> None:
    """Append an amendment that changes nothing but what is said, after the last step; an end stays the end."""
    run = PastRun(folder)
    tables, end = run.ledger.tables[-1], run.end()
    details = {**tables.details, CERTIFICATE: dict(told), "changes": changes}
    with writer_of(folder) as writer:
        was_over = writer.has_ended()
        writer.append(writer.resume_entry(run.num_steps))
        writer.append(AmendEntry(run.num_steps, tables.entry.commitments, details_digest(details)), details)
        if was_over and end is not None:
            writer.append(EndEntry(end.step, end.outcome, end.parameter_root))
        writer.checkpoint()
