"""A report says what each entry of a ledger said, from which step on, and there is one only where nothing was wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosigned import ask_witness
from cosmati.ledger.details import details_digest
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.evidence import LEVEL_0, ReplayedHead, TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.policy_changes import PolicyInForce
from cosmati.ledger.profile import OPERATOR_ALONE, LedgerProfile
from cosmati.ledger.rotation import rotation_entry
from cosmati.ledger.verify import Amendment, LedgerReport, _Told, verify_ledger
from cosmati.ledger.wal import Wal
from cosmati.ledger.witness import Witness, create_witness
from cosmati.records.ledger import AmendEntry, CheckpointEntry, ResumeEntry, RunEntry, StepEntry, TimeEntry
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest, end_entry, step_entry
from .test_answers_by_hand import ITEMS, step
from .test_verify import KEY, Item, items, write_signed

NEXT, OTHER, WITNESS = (SigningKey.generate(name) for name in (ORIGIN, "other.example", "w.example"))
BASE: dict[str, object] = {"classes": ["a"], "regions": ["x"], "routes": [[1.0]]}
CELL = (0, 0, 1, 1.0)


def run_with(**told: object) -> Item:
    return RunEntry("r", (), details_digest(BASE | told)), BASE | told


def amend_with(number: int, **told: object) -> Item:
    details = BASE | {"changes": [["what", "was", f"now {number}"]]} | told
    return AmendEntry(number, (), details_digest(details)), details


def head_of(given: list[Item]) -> TreeHead:
    return TreeHead(len(given), mth([encode_entry(entry) for entry, _ in given]))


def report_of(place: Path, given: list[Item], **asked: Any) -> LedgerReport:
    write_signed(place / "l", given)
    return verify_ledger(place / "l", **asked)


def stopped(*changes: dict[str, object]) -> list[Item]:
    """A run of two steps between each of its amendments, which changed so."""
    found: list[Item] = [run_with(**changes[0]), *(step(n, 0, [CELL]) for n in range(2))]
    for attempt, told in enumerate(changes[1:], 1):
        at = 2 * attempt
        found += [(ResumeEntry(at, len(found), attempt), None), amend_with(at, **told)]
        found += [step(n, attempt, [CELL]) for n in range(at, at + 2)]
    return found


def test_a_report_counts_what_stands_and_what_does_not(tmp_path: Path) -> None:
    report = report_of(tmp_path, ITEMS, vkey=KEY.verifier.text)
    head = head_of(ITEMS)
    assert (report.origin, report.key_id) == (ORIGIN, KEY.verifier.key_id.hex())
    assert (report.size, report.root) == (head.size, head.root.hex())
    assert (report.num_steps, report.num_attempts, report.num_superseded) == (3, 2, 1)
    assert (report.num_confirmed, report.diverged_steps, report.has_ended) == (0, (), False)
    assert report.amendments == (Amendment(2, (("regions", "x", "z"),)),)
    assert (report.num_unsigned, report.pinned_size, report.evidence_level) == (0, None, LEVEL_0)
    assert (report.keys, report.witnessed, report.profile) == ((KEY.verifier,), None, OPERATOR_ALONE)
    assert (report.lapses, report.clock, report.clock_went_back) == ((), None, False)
    assert (report.provenance, report.withdrawn, report.policies, report.manifests) == ((), (), (), {})
    assert report.provenance_from == report.withdrawn_from == report.artifacts_from == ((0, None),)


def test_steps_that_diverged_are_told_in_their_order_and_an_end_ends_it(tmp_path: Path) -> None:
    again = [*items(5), (ResumeEntry(1, 2, 1), None), *again_steps()]
    report = report_of(tmp_path, [*again, (end_entry(5), None)])
    assert (report.num_superseded, report.num_confirmed, report.diverged_steps) == (4, 1, (2, 3, 4))
    assert (report.num_attempts, report.has_ended) == (2, True)
    empty = report_of(tmp_path / "empty", [])
    assert (empty.size, empty.num_attempts, empty.num_steps, empty.has_ended) == (0, 0, 0, False)
    assert (empty.clock, empty.provenance_from) == (None, ())
    assert report_of(tmp_path / "one", items(0)).num_attempts == 1


def again_steps() -> list[Item]:
    return [step_entry(n, 1, "" if n == 1 else "other") for n in range(1, 5)]


def test_what_is_said_is_told_once_from_the_step_on_where_it_changes(tmp_path: Path) -> None:
    facts: dict[str, object] = {"sources": [{"target": "t", "root": "r", "manifest_sha256": "m"}]}
    taken = {"target": "r/a/set/1", "class": "a", "reason": "x", "because": "y", "action": "stop", "step": 90}
    gone: dict[str, object] = {"in_force": [taken]}
    report = report_of(
        tmp_path,
        stopped({}, {"provenance": facts}, {"provenance": facts, "withdrawn": gone}, {"withdrawn": gone}, {"x": 1}),
    )
    assert report.provenance_from == ((0, None), (2, facts), (6, None))
    assert report.withdrawn_from == ((0, None), (4, gone), (8, None))
    assert report.artifacts_from == ((0, None),)
    assert (report.provenance, report.withdrawn) == ((facts,), (gone,))
    assert report.vouched_facts == (facts,)
    assert [one.step for one in report.amendments] == [2, 4, 6, 8]
    assert [one.changes for one in report.amendments] == [(("what", "was", f"now {n}"),) for n in (2, 4, 6, 8)]


def test_who_vouched_for_what_was_prepared_comes_first_then_policies_then_data() -> None:
    def facts(name: str) -> dict[str, object]:
        return {"sources": [{"target": "t", "root": name, "manifest_sha256": f"m {name}"}]}

    given: dict[str, Any] = dict.fromkeys(LedgerReport.__dataclass_fields__)
    given |= {
        "artifacts_from": ((0, None), (1, {"one": {"provenance": facts("prepared")}, "two": {}}), (2, {})),
        "policies": (PolicyInForce(0, b"", None), PolicyInForce(1, b"", facts("policy"))),
        "provenance_from": ((0, None), (1, facts("data"))),
        "withdrawn_from": (),
    }
    report = LedgerReport(**given)
    told = [one["sources"][0]["root"] for one in report.vouched_facts]
    assert told == ["prepared", "policy", "data"]
    assert report.manifests["prepared/t"] == "m prepared"
    assert report.manifests["data/t"] == report.manifests["t"] == "m data", "of one target the last is told"


def test_a_clock_is_told_with_its_ends_and_whether_it_went_back(tmp_path: Path) -> None:
    for name, seconds, expected in (
        ("on", [5, 5, 9], ((5, 9), False)),
        ("back", [5, 9, 8, 10], ((5, 10), True)),
        ("once", [7], ((7, 7), False)),
    ):
        given: list[Item] = [run_with(), step(0, 0, [CELL]), *((TimeEntry(1, one), None) for one in seconds)]
        report = report_of(tmp_path / name, given)
        assert (report.clock, report.clock_went_back) == expected


def test_a_run_that_needs_witnesses_is_told_where_it_went_on_without(tmp_path: Path) -> None:
    profile = LedgerProfile("attested", (WITNESS.witness,), 1)
    given = [run_with(witnessing=profile.facts), step(0, 0, [CELL])]
    report = report_of(tmp_path, given)
    assert report.profile == profile
    assert report.lapses == ("entry 0 wasn't witnessed before the first step",)
    ended = report_of(tmp_path / "ended", [*given, (end_entry(1), None)])
    assert [line[:22] for line in ended.lapses] == ["entry 0 wasn't witness", "the end isn't witnesse"]
    with pytest.raises(TamperError, match=r"Entry 0 breaks .*what it says of its witnesses can't be read"):
        report_of(tmp_path / "broken", [run_with(witnessing=3)])


@pytest.mark.parametrize("route", [(0, 0, 1, 1.0), (9, 0, 1, 1.0)], ids=["quick", "careful"])
@pytest.mark.parametrize("seen", [1, 2, 3])
def test_witnesses_have_to_have_seen_entry_0_before_the_first_step(
    tmp_path: Path, seen: int, route: tuple[int, int, int, float]
) -> None:
    create_witness(tmp_path / "w", "w.example")
    witness = Witness(tmp_path / "w", now=lambda: 5.0)
    witness.trust(KEY.verifier)
    profile = LedgerProfile("attested", (witness.key,), 1)
    given = [run_with(witnessing=profile.facts), step(0, 0, [route]), step(1, 0, [CELL])]
    write_signed(tmp_path / "l", given[:seen])
    ask_witness(tmp_path / "l", witness.key, witness.send)
    lapses = () if seen == 1 else ("entry 0 wasn't witnessed before the first step",)
    assert report_of(tmp_path, given).lapses == lapses


def test_the_first_step_is_the_first_of_the_log(tmp_path: Path) -> None:
    told = _Told()
    assert told.first_step is None
    for first in (3, 1, 9):
        told.take_steps(first)
    assert told.first_step == 3


# ---------------------------------------------------------------------------------------------- beyond the checkpoint


def write_log(ledger: Path, start: list[Item], more: list[bytes]) -> None:
    wal = Wal(ledger, bytes(32), head_of(start))
    wal.append(more)
    wal.close()


@pytest.mark.parametrize("last", [step(3, 1, [(9, 0, 1, 1.0)]), step(3, 1, [(0, 0, 1, 1.0)])], ids=["careful", "quick"])
def test_a_log_is_held_against_the_tree_and_what_is_beyond_is_counted(tmp_path: Path, last: Item) -> None:
    """A class without a name, where no policy is, is read by the careful reader alone."""
    given = [*ITEMS, last]
    data = [encode_entry(entry) for entry, _ in given]
    report = report_of(tmp_path, given)
    assert (report.num_steps, report.amendments[0].step, report.num_unsigned) == (4, 2, 0)
    ledger = tmp_path / "l"
    write_log(ledger, given[:2], [*data[2:], b"more", b"and more"])
    assert verify_ledger(ledger).num_unsigned == 2
    for index in range(2, len(given)):
        write_log(ledger, given[:2], [*data[2:index], data[0], *data[index + 1 :]])
        with pytest.raises(TamperError, match=f"Entry {index} of the write-ahead log isn't that of the tree"):
            verify_ledger(ledger)
    write_log(ledger, [*given[:1], step(0, 0, [])], data[2:])
    with pytest.raises(TamperError, match=r"The first 2 entries .* aren't those of the earlier checkpoint"):
        verify_ledger(ledger)
    write_log(ledger, [*given, given[-1]], [])
    with pytest.raises(TamperError, match="cut back"):
        verify_ledger(ledger)


# -------------------------------------------------------------------------------------------------------------- pinned


def note_of(given: list[Item], key: SigningKey = KEY) -> str:
    return key.sign_note(checkpoint_text(key.name, head_of(given)))


def test_a_pinned_head_is_a_beginning_and_its_size_is_told(tmp_path: Path) -> None:
    given = items(6)
    write_signed(tmp_path / "l", given)
    for size in (0, 1, 5, 7):
        for pinned in (head_of(given[:size]), note_of(given[:size])):
            assert verify_ledger(tmp_path / "l", pinned=pinned).pinned_size == size
    other = [*given[:2], *items(7)[3:5]]
    for wrong in (head_of(other), note_of(other)):
        with pytest.raises(TamperError, match="The first 4 entries"):
            verify_ledger(tmp_path / "l", pinned=wrong)
    with pytest.raises(TamperError, match="The pinned checkpoint: The note isn't signed by"):
        verify_ledger(tmp_path / "l", pinned=note_of(given, SigningKey.generate(ORIGIN)))
    with pytest.raises(LedgerError, match="The pinned checkpoint can't be read"):
        verify_ledger(tmp_path / "l", pinned="no note")


def test_a_head_that_an_earlier_key_signed_may_be_pinned(tmp_path: Path) -> None:
    given = items(3)
    handed = [*given, (rotation_entry(KEY, NEXT, head_of(given)), None)]
    write_signed(tmp_path / "l", handed, NEXT)
    for key in (KEY, NEXT):
        assert verify_ledger(tmp_path / "l", pinned=note_of(given, key)).pinned_size == 4
    report = verify_ledger(tmp_path / "l", vkey=KEY.verifier.text)
    assert (report.keys, report.key_id) == ((KEY.verifier, NEXT.verifier), NEXT.verifier.key_id.hex())
    with pytest.raises(TamperError, match="The pinned checkpoint: The note isn't signed by"):
        verify_ledger(tmp_path / "l", pinned=note_of(given, SigningKey.generate(ORIGIN)))


def test_what_was_replayed_raises_the_level_and_has_to_be_a_beginning(tmp_path: Path) -> None:
    given = items(3)
    replayed = ReplayedHead(ORIGIN, head_of(given), "L3: all of it")
    assert report_of(tmp_path, given, witnesses=TrustedEvidence(replayed=replayed)).evidence_level == "L3: all of it"
    longer = report_of(tmp_path / "longer", items(4), witnesses=TrustedEvidence(replayed=replayed))
    assert longer.evidence_level == LEVEL_0
    wrong = TrustedEvidence(replayed=replayed._replace(head=TreeHead(2, bytes(32))))
    with pytest.raises(TamperError, match="The first 2 entries"):
        report_of(tmp_path, given, witnesses=wrong)
    other = TrustedEvidence(replayed=replayed._replace(origin="other"))
    with pytest.raises(LedgerError, match="The replay was of the log 'other'"):
        report_of(tmp_path, given, witnesses=other)


def test_entries_of_all_kinds_are_taken_by_either_reader(tmp_path: Path) -> None:
    given = [
        *items(4),
        (CheckpointEntry(4, digest("state"), digest("root")), None),
        (TimeEntry(4, 11), None),
        (end_entry(4), None),
    ]
    report = report_of(tmp_path, given)
    assert (report.size, report.num_steps, report.has_ended, report.clock) == (8, 4, True, (11, 11))
    assert isinstance(given[1][0], StepEntry)
