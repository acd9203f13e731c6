"""A run whose authority calls a class sensitive: who reads what of it, from the ceremony to the auditor's bundle."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit.export import export_bundle
from cosmati.audit.verify import verify_bundle
from cosmati.cli.main import app
from cosmati.errors import ExportError, LedgerError, ProvenanceError, RefutedError, TamperError
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.released_keys import holder_of, read_holder_key, read_released
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.credential import (
    AlteredCredentialError,
    Credential,
    ExpiredCredentialError,
    OtherHolderError,
    OtherRunError,
    RevokedSignerError,
    lacking,
    read_credential,
    sign_credential,
    signers_of,
)
from cosmati.provenance.authority.errors import (
    InconsistentMetadataError,
    OutOfScopeError,
    UnsignedMetadataError,
    UntrustedRootError,
)
from cosmati.provenance.voucher import FOLDER
from cosmati.train import sensitive
from tests.provenance.authority import people
from tests.provenance.authority.people import NEWS, PII
from tests.train.vouched_world import World

pytestmark = pytest.mark.long

NOW = datetime(2027, 1, 1, tzinfo=UTC)


class Sealed:
    """The authority, a run over its data, and what an auditor was given."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "run"
        self.world = World.made_in(root / "firm")
        self.train()
        self.cli("keys", "holder", "eve", "--keys", str(root / "eve"))
        self.grant(root / "credential")
        self.release(root / "credential", root / "keys")

    def train(self) -> None:
        """Train the run; the operator gives a taxonomy that calls nothing sensitive: what the authority says holds."""
        self.world.trainer(self.run, {}, details_every=1, update_norm_every=1, budget="6ba").fit()

    @property
    def origin(self) -> str:
        return f"cosmati/{self.run.name}"

    def cli(self, *args: str, code: int = 0) -> Result:
        found = CliRunner().invoke(app, list(args))
        assert found.exit_code == code, (found.output, found.exception)
        return found

    def grant(self, out: Path, *more: str, code: int = 0) -> Result:
        firm = self.world.people
        given = ["keys", "credential", str(firm.folder), "--holder", str(self.root / "eve/eve.holder.pub")]
        given += ["--run", self.origin, "--classes", PII, "--until", "2999-12-31", "--out", str(out)]
        return self.cli(*given, "--keys", str(firm.root / "bob"), *more, code=code)

    def release(self, credential: Path, out: Path, *more: str, code: int = 0) -> Result:
        given = ["ledger", "release", str(self.run), "--credential", str(credential), "--out", str(out)]
        return self.cli(*given, "--authority", str(self.world.people.folder), *more, code=code)

    @property
    def rights(self) -> list[str]:
        key = self.root / "eve/eve.holder.key"
        return [
            "--credential",
            str(self.root / "credential"),
            "--keys",
            str(self.root / "keys"),
            "--holder-key",
            str(key),
        ]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("sealed")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(people, "TAXONOMY", replace(people.TAXONOMY, sensitive=("customer",)))
        yield Sealed(root)


def rows_of(result: Result) -> dict[tuple[str, str], dict[str, object]]:
    told = [json.loads(line) for line in result.stdout.splitlines()]
    return {(one["class_name"], one["region"]): one for one in told}


def test_what_the_authority_calls_sensitive_is_sealed_whatever_taxonomy_the_operator_gives(sealed: Sealed) -> None:
    found = VerifiedLedger(sealed.run / "ledger")
    assert found.details["sealed"]["classes"] == [PII]
    cells = {one.class_name: one for one in contributions(found).cells if one.num_rows}
    assert cells[PII].num_sealed > 0 == cells[PII].num_norms
    assert cells[NEWS].num_norms > 0 == cells[NEWS].num_sealed
    assert {one.norm_share for one in cells.values()} == {None}, "or the last share is told by the others"


