"""What each step of a change of keys needs before it, and what it leaves in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import key_change
from cosmati.ledger.files import WAL_PURPOSE
from cosmati.ledger.key_change import NEXT_KEY, _is_published, rotate_key
from cosmati.ledger.keys import SigningKey, create_key, load_key
from cosmati.ledger.note import TreeHead, parse_checkpoint
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.wal import Wal, read_wal
from cosmati.ledger.writer_lock import WriterLock

from .ledgers import ORIGIN, write_run


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_run(tmp_path / "ledger", create_key(tmp_path / "the.key", name=ORIGIN), 2).close()
    return tmp_path / "ledger"


@pytest.fixture
def key_file(ledger: Path) -> Path:
    return ledger.parent / "the.key"


def broken_off(ledger: Path, key_file: Path) -> tuple[SigningKey, SigningKey]:
    """Publish the new key, and stop there; return both."""
    old = load_key(key_file, name=ORIGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_change, "_finished", lambda *_: (None, None))
        rotate_key(ledger, key_file)
    return old, load_key(key_file.with_name(NEXT_KEY), name=ORIGIN)


def checkpoint(ledger: Path) -> bytes:
    return (ledger / "checkpoint").read_bytes()


def test_the_new_key_takes_the_old_ones_place_in_every_file(ledger: Path, key_file: Path) -> None:
    first = load_key(key_file, name=ORIGIN)
    before = parse_checkpoint(checkpoint(ledger), first.verifier)
    old, new = rotate_key(ledger, key_file)
    second = load_key(key_file, name=ORIGIN)
    assert (old, new) == (first.verifier, second.verifier)
    assert old != new
    assert read_verifier_key(ledger) == new
    assert (ledger / "operator.vkey").read_bytes() == (new.text + "\n").encode()
    assert not key_file.with_name(NEXT_KEY).exists()
    head = parse_checkpoint(checkpoint(ledger), new)
    assert head.size == before.size + 1
    wal = read_wal(ledger)
    assert (wal.head, wal.entries) == (head, {})
    wal.authenticate(second.derive(WAL_PURPOSE))
    with pytest.raises(TamperError):
        wal.authenticate(first.derive(WAL_PURPOSE))
    # Of several changes the last two are returned.
    assert rotate_key(ledger, key_file) == (new, load_key(key_file, name=ORIGIN).verifier)
    WriterLock(ledger).release()


def test_a_key_that_lies_ready_is_taken_and_no_other_made(ledger: Path, key_file: Path) -> None:
    ready = create_key(key_file.with_name(NEXT_KEY), name="another.name")
    _, new = rotate_key(ledger, key_file)
    assert new == SigningKey(ORIGIN, ready.private).verifier


def test_without_a_ledger_or_its_key_nothing_is_changed(tmp_path: Path, ledger: Path, key_file: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LedgerError, match="There is no ledger"):
        rotate_key(tmp_path / "empty", key_file)
    assert not key_file.with_name(NEXT_KEY).exists()
    before, note = read_verifier_key(ledger), checkpoint(ledger)
    create_key(tmp_path / "other.key", name=ORIGIN)
    for wrong in (tmp_path / "other.key", tmp_path / "none.key"):
        with pytest.raises(LedgerError, match=r"is signed by|can't be read"):
            rotate_key(ledger, wrong)
        assert (read_verifier_key(ledger), checkpoint(ledger)) == (before, note)
        WriterLock(ledger).release()


def test_it_is_published_once_the_new_key_has_signed_the_checkpoint(ledger: Path, key_file: Path) -> None:
    first, stranger = load_key(key_file, name=ORIGIN), SigningKey.generate(ORIGIN)
    assert _is_published(ledger, first.verifier, stranger) is False
    old, new = broken_off(ledger, key_file)
    assert old.verifier == first.verifier
    assert read_verifier_key(ledger) == old.verifier
    assert _is_published(ledger, old.verifier, new)
    assert not _is_published(ledger, old.verifier, stranger)
    with pytest.raises(TamperError):
        _is_published(ledger, stranger.verifier, new)
    (ledger / "checkpoint").unlink()
    assert _is_published(ledger, new.verifier, new)
    with pytest.raises(TamperError, match="is missing"):
        _is_published(ledger, old.verifier, new)


@pytest.mark.parametrize("more", [0, 1])
def test_entries_that_only_the_old_keys_log_holds_are_not_thrown_away(ledger: Path, key_file: Path, more: int) -> None:
    old, new = broken_off(ledger, key_file)
    head = parse_checkpoint(checkpoint(ledger), new.verifier)
    wal = Wal(ledger, old.derive(WAL_PURPOSE), TreeHead(head.size - 1, bytes(32)))
    wal.append([b"covered", *[b"one that is not"] * more])
    wal.close()
    if more:
        with pytest.raises(LedgerError, match=r"entries that the old key's log holds alone\. Open the run once"):
            rotate_key(ledger, key_file)
        assert read_verifier_key(ledger) == old.verifier
        assert read_wal(ledger).entries == {head.size - 1: b"covered", head.size: b"one that is not"}
        assert load_key(key_file, name=ORIGIN).verifier == old.verifier
    else:
        assert rotate_key(ledger, key_file) == (old.verifier, new.verifier)
        assert read_wal(ledger).entries == {}
    WriterLock(ledger).release()


def test_what_does_not_verify_is_not_handed_over(ledger: Path, key_file: Path) -> None:
    old, _ = broken_off(ledger, key_file)
    details = ledger / "details.jsonl"
    whole = details.read_bytes()
    details.write_bytes(whole.replace(b"near_input", b"near_inpu7", 1))
    with pytest.raises(TamperError):
        rotate_key(ledger, key_file)
    assert read_verifier_key(ledger) == old.verifier
    WriterLock(ledger).release()
    details.write_bytes(whole)
    assert rotate_key(ledger, key_file)[0] == old.verifier
