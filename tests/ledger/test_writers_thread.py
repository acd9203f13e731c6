"""A writer's thread signs when its count or its time has come, and hands each error to whoever waits or comes after."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import writer as module
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.reader import read_head
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter, _explain, _explained
from cosmati.records.ledger import SIGNATURE_SIZE, KeyEntry, ResumeEntry

from .ledgers import ORIGIN, append_steps, digest, end_entry, run_entry, step_entry

KEY = SigningKey.generate(ORIGIN)


def begun(place: Path, **given: Any) -> LedgerWriter:
    writer = LedgerWriter.create(place / "l", origin=ORIGIN, key=KEY, **given)
    writer.append(*run_entry())
    return writer


def signed(place: Path) -> int:
    return read_head(place / "l", KEY.verifier).size


def within_a_minute(call: Callable[[], object]) -> None:
    """Call what a broken thread would let wait for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def settle(writer: LedgerWriter) -> None:
    """Wait until what the first flush brought about is done too."""
    writer.flush()
    writer.flush()


def test_entries_are_signed_once_there_are_enough_of_them(tmp_path: Path) -> None:
    with begun(tmp_path, checkpoint_every=3, checkpoint_seconds=1e6) as writer:
        writer.append(*step_entry(0))
        settle(writer)
        assert signed(tmp_path) == 0
        writer.append(*step_entry(1))
        settle(writer)
        assert signed(tmp_path) == 3
    with LedgerWriter.open(tmp_path / "l", key=KEY, checkpoint_every=2, checkpoint_seconds=1e6) as writer:
        writer.append(*step_entry(2))
        settle(writer)
        assert signed(tmp_path) == 3
        writer.append(*step_entry(3))
        settle(writer)
        assert signed(tmp_path) == 5


def test_64_entries_or_ten_seconds_are_enough_where_nothing_is_said(tmp_path: Path) -> None:
    with begun(tmp_path) as writer:
        assert (writer._every, writer._seconds) == (64, 10.0)
    with LedgerWriter.open(tmp_path / "l", key=KEY) as writer:
        assert (writer._every, writer._seconds) == (64, 10.0)


def test_the_first_entry_that_is_not_signed_sets_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    writer = LedgerWriter.create(
        tmp_path / "l", origin=ORIGIN, key=KEY, checkpoint_every=1000, checkpoint_seconds=10_000.0
    )
    assert (writer._seconds_to_checkpoint(), writer._is_overdue()) == (None, False)
    for number, (now, left) in enumerate(((100.0, 10_000.0), (5_000.0, 5_100.0), (10_099.0, 1.0))):
        clock.now = now
        writer.append(*(run_entry() if number == 0 else step_entry(number - 1)))
        settle(writer)
        assert (writer._seconds_to_checkpoint(), writer._is_overdue()) == (left, False)
    assert signed(tmp_path) == 0
    for now in (10_100.0, 10_101.0):
        clock.now = now
        assert (writer._seconds_to_checkpoint(), writer._is_overdue()) == (0.0, True)
    settle(writer)
    assert (signed(tmp_path), writer._seconds_to_checkpoint(), writer._is_overdue()) == (3, None, False)
    writer.append(*step_entry(2))
    settle(writer)
    assert (signed(tmp_path), writer._seconds_to_checkpoint()) == (3, 10_000.0), "its time begins anew"
    writer.close()
    assert signed(tmp_path) == 4


@pytest.mark.parametrize("seconds", [math.inf, 1e10, 1e308, 10**400])
def test_a_time_that_never_comes_leaves_it_to_the_number_of_entries(tmp_path: Path, seconds: float) -> None:
    writer = begun(tmp_path, checkpoint_every=3, checkpoint_seconds=seconds)
    within_a_minute(lambda: settle(writer))
    assert signed(tmp_path) == 0
    append_steps(writer, range(2))
    within_a_minute(lambda: settle(writer))
    assert signed(tmp_path) == 3
    writer.append(*step_entry(2))
    within_a_minute(writer.close)
    with LedgerWriter.open(tmp_path / "l", key=KEY, checkpoint_seconds=seconds) as again:
        assert again.size == 4


