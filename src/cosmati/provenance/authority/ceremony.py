"""What the people of an authority do: name who signs what, for how long, and take it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, TargetFile, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain, newest_taxonomy
from cosmati.provenance.authority.errors import OutOfScopeError
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import (
    POLICY_PATH,
    TOP_ROLES,
    PolicyName,
    SourceName,
    check_taxonomy,
    class_of_role,
    pattern_of,
    role_of,
)
from cosmati.provenance.authority.repository import AuthorityRepository, RepositoryChange, TooFewSignaturesError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.storage.atomic import replace_files

ROOT_KEYS, ROOT_THRESHOLD = 3, 2
_CLOCKS_DIFFER = timedelta(days=1)


@dataclass(frozen=True)
class RoleStatus:
    """Who signs one thing, and for how long it holds.

    Attributes:
        role: a top role, or the class.
        keyids: of the keys that may sign.
        threshold: how many of them must.
        version: of the metadata; None where nothing was signed yet.
        expires: when they expire.
        num_targets: sources or taxonomies that they sign.
        problem: why they aren't trusted, empty where they are.
    """

    role: str
    keyids: tuple[str, ...]
    threshold: int
    version: int | None
    expires: datetime | None
    num_targets: int = 0
    problem: str = ""


def init(
    folder: Path,
    keys: Path,
    taxonomy: Taxonomy | None,
    *,
    passphrase: str = "",
    repository: AuthorityRepository | None = None,
) -> str:
    """Make an authority: three keys for its root, of which two must sign, one for each other role, and its repository.

    Args:
        folder: of the repository, which may be published.
        keys: folder of the private keys, which may not. The root's belong to three people: move them apart.
        taxonomy: the classes; None for an authority for policies, which has none.
        passphrase: of the keys; empty for none.
        repository: in place of one with the usual lifetimes.

    Returns:
        The digest of the first root, which everybody who trusts this authority writes down.

    Raises:
        ProvenanceError: there's an authority already, or keys of these names.
    """
    repository = repository or AuthorityRepository(folder)
    repository.refuse_one()
    if taxonomy is not None:
        check_taxonomy(taxonomy)
    made = {"root": [create_key(keys, f"root-{n}", passphrase=passphrase) for n in range(1, ROOT_KEYS + 1)]}
    made |= {role: [create_key(keys, role, passphrase=passphrase)] for role in TOP_ROLES if role != "root"}
    ring = KeyRing([keys], passphrase=passphrase)
    return repository.create(taxonomy, made, root_threshold=ROOT_THRESHOLD, ring=ring)


def taxonomy_of(repository: AuthorityRepository, chain: Chain) -> Taxonomy:
    """Return the newest taxonomy that an authority has published.

    Raises:
        ProvenanceError: its file is missing, or isn't the one that was signed.
    """
    return Taxonomy.from_mapping(json.loads(repository.target(newest_taxonomy(chain))))


def delegate(
    change: RepositoryChange, taxonomy: Taxonomy, path: str, keys: Sequence[Key], *, threshold: int = 1
) -> list[str]:
    """Let keys sign a class, or each class of a branch, in place of those that may now; return the classes.

    Raises:
        ProvenanceError: the taxonomy has no such class, there are fewer keys than must sign.
    """
    classes = [name for name in taxonomy.classes if name == path or name.startswith(f"{path}/")]
    if not classes:
        taxonomy.id_of(path)  # says which are near
    _delegate(change, {role_of(name): pattern_of(taxonomy.name, name) for name in classes}, keys, threshold)
    return classes


def delegate_policy(change: RepositoryChange, name: str, keys: Sequence[Key], *, threshold: int = 1) -> str:
    """Let keys sign the versions of a policy, in place of those that may now; return its name.

    Raises:
        ProvenanceError: the name can't stand in a path, or there are fewer keys than must sign.
    """
    assert change.chain is not None
    change.chain.check_kind(policies=True)
    policy = PolicyName(name)
    _delegate(change, {policy.role: policy.pattern}, keys, threshold)
    return policy.name


def _delegate(change: RepositoryChange, patterns: Mapping[str, str], keys: Sequence[Key], threshold: int) -> None:
    if not 1 <= threshold <= len({key.keyid for key in keys}):
        msg = (
            f"{threshold} of {len({key.keyid for key in keys})} keys can't be asked to sign. Give as many --to as that."
        )
        raise ProvenanceError(msg)
    delegations = change.delegations()
    for role, pattern in patterns.items():
        _drop(change, role)
        assert delegations.roles is not None
        delegations.roles[role] = DelegatedRole(role, [], threshold, terminating=True, paths=[pattern])
        for key in keys:
            change.targets().add_key(key, role)


def _drop(change: RepositoryChange, role: str) -> None:
    """Take a delegation away, and the keys that serve no other one."""
    targets = change.targets()
    roles = change.delegations().roles or {}
    if role in roles:
        for keyid in list(roles[role].keyids):
            targets.revoke_key(keyid, role)
        del roles[role]


def replace_key(change: RepositoryChange, keyid: str, new: Key | None) -> list[str]:
    """Put another key in a key's place wherever it may sign, or none; return the roles.

    What it has signed before is trusted no more; what the others have signed is, where they're enough.

    Raises:
        ProvenanceError: it may sign nothing here, or too few keys would be left.
    """
    chain = change.chain
    assert chain is not None
    named: list[tuple[Root | Targets, str]] = []
    if any(keyid in role.keyids for role in chain.root.roles.values()):
        root = change.root()
        named += [(root, name) for name, role in root.roles.items() if keyid in role.keyids]
    delegations = chain.delegations.delegations
    if delegations and keyid in delegations.keys:
        roles = change.delegations().roles or {}
        named += [(change.targets(), name) for name, role in roles.items() if keyid in role.keyids]
    if not named:
        raise ProvenanceError(f"The key {keyid[:12]} signs nothing here. `cosmati keys status` shows which do.")
    for delegator, role in named:
        if new is not None:
            delegator.add_key(new, role)
        left = delegator.get_delegated_role(role)
        if len(left.keyids) - 1 < left.threshold and isinstance(delegator, Root):
            msg = (
                f"Without that key {role!r} has {len(left.keyids) - 1} of the {left.threshold} keys that must sign it. "
                "Rotate it: `cosmati keys rotate`."
            )
            raise ProvenanceError(msg)
        if len(left.keyids) - 1 < left.threshold:
            _drop(change, role)  # nobody signs that class until it's delegated anew
        else:
            delegator.revoke_key(keyid, role)
        if role in chain.targets and change.ring.num_of(left.keyids) >= left.threshold:
            change.targets(role)  # signed anew by the keys that are left; its people do it where theirs aren't here
    return [class_of_role(role) or role for _, role in named]


def renew(change: RepositoryChange, names: Iterable[str] = ()) -> None:
    """Have what some people sign signed anew, to hold longer; snapshot and timestamp are with each change.

    Args:
        change: of the repository.
        names: of classes, and of the authority's own roles.

    Raises:
        ProvenanceError: nobody signs one of them, or nothing that it has signed is trusted.
    """
    chain = change.chain
    assert chain is not None
    for name in names:
        # A class may be called as one of the roles: then both are.
        named = (name if name in TOP_ROLES else "", role_of(name), f"{POLICY_PATH}.{name}")
        roles = [role for role in named if role in _signed_roles(chain)]
        if not roles:
            why = chain.problems.get(role_of(name), "it has signed nothing yet")
            msg = f"What signs {name!r} can't be renewed: {why}. `cosmati keys status` shows who signs what."
            raise ProvenanceError(msg)
        for role in roles:
            if role == "root":
                change.root()
            elif role not in {"snapshot", "timestamp"}:
                change.targets(role)


def _signed_roles(chain: Chain) -> set[str]:
    return {*chain.root.roles, *chain.targets}


def status(repository: AuthorityRepository) -> list[RoleStatus]:
    """Return who may sign what and until when, what expires first ahead.

    Raises:
        ProvenanceError: there's no repository, or its root doesn't verify.
    """
    chain = repository.chain()
    metadata: Mapping[str, Metadata[Any]] = {
        "root": chain.roots[-1],
        "timestamp": chain.timestamp,
        "snapshot": chain.snapshot,
        **chain.targets,
    }
    delegations = chain.delegations.delegations
    roles: Mapping[str, object] = {**chain.root.roles, **((delegations.roles or {}) if delegations else {})}
    found = []
    for role in roles:
        one, named = metadata.get(role), chain.delegator_of(role).get_delegated_role(role)
        num = len(one.signed.targets) if one is not None and isinstance(one.signed, Targets) else 0
        version, expires = (one.signed.version, one.signed.expires) if one is not None else (None, None)
        problem = str(chain.problems.get(role, ""))
        name = class_of_role(role) or role
        found.append(RoleStatus(name, tuple(named.keyids), named.threshold, version, expires, num, problem))
    return sorted(
        found, key=lambda one: (one.expires is None, one.expires or datetime.max.replace(tzinfo=UTC), one.role)
    )


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
                change.add_target(role, path, data, custom)
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
