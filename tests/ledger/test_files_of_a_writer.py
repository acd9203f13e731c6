"""A writer's files hold what was appended, however it was cut into batches and heads; errors leave nothing open."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import files as module
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import decode_entry, encode_entry
from cosmati.ledger.files import LedgerFiles, check_overlap, create_files, is_unbegun, open_files, publish_head
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, parse_checkpoint, signature_lines
from cosmati.ledger.reader import read_head
from cosmati.ledger.rotation import check_rotation
from cosmati.ledger.tiles import encode_bundle
from cosmati.ledger.wal import Wal, read_wal
from cosmati.records.ledger import CheckpointEntry, KeyEntry
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest
from .test_verify import Item, items

KEY, NEXT = SigningKey.generate(ORIGIN), SigningKey.generate(ORIGIN)
ITEMS: list[Item] = [
    *items(3),
    (CheckpointEntry(3, digest("state"), digest("root")), None),
    *items(270)[4:],
]
DATA = [encode_entry(entry) for entry, _ in ITEMS]
LINES = [None if details is None else encode_details(details) for _, details in ITEMS]


def append(files: LedgerFiles, start: int, end: int) -> None:
    files.append(list(zip(DATA[start:end], LINES[start:end], strict=True)))


def head_of(size: int) -> TreeHead:
    return TreeHead(size, mth(DATA[:size]))


def details_of(start: int, end: int) -> bytes:
    return b"".join(line + b"\n" for line in LINES[start:end] if line is not None)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def make_stale(ledger: Path) -> None:
    (ledger / "epoch").write_text("99 somebody else\n")


@pytest.mark.parametrize("cuts", [(0, 4, 9), (0, 256, 270), (0, 255, 256, 257), (0, 3, 260, 261, 270)])
def test_entries_are_read_back_signed_or_not(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    files, history = create_files(tmp_path / "l", KEY)
    assert (history.size, files.head, files.num_unsigned) == (0, head_of(0), 0)
    size = cuts[-1]
    for start, end in pairwise(cuts):
        append(files, start, end)
        assert (files.num_unsigned, files.head, files.frontier.size) == (end - start, head_of(start), end)
        edges = {0, 1, 3, 255, 256, 257, start - 1, start, start + 1, end - 1, end}
        for a in sorted(edge for edge in edges if 0 <= edge <= end):
            for b in sorted(edge for edge in edges if a <= edge <= end):
                assert files.entries(a, b) == DATA[a:b]
        if end < size:
            assert files.checkpoint() == head_of(end) == files.head == read_head(tmp_path / "l", KEY.verifier)
            assert (files.num_unsigned, read_wal(tmp_path / "l").frames) == (0, ())
            assert files.entries(0, end) == DATA[:end]
    assert (tmp_path / "l" / "details.jsonl").read_bytes() == details_of(0, size)
    assert list(read_wal(tmp_path / "l").entries.items()) == list(enumerate(DATA))[cuts[-2] : size]
    files.close()


def test_full_tiles_take_the_place_of_narrow_ones(tmp_path: Path) -> None:
    tile = tmp_path / "l" / "tile"
    files, _ = create_files(tmp_path / "l", KEY)
    append(files, 0, 250)
    files.checkpoint()
    append(files, 250, 253)
    files.checkpoint()
    found = {str(path.relative_to(tile)) for path in tile.rglob("*") if path.is_file()}
    assert found == {f"{level}/000.p/{width}" for level in ("entries", "0") for width in (250, 253)}
    append(files, 253, 256)
    files.checkpoint()
    found = {str(path.relative_to(tile)) for path in tile.rglob("*") if path.is_file()}
    assert found == {"entries/000", "0/000", "1/000.p/1"}
    append(files, 256, 260)
    files.checkpoint()
    files.close()
    assert (tile / "entries" / "000").read_bytes() == encode_bundle(DATA[:256])
    assert (tile / "entries" / "001.p" / "4").read_bytes() == encode_bundle(DATA[256:260])
    assert read_head(tmp_path / "l", KEY.verifier) == head_of(260)


def test_a_head_is_signed_again_only_where_something_came(tmp_path: Path) -> None:
    files, _ = create_files(tmp_path / "l", KEY)
    append(files, 0, 3)
    files.checkpoint()
    inodes = [(tmp_path / "l" / name).stat().st_ino for name in ("checkpoint", "wal")]
    make_stale(tmp_path / "l")
    assert files.checkpoint() == head_of(3), "nothing is to be written"
    assert [(tmp_path / "l" / name).stat().st_ino for name in ("checkpoint", "wal")] == inodes
    files.close()


def test_a_stale_writer_appends_signs_and_hands_over_nothing(tmp_path: Path) -> None:
    files, _ = create_files(tmp_path / "l", KEY)
    append(files, 0, 2)
    epoch = (tmp_path / "l" / "epoch").read_text()
    make_stale(tmp_path / "l")
    before = {path: path.read_bytes() for path in (tmp_path / "l").rglob("*") if path.is_file()}
    with pytest.raises(LedgerError, match="stale"):
        append(files, 2, 3)
    with pytest.raises(LedgerError, match="stale"):
        files.checkpoint()
    assert before == {path: path.read_bytes() for path in (tmp_path / "l").rglob("*") if path.is_file()}
    (tmp_path / "l" / "epoch").write_text(epoch)
    files.checkpoint()
    make_stale(tmp_path / "l")
    with pytest.raises(LedgerError, match="stale"):
        files.rotate(NEXT)
    assert read_head(tmp_path / "l", KEY.verifier) == head_of(2)
    files.close()


def test_what_was_not_signed_is_signed_before_the_key_hands_over(tmp_path: Path) -> None:
    files, _ = create_files(tmp_path / "l", KEY)
    append(files, 0, 2)
    head = files.rotate(NEXT)
    [data] = files.entries(2, 3)
    entry = decode_entry(data)
    assert isinstance(entry, KeyEntry)
    check_rotation(entry, head_of(2))
    assert (entry.old_key, entry.new_key) == (KEY.verifier.public, NEXT.verifier.public)
    assert head == files.head == TreeHead(3, mth([*DATA[:2], data]))
    note = (tmp_path / "l" / "checkpoint").read_bytes()
    assert parse_checkpoint(note, KEY.verifier) == parse_checkpoint(note, NEXT.verifier) == head
    assert len(signature_lines(note)) == 2
    assert read_wal(tmp_path / "l").head == head_of(2)
    files.close()


def test_a_head_is_signed_by_its_key_and_by_the_others_that_are_given(tmp_path: Path) -> None:
    for others in ((), (NEXT,), (NEXT, SigningKey.generate(ORIGIN))):
        publish_head(tmp_path, KEY, head_of(3), *others)
        note = (tmp_path / "checkpoint").read_bytes()
        assert [line.key_id for line in signature_lines(note)] == [o.verifier.key_id for o in (KEY, *others)]
        assert all(parse_checkpoint(note, one.verifier) == head_of(3) for one in (KEY, *others))


def test_descriptors_are_closed_with_what_they_are_of(tmp_path: Path) -> None:
    files, _ = create_files(tmp_path / "l", KEY)
    append(files, 0, 1)
    first = files._wal
    assert isinstance(first, Wal)
    files.checkpoint()
    second = files._wal
    assert isinstance(second, Wal)
    assert (is_open(first._descriptor), is_open(second._descriptor), is_open(files._details)) == (False, True, True)
    with pytest.raises(LedgerError, match="has a writer already"):
        open_files(tmp_path / "l", KEY)
    files.close()
    assert (is_open(second._descriptor), is_open(files._details)) == (False, False)
    open_files(tmp_path / "l", KEY)[0].close()


# ------------------------------------------------------------------------------------------------------------- a start


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (None, True),
        ({}, True),
        ({"lock": b"", "epoch": b"1", "operator.vkey": b"k", "details.jsonl": b""}, True),
        ({"checkpoint.tmp": b"torn", "anything.tmp": b"x"}, True),
        ({"details.jsonl": b"{}\n"}, False),
        ({"details.jsonl": b"x"}, False),
        ({"checkpoint": b""}, False),
        ({"notes.txt": b""}, False),
        ({"lock": b"", "other": b""}, False),
    ],
)
def test_a_folder_is_unbegun_where_nothing_was_appended(
    tmp_path: Path, left: dict[str, bytes] | None, expected: bool
) -> None:
    ledger = tmp_path / "l"
    if left is not None:
        ledger.mkdir()
        for name, data in left.items():
            (ledger / name).write_bytes(data)
    assert is_unbegun(ledger) is expected
    if expected:
        create_files(ledger, KEY)[0].close()
    else:
        with pytest.raises(LedgerError, match="isn't empty, so no new ledger is started"):
            create_files(ledger, KEY)
        assert not (ledger / "operator.vkey").exists()


def test_a_log_with_entries_has_begun_and_an_empty_one_has_not(tmp_path: Path) -> None:
    wal = Wal(tmp_path, bytes(32), head_of(0))
    assert is_unbegun(tmp_path) is True
    wal.append([DATA[0]])
    wal.close()
    assert is_unbegun(tmp_path) is False
    (tmp_path / "wal").write_bytes(b"x" * 200)
    with pytest.raises(TamperError):
        is_unbegun(tmp_path)


def test_a_new_ledger_is_one_before_it_is_open_and_its_folder_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[tuple[Path, bool]]()
    ledger = tmp_path / "deep" / "l"
    monkeypatch.setattr(module, "sync", lambda path: synced.append((path, (ledger / "checkpoint").exists())))
    create_files(ledger, KEY)[0].close()
    assert synced == [(tmp_path / "deep", True)]
    assert (ledger / "operator.vkey").read_text() == KEY.verifier.text + "\n"
    assert (ledger / "details.jsonl").read_bytes() == b""
    assert read_head(ledger, KEY.verifier) == head_of(0)
    assert read_wal(ledger).entries == {}


@pytest.mark.parametrize("name", ["replace_file", "Scan", "Wal", "publish_head", "sync"])
def test_a_start_that_fails_anywhere_keeps_no_lock_while_the_error_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = list[LedgerFiles]()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    class Watched(LedgerFiles):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        patch.setattr(module, "LedgerFiles", Watched)
        with pytest.raises(OSError, match="No space left") as held:
            create_files(tmp_path / "l", KEY)
    assert not any(is_open(one._details) for one in made)
    (tmp_path / "l" / "checkpoint").unlink(missing_ok=True)
    create_files(tmp_path / "l", KEY)[0].close()
    assert held.value.errno == 28


# ------------------------------------------------------------------------------------------------------------ going on


def crashed(place: Path, signed: int, size: int) -> Path:
    """A ledger of which so many entries are signed, and the rest stands in its log alone."""
    files, _ = create_files(place / "l", KEY)
    if signed:
        append(files, 0, signed)
        files.checkpoint()
    for start in range(signed, size):
        append(files, start, start + 1)
    files.close()
    return place / "l"


@pytest.mark.parametrize(("signed", "size"), [(0, 1), (2, 6), (3, 3), (250, 258)])
def test_what_the_log_holds_is_taken_signed_and_what_was_torn_is_cut(tmp_path: Path, signed: int, size: int) -> None:
    ledger = crashed(tmp_path, signed, size)
    assert read_head(ledger, KEY.verifier) == head_of(signed)
    with (ledger / "details.jsonl").open("ab") as details:
        details.write(b'{"torn": ')
    drafts = [ledger / "checkpoint.tmp", ledger / "tile" / "deeper.tmp"]
    drafts[1].parent.mkdir(exist_ok=True)
    for draft in drafts:
        draft.write_bytes(b"x")
    files, history = open_files(ledger, KEY)
    assert (history.size, files.head, files.num_unsigned) == (size, head_of(size), 0)
    assert (ledger / "details.jsonl").read_bytes() == details_of(0, size)
    assert read_head(ledger, KEY.verifier) == head_of(size)
    assert read_wal(ledger).entries == {}
    assert not any(draft.exists() for draft in drafts)
    append(files, size, size + 2)
    assert files.checkpoint() == head_of(size + 2)
    files.close()


def test_a_log_that_a_crash_left_behind_its_checkpoint_repeats_nothing(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 2, 6)
    wal = (ledger / "wal").read_bytes()
    open_files(ledger, KEY)[0].close()
    (ledger / "wal").write_bytes(wal)
    files, history = open_files(ledger, KEY)
    assert (history.size, files.head) == (6, head_of(6))
    files.close()


def test_a_log_of_another_history_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 2, 3)
    secret = KEY.derive("write-ahead log")
    good = (ledger / "wal").read_bytes()
    for data, match in (
        ([DATA[5]], r"write-ahead log in .* doesn't fit: .*step 3 of attempt 0"),
        ([b"\x01\xff"], "write-ahead log in .* doesn't fit: "),
    ):
        wal = Wal(ledger, secret, head_of(2))
        wal.append(data)
        wal.close()
        with pytest.raises(TamperError, match=match) as held:
            open_files(ledger, KEY)
        assert str(ledger) in str(held.value)
        assert read_head(ledger, KEY.verifier) == head_of(2)
    wal = Wal(ledger, bytes(32), head_of(2))
    wal.append(DATA[2:3])
    wal.close()
    with pytest.raises(TamperError, match="wasn't written with this operator's key") as held:
        open_files(ledger, KEY)
    (ledger / "wal").write_bytes(good)
    lines = (ledger / "details.jsonl").read_bytes()
    (ledger / "details.jsonl").write_bytes(lines[:-3] + b"x}\n")
    place = rf"details\.jsonl, byte {len(details_of(0, 2))}, doesn't hold"
    with pytest.raises(TamperError, match=place) as held:
        open_files(ledger, KEY)
    (ledger / "details.jsonl").write_bytes(lines)
    assert held.value.__traceback__ is not None, "what it holds on to isn't let go by being forgotten"
    open_files(ledger, KEY)[0].close()


def test_a_later_line_of_details_is_named_by_its_own_place(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 0, 5)
    lines = (ledger / "details.jsonl").read_bytes()
    (ledger / "details.jsonl").write_bytes(lines[:-3] + b"x}\n")
    with pytest.raises(TamperError, match=rf"byte {len(details_of(0, 3))}, doesn't hold"):
        open_files(ledger, KEY)


def test_another_operators_key_opens_nothing(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 2, 2)
    with pytest.raises(LedgerError, match="with which it was created") as caught:
        open_files(ledger, NEXT)
    assert KEY.verifier.text in str(caught.value)
    assert NEXT.verifier.text in str(caught.value)


def test_a_ledger_that_has_handed_over_is_not_opened_with_the_old_key(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 2, 2)
    files, _ = open_files(ledger, KEY)
    files.rotate(NEXT)
    files.close()
    with pytest.raises(TamperError, match="hand over to the key"):
        open_files(ledger, KEY)


def test_an_entry_of_the_log_is_that_of_the_tree_where_both_have_it() -> None:
    check_overlap({}, 0, b"a")
    check_overlap({0: b"a", 1: b"b"}, 1, b"b")
    with pytest.raises(TamperError, match="Entry 1 of the write-ahead log isn't that of the tree"):
        check_overlap({0: b"a", 1: b"b"}, 1, b"a")
    with pytest.raises(TamperError):
        check_overlap({0: b""}, 0, b"a")


def test_a_log_that_is_not_the_trees_opens_nothing_and_keeps_no_lock(tmp_path: Path) -> None:
    ledger = crashed(tmp_path, 2, 2)
    good = (ledger / "wal").read_bytes()
    wal = Wal(ledger, KEY.derive("write-ahead log"), head_of(0))
    wal.append([DATA[0], DATA[2]])
    wal.close()
    with pytest.raises(TamperError, match="Entry 1 of the write-ahead log isn't that of the tree") as held:
        open_files(ledger, KEY)
    (ledger / "wal").write_bytes(good)
    open_files(ledger, KEY)[0].close()
    assert held.value.__traceback__ is not None