@pytest.mark.parametrize("seconds", [0, -1.0, -math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(LedgerError, match=f"checkpoint_seconds={seconds} is no time .* Give a number over 0"):
        begun(tmp_path, checkpoint_seconds=seconds)
    assert not (tmp_path / "l").exists()
    begun(tmp_path).close()
    with pytest.raises(LedgerError, match=f"checkpoint_seconds={seconds} is no time"):
        LedgerWriter.open(tmp_path / "l", key=KEY, checkpoint_seconds=seconds)
    LedgerWriter.open(tmp_path / "l", key=KEY).close()  # nobody holds it


def test_it_says_what_stands_before_it_is_flushed(tmp_path: Path) -> None:
    writer = LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY)
    assert (writer.size, writer.in_force, writer.last_step(), writer.next_attempt()) == (0, None, None, 1)
    writer.append(*run_entry())
    assert (writer.size, writer.in_force, writer.last_step(), writer.has_ended()) == (1, run_entry()[0], None, False)
    append_steps(writer, range(3))
    assert (writer.size, writer.last_step(), writer.resume_entry(1)) == (4, 2, ResumeEntry(1, 2, 1))
    writer.append(end_entry(3))
    assert writer.has_ended() is True
    writer.append(writer.resume_entry(1))
    assert (writer.has_ended(), writer.last_step(), writer.next_attempt(), writer.size) == (False, 0, 2, 6)
    assert writer.entries(0, 2) == [run_entry()[0], step_entry(0)[0]]
    assert writer.entries(6, 6) == writer.entries(0, 0) == []
    for start, end in ((-1, 2), (3, 2), (0, 7), (7, 7)):
        with pytest.raises(LedgerError, match=f"has 6 entries, so not {start} to {end}"):
            writer.entries(start, end)
    assert writer.checkpoint().size == 6
    writer.close()


def test_what_is_not_the_runs_to_say_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with begun(tmp_path) as writer:
        change = KeyEntry(bytes(32), digest("new"), bytes(SIGNATURE_SIZE), bytes(SIGNATURE_SIZE))
        with pytest.raises(LedgerError, match="`rotate_key`"):
            writer.append(change)
        step, details = step_entry(0)
        for given in (None, {}, details | {"more": 1}):
            with pytest.raises(LedgerError, match="This StepEntry commits to other details"):
                writer.append(step, given)
        assert writer.size == 1
        writer.append(step, details)
    assert verify_ledger(tmp_path / "l").size == 2
    with pytest.raises(LedgerError, match=r"'example\.com/run-1' and the log's is 'other'"):
        LedgerWriter.create(tmp_path / "m", origin="other", key=KEY)
    assert not (tmp_path / "m").exists()


def test_what_is_handed_over_is_written_though_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY, checkpoint_seconds=1e6)
    append, written = writer._files.append, threading.Event()
    writer.flush()

    def watched(batch: Any) -> None:
        append(batch)
        written.set()

    monkeypatch.setattr(writer._files, "append", watched)
    writer.append(*run_entry())
    assert written.wait(60)
    monkeypatch.setattr(module, "_MAX_WAITING", 1)
    append_steps(writer, range(20))
    writer.close()
    assert verify_ledger(tmp_path / "l").num_steps == 20


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_is_explained_once_and_is_the_same_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begun(tmp_path)
    writer.flush()
    failure = OSError(28, "No space left on device")

    def full(_: object) -> None:
        raise failure

    monkeypatch.setattr(writer._files, "append", full)
    writer.append(*step_entry(0))
    for call in (
        writer.flush,
        writer.checkpoint,
        lambda: writer.append(*step_entry(1)),
        lambda: writer.entries(0, 1),
        writer.close,
    ):
        with pytest.raises(LedgerError, match=r"can't be written: .*No space left on device.*resume the run") as caught:
            call()
        assert type(caught.value) is LedgerError
    assert writer._error is not None
    assert writer._error.__cause__ is failure
    assert not writer._thread.is_alive()
    writer.close()  # it's closed all the same
    with LedgerWriter.open(tmp_path / "l", key=KEY) as again:
        assert again.size == 1