def test_a_query_says_that_norms_are_sealed_and_a_credential_opens_them(sealed: Sealed) -> None:
    query = ["ledger", "query", str(sealed.run), "--format", "json"]
    closed, opened = rows_of(sealed.cli(*query)), rows_of(sealed.cli(*query, *sealed.rights))
    assert closed[PII, "all"]["norm_sum"] == closed[PII, "all"]["norm_share"] == "sealed"
    assert float(str(opened[PII, "all"]["norm_sum"])) > 0
    assert sum(float(str(one["norm_share"])) for one in opened.values()) == pytest.approx(1)
    assert "norms are sealed" in sealed.cli("ledger", "query", str(sealed.run), "--class", PII).stdout
    by_phase = rows_of(sealed.cli(*query, "--each", "phase", *sealed.rights))
    assert by_phase[PII, "all"]["norm_sum"] == opened[PII, "all"]["norm_sum"]
    assert rows_of(sealed.cli(*query, "--each", "phase"))[PII, "all"]["norm_share"] == "sealed"


def test_a_page_shows_its_holder_what_a_credential_opens(sealed: Sealed, tmp_path: Path) -> None:
    report = ["report", str(sealed.run)]
    refused = sealed.cli(*report, *sealed.rights, code=1)
    assert "--out FILE" in refused.output
    pages = [tmp_path / "closed.html", tmp_path / "opened.html"]
    sealed.cli(*report, "--out", str(pages[0]))
    sealed.cli(*report, "--out", str(pages[1]), *sealed.rights)
    closed, opened = (page.read_text() for page in pages)
    told = rows_of(sealed.cli("ledger", "query", str(sealed.run), "--format", "json", *sealed.rights))
    norm = f"{float(str(told[PII, 'all']['norm_sum'])):,.4g}"
    assert (norm in opened, "for its holder alone" in opened) == (True, True)
    assert (norm in closed, "for its holder alone" in closed, "sealed" in closed) == (False, False, True)
    assert not (sealed.run / "report.html").exists()


def test_sql_has_what_is_sealed_as_null_and_opens_it_in_memory_alone(sealed: Sealed) -> None:
    select = f"SELECT count(*) AS n, count(norm) AS known FROM norms WHERE class = '{PII}'"
    asked = ["ledger", "sql", str(sealed.run), "--format", "json"]
    closed = sealed.cli(*asked, select)
    before = {path.name: path.read_bytes() for path in (sealed.run / "derived").iterdir()}
    opened = sealed.cli(*asked, select, *sealed.rights)
    count = json.loads(opened.stdout)["n"]
    assert (json.loads(closed.stdout)["n"], count > 0) == (0, True)
    assert "are sealed, and null" in closed.stderr
    assert "are sealed" not in opened.stderr
    view = sealed.cli(*asked, "SELECT class, sealed_column, count(*) AS n FROM sealed GROUP BY ALL")
    assert json.loads(view.stdout) == {"class": PII, "sealed_column": "gradient_norm", "n": count}
    assert {path.name: path.read_bytes() for path in (sealed.run / "derived").iterdir()} == before


def test_rights_are_three_files(sealed: Sealed) -> None:
    told = sealed.cli("ledger", "query", str(sealed.run), *sealed.rights[:4], code=2)
    assert "three files" in told.output


def credential_of(sealed: Sealed, **changed: object) -> Credential:
    firm = sealed.world.people
    named = {"authority": firm.pin, "holder": "ab" * 32, "run": sealed.origin, "classes": (PII,)}
    return Credential(**{**named, "columns": ("gradient_norm",), "until": date(2027, 6, 30), **changed})  # type: ignore[arg-type]


def signed(sealed: Sealed, *names: str, **changed: object) -> bytes:
    firm = sealed.world.people
    return sign_credential(credential_of(sealed, **changed), firm.repository.chain(), firm.ring(*names or ("bob",)))


