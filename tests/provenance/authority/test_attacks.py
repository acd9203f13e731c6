"""The attacks of TUF's specification, and those on what this repository adds: each is refused, by its own error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority import errors
from cosmati.provenance.authority.trusted import Authority, FileFetcher
from tests.provenance.authority.people import NEWS, PII, People, name_of


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    made.delegate(PII, "bob", "eve", threshold=2)
    assert made.sign(NEWS, "ada") == "signed"
    return made


def seen(people: People) -> Authority:
    return Authority(people.folder, people.pin, state=people.root / "seen")


def vouch(people: People, path: str = NEWS, data: bytes = b"manifest", source: str = "s") -> tuple[str, ...]:
    return seen(people).vouch(data, class_path=path, source=source, version="1").keyids


def test_what_was_signed_is_vouched_for(people: People) -> None:
    assert vouch(people) == (people.keys["ada"].keyid,)


def test_another_manifest_is_refused(people: People) -> None:
    with pytest.raises(errors.TamperedManifestError, match="Restore it, or have the source signed"):
        vouch(people, data=b"another")


@pytest.mark.parametrize(("path", "source"), [(PII, "s"), (NEWS, "other"), ("public-domain", "s")])
def test_what_nobody_signed_is_refused(people: People, path: str, source: str) -> None:
    with pytest.raises(errors.OutOfScopeError):
        vouch(people, path, source=source)


def test_no_class_is_none(people: People) -> None:
    with pytest.raises(ProvenanceError, match="did you mean licensed/news"):
        vouch(people, "licensed/new")


def test_a_signer_of_one_class_signs_no_other(people: People) -> None:
    with pytest.raises(errors.OutOfScopeError, match="None of the keys here may sign 'customer/pii'"):
        people.sign(PII, "ada")


def test_a_target_in_another_class_file_is_outside(people: People) -> None:
    """Ada signs a target of another class's path in her own metadata: a signature that holds, of what she may not."""
    with people.repository.change(people.ring("ada")) as change:
        change.add_target("class.licensed.news", name_of(PII).target, b"manifest")
    with pytest.raises(errors.OutOfScopeError):
        vouch(people, PII)


def test_one_of_two_signatures_is_published_nowhere(people: People) -> None:
    assert people.sign(PII, "bob").startswith("1 of 2 signatures")
    with pytest.raises(errors.OutOfScopeError):
        vouch(people, PII)
    assert people.sign(PII, "bob").startswith("1 of 2 signatures"), "the same person is one person"
    assert people.sign(PII, "eve") == "signed"
    assert set(vouch(people, PII)) == {people.keys["bob"].keyid, people.keys["eve"].keyid}


def test_a_pending_file_that_somebody_changed_gains_nothing(people: People) -> None:
    people.sign(PII, "bob", data=b"manifest")
    assert people.sign(PII, "eve", data=b"another").startswith("1 of 2 signatures"), "each has signed something else"
    with pytest.raises(errors.OutOfScopeError):
        vouch(people, PII)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "class.licensed.news": lambda signed: signed["targets"]["firm/licensed/news/s/1"].update(length=7),
    "targets": lambda signed: signed["delegations"]["roles"][0].update(threshold=1, name="class.licensed.news2"),
    "snapshot": lambda signed: signed["meta"].update({"x.json": {"version": 1}}),
    "timestamp": lambda signed: signed["meta"]["snapshot.json"].update(version=1),
    "root": lambda signed: signed["roles"]["targets"].update(threshold=1, keyids=[]),
}


@pytest.mark.parametrize("role", CHANGES)
def test_arbitrary_metadata_are_refused(people: People, role: str) -> None:
    people.edit(role, CHANGES[role])
    with pytest.raises((errors.UnsignedMetadataError, errors.UntrustedRootError, errors.RolledBackError)):
        vouch(people)
    # Nor does whoever keeps the repository sign on top of it.
    if role == "class.licensed.news":
        assert "nothing that was signed before" in people.sign(NEWS, "ada", version="2")
        assert list(people.repository.chain().targets[role].signed.targets) == ["firm/licensed/news/s/2"]
    elif role != "root":
        with pytest.raises(ProvenanceError):
            people.sign(NEWS, "ada", version="2")


def test_another_authority_is_none_of_ours(people: People, tmp_path: Path) -> None:
    other = People(tmp_path / "other").begin()
    with pytest.raises(errors.UntrustedRootError):
        Authority(other.folder, people.pin, state=tmp_path / "seen").refresh()


