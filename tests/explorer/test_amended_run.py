"""What a page shows of a run whose policy was changed on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cosmati.explorer.learning import governance_facts
from cosmati.explorer.run_view import _notes, read_run
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.records.governance import LedgerFacts
from tests.ledger.test_amend import FIRST, KEY, SECOND, amended
from tests.ledger.test_verify import write_signed
from tests.store.samples import run_record, write_run

FACTS = LedgerFacts("o", 1, "r", "L0", checked=True, problems=(), num_witnesses=0, commands=())


def test_the_policy_in_force_at_the_end_is_shown_over_all_names(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    facts, schedule = governance_facts(VerifiedLedger(tmp_path / "l"), FACTS)
    assert (facts.classes, facts.regions) == (("a", "b", "c", "new"), ("low", "high", "top"))
    assert facts.weight["b"]["main"] == {"low": 0.5, "high": 0.0, "top": 1.0}
    assert facts.weight["c"]["main"] == {"low": 0.0, "high": 0.0, "top": 0.0}
    assert [facts.decision[name]["warm"] for name in facts.classes] == ["admit", "gate", "reject", "reject"]
    assert schedule[2:4] == (("a", "b"), ("b", "a"))
    # `c` might teach `high` by the first policy, and `b` may teach `low` only by the second: neither is stated.
    assert [text[:78] for text in facts.exclusions] == [
        "No logged step gave rows tagged c any weight in low or top: 7 steps with 4 mic",
        "No logged step gave rows tagged new any weight in any region: 7 steps with 3 m",
    ]


def test_what_was_changed_stands_in_the_notes(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    report = verify_ledger(tmp_path / "l")
    assert "From step 3 on the run commits to something else: policy: second, was first." in _notes(report)
    assert len(_notes(replace(report, amendments=()))) == len(_notes(report)) - 1


def test_a_record_is_held_against_what_is_committed_to_last(tmp_path: Path) -> None:
    write_signed(tmp_path / "ledger", amended(), KEY)
    for policy, is_so in ((SECOND, True), (FIRST, False)):
        write_run(tmp_path, run_record(digests={"policy": policy.digest.hex(), "data": "", "plan": "", "model": ""}))
        contradictions = [text for text in read_run(tmp_path).warnings if "contradicts the ledger" in text]
        assert (contradictions == []) == is_so
