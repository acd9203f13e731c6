"""A log takes an entry where it may stand, and one that may not changes nothing of what stood before it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.history import RunHistory, content_of
from cosmati.records.ledger import (
    NO_DETAILS,
    SIGNATURE_SIZE,
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    Entry,
    EvaluationEntry,
    KeyEntry,
    ResumeEntry,
    RunEntry,
    StepEntry,
    TimeEntry,
)

from .ledgers import digest

POLICY, OTHER = digest("policy"), digest("other")
RUN = RunEntry("r", (("data", digest("data")), ("policy", POLICY)), NO_DETAILS)
FREE = RunEntry("r", (), NO_DETAILS)


def step(number: int, attempt: int = 0, salt: str = "", policy: bytes = POLICY) -> StepEntry:
    return StepEntry(number, attempt, policy, digest(f"{number}{salt}"), None, ())


def key(old: int, new: int) -> KeyEntry:
    return KeyEntry(bytes([old]) * 32, bytes([new]) * 32, bytes(SIGNATURE_SIZE), bytes(SIGNATURE_SIZE))


def checkpoint(number: int) -> CheckpointEntry:
    return CheckpointEntry(number, digest("state"), digest("root"))


def end(number: int) -> EndEntry:
    return EndEntry(number, "completed", digest("root"))


def amendment(number: int, policy: bytes = POLICY) -> AmendEntry:
    return AmendEntry(number, (("policy", policy),), NO_DETAILS)


def after(*entries: Entry) -> RunHistory:
    history = RunHistory()
    for entry in entries:
        history.append(entry)
    return history


def state(history: RunHistory) -> dict[str, object]:
    return {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(history).items()}


def refused(history: RunHistory, entry: Entry, said: str) -> None:
    before = state(history)
    with pytest.raises(LedgerError) as caught:
        history.append(entry)
    told = str(caught.value)
    assert said in told
    assert f"Entry {history.size} doesn't fit: " in told or "can't go on" in told
    assert state(history) == before


def test_a_new_log_has_nothing_and_takes_a_run_first() -> None:
    history = RunHistory()
    assert (history.size, history.attempt, history.num_steps, history.standing()) == (0, 0, 0, frozenset())
    assert (history.has_ended, history.in_force, history.keys) == (False, None, [])
    assert (history.num_superseded, history.num_confirmed, history.diverged_steps) == (0, 0, set())
    for entry in (step(0), checkpoint(0), end(0), amendment(0), TimeEntry(0, 1), ResumeEntry(0, 0, 1), key(1, 2)):
        refused(history, entry, "a run entry is entry 0, and only entry 0")
    with pytest.raises(LedgerError, match="only entry 0"):
        history.extend(0, 0, POLICY, [])
    history.append(RUN)
    assert (history.size, history.in_force) == (1, RUN)
    refused(history, RUN, "a run entry is entry 0, and only entry 0")


def test_content_is_a_step_without_its_attempt() -> None:
    data = encode_entry(step(3, 7))
    assert content_of(data) == content_of(encode_entry(step(3, 8))) == content_of(encode_entry(step(3, 1 << 31)))
    blank = data[:10] + b"\0\0\0\0" + data[14:]
    assert content_of(data) == hashlib.sha256(blank).digest()[:16]
    assert (
        len({content_of(encode_entry(one)) for one in (step(3), step(4), step(3, 0, "x"), step(3, 0, "", OTHER))}) == 4
    )


def test_steps_follow_one_another_in_their_attempt_and_by_the_policy_in_force() -> None:
    history = after(RUN, step(0), checkpoint(1), step(1))
    assert (history.size, history.num_steps, history.standing()) == (4, 2, {1, 3})
    for entry in (step(1), step(3), step(2, 1)):
        said = f"it is step {entry.step} of attempt {entry.attempt}, where step 2 of attempt 0 must follow"
        refused(history, entry, said)
    said = f"step 2 went by the policy {OTHER.hex()[:16]}, and {POLICY.hex()[:16]} is in force"
    refused(history, step(2, 0, "", OTHER), said)
    assert after(FREE, step(0, 0, "", OTHER), step(1)).num_steps == 2, "without a policy any digest stands"


def test_many_steps_at_once_are_as_one_after_another() -> None:
    def run(at_once: bool) -> RunHistory:
        history = after(RUN, *(step(n) for n in range(5)), ResumeEntry(1, 2, 1), amendment(1), ResumeEntry(1, 2, 2))
        steps = [step(n, 2, "x" if n == 3 else "") for n in range(1, 7)]
        if at_once:
            history.extend(1, 2, POLICY, [content_of(encode_entry(one)) for one in steps])
        else:
            for one in steps:
                history.append(one)
        return history

    assert state(run(at_once=True)) == state(run(at_once=False))
    history = run(at_once=True)
    assert (history.size, history.num_steps) == (15, 7)
    assert history.standing() == {1, *range(9, 15)}


@pytest.mark.parametrize("from_step", [0, 1, 2, 3])
def test_a_resume_supersedes_the_steps_from_its_own_on(from_step: int) -> None:
    history = after(RUN, step(0), step(1), checkpoint(2), step(2), checkpoint(3))
    entry = history.resume_entry(from_step)
    assert entry == ResumeEntry(from_step, [1, 2, 4, 6][from_step], 1)
    history.append(entry)
    assert (history.size, history.attempt, history.num_steps) == (7, 1, from_step)
    assert (history.num_superseded, history.standing()) == (3 - from_step, set([1, 2, 4][:from_step]))
    refused(history, step(from_step), f"where step {from_step} of attempt 1 must follow")
    history.append(step(from_step, 1))
    assert history.standing() == {*[1, 2, 4][:from_step], 7}


def test_what_a_resume_says_fits_between_the_step_before_and_its_own() -> None:
    """Checkpoints between the two may be superseded, or stand."""
    entries = (RUN, step(0), checkpoint(1), TimeEntry(1, 5), step(1))
    for supersedes in range(7):
        history, entry = after(*entries), ResumeEntry(1, supersedes, 1)
        if 2 <= supersedes <= 4:
            history.append(entry)
            assert history.num_steps == 1
        else:
            refused(
                history, entry, "a resume at step 1 is attempt 1 and supersedes the steps from entry 4 on, and this"
            )
    for supersedes in range(7):
        history, entry = after(*entries), ResumeEntry(0, supersedes, 1)
        if supersedes == 1:
            history.append(entry)
            assert history.num_steps == 0
        else:
            refused(history, entry, f"this one says 1 and {supersedes}")
    for attempt in (0, 2):
        refused(after(*entries), ResumeEntry(1, 4, attempt), f"this one says {attempt} and 4")
    history = after(*entries)
    refused(history, ResumeEntry(3, 5, 1), "can't go on at step 3: the ledger holds the steps up to 2")
    for from_step in (-1, 3):
        with pytest.raises(LedgerError, match=f"at step {from_step}"):
            history.resume_entry(from_step)
    assert history.resume_entry(0).supersedes == 1


def test_an_amendment_stands_right_after_a_resume_or_another_one() -> None:
    said = "an amendment from step 1 on, and one stands right after a resume or another amendment"
    for entries in ((RUN,), (RUN, step(0)), (RUN, step(0), ResumeEntry(1, 2, 1), checkpoint(1))):
        refused(after(*entries), amendment(1), said)
    history = after(RUN, step(0), ResumeEntry(1, 2, 1))
    for number in (0, 2):
        refused(history, amendment(number), "says the steps that stand, 1")
    for policy in (OTHER, POLICY, OTHER):
        history.append(amendment(1, policy))
        assert history.in_force == amendment(1, policy)
    history.append(step(1, 1, "", OTHER))
    refused(history, amendment(2), "an amendment from step 2 on")
    refused(history, step(2, 1), "by the policy")


def test_only_so_many_steps_are_saved_measured_or_timed_as_stand() -> None:
    entries: list[tuple[Entry, str]] = [
        (checkpoint(2), "a checkpoint after 2 steps, and only 1 stand"),
        (EvaluationEntry(2, digest("root"), NO_DETAILS), "an evaluation after 2 steps, and only 1 stand"),
        (TimeEntry(2, 9), "a time after 2 steps, and only 1 stand"),
    ]
    for entry, said in entries:
        history = after(RUN, step(0))
        refused(history, entry, said)
        for number in (0, 1):
            history.append(replace(entry, step=number))  # type: ignore[type-var]
        assert (history.size, history.num_steps, history.has_ended) == (4, 1, False)


def test_after_its_end_a_run_only_resumes_and_a_key_may_hand_over() -> None:
    history = after(RUN, step(0))
    for number in (0, 2):
        refused(history, end(number), f"an end after {number} steps, and 1 stand")
    history.append(end(1))
    assert (history.has_ended, history.size) == (True, 3)
    for entry in (step(1), checkpoint(1), end(1), amendment(1), TimeEntry(1, 9)):
        refused(history, entry, "after its end a run can only resume")
    with pytest.raises(LedgerError, match="only resume"):
        history.extend(1, 0, POLICY, [])
    history.append(key(1, 2))
    assert (history.has_ended, history.size) == (True, 4)
    history.append(ResumeEntry(1, 4, 1))
    assert history.has_ended is False
    history.append(step(1, 1))
    assert history.standing() == {1, 5}


def test_a_key_hands_over_to_one_that_has_not_signed() -> None:
    history = after(RUN, key(1, 2))
    assert (history.keys, history.size) == ([bytes([1]) * 32, bytes([2]) * 32], 2)
    refused(history, key(1, 3), "the key that hands over isn't the one that signs")
    for new in (1, 2):
        refused(history, key(2, new), "a key takes over that has signed before")
    refused(after(RUN), key(1, 1), "a key takes over that has signed before")
    history.append(key(2, 3))
    assert history.keys == [bytes([n]) * 32 for n in (1, 2, 3)]
    refused(history, key(1, 4), "isn't the one that signs")
    refused(history, key(3, 1), "has signed before")
    assert history.size == 3


def test_a_key_between_a_resume_and_its_amendment_parts_neither() -> None:
    history = after(RUN, step(0), ResumeEntry(1, 2, 1), key(1, 2), amendment(1))
    assert (history.size, history.in_force) == (5, amendment(1))


def test_steps_that_are_run_again_are_confirmed_or_diverge_unless_something_was_amended() -> None:
    first = [RUN, *(step(n) for n in range(4))]
    again = after(*first, ResumeEntry(1, 2, 1), step(1, 1), step(2, 1, "x"))
    assert (again.num_superseded, again.num_confirmed, again.diverged_steps) == (3, 1, {2})
    later = after(*first, ResumeEntry(1, 2, 1), step(1, 1), ResumeEntry(2, 7, 2), step(2, 2), step(3, 2, "y"))
    assert (later.num_superseded, later.num_confirmed, later.diverged_steps) == (3, 2, {3})
    amended = after(*first, ResumeEntry(1, 2, 1), amendment(1), step(1, 1), step(2, 1, "x"), step(3, 1))
    assert (amended.num_confirmed, amended.diverged_steps) == (2, set()), "what was amended may differ"
    # What was run under the amendment and is superseded again hasn't been amended since.
    twice = [*first, ResumeEntry(1, 2, 1), amendment(1), step(1, 1, "x"), step(2, 1, "x")]
    once_more = after(*twice, ResumeEntry(1, 7, 2), step(1, 2), step(2, 2, "x"), step(3, 2, "z"))
    assert (once_more.num_superseded, once_more.num_confirmed, once_more.diverged_steps) == (5, 1, {1})
