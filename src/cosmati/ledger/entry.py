"""Bytes of ledger entries: fixed binary, versioned, big-endian, one encoding for each entry.

    every entry    version u8 = 1, kind u8
    RUN            run_id text, details_digest 32, count u16, count x (name text, digest 32)
    STEP           step u64, attempt u32, policy_digest 32, details_digest 32, has_root u8,
                   parameter_root 32 if has_root, count u16, count x (class_id u32, band u16, phase u16,
                   route_id u32, num_rows u32, weight f64, row_commitment 32)
    RESUME         from_step u64, supersedes u64, attempt u32
    CHECKPOINT     step u64, state_digest 32, parameter_root 32
    END            step u64, parameter_root 32, outcome text
    AMEND          step u64, details_digest 32, count u16, count x (name text, digest 32)
    EVALUATION     step u64, parameter_root 32, details_digest 32
    TIME           step u64, seconds u64
    KEY            old_key 32, new_key 32, old_signature 64, new_signature 64
    text           length u16, UTF-8

A step of 8 microbatches takes 529 bytes, or 561 with a parameter root.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TypeAlias

from cosmati.errors import LedgerError, TamperError
from cosmati.records.ledger import (
    DIGEST_SIZE,
    RESERVED_KINDS,
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    Entry,
    EntryKind,
    EvaluationEntry,
    KeyEntry,
    MicrobatchCell,
    ResumeEntry,
    RunEntry,
    StepEntry,
    TimeEntry,
)

ENTRY_VERSION = 1
MAX_ENTRY_SIZE = 65_535
_HEAD = struct.Struct(">BB")
_COUNT = struct.Struct(">H")
_STEP = struct.Struct(">QI32s32sB")
_CELL = struct.Struct(">IHHIId32s")
_END = struct.Struct(">Q32s")
_AMEND = struct.Struct(">Q32s")
_Flat: TypeAlias = type[ResumeEntry | CheckpointEntry | EvaluationEntry | TimeEntry | KeyEntry]
_FLAT: dict[EntryKind, tuple[_Flat, struct.Struct]] = {
    EntryKind.RESUME: (ResumeEntry, struct.Struct(">QQI")),
    EntryKind.CHECKPOINT: (CheckpointEntry, struct.Struct(">Q32s32s")),
    EntryKind.EVALUATION: (EvaluationEntry, struct.Struct(">Q32s32s")),
    EntryKind.TIME: (TimeEntry, struct.Struct(">QQ")),
    EntryKind.KEY: (KeyEntry, struct.Struct(">32s32s64s64s")),
}
"""Entries whose fields are all of a fixed size, in their order."""


def encode_entry(entry: Entry) -> bytes:
    """Return the bytes of an entry, at most 65,535.

    Raises:
        LedgerError: the entry is longer than that.
    """
    kind, body = _encode_body(entry)
    data = _HEAD.pack(ENTRY_VERSION, kind) + body
    if len(data) > MAX_ENTRY_SIZE:
        raise LedgerError(
            f"An entry of {len(data)} bytes doesn't fit: tlog-tiles allows {MAX_ENTRY_SIZE}, which is "
            "about 1,160 "
            "microbatches. Use fewer microbatches a step."
        )
    return data


def decode_entry(data: bytes) -> Entry:
    """Read an entry; `decode_entry(encode_entry(e)) == e`, and no other bytes are accepted.

    Raises:
        TamperError: unknown version or kind, wrong length, or a field that no entry can have.
    """
    fields = _Fields(data)
    version, kind = fields.take(_HEAD)
    if version != ENTRY_VERSION:
        raise TamperError(
            f"The entry has version {version} and this release reads version {ENTRY_VERSION}. "
            "Read it with the release of Cosmati that wrote it, or restore the ledger."
        )
    try:
        entry = _decode_body(kind, fields)
    except TamperError:
        raise
    except (LedgerError, UnicodeDecodeError) as error:
        raise TamperError(f"The entry holds a field that no entry can have: {error} Restore the ledger.") from error
    if fields.left():
        raise TamperError(f"{fields.left()} bytes follow the entry's end. Restore the ledger from a copy.")
    return entry


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return _COUNT.pack(len(data)) + data


def _count(items: tuple[object, ...]) -> bytes:
    if len(items) > MAX_ENTRY_SIZE:
        raise LedgerError(f"An entry can't hold {len(items)} items: tlog-tiles allows 65,535 bytes. Use fewer.")
    return _COUNT.pack(len(items))


def _encode_body(entry: Entry) -> tuple[EntryKind, bytes]:
    if isinstance(entry, StepEntry):
        root = entry.parameter_root
        head = _STEP.pack(entry.step, entry.attempt, entry.policy_digest, entry.details_digest, root is not None)
        cells = (
            _CELL.pack(m.class_id, m.band, m.phase, m.route_id, m.num_rows, m.weight, m.row_commitment)
            for m in entry.microbatches
        )
        return EntryKind.STEP, b"".join((head, root or b"", _count(entry.microbatches), *cells))
    if isinstance(entry, RunEntry):
        return EntryKind.RUN, _text(entry.run_id) + entry.details_digest + _encode_commitments(entry.commitments)
    if isinstance(entry, AmendEntry):
        head = _AMEND.pack(entry.step, entry.details_digest)
        return EntryKind.AMEND, head + _encode_commitments(entry.commitments)
    for kind, (form, fields) in _FLAT.items():
        if isinstance(entry, form):
            return kind, fields.pack(*(getattr(entry, field.name) for field in dataclasses.fields(entry)))
    assert isinstance(entry, EndEntry), "there's no other"
    return EntryKind.END, _END.pack(entry.step, entry.parameter_root) + _text(entry.outcome)


def _encode_commitments(commitments: tuple[tuple[str, bytes], ...]) -> bytes:
    return b"".join((_count(commitments), *(_text(name) + digest for name, digest in commitments)))


class _Fields:
    """Takes fields off the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def left(self) -> int:
        """Return the number of bytes not taken yet."""
        return len(self._data) - self._position

    def raw(self, size: int) -> bytes:
        """Take `size` bytes."""
        if size > self.left():
            raise TamperError(f"The entry is cut short: {size} bytes wanted, {self.left()} left. Restore the ledger.")
        self._position += size
        return self._data[self._position - size : self._position]

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        """Take integers of a fixed form."""
        return form.unpack(self.raw(form.size))

    def text(self) -> str:
        """Take a text."""
        return self.raw(self.take(_COUNT)[0]).decode("utf-8")

    def commitments(self) -> tuple[tuple[str, bytes], ...]:
        """Take names with their digests."""
        return tuple((self.text(), self.raw(DIGEST_SIZE)) for _ in range(self.take(_COUNT)[0]))


