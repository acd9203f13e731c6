"""The operator changes the key: who trusts the old one goes on to the new one, and nobody else gets in that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import key_change
from cosmati.ledger.cosigned import WitnessRefusedError, ask_witness
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.key_change import NEXT_KEY, rotate_key
from cosmati.ledger.keys import SigningKey, create_key, load_key
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.rotation import rotation_entry
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.witness import Witness, create_witness
from cosmati.ledger.writer import LedgerWriter
from cosmati.ledger.writer_lock import WriterLock
from cosmati.records.ledger import Entry, KeyEntry

from .ledgers import ORIGIN, append_steps, end_entry, write_run
from .test_verify import items, write_signed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    key = create_key(tmp_path / "private" / "operator.key", name=ORIGIN)
    write_run(tmp_path / "ledger", key, 5).close()
    return tmp_path


def rotate(run: Path) -> tuple[VerifierKey, VerifierKey]:
    return rotate_key(run / "ledger", run / "private" / "operator.key")


def present(run: Path) -> SigningKey:
    return load_key(run / "private" / "operator.key", name=ORIGIN)


def go_on(run: Path, steps: range) -> None:
    with LedgerWriter.open(run / "ledger", key=present(run)) as writer:
        append_steps(writer, steps)


def test_who_trusts_any_of_the_keys_believes_the_log(run: Path) -> None:
    first, pin = present(run).verifier, (run / "ledger" / "checkpoint").read_text()
    old, second = rotate(run)
    go_on(run, range(5, 7))
    assert old == first
    _, third = rotate(run)
    go_on(run, range(7, 9))
    assert present(run).verifier == third
    for key in (first, second, third):
        report = verify_ledger(run / "ledger", vkey=key.text)
        assert (report.keys, report.num_steps) == ((first, second, third), 9)
        assert VerifiedLedger(run / "ledger", key.text).key == third
    assert verify_ledger(run / "ledger", pinned=pin).pinned_size is not None
    assert check_inclusion(prove_inclusion(run / "ledger", step=3), third.text).index == 4
    with pytest.raises(TamperError, match="you trust"):
        verify_ledger(run / "ledger", vkey=SigningKey.generate(ORIGIN).verifier.text)
    assert not (run / "private" / NEXT_KEY).exists()


def test_the_old_key_goes_on_with_nothing(run: Path) -> None:
    old = present(run)
    rotate(run)
    with pytest.raises(LedgerError, match="is signed by"):
        LedgerWriter.open(run / "ledger", key=old)
    (run / "ledger" / "operator.vkey").write_text(old.verifier.text + "\n")
    with pytest.raises(TamperError, match="hand over to the key"):
        verify_ledger(run / "ledger")
    with pytest.raises(TamperError, match="hand over to the key"):
        VerifiedLedger(run / "ledger")
    with pytest.raises(TamperError, match="hand over to the key"):
        LedgerWriter.open(run / "ledger", key=old)


def test_a_run_that_has_ended_may_change_its_key(run: Path) -> None:
    with LedgerWriter.open(run / "ledger", key=present(run)) as writer:
        writer.append(end_entry(5))
    rotate(run)
    assert verify_ledger(run / "ledger").has_ended


def test_a_change_of_keys_is_no_entry_of_a_runs_own(run: Path) -> None:
    with LedgerWriter.open(run / "ledger", key=present(run)) as writer:
        head = writer.checkpoint()
        with pytest.raises(LedgerError, match="call `rotate_key`"):
            writer.append(rotation_entry(present(run), SECOND, head))


def test_a_writer_keeps_its_key(run: Path) -> None:
    with LedgerWriter.open(run / "ledger", key=present(run)), pytest.raises(LedgerError, match="has a writer already"):
        rotate(run)
    old, _ = rotate(run)  # the key that was made for it then is taken now
    assert verify_ledger(run / "ledger", vkey=old.text).num_steps == 5


@pytest.mark.parametrize("place", ["rotate", "Scan", "Wal", "publish"])
def test_a_change_that_was_broken_off_is_finished(run: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = present(run).verifier

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "rotate":
            patch.setattr("cosmati.ledger.files.LedgerFiles.rotate", stop)
        else:
            patch.setattr(key_change, place, stop)
        with pytest.raises(KeyboardInterrupt):
            rotate(run)
    old, new = rotate(run)
    assert (old, new) == (first, present(run).verifier)
    go_on(run, range(5, 6))
    assert verify_ledger(run / "ledger", vkey=first.text).keys == (first, new)


@pytest.mark.parametrize("place", ["Scan", "Wal", "publish"])
def test_a_change_that_fails_gives_the_lock_back_at_once(
    run: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who catches the error holds its traceback, and what the frames held: the lock mustn't be among that."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(place)

    monkeypatch.setattr(key_change, place, fail)
    with pytest.raises(OSError, match=place) as caught:
        rotate(run)
    WriterLock(run / "ledger").release()
    assert caught.value.__traceback__ is not None


FIRST, SECOND = SigningKey.generate(ORIGIN), SigningKey.generate(ORIGIN)


def _with(change: Callable[[KeyEntry], KeyEntry], at: int = 3) -> list[tuple[Entry, dict[str, object] | None]]:
    """Return a log in which the key changes after `at` entries, the entry for it being changed."""
    from cosmati.ledger.entry import encode_entry
    from cosmati.storage.merkle import MerkleTree, leaf_hash

    tree, log = MerkleTree(), items(4)
    for entry, _ in log[:at]:
        tree.append(leaf_hash(encode_entry(entry)))
    entry = change(rotation_entry(FIRST, SECOND, TreeHead(at, tree.root())))
    return [*log[:at], (entry, None), *log[at:]]


def test_only_what_both_keys_signed_over_this_very_tree_hands_over(tmp_path: Path) -> None:
    write_signed(tmp_path / "good", _with(lambda entry: entry), SECOND)
    assert verify_ledger(tmp_path / "good", vkey=FIRST.verifier.text).keys[0] == FIRST.verifier
    stranger = SigningKey.generate(ORIGIN)
    deeds: list[Callable[[KeyEntry], KeyEntry]] = [
        lambda entry: replace(entry, old_signature=bytes(64)),
        lambda entry: replace(entry, new_signature=entry.old_signature),
        lambda entry: replace(entry, new_key=stranger.verifier.public),
        lambda entry: replace(entry, old_key=stranger.verifier.public),
        lambda _: rotation_entry(FIRST, SECOND, TreeHead(3, bytes(32))),
        lambda entry: replace(entry, old_key=entry.new_key, new_key=entry.old_key),
        lambda entry: replace(entry, old_key=b"\xff" * 32),
    ]
    for number, deed in enumerate(deeds):
        write_signed(tmp_path / str(number), _with(deed), SECOND)
        with pytest.raises(TamperError, match="hasn't signed the change of keys"):
            verify_ledger(tmp_path / str(number))
    write_signed(tmp_path / "first", [_with(lambda entry: entry, at=0)[0]], SECOND)
    with pytest.raises(TamperError, match="run entry is entry 0"):
        verify_ledger(tmp_path / "first")


def test_a_key_takes_over_once_and_from_the_one_that_signs(tmp_path: Path) -> None:
    log = _with(lambda entry: entry)
    write_signed(tmp_path / "other", log, FIRST)
    with pytest.raises(TamperError, match="hand over to the key"):
        verify_ledger(tmp_path / "other")
    for deed, words in ((SECOND, "has signed before"), (SigningKey.generate(ORIGIN), "isn't the one that signs")):
        from cosmati.ledger.entry import encode_entry
        from cosmati.storage.merkle import MerkleTree, leaf_hash

        tree = MerkleTree()
        for entry, _ in log:
            tree.append(leaf_hash(encode_entry(entry)))
        giver = SECOND if deed is SECOND else FIRST
        taker = FIRST if deed is SECOND else deed
        again = rotation_entry(giver, taker, TreeHead(len(log), tree.root()))
        write_signed(tmp_path / words[:5], [*log, (again, None)], taker)
        with pytest.raises(TamperError, match=words):
            verify_ledger(tmp_path / words[:5])


def test_a_witness_goes_along_once_its_owner_says_so(run: Path, tmp_path: Path) -> None:
    create_witness(tmp_path / "w", "w.example")
    witness = Witness(tmp_path / "w")
    witness.trust(present(run).verifier)
    ask_witness(run / "ledger", witness.key, witness.send)
    _, new = rotate(run)
    ask_witness(run / "ledger", witness.key, witness.send)  # both have signed that one
    go_on(run, range(5, 7))
    with pytest.raises(WitnessRefusedError, match="403"):
        ask_witness(run / "ledger", witness.key, witness.send)
    witness.trust(new)
    ask_witness(run / "ledger", witness.key, witness.send)
    # What was cosigned under the old key still counts.
    assert verify_ledger(run / "ledger", witnesses=TrustedEvidence((witness.key,))).evidence_level.startswith("L1")
