"""A bundle of a run whose policy an authority loosened in mid-run, and whose operator changed the key afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit.export import export_bundle
from cosmati.audit.trust import TrustFile
from cosmati.audit.verify import verify_bundle
from cosmati.errors import RefutedError
from cosmati.ledger.key_change import rotate_key
from cosmati.ledger.reader import read_verifier_key
from tests.provenance.authority.test_policies import PolicyPeople
from tests.train.test_policy_change import change, resume, stop
from tests.train.test_signed_policy import text


def test_who_signed_the_change_meant_the_key_of_then(tmp_path: Path) -> None:
    people = PolicyPeople(tmp_path).begin()
    people.let_sign("ada")
    people.sign_text(text(0.5), "ada")
    run = tmp_path / "run"
    stop(run, people.open())
    resume(people, change(people, 1.0))
    operator = read_verifier_key(run / "ledger").text
    rotate_key(run / "ledger", run / "private" / "operator.key")
    bundle = export_bundle(run / "ledger", tmp_path / "b.zip", key=run / "private" / "operator.key")
    (tmp_path / "in").mkdir()
    report = verify_bundle(bundle, tmp_path / "in", TrustFile(operator=operator, policy_roots=(people.pin,)))
    assert [words for what, words in report.lines if what == "policy"][1].startswith("from step 3 on, policy/main/2")
    (tmp_path / "again").mkdir()
    with pytest.raises(RefutedError, match="policy is signed by the authority"):
        verify_bundle(bundle, tmp_path / "again", TrustFile(operator=operator, policy_roots=("ab" * 32,)))
