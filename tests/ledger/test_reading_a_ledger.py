"""One pass over a ledger gives each entry as it was signed, and names the first file that doesn't give the root."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import reader, tiles
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.history import RunHistory
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.reader import (
    KEY_KIND,
    Scan,
    ScannedEntry,
    has_details,
    operators,
    operators_of,
    read_head,
    read_signed_head,
    read_verifier_key,
)
from cosmati.ledger.tiles import Frontier, encode_bundle
from cosmati.records.ledger import NO_DETAILS, StepEntry
from cosmati.storage.merkle import leaf_hash
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN
from .test_key_change import FIRST, SECOND, _with
from .test_verify import KEY, items, write_signed

OTHER = SigningKey.generate(ORIGIN)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_signed(tmp_path / "l", items(4))
    return tmp_path / "l"


def head_of(num_steps: int) -> TreeHead:
    encoded = [encode_entry(entry) for entry, _ in items(num_steps)]
    return TreeHead(len(encoded), mth(encoded))


def scanned(ledger: Path, *roots: TreeHead, head: TreeHead | None = None) -> list[ScannedEntry]:
    return list(Scan(ledger, head or read_head(ledger, KEY.verifier), roots))


def refused(ledger: Path, *roots: TreeHead, head: TreeHead | None = None) -> str:
    with pytest.raises(TamperError) as caught:
        scanned(ledger, *roots, head=head)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------- the keys


def test_the_key_is_the_one_line_of_its_file(ledger: Path) -> None:
    assert read_verifier_key(ledger) == read_verifier_key(ledger, KEY.verifier.text + "\n") == KEY.verifier
    path, text = ledger / "operator.vkey", KEY.verifier.text
    for other in (text, text + "\n\n", " " + text + "\n", text + "\r\n"):
        path.write_bytes(other.encode())
        with pytest.raises(TamperError) as caught:
            read_verifier_key(ledger)
        assert str(caught.value).startswith(f"{path} ")
        assert "has more or other white space than the key's one line. Restore it" in str(caught.value)
    for wrong in (b"", b"\xff\n", (text[:-1] + "\n").encode()):
        path.write_bytes(wrong)
        with pytest.raises(TamperError) as caught:
            read_verifier_key(ledger)
        assert str(caught.value).startswith(f"{path} is damaged: ")
    path.unlink()
    with pytest.raises(TamperError, match=r"operator\.vkey is missing\. Give a ledger directory"):
        read_verifier_key(ledger)


def test_what_holds_no_ledger_is_no_tampering(tmp_path: Path, ledger: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none", ledger / "checkpoint"):
        with pytest.raises(LedgerError, match=f"There is no ledger in {folder}") as caught:
            read_verifier_key(folder)
        assert not isinstance(caught.value, TamperError)
    with pytest.raises(LedgerError, match="no verifier key") as caught:
        read_verifier_key(ledger, "a key")
    assert not isinstance(caught.value, TamperError)


def test_a_key_that_is_trusted_is_the_logs_or_one_that_handed_over_to_it(tmp_path: Path, ledger: Path) -> None:
    with pytest.raises(TamperError) as caught:
        read_verifier_key(ledger, OTHER.verifier.text)
    assert f"names the operator {KEY.verifier.text}, and you trust {OTHER.verifier.text}." in str(caught.value)
    write_signed(tmp_path / "two", _with(lambda entry: entry), SECOND)
    for key in (FIRST, SECOND):
        assert read_verifier_key(tmp_path / "two", key.verifier.text) == SECOND.verifier
    assert operators_of(tmp_path / "two", SECOND.verifier) == (FIRST.verifier, SECOND.verifier)
    assert operators_of(ledger, KEY.verifier) == (KEY.verifier,)
    write_signed(tmp_path / "back", _with(lambda entry: entry), FIRST)
    with pytest.raises(TamperError, match="hand over to the key"):
        operators_of(tmp_path / "back", FIRST.verifier)


def test_the_keys_of_a_log_end_with_the_one_that_signs_it(ledger: Path) -> None:
    history, key = RunHistory(), KEY.verifier
    assert operators(history, key) == (key,)
    history.keys = [b"1" * 32, key.public]
    assert operators(history, key) == (VerifierKey(ORIGIN, b"1" * 32), key)
    history.keys = [key.public, OTHER.verifier.public]
    with pytest.raises(TamperError) as caught:
        operators(history, key)
    assert f"hand over to the key {OTHER.verifier.text}, and operator.vkey names {key.text}:" in str(caught.value)


# ----------------------------------------------------------------------------------------------------- the checkpoint


def test_the_checkpoint_is_read_with_its_text(ledger: Path) -> None:
    path = ledger / "checkpoint"
    assert read_head(ledger, KEY.verifier) == head_of(4)
    assert read_signed_head(ledger, KEY.verifier) == (head_of(4), path.read_text())
    with pytest.raises(TamperError) as caught:
        read_head(ledger, OTHER.verifier)
    assert str(caught.value).startswith(f"{path}: The note isn't signed by")
    path.unlink()
    with pytest.raises(TamperError, match="checkpoint is missing, so nothing here is signed"):
        read_signed_head(ledger, KEY.verifier)


# ------------------------------------------------------------------------------------------------------- the entries


@pytest.mark.parametrize("num_steps", [0, 1, 254, 255, 256])
def test_entries_come_as_they_were_signed_and_the_edge_is_kept(tmp_path: Path, num_steps: int) -> None:
    given = items(num_steps)
    write_signed(tmp_path, given)
    head = read_head(tmp_path, KEY.verifier)
    scan = Scan(tmp_path, head)
    assert [scan.bundle, scan.details_size, scan.frontier.size] == [[], 0, 0]
    encoded = [encode_entry(entry) for entry, _ in given]
    assert list(scan) == [
        ScannedEntry(number, encoded[number], entry, encode_details(details))
        for number, (entry, details) in enumerate(given)
        if details is not None
    ]
    assert (scan.frontier.size, scan.frontier.root()) == (head.size, mth(encoded))
    assert scan.bundle == encoded[len(encoded) // 256 * 256 :]
    assert scan.details_size == (tmp_path / "details.jsonl").stat().st_size
    assert scan.history.num_steps == num_steps


def test_an_entry_without_details_takes_no_line(tmp_path: Path) -> None:
    log = items(3)
    entry = log[2][0]
    assert isinstance(entry, StepEntry)
    bare = replace(entry, details_digest=NO_DETAILS)
    assert (has_details(entry), has_details(bare)) == (True, False)
    write_signed(tmp_path, [*log[:2], (bare, None), log[3]])
    assert [one.details for one in scanned(tmp_path)] == [
        encode_details(details) if details is not None else None for _, details in [*log[:2], (bare, None), log[3]]
    ]


def test_a_log_may_go_on_beyond_its_head(tmp_path: Path) -> None:
    write_signed(tmp_path, items(255))
    for size in (0, 1, 2, 9, 255, 256):
        head = head_of(size - 1) if size else TreeHead(0, hashlib.sha256().digest())
        assert [one.index for one in scanned(tmp_path, head=head)] == list(range(size))


def test_heads_of_earlier_are_held_against_the_entries(ledger: Path) -> None:
    roots = [head_of(number) for number in range(4)]
    assert len(scanned(ledger, *roots, head_of(4), TreeHead(0, hashlib.sha256().digest()))) == 5
    for size in (1, 3, 5):
        for pinned in ([TreeHead(size, bytes(32)), *roots], [*roots, head_of(size - 1), TreeHead(size, bytes(32))]):
            assert refused(ledger, *pinned).startswith(
                f"The first {size} entries in {ledger} aren't those of the earlier checkpoint: the log was rewritten."
            )
    with pytest.raises(TamperError, match="covers 5 entries, and an earlier one covered 6: the ledger was cut back"):
        Scan(ledger, head_of(4), [head_of(2), TreeHead(6, bytes(32))])


def test_another_root_than_the_signed_one_is_refused(ledger: Path) -> None:
    found = iter(Scan(ledger, TreeHead(5, bytes(32))))
    assert [next(found).index for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(TamperError, match="don't give the root that the checkpoint signs"):
        next(found)


def test_files_that_are_missing_are_named(ledger: Path) -> None:
    for name in ("details.jsonl", "tile/entries/000.p/5", "tile/0/000.p/5"):
        data = (ledger / name).read_bytes()
        (ledger / name).unlink()
        assert f"{ledger / name} is missing" in refused(ledger)
        (ledger / name).write_bytes(data)
    assert len(scanned(ledger)) == 5


def test_a_bundle_that_is_short_damaged_or_of_other_entries_is_named(ledger: Path) -> None:
    path = ledger / "tile/entries/000.p/5"
    encoded = [encode_entry(entry) for entry, _ in items(4)]
    path.write_bytes(encode_bundle(encoded[:4]))
    assert refused(ledger) == f"{path} holds 4 of 5 entries. Restore it from a copy."
    path.write_bytes(encode_bundle(encoded)[:-1])
    assert refused(ledger) == f"{path} is damaged: it ends inside its entry 4. Restore it from a copy."
    path.write_bytes(encode_bundle([encoded[0], b"\x09nonsense", *encoded[2:]]))
    assert refused(ledger).startswith(f"Entry 1 in {ledger} isn't valid: ")


@pytest.mark.parametrize("level", ["entries", "0"])
def test_every_width_of_a_tile_holds_the_same_and_a_wider_one_may_hold_more(ledger: Path, level: str) -> None:
    folder = ledger / "tile" / level / "000.p"
    whole = (folder / "5").read_bytes()
    encoded = [encode_entry(entry) for entry, _ in items(4)]
    units = [leaf_hash(one) if level == "0" else encode_bundle([one]) for one in encoded]
    assert b"".join(units) == whole
    more = leaf_hash(b"") if level == "0" else encode_bundle([b"more"])
    for width in range(1, 5):
        (folder / str(width)).write_bytes(b"".join(units[:width]))
    (folder / "6").write_bytes(whole + more)
    full = ledger / "tile" / level / "000"
    full.write_bytes(whole + more)
    assert len(scanned(ledger)) == 5
    for path, wrong in (
        (folder / "2", b"".join(units[:2]) + b"x"),
        (folder / "2", units[0]),
        (folder / "2", units[1] + units[0]),
        (folder / "5", whole + more),
        (folder / "6", units[1] + whole),
        (full, whole[:-1]),
    ):
        before = path.read_bytes()
        path.write_bytes(wrong)
        assert refused(ledger) == f"{path} doesn't hold what the entries give. Restore it from a copy."
        path.write_bytes(before)


def test_a_narrow_tile_that_a_writer_takes_away_meanwhile_is_not_missed(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tiles.tile_files
    gone = [(3, ledger / "gone")]
    monkeypatch.setattr(reader, "tile_files", lambda *which: gone + listed(*which))
    assert len(scanned(ledger)) == 5
    (ledger / "tile/0/000.p/5").write_bytes(bytes(160))
    assert "000.p/5 doesn't hold" in refused(ledger)


def test_tiles_of_the_second_level_are_checked_when_they_are_full_and_at_the_end(tmp_path: Path) -> None:
    write_signed(tmp_path, items(257))
    assert len(scanned(tmp_path)) == 258
    for name in ("tile/0/000", "tile/0/001.p/2", "tile/1/000.p/1"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert refused(tmp_path).startswith(f"{tmp_path / name} doesn't hold")
        (tmp_path / name).write_bytes(whole)


def test_every_full_tile_is_read_in_its_place(tmp_path: Path) -> None:
    write_signed(tmp_path, items(511))
    assert len(scanned(tmp_path)) == 512
    (tmp_path / "tile/0/001").unlink()
    assert f"{tmp_path / 'tile/0/001'} is missing" in refused(tmp_path)


def test_an_entry_that_was_read_stays_as_it_is(ledger: Path) -> None:
    one = scanned(ledger)[0]
    with pytest.raises(FrozenInstanceError):
        one.index = 1  # type: ignore[misc]


def test_entries_that_no_run_has_are_named_by_their_number(tmp_path: Path) -> None:
    log = items(3)
    write_signed(tmp_path, [log[0], log[2]])
    assert refused(tmp_path).startswith(f"Entry 1 in {tmp_path} isn't valid: ")


def test_the_tree_before_an_entry_has_its_root_where_a_key_hands_over(ledger: Path) -> None:
    scan = Scan(ledger, head_of(4))
    scan.frontier = Frontier()
    leaves = [leaf_hash(bytes([n])) for n in range(3)]
    for leaf in leaves:
        scan.frontier.append(leaf)
    root = scan.frontier.root()
    assert scan._head_before(b"\x01" + KEY_KIND + b"more") == TreeHead(3, root)
    for data in (b"\x01\x00", KEY_KIND + b"\x00", b"", b"\x01" + bytes([KEY_KIND[0] + 1]) + KEY_KIND):
        assert scan._head_before(data) == TreeHead(3, b"")


def test_a_line_of_details_that_is_another_is_named_by_its_place(ledger: Path) -> None:
    path = ledger / "details.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    start = sum(map(len, lines[:2]))
    path.write_bytes(b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]))
    assert f"{path}, byte {start} (entry 2)," in refused(ledger)
    path.write_bytes(b"".join(lines[:2]))
    assert f"{path}, byte {start} (entry 2)," in refused(ledger)
    path.write_bytes(b"".join(lines) + b"more that no head covers")
    assert len(scanned(ledger)) == 5
