"""What people sign once they may: the sources of a class, the versions of a policy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta

from tuf.api.metadata import DelegatedRole, TargetFile

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.errors import OutOfScopeError
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import SourceName, role_of
from cosmati.provenance.authority.repository import AuthorityRepository, TooFewSignaturesError
from cosmati.storage.atomic import replace_files

_CLOCKS_DIFFER = timedelta(days=1)


def sign_source(repository: AuthorityRepository, ring: KeyRing, name: SourceName, manifest: bytes) -> str:
    """Sign one source: see `sign_sources_of_class`."""
    return sign_sources_of_class(repository, ring, name.class_path, {name: manifest})[name]


def sign_sources_of_class(
    repository: AuthorityRepository, ring: KeyRing, class_path: str, manifests: Mapping[SourceName, bytes]
) -> dict[SourceName, str]:
    """Sign sources of a class: see `sign_targets`."""
    targets = {name.target: manifest for name, manifest in manifests.items()}
    states = sign_targets(repository, ring, role_of(class_path), targets, what=class_path)
    return {name: states[name.target] for name in manifests}


def sign_targets(
    repository: AuthorityRepository,
    ring: KeyRing,
    role: str,
    targets: Mapping[str, bytes],
    *,
    what: str,
    custom: Mapping[str, str | int] | None = None,
) -> dict[str, str]:
    """Sign targets of a role with the keys at hand, and publish them once enough people have; return what came of it.

    They're signed together: what one person has signed of them waits for the next one as a whole.

    Args:
        repository: of the authority.
        ring: the keys at hand: those of the role, and the repository's snapshot and timestamp.
        role: whose people sign.
        targets: contents by path.
        what: they sign, in words: the class or the policy.
        custom: what else they say of each target.

    Raises:
        OutOfScopeError: nobody may sign this, or none of the keys at hand may.
        ProvenanceError: something else was signed under a path, or the repository's own keys aren't here.
    """
    chain = repository.chain()
    delegation = _delegation(chain, role, what, ring)
    now = repository.clock()
    metadata = chain.targets.get(role)
    before = metadata.signed.targets if metadata else {}
    for path, data in targets.items():
        _refuse_another(before.get(path), path, data, custom)
    holds = metadata is not None and not metadata.signed.is_expired(now)
    new = {path: data for path, data in targets.items() if not holds or path not in before}
    states = dict.fromkeys(targets, "was signed already")
    if not new:
        return states
    pending = repository.folder / "pending" / f"{role}.json"
    until = repository.lifetimes.until(role, now) + _CLOCKS_DIFFER
    try:
        with repository.change(ring) as change:
            for path, data in new.items():
                change.add_target(role, path, data, **(custom or {}))
            change.take_over(role, pending, now=now, until=until)
    except TooFewSignaturesError as error:
        if error.role != role:
            raise
        replace_files(repository.folder, {f"pending/{role}.json": error.metadata.to_bytes()})
        have = f"{len(error.metadata.signatures)} of {delegation.threshold} signatures"
        return states | dict.fromkeys(new, f"{have}; the next one runs the same command")
    pending.unlink(missing_ok=True)
    lost = chain.problems.get(role)
    said = "signed" if lost is None else f"signed, and nothing that was signed before under {what}: {lost}"
    return states | dict.fromkeys(new, said)


def _delegation(chain: Chain, role: str, what: str, ring: KeyRing) -> DelegatedRole:
    """Return who may sign for a role, of whom one has a key here."""
    delegations = chain.delegations.delegations
    found = (delegations.roles or {}).get(role) if delegations else None
    if found is None:
        raise OutOfScopeError(f"Nobody may sign {what!r} yet. Run `cosmati keys delegate` for it.")
    if not ring.num_of(found.keyids):
        may = ", ".join(keyid[:12] for keyid in found.keyids)
        raise OutOfScopeError(f"None of the keys here may sign {what!r}: {may} may. Give theirs with --keys.")
    return found


def _refuse_another(
    before: TargetFile | None, path: str, data: bytes, custom: Mapping[str, str | int] | None = None
) -> None:
    if before is None:
        return
    is_same = before.hashes["sha256"] == hashlib.sha256(data).hexdigest()
    if not is_same or before.custom != (dict(custom) if custom else None):
        msg = (
            f"{path} was signed with another {'statement' if is_same else 'content'} "
            f"({before.hashes['sha256'][:16]}). What was signed stays: give the changed one a new version."
        )
        raise ProvenanceError(msg)
