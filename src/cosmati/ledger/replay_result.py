"""The file that says what a replay has found, and the evidence level that it reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import rfc8785

from cosmati.errors import LedgerError
from cosmati.records.foreign_json import read_foreign_json

KIND, VERSION = "cosmati replay", 1
LEVEL_REPLAYED = "L0: replayed; the ledger's head wasn't witnessed before, so its operator may have chosen it"
LEVEL_2 = "L2: steps chosen after the ledger's head was witnessed were replayed"
LEVEL_3 = "L3: the whole run was replayed"
BUT_ROWS = "equal, rows not compared"
BUT_FORGOTTEN = "equal, forgotten rows not compared"
"""Outcomes of segments of which not all row commitments were compared: here, or by anybody."""
NO_LEVEL = "none: not every digest was compared and equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult:
    """What became of a segment.

    Attributes:
        first: number of its first step.
        end: of the first one after it.
        start: from which step on it was replayed: a checkpoint's, or 0.
        from_entry_0: it began with the model that the recipe makes, and trusts no checkpoint.
        outcome: as `ReplayFound.outcome` says it.
        num_differences: in its steps and those before it since the start.
        differences: the first of them, in words.
    """

    first: int
    end: int
    start: int
    from_entry_0: bool
    outcome: str
    num_differences: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay of one or several segments found, for a file. It has no time in it: who replays writes it again.

    Attributes:
        origin: name of the log.
        vkey: the operator's key.
        size: entries that the head covers.
        root: of the tree, in hex.
        num_steps: that stand.
        has_ended: the run's end is among the entries.
        is_witnessed: a witness cosigned the head before the segments were chosen.
        seed: the auditor's; empty where somebody has named the steps.
        segments: in the order of steps.
        compares_rows: whether row commitments were compared.
        skipped: names of details that couldn't be compared.
        doubts: why a difference would say nothing.
        environment: in which it was replayed.
    """

    origin: str
    vkey: str
    size: int
    root: str
    num_steps: int
    has_ended: bool
    is_witnessed: bool
    seed: str
    segments: tuple[SegmentResult, ...]
    compares_rows: bool
    skipped: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """The evidence level of it, in words: for whoever has run it, and who believes them."""
        if not self.segments or any(one.outcome != "equal" for one in self.segments):
            return NO_LEVEL
        whole = [one for one in self.segments if one.from_entry_0 and (one.first, one.end) == (0, self.num_steps)]
        if whole and self.has_ended:
            return LEVEL_3
        return LEVEL_2 if self.is_witnessed and self.seed else LEVEL_REPLAYED

    def to_bytes(self) -> bytes:
        """Return the file's content: canonical JSON (RFC 8785) and a newline."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return rfc8785.dumps(told | {"kind": KIND, "version": VERSION, "evidence_level": self.level}) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayResult:
        """Read a result.

        Raises:
            LedgerError: it is none, or says another level than its segments give.
        """
        try:
            told = read_foreign_json(data)
            kind, version, _ = (told.pop(name) for name in ("kind", "version", "evidence_level"))
            segments = [SegmentResult(**one | {"differences": (*one["differences"],)}) for one in told["segments"]]
            texts = {name: tuple(told[name]) for name in ("skipped", "doubts")}
            found = cls(**told | texts | {"segments": tuple(segments)})
            is_changed = (kind, version) != (KIND, VERSION) or found.to_bytes() != data  # its level, too
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(f"This is no result of a replay: {error!r}. Take what --out has written.") from error
        if is_changed:
            raise LedgerError("This result of a replay was changed, or another release wrote it. Replay again.")
        return found