@pytest.mark.parametrize("failure", [OverflowError("timestamp too large"), MemoryError(), SystemExit("now")])
@pytest.mark.parametrize("place", ["_seconds_to_checkpoint", "_work"])
def test_whatever_breaks_the_thread_is_raised_by_each_call_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, place: str
) -> None:
    writer = begun(tmp_path)
    writer.flush()

    def broken(*_: object) -> None:
        raise failure

    monkeypatch.setattr(writer, place, broken)
    told = list[BaseException]()

    def flush() -> None:
        for call in (writer.flush, writer.flush, lambda: writer.append(*step_entry(0))):
            try:
                call()
            except LedgerError as error:
                told.append(error)

    within_a_minute(flush)
    assert len(told) >= 2, "the thread may first end the wait that it was in"
    assert all(f"can't be written: {str(failure) or 'MemoryError'}. What was" in str(error) for error in told)
    with pytest.raises(LedgerError, match="can't be written"):
        writer.close()


def test_a_tampered_file_stays_tampering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begun(tmp_path)

    def damaged(*_: object) -> None:
        raise TamperError("a tile is missing")

    monkeypatch.setattr(writer._files, "entries", damaged)
    for _ in range(2):
        with pytest.raises(TamperError, match=r"^a tile is missing$"):
            writer.entries(0, 1)
    with pytest.raises(TamperError):
        writer.close()


def test_all_who_wait_are_told(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.flush()
    done, running, queued = Future[Any](), Future[Any](), Future[Any]()
    done.set_result("before")
    with writer._changed:
        writer._fail(OSError("broken"), [(lambda: None, done), (lambda: None, running)])
        writer._calls.append((lambda: None, queued))
        writer._fail(OSError("broken"), [])
        writer._calls.clear()
    assert done.result(0) == "before"
    for future in (running, queued):
        assert "broken" in str(future.exception(0))
    with pytest.raises(LedgerError, match="broken"):
        writer.close()
    assert not writer._thread.is_alive()


def test_errors_are_explained_but_for_those_that_are(tmp_path: Path) -> None:
    own = TamperError("as it is")
    assert _explain(tmp_path, own) is own
    found = _explain(tmp_path, OSError("full"))
    assert type(found) is LedgerError
    assert f"The ledger {tmp_path} can't be written: full. What was flushed before is safe." in str(found)
    assert _explained(tmp_path, lambda: 7) == 7

    def fails(error: Exception) -> None:
        raise error

    with pytest.raises(LedgerError, match="can't be written: full") as caught:
        _explained(tmp_path, lambda: fails(OSError("full")))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(TamperError, match="as it is"):
        _explained(tmp_path, lambda: fails(own))
    with pytest.raises(ValueError, match="another"):
        _explained(tmp_path, lambda: fails(ValueError("another")))


def test_a_closed_writer_takes_nothing_and_has_given_all_back(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    assert (writer._thread.daemon, writer._thread.name) == (True, "cosmati-ledger")

    def fails_inside() -> None:
        with writer as same:
            assert same is writer
            raise ValueError("of the run's own")

    with pytest.raises(ValueError, match="of the run's own"):
        fails_inside()
    assert signed(tmp_path) == 1, "what was handed over is signed, whatever came after"
    assert not writer._thread.is_alive()
    for call in (lambda: writer.append(*step_entry(0)), writer.flush, writer.checkpoint):
        with pytest.raises(LedgerError, match=r"was closed\. Open it again"):
            call()
    writer.close()
    LedgerWriter.open(tmp_path / "l", key=KEY).close()
