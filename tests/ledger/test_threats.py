"""What a ledger doesn't show by itself: each deed is done, passes, and is found with what the threat model names."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosmati.errors import TamperError
from cosmati.ledger.keys import SigningKey, create_key, load_key
from cosmati.ledger.query import contributions, direct_write_exclusion
from cosmati.ledger.rows import commit_rows, derive_blinds, hash_rows
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import RunEntry, StepEntry

from .ledgers import ORIGIN, append_steps, step_entry, write_run
from .test_amend import FIRST
from .test_verify import items, write_signed

KEY = SigningKey.generate(ORIGIN)


def pin_of(directory: Path) -> str:
    return (directory / "checkpoint").read_text()


def test_a_folder_put_back_to_an_earlier_time_takes_a_pin(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 4).close()
    shutil.copytree(tmp_path / "l", tmp_path / "backup")
    with LedgerWriter.open(tmp_path / "l", key=KEY) as writer:
        append_steps(writer, range(4, 9))
    pin = pin_of(tmp_path / "l")
    assert verify_ledger(tmp_path / "backup").num_steps == 4
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "backup", pinned=pin)


def test_an_older_checkpoint_alone_is_found_while_the_log_beside_it_stands(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 4)
    old = writer.checkpoint(), pin_of(tmp_path / "l")
    append_steps(writer, range(4, 9))
    writer.close()
    pin = pin_of(tmp_path / "l")
    (tmp_path / "l/checkpoint").write_text(old[1])
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "l")
    (tmp_path / "l/wal").unlink()
    assert verify_ledger(tmp_path / "l").size == old[0].size
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "l", pinned=pin)


def test_an_unsigned_tail_can_vanish_until_it_is_signed(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 4, every=1000)
    writer.checkpoint()
    short = (tmp_path / "l/wal").read_bytes()
    append_steps(writer, range(4, 7))
    writer.flush()
    pin = pin_of(tmp_path / "l")
    assert verify_ledger(tmp_path / "l").num_unsigned == 3
    shutil.copytree(tmp_path / "l", tmp_path / "cut")
    (tmp_path / "cut/wal").write_bytes(short)
    # The pin is of the signed head, so it doesn't know of them either.
    assert verify_ledger(tmp_path / "cut", pinned=pin).num_unsigned == 0
    writer.close()
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "cut", pinned=pin_of(tmp_path / "l"))


def test_a_fork_takes_a_pin(tmp_path: Path) -> None:
    """Two runs under one key and one name, of which one is shown: each is whole."""
    for name, salt in (("shown", ""), ("hidden", "other")):
        with LedgerWriter.create(tmp_path / name, origin=ORIGIN, key=KEY) as writer:
            entry, details = items(0)[0]
            writer.append(entry, details)
            append_steps(writer, range(5), salt=salt)
        assert verify_ledger(tmp_path / name, vkey=KEY.verifier.text).num_steps == 5
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(tmp_path / "shown", vkey=KEY.verifier.text, pinned=pin_of(tmp_path / "hidden"))


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_log_that_its_operator_rewrites_takes_a_pin(tmp_path: Path, is_longer: bool) -> None:
    write_signed(tmp_path / "l", items(6), KEY)
    pin = pin_of(tmp_path / "l")
    shutil.rmtree(tmp_path / "l")
    write_signed(tmp_path / "l", [*items(3), step_entry(3, salt="other"), *items(9 if is_longer else 6)[5:]], KEY)
    assert verify_ledger(tmp_path / "l", vkey=KEY.verifier.text).num_steps == (9 if is_longer else 6)
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(tmp_path / "l", pinned=pin)


def test_a_log_under_a_new_key_takes_the_old_key_or_a_pin(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(6), KEY)
    pin = pin_of(tmp_path / "l")
    shutil.rmtree(tmp_path / "l")
    write_signed(tmp_path / "l", items(6), SigningKey.generate(ORIGIN))
    assert verify_ledger(tmp_path / "l").num_steps == 6
    with pytest.raises(TamperError, match="you trust"):
        verify_ledger(tmp_path / "l", vkey=KEY.verifier.text)
    with pytest.raises(TamperError, match="The pinned checkpoint: The note isn't signed by"):
        verify_ledger(tmp_path / "l", pinned=pin)


def test_an_operator_may_call_rows_what_they_are_not(tmp_path: Path) -> None:
    """Rows of `b` that are logged as rows of `a`: the tables fit, the signature holds, and the statement is made."""
    entry, details = FIRST.step(0)
    assert isinstance(entry, StepEntry)
    true, relabelled = entry.microbatches[1], entry.microbatches[0]
    lie = replace(entry, microbatches=(replace(relabelled, row_commitment=true.row_commitment),) * 2)
    assert details is not None
    details = details | {"gradient_norm": {}}
    write_signed(tmp_path / "l", [FIRST.run(), (replace(lie, details_digest=details_digest(details)), details)], KEY)
    report = verify_ledger(tmp_path / "l", vkey=KEY.verifier.text)
    assert (report.num_steps, report.evidence_level[:2]) == (1, "L0")
    statement = direct_write_exclusion(tmp_path / "l", "b", "high")
    assert (statement.num_class_microbatches, statement.evidence_level[:2]) == (0, "L0")


def test_an_operator_may_leave_the_policy_out(tmp_path: Path) -> None:
    """Without a policy in the tables there is nothing that a step's weights can be compared with."""
    first = FIRST.run()
    details = FIRST.details | {"policy": []}
    run = RunEntry("r", FIRST.commitments, details_digest(details))
    wrong = FIRST.step(0, route_id=0)
    write_signed(tmp_path / "with", [first, wrong], KEY)
    with pytest.raises(TamperError, match="the policy in force"):
        verify_ledger(tmp_path / "with")
    write_signed(tmp_path / "without", [(run, details), wrong], KEY)
    assert verify_ledger(tmp_path / "without").num_steps == 1
    # What was logged is what queries answer from all the same.
    assert sum(c.num_rows for c in contributions(tmp_path / "without").cells if c.class_name == "a") == 0


def test_who_has_the_private_folder_signs_as_the_operator(tmp_path: Path) -> None:
    key = create_key(tmp_path / "operator.key", name=ORIGIN)
    write_run(tmp_path / "l", key, 3).close()
    pin = pin_of(tmp_path / "l")
    shutil.copy2(tmp_path / "operator.key", tmp_path / "stolen.key")
    with LedgerWriter.open(tmp_path / "l", key=load_key(tmp_path / "stolen.key", name=ORIGIN)) as writer:
        append_steps(writer, range(3, 5), salt="forged")
    report = verify_ledger(tmp_path / "l", vkey=key.verifier.text, pinned=pin)
    assert (report.num_steps, report.pinned_size) == (5, 4)


def test_who_has_the_salt_can_try_rows_and_nobody_else_can() -> None:
    """A class of few rows: with the salt, the ids of a microbatch are found by trying all of them."""
    salt, ids = bytes(range(32)), np.array([[3], [8]], np.int64)
    commitment = commit_rows(hash_rows(derive_blinds(salt, 5, 0, 2), ids))
    pairs = [np.array([[a], [b]], np.int64) for a in range(12) for b in range(12)]

    def found_with(guess: bytes) -> list[list[int]]:
        blinds = derive_blinds(guess, 5, 0, 2)
        return [p[:, 0].tolist() for p in pairs if commit_rows(hash_rows(blinds, p)) == commitment]

    assert found_with(salt) == [[3, 8]]
    assert found_with(bytes(32)) == []
