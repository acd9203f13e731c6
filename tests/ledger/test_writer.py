from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.files import is_unbegun
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import read_head
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.wal import read_wal
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import NO_DETAILS, CheckpointEntry, Entry, ResumeEntry, StepEntry
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, POLICY, append_steps, digest, end_entry, run_entry, step_entry, write_run

KEY = SigningKey.generate(ORIGIN)


def expected_entries(num_steps: int) -> list[Entry]:
    """Return what `write_run` writes, listed by hand."""
    entries: list[Entry] = [run_entry()[0]]
    for step in range(num_steps):
        entries.append(step_entry(step)[0])
        if step % 4 == 3:
            entries.append(CheckpointEntry(step + 1, digest(f"state {step}"), digest(f"root {step}")))
    return entries


def test_a_start_that_was_killed_anywhere_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was appended, so that nothing is lost; once something was, nothing is made anew."""
    replace, fsync, directory = Path.replace, os.fsync, tmp_path / "l"

    def snapshot() -> None:
        shutil.copytree(directory, tmp_path / f"{len(list(tmp_path.iterdir())):03d}")

    def stops(draft: Path, to: Path) -> Path:
        snapshot()
        replace(draft, to)
        snapshot()
        return to

    with monkeypatch.context() as watched:
        watched.setattr(Path, "replace", stops)
        watched.setattr(os, "fsync", lambda descriptor: (snapshot(), fsync(descriptor)))
        LedgerWriter.create(directory, origin=ORIGIN, key=KEY).close()
    left = sorted(tmp_path.glob("0*"))
    begun = [one for one in left if (one / "checkpoint").exists()]
    assert len(left) > 12
    assert begun == left[-len(begun) :], "the checkpoint comes last"
    for one in left:
        opened = LedgerWriter.open(one, key=KEY) if one in begun else LedgerWriter.create(one, origin=ORIGIN, key=KEY)
        with opened as writer:
            writer.append(*run_entry())
            append_steps(writer, range(2))
        assert verify_ledger(one).num_steps == 2
        assert not is_unbegun(one)
    write_run(tmp_path / "m", KEY, 1).close()
    for name in ("checkpoint", "wal", "tile"):  # With entries it's never taken for a start.
        path = tmp_path / "m" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert not is_unbegun(tmp_path / "m")
        with pytest.raises(LedgerError, match="isn't empty"):
            LedgerWriter.create(tmp_path / "m", origin=ORIGIN, key=KEY)


@pytest.mark.parametrize("every", [1, 7, 64, 10_000])
def test_what_was_appended_is_read_back_whenever_it_was_signed(tmp_path: Path, every: int) -> None:
    num_steps = 240 if every > 1 else 12
    expected = expected_entries(num_steps)
    with write_run(tmp_path / "l", KEY, num_steps, every=every) as writer:
        assert writer.size == len(expected)
        assert writer.entries(0, writer.size) == expected
        assert writer.entries(3, 11) == expected[3:11]
        head = writer.checkpoint()
        assert writer.entries(5, writer.size) == expected[5:]
    assert head == TreeHead(len(expected), mth([encode_entry(e) for e in expected]))
    report = verify_ledger(tmp_path / "l", vkey=KEY.verifier.text)
    assert (report.size, report.root) == (head.size, head.root.hex())
    assert (report.num_steps, report.num_attempts, report.num_unsigned) == (num_steps, 1, 0)


def test_a_ledger_goes_on_where_it_stopped_and_old_heads_stay_prefixes(tmp_path: Path) -> None:
    heads = []
    write_run(tmp_path / "l", KEY, 0).close()
    for start in range(0, 330, 55):
        with LedgerWriter.open(tmp_path / "l", key=KEY, checkpoint_every=17) as writer:
            append_steps(writer, range(start, start + 55))
        heads.append((read_head(tmp_path / "l", KEY.verifier), (tmp_path / "l/checkpoint").read_text()))
    for head, text in heads:
        assert verify_ledger(tmp_path / "l", pinned=text).pinned_size == head.size
    assert not (tmp_path / "l/tile/0/000.p").exists()


def test_checkpoints_come_by_count_and_by_time(tmp_path: Path) -> None:
    by_count = write_run(tmp_path / "a", KEY, 0, every=8)
    append_steps(by_count, range(12))
    by_count.flush()
    by_time = LedgerWriter.create(tmp_path / "b", origin=ORIGIN, key=KEY, checkpoint_seconds=0.05)
    by_time.append(*run_entry())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and read_head(tmp_path / "b", KEY.verifier).size < 1:
        time.sleep(0.01)
    assert read_head(tmp_path / "b", KEY.verifier).size == 1
    by_count.entries(0, 0)
    assert read_head(tmp_path / "a", KEY.verifier).size >= 8
    by_count.close()
    by_time.close()


def test_flushed_entries_are_on_disk_and_reported_as_unsigned(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 3, every=1000)
    writer.checkpoint()
    append_steps(writer, range(3, 6))
    writer.flush()
    report = verify_ledger(tmp_path / "l")
    assert (report.size, report.num_unsigned) == (4, 4)
    assert [encode_entry(e) for e in expected_entries(6)[4:]] == list(read_wal(tmp_path / "l").entries.values())
    writer.close()
    assert verify_ledger(tmp_path / "l").num_unsigned == 0


@pytest.mark.parametrize("torn", [b"\xf5WF\x01", b"\xf5WF\x01" * 3, b"\0" * 40 + b"\xf5WF\x01" + bytes(99), b"x"])
def test_torn_bytes_at_the_end_of_the_log_are_left_alone_and_before_a_whole_frame_are_damage(
    tmp_path: Path, torn: bytes
) -> None:
    """A frame's first four bytes may stand in them more than once, with nothing whole behind."""
    writer = write_run(tmp_path / "l", KEY, 3, every=1000)
    writer.flush()
    path = tmp_path / "l" / "wal"
    before, frames = path.read_bytes(), read_wal(tmp_path / "l").frames
    path.write_bytes(before + torn)
    assert read_wal(tmp_path / "l").frames == frames
    append_steps(writer, range(3, 4))
    writer.flush()
    later = path.read_bytes()[len(before) + len(torn) :] or path.read_bytes()[len(before) :]
    path.write_bytes(before + torn + later)
    with pytest.raises(TamperError, match=rf"is damaged at byte {len(before)}, before a whole frame at"):
        read_wal(tmp_path / "l")
    path.write_bytes(before)
    writer.close()


