"""Which entry may follow which, and which steps stand.

The writer asks before it appends and the verifier asks when it reads. That a step's cells follow from the tables in
force for it is asked when it's read (`tables`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cosmati.errors import LedgerError
from cosmati.ledger.entry import encode_entry
from cosmati.records.ledger import (
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    Entry,
    EvaluationEntry,
    KeyEntry,
    ResumeEntry,
    RunEntry,
    StepEntry,
    TimeEntry,
)


def content_of(step: bytes) -> bytes:
    """Return a digest of a step entry's bytes without its attempt: what a step that is run again should have again."""
    return hashlib.sha256(step[:10] + bytes(4) + step[14:]).digest()[:16]


class RunHistory:
    """Follows a log entry by entry.

    Attributes:
        size: Entries so far.
        attempt: The present attempt, 0 before any resume.
        has_ended: Whether the last entry is an end.
        in_force: The latest entry that commits: entry 0 or an amendment; None for an empty log.
        num_superseded: Step entries that a resume has superseded.
        num_confirmed: Superseded steps that were run again with equal content.
        diverged_steps: Numbers of those that were run again with another content, though nothing was amended.
        keys: The operator's public keys, the first and each that took the place of one; none where there was one only.
    """

    def __init__(self) -> None:
        self.size = 0
        self.attempt = 0
        self.has_ended = False
        self.in_force: RunEntry | AmendEntry | None = None
        self.keys: list[bytes] = []
        self._may_amend = False
        self.num_superseded = 0
        self.num_confirmed = 0
        self.diverged_steps: set[int] = set()
        self._indices: list[int] = []
        self._contents: list[bytes] = []
        self._superseded: dict[int, bytes] = {}
        self._may_differ: set[int] = set()

    @property
    def num_steps(self) -> int:
        """Number of steps that stand: 0 to `num_steps - 1`, without a gap."""
        return len(self._indices)

    def standing(self) -> frozenset[int]:
        """Return the entry indices of the steps that stand."""
        return frozenset(self._indices)

    def resume_entry(self, from_step: int) -> ResumeEntry:
        """Return the entry with which the run goes on at `from_step`.

        Raises:
            LedgerError: fewer steps than that stand.
        """
        if not 0 <= from_step <= self.num_steps:
            raise LedgerError(
                f"The run can't go on at step {from_step}: the ledger holds the steps up to "
                f"{self.num_steps}, not "
                "those between. Resume from a checkpoint of this ledger, or start a new run."
            )
        supersedes = self._indices[from_step] if from_step < self.num_steps else self.size
        return ResumeEntry(from_step, supersedes, self.attempt + 1)

    def append(self, entry: Entry) -> None:
        """Take the next entry.

        Raises:
            LedgerError: it may not stand here; nothing has changed then.
        """
        if isinstance(entry, RunEntry) != (self.size == 0):
            raise self._refuse("a run entry is entry 0, and only entry 0")
        if isinstance(entry, KeyEntry):  # Also after the end: who signs is no part of the run.
            self._append_key(entry)
            return
        if isinstance(entry, StepEntry):
            self.extend(entry.step, entry.attempt, entry.policy_digest, [content_of(encode_entry(entry))])
            return
        if self.has_ended and not isinstance(entry, ResumeEntry):
            raise self._refuse("after its end a run can only resume")
        if isinstance(entry, ResumeEntry):
            self._append_resume(entry)
        elif isinstance(entry, AmendEntry) and (not self._may_amend or entry.step != self.num_steps):
            raise self._refuse(
                f"an amendment from step {entry.step} on, and one stands right after a resume or another amendment and "
                f"says the steps that stand, {self.num_steps}"
            )
        elif isinstance(entry, CheckpointEntry) and entry.step > self.num_steps:
            raise self._refuse(f"a checkpoint after {entry.step} steps, and only {self.num_steps} stand")
        elif isinstance(entry, EvaluationEntry | TimeEntry) and entry.step > self.num_steps:
            what = "an evaluation" if isinstance(entry, EvaluationEntry) else "a time"
            raise self._refuse(f"{what} after {entry.step} steps, and only {self.num_steps} stand")
        elif isinstance(entry, EndEntry) and entry.step != self.num_steps:
            raise self._refuse(f"an end after {entry.step} steps, and {self.num_steps} stand")
        if isinstance(entry, RunEntry | AmendEntry):
            self.in_force = entry
            self._may_differ.update(self._superseded)
        self._may_amend = isinstance(entry, ResumeEntry | AmendEntry)
        self.has_ended = isinstance(entry, EndEntry)
        self.size += 1

    def _refuse(self, reason: str) -> LedgerError:
        return LedgerError(
            f"Entry {self.size} doesn't fit: {reason}. See cosmati.records.ledger for what may follow what."
        )

    def _append_key(self, entry: KeyEntry) -> None:
        if self.keys and entry.old_key != self.keys[-1]:
            raise self._refuse("the key that hands over isn't the one that signs")
        if entry.new_key in (entry.old_key, *self.keys):
            raise self._refuse("a key takes over that has signed before")
        self.keys += [entry.new_key] if self.keys else [entry.old_key, entry.new_key]
        self.size += 1

    def extend(self, step: int, attempt: int, policy_digest: bytes, contents: Sequence[bytes]) -> None:
        """Take steps that follow one another.

        Args:
            step: number of the first.
            attempt: of all of them.
            policy_digest: likewise.
            contents: a digest of each (`content_of`).

        Raises:
            LedgerError: they may not stand here; nothing has changed then.
        """
        if self.in_force is None:
            raise self._refuse("a run entry is entry 0, and only entry 0")
        if self.has_ended:
            raise self._refuse("after its end a run can only resume")
        if step != self.num_steps or attempt != self.attempt:
            raise self._refuse(
                f"it is step {step} of attempt {attempt}, where step {self.num_steps} of attempt "
                f"{self.attempt} must follow"
            )
        committed = dict(self.in_force.commitments).get("policy", policy_digest)
        if committed != policy_digest:
            raise self._refuse(
                f"step {step} went by the policy {policy_digest.hex()[:16]}, and {committed.hex()[:16]} is "
                "in force: a policy changes by an amendment"
            )
        if self._superseded:
            for number, content in enumerate(contents, step):
                before = self._superseded.pop(number, None)
                if before == content:
                    self.num_confirmed += 1
                elif before is not None and number not in self._may_differ:
                    self.diverged_steps.add(number)
        self._indices.extend(range(self.size, self.size + len(contents)))
        self._contents.extend(contents)
        self._may_amend = False
        self.size += len(contents)

    def _append_resume(self, entry: ResumeEntry) -> None:
        expected = self.resume_entry(entry.from_step)
        first = self._indices[entry.from_step - 1] + 1 if entry.from_step else 1
        if entry.attempt != expected.attempt or not first <= entry.supersedes <= expected.supersedes:
            raise self._refuse(
                f"a resume at step {entry.from_step} is attempt {expected.attempt} and supersedes the "
                "steps from entry "
                f"{expected.supersedes} on, and this one says {entry.attempt} and {entry.supersedes}"
            )
        self._superseded.update(
            zip(range(entry.from_step, self.num_steps), self._contents[entry.from_step :], strict=True)
        )
        self._may_differ.difference_update(range(entry.from_step, self.num_steps))
        self.num_superseded += self.num_steps - entry.from_step
        self.attempt = entry.attempt
        del self._indices[entry.from_step :], self._contents[entry.from_step :]