def _decode_body(kind: int, fields: _Fields) -> Entry:
    if kind == EntryKind.STEP:
        return _decode_step(fields)
    if kind == EntryKind.RUN:
        run_id, digest = fields.text(), fields.raw(DIGEST_SIZE)
        return RunEntry(run_id, fields.commitments(), digest)
    if kind == EntryKind.AMEND:
        step, digest = _AMEND.unpack(fields.raw(_AMEND.size))
        return AmendEntry(step, fields.commitments(), digest)
    if kind == EntryKind.END:
        step, root = _END.unpack(fields.raw(_END.size))
        return EndEntry(step, fields.text(), root)
    if kind in _FLAT:
        form, flat = _FLAT[EntryKind(kind)]
        return form(*flat.unpack(fields.raw(flat.size)))
    if kind in RESERVED_KINDS:
        raise TamperError(
            f"The entry is of the kind {kind}, kept for {RESERVED_KINDS[kind]}, which this release doesn't write. Read "
            "it with the release of Cosmati that wrote it, or restore the ledger."
        )
    raise TamperError(
        f"The entry has the unknown kind {kind}. Read it with the release of Cosmati that wrote it, or restore it."
    )


def _decode_step(fields: _Fields) -> StepEntry:
    step, attempt, policy, details, has_root = _STEP.unpack(fields.raw(_STEP.size))
    if has_root > 1:
        raise TamperError(f"The entry's root flag is {has_root}, not 0 or 1. Restore the ledger from a copy.")
    root = fields.raw(DIGEST_SIZE) if has_root else None
    cells = tuple(MicrobatchCell(*_CELL.unpack(fields.raw(_CELL.size))) for _ in range(fields.take(_COUNT)[0]))
    return StepEntry(step, attempt, policy, details, root, cells)
