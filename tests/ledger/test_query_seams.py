"""Quick answers about ledgers of which others say something: keys that changed, witnesses, replays, later kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.columns import ColumnScan
from cosmati.ledger.cosigned import ask_witness
from cosmati.ledger.derived import folder
from cosmati.ledger.derived.folder import place_of
from cosmati.ledger.derived.opened import open_derived, open_proven
from cosmati.ledger.derived.views import run_sql
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.evidence import ReplayedHead, TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.ledger.query import direct_write_exclusion
from cosmati.ledger.reader import read_head, read_verifier_key
from cosmati.ledger.rotation import rotation_entry
from cosmati.ledger.verify import verify_ledger
from cosmati.records.ledger import EntryKind, KeyEntry
from cosmati.storage.merkle import MerkleTree, leaf_hash

from .ledgers import ORIGIN, write_run
from .plain_answers import check_answers
from .random_runs import random_run
from .test_columns import write
from .test_verify import Item, write_signed
from .test_witness import KEY, go_on, trusted, witness_at

pytestmark = pytest.mark.long

SECOND = SigningKey.generate(ORIGIN)
LENGTH = 300


def handed_over(seed: int, at: int, change: Callable[[KeyEntry], KeyEntry] = lambda entry: entry) -> list[Item]:
    """Return a run whose key changes after `at` entries."""

    def interjected(items: list[Item]) -> Item | None:
        if len(items) != at:
            return None
        tree = MerkleTree()
        for entry, _ in items:
            tree.append(leaf_hash(encode_entry(entry)))
        return change(rotation_entry(KEY, SECOND, TreeHead(at, tree.root()))), None

    return random_run(seed, LENGTH, interjected).items


@pytest.mark.parametrize("at", [1, 255, 256, 299])
def test_a_log_whose_key_changed_is_answered_for_as_by_its_entries(tmp_path: Path, at: int) -> None:
    path = tmp_path / "l"
    write_signed(path, handed_over(4, at), SECOND)
    check_answers(path)
    assert verify_ledger(path, vkey=KEY.verifier.text).keys == (KEY.verifier, SECOND.verifier)


@pytest.mark.parametrize("at", [200, 299])
def test_only_what_both_keys_signed_hands_over(tmp_path: Path, at: int) -> None:
    """In a bundle that's full and in one that isn't."""
    for deed in (
        lambda entry: replace(entry, old_signature=bytes(64)),
        lambda entry: replace(entry, new_key=SigningKey.generate(ORIGIN).verifier.public),
        lambda _: rotation_entry(KEY, SECOND, TreeHead(at, bytes(32))),
    ):
        write_signed(tmp_path / "l", handed_over(4, at, deed), SECOND)
        scan = ColumnScan(tmp_path / "l", read_head(tmp_path / "l", SECOND.verifier))
        with pytest.raises(TamperError, match="hasn't signed the change of keys"):
            list(scan.blocks())
        shutil.rmtree(tmp_path / "l")


def test_a_log_that_handed_over_is_signed_by_nobody_before(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = tmp_path / "l"
    write_signed(path, handed_over(4, 200), KEY)  # whoever has the old key still
    with pytest.raises(TamperError, match="hand over to the key"):
        direct_write_exclusion(path, "a", "in")
    with pytest.raises(TamperError, match="hand over to the key"), open_derived(path):
        pass
    assert not (place_of(path) / "tables.json").exists()


@pytest.mark.parametrize("before", [100, 256, 280])
def test_tables_go_on_under_the_key_that_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.setattr(folder, "PART_ROWS", 1)
    path, items = tmp_path / "l", handed_over(4, 280)
    write_signed(path, items[:before], KEY)
    with open_derived(path):
        pass
    shutil.rmtree(path)
    write_signed(path, items, SECOND)
    with open_derived(path, vkey=KEY.verifier.text) as derived:
        assert derived.index.vkey == SECOND.verifier.text
    check_answers(path)
    with open_proven(path) as (_, was_other):
        assert not was_other


def test_tables_under_a_key_that_never_signed_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path, items, stranger = tmp_path / "l", handed_over(4, 280), SigningKey.generate(ORIGIN)
    for size in (270, len(items)):
        write_signed(path, items[:size], KEY if size == 270 else SECOND)
        with open_derived(path, anew=True):
            pass
        index = json.loads((place_of(path) / "tables.json").read_text())
        (place_of(path) / "tables.json").write_text(json.dumps(index | {"vkey": stranger.verifier.text}))
        write_signed(path, items, SECOND)
        with pytest.raises(TamperError, match=r"under (another|a) key"), open_derived(path):
            pass


# ---------------------------------------------------------------------------------------------------------- evidence


def levels(path: Path, asked: TrustedEvidence) -> set[str]:
    """Return what each way to ask says of itself."""
    found = {direct_write_exclusion(path, "private", "near_input", witnesses=asked).evidence_level}
    with open_derived(path, witnesses=asked) as derived:
        found |= {derived.evidence_level, derived.origin_line.partition("; level ")[2]}
        _, rows = run_sql(derived, "SELECT level FROM ledger")
        found |= {level for (level,) in rows}
    with open_proven(path, witnesses=asked) as (derived, _):
        found.add(derived.evidence_level)
    return found | {verify_ledger(path, witnesses=asked).evidence_level}


def test_every_answer_says_the_level_that_verify_says(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path, witness, other = tmp_path / "l", witness_at(tmp_path / "w"), witness_at(tmp_path / "v", "w.example/2")
    write_run(path, KEY, 5).close()
    assert levels(path, trusted()) == {"L0: consistent in itself, operator-asserted"}
    ask_witness(path, witness.key, witness.send)
    (level,) = levels(path, trusted(witness))
    assert level == "L1: witnessed at 2023-11-14T22:13:20Z by 1 of 1"
    (level,) = levels(path, trusted(witness, other))
    assert "1 of 2 witnesses have cosigned, which is too few" in level
    assert levels(path, trusted(witness, other, quorum=1)) == {"L1: witnessed at 2023-11-14T22:13:20Z by 1 of 2"}
    head = read_head(path, read_verifier_key(path))
    replayed = TrustedEvidence((witness.key,), 1, ReplayedHead(ORIGIN, head, "L3: the whole run was replayed"))
    (level,) = levels(path, replayed)
    assert level.startswith("L3: the whole run was replayed; witnessed at")
    go_on(path, range(5, 100))
    (level,) = levels(path, trusted(witness))
    size = read_head(path, KEY.verifier).size
    assert f"the first {head.size} of its {size} entries were witnessed" in level
    (level,) = levels(path, replayed)
    assert level.startswith("L0")


@pytest.mark.parametrize("has_tables", [False, True])
def test_no_quick_answer_comes_from_a_log_that_was_rewritten_since_it_was_seen(
    tmp_path: Path, has_tables: bool
) -> None:
    pytest.importorskip("duckdb")
    path, witness = tmp_path / "run" / "ledger", witness_at(tmp_path / "w")
    write_run(path, KEY, 5).close()
    ask_witness(path, witness.key, witness.send)
    seen = path / "cosigned"
    for number, salt in ((7, "other"), (2, "")):  # rewritten, cut back
        fork = tmp_path / f"fork{number}" / "ledger"
        write_run(fork, KEY, 1).close()
        go_on(fork, range(1, number), salt=salt)
        if has_tables:
            with open_derived(fork):
                pass
        shutil.copytree(seen, fork / seen.name)
        for asked in (trusted(), trusted(witness)):
            with pytest.raises(TamperError, match=r"cut back|rewritten"), open_derived(fork, witnesses=asked):
                pass
            with pytest.raises(TamperError, match=r"cut back|rewritten"):
                direct_write_exclusion(fork, "private", "near_input", witnesses=asked)
    result = ReplayedHead("another", read_head(path, KEY.verifier), "L3: all")
    with (
        pytest.raises(LedgerError, match="was of the log 'another'"),
        open_derived(path, witnesses=TrustedEvidence(replayed=result)),
    ):
        pass


# ------------------------------------------------------------------------------------------------------- later kinds


@pytest.mark.parametrize("kind", [16, 20, 99])
def test_a_kind_that_this_release_does_not_know_is_refused(tmp_path: Path, kind: int) -> None:
    from cosmati.ledger.details import encode_details

    encoded = [
        (encode_entry(entry), None if told is None else encode_details(told)) for entry, told in random_run(4, 30).items
    ]
    later = bytes([encoded[-1][0][0], kind]) + bytes(40)
    head = write(tmp_path, [*encoded, (later, None)])
    assert kind not in list(EntryKind)
    with pytest.raises(TamperError, match=r"kept for|unknown kind"):
        list(ColumnScan(tmp_path, head).blocks())
