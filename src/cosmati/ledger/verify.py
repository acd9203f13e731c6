"""Checks a whole ledger: signature, key, tiles of all levels, root, details, order of the entries, steps by policy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.cosigned import cosigned_heads
from cosmati.ledger.evidence import LEVEL_0, NOBODY, TrustedEvidence, WitnessedHead, Witnessing
from cosmati.ledger.files import check_overlap
from cosmati.ledger.history import RunHistory
from cosmati.ledger.note import TreeHead, VerifierKey, check_note, parse_checkpoint
from cosmati.ledger.policy_changes import PolicyHistory, PolicyInForce
from cosmati.ledger.profile import OPERATOR_ALONE, LedgerProfile, lapses
from cosmati.ledger.reader import Scan, ScannedEntry, operators, operators_of, read_head, read_verifier_key
from cosmati.ledger.tables import Tables, broken, in_force
from cosmati.ledger.wal import WAL_FILE, read_wal
from cosmati.records.ledger import AmendEntry, RunEntry, StepEntry, TimeEntry

__all__ = ["LEVEL_0", "LedgerReport", "verify_ledger"]

Told = tuple[int, Mapping[str, Any] | None]
"""From which step on what is said."""


@dataclass(frozen=True, slots=True)
class Amendment:
    """From `step` on the run committed to something else; each change is a name, what was, and what is now."""

    step: int
    changes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What a verified ledger holds. There is a report only where nothing was wrong.

    Attributes:
        origin: The log's name.
        key_id: Id of the operator's key, 8 hexadecimal digits. Compare the whole key with one that you got
            elsewhere.
        size: Entries that the checkpoint covers.
        root: Root hash, 64 hexadecimal digits.
        num_steps: Steps that stand.
        num_attempts: 1, and one more for each resume; 0 for an empty ledger.
        num_superseded: Step entries that a resume superseded.
        num_confirmed: Superseded steps that were run again with equal content.
        diverged_steps: Superseded steps that were run again with another content though nothing was amended, in order.
        amendments: What the run changed by name, in the order of the log.
        has_ended: Whether the last entry is the run's end.
        num_unsigned: Entries beyond the checkpoint in the write-ahead log: not signed, not checked.
        pinned_size: Size of the earlier checkpoint that was found to be a prefix, None without one.
        evidence_level: What the report shows at most.
        provenance_from: From which step on who vouched for the data, as entry 0 and each amendment that changes it say
            it, in the order of the log; None where nobody was asked.
        withdrawn_from: Likewise, what was withdrawn since; None where nothing is in force.
        policies: Those that the steps went by, in the order of the log.
        artifacts_from: Likewise, what was prepared before the run, by its labels; None where nothing is named.
        keys: The operator's, the oldest first: the last one signs now.
        witnessed: What the witnesses whom the asker trusts had seen; None where none was asked for.
        profile: Under which the run keeps its ledger.
        lapses: Where an attested run went on without its witnesses, a line each.
        clock: What the operator's clock said first and last, in seconds since 1970; None where it wasn't logged.
        clock_went_back: Whether it did between the two.
    """

    origin: str
    key_id: str
    size: int
    root: str
    num_steps: int
    num_attempts: int
    num_superseded: int
    num_confirmed: int
    diverged_steps: tuple[int, ...]
    amendments: tuple[Amendment, ...]
    has_ended: bool
    num_unsigned: int
    pinned_size: int | None
    evidence_level: str
    provenance_from: tuple[Told, ...]
    withdrawn_from: tuple[Told, ...]
    policies: tuple[PolicyInForce, ...]
    artifacts_from: tuple[Told, ...]
    keys: tuple[VerifierKey, ...]
    witnessed: WitnessedHead | None
    profile: LedgerProfile
    lapses: tuple[str, ...]
    clock: tuple[int, int] | None
    clock_went_back: bool

    @property
    def provenance(self) -> tuple[Mapping[str, Any], ...]:
        """Who vouched for the data, where somebody did."""
        return tuple(facts for _, facts in self.provenance_from if facts is not None)

    @property
    def withdrawn(self) -> tuple[Mapping[str, Any], ...]:
        """What was withdrawn, where something was."""
        return tuple(facts for _, facts in self.withdrawn_from if facts is not None)

    @property
    def vouched_facts(self) -> tuple[Mapping[str, Any], ...]:
        """What was ever said of who vouches: for what was prepared, for policies, for data."""
        named = [one for _, told in self.artifacts_from for one in (told or {}).values()]
        prepared = [one["provenance"] for one in named if "provenance" in one]
        return (*prepared, *(one.facts for one in self.policies if one.facts is not None), *self.provenance)

    @property
    def manifests(self) -> dict[str, str]:
        """SHA-256 of the manifest of all that was ever vouched for, by its target and by `ROOT/TARGET`."""
        every = [one for facts in self.vouched_facts for one in facts["sources"]]
        by_target = {one["target"]: one["manifest_sha256"] for one in every}
        return by_target | {f"{one['root']}/{one['target']}": one["manifest_sha256"] for one in every}


