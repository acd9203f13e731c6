"""What was prepared before a run and shapes what it learns: where it came from, and whether anybody vouches for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cosmati.errors import ProvenanceError
from cosmati.provenance.voucher import VouchedData
from cosmati.records.artifacts import KINDS, SIGNED, UNGOVERNED, is_digest, words_of


@dataclass(frozen=True)
class Artifact:
    """A preparation artifact.

    Attributes:
        kind: one of `KINDS`.
        digest: of its content, in hex; empty where nobody can tell it.
        origin: where it's from: a URL, a name, a folder.
        name: tells it from others of its kind.
        vouched: who vouches for it; None leaves it ungoverned.
        sources: what they vouch for, so that a run can ask them again.

    Raises:
        ProvenanceError: there is no such kind, or the digest isn't hexadecimal.
    """

    kind: str
    digest: str
    origin: str = ""
    name: str = ""
    vouched: VouchedData | None = field(default=None, repr=False)
    sources: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            msg = f"{self.kind!r} is no kind of preparation artifact. Use one of {', '.join(KINDS)}."
            raise ProvenanceError(msg)
        if not is_digest(self.digest):
            msg = f"The digest of the {self.label} is {self.digest!r:.80}, and isn't hexadecimal, in lower case."
            raise ProvenanceError(msg)

    @property
    def label(self) -> str:
        """Its kind, and its name where it has one."""
        return f"{self.kind} {self.name}".rstrip()

    @property
    def state(self) -> str:
        """Whether it's signed or ungoverned."""
        return UNGOVERNED if self.vouched is None else SIGNED

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger's entry says of it."""
        told = {"kind": self.kind, "name": self.name, "digest": self.digest, "origin": self.origin, "state": self.state}
        return told if self.vouched is None else told | {"provenance": self.vouched.facts}

    def __str__(self) -> str:
        return words_of(self.facts)


def distinct(artifacts: Iterable[Artifact]) -> tuple[Artifact, ...]:
    """Return artifacts by their labels, in order.

    Raises:
        ProvenanceError: one is something else, or two have one label.
    """
    by_label: dict[str, Artifact] = {}
    for one in artifacts:
        if not isinstance(one, Artifact):
            msg = f"A {type(one).__name__} is no preparation artifact. Give artifact(kind, content) of it."
            raise ProvenanceError(msg)
        if by_label.setdefault(one.label, one) is not one:
            raise ProvenanceError(f"Two preparation artifacts are called {one.label!r}. Give each a name= of its own.")
    return tuple(by_label[label] for label in sorted(by_label))