def test_a_credential_is_read_back_and_each_wrong_has_its_own_name(sealed: Sealed) -> None:
    chain, data = sealed.world.people.repository.chain(), signed(sealed)
    holder = {"run": sealed.origin, "now": NOW, "holder": "ab" * 32}
    assert read_credential(data, chain, **holder) == credential_of(sealed)  # type: ignore[arg-type]
    last = datetime(2027, 6, 30, 23, 59, tzinfo=UTC)
    assert read_credential(data, chain, run=sealed.origin, now=last).until == date(2027, 6, 30)
    with pytest.raises(ExpiredCredentialError, match="until 2027-06-30"):
        read_credential(data, chain, run=sealed.origin, now=last + timedelta(minutes=1))
    with pytest.raises(OtherRunError, match="cosmati/other"):
        read_credential(data, chain, run="cosmati/other", now=NOW)
    with pytest.raises(OtherHolderError, match="cdcdcd"):
        read_credential(data, chain, run=sealed.origin, now=NOW, holder="cd" * 32)
    with pytest.raises(OutOfScopeError, match="None of the keys here"):
        signed(sealed, "ada")
    with pytest.raises(OutOfScopeError, match="asked"):
        read_credential(signed(sealed, authority="12" * 32), chain, run=sealed.origin, now=NOW)


def test_a_credential_that_was_altered_says_so(sealed: Sealed) -> None:
    chain, told = sealed.world.people.repository.chain(), json.loads(signed(sealed))
    for change in ({"columns": ("loss",)}, {"classes": (PII, "x")}, {"until": date(2999, 1, 1)}, {"holder": "cd" * 32}):
        payload = base64.b64encode(credential_of(sealed, **change).to_bytes()).decode()
        with pytest.raises(AlteredCredentialError, match="was changed"):
            read_credential(json.dumps({**told, "payload": payload}).encode(), chain, run=sealed.origin, now=NOW)
    for wrong in (b"", b"[]", b"{}", json.dumps({**told, "payloadType": "x"}).encode(), b'{"payload": 3}'):
        with pytest.raises(AlteredCredentialError):
            read_credential(wrong, chain, run=sealed.origin, now=NOW)


def test_whose_signature_it_needs(sealed: Sealed, tmp_path: Path) -> None:
    both = signed(sealed, "ada", "bob", classes=(NEWS, PII))
    chain = sealed.world.people.repository.chain()
    assert read_credential(both, chain, run=sealed.origin, now=NOW).covers(f"{PII}&{NEWS}", "gradient_norm")
    assert not read_credential(signed(sealed), chain, run=sealed.origin, now=NOW).covers(
        f"{PII}&{NEWS}", "gradient_norm"
    )
    # Ada's own signature stands under Bob's class.
    told, ada = json.loads(signed(sealed)), json.loads(both)
    keyid = sealed.world.people.keys["ada"].keyid
    forged = {**told, "signatures": [one for one in ada["signatures"] if one["keyid"] == keyid]}
    with pytest.raises(OutOfScopeError, match="may not sign for"):
        read_credential(json.dumps(forged).encode(), chain, run=sealed.origin, now=NOW)
    with pytest.raises(RevokedSignerError, match="nobody"):
        read_credential(json.dumps({**told, "signatures": []}).encode(), chain, run=sealed.origin, now=NOW)


def test_a_key_that_was_taken_back_releases_nothing_and_two_may_have_to_sign(tmp_path: Path) -> None:
    firm = people.People(tmp_path).begin()
    firm.delegate(PII, "bob", "carol", threshold=2)
    named = {"authority": firm.pin, "holder": "ab" * 32, "run": "cosmati/r", "classes": (PII,), "columns": ("loss",)}
    wanted = Credential(**named, until=date(2027, 6, 30))  # type: ignore[arg-type]
    one = sign_credential(wanted, firm.repository.chain(), firm.ring("bob"))
    assert lacking(one, firm.repository.chain()) == {PII: 1}
    with pytest.raises(UnsignedMetadataError, match="1 of 2"):
        read_credential(one, firm.repository.chain(), run="cosmati/r", now=NOW)
    two = sign_credential(wanted, firm.repository.chain(), firm.ring("carol"), one)
    assert read_credential(two, firm.repository.chain(), run="cosmati/r", now=NOW) == wanted
    with pytest.raises(AlteredCredentialError, match="another credential"):
        sign_credential(replace(wanted, columns=("gradient_norm",)), firm.repository.chain(), firm.ring("bob"), one)
    firm.delegate(PII, "dora")
    with pytest.raises(RevokedSignerError, match="taken it back"):
        read_credential(two, firm.repository.chain(), run="cosmati/r", now=NOW)


