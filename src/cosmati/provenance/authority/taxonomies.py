"""The versions of a taxonomy that an authority has published: the newest says which classes there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tuf.api.metadata import TargetFile, Targets

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.errors import InconsistentMetadataError, UnknownClassError, WithdrawnClassError
from cosmati.provenance.authority.names import TAXONOMY_PATH
from cosmati.provenance.taxonomy import Taxonomy

NUMBER = "number"
"""Says, signed with a taxonomy's digest, which came after which: versions are words."""


def number_of(info: TargetFile) -> int:
    """Return which of an authority's taxonomies one is, from 1; 0 where it doesn't say."""
    number = (info.custom or {}).get(NUMBER, 0)
    return number if isinstance(number, int) else 0


def published(targets: Targets) -> list[TargetFile]:
    """Return the taxonomies that an authority has signed, the newest last."""
    signed = [info for path, info in targets.targets.items() if path.startswith(f"{TAXONOMY_PATH}/")]
    return sorted(signed, key=number_of)


def read_taxonomies(chain: Chain, content: Callable[[TargetFile], bytes]) -> Iterator[Taxonomy]:
    """Read an authority's taxonomies, the newest first.

    Args:
        chain: its metadata.
        content: returns a target's content; raises where it's missing, or isn't what was signed.

    Raises:
        InconsistentMetadataError: it has signed none.
        UntrustedRootError: it's an authority for policies.
    """
    chain.check_kind(policies=False)
    signed = published(chain.delegations)
    if not signed:
        raise InconsistentMetadataError("The authority has published no taxonomy. Ask it to make its repository anew.")
    for info in reversed(signed):
        yield Taxonomy.from_mapping(json.loads(content(info)))


def refuse_other_class(taxonomy: Taxonomy, path: str, earlier: Callable[[], Iterable[Taxonomy]]) -> None:
    """Refuse a class that an authority's newest taxonomy lacks.

    Args:
        taxonomy: the newest.
        path: of the class.
        earlier: reads the others, the newest first.

    Raises:
        WithdrawnClassError: an earlier one had it.
        UnknownClassError: none had.
    """
    if taxonomy.contains(path):
        return
    last = next((one for one in earlier() if one.contains(path)), None)
    if last is None:
        try:
            taxonomy.id_of(path)  # says which are near
        except ProvenanceError as error:
            raise UnknownClassError(str(error)) from error
    assert last is not None, "it's unknown"
    to = compare(last, taxonomy).moved.get(path)
    mend = f"It has moved to {to!r}: write its sources" if to else "Leave its sources out, or write them"
    msg = (
        f"The class {path!r} was withdrawn: {taxonomy.name} {last.version} was the last version that had it, and "
        f"{taxonomy.version} is the newest. {mend} again under a class that there is, and have its people sign them."
    )
    raise WithdrawnClassError(msg)


@dataclass(frozen=True)
class TaxonomyChange:
    """What is different in a later version of a taxonomy.

    Attributes:
        added: classes that the earlier one lacks.
        withdrawn: classes that the later one lacks.
        reworded: classes that have another meaning.
        moved: of the withdrawn ones those whose meaning an added one has, with that one.
    """

    added: tuple[str, ...]
    withdrawn: tuple[str, ...]
    reworded: tuple[str, ...]
    moved: dict[str, str]


def compare(before: Taxonomy, after: Taxonomy) -> TaxonomyChange:
    """Compare two versions of a taxonomy."""
    old, new = dict(before.meanings), dict(after.meanings)
    added = tuple(path for path in after.classes if path not in old)
    withdrawn = tuple(path for path in before.classes if path not in new)
    reworded = tuple(path for path in after.classes if path in old and old[path] != new[path])
    moved = {path: to for path in withdrawn for to in added if old[path] and old[path] == new[to]}
    return TaxonomyChange(added, withdrawn, reworded, moved)
