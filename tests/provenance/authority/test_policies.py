"""Signed policies: whose signature makes one, and which repository can't."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.cli.main import app
from cosmati.errors import PolicyError, ProvenanceError
from cosmati.provenance.authority import ceremony, errors, signing
from cosmati.provenance.authority.names import PolicyName
from cosmati.provenance.authority.policies import fetch_policy, sign_policy
from cosmati.provenance.authority.trusted import Authority
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.routing.signed_policy import signed_policy
from tests.provenance.authority.people import NEWS, People, name_of

TEXT = "version: 1\ntaxonomy: firm\nrules: [{class: licensed/news, weight: 1}]"
LESS = TEXT.replace("weight: 1", "weight: 0.5")


@dataclass
class PolicyPeople(People):
    """The people of an authority for policies."""

    def begin(self) -> PolicyPeople:
        self.pin = ceremony.init(self.folder, self.root / "own", None, repository=self.repository)
        return self

    def let_sign(self, *names: str, policy: str = "main", threshold: int = 1) -> None:
        people = [self.keys.get(name) or self.person(name) for name in names]
        with self.repository.change(self.ring()) as change:
            ceremony.delegate_policy(change, policy, people, threshold=threshold)

    def sign_text(self, text: str, *names: str, policy: str = "main", number: int | None = None) -> str:
        content = load_policy(text).canonical
        return sign_policy(self.repository, self.ring(*names), policy, content, number=number)[1]

    def open(self, policy: str = "main", number: int | None = None) -> PolicyFile:
        return signed_policy(self.folder, policy, root=self.pin, number=number, state=self.root / "seen")


@pytest.fixture
def people(tmp_path: Path) -> PolicyPeople:
    made = PolicyPeople(tmp_path).begin()
    made.let_sign("ada")
    assert made.sign_text(TEXT, "ada") == "signed"
    return made


def test_a_signed_policy_says_who_signed_it(people: PolicyPeople) -> None:
    policy, written = people.open(), load_policy(TEXT)
    assert (policy.to_mapping(), policy.digest) == (written.to_mapping(), written.digest)
    assert (policy.signed_root, written.signed_root) == (people.pin, "")
    vouched = policy.vouched
    assert vouched is not None
    assert (vouched.voucher.target, vouched.number) == ("policy/main/1", 1)
    assert vouched.voucher.manifest_sha256 == policy.digest.hex()
    assert vouched.voucher.keyids == (people.keys["ada"].keyid,)


def test_versions_are_numbered_and_the_newest_is_taken(people: PolicyPeople) -> None:
    assert people.sign_text(TEXT, "ada") == "was signed already"
    assert people.sign_text(LESS, "ada") == "signed"
    assert people.open().digest == load_policy(LESS).digest
    assert people.open(number=1).digest == load_policy(TEXT).digest
    for number in (2, 1):
        with pytest.raises(ProvenanceError, match="What was signed stays"):
            people.sign_text(TEXT if number == 2 else LESS, "ada", number=number)
    with pytest.raises(ProvenanceError, match=r"number 3, not 4\. Leave no gap"):
        people.sign_text(TEXT, "ada", number=4)
    with pytest.raises(errors.OutOfScopeError, match="haven't signed policy/main/9"):
        people.open(number=9)


def test_what_is_stated_of_a_version_stays(people: PolicyPeople) -> None:
    content, ring = load_policy(LESS).canonical, people.ring("ada")
    said: dict[str, str | int] = {"run": "r", "from_step": 3}
    assert sign_policy(people.repository, ring, "main", content, custom=said)[0].number == 2
    assert sign_policy(people.repository, ring, "main", content, custom=said)[1] == "was signed already"
    with pytest.raises(ProvenanceError, match="signed with another statement"):
        sign_policy(people.repository, ring, "main", content, number=2, custom=said | {"from_step": 1})
    assert sign_policy(people.repository, ring, "main", content)[0].number == 3, "the same for any run"


def test_two_of_two_must_sign(people: PolicyPeople) -> None:
    people.let_sign("bob", "eve", policy="strict", threshold=2)
    assert people.sign_text(TEXT, "bob", policy="strict").startswith("1 of 2 signatures")
    with pytest.raises(errors.OutOfScopeError):
        people.open("strict")
    assert people.sign_text(LESS, "eve", policy="strict").startswith("1 of 2 signatures"), "another content"
    assert people.sign_text(TEXT, "bob", policy="strict").startswith("1 of 2 signatures")
    assert people.sign_text(TEXT, "eve", policy="strict") == "signed"
    vouched = people.open("strict").vouched
    assert vouched is not None
    assert len(vouched.voucher.keyids) == 2


def test_who_signs_one_policy_signs_no_other(people: PolicyPeople) -> None:
    people.let_sign("bob", policy="other")
    with pytest.raises(errors.OutOfScopeError, match="None of the keys here may sign 'other'"):
        people.sign_text(TEXT, "ada", policy="other")
    # A signature that holds, of what Ada may not sign.
    with people.repository.change(people.ring("ada")) as change:
        change.add_target("policy.main", "policy/other/1", load_policy(TEXT).canonical)
    with pytest.raises(errors.OutOfScopeError):
        people.open("other")
    assert people.open().digest == load_policy(TEXT).digest


def test_data_and_policies_have_authorities_of_their_own(people: PolicyPeople, tmp_path: Path) -> None:
    data = People(tmp_path / "data").begin()
    data.delegate(NEWS, "ada")
    with pytest.raises(errors.UntrustedRootError, match="authority for data, which has no say about policies"):
        signed_policy(data.folder, root=data.pin, state=tmp_path / "seen-data")
    with pytest.raises(errors.UntrustedRootError, match="authority for policies, which has no say about data"):
        Authority(people.folder, people.pin, state=tmp_path / "seen-policies").vouch(
            b"manifest", class_path=NEWS, source="s", version="1"
        )
    with pytest.raises(errors.UntrustedRootError), data.repository.change(data.ring()) as change:
        ceremony.delegate_policy(change, "main", [data.keys["ada"]])
    with pytest.raises(errors.UntrustedRootError):
        sign_policy(data.repository, data.ring("ada"), "main", b"{}")
    with pytest.raises(errors.UntrustedRootError):
        ceremony.taxonomy_of(people.repository, people.repository.chain())
    # The root of the one where the other's repository lies.
    with pytest.raises(errors.UntrustedRootError, match="another authority's"):
        signed_policy(data.folder, root=people.pin, state=tmp_path / "seen")


def test_a_data_authority_that_signs_a_policys_path_is_none(people: PolicyPeople, tmp_path: Path) -> None:
    """All keys of the data authority, and metadata that any TUF client takes: the pinned root says what it is."""
    data = People(tmp_path / "data").begin()
    policy = load_policy(TEXT).canonical
    with data.repository.change(data.ring()) as change:
        ceremony._delegate(change, {"policy.main": "policy/main/*"}, [data.person("ada")], 1)
    with data.repository.change(data.ring("ada")) as change:
        change.add_target("policy.main", "policy/main/1", policy)
    chain = data.repository.chain()
    assert "policy/main/1" in chain.targets["policy.main"].signed.targets
    with pytest.raises(errors.UntrustedRootError, match="authority for data"):
        chain.policy(PolicyName("main"))
    with pytest.raises(errors.UntrustedRootError, match="authority for policies"):
        people.repository.chain().source(name_of(NEWS))
    with pytest.raises(errors.UntrustedRootError, match="authority for data"):
        fetch_policy(Authority(data.folder, data.pin, state=tmp_path / "seen"), "main")
    # A later root can't say it either: it's the first that is pinned.
    with data.repository.change(data.ring()) as change:
        change.root().unrecognized_fields["x-cosmati-policies"] = True
    with pytest.raises(errors.UntrustedRootError, match="authority for data"):
        fetch_policy(Authority(data.folder, data.pin, state=tmp_path / "seen"), "main")


def test_a_class_called_policy_makes_no_policys_path(tmp_path: Path) -> None:
    made = People(tmp_path)
    taxonomy = Taxonomy("policy", "1", (("main", "A class."),))
    made.pin = ceremony.init(made.folder, tmp_path / "own", taxonomy, repository=made.repository)
    with made.repository.change(made.ring()) as change:
        ceremony.delegate(change, taxonomy, "main", [made.person("ada")])
    name = type(name_of(NEWS))("policy", "main", "1", "1")
    assert signing.sign_source(made.repository, made.ring("ada"), name, b"{}") == "signed"
    assert name.target.count("/") == 3
    with pytest.raises(errors.UntrustedRootError):
        signed_policy(made.folder, root=made.pin, state=tmp_path / "seen")


def test_tampering_and_age_are_refused(people: PolicyPeople, tmp_path: Path) -> None:
    (file,) = (people.folder / "targets" / "policy" / "main").iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"weight":1', b'"weight":2'))
    with pytest.raises(errors.TamperedManifestError):
        people.open()
    file.unlink()
    with pytest.raises(errors.TamperedManifestError, match="missing"):
        people.open()
    file.write_bytes(content)
    shutil.copytree(people.folder, tmp_path / "old")
    people.sign_text(LESS, "ada")
    assert people.open().digest == load_policy(LESS).digest
    shutil.rmtree(people.folder)
    shutil.move(tmp_path / "old", people.folder)
    with pytest.raises(errors.RolledBackError):
        people.open()


def test_an_expired_policy_is_refused(tmp_path: Path) -> None:
    people = PolicyPeople(tmp_path).begin()
    people.let_sign("ada")
    people.days = -400
    people.sign_text(TEXT, "ada")
    people.days = 0
    with people.repository.change(people.ring()) as change:
        change.targets()
    with pytest.raises(errors.ExpiredMetadataError):
        people.open()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b'{"version":1, "taxonomy":"firm","rules":[]}', b"[" * 100_000]
)
def test_what_was_signed_has_to_be_a_policy_in_its_canonical_form(people: PolicyPeople, content: bytes) -> None:
    sign_policy(people.repository, people.ring("ada"), "main", content)
    with pytest.raises(PolicyError, match=r"policy/main/2 (is no policy|isn't a policy's canonical form)"):
        people.open()


@pytest.mark.parametrize("name", ["", "Main", "a/b", "a.b", "..", "x" * 129])
def test_names_that_no_path_has(people: PolicyPeople, name: str) -> None:
    with pytest.raises(ProvenanceError, match="isn't of the form"):
        people.let_sign("ada", policy=name)


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.long
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text(TEXT)
    (pin,) = re.findall(r"^  ([0-9a-f]{64})$", run("keys", "init", "policies", "--policies"), re.MULTILINE)
    run("keys", "new", "ada", "--keys", "ada")
    run("keys", "new", "bob", "--keys", "bob")
    run("keys", "delegate", "policies", "main", "--to", "ada/ada.pub.pem", "--to", "bob/bob.pub.pem", "--threshold", 2)
    sign = ("policy", "sign", "policy.yaml", "--authority", "policies", "--keys", "policies-keys", "--keys")
    assert "1 of 2 signatures" in run(*sign, "ada")
    said = run(*sign, "bob")
    assert said == f"policy/main/1  {load_policy(TEXT).digest.hex()}: signed\n"
    told = json.loads(run("keys", "status", "policies", "--json"))
    assert told["root"] == pin
    assert {one["role"]: one["num_targets"] for one in told["roles"]}["policy.main"] == 1
    for name in ("main", "policy.main"):  # the latter is how `keys status` calls it
        run("keys", "renew", "policies", name, "--keys", "policies-keys", "--keys", "ada", "--keys", "bob")
    assert signed_policy("policies", root=pin, state="seen").digest == load_policy(TEXT).digest
    said = run("keys", "init", "other", "--policies", "--taxonomy", "policy.yaml", code=1)
    assert "has no classes of its own" in said
    run("keys", "init", "authority")
    said = run("policy", "sign", "policy.yaml", "--authority", "authority", code=1)
    assert "authority for data, which has no say about policies" in said
