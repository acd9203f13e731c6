"""Entries of the learning-dynamics ledger, and the contract of the details beside them.

Steps count from 0, as in the position `(seed, step, microbatch)`. Wherever a *number of steps done* is meant
(resume, checkpoint, end), it is also the number of the next step.

A ledger is one run: entry 0 is a `RunEntry`; then steps without a gap, checkpoints between them, and an end.
A run that goes on after a crash appends a `ResumeEntry`; nothing is rewritten. A run may also resume
after its end. Where it then commits to something else (another policy, a longer budget), an `AmendEntry` follows.

*In force* for an entry is the latest `RunEntry` or `AmendEntry` before it, in the order of the log: a resume that goes
back behind an amendment leaves it in force, until another one says otherwise. The ids of a step are indices into the
tables in force for it. Tables may name other classes and regions than those before, so readers join them by name.

Details are JSON objects beside the tree, one line each in `details.jsonl`, in the order of their entries,
canonical by RFC 8785. An entry commits to its line by SHA-256; `NO_DETAILS` says that there is none. JSON has
no NaN and no infinity: write null. Integers over 2**53 are written as strings.

Details of entry 0::

    {"classes": [name, ...], "regions": [name, ...],
     "routes": [[weight per region], ...],                 indexed by MicrobatchCell.route_id
     "phases": [[name, start_step, end_step], ...],
     "policy": [[[[weight per region] per phase], [decision per phase]], ...],   by class; [] without a policy
     "bands": [name, ...],      of a policy that tells kinds of a class's rows apart, by band and by grades: each class
                                then has an entry in "policy" for each of them
     "kinds": [[band, {measure: grade}], ...],  where they have grades: what each of them is
     "seed": int, ...}                                     any other JSON besides

Where something was prepared before the run (a tokenizer, base weights), they have, and commit to as `artifacts`::

    {"artifacts": [{"kind": str, "name": str, "digest": hex or "", "origin": str, "state": "signed" | "ungoverned",
                    "provenance": {...} where it's signed}, ...], ...}

Details of an amendment are those of entry 0, as they are from now on, with one more field::

    {"changes": [[name, was, now], ...], ...}              texts, for people

Where those who vouch for the data have taken something back, such details say from then on what is in force::

    {"withdrawn": {"seen": ISO 8601, "in_force": [{"target": str, "class": name, "reason": str, "because": str,
                   "action": "stop" | "reject" | "skip", "step": int, "of": str, "root": hex, "deletion": str}, ...],
                   "archive": {name: SHA-256, ...}}, ...}

From `step` on the rows of a rejected class are rejected, in every later table too; no step stands at or after a stop;
data that are skipped aren't evaluated on. "of" is empty of data, `policy`, or the label of an artifact, whose rows
nobody rejects; "root" is that of the authority; "deletion" says how what it taught is deleted. An earlier release
says none of these.

Where a run had to forget something, an amendment's changes name `forgotten`, and its details say what the steps from
then on don't have, and which tree had it; the changes of a later one name `certificate`, and its details the digest of
the certificate (`cosmati.forget.certificate`)::

    {"forgotten": {"asked": keyed digest, "classes": [name, ...], "num_rows": int, "method": str, "from_step": int,
                   "succeeds": {"tree_size": int, "root": hex}}, ...}
    {"certificate": {"digest": hex, "asked": keyed digest, "method": str, "strength": str}, ...}

Details of a step (a microbatch whose norm is off its cadence is absent from "gradient_norm")::

    {"step": int,
     "gradient_norm": {"<microbatch index>": [norm per region; null where the gradient is absent], ...},
     "update_norm": [norm per region; null where absent] | null,
     "loss": float | null,
     "direction": {...}, "entropy": {...}, "update_direction": [...], "region_digests": {...},   see `ledger.learning`
     "sub_steps": [{"regions": [index, ...], "weights": [weight per microbatch]}, ...],
     "kept_rows": {"<microbatch index>": [slot, ...], ...}, ...}

Where rows are packs whose tokens have classes of their own, a microbatch has one cell for each class in it: the cells
are those of the first microbatch, then of the second, and so on. Its cell says how many documents of the class took
part, their commitment, the class's route, and the part of the microbatch's weight that the class's labels are; a class
whose tokens were left out has none of these. The details of such a step have::

    {"cell_microbatches": [microbatch index of each cell],
     "packed_gradient_norm": {"<microbatch index>": [norm per region], ...}, ...}

and "gradient_norm", "direction", "entropy" and the weights of "sub_steps" are by cell. What was measured of a
microbatch of several classes is of none of them, and has "packed_" before its name. "kept_rows" stays by microbatch.

"sub_steps" says which regions had a parameter that learnt in each sub-step (the others were frozen), and what each
microbatch weighed in it. It is absent where there was one, in which all learnt by the cells' weights.

Details of an evaluation::

    {"step": int, "metrics": {name: float | null, ...}, "weights": "trained" | "averaged"}

Where witnesses cosign the ledger's checkpoints, entry 0 (and each amendment) has, and commits to as `witnessing`::

    {"witnessing": {"profile": "self" | "attested", "witnesses": [verifier key, ...], "quorum": int}, ...}

Where classes are sensitive, entry 0 says which, and a step has boxes in place of their values (`ledger.sealing`)::

    {"sealed": {"classes": [name, ...], "block_steps": int, "key": hex}}, {"sealed": {"<class>": {"<column>": base64}}}

"kept_rows" has the microbatches of which a method selected rows: the slots, from 0, of the rows that took part, among
those that the data's order gave. A row commitment is over these, in this order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from cosmati.errors import LedgerError

DIGEST_SIZE = 32
SIGNATURE_SIZE = 64
NO_DETAILS = bytes(DIGEST_SIZE)
_TEXT_LIMIT = 1024


class EntryKind(IntEnum):
    """What an entry records."""

    RUN = 0
    STEP = 1
    RESUME = 2
    CHECKPOINT = 3
    END = 4
    AMEND = 5
    EVALUATION = 6
    TIME = 7
    KEY = 8


RESERVED_KINDS = dict(enumerate(("memorization", "privacy", "retention", "inference", "merging"), 16))
"""Kinds whose numbers are taken, and that no release writes yet."""


def _check_digests(**digests: bytes) -> None:
    for name, value in digests.items():
        if type(value) is not bytes or len(value) != DIGEST_SIZE:
            raise LedgerError(
                f"{name} must be {DIGEST_SIZE} bytes and is {value!r:.80}. Give a SHA-256 or BLAKE3 digest."
            )


def _check_counts(bits: int, **counts: int) -> None:
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < 1 << bits:
            raise LedgerError(f"{name} must be an integer from 0 to 2**{bits} - 1 and is {value!r:.80}. Correct it.")


def _check_texts(**texts: str) -> None:
    for name, value in texts.items():
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            size = 0
        if not 0 < size <= _TEXT_LIMIT:
            raise LedgerError(f"{name} must be 1 to {_TEXT_LIMIT} bytes of UTF-8 and is {value!r:.80}. Change it.")


def _check_commitments(commitments: tuple[tuple[str, bytes], ...]) -> None:
    for name, digest in commitments:
        _check_texts(commitment=name)
        _check_digests(**{name: digest})
    if len({name for name, _ in commitments}) != len(commitments):
        raise LedgerError("Two commitments have one name, so a reader can't tell them apart. Rename one.")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Entry 0: what the run commits to before its first step.

    Attributes:
        run_id: Name of the run.
        commitments: Name and 32-byte digest of the recipe, plan, policy, taxonomy, data, model, environment,
            seed.
        details_digest: SHA-256 of the details line, which holds the tables of names.
    """

    run_id: str
    commitments: tuple[tuple[str, bytes], ...]
    details_digest: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_texts(run_id=self.run_id)
        _check_digests(details_digest=self.details_digest)
        _check_commitments(self.commitments)


