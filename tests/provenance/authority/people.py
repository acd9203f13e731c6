"""An authority with its people, in a folder: who they are, and what they sign."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cosmati.provenance.authority import ceremony, signing
from cosmati.provenance.authority.keys import KeyRing, create_key
from cosmati.provenance.authority.names import SourceName, metadata_file
from cosmati.provenance.authority.repository import AuthorityRepository, Lifetimes
from cosmati.provenance.taxonomy import Taxonomy

NEWS, PII = "licensed/news", "customer/pii"
TAXONOMY = Taxonomy("firm", "1", ((NEWS, "Bought."), (PII, "Of customers."), ("public-domain", "Nobody's.")))


@dataclass
class People:
    """An authority's folders and keys.

    Attributes:
        root: folder that all of it is in.
        days: that the clock of who signs is ahead.
    """

    root: Path
    days: int = 0
    pin: str = ""
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.root / "authority"

    @property
    def repository(self) -> AuthorityRepository:
        return AuthorityRepository(self.folder, Lifetimes(), lambda: datetime.now(UTC) + timedelta(days=self.days))

    def begin(self) -> People:
        self.pin = ceremony.init(self.folder, self.root / "own", TAXONOMY, repository=self.repository)
        return self

    def person(self, name: str) -> Any:
        self.keys[name] = create_key(self.root / name, name)
        return self.keys[name]

    def ring(self, *names: str) -> KeyRing:
        return KeyRing([self.root / "own", *(self.root / name for name in names)])

    def delegate(self, path: str, *names: str, threshold: int = 1) -> None:
        people = [self.keys.get(name) or self.person(name) for name in names]
        with self.repository.change(self.ring()) as change:
            ceremony.delegate(change, TAXONOMY, path, people, threshold=threshold)

    def sign(self, path: str, *names: str, source: str = "s", version: str = "1", data: bytes = b"manifest") -> str:
        return signing.sign_source(self.repository, self.ring(*names), name_of(path, source, version), data)

    def file(self, role: str) -> Path:
        """Return the newest metadata of a role."""
        if role == "timestamp":
            return self.folder / metadata_file(role, None)
        found = (self.folder / "metadata").glob(f"*.{role}.json")
        return max(found, key=lambda path: int(path.name.partition(".")[0]))

    def edit(self, role: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change what is signed, and leave the signatures as they were."""
        content = json.loads(self.file(role).read_bytes())
        change(content["signed"])
        self.file(role).write_text(json.dumps(content))


def name_of(path: str, source: str = "s", version: str = "1") -> SourceName:
    return SourceName(TAXONOMY.name, path, source, version)
