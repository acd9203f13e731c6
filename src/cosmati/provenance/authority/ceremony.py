"""What the people of an authority do: name who signs what, for how long, and take it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain, newest_taxonomy
from cosmati.provenance.authority.errors import OutOfScopeError
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import TOP_ROLES, SourceName, class_of_role, pattern_of, role_of
from cosmati.provenance.authority.repository import AuthorityRepository, RepositoryChange, TooFewSignaturesError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.storage.atomic import replace_files

ROOT_KEYS, ROOT_THRESHOLD = 3, 2


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
    folder: Path, keys: Path, taxonomy: Taxonomy, *, passphrase: str = "", repository: AuthorityRepository | None = None
) -> str:
    """Make an authority: three keys for its root, of which two must sign, one for each other role, and its repository.

    Args:
        folder: of the repository, which may be published.
        keys: folder of the private keys, which may not. The root's belong to three people: move them apart.
        taxonomy: the classes.
        passphrase: of the keys; empty for none.
        repository: in place of one with the usual lifetimes.

    Returns:
        The digest of the first root, which everybody who trusts this authority writes down.

    Raises:
        ProvenanceError: there's an authority already, or keys of these names.
    """
    made = {"root": [create_key(keys, f"root-{n}", passphrase=passphrase) for n in range(1, ROOT_KEYS + 1)]}
    made |= {role: [create_key(keys, role, passphrase=passphrase)] for role in TOP_ROLES if role != "root"}
    ring = KeyRing([keys], passphrase=passphrase)
    return (repository or AuthorityRepository(folder)).create(taxonomy, made, root_threshold=ROOT_THRESHOLD, ring=ring)


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
    if not 1 <= threshold <= len({key.keyid for key in keys}):
        msg = (
            f"{threshold} of {len({key.keyid for key in keys})} keys can't be asked to sign. Give as many --to as that."
        )
        raise ProvenanceError(msg)
    delegations = change.delegations()
    for name in classes:
        role = role_of(name)
        _drop(change, role)
        assert delegations.roles is not None
        delegations.roles[role] = DelegatedRole(
            role, [], threshold, terminating=True, paths=[pattern_of(taxonomy.name, name)]
        )
        for key in keys:
            change.targets().add_key(key, role)
    return classes


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


def renew(change: RepositoryChange, classes: Iterable[str] = ()) -> None:
    """Have the delegations and some classes' sources signed anew; snapshot and timestamp are with each change."""
    change.targets()
    for name in classes:
        change.targets(role_of(name))


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
    """Sign a source with the keys at hand, and publish it once enough people have; return what came of it.

    Raises:
        OutOfScopeError: nobody may sign the class, or none of the keys at hand may.
        ProvenanceError: another manifest was signed under this version, or the repository's own keys aren't here.
    """
    role = role_of(name.class_path)
    chain = repository.chain()
    delegated = (chain.delegations.delegations.roles or {}) if chain.delegations.delegations else {}
    if role not in delegated:
        raise OutOfScopeError(f"Nobody may sign {name.class_path!r} yet. Run `cosmati keys delegate` for it.")
    if not ring.num_of(delegated[role].keyids):
        may = ", ".join(keyid[:12] for keyid in delegated[role].keyids)
        raise OutOfScopeError(
            f"None of the keys here may sign {name.class_path!r}: {may} may. Give theirs with --keys."
        )
    before = chain.targets[role].signed.targets.get(name.target) if role in chain.targets else None
    digest = hashlib.sha256(manifest).hexdigest()
    if before is not None and before.hashes["sha256"] != digest:
        msg = (
            f"{name.source} {name.version} was signed with another manifest ({before.hashes['sha256'][:16]}). What was "
            "signed stays: write the changed source under a new version."
        )
        raise ProvenanceError(msg)
    if before is not None and role not in chain.problems:
        return "was signed already"
    pending = repository.folder / "pending" / f"{role}.json"
    try:
        with repository.change(ring) as change:
            change.add_target(role, name.target, manifest)
            change.take_over(role, pending)
    except TooFewSignaturesError as error:
        if error.role != role:
            raise
        replace_files(repository.folder, {f"pending/{role}.json": error.metadata.to_bytes()})
        need, have = delegated[role].threshold, len(error.metadata.signatures)
        return f"{have} of {need} signatures; the next one runs the same command"
    pending.unlink(missing_ok=True)
    lost = chain.problems.get(role)
    return "signed" if lost is None else f"signed, and nothing that was signed before in its class: {lost}"