def test_a_start_that_fails_leaves_the_folder_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cosmati.ledger.files.replace_file", full)
        with pytest.raises((OSError, LedgerError), match="No space left"):
            LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY)
    LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY).close()
    assert read_head(tmp_path / "l", KEY.verifier).size == 0


def test_a_second_writer_is_refused_and_a_stale_one_too(tmp_path: Path) -> None:
    first = write_run(tmp_path / "l", KEY, 2)
    first.checkpoint()
    with pytest.raises(LedgerError, match=r"has a writer already.*lock"):
        LedgerWriter.open(tmp_path / "l", key=KEY)
    (tmp_path / "l/lock").unlink()
    with LedgerWriter.open(tmp_path / "l", key=KEY) as second:
        append_steps(second, range(2, 4))
    append_steps(first, range(2, 3), salt="stale")
    with pytest.raises(LedgerError, match="stale"):
        first.checkpoint()
    with pytest.raises(LedgerError, match="stale"):
        first.append(*step_entry(3))
    with pytest.raises(LedgerError, match="stale"):
        first.close()
    assert verify_ledger(tmp_path / "l").num_steps == 4


def test_a_stale_writer_adds_nothing_to_the_files(tmp_path: Path) -> None:
    first = write_run(tmp_path / "l", KEY, 2)
    first.flush()
    (tmp_path / "l/lock").unlink()
    with LedgerWriter.open(tmp_path / "l", key=KEY) as second:
        append_steps(second, range(2, 4))
        second.flush()
        before = {name: (tmp_path / "l" / name).read_bytes() for name in ("wal", "details.jsonl", "checkpoint")}
        append_steps(first, range(2, 3), salt="stale")
        with pytest.raises(LedgerError, match="stale"):
            first.flush()
        assert {name: (tmp_path / "l" / name).read_bytes() for name in before} == before


def test_a_stale_writer_signs_nothing_that_it_flushed_before(tmp_path: Path) -> None:
    first = write_run(tmp_path / "l", KEY, 2)
    first.flush()
    (tmp_path / "l/lock").unlink()
    with LedgerWriter.open(tmp_path / "l", key=KEY) as second:
        append_steps(second, range(2, 4))
        head = second.checkpoint()
        with pytest.raises(LedgerError, match="stale"):
            first.checkpoint()
        assert read_head(tmp_path / "l", KEY.verifier) == head
    assert verify_ledger(tmp_path / "l").num_steps == 4


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_a_flush_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL can't show a missing sync, since the kernel keeps what was written; so the calls are counted."""
    synced: list[tuple[int, int]] = []
    really = {name: getattr(os, name) for name in ("fdatasync", "fsync") if hasattr(os, name)}
    for name, function in really.items():

        def sync(descriptor: int, function: Callable[[int], None] = function) -> None:
            function(descriptor)
            synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

        monkeypatch.setattr(os, name, sync)
    with write_run(tmp_path / "l", KEY, 1) as writer:
        writer.flush()
        for step in range(1, 4):
            synced.clear()
            writer.append(*step_entry(step))
            writer.flush()
            # All bytes of both files, the details before the entry that commits to them.
            files = [(tmp_path / "l" / name).stat() for name in ("details.jsonl", "wal")]
            assert synced == [(file.st_ino, file.st_size) for file in files]
        synced.clear()
        writer.checkpoint()
        published = ("tile/entries/000.p/5", "checkpoint", "wal", ".")
        assert {(tmp_path / "l" / name).stat().st_ino for name in published} <= {inode for inode, _ in synced}


