"""What the people of an authority do: name who signs what, for how long, and take it back."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, TargetFile, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.errors import OutOfScopeError
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import (
    TOP_ROLES,
    SourceName,
    check_taxonomy,
    class_of_role,
    pattern_of,
    role_of,
    taxonomy_target,
)
from cosmati.provenance.authority.repository import (
    AuthorityRepository,
    RepositoryChange,
    TooFewSignaturesError,
    publish_taxonomy,
)
from cosmati.provenance.authority.taxonomies import TaxonomyChange, compare, read_taxonomies
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
        is_class: whether it's a class, which may be called as a top role is.
    """

    role: str
    keyids: tuple[str, ...]
    threshold: int
    version: int | None
    expires: datetime | None
    num_targets: int = 0
    problem: str = ""
    is_class: bool = False


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
    repository = repository or AuthorityRepository(folder)
    repository.refuse_one()
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
    return next(read_taxonomies(chain, repository.target))


def publish(
    change: RepositoryChange,
    before: Taxonomy,
    after: Taxonomy,
    *,
    withdraw: Collection[str] = (),
    reword: Collection[str] = (),
) -> TaxonomyChange:
    """Publish a new version of the taxonomy; return what is different in it.

    Nobody signs a withdrawn class any more, and what was signed of it isn't vouched for. What was signed of the others
    stays as it is, whichever version it was signed under.

    Args:
        change: of the repository.
        before: the newest version.
        after: the one that takes its place.
        withdraw: the classes that it lacks: said, since whoever has data of them can't open them any more.
        reword: the classes that it gives other words: said, since their signers signed the old ones.

    Raises:
        ProvenanceError: it has another name, or a version that was published; others are withdrawn or reworded than it
            was said.
    """
    assert change.chain is not None
    check_taxonomy(after)
    path = taxonomy_target(after.name, after.version)
    if after.name != before.name:
        msg = f"The authority's taxonomy is called {before.name!r}, and not {after.name!r}. Keep its name."
        raise ProvenanceError(msg)
    if path in change.targets().targets:
        raise ProvenanceError(f"{after.name} {after.version} was published already. Give the new one another version.")
    difference = compare(before, after)
    _refuse_unsaid("withdraw", difference.withdrawn, withdraw, change.chain)
    _refuse_unsaid("reword", difference.reworded, reword, change.chain)
    change.delegations()
    for name in difference.withdrawn:
        _drop(change, role_of(name))
    publish_taxonomy(change, after)
    return difference


def _refuse_unsaid(option: str, found: Sequence[str], said: Collection[str], chain: Chain) -> None:
    for name in said:
        if name not in found:
            raise ProvenanceError(f"The new version doesn't {option} {name!r}. Leave --{option} {name} out.")
    unsaid = [name for name in found if name not in said]
    if unsaid:
        named = ", ".join(f"{name} (signed sources: {num_signed(chain, name)})" for name in unsaid)
        options = " ".join(f"--{option} {name}" for name in unsaid)
        why = {
            "withdraw": "lacks classes, whose data nobody can open with this authority any more",
            "reword": "has other words for classes, and their signers have signed the old ones",
        }[option]
        raise ProvenanceError(f"The new version {why}: {named}. Restore them, or say that it's meant: {options}.")


def num_signed(chain: Chain, class_path: str) -> int:
    """Return how many sources of a class are signed."""
    found = chain.targets.get(role_of(class_path))
    return len(found.signed.targets) if found else 0


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
        roles = [role for role in (name if name in TOP_ROLES else "", role_of(name)) if role in _signed_roles(chain)]
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
        is_class = bool(class_of_role(role))
        found.append(RoleStatus(name, tuple(named.keyids), named.threshold, version, expires, num, problem, is_class))
    return sorted(
        found, key=lambda one: (one.expires is None, one.expires or datetime.max.replace(tzinfo=UTC), one.role)
    )


def sign_source(repository: AuthorityRepository, ring: KeyRing, name: SourceName, manifest: bytes) -> str:
    """Sign one source: see `sign_sources_of_class`."""
    return sign_sources_of_class(repository, ring, name.class_path, {name: manifest})[name]


def sign_sources_of_class(
    repository: AuthorityRepository, ring: KeyRing, class_path: str, manifests: Mapping[SourceName, bytes]
) -> dict[SourceName, str]:
    """Sign sources of a class with the keys at hand, and publish them once enough people have; return what came of it.

    They're signed together: what one person has signed of them waits for the next one as a whole.

    Raises:
        OutOfScopeError: nobody may sign the class, or none of the keys at hand may.
        ProvenanceError: another manifest was signed under a version, or the repository's own keys aren't here.
    """
    role, chain = role_of(class_path), repository.chain()
    delegation = _delegation(chain, class_path, ring)
    now = repository.clock()
    metadata = chain.targets.get(role)
    before = metadata.signed.targets if metadata else {}
    for name, manifest in manifests.items():
        _refuse_another(before.get(name.target), name, manifest)
    holds = metadata is not None and not metadata.signed.is_expired(now)
    new = {name: data for name, data in manifests.items() if not holds or name.target not in before}
    states = dict.fromkeys(manifests, "was signed already")
    if not new:
        return states
    pending = repository.folder / "pending" / f"{role}.json"
    until = repository.lifetimes.until(role, now) + _CLOCKS_DIFFER
    try:
        with repository.change(ring) as change:
            for name, data in new.items():
                change.add_target(role, name.target, data)
            change.take_over(role, pending, now=now, until=until)
    except TooFewSignaturesError as error:
        if error.role != role:
            raise
        replace_files(repository.folder, {f"pending/{role}.json": error.metadata.to_bytes()})
        have = f"{len(error.metadata.signatures)} of {delegation.threshold} signatures"
        return states | dict.fromkeys(new, f"{have}; the next one runs the same command")
    pending.unlink(missing_ok=True)
    lost = chain.problems.get(role)
    said = "signed" if lost is None else f"signed, and nothing that was signed before in its class: {lost}"
    return states | dict.fromkeys(new, said)


def _delegation(chain: Chain, class_path: str, ring: KeyRing) -> DelegatedRole:
    """Return who may sign a class, of whom one has a key here."""
    delegations = chain.delegations.delegations
    found = (delegations.roles or {}).get(role_of(class_path)) if delegations else None
    if found is None:
        raise OutOfScopeError(f"Nobody may sign {class_path!r} yet. Run `cosmati keys delegate` for it.")
    if not ring.num_of(found.keyids):
        may = ", ".join(keyid[:12] for keyid in found.keyids)
        raise OutOfScopeError(f"None of the keys here may sign {class_path!r}: {may} may. Give theirs with --keys.")
    return found


def _refuse_another(before: TargetFile | None, name: SourceName, manifest: bytes) -> None:
    if before is not None and before.hashes["sha256"] != hashlib.sha256(manifest).hexdigest():
        msg = (
            f"{name.source} {name.version} was signed with another manifest ({before.hashes['sha256'][:16]}). What was "
            "signed stays: write the changed source under a new version."
        )
        raise ProvenanceError(msg)
