"""What a ledger tells who goes on with its run: times of all clocks, and what the last amendment says."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import CheckpointError
from cosmati.ledger.details import encode_details
from cosmati.ledger.keys import create_key
from cosmati.ledger.reader import ScannedEntry
from cosmati.provenance.voucher import Withdrawal, Withdrawn
from cosmati.records.ledger import AmendEntry, CheckpointEntry, Entry, RunEntry, StepEntry, TimeEntry
from cosmati.train.observers import ledger_checks
from cosmati.train.observers.ledger_checks import (
    Recorded,
    _last_told,
    _times,
    forgotten_in,
    policy_changes_in,
    rare_entries,
    recorded_in,
    refuse_unsigned,
    signed_entries,
)
from tests.ledger.ledgers import ORIGIN, write_run

ZERO = bytes(32)
COMMITTED = (("policy", ZERO),)


def scanned(entry: Entry, details: dict[str, Any] | None = None) -> ScannedEntry:
    return ScannedEntry(0, b"", entry, None if details is None else encode_details(details))


def run(**details: Any) -> ScannedEntry:
    return scanned(RunEntry("run", COMMITTED, ZERO), details)


def amendment(**details: Any) -> ScannedEntry:
    return scanned(AmendEntry(1, COMMITTED, ZERO), details)


def at(hour: int) -> str:
    return f"2026-01-01T{hour:02}:00:00+00:00"


def test_times_are_those_of_every_clock_in_their_order() -> None:
    items = [
        run(provenance={"opened": at(1)}, policy_provenance={"opened": at(2)}, withdrawn={"seen": at(3)}),
        scanned(TimeEntry(1, 86400)),
        amendment(withdrawn={"seen": at(4)}, provenance={"opened": at(5)}, policy_provenance=None),
        scanned(CheckpointEntry(1, ZERO, ZERO)),
        scanned(AmendEntry(1, COMMITTED, ZERO)),
        amendment(provenance={"seen": at(6)}, withdrawn={"opened": at(7), "seen": ""}),
        run(),
    ]
    hours = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (1, 2, 3)]
    later = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (5, 4)]
    assert list(_times(items)) == [*hours, datetime(1970, 1, 2, tzinfo=UTC), *later]


def test_the_last_time_is_the_latest_and_what_was_withdrawn_is_the_last_amendments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recorded_in(None) == recorded_in(tmp_path) == Recorded(None, None) == Recorded()
    gone = [Withdrawn(at(hour), (Withdrawal("t/a/s/1", "licence", "it ended", "reject", 4),), {}) for hour in (2, 9, 3)]
    items = [run(provenance={"opened": at(8)}), *(amendment(withdrawn=one.facts) for one in gone)]
    folders = list[Path]()

    def signed(folder: Path) -> list[ScannedEntry]:
        folders.append(folder)
        return items

    monkeypatch.setattr(ledger_checks, "signed_entries", signed)
    assert recorded_in(tmp_path) == Recorded(gone[-1], datetime(2026, 1, 1, 9, tzinfo=UTC))
    assert folders == [tmp_path]
    items.append(amendment(other=1))
    assert recorded_in(tmp_path).withdrawn is None, "the last one says nothing of it"


def test_amendments_alone_say_what_is_so_now() -> None:
    assert _last_told([]) == {}
    assert _last_told([run(a=1)]) == {}
    assert _last_told([amendment(a=1), amendment(a=2), run(a=3), scanned(AmendEntry(1, COMMITTED, ZERO))]) == {"a": 2}


def test_policy_changes_and_deletions_are_told_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[ScannedEntry]()
    monkeypatch.setattr(ledger_checks, "signed_entries", lambda folder: told if folder == tmp_path else None)
    assert policy_changes_in(tmp_path) == []
    assert forgotten_in(told) == {}
    told.append(amendment(policy_changes=[{"step": 3}], forgotten={"rows": 2}))
    assert policy_changes_in(tmp_path) == [{"step": 3}]
    assert forgotten_in(told) == {"forgotten": {"rows": 2}}
    told.append(amendment(forgotten=None))
    assert policy_changes_in(tmp_path) == []
    assert forgotten_in(told) == {"forgotten": None}


def test_a_checkpoint_is_looked_for_among_checkpoints_alone() -> None:
    state = b"s" * 32
    with pytest.raises(CheckpointError, match=r"^The checkpoint of step 3 isn't one .* Put the run's own checkpoint"):
        refuse_unsigned([], 3, state)
    earlier = scanned(CheckpointEntry(2, state, ZERO))
    refuse_unsigned([earlier, scanned(CheckpointEntry(3, state, ZERO)), earlier], 3, state)


def test_steps_are_left_out_of_what_a_ledger_has_signed(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    key = create_key(tmp_path / "private" / "operator.key", name=ORIGIN)
    write_run(tmp_path / "ledger", key, 8).close()
    kinds = [type(one.entry) for one in rare_entries(tmp_path / "ledger")]
    assert StepEntry not in kinds
    assert kinds[0] is RunEntry
    assert kinds.count(CheckpointEntry) == 2
    found = signed_entries(tmp_path)
    assert [(one.index, one.entry) for one in found] == [
        (one.index, one.entry) for one in rare_entries(tmp_path / "ledger")
    ]
    (tmp_path / "private" / "operator.key").unlink()
    assert len(signed_entries(tmp_path)) == len(found), "what is signed to its end needs no key"
