"""A bundle of a run that deletion made anew, whose policy changed at a stop: it verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit.export import export_bundle
from cosmati.audit.trust import TrustFile
from cosmati.audit.verify import verify_bundle
from cosmati.errors import RefutedError
from cosmati.ledger.reader import read_verifier_key
from tests.forget.samples import forgotten
from tests.forget.test_signed_stops import ASKED, loosened, maker, stopped_at_3, trainer
from tests.forget.test_signed_stops import DATA as ROWS
from tests.forget.test_signed_stops import people as people  # noqa: PLC0414  (a fixture)
from tests.provenance.authority.test_policies import PolicyPeople

pytestmark = pytest.mark.long


def test_an_auditor_verifies_what_a_deletion_made_across_a_stop(people: PolicyPeople, tmp_path: Path) -> None:
    run = stopped_at_3(tmp_path / "run", people.open())
    after = loosened(people, run)
    trainer(ROWS, run, after, change="policy").fit()
    before = (run / "ledger" / "checkpoint").read_text()
    done = forgotten(run, ASKED, maker(after), tmp_path / "out")
    operator = read_verifier_key(done.out / "ledger").text
    bundle = export_bundle(done.out / "ledger", tmp_path / "b.zip", key=done.out / "private" / "operator.key")
    (tmp_path / "in").mkdir()
    trust = TrustFile(operator=operator, policy_roots=(people.pin,), pinned=before)
    report = verify_bundle(bundle, tmp_path / "in", trust)
    told = [words for what, words in report.lines if what == "policy"]
    assert [words.partition(", signed by")[0] for words in told[-2:]] == [
        "policy/main/1",
        "from step 3 on, policy/main/2",
    ]
    lines = dict(report.lines)
    assert lines["pinned"] == "it goes on from the checkpoint of 23 entries that you kept"
    assert lines["deleted"].startswith("2 rows: replay, exact with respect to content")
    (tmp_path / "again").mkdir()
    with pytest.raises(RefutedError):
        verify_bundle(bundle, tmp_path / "again", TrustFile(operator=operator, policy_roots=("ab" * 32,)))