def test_a_resume_supersedes_and_compares(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 10) as writer:
        assert (writer.last_step(), writer.next_attempt(), writer.has_ended()) == (9, 1, False)
        resume = writer.resume_entry(6)
        assert resume == ResumeEntry(6, 8, 1)  # entry 0, steps 0 to 5 and one checkpoint entry before it
        writer.append(resume)
        assert writer.last_step() == 5
        append_steps(writer, range(6, 8), attempt=1)
        append_steps(writer, range(8, 12), attempt=1, salt="other")
        writer.append(end_entry(12))
        assert writer.has_ended()
    report = verify_ledger(tmp_path / "l")
    assert (report.num_steps, report.num_attempts, report.num_superseded) == (12, 2, 4)
    assert (report.num_confirmed, report.diverged_steps, report.has_ended) == (2, (8, 9), True)


def test_entries_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 5) as writer:
        bad: list[tuple[Entry, dict[str, object] | None, str]] = [
            (*run_entry(), "only entry 0"),
            (*step_entry(6), "step 5 of attempt 0 must follow"),
            (*step_entry(5, attempt=1), "step 5 of attempt 0 must follow"),
            (ResumeEntry(6, writer.size, 1), None, "can't go on at step 6"),
            (ResumeEntry(2, writer.size, 1), None, "from entry 3 on"),
            (ResumeEntry(2, 2, 1), None, "from entry 3 on"),
            (ResumeEntry(2, 3, 2), None, "is attempt 1"),
            (CheckpointEntry(6, digest("s"), digest("r")), None, "only 5 stand"),
            (end_entry(4), None, "5 stand"),
            (step_entry(5)[0], None, "other details"),
            (step_entry(5)[0], {"step": 5}, "other details"),
            (end_entry(5), {"step": 5}, "other details"),
        ]
        for entry, details, reason in bad:
            with pytest.raises(LedgerError, match=reason):
                writer.append(entry, details)
        append_steps(writer, range(5, 6))
        writer.append(end_entry(6))
        with pytest.raises(LedgerError, match="only resume"):
            writer.append(*step_entry(6))
        writer.append(writer.resume_entry(6))
        append_steps(writer, range(6, 7), attempt=1)
        with pytest.raises(LedgerError, match="Ask within"):
            writer.entries(0, 100)
    assert verify_ledger(tmp_path / "l").num_steps == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, object(), {1: 2}])
def test_details_that_are_not_json_are_refused(value: object) -> None:
    with pytest.raises(LedgerError, match="canonical JSON"):
        details_digest({"x": value})


def test_an_entry_may_have_no_details(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 1) as writer:
        writer.append(StepEntry(1, 0, POLICY, NO_DETAILS, None, ()))
        append_steps(writer, range(2, 3))
    assert verify_ledger(tmp_path / "l").num_steps == 3
    assert len((tmp_path / "l/details.jsonl").read_bytes().splitlines()) == 3


def test_wrong_keys_and_directories_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 1).close()
    with pytest.raises(LedgerError, match="isn't empty"):
        LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY)
    with pytest.raises(LedgerError, match="with which it was created"):
        LedgerWriter.open(tmp_path / "l", key=SigningKey.generate(ORIGIN))
    with pytest.raises(LedgerError, match="key's name"):
        LedgerWriter.create(tmp_path / "m", origin="other.example", key=KEY)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "absent"):
        with pytest.raises(LedgerError, match="no ledger in"):
            LedgerWriter.open(tmp_path / name, key=KEY)
    with pytest.raises(LedgerError, match="can't be written"):
        LedgerWriter.create(tmp_path / "file" / "l", origin=ORIGIN, key=KEY)
    writer = LedgerWriter.open(tmp_path / "l", key=KEY)
    writer.close()
    writer.close()
    with pytest.raises(LedgerError, match="was closed"):
        writer.append(*step_entry(1))


def copy_unsigned(tmp_path: Path) -> Path:
    """Return a ledger as a crash leaves it: 5 entries signed, then 3 batches in the write-ahead log alone."""
    writer = write_run(tmp_path / "l", KEY, 4, every=1000)
    writer.checkpoint()
    (tmp_path / "copy").mkdir()
    for step in range(4, 7):
        append_steps(writer, range(step, step + 1))
        writer.flush()
    for file in (tmp_path / "l").rglob("*"):
        target = tmp_path / "copy" / file.relative_to(tmp_path / "l")
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    writer.close()
    return tmp_path / "copy"