def test_an_older_state_is_refused_where_a_newer_was_seen(people: People, tmp_path: Path) -> None:
    shutil.copytree(people.folder, tmp_path / "old")
    people.sign(NEWS, "ada", version="2")
    seen(people).refresh()
    shutil.rmtree(people.folder)
    shutil.move(tmp_path / "old", people.folder)
    with pytest.raises(errors.RolledBackError):
        seen(people).refresh()


def test_a_frozen_state_ends(tmp_path: Path) -> None:
    people = People(tmp_path, days=-8).begin()  # a timestamp holds for seven days
    with pytest.raises(errors.ExpiredMetadataError, match="timestamp"):
        seen(people).refresh()
    people.days = 0
    with people.repository.change(people.ring()) as change:
        change.targets()
    assert seen(people).refresh().delegations.targets


def test_sources_that_expired_are_refused_and_others_are_not(tmp_path: Path) -> None:
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada")
    people.delegate(PII, "bob")
    people.days = -400
    people.sign(NEWS, "ada")
    people.days = 0
    people.sign(PII, "bob")
    with pytest.raises(errors.ExpiredMetadataError, match=r"class\.licensed\.news"):
        vouch(people)
    assert vouch(people, PII)


def test_files_of_two_states_are_refused(people: People, tmp_path: Path) -> None:
    before = people.file("snapshot").read_bytes()
    people.sign(NEWS, "ada", version="2")
    people.file("snapshot").write_bytes(before)
    with pytest.raises((errors.InconsistentMetadataError, errors.RolledBackError)):
        seen(people).refresh()
    with pytest.raises(errors.InconsistentMetadataError, match="different states"):
        people.repository.chain()


@pytest.mark.parametrize("role", ["targets", "snapshot", "class.licensed.news"])
def test_a_missing_file_is_named(people: People, role: str) -> None:
    people.file(role).unlink()
    with pytest.raises(errors.InconsistentMetadataError, match=role):
        vouch(people)


def test_endless_data_end(people: People) -> None:
    class Endless(FileFetcher):
        num_bytes = 0

        def _fetch(self, url: str) -> Any:
            if not url.endswith("timestamp.json"):
                yield from super()._fetch(url)
                return
            while True:
                self.num_bytes += 1 << 16
                yield bytes(1 << 16)

    authority = seen(people)
    authority._fetcher = Endless()
    with pytest.raises(errors.UnreachableAuthorityError, match="exceeding the maximum"):
        authority.refresh()
    assert authority._fetcher.num_bytes < 1 << 20


def test_a_revoked_key_takes_what_it_signed_along(people: People) -> None:
    from cosmati.provenance.authority import ceremony

    people.person("carol")
    with people.repository.change(people.ring()) as change:
        assert ceremony.replace_key(change, people.keys["ada"].keyid, people.keys["carol"]) == [NEWS]
    with pytest.raises(errors.UnsignedMetadataError, match=r"class\.licensed\.news"):
        vouch(people)
    with pytest.raises(errors.OutOfScopeError):
        people.sign(NEWS, "ada")
    assert people.sign(NEWS, "carol").startswith("signed, and nothing that was signed before")
    assert vouch(people) == (people.keys["carol"].keyid,)


def test_a_root_key_is_replaced_by_two_of_three(people: People) -> None:
    from cosmati.provenance.authority import ceremony
    from cosmati.provenance.authority.keys import read_public_key

    old = read_public_key(people.root / "own" / "root-1.pub.pem")
    people.person("dan")
    (people.root / "own" / "root-2.key.pem").rename(people.root / "root-2.key.pem")
    (people.root / "own" / "root-1.key.pem").rename(people.root / "root-1.key.pem")
    with (
        pytest.raises(ProvenanceError, match=r"'root' has 1 of 2 signatures"),
        people.repository.change(people.ring()) as change,
    ):
        ceremony.replace_key(change, old.keyid, people.keys["dan"])
    (people.root / "root-2.key.pem").rename(people.root / "own" / "root-2.key.pem")
    with people.repository.change(people.ring("dan")) as change:
        ceremony.replace_key(change, old.keyid, people.keys["dan"])
    assert len(people.repository.chain().roots) == 2
    assert people.repository.chain().first_root_sha256 == people.pin
    assert vouch(people)


def test_a_root_that_its_predecessor_never_signed_is_refused(people: People, tmp_path: Path) -> None:
    other = People(tmp_path / "other").begin()
    with other.repository.change(other.ring()) as change:
        change.root()
    shutil.copy(other.file("root"), people.folder / "metadata")
    with pytest.raises(errors.UnsignedMetadataError):
        people.repository.chain()
    with pytest.raises(ProvenanceError):
        seen(people).refresh()
