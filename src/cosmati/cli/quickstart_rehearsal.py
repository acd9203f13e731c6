"""The quickstart's rehearsal of who signs what: two authorities of its own, all of whose keys lie in one folder.

In earnest nobody holds them all, and who trusts an authority pins a root that the authority itself has told. Here the
root is read from the folder in which the keys lie, which proves that signatures are followed, and nothing else. Both
roots say that they're a rehearsal's, and so does whatever is signed under them, wherever it's copied to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cosmati.data.signing import sign_sources
from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.ceremony import delegate, delegate_policy, init, renew, status
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.policies import sign_policy
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.trusted import Authority
from cosmati.provenance.taxonomy import software_licences
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.signed_policy import signed_policy

DATA, POLICIES, KEYS = "data-authority", "policy-authority", "keys"
STEWARDS = {
    "open-source-office": ("open", "public-domain"),
    "legal-department": ("proprietary", "restricted", "unknown"),
}
"""Who answers for which branches of the classes."""
DECIDES = "model-risk"
_POLICY = "main"
_AHEAD = timedelta(days=1)


def _now() -> datetime:
    return datetime.now(UTC)


def rehearse(
    folder: Path, data: str | Path, policy: PolicyFile, *, clock: Callable[[], datetime] = _now
) -> tuple[Authority, PolicyFile]:
    """Have data and a policy signed; return who vouches for the data, and the policy as it was signed.

    The first call makes the authorities. A later one signs what is new, and renews what expires within a day.

    Args:
        folder: of repositories and keys.
        data: the data set whose sources are signed.
        policy: what `main` says from now on; another one than before is its next version.
        clock: says what time it is.

    Raises:
        ProvenanceError: what lies in the folder isn't what was made there.
    """
    if not folder.exists():
        being_made = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(being_made, ignore_errors=True)  # what an earlier call left half done has signed nothing
        _make(being_made, clock)
        being_made.rename(folder)
    if not (folder / KEYS).is_dir():
        msg = (
            f"{folder} has no keys any more, so nothing can be signed. Put {folder / KEYS} back; or remove {folder} "
            "and the runs beside it, and run the quickstart again."
        )
        raise ProvenanceError(msg)
    ring = KeyRing(sorted(one for one in (folder / KEYS).iterdir() if one.is_dir()))
    repositories = [AuthorityRepository(folder / name, clock=clock) for name in (DATA, POLICIES)]
    for repository in repositories:
        _renew(repository, ring)
    roots = [repository.chain().first_root_sha256 for repository in repositories]
    for _ in sign_sources(str(data), folder / DATA, ring):
        pass  # each one that couldn't be signed would be refused when it's opened
    sign_policy(repositories[1], ring, _POLICY, policy.canonical)
    authority = Authority(folder / DATA, roots[0], state=folder / "seen" / DATA, clock=clock)
    return authority, signed_policy(folder / POLICIES, _POLICY, root=roots[1], state=folder / "seen" / POLICIES)


def _make(folder: Path, clock: Callable[[], datetime]) -> None:
    keys, taxonomy = folder / KEYS, software_licences()
    people = {name: create_key(keys / "people", name) for name in (*STEWARDS, DECIDES)}
    data, policies = (AuthorityRepository(folder / name, clock=clock) for name in (DATA, POLICIES))
    init(data.folder, keys / DATA, taxonomy, repository=data, is_rehearsal=True)
    init(policies.folder, keys / POLICIES, None, repository=policies, is_rehearsal=True)
    with data.change(KeyRing([keys / DATA])) as change:
        for name, branches in STEWARDS.items():
            for branch in branches:
                delegate(change, taxonomy, branch, [people[name]])
    with policies.change(KeyRing([keys / POLICIES])) as change:
        delegate_policy(change, _POLICY, [people[DECIDES]])


def _renew(repository: AuthorityRepository, ring: KeyRing) -> None:
    soon = repository.clock() + _AHEAD
    ending = [one.role for one in status(repository) if one.expires is not None and one.expires < soon]
    if ending:
        with repository.change(ring) as change:
            renew(change, ending)
