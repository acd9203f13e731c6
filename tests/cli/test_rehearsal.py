"""The quickstart's rehearsal: what it signs holds, goes on holding, and needs no attention."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.cli import quickstart_rehearsal
from cosmati.cli.quickstart_rehearsal import DATA, KEYS, POLICIES, STEWARDS, rehearse
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.standing import standing
from cosmati.provenance.taxonomy import software_licences
from cosmati.recipes.quickstart import quickstart_policy, quickstart_policy_text
from cosmati.routing.policy_file import load_policy


def corpus(folder: Path, *classes: str) -> Path:
    rows = [{"number": number} for number in range(8)]
    class_of = {number: classes[number % len(classes)] for number in range(8)}
    write_dataset(rows, folder, {"number": "int"}, class_of=lambda row: class_of[row["number"]], source=folder.name)
    return folder


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_class_has_a_steward() -> None:
    branches = [branch for own in STEWARDS.values() for branch in own]
    assert sorted(branches) == sorted({name.partition("/")[0] for name in software_licences().classes})


def test_it_signs_data_and_policy_with_keys_of_different_people(tmp_path: Path) -> None:
    data = corpus(tmp_path / "data", "open/psf", "unknown")
    authority, policy = rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    opened = StreamingDataset(data, authority=authority)
    signers = {one.class_path: one.vouched.voucher.keyids for one in opened.sources if one.vouched}
    assert set(signers) == {"open/psf", "unknown"}
    assert policy.digest == quickstart_policy().digest
    assert policy.vouched is not None
    keys = [*signers.values(), policy.vouched.voucher.keyids]
    assert len({*keys}) == 3, "each signs with a key of their own"
    assert policy.signed_root != authority.root
    assert [standing(AuthorityRepository(tmp_path / "rehearsal" / name)).is_rehearsal for name in (DATA, POLICIES)] == [
        True,
        True,
    ]
    private = list((tmp_path / "rehearsal" / KEYS).rglob("*.key.pem"))
    assert len(private) == 3 + 2 * 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_another_call_changes_nothing(tmp_path: Path) -> None:
    data = corpus(tmp_path / "data", "open/psf")
    first, _ = rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    before = files(tmp_path / "rehearsal")
    again, policy = rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    after = files(tmp_path / "rehearsal")
    assert after.keys() == before.keys()
    # When authorities were last asked moves with the second.
    assert {path.name for path in after if after[path] != before[path]} <= {"asked"}
    assert again.root == first.root
    assert policy.vouched is not None
    assert policy.vouched.number == 1


def test_what_is_new_is_signed_and_what_stood_still_holds(tmp_path: Path) -> None:
    old = corpus(tmp_path / "data", "open/psf")
    rehearse(tmp_path / "rehearsal", old, quickstart_policy())
    new = corpus(tmp_path / "more", "open/permissive", "unknown")
    changed = load_policy(quickstart_policy_text().replace("weight: 0.5", "weight: 0.25"))
    authority, policy = rehearse(tmp_path / "rehearsal", new, changed)
    assert policy.vouched is not None
    assert (policy.vouched.number, policy.digest) == (2, changed.digest)
    StreamingDataset(new, authority=authority)
    StreamingDataset(old, authority=authority)


def test_two_years_later_it_renews_what_has_expired(tmp_path: Path) -> None:
    data = corpus(tmp_path / "data", "open/psf")
    rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    later = datetime.now(UTC) + timedelta(days=730)
    authority, policy = rehearse(tmp_path / "rehearsal", data, quickstart_policy(), clock=lambda: later)
    StreamingDataset(data, authority=authority)
    assert policy.vouched is not None
    for name in (DATA, POLICIES):
        roles = standing(AuthorityRepository(tmp_path / "rehearsal" / name, clock=lambda: later)).roles
        assert all(one.expires > later for one in roles if one.expires)


def test_one_that_was_broken_off_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus(tmp_path / "data", "open/psf")
    with monkeypatch.context() as here:
        here.setattr(quickstart_rehearsal, "delegate_policy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    assert not (tmp_path / "rehearsal").exists()
    authority, _ = rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    StreamingDataset(data, authority=authority)


def test_keys_that_are_gone_are_told_with_their_mend(tmp_path: Path) -> None:
    data = corpus(tmp_path / "data", "open/psf")
    rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    (tmp_path / "rehearsal" / KEYS).rename(tmp_path / "elsewhere")
    with pytest.raises(ProvenanceError, match=r"has no keys any more.*Put .*keys back"):
        rehearse(tmp_path / "rehearsal", data, quickstart_policy())


def test_data_that_were_relabelled_since_are_refused(tmp_path: Path) -> None:
    data = corpus(tmp_path / "data", "open/psf")
    authority, _ = rehearse(tmp_path / "rehearsal", data, quickstart_policy())
    (manifest,) = data.rglob("manifest.json")
    manifest.write_text(manifest.read_text().replace("open/psf", "public-domain"))
    with pytest.raises(ProvenanceError):
        StreamingDataset(data, authority=authority)
