"""The signing of sources: each manifest becomes a target of its class in an authority's repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cosmati.data.shards.manifest import MANIFEST_FILE, SourceManifest
from cosmati.data.shards.remote import Remote
from cosmati.data.shards.verify import MAX_INDEX_BYTES, source_urls
from cosmati.errors import DataError
from cosmati.provenance.authority.ceremony import taxonomy_of
from cosmati.provenance.authority.errors import OutOfScopeError
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import SourceName
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.signing import sign_sources_of_class
from cosmati.provenance.authority.taxonomies import read_taxonomies, refuse_other_class


def sign_sources(url: str, authority: Path, ring: KeyRing) -> Iterator[tuple[SourceName, str]]:
    """Sign the manifests of a data set's sources, and yield each name with what came of it.

    Args:
        url: of the data set, or of one source.
        authority: folder of its repository.
        ring: the keys at hand: those of the classes, and the repository's snapshot and timestamp.

    Raises:
        DataError: a source has no manifest.
        ProvenanceError: the taxonomy has no such class, nobody may sign it, or a key isn't here.
    """
    repository = AuthorityRepository(authority)
    by_class: dict[str, dict[SourceName, bytes]] = {}
    chain = repository.chain()
    taxonomy = taxonomy_of(repository, chain)
    for source in source_urls(url):
        remote = Remote(source)
        if not remote.exists(MANIFEST_FILE):
            raise DataError(f"{source} has no {MANIFEST_FILE}, so there's nothing to sign. `cosmati data write` does.")
        data = remote.read(MANIFEST_FILE, max_bytes=MAX_INDEX_BYTES)
        manifest = SourceManifest.from_bytes(data, name=f"{source}/{MANIFEST_FILE}")
        refuse_other_class(taxonomy, manifest.class_path, lambda: read_taxonomies(chain, repository.target))
        name = SourceName(taxonomy.name, manifest.class_path, manifest.source, manifest.source_version)
        by_class.setdefault(manifest.class_path, {})[name] = data
    refused: list[OutOfScopeError] = []
    for class_path, manifests in by_class.items():
        try:
            yield from sign_sources_of_class(repository, ring, class_path, manifests).items()
        except OutOfScopeError as error:  # somebody else's to sign
            refused.append(error)
            yield from dict.fromkeys(manifests, f"not signed: {error}").items()
    if refused and len(refused) == len(by_class):
        raise refused[0]
