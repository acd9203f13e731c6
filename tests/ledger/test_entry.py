from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.entry import decode_entry, encode_entry
from cosmati.records.ledger import (
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

from .ledgers import digest, step_entry

u16, u32, u64 = (st.integers(0, 2**n - 1) for n in (16, 32, 64))
digests, signatures = (st.binary(min_size=n, max_size=n) for n in (32, 64))
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
cells = st.builds(MicrobatchCell, u32, u16, u16, u32, u32, st.floats(0, allow_infinity=False, allow_nan=False), digests)
pairs = st.lists(st.tuples(texts, digests), max_size=4, unique_by=lambda pair: pair[0]).map(tuple)
entries: st.SearchStrategy[Entry] = st.one_of(
    st.builds(RunEntry, texts, pairs, digests),
    st.builds(StepEntry, u64, u32, digests, digests, st.none() | digests, st.lists(cells, max_size=5).map(tuple)),
    st.builds(ResumeEntry, u64, u64, u32),
    st.builds(CheckpointEntry, u64, digests, digests),
    st.builds(EndEntry, u64, texts, digests),
    st.builds(AmendEntry, u64, pairs, digests),
    st.builds(EvaluationEntry, u64, digests, digests),
    st.builds(TimeEntry, u64, u64),
    st.builds(KeyEntry, digests, digests, signatures, signatures),
)


@given(entries)
def test_decode_is_the_inverse_of_encode(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry)) == entry


@given(entries, st.data())
def test_a_damaged_entry_is_refused_or_is_the_encoding_of_another(entry: Entry, data: st.DataObject) -> None:
    encoded = bytearray(encode_entry(entry))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_entry(bytes(encoded))
    except TamperError:
        return
    assert found != entry
    assert encode_entry(found) == bytes(encoded)


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.builds(lambda k, b: bytes([1, k]) + b, st.integers(0, 21), st.binary(max_size=300)))
def test_random_bytes_are_refused_or_canonical(data: bytes) -> None:
    try:
        found = decode_entry(data)
    except TamperError:
        return
    assert encode_entry(found) == data


@given(entries, st.integers(1, 40))
def test_cut_and_lengthened_entries_are_refused(entry: Entry, count: int) -> None:
    encoded = encode_entry(entry)
    for damaged in (encoded[:-count], encoded + bytes(count)):
        with pytest.raises(TamperError):
            decode_entry(damaged)


def test_the_layout_of_a_step_is_as_documented() -> None:
    entry = StepEntry(5, 2, digest("p"), digest("d"), None, (MicrobatchCell(1, 2, 3, 4, 5, 6.5, digest("r")),))
    expected = b"\x01\x01" + struct.pack(">QI", 5, 2) + digest("p") + digest("d") + b"\x00" + struct.pack(">H", 1)
    expected += struct.pack(">IHHIId", 1, 2, 3, 4, 5, 6.5) + digest("r")
    assert encode_entry(entry) == expected


def test_eight_microbatches_take_about_half_a_kilobyte() -> None:
    entry = step_entry(1)[0]
    full = StepEntry(1, 0, entry.policy_digest, entry.details_digest, None, entry.microbatches * 2)
    assert len(encode_entry(full)) == 529


def test_another_version_is_refused_with_its_number() -> None:
    with pytest.raises(TamperError, match="version 2"):
        decode_entry(b"\x02" + encode_entry(ResumeEntry(0, 1, 1))[1:])


def test_an_entry_over_the_limit_of_tlog_tiles_is_refused() -> None:
    entry, _ = step_entry(1)
    fits = StepEntry(1, 0, entry.policy_digest, entry.details_digest, None, entry.microbatches * 292)
    assert len(encode_entry(fits)) <= 65_535
    with pytest.raises(LedgerError, match=r"65.535|65535"):
        encode_entry(StepEntry(1, 0, entry.policy_digest, entry.details_digest, None, entry.microbatches * 293))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (MicrobatchCell, (0, 0, 0, 0, 1, float("nan"), digest("r"))),
        (MicrobatchCell, (0, 0, 0, 0, 1, -1.0, digest("r"))),
        (MicrobatchCell, (-1, 0, 0, 0, 1, 1.0, digest("r"))),
        (MicrobatchCell, (0, 65536, 0, 0, 1, 1.0, digest("r"))),
        (MicrobatchCell, (0, 0, 0, 0, 1, 1.0, b"short")),
        (StepEntry, (0, 0, b"", digest("d"), None, ())),
        (StepEntry, (True, 0, digest("p"), digest("d"), None, ())),
        (RunEntry, ("", (), digest("d"))),
        (RunEntry, ("\ud800", (), digest("d"))),
        (RunEntry, ("r", (("a", digest("1")), ("a", digest("2"))), digest("d"))),
        (AmendEntry, (0, (("a", digest("1")), ("a", digest("2"))), digest("d"))),
        (AmendEntry, (0, (("a", b"short"),), digest("d"))),
        (AmendEntry, (-1, (), digest("d"))),
        (AmendEntry, (0, (), b"short")),
        (EndEntry, (0, "x" * 2000, digest("d"))),
    ],
)
def test_what_the_log_cannot_hold_is_refused_when_it_is_made(kind: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(LedgerError):
        kind(*arguments)


@pytest.mark.parametrize(("kind", "name"), RESERVED_KINDS.items())
def test_a_reserved_kind_is_refused_by_name(kind: int, name: str) -> None:
    with pytest.raises(TamperError, match=f"kept for {name}, which this release doesn't write"):
        decode_entry(bytes([1, kind]))


def test_kinds_keep_their_numbers() -> None:
    """They stand in signed logs: one that moves would make an old entry mean something else."""
    assert {kind.name: kind.value for kind in EntryKind} == {
        "RUN": 0,
        "STEP": 1,
        "RESUME": 2,
        "CHECKPOINT": 3,
        "END": 4,
        "AMEND": 5,
        "EVALUATION": 6,
        "TIME": 7,
        "KEY": 8,
    }
    assert RESERVED_KINDS == {16: "memorization", 17: "privacy", 18: "retention", 19: "inference", 20: "merging"}
    signed = encode_entry(TimeEntry(3, 7)), encode_entry(EvaluationEntry(3, bytes(32), b"d" * 32))
    assert signed == (
        b"\x01\x07" + struct.pack(">QQ", 3, 7),
        b"\x01\x06" + struct.pack(">Q", 3) + bytes(32) + b"d" * 32,
    )
