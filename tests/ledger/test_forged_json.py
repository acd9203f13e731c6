"""JSON that nobody's writer would write, in a ledger and beside it, is refused by name: it ends in no raw error."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
import msgspec
import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger import released_keys, sealing
from cosmati.ledger.derived.folder import INDEX_FILE, DerivedIndex, DerivedPart, RareEntry, place_of
from cosmati.ledger.derived.opened import open_derived, open_proven
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.learning import read_learning
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.proof import check_inclusion
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.released_keys import FORMAT, holder_of, read_released
from cosmati.ledger.replay_result import ReplayResult
from cosmati.ledger.row_blinds import RecordedBlinds, read_blinds
from cosmati.ledger.row_keys import KEYS_MAGIC, RowKeys
from cosmati.ledger.sealing import BLOCK_STEPS, ColumnKeys, SealedClasses, open_box
from cosmati.ledger.sources import ARCHIVE, sources_of
from cosmati.ledger.step_details import read_details
from cosmati.ledger.tables import read_tables
from cosmati.ledger.vouched import problem_with_data
from cosmati.records.ledger import NO_DETAILS, AmendEntry, StepEntry
from cosmati.storage.duck import has_duckdb
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest, run_entry
from .test_details_of_steps import KEYS, block_of, tables
from .test_row_blinds import SALTED
from .test_verify import KEY, items, write_signed

needs_duckdb = pytest.mark.skipif(not has_duckdb(), reason="the extra `queries` isn't installed")
DEEP = b"[" * 200_000
ODD = (b"NaN", b"1e999", b"9007199254740993", b'"\\ud800"', b'{"\\ud800":1}')
"""What JSON's readers take, and canonical JSON hasn't."""


# ------------------------------------------------------------------------------------------- entry 0 and amendments


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:20].decode())
@pytest.mark.parametrize("name", ["policy_text", "artifacts", "plan"])
@pytest.mark.parametrize("is_amended", [False, True])
def test_tables_are_refused_that_no_canonical_json_says(odd: bytes, name: str, is_amended: bool) -> None:
    entry, details = run_entry()
    told = json.dumps(details | {"changes": [], name: "here"}).encode().replace(b'"here"', odd)
    commitments = (("artifacts", digest("a")), ("policy", digest("p")))
    forged = AmendEntry(3, commitments, NO_DETAILS) if is_amended else replace(entry, commitments=commitments)
    with pytest.raises(TamperError, match="Entry 7 breaks the ledger's contract: its details aren't canonical JSON"):
        read_tables(ScannedEntry(7, b"", forged, told), forged, None)


@pytest.mark.parametrize("phases", [3, [["main", 0]], [["main", "0", 9]], {"main": 1}, "abc"])
def test_phases_are_of_their_form_without_a_policy_too(phases: object) -> None:
    entry, details = run_entry()
    item = ScannedEntry(0, b"", entry, json.dumps(details | {"phases": phases}).encode())
    with pytest.raises(TamperError, match="its phases aren't each a name, a first step and an end"):
        read_tables(item, entry, None)


def test_data_whose_text_is_nested_without_end_or_names_numbers_is_no_data() -> None:
    told = {"sources": [{"index_sha256": 3, "target": "t/a/1/2"}]}
    found = problem_with_data({"data_text": "[" * 200_000, "provenance": told}, digest("data"))
    assert "can't be read: ValueError(\"it's nested too deeply\")" in found
    text = '[[[3, "a"], ["x", "b"], [4, "b"]]]'
    committed = hashlib.sha256(hashlib.sha256(text.encode()).hexdigest().encode()).digest()
    found = problem_with_data({"data_text": text, "provenance": told}, committed)
    assert found == "nobody has vouched for the data with the index 4"


def test_a_manifest_that_is_nested_without_end_says_nothing(tmp_path: Path) -> None:
    name = hashlib.sha256(DEEP).hexdigest()
    (tmp_path / ARCHIVE).mkdir()
    (tmp_path / ARCHIVE / name).write_bytes(DEEP)
    own = tables(provenance={"sources": [{"target": "data/a/b/1/m", "manifest_sha256": name}]})
    (found,) = sources_of(tmp_path, own)
    assert (found.class_name, found.licence) == ("a/b", "")


# -------------------------------------------------------------------------------------------------------------- steps


def test_a_step_whose_details_are_nested_without_end_is_refused() -> None:
    for read in (read_details, read_learning):
        with pytest.raises(TamperError):
            read(block_of([b'{"direction":{"more":' + DEEP]))
    assert read_details(block_of([b'{"cell_microbatches":[%d,-1]}' % 2**70])).microbatches.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("column", "content"), [("loss", b"{}"), ("loss", b"3"), ("gradient_norm", b"[]"), ("update_norm", b'{"0":1}')]
)
def test_a_box_that_holds_something_else_is_refused(
    column: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = boxed(content, column, monkeypatch)
    classes = SealedClasses(KEYS.origin, ("", "shut"), BLOCK_STEPS)
    with pytest.raises(TamperError, match=r"Step 10's sealed .* isn't of the form that runs write"):
        classes.open({"gradient_norm": {"0": [1.0]}, "sealed": {"shut": {column: box}}}, 10, KEYS)


def test_a_box_whose_content_is_nested_without_end_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed(DEEP, "loss", monkeypatch)
    with pytest.raises(TamperError, match="Step 10's sealed loss of shut doesn't open"):
        open_box(box, KEYS("shut", "loss", 0), KEYS.origin, "shut", "loss", 10)


def boxed(content: bytes, column: str, monkeypatch: pytest.MonkeyPatch) -> str:
    bound = sealing._bound_to(KEYS.origin, "shut", column, 10)
    monkeypatch.setattr(sealing, "_bound_to", lambda *_: bound)
    monkeypatch.setattr(sealing, "rfc8785", SimpleNamespace(dumps=lambda _: content))
    return sealing._box(None, KEYS, "shut", column, 10)


# ------------------------------------------------------------------------------------------------ files that are given


def proof_of(details: str) -> dict[str, Any]:
    """Return a proof of a log of one step with these details, signed by its operator."""
    data = encode_entry(StepEntry(0, 0, digest("p"), hashlib.sha256(details.encode()).digest(), None, ()))
    note = KEY.sign_note(checkpoint_text(ORIGIN, TreeHead(1, mth([data]))))
    entry = base64.b64encode(data).decode()
    told = {"checkpoint": note, "index": 0, "entry": entry, "details": details, "path": []}
    return {"format": "cosmati-inclusion/1", **told}


def test_a_proof_with_half_a_surrogate_pair_is_none() -> None:
    vkey, proof = KEY.verifier.text, proof_of("{}")
    assert check_inclusion(json.dumps(proof), vkey).details == {}
    for forged in (proof | {"details": "\ud800"}, proof | {"checkpoint": proof["checkpoint"] + "\udc00"}):
        with pytest.raises(LedgerError, match=r"no proof that can be read: .*surrogates not allowed"):
            check_inclusion(json.dumps(forged), vkey)


@pytest.mark.parametrize("details", ['{"a":"\\ud800"}', '{"a":NaN}', '{"a":1e999}', "[]", "{", DEEP.decode()])
def test_a_proof_of_details_that_are_none_does_not_hold(details: str) -> None:
    with pytest.raises(RefutedError, match="This proof doesn't hold: "):
        check_inclusion(json.dumps(proof_of(details)), KEY.verifier.text)


def test_files_of_blinds_keys_and_results_are_refused_as_none() -> None:
    blinds: bytes = RecordedBlinds(SimpleNamespace(certificates={}), range(3)).to_bytes(SALTED, {})  # type: ignore[arg-type]
    assert read_blinds(SALTED, blinds).told == {}
    result = ReplayResult(
        origin="r",
        vkey="k",
        size=1,
        root="",
        num_steps=0,
        has_ended=False,
        is_witnessed=False,
        seed="seed",
        segments=(),
        compares_rows=True,
    ).to_bytes()
    assert ReplayResult.from_bytes(result).seed == "seed"
    for odd in (b"1e999", b"NaN", b'"\\ud800"', DEEP):
        for forged in (blinds.replace(b'"version":', b'"certificates":{"ab":%s},"version":' % odd), odd):
            with pytest.raises(LedgerError, match="This is no file of row blinds"):
                read_blinds(SALTED, forged)
        for forged in (result.replace(b'"seed":"seed"', b'"seed":' + odd), odd):
            with pytest.raises(LedgerError, match="This is no result of a replay"):
                ReplayResult.from_bytes(forged)
    with pytest.raises(LedgerError, match="This is no result of a replay"):
        ReplayResult.from_bytes(result.replace(b'"size":1', b'"size":9007199254740993'))
    for head in (DEEP, b'{"certificates":[],"commitment":"","opened":[]}'):
        with pytest.raises(LedgerError, match="This is no file of row keys"):
            RowKeys.from_bytes(keys_with(head))


@pytest.mark.parametrize(
    "content",
    [b"[]", b"3", b'{"a":3}', b'{"a":{"loss":[]}}', b'{"a":{"loss":{"0":3}}}', b'{"a":{"loss":{"0":"x"}}}', DEEP],
)
def test_released_keys_that_are_none_were_changed(content: bytes) -> None:
    holder, once = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    named = {"run": ORIGIN, "credential": "c", "holder": holder_of(holder)}
    head = {"format": FORMAT, **named, "sender": holder_of(once)}

    def read(content: bytes) -> ColumnKeys:
        sealing_key = released_keys._key(once.exchange(holder.public_key()), head)
        box = AESGCM(sealing_key).encrypt(released_keys._NONCE, content, rfc8785.dumps(head))
        data = rfc8785.dumps({**head, "box": base64.b64encode(box).decode()})
        return read_released(data, holder, run=ORIGIN, credential="c", covers=lambda name, _: name == "a")

    given = read(b'{"a":{"loss":{"0":"ab"}},"b":{"loss":{"0":"cd"}}}')
    assert [given(*one) for one in (("a", "loss", 0), ("a", "loss", 1), ("b", "loss", 0))] == [b"\xab", None, None]
    with pytest.raises(TamperError, match="The file of released keys was changed"):
        read(content)


def keys_with(head: bytes) -> bytes:
    """Return a file of row keys, whole but for its head."""
    body = KEYS_MAGIC + head + b"\n" + b"\1" + bytes(32)
    return body + blake3.blake3(body).digest()


# ------------------------------------------------------------------------------------------------------ derived tables


def indexed(change: Callable[[DerivedIndex], dict[str, Any]], path: Path) -> None:
    """Change what the tables of a ledger say of themselves."""
    file = place_of(path) / INDEX_FILE
    index = msgspec.json.decode(file.read_bytes(), type=DerivedIndex)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(index, **change(index))))


def rare(**changed: object) -> Callable[[DerivedIndex], dict[str, Any]]:
    return lambda index: {"rare": [msgspec.structs.replace(index.rare[0], **changed)]}


def part(**changed: object) -> Callable[[DerivedIndex], dict[str, Any]]:
    return lambda index: {"parts": [msgspec.structs.replace(index.parts[0], **changed)]}


CHANGES: dict[str, Callable[[DerivedIndex], dict[str, Any]]] = {
    "details before the file": rare(details_at=-5),
    "details beyond the file": rare(details_at=2**52),
    "details without end": rare(details_size=2**60),
    "long details": rare(details_size=2**52),
    "an index below 0": rare(index=-1),
    "an index beyond": rare(index=2**52),
    "twice the same": lambda index: {"rare": index.rare * 2},
    "beyond the tree": lambda index: {"rare": [*index.rare, RareEntry(2**40, "!")]},
    "a table with NUL": part(files={"steps\0": ("00", 1)}),
    "a table elsewhere": part(files={"../steps": ("00", 1)}),
    "an unknown table": part(files={"more": ("00", 1)}),
    "a part within a bundle": part(first=7),
    "a part below 0": part(first=-256),
    "a part beyond": part(first=256, end=512),
    "a part of nothing": part(end=0),
    "a part's details before the file": part(details_at=-1),
    "an epoch beyond": lambda _: {"sets": [(0, []), (9, [0])]},
    "a region beyond": lambda _: {"sets": [(0, []), (0, [99])]},
    "a region below 0": lambda _: {"sets": [(0, []), (0, [-1])]},
    "a tree without end": lambda _: {"tree_size": 2**52},
}


@needs_duckdb
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_forged_tables_are_refused_and_made_anew(
    change: Callable[[DerivedIndex], dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    write_signed(path, items(3))
    with open_derived(path) as derived:
        index = derived.index
    indexed(change, path)
    with pytest.raises(TamperError, match="ledger derive RUN --anew"), open_derived(path):
        pass
    with open_proven(path) as (derived, was_other):
        assert (derived.index, was_other) == (index, True)


@needs_duckdb
def test_tables_that_say_of_themselves_what_is_nested_without_end_are_damaged(tmp_path: Path) -> None:
    write_signed(tmp_path / "ledger", items(3))
    with open_derived(tmp_path / "ledger"):
        pass
    (place_of(tmp_path / "ledger") / INDEX_FILE).write_bytes(b'{"more":' + DEEP)
    with pytest.raises(TamperError, match="is damaged"), open_derived(tmp_path / "ledger"):
        pass


@needs_duckdb
def test_tables_that_grow_from_a_part_that_begins_nowhere_are_refused(tmp_path: Path) -> None:
    path, key = tmp_path / "ledger", SigningKey.generate(ORIGIN)
    write_signed(path, items(3), key)
    with open_derived(path):
        pass
    indexed(lambda index: {"parts": [DerivedPart(7, 8, 0, {}), *index.parts]}, path)
    write_signed(path, items(5), key)
    with pytest.raises(TamperError, match="no part goes from entry 7 to 8 of 4"), open_derived(path):
        pass