def verify_ledger(
    directory: Path,
    *,
    vkey: str | None = None,
    pinned: TreeHead | str | None = None,
    witnesses: TrustedEvidence = NOBODY,
) -> LedgerReport:
    """Check all that the checkpoint covers, and report.

    Args:
        directory: the ledger's.
        vkey: the operator's verifier key from a source that you trust; without it the ledger's own is
            believed.
        pinned: an earlier tree head, or the text of an earlier `checkpoint` file, which must be a prefix.
        witnesses: whom you trust to have seen the ledger, and what was replayed of it: both must be a prefix, too.

    Raises:
        LedgerError: there is no ledger, `vkey` is no key, or `pinned` no note. TamperError: something doesn't
        verify; the message says what and where.
    """
    key = read_verifier_key(directory, vkey)
    # Before the checkpoint: a live writer replaces the log after it, so an honest one is never ahead of it.
    witnessing = Witnessing(directory, witnesses)
    wal = read_wal(directory) if (directory / WAL_FILE).exists() else None
    head = read_head(directory, key)
    earlier = _read_pinned(directory, pinned, key)
    roots = [*witnessing.heads, *([] if earlier is None else [earlier]), *([] if wal is None else [wal.head])]
    covered = {} if wal is None else wal.entries
    told, history = _read(directory, head, roots, covered)
    keys = operators(history, key)
    witnessing.check(keys)
    return LedgerReport(
        origin=key.name,
        key_id=key.key_id.hex(),
        size=head.size,
        root=head.root.hex(),
        num_steps=history.num_steps,
        num_attempts=history.attempt + 1 if head.size else 0,
        num_superseded=history.num_superseded,
        num_confirmed=history.num_confirmed,
        diverged_steps=tuple(sorted(history.diverged_steps)),
        amendments=tuple(told.amendments),
        has_ended=history.has_ended,
        num_unsigned=sum(index >= head.size for index in covered),
        pinned_size=None if earlier is None else earlier.size,
        evidence_level=witnessing.level(head.size),
        provenance_from=tuple(told.provenance),
        withdrawn_from=tuple(told.withdrawn),
        policies=tuple(told.policies.seen),
        artifacts_from=tuple(told.prepared),
        keys=keys,
        witnessed=witnessing.witnessed,
        profile=told.profile,
        lapses=told.lapses(directory, head, has_ended=history.has_ended),
        clock=(told.times[0], told.times[-1]) if told.times else None,
        clock_went_back=told.times != sorted(told.times),
    )


def _read(
    directory: Path, head: TreeHead, roots: list[TreeHead], covered: dict[int, bytes]
) -> tuple[_Told, RunHistory]:
    """Read all entries, steps many at once; what's refused there is for the careful reader to judge, and to name."""
    try:
        return _read_columns(ColumnScan(directory, head, roots), covered)
    except TamperError:
        told, scan = _Told(), Scan(directory, head, roots)
        for item, tables in in_force(scan):
            check_overlap(covered, item.index, item.data)
            told.take(item, tables)
        return told, scan.history


def _read_columns(scan: ColumnScan, covered: dict[int, bytes]) -> tuple[_Told, RunHistory]:
    told = _Told()
    for one in scan.blocks():
        if isinstance(one, StepBlock):
            for index in covered.keys() & set(range(one.first, one.first + len(one.data))):
                check_overlap(covered, index, one.data[index - one.first])
            told.take_steps(one.first)
        else:
            check_overlap(covered, one.index, one.data)
            assert scan.tables is not None, "the history refuses anything else than a run entry as entry 0"
            told.take(one, scan.tables)
    return told, scan.history


class _Told:
    """What entries say on the way through a ledger."""

    def __init__(self) -> None:
        self.amendments = list[Amendment]()
        self.provenance, self.withdrawn, self.prepared = list[Told](), list[Told](), list[Told]()
        self.policies = PolicyHistory()
        self.profile = OPERATOR_ALONE
        self.first_step: int | None = None
        self.times = list[int]()

    def lapses(self, directory: Path, head: TreeHead, *, has_ended: bool) -> tuple[str, ...]:
        kept = cosigned_heads(directory, self.profile.witnesses)
        return tuple(lapses(self.profile, kept, first_step=self.first_step, size=head.size, has_ended=has_ended))

    def take(self, item: ScannedEntry, tables: Tables) -> None:
        if isinstance(item.entry, StepEntry):
            self.take_steps(item.index)
        elif isinstance(item.entry, TimeEntry):
            self.times.append(item.entry.seconds)
        elif isinstance(item.entry, RunEntry | AmendEntry):
            self._take_tables(item, tables)
        if isinstance(item.entry, AmendEntry):
            self.amendments.append(Amendment(item.entry.step, tables.changes))

    def take_steps(self, first: int) -> None:
        """Take steps of which the first is at this index."""
        if self.first_step is None:
            self.first_step = first

    def _take_tables(self, item: ScannedEntry, tables: Tables) -> None:
        step = getattr(item.entry, "step", 0)
        given = tables.details.get("provenance"), tables.details.get("withdrawn"), tables.artifacts or None
        for told, facts in zip((self.provenance, self.withdrawn, self.prepared), given, strict=True):
            if not told or told[-1][1] != facts:
                told.append((step, facts))
        self.policies.take(step, tables)
        try:
            self.profile = LedgerProfile.of(tables.details)
        except LedgerError as error:
            raise broken(item, str(error)) from error


def _read_pinned(directory: Path, pinned: TreeHead | str | None, key: VerifierKey) -> TreeHead | None:
    if not isinstance(pinned, str):
        return pinned
    check_note(pinned.encode(), "The pinned checkpoint")
    try:
        return parse_checkpoint(pinned.encode(), key)
    except TamperError as error:
        for earlier in operators_of(directory, key)[:-1]:
            with suppress(TamperError):
                return parse_checkpoint(pinned.encode(), earlier)
        raise TamperError(f"The pinned checkpoint: {error}") from error
