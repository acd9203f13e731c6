"""What the people of an authority do: name who signs what, for how long, and take it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import (
    POLICY_PATH,
    TOP_ROLES,
    PolicyName,
    check_taxonomy,
    class_of_role,
    pattern_of,
    role_of,
    taxonomy_target,
)
from cosmati.provenance.authority.repository import (
    AuthorityRepository,
    RepositoryChange,
    publish_taxonomy,
)
from cosmati.provenance.authority.taxonomies import TaxonomyChange, compare, read_taxonomies
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
    folder: Path,
    keys: Path,
    taxonomy: Taxonomy | None,
    *,
    passphrase: str = "",
    repository: AuthorityRepository | None = None,
    is_rehearsal: bool = False,
) -> str:
    """Make an authority: three keys for its root, of which two must sign, one for each other role, and its repository.

    Args:
        folder: of the repository, which may be published.
        keys: folder of the private keys, which may not. The root's belong to three people: move them apart.
        taxonomy: the classes; None for an authority for policies, which has none.
        passphrase: of the keys; empty for none.
        repository: in place of one with the usual lifetimes.
        is_rehearsal: all of its keys are made for show; its first root says so, and whoever reads a run is told.

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
    return repository.create(taxonomy, made, root_threshold=ROOT_THRESHOLD, ring=ring, is_rehearsal=is_rehearsal)


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
        named = (name, role_of(name), f"{POLICY_PATH}.{name}")
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
        is_class = bool(class_of_role(role))
        found.append(RoleStatus(name, tuple(named.keyids), named.threshold, version, expires, num, problem, is_class))
    return sorted(
        found, key=lambda one: (one.expires is None, one.expires or datetime.max.replace(tzinfo=UTC), one.role)
    )
