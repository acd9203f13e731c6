"""With which secret a run seals columns: a new one where it begins, its own where it goes on, and no other."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.sealing import BLOCK_STEPS, KEY_FILE, SEALED, SECRET_BYTES
from cosmati.records.ledger import NO_DETAILS, RunEntry
from cosmati.train.observers.sealing import StepSealing


def entries(table: dict[str, Any] | None, *more: dict[str, Any]) -> Any:
    tables = [{} if table is None else table, *more]
    return [
        SimpleNamespace(entry=RunEntry("r", (), NO_DETAILS), details=json.dumps(one).encode() + b"\n") for one in tables
    ]


def opened(private: Path, sensitive: tuple[str, ...] = ("a", "b"), before: Any = ()) -> StepSealing:
    return StepSealing.of_run(private, "log", sensitive, before)


def test_a_run_begins_with_a_secret_that_only_its_owner_reads(tmp_path: Path) -> None:
    private = tmp_path / "private"
    made = opened(private)
    secret = (private / KEY_FILE).read_bytes()
    assert len(secret) == SECRET_BYTES
    assert stat.S_IMODE((private / KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    told: Any = made.table[SEALED]
    assert (told["classes"], told["block_steps"]) == (["a", "b"], BLOCK_STEPS)
    assert made.commitment.keys() == {SEALED}
    # The same where it goes on, and where a run begins in a folder that has one.
    for before in (entries(dict(made.table)), ()):
        again = opened(private, before=before)
        assert (again.table, again.commitment) == (made.table, made.commitment)
    assert (private / KEY_FILE).read_bytes() == secret


def test_what_is_not_sensitive_needs_no_secret(tmp_path: Path) -> None:
    made = opened(tmp_path / "private", ())
    assert (made.table, made.commitment) == ({}, {})
    assert not (tmp_path / "private").exists()
    details: Any = {"step": 1}
    assert made.seal(details, (), 1, None) is details
    assert opened(tmp_path / "private").seal(details, (), 1, None) is details


def test_a_secret_that_a_crash_has_cut_is_made_anew_before_anything_was_sealed(tmp_path: Path) -> None:
    first = opened(tmp_path)
    (tmp_path / KEY_FILE).write_bytes(b"x" * (SECRET_BYTES - 1))
    assert opened(tmp_path).table != first.table
    assert (tmp_path / KEY_FILE).stat().st_size == SECRET_BYTES
    assert opened(tmp_path, before=entries(None)).table != first.table


def test_another_secret_or_none_is_refused_where_columns_are_sealed(tmp_path: Path) -> None:
    before = entries(dict(opened(tmp_path).table))
    secret = (tmp_path / KEY_FILE).read_bytes()
    (tmp_path / KEY_FILE).write_bytes(bytes([secret[0] ^ 1]) + secret[1:])
    with pytest.raises(LedgerError, match="isn't the secret that columns are sealed with"):
        opened(tmp_path, before=before)
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(LedgerError, match="is gone, and columns are sealed with it"):
        opened(tmp_path, before=before)
    assert not (tmp_path / KEY_FILE).exists()


def test_classes_that_were_sealed_stay_so_and_more_may_come(tmp_path: Path) -> None:
    first = opened(tmp_path)
    before = entries(dict(first.table))
    assert opened(tmp_path, ("a", "b", "c"), before).table != first.table
    for fewer in (("a",), ("b", "c"), ()):
        with pytest.raises(LedgerError, match="would put them in the open from here on"):
            opened(tmp_path, fewer, before)
    # The last entry that says something counts.
    opened(tmp_path, ("a",), entries(dict(first.table), {SEALED: {"classes": ["a"]}}))
