"""A proof from somebody else holds as it was made or is refused, and a tree begins with each one before it."""

from __future__ import annotations

import base64
import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger import row_blinds
from cosmati.ledger.consistency import is_consistent, prove_consistency
from cosmati.ledger.cosigned import FOLDER, ask_witness
from cosmati.ledger.entry import MAX_ENTRY_SIZE, encode_entry
from cosmati.ledger.evidence import LEVEL_0, ReplayedHead, TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.row_blinds import Substituted, keys_of_file, secrets_in
from cosmati.ledger.row_secrets import KeyedRows
from cosmati.records.ledger import NO_DETAILS, CheckpointEntry, MicrobatchCell, ResumeEntry, StepEntry
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest, step_entry
from .outside_witness import consistency_proof
from .test_consistency import write_tiles
from .test_row_blinds import KEYED, KEYS
from .test_verify import KEY, Item, items, write_signed
from .test_witness import KEY as WITNESSED_KEY
from .test_witness import Clock, witness_at

VKEY = KEY.verifier.text
ITEMS: list[Item] = [
    *items(3),
    (CheckpointEntry(3, digest("state"), digest("root")), None),
    (ResumeEntry(1, 2, 1), None),
    step_entry(1, 1, "again"),
    step_entry(2, 1, "again"),
]
DATA = [encode_entry(entry) for entry, _ in ITEMS]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_signed(tmp_path / "l", ITEMS)
    return tmp_path / "l"


def test_a_step_is_proven_by_the_entry_that_stands(ledger: Path) -> None:
    assert [json.loads(prove_inclusion(ledger, step=number))["index"] for number in range(3)] == [1, 6, 7]
    for index in range(len(ITEMS)):
        text = prove_inclusion(ledger, entry=index, vkey=VKEY)
        proof = json.loads(text)
        assert list(proof) == ["format", "checkpoint", "index", "entry", "details", "path"]
        assert (proof["format"], proof["index"]) == ("cosmati-inclusion/1", index)
        assert proof["checkpoint"] == (ledger / "checkpoint").read_text()
        assert base64.b64decode(proof["entry"]) == DATA[index]
        assert text.endswith("}\n")
        assert "\u2014" in text, "people read the note in it"
        proven = check_inclusion(text, VKEY)
        assert (proven.origin, proven.index, proven.entry, proven.details) == (ORIGIN, index, *ITEMS[index])
        assert (proven.head, proven.evidence_level) == (TreeHead(8, mth(DATA)), LEVEL_0)


def test_a_proof_is_of_one_entry_that_the_head_covers(ledger: Path) -> None:
    for asked in ({}, {"step": 1, "entry": 1}, {"step": 0, "entry": 0}):
        with pytest.raises(LedgerError, match="A proof is of one entry"):
            prove_inclusion(ledger, **asked)
    for entry in (-1, 8):
        with pytest.raises(LedgerError, match="The signed head covers 8 entries, counted from 0"):
            prove_inclusion(ledger, entry=entry)
    for step in (-1, 3):
        with pytest.raises(LedgerError, match="The signed head covers 3 steps, counted from 0"):
            prove_inclusion(ledger, step=step)
    with pytest.raises(TamperError, match="you trust"):
        prove_inclusion(ledger, step=0, vkey=WITNESSED_KEY.verifier.text)


def test_nothing_is_proven_where_somebody_else_signed_what_was_cosigned(ledger: Path) -> None:
    text = checkpoint_text(ORIGIN, TreeHead(3, mth(DATA[:3])))
    path = ledger / FOLDER / "3"
    path.parent.mkdir()
    path.write_text(KEY.sign_note(text))
    assert json.loads(prove_inclusion(ledger, entry=1))["checkpoint"] == KEY.sign_note(text)
    path.write_text(SigningKey.generate(ORIGIN).sign_note(text))
    with pytest.raises(TamperError, match="isn't signed by the operator"):
        prove_inclusion(ledger, entry=1)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "cosmati-inclusion/2"},
        {"format": None},
        {"index": True},
        {"index": "1"},
        {"index": 1.0},
        {"checkpoint": 3},
        {"checkpoint": "no note"},
        {"details": 3},
        {"entry": "AAA"},
        {"entry": None},
        {"path": 3},
        {"path": ["!"]},
    ],
)
def test_what_is_no_proof_is_not_read(ledger: Path, change: dict[str, object]) -> None:
    proof = json.loads(prove_inclusion(ledger, step=1)) | change
    with pytest.raises(
        LedgerError, match=r"no proof that can be read: .*Give a file of `cosmati ledger prove`"
    ) as caught:
        check_inclusion(json.dumps(proof), VKEY)
    assert not isinstance(caught.value, RefutedError)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000, "nonsense"])
def test_what_is_no_object_with_its_fields_is_not_read(text: str) -> None:
    with pytest.raises(LedgerError, match="no proof that can be read"):
        check_inclusion(text, VKEY)


def test_what_was_changed_is_refuted_by_what_does_not_hold(ledger: Path) -> None:
    proof = json.loads(prove_inclusion(ledger, step=1))
    hashes = proof["path"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"index": 5}, "its hashes don't lead from entry 5 to the root"),
        ({"index": -2}, "its hashes don't lead from entry -2 to the root"),
        ({"index": 8}, "its hashes don't lead from entry 8 to the root"),
        ({"entry": base64.b64encode(DATA[2]).decode()}, "its hashes don't lead"),
        ({"path": hashes[:-1]}, "its hashes don't lead"),
        ({"path": [*hashes, hashes[0]]}, "its hashes don't lead"),
        ({"path": hashes[::-1]}, "its hashes don't lead"),
        ({"details": None}, "the details that the entry commits to aren't in it"),
        ({"details": proof["details"].replace("1", "2")}, "its details line doesn't hold the details"),
        ({"checkpoint": proof["checkpoint"].replace("\n8\n", "\n9\n")}, "text or signature was changed"),
    ]
    for change, said in changes:
        with pytest.raises(RefutedError, match=r"^This proof doesn't hold: ") as caught:
            check_inclusion(json.dumps(proof | change), VKEY)
        assert said in str(caught.value)
    with pytest.raises(RefutedError, match="isn't signed by"):
        check_inclusion(json.dumps(proof), WITNESSED_KEY.verifier.text)
    with pytest.raises(LedgerError, match="is no verifier key"):
        check_inclusion(json.dumps(proof), "key")


