"""The write-ahead log byte by byte, from struct and hmac alone, and what a crash or somebody else leaves in it."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import wal as wal_module
from cosmati.ledger.note import TreeHead
from cosmati.ledger.wal import WAL_FILE, Wal, WalContent, WalFrame, read_wal

SECRET, ROOT = b"s" * 32, bytes(range(32))
MAGIC = b"\xf5WF\x01"
BATCHES: tuple[tuple[bytes, ...], ...] = ((b"one", b""), (b"two",), (), (b"x" * 300, MAGIC, b"last"))


def bundle(entries: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">H", len(one)) + one for one in entries)


def parts(base: int, batches: Sequence[Sequence[bytes]], secret: bytes = SECRET) -> list[bytes]:
    """Return header and frames as the module's docstring lays them out."""
    bodies, first = [b"COSMWAL1" + struct.pack(">Q", base) + ROOT], base
    for one in batches:
        bodies.append(MAGIC + struct.pack(">QI", first, len(bundle(one))) + bundle(one))
        first += len(one)
    found, mac = [], b""
    for body in bodies:
        mac = hmac.new(secret, mac + body, hashlib.sha256).digest()
        found.append(body + mac + hashlib.sha256(body + mac).digest()[:8])
    return found


def read(folder: Path, data: bytes) -> WalContent:
    (folder / WAL_FILE).write_bytes(data)
    return read_wal(folder)


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(TamperError) as caught:
        read(folder, data)
    return str(caught.value)


@pytest.mark.parametrize("base", [0, 7, 2**40])
def test_what_is_written_are_the_bytes_that_are_laid_out(tmp_path: Path, base: int) -> None:
    (tmp_path / WAL_FILE).write_bytes(b"what was there before, and longer than that" * 9)
    log = Wal(tmp_path, SECRET, TreeHead(base, ROOT))
    assert (tmp_path / WAL_FILE).read_bytes() == parts(base, [])[0]
    for number, one in enumerate(BATCHES, 1):
        log.append(one)
        assert (tmp_path / WAL_FILE).read_bytes() == b"".join(parts(base, BATCHES[:number]))
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.append([b"more"])


@pytest.mark.parametrize("base", [0, 7])
def test_what_is_read_is_what_was_laid_out(tmp_path: Path, base: int) -> None:
    header, *frames = parts(base, BATCHES)
    found = read(tmp_path, header + b"".join(frames))
    assert (found.head, found.body, found.mac) == (TreeHead(base, ROOT), header[:48], header[48:80])
    starts = [base, base + 2, base + 3, base + 3]
    assert found.frames == tuple(
        WalFrame(first, entries, frame[:-40], frame[-40:-8])
        for first, entries, frame in zip(starts, BATCHES, frames, strict=True)
    )
    every = [one for batch in BATCHES for one in batch]
    assert found.entries == dict(enumerate(every, base))
    found.authenticate(SECRET)
    assert read(tmp_path, header).entries == {}
    for one in (found, found.frames[0]):
        with pytest.raises(FrozenInstanceError):
            one.mac = b""  # type: ignore[misc]


def test_a_chain_holds_with_its_own_secret_alone_and_the_part_that_does_not_is_named(tmp_path: Path) -> None:
    mine, theirs = parts(3, BATCHES), parts(3, BATCHES, b"t" * 32)
    for number in range(len(mine)):
        for later in (theirs[number:], [theirs[number], *mine[number + 1 :]]):
            content = read(tmp_path, b"".join([*mine[:number], *later]))
            with pytest.raises(TamperError, match=rf"Part {number} of the write-ahead log wasn't written with this"):
                content.authenticate(SECRET)
    # A good frame of another chain doesn't follow from the one before.
    moved = read(tmp_path, b"".join([*parts(3, [(b"a",)]), parts(4, [(b"c",)])[1]]))
    with pytest.raises(TamperError, match="Part 2 of"):
        moved.authenticate(SECRET)


@pytest.mark.parametrize("cut", [1, 8, 9, 40, 41, 47])
def test_a_torn_frame_at_the_end_is_left_alone_at_every_byte(tmp_path: Path, cut: int) -> None:
    header, *frames = parts(2, [(b"one",), (b"two",)])
    whole = header + b"".join(frames)
    assert len(read(tmp_path, whole[:-cut]).frames) == 1
    assert len(read(tmp_path, header + frames[0][:-cut]).frames) == 0
    changed = bytearray(whole)
    changed[-cut] ^= 1
    assert len(read(tmp_path, bytes(changed)).frames) == 1
    assert len(read(tmp_path, whole + bytes(cut)).frames) == 2
    assert len(read(tmp_path, whole + MAGIC[:cut]).frames) == 2


