"""How an authority stands: who may sign what, who no more, and what wants doing next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cosmati.provenance.authority.ceremony import RoleStatus, status, taxonomy_of
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.names import METADATA, class_of_role
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.taxonomies import published
from cosmati.provenance.taxonomy import Taxonomy

_SOON = timedelta(days=14)


@dataclass(frozen=True)
class Standing:
    """An authority at one time.

    Attributes:
        root: SHA-256 of its first root, in hex.
        now: when that was.
        taxonomy: the newest; None where it has published none.
        roles: who signs what, what expires first ahead.
        former: ids of keys that could sign once, and may no more.
        signed: the classes of which something was signed, whoever may sign them now.
        is_rehearsal: all of its keys were made for show.
    """

    root: str
    now: datetime
    taxonomy: Taxonomy | None
    roles: tuple[RoleStatus, ...]
    former: tuple[str, ...]
    signed: frozenset[str]
    is_rehearsal: bool = False

    @property
    def next(self) -> RoleStatus | None:
        """What expires next, of what hasn't; None where all has."""
        return next((one for one in self.roles if one.expires and one.expires > self.now), None)

    @property
    def unsigned(self) -> tuple[str, ...]:
        """The classes that nobody may sign."""
        signed = {one.role for one in self.roles if one.is_class}
        return tuple(path for path in (self.taxonomy.classes if self.taxonomy else ()) if path not in signed)

    @property
    def lapsed(self) -> tuple[str, ...]:
        """The classes of which something was signed that isn't trusted, since nobody may sign them any more."""
        return tuple(path for path in self.unsigned if path in self.signed)

    @property
    def keys(self) -> dict[str, list[RoleStatus]]:
        """What each key may sign, by its id."""
        found: dict[str, list[RoleStatus]] = {}
        for one in sorted(self.roles, key=lambda one: (one.is_class, one.role)):
            for keyid in one.keyids:
                found.setdefault(keyid, []).append(one)
        return found


def standing(repository: AuthorityRepository) -> Standing:
    """Return how an authority stands now.

    Raises:
        ProvenanceError: there's no repository, or its root doesn't verify.
    """
    chain, roles = repository.chain(), tuple(status(repository))
    taxonomy = taxonomy_of(repository, chain) if published(chain.delegations) else None
    still = {keyid for one in roles for keyid in one.keyids}
    former = tuple(keyid for keyid in dict.fromkeys(_ever(repository.folder, chain)) if keyid not in still)
    signed = frozenset(class_of_role(name.removesuffix(".json")) for name in chain.snapshot.signed.meta)
    return Standing(chain.first_root_sha256, repository.clock(), taxonomy, roles, former, signed, chain.is_rehearsal)


def _ever(folder: Path, chain: Chain) -> Iterator[str]:
    """Yield the ids of all keys that earlier metadata name, as they lie there: nothing is trusted for it."""
    for root in chain.roots:
        for role in root.signed.roles.values():
            yield from role.keyids
    for version in range(1, chain.delegations.version):
        try:
            named = json.loads((folder / METADATA / f"{version}.targets.json").read_bytes())["signed"]["delegations"]
            yield from [str(keyid) for role in named["roles"] for keyid in role["keyids"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # none yet; or files of versions that nobody needs any more were taken away


def is_due(one: RoleStatus, now: datetime, repository: AuthorityRepository) -> bool:
    """Return whether it's time to sign something anew: a quarter of its life is left, or two weeks, or none."""
    if one.expires is None:
        return False
    life = repository.lifetimes.until(f"class.{one.role}" if one.is_class else one.role, now) - now
    return one.expires - now < min(_SOON, life / 4)


def fold(paths: Sequence[str], taxonomy: Taxonomy | None) -> list[str]:
    """Return classes in few words: a branch whose classes are all there stands for them."""
    left, found = list(paths), []
    for branch in dict.fromkeys(path.partition("/")[0] for path in paths):
        below = [path for path in (taxonomy.classes if taxonomy else ()) if path.startswith(f"{branch}/")]
        if len(below) > 1 and set(below) <= set(left):
            found.append(f"{branch}/** ({len(below)})")
            left = [path for path in left if path not in below]
        else:
            found += [path for path in left if path == branch or path.startswith(f"{branch}/")]
    return found
