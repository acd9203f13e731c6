from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.reader import read_head
from cosmati.ledger.tiles import Frontier, encode_bundle, tile_path
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import EndEntry, Entry, RunEntry, TimeEntry
from cosmati.storage.merkle import leaf_hash

from .ledgers import ORIGIN, append_steps, run_entry, step_entry, write_run

pytestmark = pytest.mark.long

KEY = SigningKey.generate(ORIGIN)
UNCOVERED = {"lock", "epoch"}  # they keep writers apart and say nothing about the run

Item = tuple[Entry, dict[str, object] | None]


def signed_files(items: list[Item], key: SigningKey = KEY) -> dict[str, bytes]:
    """Return the files of a ledger of any entries, with a good signature: the writer would not make them."""
    encoded = [encode_entry(entry) for entry, _ in items]
    frontier, tiles = Frontier(), []
    for data in encoded:
        tiles += frontier.append(leaf_hash(data))
    files = {tile_path(level, i, len(h)): b"".join(h) for level, i, h in (*tiles, *frontier.partial_tiles())}
    for start in range(0, len(encoded), 256):
        chunk = encoded[start : start + 256]
        files[tile_path("entries", start // 256, len(chunk))] = encode_bundle(chunk)
    head = TreeHead(frontier.size, frontier.root())
    files["checkpoint"] = key.sign_note(checkpoint_text(key.name, head)).encode()
    files["operator.vkey"] = (key.verifier.text + "\n").encode()
    files["details.jsonl"] = b"".join(encode_details(d) + b"\n" for _, d in items if d is not None)
    return files


def write_signed(directory: Path, items: list[Item], key: SigningKey = KEY) -> None:
    """Write the files of a ledger of any entries."""
    for name, data in signed_files(items, key).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def items(num_steps: int) -> list[Item]:
    return [run_entry(), *(step_entry(step) for step in range(num_steps))]


def ledger_files(directory: Path) -> Iterator[Path]:
    return (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name not in UNCOVERED)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_every_file_is_found(tmp_path: Path, every: int) -> None:
    writer = write_run(tmp_path / "l", KEY, 2, every=1000)
    writer.checkpoint()
    append_steps(writer, range(2, 5))
    writer.close()
    assert verify_ledger(tmp_path / "l").size == 7
    found = list(ledger_files(tmp_path / "l"))
    # Two sizes were signed, so two widths of each tile and bundle are covered.
    assert len(found) == 4 + 4
    for path in found:
        data = path.read_bytes()
        for position in range(0, len(data), every):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(TamperError):
                verify_ledger(tmp_path / "l")
        path.write_bytes(data)
    assert verify_ledger(tmp_path / "l").size == 7


def test_flipped_bytes_of_full_tiles_are_found(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 230, every=1000) as writer:
        assert writer.size > 256
    paths = list(ledger_files(tmp_path / "l"))
    assert {"000", "1"} <= {p.name for p in paths}
    for path in paths:
        data = path.read_bytes()
        for position in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(TamperError):
                verify_ledger(tmp_path / "l")
        path.write_bytes(data)


def test_every_missing_or_truncated_file_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 9).close()
    for path in ledger_files(tmp_path / "l"):
        data = path.read_bytes()
        for size in {0, 1, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:size])
            with pytest.raises(TamperError):
                verify_ledger(tmp_path / "l")
        if path.name != "wal":  # an archived ledger has none
            path.unlink()
            with pytest.raises(TamperError, match="missing"):
                verify_ledger(tmp_path / "l")
        path.write_bytes(data)
    (tmp_path / "l/wal").unlink()
    assert verify_ledger(tmp_path / "l").num_steps == 9


def test_bytes_added_to_a_covered_file_are_found(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 230, every=1000):
        pass
    for path in ledger_files(tmp_path / "l"):
        if path.name in {"details.jsonl", "wal"}:  # their ends are beyond the checkpoint
            continue
        data = path.read_bytes()
        path.write_bytes(data + data[:32])
        with pytest.raises(TamperError):
            verify_ledger(tmp_path / "l")
        path.write_bytes(data)
    assert verify_ledger(tmp_path / "l").num_steps == 230


def swap_lines(ledger: Path) -> None:
    lines = (ledger / "details.jsonl").read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    (ledger / "details.jsonl").write_bytes(b"".join(lines))


def drop_line(ledger: Path) -> None:
    lines = (ledger / "details.jsonl").read_bytes().splitlines(keepends=True)
    (ledger / "details.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))


def keep_tiles(ledger: Path, change: Callable[[list[Item]], list[Item]]) -> None:
    """Rebuild tiles, bundles and details for changed entries; keep the checkpoint, whose key isn't known."""
    checkpoint = (ledger / "checkpoint").read_bytes()
    shutil.rmtree(ledger)
    write_signed(ledger, change(items(9)))
    (ledger / "checkpoint").write_bytes(checkpoint)


def drop_entry(ledger: Path) -> None:
    keep_tiles(ledger, lambda old: old[:-2] + old[-1:])


def reorder_entries(ledger: Path) -> None:
    keep_tiles(ledger, lambda old: [*old[:4], old[5], old[4], *old[6:]])


def change_entry(ledger: Path) -> None:
    keep_tiles(ledger, lambda old: [*old[:-1], step_entry(8, salt="other")])


@pytest.mark.parametrize("tamper", [swap_lines, drop_line, drop_entry, reorder_entries, change_entry])
def test_rebuilding_without_the_operators_key_is_found(tmp_path: Path, tamper: Callable[[Path], None]) -> None:
    write_signed(tmp_path / "l", items(9))
    assert verify_ledger(tmp_path / "l").num_steps == 9
    tamper(tmp_path / "l")
    with pytest.raises(TamperError):
        verify_ledger(tmp_path / "l")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_pinned_checkpoint_finds_what_the_operator_rewrites(tmp_path: Path, as_text: bool) -> None:
    write_signed(tmp_path / "old", items(5))
    text, head = (tmp_path / "old/checkpoint").read_text(), read_head(tmp_path / "old", KEY.verifier)
    pinned = text if as_text else head
    write_signed(tmp_path / "longer", items(300))
    assert verify_ledger(tmp_path / "longer", pinned=pinned).pinned_size == 6
    write_signed(tmp_path / "changed", [*items(4), step_entry(4, salt="other"), *items(9)[6:]])
    assert verify_ledger(tmp_path / "changed").num_steps == 9
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(tmp_path / "changed", pinned=pinned)
    write_signed(tmp_path / "cut", items(3))
    assert verify_ledger(tmp_path / "cut").num_steps == 3
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "cut", pinned=pinned)


