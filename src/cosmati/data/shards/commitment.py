"""What a write of a data set commits to: its inputs by digest, and everything that is said of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import rfc8785

from cosmati.data.shards.manifest import SourceFacts

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_MAX_NAMED = 3
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)\Z")


@dataclass(frozen=True)
class Commitment:
    """Rows belong to exactly one of these, and it never changes.

    Attributes:
        inputs: SHA-256 in hex of each input, by its name.
        facts: where the rows come from, and whose they are.
        reading: how inputs become rows, and of which class: names and values.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    facts: SourceFacts = field(default_factory=SourceFacts)
    reading: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as it's noted."""
        facts = self.facts.model_dump(mode="json")
        return {"inputs": dict(self.inputs), "facts": facts, "reading": dict(self.reading)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Commitment:
        """Read what `to_json` gave."""
        return cls(entry["inputs"], SourceFacts.model_validate_json(json.dumps(entry["facts"])), entry["reading"])

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex."""
        return hashlib.sha256(rfc8785.dumps(self.to_json())).hexdigest()

    def shared(self, other: Commitment) -> list[str]:
        """Return the names of inputs whose content is among the other's; empty files count for nothing."""
        theirs = {*other.inputs.values()} - {_EMPTY_SHA256}
        return sorted(name for name, digest in self.inputs.items() if digest in theirs)

    def renewed(self, other: Commitment) -> list[str]:
        """Return the names of inputs that the other has with other bytes, compressed or not."""
        theirs = {uncompressed_name(name): digest for name, digest in other.inputs.items()}
        return sorted(name for name, mine in self.inputs.items() if theirs.get(uncompressed_name(name), mine) != mine)

    def differences(self, before: Commitment) -> list[str]:
        """Say how it differs from an earlier one, a phrase each."""
        facts = differences(before.facts.model_dump(mode="json"), self.facts.model_dump(mode="json"))
        return [*facts, *differences(before.reading, self.reading), *self._inputs(before)]

    def _inputs(self, before: Commitment) -> Iterator[str]:
        named = {
            "changed": [n for n in self.inputs if before.inputs.get(n, self.inputs[n]) != self.inputs[n]],
            "new": [n for n in self.inputs if n not in before.inputs],
            "gone": [n for n in before.inputs if n not in self.inputs],
        }
        for what, names in named.items():
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            if names:
                yield f"{what} input {', '.join(sorted(names)[:_MAX_NAMED])}{more}"


def uncompressed_name(name: str) -> str:
    """Return an input's name without the suffix of a compression."""
    return _COMPRESSED.sub("", name)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each name whose values differ: "licence 'contract 12', was 'MIT'"."""
    names = [name for name in {**now, **before} if _plain(before.get(name)) != _plain(now.get(name))]
    return [f"{name} {_say(now.get(name))}, was {_say(before.get(name))}" for name in names]


def _plain(value: object) -> object:
    return value or None


def _say(value: object) -> str:
    return repr(value) if value else "not given"