@dataclass(frozen=True, slots=True)
class AmendEntry:
    """From here on the run commits to something else. It stands right after a resume, or after another amendment.

    Attributes:
        step: Number of steps that stand: the first step that it's in force for.
        commitments: As those of `RunEntry`, all of them, changed or not.
        details_digest: SHA-256 of the details line, which holds the tables of names from now on.
    """

    step: int
    commitments: tuple[tuple[str, bytes], ...]
    details_digest: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step)
        _check_digests(details_digest=self.details_digest)
        _check_commitments(self.commitments)


@dataclass(frozen=True, slots=True)
class MicrobatchCell:
    """One microbatch of a step, or where rows are packs one class in it.

    Attributes:
        class_id: Index into the class names in force.
        band: Band of the rows within their class.
        phase: Index into the phases in force.
        route_id: Index into the routes in force: which weight each region gave these rows.
        num_rows: Rows that took part; tombstones don't count. Of packs, documents.
        weight: What the mean divides by (rows, tokens, positives); finite and not negative.
        row_commitment: 32-byte commitment to the rows, in order.
    """

    class_id: int
    band: int
    phase: int
    route_id: int
    num_rows: int
    weight: float
    row_commitment: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(32, class_id=self.class_id, route_id=self.route_id, num_rows=self.num_rows)
        _check_counts(16, band=self.band, phase=self.phase)
        _check_digests(row_commitment=self.row_commitment)
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise LedgerError(f"weight must be finite and not negative and is {self.weight!r}. Correct it.")


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One committed step.

    Attributes:
        step: Number of the step, from 0.
        attempt: 0 for a run's first process, one more for each resume.
        policy_digest: Digest of the policy in force.
        details_digest: SHA-256 of the details line.
        parameter_root: Root over the parameters after the step, on its cadence.
        microbatches: In the order of their index.
    """

    step: int
    attempt: int
    policy_digest: bytes
    details_digest: bytes
    parameter_root: bytes | None
    microbatches: tuple[MicrobatchCell, ...]

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step)
        _check_counts(32, attempt=self.attempt)
        _check_digests(policy_digest=self.policy_digest, details_digest=self.details_digest)
        if self.parameter_root is not None:
            _check_digests(parameter_root=self.parameter_root)


@dataclass(frozen=True, slots=True)
class ResumeEntry:
    """The run goes on from an earlier state.

    Attributes:
        from_step: Number of steps that stand: the first step of the new attempt.
        supersedes: Number of entries that stand. Steps with a number of at least `from_step` at or after this
            index, and before this entry, are superseded.
        attempt: One more than the attempt before.
    """

    from_step: int
    supersedes: int
    attempt: int

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, from_step=self.from_step, supersedes=self.supersedes)
        _check_counts(32, attempt=self.attempt)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A model checkpoint.

    Attributes:
        step: Number of steps done.
        state_digest: Digest of the whole training state.
        parameter_root: Root over the parameters.
    """

    step: int
    state_digest: bytes
    parameter_root: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step)
        _check_digests(state_digest=self.state_digest, parameter_root=self.parameter_root)


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The end of the run.

    Attributes:
        step: Number of steps done.
        outcome: How it ended: `completed`, `stopped`.
        parameter_root: Root over the parameters as they are handed over.
    """

    step: int
    outcome: str
    parameter_root: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step)
        _check_texts(outcome=self.outcome)
        _check_digests(parameter_root=self.parameter_root)


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """What was measured of the model.

    Attributes:
        step: Number of steps done.
        parameter_root: Root over parameters and buffers as they were measured, averages where these stood in.
        details_digest: SHA-256 of the details line, which holds names and values.
    """

    step: int
    parameter_root: bytes
    details_digest: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step)
        _check_digests(parameter_root=self.parameter_root, details_digest=self.details_digest)


@dataclass(frozen=True, slots=True)
class TimeEntry:
    """What the operator's clock said when so many steps were done; it may go back, and nobody else has seen it.

    Attributes:
        step: Number of steps done.
        seconds: Since 1970.
    """

    step: int
    seconds: int

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_counts(64, step=self.step, seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """From here on the operator signs with another key. Both keys sign it (`cosmati.ledger.rotation`).

    Attributes:
        old_key: Ed25519 public key, 32 bytes, that signed until here.
        new_key: The one that signs the tree with this entry, and all later ones.
        old_signature: 64 bytes.
        new_signature: 64 bytes.
    """

    old_key: bytes
    new_key: bytes
    old_signature: bytes
    new_signature: bytes

    def __post_init__(self) -> None:
        """Refuse what the log can't hold."""
        _check_digests(old_key=self.old_key, new_key=self.new_key)
        for value in (self.old_signature, self.new_signature):
            if type(value) is not bytes or len(value) != SIGNATURE_SIZE:
                raise LedgerError(
                    f"A signature must be {SIGNATURE_SIZE} bytes and is {value!r:.80}. Sign with Ed25519."
                )


Entry: TypeAlias = (
    RunEntry
    | StepEntry
    | ResumeEntry
    | CheckpointEntry
    | EndEntry
    | AmendEntry
    | EvaluationEntry
    | TimeEntry
    | KeyEntry
)
