"""What a resume asks of its ledger: the last amendment says what is withdrawn, a checkpoint is one that was signed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cosmati.errors import CheckpointError, LedgerError
from cosmati.ledger.details import encode_details
from cosmati.ledger.keys import create_key
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.verify import verify_ledger
from cosmati.provenance.voucher import Withdrawal, Withdrawn
from cosmati.records.ledger import AmendEntry, CheckpointEntry
from cosmati.train.observers.ledger_checks import refuse_readmission, refuse_unsigned, signed_entries
from tests.ledger.ledgers import ORIGIN, write_run


def withdrawn(*classes: str, action: str = "reject") -> Withdrawn:
    of = [Withdrawal(f"targets/{name}/source/1", "licence", "it ended", action, 4) for name in classes]  # type: ignore[arg-type]
    return Withdrawn("2026-01-01T00:00:00+00:00", tuple(of), {})


def amended(*by: Withdrawn | None) -> list[ScannedEntry]:
    """Return a ledger's amendments, each of which says what is withdrawn from its step on."""
    told = [encode_details({} if one is None else {"withdrawn": one.facts}) for one in by]
    return [
        ScannedEntry(index, b"", AmendEntry(index, (("policy", bytes(32)),), bytes(32)), line)
        for index, line in enumerate(told)
    ]


@pytest.mark.parametrize(
    ("in_ledger", "now", "named"),
    [
        ([withdrawn("a")], None, "a"),
        ([None, withdrawn("a")], None, "a"),
        ([withdrawn("a"), withdrawn("a", "b")], withdrawn("a"), "b"),
        ([withdrawn("a", "b"), withdrawn("b")], withdrawn("a"), "b"),
    ],
)
def test_who_was_rejected_last_is_not_taken_again(
    in_ledger: list[Withdrawn | None], now: Withdrawn | None, named: str
) -> None:
    with pytest.raises(LedgerError, match=f"rows of {named} are rejected from step 4 on"):
        refuse_readmission(amended(*in_ledger), now)


@pytest.mark.parametrize(
    ("in_ledger", "now"),
    [
        ([], None),
        ([None], None),
        ([withdrawn("a"), None], None),
        ([withdrawn("a")], withdrawn("a", "b")),
        ([withdrawn("a", action="stop")], None),
    ],
)
def test_who_is_still_rejected_or_never_was_may_go_on(in_ledger: list[Withdrawn | None], now: Withdrawn | None) -> None:
    refuse_readmission(amended(*in_ledger), now)


def test_a_checkpoint_is_signed_with_its_step_and_its_state() -> None:
    entry = CheckpointEntry(3, b"s" * 32, bytes(32))
    items = [*amended(None), ScannedEntry(1, b"", entry, None)]
    refuse_unsigned(items, 3, b"s" * 32)
    for step, state in ((4, b"s" * 32), (3, b"t" * 32)):
        with pytest.raises(CheckpointError, match=f"checkpoint of step {step} isn't one that the ledger has signed"):
            refuse_unsigned(items, step, state)


@pytest.mark.parametrize("num_unsigned", [0, 1, 3])
def test_what_a_crash_has_left_unsigned_is_signed_before_it_is_read(tmp_path: Path, num_unsigned: int) -> None:
    (tmp_path / "run" / "private").mkdir(parents=True)
    key = create_key(tmp_path / "run" / "private" / "operator.key", name=ORIGIN)
    writer = write_run(tmp_path / "run" / "ledger", key, 3, every=1000)
    size = writer.checkpoint().size
    for n in range(num_unsigned):
        writer.append(CheckpointEntry(3, bytes([n]) * 32, bytes(32)))
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
    writer.close()
    ledger = tmp_path / "killed" / "ledger"
    assert verify_ledger(ledger).num_unsigned == num_unsigned
    found = signed_entries(tmp_path / "killed")
    told = [one.entry.state_digest[0] for one in found if isinstance(one.entry, CheckpointEntry)]
    assert told[len(told) - num_unsigned :] == [*range(num_unsigned)]
    assert (verify_ledger(ledger).size, verify_ledger(ledger).num_unsigned) == (size + num_unsigned, 0)


def test_a_folder_without_a_ledger_has_signed_nothing(tmp_path: Path) -> None:
    assert signed_entries(tmp_path) == []
