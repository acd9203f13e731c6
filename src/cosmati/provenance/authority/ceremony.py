"""What the people of an authority do: name who signs what, for how long, and take it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import TAXONOMY_PATH, TOP_ROLES, class_of_role, pattern_of, role_of
from cosmati.provenance.authority.repository import AuthorityRepository, Change
from cosmati.provenance.taxonomy import Taxonomy

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
    signed = [path for path in chain.delegations.targets if path.startswith(f"{TAXONOMY_PATH}/")]
    return Taxonomy.from_mapping(json.loads(repository.target(chain.delegations.targets[signed[-1]])))


def delegate(change: Change, taxonomy: Taxonomy, path: str, keys: Sequence[Key], *, threshold: int = 1) -> list[str]:
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


def _drop(change: Change, role: str) -> None:
    """Take a delegation away, and the keys that serve no other one."""
    targets = change.targets()
    roles = change.delegations().roles or {}
    if role in roles:
        for keyid in list(roles[role].keyids):
            targets.revoke_key(keyid, role)
        del roles[role]


def replace_key(change: Change, keyid: str, new: Key | None) -> list[str]:
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


def renew(change: Change, classes: Iterable[str] = ()) -> None:
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
