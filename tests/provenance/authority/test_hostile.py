"""What a hostile reader of docs/authorities.md tried: planted signatures, crashes, races, and names."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from tuf.api.metadata import DelegatedRole, Delegations, Metadata

from cosmati.cli.main import app
from cosmati.errors import ProvenanceError
from cosmati.provenance.authority import ceremony, errors, repository, signing
from cosmati.provenance.authority.chain import read_chain
from cosmati.provenance.authority.keys import KeyRing, create_key, read_public_key
from cosmati.provenance.authority.names import SourceName
from cosmati.provenance.authority.trusted import Authority
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.storage import atomic
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People, name_of

ROLE = "class.licensed.news"


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada", "bob", threshold=2)
    return made


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.output


def pending(people: People) -> Path:
    return people.folder / "pending" / f"{ROLE}.json"


def _far(signed: Any, _people: People) -> None:
    signed.expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=10_000)


def _ended(signed: Any, _people: People) -> None:
    signed.expires = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)


def _delegates(signed: Any, people: People) -> None:
    eve = people.person("eve")
    signed.delegations = Delegations(
        {eve.keyid: eve}, {"mine": DelegatedRole("mine", [eve.keyid], 1, terminating=True, paths=["firm/*/*/*/*"])}
    )


@pytest.mark.parametrize("plant", [_far, _ended, _delegates])
def test_a_planted_pending_file_is_signed_by_nobody(people: People, plant: Any) -> None:
    """Its targets are those that Ada means to sign; all else in it is somebody's own."""
    people.sign(NEWS, "bob")
    planted = Metadata.from_bytes(pending(people).read_bytes())
    plant(planted.signed, people)
    planted.signatures.clear()
    (bob,) = people.ring("bob").signers([people.keys["bob"].keyid])
    planted.sign(bob)
    pending(people).write_bytes(planted.to_bytes())
    assert people.sign(NEWS, "ada").startswith("1 of 2 signatures")
    assert people.sign(NEWS, "bob") == "signed"
    signed = people.repository.chain().targets[ROLE].signed
    assert signed.delegations is None
    assert timedelta(days=300) < signed.expires - datetime.now(UTC) < timedelta(days=400)


def test_a_signature_planted_under_a_persons_name_keeps_nobody_from_signing(people: People) -> None:
    people.sign(NEWS, "ada")
    content = json.loads(pending(people).read_bytes())
    content["signatures"].append({"keyid": people.keys["bob"].keyid, "sig": "00" * 70})
    pending(people).write_text(json.dumps(content))
    assert people.sign(NEWS, "bob") == "signed"


def test_a_damaged_pending_file_loses_nobody_else_anything(people: People) -> None:
    people.sign(NEWS, "ada")
    pending(people).write_text("{")
    assert people.sign(NEWS, "bob").startswith("1 of 2 signatures")
    assert people.sign(NEWS, "ada") == "signed"


def test_two_sources_of_a_class_wait_for_the_second_person(people: People) -> None:
    sources = {name_of(NEWS, "s"): b"one", name_of(NEWS, "t"): b"two"}
    first = signing.sign_sources_of_class(people.repository, people.ring("ada"), NEWS, sources)
    assert all(state.startswith("1 of 2") for state in first.values())
    second = signing.sign_sources_of_class(people.repository, people.ring("bob"), NEWS, sources)
    assert set(second.values()) == {"signed"}
    assert set(second) == set(sources)
    assert len(people.repository.chain().targets[ROLE].signed.targets) == 2


def test_everything_that_expires_can_be_renewed(tmp_path: Path) -> None:
    people = People(tmp_path, days=-400).begin()
    people.delegate(NEWS, "ada")
    people.sign(NEWS, "ada")
    people.days = 0
    keys = ("--keys", people.root / "own", "--keys", people.root / "ada")
    run("keys", "renew", people.folder, "root", "targets", NEWS, *keys)
    authority = Authority(people.folder, people.pin, state=tmp_path / "seen")
    assert authority.vouch(b"manifest", class_path=NEWS, source="s", version="1").keyids
    assert len(people.repository.chain().roots) == 2


def test_what_cannot_be_renewed_is_told(people: People) -> None:
    said = run("keys", "renew", people.folder, "licensed/new", "--keys", people.root / "own", code=1)
    assert "signs 'licensed/new'" in said
    assert "cosmati keys status" in said