def test_a_replay_counts_for_a_proof_from_its_own_head_alone(ledger: Path) -> None:
    text, replayed = prove_inclusion(ledger, step=1), ReplayedHead(ORIGIN, TreeHead(8, mth(DATA)), "L2: replayed")
    for changed, level in (
        ({}, "L2: replayed"),
        ({"origin": "other"}, LEVEL_0),
        ({"head": TreeHead(9, mth(DATA))}, LEVEL_0),
        ({"head": TreeHead(8, bytes(32))}, LEVEL_0),
        ({"level": "L1: no more"}, LEVEL_0),
    ):
        trusted = TrustedEvidence(replayed=replayed._replace(**changed))  # type: ignore[arg-type]
        assert check_inclusion(text, VKEY, trusted).evidence_level == level


def test_a_proof_is_of_the_largest_head_that_was_cosigned_and_covers_the_entry(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(2), WITNESSED_KEY)
    witness = witness_at(tmp_path / "w", now=Clock(5.0))
    ask_witness(tmp_path / "l", witness.key, witness.send)
    write_signed(tmp_path / "l", items(5), WITNESSED_KEY)
    sizes = []
    for entry in range(6):
        text = prove_inclusion(tmp_path / "l", entry=entry)
        trusted = TrustedEvidence((witness.key,))
        proven = check_inclusion(text, WITNESSED_KEY.verifier.text, trusted)
        assert proven.evidence_level[:3] == ("L1:" if entry < 3 else "L0:")
        sizes.append(proven.head.size)
    assert sizes == [3, 3, 3, 6, 6, 6]


# --------------------------------------------------------------------------------------------------------- consistency


def test_a_tree_begins_with_another_by_its_proof_and_by_nothing_else(tmp_path: Path) -> None:
    data = [b"entry %d" % number for number in range(10)]
    heads = [TreeHead(size, mth(data[:size])) for size in range(11)]
    other = [TreeHead(size, mth([b"x", *data[1:size]])) for size in range(11)]
    for old, new in product(range(1, 11), repeat=2):
        if old > new:
            assert not is_consistent(heads[old], heads[new], consistency_proof(new, data[:old]))
            assert not is_consistent(heads[old], heads[new], [])
            continue
        proof = consistency_proof(old, data[:new])
        assert is_consistent(heads[old], heads[new], proof) is True
        for wrong in ([*proof, bytes(32)], [bytes(32), *proof], proof[1:], proof[:-1], proof[::-1], []):
            assert is_consistent(heads[old], heads[new], wrong) is (wrong == proof)
        assert is_consistent(other[old], heads[new], proof) is False
        assert is_consistent(heads[old], other[new], proof) is False
    assert is_consistent(heads[0], heads[7], []) is True
    assert is_consistent(heads[0], heads[7], [bytes(32)]) is False
    assert is_consistent(heads[7], heads[0], []) is False
    assert is_consistent(heads[7], heads[0], [bytes(32)]) is False


@pytest.mark.parametrize("new", [10, 257, 515])
def test_a_consistency_proof_is_that_of_the_definition(tmp_path: Path, new: int) -> None:
    write_tiles(tmp_path, new)
    data = [b"entry %d" % number for number in range(new)]
    for old in {1, 2, 3, 6, 8, 9, 255, 256, 257, 258, 384, 512, 513, 514, new} & set(range(new + 1)):
        assert prove_consistency(tmp_path, old, new) == consistency_proof(old, data)
    assert prove_consistency(tmp_path, 0, new) == prove_consistency(tmp_path, new, new) == []
    for old in (-1, new + 1):
        with pytest.raises(LedgerError, match=f"A tree of {new} entries doesn't go on from one of {old}"):
            prove_consistency(tmp_path, old, new)


# ------------------------------------------------------------------------------------------------- what is in the way


def test_more_items_than_an_entry_holds_are_refused_before_they_are_written() -> None:
    cell = MicrobatchCell(0, 0, 0, 0, 1, 1.0, bytes(32))
    with pytest.raises(LedgerError, match="An entry can't hold 65536 items"):
        encode_entry(StepEntry(0, 0, bytes(32), NO_DETAILS, None, (cell,) * (MAX_ENTRY_SIZE + 1)))
    with pytest.raises(LedgerError, match=r"An entry of .* bytes doesn't fit"):
        encode_entry(StepEntry(0, 0, bytes(32), NO_DETAILS, None, (cell,) * 1200))


def test_row_keys_open_rows_under_the_name_of_their_log_and_no_ids_are_shown() -> None:
    found = keys_of_file(KEYED, KEYS.to_bytes())
    for one in (found, secrets_in(KEYED, KEYS.to_bytes())):
        assert isinstance(one, KeyedRows)
        assert (one.keys.commitment, one.origin) == (KEYS.commitment, "r")
    shown = repr(Substituted(("a",), frozenset({12345}), "data"))
    assert ("12345" in shown, "'a'" in shown, "data" in shown) == (False, True, True)
    assert row_blinds.salt_commitment(b"x") == hashlib.sha256(b"cosmati rows saltx").digest()