def test_open_cuts_torn_bytes_and_only_those(tmp_path: Path) -> None:
    ledger = copy_unsigned(tmp_path)
    wal, details = (ledger / "wal").read_bytes(), (ledger / "details.jsonl").read_bytes()
    last_frame = wal.rindex(b"\xf5WF\x01")
    for size in (last_frame + 1, last_frame + 30, len(wal) - 9, len(wal) - 1):
        (ledger / "wal").write_bytes(wal[:size])
        assert len(read_wal(ledger).frames) == 2
    (ledger / "details.jsonl").write_bytes(details + b'{"torn": ')
    (ledger / "tile/0/000.p/3.tmp").write_bytes(b"left by a crash")
    with LedgerWriter.open(ledger, key=KEY) as writer:
        assert writer.last_step() == 5
        append_steps(writer, range(6, 8))
    assert verify_ledger(ledger).num_steps == 8
    assert b"torn" not in (ledger / "details.jsonl").read_bytes()
    assert not list(ledger.rglob("*.tmp"))


def test_open_refuses_damage_that_no_crash_makes(tmp_path: Path) -> None:
    ledger = copy_unsigned(tmp_path)
    wal, details = (ledger / "wal").read_bytes(), (ledger / "details.jsonl").read_bytes()
    first_frame = wal.index(b"\xf5WF\x01")
    for position in (0, 20, 60, first_frame, first_frame + 30, len(wal) // 2):
        damaged = bytearray(wal)
        damaged[position] ^= 4
        (ledger / "wal").write_bytes(damaged)
        with pytest.raises(TamperError):
            LedgerWriter.open(ledger, key=KEY)
    (ledger / "wal").write_bytes(wal)
    (ledger / "details.jsonl").write_bytes(details[: details.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(TamperError, match="byte"):
        LedgerWriter.open(ledger, key=KEY)
    (ledger / "details.jsonl").write_bytes(details)
    (ledger / "wal").unlink()
    with pytest.raises(TamperError, match="wal is missing"):
        LedgerWriter.open(ledger, key=KEY)


def test_a_crash_between_checkpoint_and_fresh_log_repeats_nothing(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "l", KEY, 6, every=1000)
    writer.flush()
    before = (tmp_path / "l/wal").read_bytes()
    writer.close()
    (tmp_path / "l/wal").write_bytes(before)
    assert verify_ledger(tmp_path / "l").num_unsigned == 0
    with LedgerWriter.open(tmp_path / "l", key=KEY) as writer:
        assert writer.entries(0, writer.size) == expected_entries(6)
    other = write_run(tmp_path / "other", KEY, 1, every=1000)
    append_steps(other, range(1, 6), salt="other")
    other.flush()
    (tmp_path / "l/wal").write_bytes((tmp_path / "other/wal").read_bytes())
    other.close()
    for refused in (
        lambda: verify_ledger(tmp_path / "l"),
        lambda: LedgerWriter.open(tmp_path / "l", key=KEY),
    ):
        with pytest.raises(TamperError, match="isn't that of the tree"):
            refused()


def test_open_does_not_sign_entries_that_somebody_else_put_into_the_log(tmp_path: Path) -> None:
    ledger = copy_unsigned(tmp_path)
    thief = SigningKey.generate("thief.example")
    other = LedgerWriter.create(tmp_path / "o2", origin="thief.example", key=thief, checkpoint_every=1000)
    other.append(*run_entry())
    append_steps(other, range(4))
    other.checkpoint()
    append_steps(other, range(4, 5), salt="forged")
    other.flush()
    forged = (tmp_path / "o2/wal").read_bytes()
    other.close()
    (ledger / "wal").write_bytes(forged)
    with pytest.raises(TamperError, match="operator's key"):
        LedgerWriter.open(ledger, key=KEY)


def test_who_appends_waits_while_the_disk_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the disk is bounded, and waiting for it lets the writer's own thread go on."""
    monkeypatch.setattr("cosmati.ledger.writer._MAX_WAITING", 1)
    free, appended, really = threading.Event(), [], os.fstat

    def slow(descriptor: int) -> None:
        free.wait(60)
        really(descriptor)

    with write_run(tmp_path / "l", KEY, 1) as writer:
        writer.flush()
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, slow, raising=False)

        def append() -> None:
            for step in range(1, 6):
                writer.append(*step_entry(step))
                appended.append(step)

        thread = threading.Thread(target=append, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(appended) < 4
        free.set()
        thread.join(30)
        assert not thread.is_alive()
        assert appended == [1, 2, 3, 4, 5]
    assert verify_ledger(tmp_path / "l").size == 7