def test_every_cut_of_a_log_reads_as_the_frames_that_are_whole(tmp_path: Path) -> None:
    header, *frames = parts(2, BATCHES)
    whole = header + b"".join(frames)
    ends = [len(header) + sum(map(len, frames[:number])) for number in range(len(frames) + 1)]
    for size in range(len(header), len(whole) + 1):
        assert len(read(tmp_path, whole[:size]).frames) == sum(end <= size for end in ends) - 1


def test_damage_before_a_whole_frame_is_told_with_both_places(tmp_path: Path) -> None:
    header, *frames = parts(2, [(b"one",), (MAGIC + b"within",), (b"three",)])
    starts = [len(header), len(header) + len(frames[0]), len(header) + len(frames[0]) + len(frames[1])]
    path = tmp_path / WAL_FILE
    for number in (0, 1):
        for at in (0, 3, 4, 12, 16, len(frames[number]) - 41, len(frames[number]) - 1):
            whole = bytearray(header + b"".join(frames))
            whole[starts[number] + at] ^= 1
            assert refused(tmp_path, bytes(whole)) == (
                f"{path} is damaged at byte {starts[number]}, before a whole frame at {starts[number + 1]}. Restore it."
            )
    # Also where what is damaged is a byte, or lies far behind.
    for gap in (b"x", bytes(500), MAGIC, MAGIC * 30):
        torn = header + frames[0] + gap + frames[1]
        whole_again = starts[1] + len(gap)
        assert refused(tmp_path, torn).endswith(
            f"at byte {starts[1]}, before a whole frame at {whole_again}. Restore it."
        )
    assert len(read(tmp_path, header + frames[0] + MAGIC * 30).frames) == 1


def test_a_frame_that_does_not_follow_is_told_with_what_is_lacking(tmp_path: Path) -> None:
    header, *_ = parts(2, [])
    far, near = parts(7, [(b"far",)])[1], parts(2, [(b"near",), (b"next",)])[1:]
    assert refused(tmp_path, header + far) == (
        f"{tmp_path / WAL_FILE} lacks the entries 2 to 6. Restore it from a copy."
    )
    assert "lacks the entries 3 to 6." in refused(tmp_path, header + near[0] + far)
    assert "lacks the entries 3 to 1." in refused(tmp_path, header + near[0] + near[0])


def test_a_damaged_header_and_a_missing_file_are_told(tmp_path: Path) -> None:
    header = parts(2, [])[0]
    assert len(header) == 88
    wrong = [header[:size] for size in (0, 7, 8, 47, 87)]
    for at in (0, 7, 8, 15, 16, 47, 48, 79, 80, 87):
        changed = bytearray(header)
        changed[at] ^= 1
        wrong.append(bytes(changed))
    other = b"COSMWAL2" + header[8:80]
    wrong.append(other + hashlib.sha256(other).digest()[:8])
    for data in wrong:
        said = f"The header of {tmp_path / WAL_FILE} is damaged. Restore it from a copy."
        assert refused(tmp_path, data) == said
        assert refused(tmp_path, data + b"\1" * 200) == said
    (tmp_path / WAL_FILE).unlink()
    with pytest.raises(TamperError, match=r"wal is missing, and with it entries that may have been flushed\. Restore"):
        read_wal(tmp_path)


def test_a_batch_that_is_too_large_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 32

    log = Wal(tmp_path, SECRET, TreeHead(0, ROOT))
    with monkeypatch.context() as patch:
        patch.setattr(wal_module, "encode_bundle", lambda _: Long())
        with pytest.raises(LedgerError, match="over 4 GiB") as caught:
            log.append([b"one"])
        assert not isinstance(caught.value, TamperError)
    log.append([b"one"])
    log.close()
    content = read_wal(tmp_path)
    content.authenticate(SECRET)
    assert content.entries == {0: b"one"}


def test_what_the_disk_refused_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("full")

    log = Wal(tmp_path, SECRET, TreeHead(4, ROOT))
    with monkeypatch.context() as patch:
        patch.setattr(wal_module, "write_all", full)
        with pytest.raises(OSError, match="full"):
            log.append([b"lost", b"too"])
    log.append([b"kept"])
    log.close()
    read_wal(tmp_path).authenticate(SECRET)
    assert read_wal(tmp_path).entries == {4: b"kept"}


def test_what_somebody_else_appends_stays_before_what_is_appended_next(tmp_path: Path) -> None:
    log = Wal(tmp_path, SECRET, TreeHead(0, ROOT))
    with (tmp_path / WAL_FILE).open("ab") as file:
        file.write(b"torn")
        os.fsync(file.fileno())
    log.append([b"one"])
    log.close()
    assert (tmp_path / WAL_FILE).read_bytes() == b"torn".join(parts(0, [(b"one",)]))