def test_who_may_sign_is_read_from_what_the_ledger_has_archived(sealed: Sealed, tmp_path: Path) -> None:
    ledger = VerifiedLedger(sealed.run / "ledger")
    facts = [tables.details.get("provenance") for tables in ledger.tables]
    archived = signers_of(sealed.run / "ledger" / FOLDER, facts)
    with pytest.raises(InconsistentMetadataError, match="is missing"):
        signers_of(tmp_path, facts)
    assert archived.first_root_sha256 == sealed.world.people.pin
    with pytest.raises(UntrustedRootError, match="Give that --root"):
        signers_of(sealed.run / "ledger" / FOLDER, facts, root="ab" * 32)
    with pytest.raises(UntrustedRootError, match="names no data authority"):
        signers_of(sealed.run / "ledger" / FOLDER, [None])


def test_only_the_holder_reads_what_was_released_and_only_what_is_covered(sealed: Sealed, tmp_path: Path) -> None:
    key = read_holder_key((sealed.root / "eve/eve.holder.key").read_bytes())
    chain = sealed.world.people.repository.chain()
    found = read_credential((sealed.root / "credential").read_bytes(), chain, run=sealed.origin, now=NOW)
    data, wanted = (sealed.root / "keys").read_bytes(), {"run": sealed.origin, "credential": found.digest}
    opened = read_released(data, key, **wanted, covers=found.covers)
    assert opened(PII, "gradient_norm", 0) is not None
    assert opened(PII, "gradient_norm", 1) is None
    assert opened(NEWS, "gradient_norm", 0) is None
    assert read_released(data, key, **wanted, covers=lambda *_: False)(PII, "gradient_norm", 0) is None
    sealed.cli("keys", "holder", "mallory", "--keys", str(tmp_path))
    other = read_holder_key((tmp_path / "mallory.holder.key").read_bytes())
    with pytest.raises(LedgerError, match="released for the holder"):
        read_released(data, other, **wanted, covers=found.covers)
    stolen = json.dumps({**json.loads(data), "holder": holder_of(other)}).encode()
    with pytest.raises(TamperError, match="was changed"):
        read_released(stolen, other, **wanted, covers=found.covers)
    for name, value in (("run", "cosmati/x"), ("credential", "00" * 32)):
        with pytest.raises(LedgerError, match=f"for the {name}"):
            read_released(data, key, **{**wanted, name: value}, covers=found.covers)
    for wrong in (b"", b"{}", b"[]", json.dumps({**json.loads(data), "box": "!"}).encode()):
        with pytest.raises(LedgerError):
            read_released(wrong, key, **wanted, covers=found.covers)