def test_a_crash_between_the_files_of_a_root_is_mended_by_the_next_command(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new root names another key for the timestamp, and the timestamp was not written yet."""
    people.person("carol")
    old = read_public_key(people.root / "own" / "timestamp.pub.pem")
    whole = atomic.replace_files

    def cut(folder: Path, contents: Any) -> None:
        if "metadata/timestamp.json" in contents:
            raise KeyboardInterrupt
        whole(folder, contents)

    monkeypatch.setattr(repository, "replace_files", cut)
    with pytest.raises(KeyboardInterrupt), people.repository.change(people.ring("carol")) as change:
        ceremony.replace_key(change, old.keyid, people.keys["carol"])
    monkeypatch.undo()
    with people.repository.change(people.ring("carol")):
        pass
    chain = Authority(people.folder, people.pin, state=people.root / "seen").refresh()
    assert chain.root.roles["timestamp"].keyids == [people.keys["carol"].keyid]
    assert not (people.folder / "change.json").exists()


@pytest.mark.parametrize("name", ["../outside", "metadata/../../outside", "/etc/outside", "metadata/a/b.json"])
def test_a_planted_change_writes_no_other_file(people: People, name: str) -> None:
    (people.folder / "change.json").write_text(json.dumps({name: ""}))
    with pytest.raises(ProvenanceError, match=r"change\.json.*Remove it"), people.repository.change(people.ring()):
        pass
    assert not (people.root / "outside").exists()


def test_a_revoked_key_is_seen_by_who_asked_before(tmp_path: Path) -> None:
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada")
    people.sign(NEWS, "ada")
    authority = Authority(people.folder, people.pin, state=tmp_path / "seen")
    assert authority.vouch(b"manifest", class_path=NEWS, source="s", version="1")
    with people.repository.change(people.ring()) as change:
        ceremony.replace_key(change, people.keys["ada"].keyid, None)
    authority.refresh()
    with pytest.raises(errors.OutOfScopeError):
        authority.vouch(b"manifest", class_path=NEWS, source="s", version="1")


def test_many_share_what_was_seen(people: People) -> None:
    """Ranks of one machine open their data at once."""
    failed: list[BaseException] = []
    start = threading.Barrier(8)

    def open_it() -> None:
        try:
            start.wait()
            for _ in range(5):
                Authority(people.folder, people.pin, state=people.root / "seen").refresh()
        except BaseException as error:  # noqa: BLE001  (told below)
            failed.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_state_folder_that_cannot_be_written_is_told(people: People) -> None:
    (people.root / "file").write_text("")
    with pytest.raises(ProvenanceError, match=r"state.*"):
        Authority(people.folder, people.pin, state=people.root / "file" / "seen").refresh()
    with pytest.raises(ProvenanceError, match="state="):
        Authority(people.folder, people.pin, state=people.root / "file").refresh()


@pytest.mark.parametrize(
    ("url", "said"),
    [("", "address is empty"), ("bogus://authority", "bogus"), ("unreadable", "can't be fetched: .*[a-z]")],
)
def test_an_address_that_leads_nowhere_is_told(people: People, url: str, said: str, monkeypatch: Any) -> None:
    if url == "unreadable":
        monkeypatch.setattr(Path, "open", _denied)
    with pytest.raises(ProvenanceError, match=said):
        Authority(url, people.pin, state=people.root / "seen").refresh()


def _denied(path: Path, *_: object) -> Any:
    raise PermissionError(13, "Permission denied", str(path))


def test_an_address_may_begin_at_home(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(people.root))
    assert Authority("~/authority", people.pin, state=people.root / "seen").refresh()


@pytest.mark.parametrize("root", [None, "", "f" * 63])
def test_without_its_digest_no_authority_is_trusted(people: People, root: Any) -> None:
    with pytest.raises(ProvenanceError, match="SHA-256 in hex"):
        Authority(people.folder, root)


def test_an_older_state_between_two_readings_is_not_taken(people: People) -> None:
    """Who answers shows the client the newest snapshot, and our own reading another one that was signed too."""
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    authority.refresh()
    chain = people.repository.chain()
    timestamp = people.file("timestamp").read_bytes()
    read = authority._read

    def later(name: str) -> bytes | None:
        found = read(name)
        if name.endswith("1.root.json"):
            with people.repository.change(people.ring()) as change:
                change.targets()
        return found

    authority._read = later  # type: ignore[method-assign]
    found = authority.refresh()
    assert found.timestamp.signed.version == found.snapshot.signed.version == chain.snapshot.signed.version + 1
    assert people.file("timestamp").read_bytes() != timestamp


def test_an_authority_is_not_made_twice_and_makes_no_keys(people: People) -> None:
    own = sorted(people.root.rglob("*.pem"))
    assert "already" in run("keys", "init", people.folder, "--keys", people.root / "others", code=1)
    assert sorted(people.root.rglob("*.pem")) == own


def test_somebodys_public_key_is_not_written_over(tmp_path: Path) -> None:
    create_key(tmp_path, "ada")
    (tmp_path / "ada.key.pem").rename(tmp_path / "away.key.pem")
    before = (tmp_path / "ada.pub.pem").read_bytes()
    with pytest.raises(ProvenanceError, match=r"can't be created.*Name a new one"):
        create_key(tmp_path, "ada")
    assert (tmp_path / "ada.pub.pem").read_bytes() == before
    assert not (tmp_path / "ada.key.pem").exists()


@pytest.mark.parametrize("name", ["", "../ada", "a/b", ".ada", "a" * 300])
def test_a_name_of_a_key_is_one_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProvenanceError, match=r"name of a key.*Use letters"):
        create_key(tmp_path / "keys", name)
    assert not list(tmp_path.rglob("*.pem"))


@pytest.mark.parametrize("word", ["a" * 300, "..", "a/b", "ä", "", ".x", "a b", "a\n"])
def test_a_source_has_a_name_that_a_file_can_have(word: str) -> None:
    for names in ({"source": word}, {"version": word}):
        with pytest.raises(ProvenanceError, match=r"can't stand in a signed path.*at most"):
            name_of(NEWS, **names)


@pytest.mark.parametrize("version", ["../../../../x", "1/2", "v" * 300])
def test_a_taxonomys_version_is_one_segment(tmp_path: Path, version: str) -> None:
    with pytest.raises(ProvenanceError, match=r"version.*can't stand in a signed path"):
        ceremony.init(tmp_path / "authority", tmp_path / "keys", Taxonomy("firm", version, ((NEWS, ""),)))
    assert not list(tmp_path.rglob("*.json"))
    assert not list(tmp_path.rglob("*.pem"))


def test_a_class_path_that_no_file_can_be_called_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProvenanceError, match=r"class.*characters"):
        ceremony.init(tmp_path / "authority", tmp_path / "keys", Taxonomy("firm", "1", (("a" * 300, ""),)))
    assert not list(tmp_path.rglob("*.pem"))


@pytest.mark.parametrize("path", ["root", "targets", "snapshot", "timestamp"])
def test_a_class_may_be_called_as_a_role_is(tmp_path: Path, path: str) -> None:
    people = People(tmp_path)
    taxonomy = Taxonomy(TAXONOMY.name, "1", ((path, ""), (PII, "")))
    people.pin = ceremony.init(people.folder, tmp_path / "own", taxonomy, repository=people.repository)
    with people.repository.change(people.ring()) as change:
        ceremony.delegate(change, taxonomy, path, [people.person("ada")])
    assert people.sign(path, "ada") == "signed"
    authority = Authority(people.folder, people.pin, state=tmp_path / "seen")
    assert authority.vouch(b"manifest", class_path=path, source="s", version="1").target == f"firm/{path}/s/1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name: firm\nversion: "1"\nclasses: {news: Bought., news: Free.}\n', "'news' twice"),
        ('name: firm\nversion: "1"\nclasses: &a {news: *a}\n', "can't be read"),
        ("- a\n", "no mapping"),
        ('name: firm\nversion: "1"\nclasses: {? [a, b] : c}\n', "can't be read"),
    ],
)
def test_a_taxonomy_with_a_trap_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    assert said in run("keys", "init", tmp_path / "authority", "--taxonomy", tmp_path / "t.yaml", code=1)


def test_a_ring_without_its_private_half_says_so(tmp_path: Path) -> None:
    key = create_key(tmp_path, "ada")
    (tmp_path / "ada.key.pem").unlink()
    assert not KeyRing([tmp_path]).num_of([key.keyid])


def test_a_chain_of_ones_own_below_the_trusted_root_is_refused(people: People, tmp_path: Path) -> None:
    """All of it is signed, by the keys that its second root names; the first root's keys never signed that one."""
    other = People(tmp_path / "other").begin()
    with other.repository.change(other.ring()) as change:
        change.root()
    files = dict(other.repository.chain().files)
    files["metadata/1.root.json"] = (people.folder / "metadata/1.root.json").read_bytes()
    with pytest.raises(errors.UnsignedMetadataError, match="'root'"):
        read_chain(files.get, root_sha256=people.pin)


def test_a_root_needs_its_own_keys_too(people: People) -> None:
    files = dict(people.repository.chain().files)
    root = Metadata.from_bytes(files["metadata/1.root.json"])
    root.signed.version = 2
    root.signed.add_key(people.person("eve"), "root")
    root.signed.roles["root"].threshold = 4
    root.signatures.clear()
    for signer in people.ring().signers(root.signed.roles["root"].keyids):
        root.sign(signer, append=True)
    files["metadata/2.root.json"] = root.to_bytes()
    with pytest.raises(errors.UnsignedMetadataError, match="'root'"):
        read_chain(files.get)


def test_a_target_of_another_taxonomy_is_outside(people: People) -> None:
    elsewhere = SourceName("another", NEWS, "s", "1")
    with people.repository.change(people.ring("ada", "bob")) as change:
        change.add_target(ROLE, elsewhere.target, b"manifest")
    with pytest.raises(errors.OutOfScopeError):
        people.repository.chain().source(elsewhere)


def test_what_has_expired_is_signed_anew_by_the_same_command(tmp_path: Path) -> None:
    people = People(tmp_path, days=-400).begin()
    people.delegate(NEWS, "ada")
    people.sign(NEWS, "ada")
    assert people.sign(NEWS, "ada") == "was signed already"
    people.days = 0
    assert people.sign(NEWS, "ada") == "signed"
    assert people.repository.chain().targets[ROLE].signed.expires > datetime.now(UTC)
    with pytest.raises(ProvenanceError, match="was signed with another content"):
        people.sign(NEWS, "ada", data=b"another")
