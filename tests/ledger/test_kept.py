"""How a ledger was kept, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cosmati.ledger.kept import kept_lines
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.verify import verify_ledger
from tests.ledger.ledgers import write_run


def test_every_lapse_and_every_key_but_the_last_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "ledger", SigningKey.generate("example.com/run-1"), 3).close()
    report = verify_ledger(tmp_path / "ledger")
    assert list(kept_lines(report)) == [("profile", str(report.profile))]
    keys = tuple(SigningKey.generate("example.com/run-1").verifier for _ in range(2)) + report.keys
    told = list(kept_lines(replace(report, lapses=("one", "two"), keys=keys, clock=(0, 60), clock_went_back=True)))
    before = [("before", f"signed by {key.key_id.hex()}, which handed over to its successor") for key in keys[:2]]
    assert told[:3] == [("profile", str(report.profile)), ("but", "one"), ("but", "two")]
    assert told[3][0] == "when"
    assert told[3][1].endswith(" by the operator's clock, and it went back in between")
    assert told[4:] == before
