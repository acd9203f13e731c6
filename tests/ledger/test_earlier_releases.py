"""Ledgers that earlier releases wrote: they verify, and answer as they did. What is in `fixtures` never changes.

`v1`: a governed run of 6 steps with V = 4 and three classes, of which `late` is deferred until step 4. It broke off in
step 3, and went on from its checkpoint after step 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.errors import RefutedError
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusion, logged_steps
from cosmati.ledger.verify import verify_ledger

FIXTURES = Path(__file__).parent / "fixtures"
V1 = FIXTURES / "v1" / "run"
V1_KEY = "cosmati/v1-run+a58b7ae4+AXQWwoonJFLUSxF//yjQ/ll/z3UoQyjjNjGPCvhoQ1qR"
V1_ROOT = "e150dcf5affb0c201ccbaf87a677920b291eaccd912a111b2311d1159a37ddc1"


def test_a_ledger_of_version_1_verifies() -> None:
    report = verify_ledger(V1 / "ledger", vkey=V1_KEY)
    assert (report.size, report.root) == (13, V1_ROOT)
    assert (report.num_steps, report.num_attempts, report.num_superseded, report.num_confirmed) == (6, 2, 1, 1)
    assert (report.diverged_steps, report.amendments, report.has_ended, report.num_unsigned) == ((), (), True, 0)


def test_a_ledger_of_version_1_answers_as_it_did() -> None:
    ledger = VerifiedLedger(V1 / "ledger", V1_KEY)
    found = {(c.class_name, c.region): (c.num_steps, c.num_rows, c.weight) for c in contributions(ledger).cells}
    assert found == {
        ("doubtful", "near_input"): (0, 0, 0.0),
        ("doubtful", "near_output"): (6, 32, 28.0),
        ("late", "near_input"): (2, 12, 12.0),
        ("late", "near_output"): (2, 12, 12.0),
        ("open", "near_input"): (6, 32, 32.0),
        ("open", "near_output"): (6, 32, 32.0),
    }
    statement = direct_write_exclusion(ledger, "doubtful", "near_input")
    assert (statement.num_steps_scanned, statement.num_class_microbatches) == (7, 9)
    assert (statement.root, statement.num_steps_without_region) == (V1_ROOT, 0)
    with pytest.raises(RefutedError, match="statement is false"):
        direct_write_exclusion(ledger, "late", "near_input")
    steps = list(logged_steps(ledger))
    assert [one.step for one in steps] == list(range(6))
    assert steps[0].class_names == ("doubtful", "open", "doubtful")
    assert steps[0].norms["open", "near_input"] == 0.2580045461654663
