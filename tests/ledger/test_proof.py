"""Inclusion proofs, against the definition in RFC 6962 and the checking algorithm in RFC 9162."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.proof import _audit_path, _root, check_inclusion, prove_inclusion
from cosmati.records.ledger import NO_DETAILS, StepEntry
from tests.storage.rfc6962 import root_of, sha256

from .ledgers import ORIGIN, POLICY, run_entry, step_entry
from .test_verify import items, write_signed

KEY = SigningKey.generate(ORIGIN)


def fold(index: int, size: int, leaf: bytes, path: list[bytes]) -> bytes | None:
    """RFC 9162, section 2.1.3.2, word by word."""
    if index >= size:
        return None
    fn, sn, r = index, size - 1, leaf
    for p in path:
        if sn == 0:
            return None
        if fn & 1 or fn == sn:
            r = sha256(b"\x01" + p + r)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = sha256(b"\x01" + r + p)
        fn, sn = fn >> 1, sn >> 1
    return r if sn == 0 else None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 31, 40])
def test_every_path_leads_to_the_root_and_only_from_its_place(size: int) -> None:
    leaves = [sha256(bytes([n])) for n in range(size)]
    root = root_of(leaves)
    for index, leaf in enumerate(leaves):
        path = _audit_path(index, leaves)
        assert fold(index, size, leaf, path) == root
        assert [n for n in range(size) if _root(n, size, leaf, path) == root] == [index]
        for wrong in (path[:-1], path[1:], [*path, root]):
            if wrong != path:
                assert _root(index, size, leaf, wrong) != root
        for n in range(size):
            assert _root(n, size, leaf, path) == fold(n, size, leaf, path)


def test_a_proof_holds_what_the_log_holds_and_nothing_else_will_do(tmp_path: Path) -> None:
    content = items(6)
    write_signed(tmp_path / "l", content, KEY)
    for index, (entry, details) in enumerate(content):
        text = prove_inclusion(tmp_path / "l", entry=index)
        proven = check_inclusion(text, KEY.verifier.text)
        assert (proven.origin, proven.index, proven.entry, proven.details) == (ORIGIN, index, entry, details)
        assert proven.head.size == 7
        assert base64.b64decode(json.loads(text)["entry"]) == encode_entry(entry)
        assert index == 0 or text == prove_inclusion(tmp_path / "l", step=index - 1)


def test_every_changed_byte_of_a_proof_is_found(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(3), KEY)
    text = prove_inclusion(tmp_path / "l", step=1)
    proven = check_inclusion(text, KEY.verifier.text)
    for position, character in enumerate(text):
        damaged = text[:position] + ("0" if character != "0" else "1") + text[position + 1 :]
        try:
            found = check_inclusion(damaged, KEY.verifier.text)
        except LedgerError:
            continue
        # Only what JSON doesn't care about: white space.
        assert character.isspace(), damaged
        assert found == proven


def test_an_entry_without_details_has_a_proof_without(tmp_path: Path) -> None:
    bare = StepEntry(0, 0, POLICY, NO_DETAILS, None, ())
    write_signed(tmp_path / "l", [run_entry(), (bare, None), step_entry(1)], KEY)
    text = prove_inclusion(tmp_path / "l", step=0)
    assert check_inclusion(text, KEY.verifier.text).details is None
    added = json.dumps(json.loads(text) | {"details": "{}"})
    with pytest.raises(RefutedError, match="details"):
        check_inclusion(added, KEY.verifier.text)


def test_nothing_is_proven_from_a_ledger_that_does_not_verify(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(3), KEY)
    (tmp_path / "l" / "tile" / "0" / "000.p" / "4").write_bytes(bytes(128))
    with pytest.raises(TamperError):
        prove_inclusion(tmp_path / "l", step=0)