def test_a_pinned_checkpoint_must_be_the_operators(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(5))
    write_signed(tmp_path / "other", items(3), SigningKey.generate(ORIGIN))
    with pytest.raises(TamperError, match="pinned checkpoint"):
        verify_ledger(tmp_path / "l", pinned=(tmp_path / "other/checkpoint").read_text())


def test_an_older_checkpoint_put_back_is_found(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 2)
    writer.checkpoint()
    old = (tmp_path / "l/checkpoint").read_bytes()
    append_steps(writer, range(2, 4))
    writer.close()
    (tmp_path / "l/checkpoint").write_bytes(old)
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(tmp_path / "l")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda old: old[1:], "only entry 0"),
        (lambda old: [old[0], *old], "only entry 0"),
        (lambda old: old[:3] + old[4:], "must follow"),
        (lambda old: [*old[:3], old[4], old[3]], "must follow"),
        (lambda old: [*old, old[-1]], "must follow"),
        (lambda old: [*old, (TimeEntry(6, 0), None)], "a time after 6 steps, and only 5 stand"),
        (lambda old: [*old, (EndEntry(5, "x", bytes(32)), None), (TimeEntry(5, 0), None)], "can only resume"),
        (lambda old: [(TimeEntry(0, 0), None), *old], "only entry 0"),
    ],
)
def test_signed_entries_in_an_order_that_no_run_has_are_refused(
    tmp_path: Path, change: Callable[[list[Item]], list[Item]], reason: str
) -> None:
    write_signed(tmp_path / "l", change(items(5)))
    with pytest.raises(TamperError, match=reason):
        verify_ledger(tmp_path / "l")


def test_keys_are_compared_with_the_one_that_is_trusted(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", items(2))
    other = SigningKey.generate(ORIGIN)
    assert verify_ledger(tmp_path / "l", vkey=KEY.verifier.text).key_id == KEY.verifier.key_id.hex()
    with pytest.raises(TamperError, match="you trust"):
        verify_ledger(tmp_path / "l", vkey=other.verifier.text)
    (tmp_path / "l/operator.vkey").write_text(other.verifier.text + "\n")
    with pytest.raises(TamperError, match="isn't signed by"):
        verify_ledger(tmp_path / "l")
    with pytest.raises(LedgerError, match="no verifier key"):
        verify_ledger(tmp_path / "l", vkey="nonsense")


def test_directories_without_a_ledger_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(LedgerError, match="no ledger"):
            verify_ledger(path)


def test_an_empty_ledger_verifies(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", [])
    report = verify_ledger(tmp_path / "l")
    assert (report.size, report.num_steps, report.num_attempts) == (0, 0, 0)
    assert report.evidence_level == "L0: consistent in itself, operator-asserted"


def test_an_entry_of_another_version_is_refused_with_its_place(tmp_path: Path) -> None:
    entry, details = run_entry()
    assert isinstance(entry, RunEntry)
    write_signed(tmp_path / "l", [(entry, details)])
    bundle = tmp_path / "l/tile/entries/000.p/1"
    data = bytearray(bundle.read_bytes())
    data[2] = 9
    leaf = leaf_hash(bytes(data[2:]))
    bundle.write_bytes(data)
    (tmp_path / "l/tile/0/000.p/1").write_bytes(leaf)
    (tmp_path / "l/checkpoint").write_text(KEY.sign_note(checkpoint_text(ORIGIN, TreeHead(1, leaf))))
    with pytest.raises(TamperError, match=r"Entry 0 .* version 9"):
        verify_ledger(tmp_path / "l")


def test_tiles_that_were_written_before_a_crash_and_never_signed_are_not_covered(tmp_path: Path) -> None:
    """Tiles go before the checkpoint: after a crash between them a full tile holds more than the head covers."""
    writer = write_run(tmp_path / "l", KEY, 150, every=10_000)
    signed = writer.checkpoint()
    head = (tmp_path / "l/checkpoint").read_bytes()
    append_steps(writer, range(150, 260))
    writer.flush()
    log = (tmp_path / "l/wal").read_bytes()
    writer.close()
    whole = verify_ledger(tmp_path / "l")
    assert signed.size < 256 < whole.size
    (tmp_path / "l/checkpoint").write_bytes(head)
    (tmp_path / "l/wal").write_bytes(log)
    report = verify_ledger(tmp_path / "l")
    assert (report.size, report.root) == (signed.size, signed.root.hex())
    assert (report.num_steps, report.num_unsigned) == (150, whole.size - signed.size)
    LedgerWriter.open(tmp_path / "l", key=KEY).close()
    assert verify_ledger(tmp_path / "l").root == whole.root
