"""A taxonomy: the published, versioned tree of classes that data may belong to.

A class is a leaf, named by its path (`open/permissive`); its id is its place in the canonical order, so an id
means something only together with the taxonomy's digest. Branches (`open`) group classes for policies and
hold no data.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import rfc8785

from cosmati.errors import ProvenanceError

_SEGMENT = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True)
class Taxonomy:
    """A versioned tree of classes.

    Args:
        name: name of the taxonomy, `[a-z0-9-]+`.
        version: version as published; any change of the tree wants a new one.
        meanings: what each class means, as (path, text) pairs in any order; kept in canonical order, which is
            by path, segment by segment.
        sensitive: classes, or branches for all classes below them, of which a ledger measures nothing in the open.

    Raises:
        ProvenanceError: no class, a bad name, a class given twice, a class that has classes below it, or a sensitive
            one that isn't there.
    """

    name: str
    version: str
    meanings: tuple[tuple[str, str], ...]
    sensitive: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.meanings, key=lambda pair: pair[0].split("/")))
        object.__setattr__(self, "meanings", ordered)
        object.__setattr__(self, "sensitive", tuple(sorted({*self.sensitive})))
        problems = _problems(self.name, self.version, [path for path, _ in ordered])
        problems += [
            f"{path!r} is called sensitive, and is neither a class nor a branch{closest(path, self.classes)}"
            for path in self.sensitive
            if not (self.contains(path) or self.is_branch(path))
        ]
        if problems:
            msg = f"Taxonomy {self.name!r} can't be used:\n" + "\n".join(f"  - {problem}" for problem in problems)
            raise ProvenanceError(msg)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Taxonomy:
        """Read a taxonomy from `{"name", "version", "classes": tree}`; a tree's leaves are the meanings.

        It may have `"sensitive": [class or branch, ...]` besides.

        Raises:
            ProvenanceError: a field is missing, unknown or of another type.
        """
        if {*mapping} - {"sensitive"} != {"name", "version", "classes"}:
            msg = f"A taxonomy has the fields name, version and classes, and may have sensitive, not {sorted(mapping)}."
            raise ProvenanceError(msg)
        sensitive = mapping.get("sensitive", [])
        if not isinstance(sensitive, list) or not all(isinstance(one, str) for one in sensitive):
            msg = f"A taxonomy's sensitive classes are a list of their names, not {sensitive!r:.80}. Write one."
            raise ProvenanceError(msg)
        name, version = mapping["name"], mapping["version"]
        if not isinstance(name, str) or not isinstance(version, str):
            msg = f"A taxonomy's name and version are strings, not {name!r} and {version!r}. Quote them."
            raise ProvenanceError(msg)
        return cls(name, version, tuple(_leaves("", mapping["classes"])), tuple(sensitive))

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain form that `from_mapping` reads and `digest` covers."""
        tree: dict[str, Any] = {}
        for path, meaning in self.meanings:
            *branches, leaf = path.split("/")
            node = tree
            for branch in branches:
                node = node.setdefault(branch, {})
            node[leaf] = meaning
        more = {"sensitive": list(self.sensitive)} if self.sensitive else {}
        return {"name": self.name, "version": self.version, "classes": tree, **more}

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Paths of all classes in canonical order; the index is the class id."""
        return tuple(path for path, _ in self.meanings)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the canonical JSON (RFC 8785) of `to_mapping`; 32 bytes."""
        return hashlib.sha256(rfc8785.dumps(self.to_mapping())).digest()

    def contains(self, path: str) -> bool:
        """Return whether a path is a class. A branch is none."""
        return path in self._ids

    def is_branch(self, path: str) -> bool:
        """Return whether there are classes below a path."""
        return any(name.startswith(f"{path}/") for name in self.classes)

    def id_of(self, path: str) -> int:
        """Return the id of a class.

        Raises:
            ProvenanceError: the path is a branch, or unknown.
        """
        if path in self._ids:
            return self._ids[path]
        if self.is_branch(path):
            below = ", ".join(name for name in self.classes if name.startswith(f"{path}/"))
            msg = f"{path!r} is a branch of taxonomy {self.name!r}, not a class. Name one of: {below}."
        else:
            msg = f"Taxonomy {self.name!r} has no class {path!r}{closest(path, self.classes)}"
        raise ProvenanceError(msg)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {path: index for index, path in enumerate(self.classes)}


def software_licences() -> Taxonomy:
    """Return the built-in taxonomy of software and content licences; `licences.classify_licence` fills it."""
    meanings = {
        "public-domain": "Dedicated to the public domain, or with all rights waived (CC0-1.0, Unlicense).",
        "open/permissive": "Free with at most attribution and notices (MIT, BSD, Apache-2.0, CC-BY).",
        "open/psf": "Python's own licences (PSF-2.0, Python-2.0, CNRI-Python).",
        "open/weak-copyleft": "Changes to the work itself stay under the licence; works that use it need not "
        "(LGPL, MPL, EPL, GPL with a linking exception).",
        "open/copyleft": "Derived works stay under the licence (GPL, AGPL, EUPL, CC-BY-SA).",
        "restricted": "Published, with fields of use or derived works denied (BUSL, SSPL, CC-BY-NC).",
        "proprietary": "All rights reserved, or by contract only.",
        "unknown": "No licence was found, or none that could be read.",
    }
    return Taxonomy("software-licences", "1", tuple(meanings.items()))


def closest(name: str, known: tuple[str, ...]) -> str:
    """Return the end of a sentence about an unknown name: the names that come close, or all of them."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else f". There are: {', '.join(known) or 'none'}."


def _leaves(prefix: str, tree: object) -> list[tuple[str, str]]:
    if isinstance(tree, str) and prefix:
        return [(prefix, tree)]
    if not isinstance(tree, Mapping) or not tree:
        msg = f"The classes below {prefix or 'the root'!r} are {tree!r}. Write a mapping, or a class's meaning."
        raise ProvenanceError(msg)
    return [leaf for key, below in tree.items() for leaf in _leaves(f"{prefix}/{key}" if prefix else str(key), below)]


def _problems(name: str, version: str, paths: list[str]) -> list[str]:
    found = [] if paths else ["it has no class"]
    if not _SEGMENT.fullmatch(name):
        found.append(f"its name {name!r} isn't of the form [a-z0-9-]+")
    if not version:
        found.append("its version is empty")
    found += [
        f"class {path!r}: use [a-z0-9-]+ between slashes"
        for path in paths
        if not all(_SEGMENT.fullmatch(part) for part in path.split("/"))
    ]
    found += [f"class {path!r} is given twice" for path in sorted({path for path in paths if paths.count(path) > 1})]
    found += [
        f"{path!r} is a class and has classes below it; move its data into a class of its own"
        for path in sorted(set(paths))
        if any(other.startswith(f"{path}/") for other in paths)
    ]
    return found