def test_a_release_keeps_to_columns_steps_and_classes(sealed: Sealed, tmp_path: Path) -> None:
    sealed.grant(tmp_path / "norms", "--columns", "gradient_norm")
    told = sealed.release(tmp_path / "norms", tmp_path / "keys").stdout
    assert "1 keys" in told
    assert PII in told
    key = read_holder_key((sealed.root / "eve/eve.holder.key").read_bytes())
    chain = sealed.world.people.repository.chain()
    digest = read_credential((tmp_path / "norms").read_bytes(), chain, run=sealed.origin, now=NOW).digest
    data = (tmp_path / "keys").read_bytes()
    opened = read_released(data, key, run=sealed.origin, credential=digest, covers=lambda *_: True)
    assert opened(PII, "gradient_norm", 0)
    assert opened(PII, "update_norm", 0) is None, "no key of it is in the file"
    firm = sealed.world.people
    both = ["--classes", NEWS, "--keys", str(firm.root / "ada")]
    sealed.grant(tmp_path / "both", *both)
    assert NEWS not in sealed.release(tmp_path / "both", tmp_path / "keys").stdout, "it isn't sealed"
    wrong = sealed.grant(tmp_path / "x", "--columns", "colour", code=1)
    assert "No column colour" in wrong.output
    sealed.grant(tmp_path / "old", "--until", "2020-01-01")
    assert "was valid until 2020-01-01" in sealed.release(tmp_path / "old", tmp_path / "keys", code=2).output
    away = sealed.release(sealed.root / "credential", tmp_path / "keys", "--secret", str(tmp_path / "none"), code=2)
    assert "you aren't the operator" in away.output
    (tmp_path / "other").write_bytes(bytes(32))
    away = sealed.release(sealed.root / "credential", tmp_path / "keys", "--secret", str(tmp_path / "other"), code=2)
    assert "isn't the secret" in away.output


def test_a_bundle_has_boxes_and_for_one_holder_the_keys_to_them(sealed: Sealed, tmp_path: Path) -> None:
    operator = sealed.run / "private/operator.key"
    plain = export_bundle(sealed.run / "ledger", tmp_path / "plain.zip", key=operator)
    for name in "abcde":
        (tmp_path / name).mkdir()
    lines = verify_bundle(plain, tmp_path / "a").lines
    assert ("sealed", f"gradient_norm of {PII} in 6 steps") in lines
    key = sealed.root / "eve/eve.holder.key"
    with pytest.raises(RefutedError, match="encloses no credential"):
        verify_bundle(plain, tmp_path / "b", None, key)
    rights = sealed.root / "credential", sealed.root / "keys"
    given = export_bundle(sealed.run / "ledger", tmp_path / "given.zip", key=operator, rights=rights)
    told = dict(verify_bundle(given, tmp_path / "c").lines)
    assert PII in told["credential"]
    opened = verify_bundle(given, tmp_path / "d", None, key).lines
    assert ("sealed", f"gradient_norm of {PII} in 0 steps; 6 opened with your key, each as it was written") in opened
    sealed.cli("keys", "holder", "mallory", "--keys", str(tmp_path))
    with pytest.raises(RefutedError, match="isn't the one"):
        verify_bundle(given, tmp_path / "e", None, tmp_path / "mallory.holder.key")
    bad = tmp_path / "bad"
    bad.write_bytes(signed(sealed, run="cosmati/other"))
    with pytest.raises(ExportError, match="for the run"):
        export_bundle(sealed.run / "ledger", tmp_path / "x.zip", key=operator, rights=(bad, rights[1]))


def test_an_authority_for_policies_grants_nothing(tmp_path: Path) -> None:
    ceremony.init(tmp_path / "policies", tmp_path / "own", None)
    given = ["keys", "credential", str(tmp_path / "policies"), "--holder", "ab" * 32, "--run", "cosmati/r"]
    given += ["--classes", PII, "--until", "2027-01-01", "--out", str(tmp_path / "c"), "--keys", str(tmp_path / "own")]
    found = CliRunner().invoke(app, given)
    assert isinstance(found.exception, SystemExit | ProvenanceError)
    assert found.exit_code == 1
    assert not (tmp_path / "c").exists()


def test_an_auditor_is_told_what_was_left_open_that_the_authority_calls_sensitive(
    sealed: Sealed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitive, "marked_in", lambda _: frozenset())  # an operator who has changed his program
    run = tmp_path / "run"
    sealed.world.trainer(run, {}, budget="2ba").fit()
    bundle = export_bundle(run / "ledger", tmp_path / "b.zip", key=run / "private/operator.key")
    (tmp_path / "a").mkdir()
    told = [words for what, words in verify_bundle(bundle, tmp_path / "a").lines if what == "but"]
    assert len(told) == 1
    assert f"calls {PII} sensitive, and from entry 0 on" in told[0]
